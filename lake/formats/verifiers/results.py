"""verifiers evaluation results, before its version 0.3: `results.jsonl`, a rollout a line, beside `metadata.json`.

The same rows are in Parquet files of data sets that it pushes to a hub.

.. code-block:: text

    example_id (0.1.6 on), or id     the task; rows of one example are siblings, numbered as they come
    prompt, completion               messages, or text of an engine that knows no chat; completion may be [] or null
    reward                           the return; null if it was never computed
    metrics {name: number}           0.1.8 on; before, further columns of numbers: what each reward function said
    answer, info, task               what the data set says of the example
    tool_defs, or info.oai_tools     the tools offered
    is_completed, is_truncated, stop_condition, error (text, or {error, error_chain_repr, error_chain_str})
    timing                           {generation_ms, ...}, or {start_time, generation {start, end}, model {spans}, ...};
                                     before, generation_ms, scoring_ms and total_ms as columns
    token_usage {input_tokens, output_tokens}
    trajectory [{prompt, completion, response, tokens, reward, advantage, is_truncated, trajectory_id, extras}]
                                     only if it was asked for: every model call with its exact tokens

An episode is a row. A decision is an assistant message of the completion; those in the prompt are examples. Where the
trajectory has more calls than that (a history that was rewritten), its calls are the decisions. Calls of sub-models
(`extras.is_sub_llm_call`, or another trajectory_id) are episodes of their own. Metrics are scores under their names;
further columns of numbers are too, unless metadata names them as `state_columns`. A step reward that only repeats the
row's is none.

Of the metadata, what says how the run was made (env_id, model, sampling_args, ...) is taken; averages are not, because
the file is rewritten as the run goes on. `trajlake` reads traces of verifiers 0.2 on as `verifiers_traces`.

Source: verifiers 0.1.0 to 0.2.1 (Prime Intellect, MIT): utils/save_utils.py, utils/eval_utils.py, types.py.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from lake.formats.base.fields import Scores, moment, number, whole
from lake.formats.base.format import Format
from lake.formats.base.look import Look
from lake.formats.base.rows import Item, ShapeError, converted, document, episode_text_id, rest, values
from lake.formats.base.secrets import without_secrets
from lake.formats.base.source import Input
from lake.formats.chat.messages import Conversation, conversation, is_assistant
from lake.formats.verifiers.messages import as_object, chat
from lake.formats.verifiers.trajectory import calls_of, learn, retold
from lake.records import EpisodeRecord, Reject, StepRecord

NAME = "verifiers_results"
_SAID = frozenset(("is_completed", "is_truncated", "stop_condition", "error", "error_chain", "long_error_chain"))
_COLUMNS = _SAID | {"example_id", "id", "prompt", "completion", "reward", "metrics", "answer"}
_COLUMNS |= {"token_usage", "tool_defs", "trajectory"}
"""Columns that have a place of their own; the chains repeat the error."""
_FACTS = frozenset(("task", "info", "timing", "generation_ms", "scoring_ms", "total_ms", "advantage", "rollout_number"))
"""Columns that are no score, whatever their type."""
_LIMITS = frozenset(
    ("max_turns_reached", "prompt_too_long", "max_total_completion_tokens_reached", "generation_truncated")
)
_OF_THE_RUN = ("env_args", "base_url", "version_info", "date")


class _Row(msgspec.Struct):
    """What a row must have; the rest may be anything."""

    prompt: str | list[Any] | None
    completion: str | list[Any] | None
    example_id: int | str | None = None
    id: int | str | None = None
    reward: float | bool | None = None
    metrics: dict[str, Any] | None = None


class _Run(msgspec.Struct):
    """What metadata.json says."""

    facts: dict[str, Any] = {}
    fault: str | None = None

    def text(self, *names: str) -> str | None:
        """The first of some facts that is text."""
        return next((value for name in names if isinstance(value := self.facts.get(name), str) and value), None)


def recognise(look: Look) -> bool:
    """Whether rows have an example, a prompt and a completion, and what only this tool writes beside them."""
    own = ("task", "reward", "metrics", "timing", "is_completed", "generation_ms")
    if look.kind == "parquet":
        return {"example_id", "prompt", "completion", "reward"} <= set(look.names)
    return any(
        {"prompt", "completion"} <= value.keys()
        and ("example_id" in value or {"id", "task", "reward"} <= value.keys())
        and any(name in value for name in own)
        for value in look.objects
    )


def no_trajectory(look: Look) -> str | None:
    """Metadata of an evaluation, and results of other commands of the same tool."""
    if look.kind in ("object", "lines") and look.has("num_examples", "rollouts_per_example", "model"):
        return "it is the metadata of a verifiers evaluation; ingest the results.jsonl beside it"
    if look.has("task_key", "mode", "reason", "valid"):
        return "it says which tasks of a verifiers taskset are valid; no agent ran"
    if any(isinstance(info := value.get("info"), dict) and "candidate_idx" in info for value in look.objects):
        return "it holds the candidates of a prompt optimisation (GEPA), no rollouts"
    return None


def read(file: Input) -> Iterator[Item]:
    """Records and rejects of a file, with line numbers from 1."""
    run = _beside(file)
    return converted(values(file, by_line=True), NAME, lambda value: to_records(value, file, run))


def _beside(file: Input) -> _Run:
    path = file.path.parent / "metadata.json"
    if not path.is_file():
        return _Run()
    found = document(Input(path, file.run_id))
    if isinstance(found, Reject):
        return _Run(fault=f"metadata.json is no use: {found.message}")
    return _Run(found.value) if isinstance(found.value, dict) else _Run(fault="metadata.json is no object")


def to_records(value: Any, file: Input, run: _Run) -> list[EpisodeRecord]:
    """One row: its episode, then those of its sub-models.

    Raises:
        msgspec.ValidationError: wrong keys or types.
        ShapeError: messages, calls or tokens of the wrong form.
    """
    row = msgspec.convert(value, _Row)
    task = row.id if row.example_id is None else row.example_id
    if task is None:
        raise ShapeError("`example_id` is null; valid: the number or name of the example")
    talk, subs, is_told = _talk(row, value.get("trajectory"))
    timing, usage = as_object(value.get("timing")), as_object(value.get("token_usage"))
    _time(talk.steps, timing)
    model = run.text("model")
    for step in talk.steps:
        step.model = step.model or model
    scores, named = Scores(), _metrics(value, row, run)
    for name, score in named.items():
        scores.add(name, score)
    error, trajectory = _error(value.get("error")), value.get("trajectory")
    stop = reason if isinstance(reason := value.get("stop_condition"), str) else None
    is_cut = value.get("is_truncated") is True or stop in _LIMITS
    is_done = value.get("is_completed")
    sampling = run.facts.get("sampling_args")
    record = EpisodeRecord(
        task_id=str(task),
        rollout_index=file.next_index(NAME, str(task)),
        expected_group_size=whole(run.facts.get("rollouts_per_example")) or None,
        environment=run.text("env_id", "env"),
        policy=model,
        sampling=without_secrets(sampling) if isinstance(sampling, dict) and sampling else None,
        source_version=_version(run),
        tools=_tools(value),
        status="failed" if error else "truncated" if is_cut else "aborted" if is_done is False else "completed",
        terminated=False if is_cut else True if is_done is True and not error else None,
        stop_reason=stop,
        error=error,
        env_return=number(row.reward),
        scores=scores.records,
        ground_truth=value.get("answer") or None,
        started_at=_when(timing.get("start_time")) or _edge(timing, "generation", "start"),
        ended_at=_edge(timing, "scoring", "end") or _edge(timing, "generation", "end"),
        prompt_tokens=_count(usage.get("input_tokens")),
        completion_tokens=_count(usage.get("output_tokens")),
        initial_messages=talk.initial_messages,
        final_observation=talk.final_observation,
        steps=talk.steps,
        extra=_extra(value, row, run, named) | ({"trajectory": trajectory} if trajectory and not is_told else {})
        or None,
    )
    return [record, *(_of_sub_model(calls, record, number + 1, file) for number, calls in enumerate(subs))]


def _talk(row: _Row, trajectory: Any) -> tuple[Conversation, list[list[dict[str, Any]]], bool]:
    """The conversation, the calls of sub-models, and whether the trajectory is told by both."""
    prompt, completion = chat(row.prompt, "prompt"), chat(row.completion, "completion")
    if prompt and completion[: len(prompt)] == prompt:  # environments of recursive models repeat it
        completion = completion[len(prompt) :]
    mains, subs = calls_of(trajectory)
    own = {id(message) for message in completion}
    talk = conversation(
        [*prompt, *completion], is_decision=lambda message: is_assistant(message) and id(message) in own, place="chat"
    )
    if len(mains) > len(talk.steps):
        talk = retold(mains, completion)
    if not 0 < len(mains) == len(talk.steps):
        return talk, subs, False
    learn(talk.steps, mains, row.reward)
    return talk, subs, True


def _tools(value: dict[str, Any]) -> list[Any] | None:
    """The tools that were offered: the last versions list them, earlier ones had them in the data set's row."""
    info = _parsed(value.get("info"))
    tools = value.get("tool_defs") or (info.get("oai_tools") if isinstance(info, dict) else None)
    return tools if isinstance(tools, list) and tools else None


def _extra(value: dict[str, Any], row: _Row, run: _Run, named: dict[str, Any]) -> dict[str, Any]:
    """What of a row has no column: all but what repeats a score or the error."""
    mirrored = {name for name, score in named.items() if name not in _COLUMNS and value.get(name) == score}
    extra = {
        **(rest(value, *_COLUMNS, *mirrored) or {}),
        "id": None if row.example_id is None else row.id,
        "error": value["error"] if isinstance(value.get("error"), dict) else None,
        "metadata": {name: without_secrets(run.facts[name]) for name in _OF_THE_RUN if run.facts.get(name)},
        "metadata_fault": run.fault,
        "token_usage": rest(as_object(value.get("token_usage")), "input_tokens", "output_tokens"),
        "tool_defs": None if isinstance(value.get("tool_defs"), list) else value.get("tool_defs"),
    }
    return {key: item for key, item in extra.items() if item not in (None, {}, [], "")}


def _of_sub_model(calls: list[dict[str, Any]], parent: EpisodeRecord, index: int, file: Input) -> EpisodeRecord:
    """The calls of a sub-model as an episode that came out of the policy's."""
    talk = retold(calls, [])
    learn(talk.steps, calls, parent.env_return)
    turn = whole(as_object(calls[0].get("extras")).get("parent_turn"))
    parent_id = episode_text_id(_named(parent), file)
    return EpisodeRecord(
        task_id=parent.task_id,
        rollout_index=parent.rollout_index,
        agent_id=f"sub_model_{index}",
        environment=parent.environment,
        relation="subagent",
        parent_episode_id=parent_id,
        root_episode_id=parent_id,
        parent_step_index=turn if turn is not None and turn < len(parent.steps) else None,
        initial_messages=talk.initial_messages,
        steps=talk.steps,
    )


def _named(record: EpisodeRecord) -> EpisodeRecord:
    record.source_format = NAME
    return record


def _metrics(value: dict[str, Any], row: _Row, run: _Run) -> dict[str, Any]:
    """What each reward function said, by its name."""
    if row.metrics is not None and "sample_id" not in value:
        return row.metrics
    columns = run.facts.get("state_columns")
    others = set(map(str, columns)) if isinstance(columns, list) else set()
    left = value.keys() - _COLUMNS - _FACTS - others
    found = {name: value[name] for name in value if name in left and isinstance(value[name], bool | int | float)}
    return found | (row.metrics or {})


def _time(steps: list[StepRecord], timing: dict[str, Any]) -> None:
    """When each call ran, if the timing has one span for each decision."""
    spans = as_object(timing.get("model")).get("spans")
    if not isinstance(spans, list) or len(spans) != len(steps):
        return
    for step, span in zip(steps, spans, strict=True):
        start, end = (number(as_object(span).get(name)) for name in ("start", "end"))
        if start and end and end >= start:
            step.started_at, step.latency = moment(start), end - start


def _edge(timing: dict[str, Any], phase: str, name: str) -> Any:
    return _when(as_object(timing.get(phase)).get(name))


def _when(seconds: Any) -> Any:
    """A time; 0 is one that was never set."""
    return moment(seconds) if number(seconds) else None


def _error(value: Any) -> str | None:
    """The text of an error."""
    if isinstance(value, dict):
        texts = [value.get(name) for name in ("error_chain_str", "error_chain_repr", "error")]
        return next((text for text in texts if isinstance(text, str) and text), "error")
    return (value if isinstance(value, str) else str(value)) if value else None


def _parsed(info: Any) -> Any:
    """The data set's `info`, which may be JSON text."""
    if isinstance(info, str):
        try:
            return msgspec.json.decode(info)
        except msgspec.DecodeError:
            return None
    return info


def _version(run: _Run) -> str | None:
    version = as_object(run.facts.get("version_info")).get("vf_version")
    return version if isinstance(version, str) else None


def _count(value: Any) -> int | None:
    """A number of tokens, which the tool writes with a decimal point."""
    return whole(int(value)) if isinstance(value, float) and value.is_integer() else whole(value)


FORMAT = Format(
    NAME, "verifiers evaluation results before 0.3 (results.jsonl)", recognise, read, no_trajectory, by_line=True
)
