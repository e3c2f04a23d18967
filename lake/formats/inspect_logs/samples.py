"""Samples of Inspect logs as episodes; `lake.formats.inspect_logs.reader` says what becomes of what."""

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from lake.formats.base.fields import Scores, as_object, as_text, number, whole
from lake.formats.base.rows import rest
from lake.formats.base.secrets import without_secrets
from lake.formats.chat.messages import Conversation, Message, conversation
from lake.formats.inspect_logs.calls import answer_of, complete, finite, utc
from lake.formats.inspect_logs.events import Known, Transcript
from lake.formats.inspect_logs.messages import Resolve, chat_message, decisions_of, filled, key_of, list_of, resolver
from lake.records import EpisodeRecord, ScoreRecord, StepRecord

_GRADES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
"""correct, partial, incorrect, no answer"""
_PLACEHOLDER = "88F74D2C"
"""What the tool calls the scorer of a sample of version 1 whose log does not name it."""
_CUT = ("max_tokens", "model_length", "length")
"""Stop reasons of an answer that a limit cut."""


class _Pool(msgspec.Struct):
    """Messages that prompts refer to."""

    messages: list[Any] = []


class _Transcript(msgspec.Struct):
    """Events and attachments, as early logs have them."""

    events: list[Any] = []
    content: dict[str, str] = {}


class _Sample(msgspec.Struct):
    """What has to be of its type in a sample."""

    id: int | str
    epoch: Annotated[int, Meta(ge=1, le=2**31)]
    input: Any = None
    target: str | list[Any] | None = None
    messages: list[Any] = []
    output: dict[str, Any] = {}
    scores: dict[str, dict[str, Any]] | None = None
    score: dict[str, Any] | None = None
    events: list[Any] = []
    transcript: _Transcript | None = None
    attachments: dict[str, str] = {}
    events_data: _Pool | None = None
    error: dict[str, Any] | None = None
    error_retries: list[Any] | None = None
    limit: dict[str, Any] | None = None
    uuid: str | None = None
    started_at: str | None = None
    completed_at: str | None = None

    def __post_init__(self) -> None:
        """What early logs call otherwise goes where it is later."""
        if self.transcript is not None:
            self.events, self.attachments = self.transcript.events, self.transcript.content
        if self.scores is None:
            self.scores = {} if self.score is None else {_PLACEHOLDER: self.score}


class Header(msgspec.Struct, dict=True):
    """What a log says of its eval."""

    version: int
    eval: dict[str, Any]
    plan: dict[str, Any]
    scorer: str | None = None
    """Of logs of version 1, whose samples do not name it."""

    @cached_property
    def run_id(self) -> str | None:
        """A name to read: task, model, and the beginning of the eval's id."""
        known = {key: as_text(self.eval.get(key)) for key in ("eval_id", "task_id", "run_id")}
        ids = [known["eval_id"]] if known["eval_id"] else [known["task_id"], known["run_id"]]
        names = [as_text(self.eval.get("task")), as_text(self.eval.get("model"))]
        return "-".join(filter(None, [*names, *(name and name[:8] for name in ids)])) if any(ids) else None

    @cached_property
    def sampling(self) -> dict[str, Any]:
        """How the policy samples: what is set for the model, then what the task sets."""
        configs = (as_object(self.eval.get("model_generate_config")), as_object(self.plan.get("config")))
        return {key: value for config in configs for key, value in filled(without_secrets(config)).items()}

    @cached_property
    def about(self) -> dict[str, Any]:
        """What else there is to say; without the list of all samples, which every one of them would repeat."""
        known = ("task", "model", "model_generate_config", "dataset", "scorers", "metrics", "viewer")
        about = _unrepeated(filled(self.eval, *known))
        about |= filled({"dataset": filled(as_object(self.eval.get("dataset")), "sample_ids")})
        steps = [_unrepeated(as_object(step)) for step in list_of(self.plan.get("steps"))]
        found: dict[str, Any] = without_secrets(filled({"eval": about, "plan": steps}))
        return found

    @property
    def has_one_scorer(self) -> bool:
        """Whether it does not name several."""
        scorers = self.eval.get("scorers")
        return not isinstance(scorers, list) or len(scorers) <= 1

    def scorer_of(self, name: str) -> str:
        """The scorer's name of a score that is called so in a sample."""
        return (self.scorer or "score") if name == _PLACEHOLDER else name

    @property
    def source_version(self) -> str:
        """The version of the tool, or of the log."""
        return as_text(as_object(self.eval.get("packages")).get("inspect_ai")) or f"log {self.version}"


def _unrepeated(said: dict[str, Any]) -> dict[str, Any]:
    """An object without its empty fields, and without `X_passed` where all of `X` was passed."""
    return {k: v for k, v in filled(said).items() if not k.endswith("_passed") or v != said.get(k[: -len("_passed")])}


def to_record(value: Any, header: Header) -> EpisodeRecord:
    """One sample as an episode.

    Raises:
        msgspec.ValidationError: wrong keys or types.
        ShapeError: a message, call, event or score that is none.
    """
    # Some writers spell out what there is none of.
    sample = msgspec.convert(rest(value) if isinstance(value, dict) else value, _Sample)
    resolve = resolver(sample.attachments)
    trace_id = sample.uuid or f"{sample.id}_epoch_{sample.epoch}"
    transcript = Transcript(trace_id, sample.events, sample.error_retries or (), resolve)
    given, chat = _chat(sample, transcript, resolve)
    acting = [given[place] for place in chat.places]
    scores = {header.scorer_of(name): resolve(score) for name, score in (sample.scores or {}).items()}
    output = _output(sample.output, acting, chat.steps, resolve)
    known = Known(given, list((sample.scores or {}).values()), sample.target, sample.error or {}, header.sampling)
    transcript.tell(chat.steps, acting, known, sample.events_data.messages if sample.events_data else ())
    first, last = transcript.times()
    extra = filled(value, *_Sample.__struct_fields__) | {
        "input": _input(sample.input, chat.initial_messages, resolve),
        "output": output,
        "message_ids": _ids(given),
        "uuid": sample.uuid,
        "limit": sample.limit,
        "error": filled(sample.error or {}, "message", "traceback_ansi"),
    }
    status, terminated, stop_reason = _end(sample, chat.steps)
    return EpisodeRecord(
        task_id=str(sample.id),
        run_id=header.run_id,
        rollout_index=sample.epoch - 1,
        attempt=len(sample.error_retries or ()),
        expected_group_size=whole(as_object(header.eval.get("config")).get("epochs")) or None,
        environment=as_text(header.eval.get("task")),
        policy=as_text(header.eval.get("model")),
        sampling=header.sampling or None,
        tools=list(transcript.tools.values()) or None,
        status=status,
        terminated=terminated,
        stop_reason=stop_reason,
        error=as_text((sample.error or {}).get("message")),
        env_return=_return(scores, header),
        scores=_scores(scores, transcript),
        ground_truth=sample.target or None,
        started_at=utc(sample.started_at) or first,
        ended_at=utc(sample.completed_at) or last,
        prompt_tokens=_sum(chat.steps, "prompt_tokens"),
        completion_tokens=_sum(chat.steps, "completion_tokens"),
        cost=_sum(chat.steps, "cost"),
        source_version=header.source_version,
        initial_messages=chat.initial_messages,
        final_observation=chat.final_observation,
        steps=chat.steps,
        spans=transcript.spans,
        extra=resolve(filled(extra)) | header.about or None,
    )


def _chat(sample: _Sample, transcript: Transcript, resolve: Resolve) -> tuple[list[Any], Conversation]:
    """The messages as they are given, and as decisions.

    A solver may leave what the model said in `output` alone: where no message is a decision, that is one.
    """
    given = sample.messages
    decisions = decisions_of(given, transcript.generated)
    said = answer_of(sample.output)
    if not any(decisions) and (said.get("content") or said.get("tool_calls")):
        given, decisions = [*given, said], [*decisions, True]
    messages = [chat_message(message, f"messages[{index}]", resolve) for index, message in enumerate(given)]
    acting = {id(message) for message, decides in zip(messages, decisions, strict=True) if decides}
    chat = conversation(messages, is_decision=lambda message: id(message) in acting)
    for step in chat.steps:
        extra = step.extra or {}
        step.model = as_text(extra.pop("model", None))
        step.extra = extra or None
        if any("parse_error" in call for call in step.tool_calls or ()):
            step.is_action_valid = False
    return given, chat


def _output(
    output: dict[str, Any], acting: Sequence[Any], steps: Sequence[StepRecord], resolve: Resolve
) -> dict[str, Any]:
    """What the sample's output says that neither the last decision nor its call does.

    If it is the last decision, it completes the step: logs of version 1 have no events.
    """
    said = answer_of(output)
    if not said:
        return filled(output, "model", "completion")
    if not acting or key_of(acting[-1], resolve) != key_of(said, resolve):
        return filled(output, "completion")
    complete(steps[-1], output, resolve)
    return filled({"choices": output["choices"][1:]})


def _ids(given: Sequence[Any]) -> list[Any] | None:
    """Ids of the messages; None before there were any."""
    ids = [message.get("id") for message in given]
    return ids if any(ids) else None


def _input(given: Any, messages: Sequence[Message], resolve: Resolve) -> Any:
    """The input, unless the conversation begins with it: solvers rewrite it."""
    if isinstance(given, str):
        said = [message.get("content") for message in messages if message["role"] == "user"]
        return None if resolve(given) in said else resolve(given)
    if not isinstance(given, list):
        return given
    wanted = [chat_message(message, f"input[{index}]", resolve) for index, message in enumerate(given)]
    seen = [rest(message, "source") for message in messages]
    return [message for message in wanted if rest(message, "source") not in seen]


def _end(sample: _Sample, steps: Sequence[StepRecord]) -> tuple[str, bool | None, str | None]:
    """status, terminated and stop_reason."""
    last = steps[-1].finish_reason if steps else None
    if sample.error is not None:
        return "failed", None, None
    if sample.limit is not None:
        kind = as_text(sample.limit.get("type"))
        return ("aborted", None, kind) if kind == "operator" else ("truncated", False, kind)
    return ("truncated", False, last) if last in _CUT else ("completed", True, last)


def _scores(given: dict[str, dict[str, Any]], transcript: Transcript) -> list[ScoreRecord]:
    scores = Scores()
    for name, score in given.items():
        _add(scores, name, score, None)
    for scorer, score, step_index in transcript.scores:
        _add(scores, scorer, score, step_index)
    return scores.records


def _add(scores: Scores, name: str, score: dict[str, Any], step_index: int | None) -> None:
    """Add a score, and each part of one that has several."""
    value = score.get("value")
    metrics = filled(score, "value", "explanation")
    if isinstance(value, bool | str | dict | list):
        metrics["value"] = value
    reason = score.get("explanation")
    scores.add(name, _number(value), step_index=step_index, reason=reason, metrics=metrics)
    for key, part in value.items() if isinstance(value, dict) else ():
        more = {"value": part} if isinstance(part, bool | str) else None
        scores.add(f"{name}.{key}", _number(part), step_index=step_index, metrics=more)


def _number(value: Any) -> float | None:
    return _GRADES.get(value) if isinstance(value, str) else number(value)


def _return(scores: dict[str, dict[str, Any]], header: Header) -> float | None:
    """The score of the one scorer that there is."""
    if len(scores) != 1 or not header.has_one_scorer:
        return None
    return finite(_number(next(iter(scores.values())).get("value")))


def _sum(steps: Sequence[StepRecord], column: str) -> Any:
    """The sum of a column that all steps have: what the agent used, without graders."""
    values = [getattr(step, column) for step in steps]
    return sum(values) if values and None not in values else None
