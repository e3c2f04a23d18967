"""verifiers traces, from its version 0.2 on, and those of prime-rl: `traces.jsonl`, `stream.jsonl`, its chunks.

.. code-block:: text

    a line (0.3 on)   an episode {id, env {id, name}, task {type, data, key, hash}, group {id}, ok, errors[], traces[],
                      run {type, id, work {type, step, policy {start, end}}}}; nulls are left out
    or (0.2)          a trace alone, with run {type, id, step}; prime-rl adds env_name, group_id, policy_version, ...
    trace             {version, id, verifiers {version}, agent {name, config, trainable}, tools, nodes[], calls[],
                      rewards {name: {score, weight} or null; 0.2: a weighted number}, metrics, info, timing,
                      is_completed, ok, stop_condition, errors}
    node              {parent, message, sampled, timestamp, token_ids, mask, logprobs (one for each true mask), ...}
    call              {node, model, sampling, finish_reason, usage, time {start, end}, error}

An episode of ours is a branch of a trace (`lake.formats.verifiers.graph`); a decision is a sampled node. Of the traces
of a line, the first trainable one is the root, and the others are its sub-agents. Siblings share the task key; those of
another agent start from something else, so their task is called `KEY [AGENT]`. The group's id is kept in extra.
`collection_round` is the training step. An episode's sibling number is made of its id: it is the same in each file that
has it (prime-rl writes some twice, into `all` and `effective`). `env_return` is the weighted sum of the rewards, of the
trunk of each trace; it is unknown if one of them is. A policy version is taken only if it did not change meanwhile.

What training adds to a trace later (advantages, log-probabilities of the trainer, entropies, loss weights) is no part
of what happened: it becomes scores without a value, called `training`, with the streams of each step as metrics; no
advantage is told from one of 0. That of `annotations/*.jsonl` beside the file is `training.PRODUCER`.

Source: verifiers 0.2.0 to 0.4.0 (Prime Intellect, MIT), v1/trace.py, v1/graph.py, v1/episode.py; prime-rl (Apache-2.0),
src/prime_rl/monitors/file, orchestrator/types.py. `version` of a trace: 1 (0.3 on) and 2 (0.2.1); 0.2.0 writes none.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from lake import ids
from lake.formats.base.fields import sibling_number, whole
from lake.formats.base.format import Format
from lake.formats.base.look import Look
from lake.formats.base.rows import Item, ShapeError, UnsupportedError, converted, rest, values
from lake.formats.base.source import Input
from lake.formats.verifiers.annotations import Annotations
from lake.formats.verifiers.messages import as_object, filled
from lake.formats.verifiers.trace import COUNTED, NAME, Reading, Shared, Trace, error_text
from lake.records import EpisodeRecord

_NEWEST = 2


class _Task(msgspec.Struct):
    data: Any = None
    key: str | None = None
    hash: str | None = None


class _Line(msgspec.Struct):
    """What must be of its type."""

    task: _Task
    traces: list[Trace]
    id: str | None = None
    env: Any = None
    group: Any = None
    run: Any = None
    errors: list[Any] = []


def recognise(look: Look) -> bool:
    """Whether values are episodes with traces of a task, or graphs of nodes that were sampled for a task."""
    return any(
        ({"traces", "task"} <= value.keys() and ("ok" in value or "group" in value or "env" in value))
        or ({"nodes", "task"} <= value.keys() and ("rewards" in value or "calls" in value or "sampled" in value))
        for value in look.objects
    )


def no_trajectory(look: Look) -> str | None:
    """Annotations and indices of prime-rl."""
    if look.has("trace_id", "branches", "info"):
        return (
            "it holds what a trainer learned about traces later; ingest the traces (traces.jsonl, stream.jsonl) in the "
            "folder above, which read it along"
        )
    if look.has("trace_ids", "offset", "num_errors") or look.has("trace_id", "chunk", "offset"):
        return "it is the index of a trace stream of prime-rl; ingest the stream"
    return None


def read(file: Input) -> Iterator[Item]:
    """Records and rejects of a file, with line numbers from 1."""
    with Annotations(file) as later:
        yield from converted(values(file, by_line=True), NAME, lambda value: to_records(value, file, later))


def to_records(value: Any, file: Input, later: Annotations) -> list[EpisodeRecord]:
    """A line: the episodes of its traces, the root first.

    Raises:
        ShapeError: wrong keys or types; a graph, messages or tokens of the wrong form.
        UnsupportedError: a newer version of the format.
    """
    given = value
    if isinstance(value, dict) and "traces" not in value and "nodes" in value:
        given = {**_alone(value), "traces": [value]}
    try:
        line = msgspec.convert(given, _Line)
    except msgspec.ValidationError as error:
        raise ShapeError(str(error) if given is value else str(error).replace("$.traces[0]", "$")) from error
    shared, extra = _shared(line, given)
    if line.id is None:
        shared.fields["rollout_index"] = file.next_index(NAME, shared.fields["run_id"], shared.fields["task_id"])
    for trace in line.traces:
        if not 0 <= trace.version <= _NEWEST:
            raise UnsupportedError(
                f"`version` of a trace is {trace.version}; known: 1 (verifiers 0.3 and 0.4), 2 (0.2.1). Read it with a "
                "newer trajlake, or write it with a version that is known"
            )
    # The root is what is trained; sorting keeps the others in their order.
    root = next((place for place, trace in enumerate(line.traces) if trace.agent.trainable), 0)
    records: list[EpisodeRecord] = []
    names: dict[str | None, int] = {}
    for place in sorted(range(len(line.traces)), key=lambda place: place != root):
        trace = line.traces[place]
        name = trace.agent.name
        names[name] = names.get(name, 0) + 1
        called = name if names[name] == 1 else f"{name or 'agent'}#{names[name]}"
        reading = Reading(trace, given["traces"][place], shared, called)
        if name != line.traces[root].agent.name:
            reading.fields["task_id"] = f"{shared.fields['task_id']} [{name}]"
        records += reading.records(records[0] if records else None, file, later)
    if not records:
        records = [EpisodeRecord(steps=[], **shared.fields)]
    records[0].extra = {**(records[0].extra or {}), **extra} or None
    records[0].error = records[0].error or error_text(line.errors)
    return records


def _alone(trace: dict[str, Any]) -> dict[str, Any]:
    """What a trace that stands alone says of its episode."""
    run = as_object(trace.get("run"))
    version = trace.get("policy_version")
    kind, step = trace.get("kind", run.get("type")), trace.get("eval_step", run.get("step"))
    span = {"start": version, "end": version} if trace.get("off_policy_steps") == 0 else None
    return {
        "id": trace.get("id"),
        "task": trace.get("task"),
        "env": {"id": trace.get("env_name")},
        "group": {"id": trace.get("group_id")},
        "run": {"id": run.get("id"), "type": run.get("type"), "work": {"type": kind, "step": step, "policy": span}},
    }


def _shared(line: _Line, value: dict[str, Any]) -> tuple[Shared, dict[str, Any]]:
    """What the traces share, and what of the line has no column."""
    run, env, data = as_object(line.run), as_object(line.env), as_object(line.task.data)
    work = as_object(run.get("work"))
    policy = as_object(work.get("policy"))
    start = policy.get("start")
    is_certain = isinstance(start, int) and not isinstance(start, bool) and start == policy.get("end")
    names = (line.task.key, line.task.hash, data.get("id"), data.get("name"), data.get("idx"))
    task = next((name for name in names if isinstance(name, str | int) and str(name).strip()), None)
    split, run_id = work.get("type") or run.get("type"), run.get("id") or None
    if not isinstance(run_id, str | None):
        raise ShapeError(f"`run.id` is {run_id!r}; valid: text")
    fields = {
        # A content hash is what the tool itself calls a task without a name.
        "task_id": ids.to_text(ids.bytes_hash(msgspec.json.encode(data, order="sorted")))
        if task is None
        else str(task),
        "run_id": run_id,
        "rollout_index": 0 if line.id is None else sibling_number(line.id),
        "collection_round": whole(work.get("step")),
        "environment": next(
            (name for name in (env.get("id"), env.get("name")) if isinstance(name, str) and name), None
        ),
        "split": split if isinstance(split, str) else None,
        "ground_truth": data.get("answer") or None,
    }
    kept = {
        "episode_id": line.id,
        "group": as_object(line.group).get("id"),
        "env": rest(env, "id"),
        "run": rest(run, "id"),
        "episode_errors": line.errors,
        "task": value["task"],
        **(rest(value, "id", "group", "task", "env", "run", "errors", "traces", *COUNTED) or {}),
    }
    return Shared(fields, start if is_certain else None), filled(kept)


FORMAT = Format(NAME, "verifiers and prime-rl traces (traces.jsonl)", recognise, read, no_trajectory, by_line=True)
