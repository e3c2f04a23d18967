"""MassGen RL traces: `rl_data/traces/YYYYMMDD/{agent}/{trace_id}.json`, one JSON document a trace.

.. code-block:: text

    {trace_id, agent_id, task, spans[], metadata, start_time, end_time, duration, total_reward, status}
    spans: {span_id, span_type, timestamp, ...}; the README's have neither id nor time, and are called span-0, span-1
      prompt        input, output, model, input_tokens, output_tokens, reasoning
      content       content, source                  one for each piece of a stream
      reasoning     reasoning, source
      tool          tool_name, arguments, result, success, execution_time, error
      reward        reward, reward_type, reason
      coordination  action_type, action_data, agent_states, coordination_round

A trace is an episode. Its task is `task`, which the agents that worked on it and their further tries share; its sibling
number is made of trace_id, because a file knows of no other. A prompt span is a decision. Without any, a decision is
the run of content, reasoning and tool spans until text follows a tool: then the agent saw its result. Where there are
prompt spans, content and reasoning spans repeat them as they were streamed. A reward is a score, called by its type, of
the decision before it, or of the episode if there is none; several of a kind and place are one score, their sum, with
each of them in its metrics. `env_return` is `total_reward`.

A coordination trace (`metadata.coordination`) holds what the orchestrator saw: votes, new answers, restarts. These are
decisions of its agents, in traces of their own, so here they are spans, and the episode is an outcome. Its task is
called `coordination: TASK`: its rewards are on another scale than those of the agents, with which it would else be
compared. The tool writes rewards for votes into this trace; the agent that each is for becomes part of the scorer's
name, `voting:AGENT`.

A trace that `lake.live.massgen` recorded says more in its metadata: `messages` is what the agent was given, where the
tool keeps the task alone, and `input_tokens` and `output_tokens` are what its model counted.

A trace that our own export wrote names in `metadata.trajlake` the reward spans that are scores of ours, and the total
without them: these are scores alone here, so that the episode is the one that was exported.

Every span is kept whole in `attributes` of a span, in the order of `extra.massgen.spans`; all else that a trace says
stands in `extra.massgen.trace`, its `messages` as `initial_messages`: the file can be written again as it was.
`metadata/trace_index.json` repeats parts of all traces and holds none.

Source: massgen/rl of the MassGen repository (trace.py, spans.py, store.py, the mixins), 2025.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from lake.formats.base.documents import with_parts
from lake.formats.base.fields import Scores, as_object, as_text, finite, moment, number, sibling_number, whole
from lake.formats.base.format import Format
from lake.formats.base.look import Look
from lake.formats.base.rows import Item, ShapeError, items_of
from lake.formats.base.source import Input
from lake.formats.chat.messages import Message, conversation, tool_call
from lake.records import EpisodeRecord, ScoreRecord, SpanRecord, StepRecord

NAME = "massgen_traces"
_STATUSES = {"completed": "completed", "failed": "failed", "running": "aborted"}
INITIAL = "initial_messages"
"""Stands in `extra` for messages of the metadata, which are in the column of this name."""
OURS = "trajlake"
"""Key of the metadata under which our own export says what it added: {total_reward, rewards: {span_id: step_index}},
and `is_only_metadata` of a trace that had no metadata."""
_VOTER = re.compile(r"Agent (.+) voting accuracy reward\Z", re.DOTALL)


class _Span(msgspec.Struct):
    """What has to be of its type in a span."""

    span_type: str
    span_id: str = ""
    timestamp: float | str | None = None


class _Trace(msgspec.Struct):
    """What has to be of its type in a trace."""

    trace_id: Annotated[str, Meta(min_length=1)]
    agent_id: str
    task: str
    spans: list[dict[str, Any]] = []
    metadata: dict[str, Any] | None = None
    total_reward: float | None = None
    status: str | None = None


def recognise(look: Look) -> bool:
    """Whether a file is a trace: its spans say what type they are of."""
    if look.kind not in ("object", "lines", "array") or not look.has("trace_id", "agent_id", "task", "spans"):
        return False
    spans = look.first.get("spans")
    typed = isinstance(spans, list) and any("span_type" in span for span in spans if isinstance(span, dict))
    return typed or look.has("total_reward") or look.has("span_type")


def no_trajectory(look: Look) -> str | None:
    """What the index of the traces is."""
    traces, agents = look.first.get("traces"), look.first.get("agents")
    if look.first.keys() == {"traces", "agents"} and isinstance(traces, dict) and isinstance(agents, dict):
        about = next(iter(traces.values()), {"agent_id": "", "task": ""})
        if isinstance(about, dict) and {"agent_id", "task"} <= about.keys():
            return "it is MassGen's index of traces; ingest the folder `traces` beside it"
    return None


def read(file: Input) -> Iterator[Item]:
    """The trace of a file; of one that is cut, what it holds until then, and the reject that says so."""
    for item, is_part in with_parts(file, "spans"):
        for made in items_of(item, NAME, lambda value: [to_record(value)]):
            if is_part and isinstance(made, tuple):
                made[1].status = "aborted"
            yield made


def to_record(value: Any) -> EpisodeRecord:
    """A trace as an episode.

    Raises:
        msgspec.ValidationError: wrong keys or types.
        ShapeError: a span that lacks what its type needs.
    """
    value, ours = _without_ours(value)
    trace = msgspec.convert(value, _Trace)
    about = trace.metadata or {}
    talk = _Talk(trace)
    acts = frozenset(map(id, talk.acts))
    chat = conversation(talk.messages, is_decision=lambda message: id(message) in acts)
    for step, said in zip(chat.steps, talk.prompts, strict=True):
        step.model = as_text(said.get("model")) or as_text(about.get("model"))
        step.prompt_tokens, step.completion_tokens = whole(said.get("input_tokens")), whole(said.get("output_tokens"))
        step.started_at = moment(said.get("timestamp"))
    task, is_coordination = trace.task if trace.task.strip() else trace.trace_id, about.get("coordination") is True
    if not chat.steps and is_coordination and trace.spans:
        chat.steps = [StepRecord(state=None, action="", trainable=False)]
        talk.owners = [None] * len(trace.spans)
    spans = _spans(trace, talk.owners)
    rest_of_it = {key: item for key, item in value.items() if key != "spans"}
    if talk.is_given and chat.initial_messages:
        rest_of_it["metadata"] = about | {"messages": INITIAL}
    return EpisodeRecord(
        task_id=f"coordination: {task}" if is_coordination else task,
        agent_id=trace.agent_id or None,
        rollout_index=sibling_number(trace.trace_id),
        policy=as_text(about.get("model")),
        status=_STATUSES.get(trace.status or "", "completed"),
        terminated=True if trace.status == "completed" else None,
        stop_reason=trace.status,
        error=as_text(about.get("error")),
        env_return=trace.total_reward,
        scores=_with_ours(_scores(trace, talk.owners), ours, len(chat.steps)),
        started_at=moment(value.get("start_time")),
        ended_at=moment(value.get("end_time")),
        prompt_tokens=whole(about.get("input_tokens")),
        completion_tokens=whole(about.get("output_tokens")),
        initial_messages=chat.initial_messages,
        final_observation=chat.final_observation,
        steps=chat.steps,
        spans=spans,
        extra={"massgen": {"trace": rest_of_it, "spans": [span.span_id for span in spans]}},
    )


class _Talk:
    """The messages that the spans of a trace add up to."""

    def __init__(self, trace: _Trace) -> None:
        self.messages: list[Message] = []
        self.acts: list[Message] = []
        """Those of the messages that are decisions: what the agent was given may hold earlier answers."""
        self.prompts: list[dict[str, Any]] = []
        """Of each decision: the span that begins it."""
        self.owners: list[int | None] = []
        """Of each span: the decision that it is part of or comes after."""
        self._has_prompts = any(span.get("span_type") == "prompt" for span in trace.spans)
        self._early: list[dict[str, Any]] = []
        """Calls before the first decision that they could be of."""
        given = (trace.metadata or {}).get("messages")
        self.is_given = isinstance(given, list) and not self._has_prompts
        """Whether the messages begin with those that the agent was given."""
        if self.is_given:
            self.messages += given or ()
        elif not self._has_prompts and trace.task.strip():
            self.messages.append({"role": "user", "content": trace.task})
        self._acting: Message = {}
        for index, span in enumerate(trace.spans):
            self._add(span, f"spans[{index}]", _span_id(span, index))
            self.owners.append(len(self.prompts) - 1 if self.prompts else None)

    def _add(self, span: dict[str, Any], place: str, span_id: str) -> None:
        kind = span.get("span_type")
        if kind == "prompt":
            self.messages.append({"role": "user", "content": span.get("input")})
            self._begin(span, span.get("output"), span.get("reasoning"))
        elif kind == "tool":
            if not self._acting and not self._has_prompts:
                self._begin(span)
            name = span.get("tool_name")
            if not isinstance(name, str):
                raise ShapeError(f"`{place}.tool_name` is {name!r}; valid: the name of a tool")
            calls = self._acting.setdefault("tool_calls", []) if self._acting else self._early
            calls.append(tool_call(name, span.get("arguments"), span_id))
            if (result := _result(span, name, span_id)) is not None:
                self.messages.append(result)
        elif kind in ("content", "reasoning") and not self._has_prompts:
            if not self._acting or "tool_calls" in self._acting:
                self._begin(span)
            key = "content" if kind == "content" else "reasoning_content"
            if not isinstance(text := span.get(kind), str):
                raise ShapeError(f"`{place}.{kind}` is {type(text).__name__}; valid: text")
            self._acting[key] = (self._acting.get(key) or "") + text

    def _begin(self, span: dict[str, Any], text: Any = None, reasoning: Any = None) -> None:
        self._acting = {"role": "assistant", "content": text}
        if reasoning is not None:
            self._acting["reasoning_content"] = reasoning
        if self._early:
            self._acting["tool_calls"], self._early = self._early, []
        self.messages.append(self._acting)
        self.acts.append(self._acting)
        self.prompts.append(span)


def _span_id(span: dict[str, Any], index: int) -> str:
    """The id of a span; of one that has none, its place."""
    return as_text(span.get("span_id")) or f"span-{index}"


def _result(span: dict[str, Any], name: str, span_id: str) -> Message | None:
    """What a tool gave back; nothing if that was never written down."""
    result, error = span.get("result"), span.get("error")
    if result is None and error is None:
        return None
    given = error if result is None else result
    text = given if isinstance(given, str) else msgspec.json.encode(given).decode()
    message = {"role": "tool", "tool_call_id": span_id, "name": name, "content": text}
    return message | ({"is_error": True} if error is not None or span.get("success") is False else {})


def _spans(trace: _Trace, owners: Sequence[int | None]) -> list[SpanRecord]:
    """The spans of a trace, each whole; the second of an id has a number behind it."""
    records: list[SpanRecord] = []
    seen: dict[str, int] = {}
    for index, (given, owner) in enumerate(zip(trace.spans, owners, strict=True)):
        span = msgspec.convert(given, _Span)
        span_id = _span_id(given, index)
        seen[span_id] = again = seen.get(span_id, 0) + 1
        names = [as_text(given.get(key)) for key in ("tool_name", "reward_type", "action_type", "model")]
        records.append(
            SpanRecord(
                trace_id=trace.trace_id,
                span_id=span_id if again == 1 else f"{span_id}#{again}",
                kind=span.span_type,
                name=next((name for name in names if name), span.span_type),
                step_index=owner,
                started_at=moment(span.timestamp),
                error=as_text(given.get("error")),
                attributes=given,
            )
        )
    return records


def _scores(trace: _Trace, owners: Sequence[int | None]) -> list[ScoreRecord]:
    found: dict[tuple[str, int | None], list[dict[str, Any]]] = {}
    for span, owner in zip(trace.spans, owners, strict=True):
        if span.get("span_type") == "reward":
            scorer = as_text(span.get("reward_type")) or "reward"
            voter = _VOTER.match(span["reason"]) if scorer == "voting" and isinstance(span.get("reason"), str) else None
            found.setdefault((f"voting:{voter[1]}" if voter else scorer, owner), []).append(span)
    scores = Scores()
    for (scorer, owner), given in found.items():
        if len(given) == 1:
            scores.add(scorer, given[0].get("reward"), step_index=owner, reason=given[0].get("reason"))
            continue
        known = [value for span in given if (value := number(span.get("reward"))) is not None]
        each = [{key: span.get(key) for key in ("span_id", "reward", "reason")} for span in given]
        scores.add(scorer, sum(known) if known else None, step_index=owner, metrics={"rewards": each})
    return scores.records


def _without_ours(value: Any) -> tuple[Any, list[ScoreRecord]]:
    """A trace without what our own export added to it, and the scores that this is."""
    about = as_object(as_object(value).get("metadata"))
    added = as_object(about.get(OURS))
    rewards, spans = added.get("rewards"), as_object(value).get("spans")
    if not isinstance(rewards, dict) or not isinstance(spans, list):
        return value, []
    scores = []
    left = []
    for span in spans:
        name = as_text(as_object(span).get("span_id"))
        if name not in rewards or span.get("span_type") != "reward":
            left.append(span)
            continue
        scorer, score = as_text(span.get("reward_type")), finite(span.get("reward"))
        if scorer is not None and score is not None:
            index = whole(rewards[name])
            scores.append(ScoreRecord(scorer=scorer, value=score, step_index=index, reason=as_text(span.get("reason"))))
    kept = {key: item for key, item in about.items() if key != OURS}
    gone = {"total_reward"} - added.keys() | ({"metadata"} if added.get("is_only_metadata") is True else set())
    was = value | {"spans": left, "metadata": kept, "total_reward": added.get("total_reward")}
    return {key: item for key, item in was.items() if key not in gone}, scores


def _with_ours(scores: list[ScoreRecord], ours: Sequence[ScoreRecord], steps: int) -> list[ScoreRecord]:
    """The scores that stood in a trace, and those of ours of other names or steps."""
    taken = {(score.scorer, score.step_index) for score in scores}
    for score in ours:
        if (key := (score.scorer, score.step_index)) not in taken and (score.step_index or 0) < steps:
            taken.add(key)
            scores.append(score)
    return scores


def _run_folder(place: PurePath) -> PurePath:
    """The folder that holds `traces/DATE/AGENT`."""
    parents = place.parents
    return parents[3] if len(parents) > 3 and parents[2].name == "traces" else place.parent


FORMAT = Format(NAME, "MassGen RL traces", recognise, read, no_trajectory, is_whole=True, run_folder=_run_folder)
