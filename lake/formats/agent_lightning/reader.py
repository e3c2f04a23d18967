"""agent-lightning from version 1.0 on: archives of rollouts with their events, and events alone; and rollouts of 0.1.

.. code-block:: text

    an archive's line   {rollout, events, resources}; events may also be by attempt: {attempt_id: [event]}
    rollout             {rollout_id, input, is_train, config, metadata {batch_idx, sample_idx_in_batch, ...}, status}
                        status: text, with job_name, error_message, created_at, ... beside it, or an object of them
    event               {event_type, rollout_id, attempt_id, timestamp, data}; a line, or an element of an array, as
                        `GET /api/rollouts/ID/events` answers; those of a rollout need not stand together
    model_request       data {request, response (an object, or the chunks of a stream), server {model, version},
                        model_version, latency_ms, http_status, status, retry_count, usage, finish_reason}
                        of `?format=triplet` only {prompt_token_ids, response_token_ids, response_log_probs, server}
    reward              data {value, message, source, reason, ...}
    a rollout of 0.1    {rollout_id, task {input, mode}, triplets [{prompt {token_ids}, response {token_ids}, reward}],
                        final_reward, trace, logs, metadata}

An episode is an attempt of a rollout; the one that the rollout names (else the last) is its last attempt. Siblings have
the same input: task_id is its `data_id`, `instance_id` or `task_id`, else a hash of it, else (events alone) the id of
the rollout. Their number is `trial_idx_in_group` inside a batch, else made of the rollout's id. `collection_round` is
the batch. A decision is a model request that was answered; those that failed are kept in extra. The version of a server
is the policy's. `env_return` is the last reward; every reward is a score, called `reward`. Keys and passwords are left
out.

Source: agent-lightning (Microsoft, MIT), agentlightning/schemas.py, server/proxy.py, server/routes, 2026.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from lake import ids
from lake.formats.agent_lightning.attempt import Attempt, Event
from lake.formats.base.fields import as_object, moment, sibling_number, whole
from lake.formats.base.format import Format, its_folder
from lake.formats.base.json_array import Element
from lake.formats.base.look import Look, look
from lake.formats.base.rows import (
    WRONG,
    Item,
    ShapeError,
    converted,
    episode_text_id,
    explained,
    items_of,
    rest,
    values,
)
from lake.formats.base.secrets import without_secrets
from lake.formats.base.source import Input
from lake.formats.tracing.tree import traces
from lake.records import EpisodeRecord, Reject

NAME = "agent_lightning"
_STATES = {"succeeded": ("completed", True), "failed": ("failed", None), "timeout": ("truncated", False)}
"""State of a rollout -> status, terminated; any other is one that did not end."""
_OF_0_1 = ("rollout_id", "triplets", "final_reward")
_ENDED = ("status", "state", "error_message", "created_at", "updated_at")
_SECRETS = ("_KEY", "_TOKEN", "_SECRET", "_PASSWORD")


class _Rollout(msgspec.Struct):
    rollout_id: str
    input: Any = None
    is_train: bool | None = None
    status: str | dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None


def recognise(look: Look) -> bool:
    """Whether values are rollouts with events, or events of rollouts."""
    return any(look.has(*keys) for keys in (("rollout", "events"), ("event_type", "rollout_id", "data"), _OF_0_1))


def no_trajectory(look: Look) -> str | None:
    """What the server lists without events."""
    if look.has("rollout_id", "input", "status") and not look.has("events") and not look.has("span_id"):
        return "it lists rollouts of agent-lightning; ingest their events (GET /api/rollouts/ID/events) or their spans"
    if look.has("items", "next_after", "total_terminal") or look.has("rollout", "attempts"):
        return "it says which rollouts of agent-lightning have ended; ingest their events"
    return None


def read(file: Input) -> Iterator[Item]:
    """Records and rejects of a file; a position is that of an archive's line, or of a rollout's first event."""
    seen = look(file.path)
    if seen.has("rollout", "events") or seen.has(*_OF_0_1):
        yield from converted(values(file, by_line=True), NAME, lambda value: to_records(_with_events(value), file))
        return
    lost: dict[str, int] = {}
    for item in traces(_by_rollout(values(file, by_line=True), lost)):
        if isinstance(item, Reject):
            yield item
            continue
        key, found = item
        found.value = {"rollout": {"rollout_id": key}, "events": found.value}
        if key in lost:
            found.value["lost_events"] = lost[key]
        yield from items_of(found, NAME, lambda value: to_records(value, file))


def _by_rollout(items: Iterable[Element | Reject], lost: dict[str, int]) -> Iterator[tuple[str, int, Any] | Reject]:
    """Events by rollout; those that cannot be taken are rejected alone, and counted where they name their rollout."""
    for item in items:
        if isinstance(item, Reject):
            yield item
            continue
        problem, rollout = item.problem, item.value.get("rollout_id") if isinstance(item.value, dict) else None
        if problem is None and not isinstance(rollout, str):
            problem = "`rollout_id` of the event is no text; valid: the id of its rollout"
        if problem is None:
            problem = _fault(item.value)
        if problem is None:
            yield str(rollout), item.index, item.value
            continue
        if isinstance(rollout, str):
            lost[rollout] = lost.get(rollout, 0) + 1
        yield Reject(position=item.index, reason="invalid", message=problem, raw=item.raw)


def _fault(event: Any) -> str | None:
    """What is wrong with an event by itself."""
    try:
        Attempt([(0, msgspec.convert(event, Event))])
    except WRONG as error:
        return explained(error).replace("events[0].", "")
    return None


def to_records(value: Any, file: Input) -> list[EpisodeRecord]:
    """A rollout: an episode for each attempt, the last one last.

    Raises:
        msgspec.ValidationError: wrong keys or types.
        ShapeError: requests, responses or messages of the wrong form.
    """
    if not isinstance(value, dict):
        raise ShapeError(f"Expected `object`, got `{type(value).__name__}`")
    rollout = msgspec.convert(value.get("rollout"), _Rollout)
    attempts: dict[str, list[tuple[int, Event]]] = {}
    for index, (name, event) in enumerate(_events(value.get("events"))):
        attempts.setdefault(name, []).append((index, event))
    state = rollout.status if isinstance(rollout.status, dict) else {**value["rollout"], "state": rollout.status}
    last = state.get("succeeded_attempt_id") or state.get("last_attempt_id")
    if last in attempts:
        attempts[last] = attempts.pop(last)
    fields = _fields(rollout)
    records: list[EpisodeRecord] = []
    empty: dict[str, Any] = {}
    for number, (name, events) in enumerate((attempts or {"0": []}).items()):
        record = Attempt(events).record(attempt=len(records), **fields)
        is_last = number == max(len(attempts), 1) - 1
        if not is_last and not record.steps and not record.scores:
            empty[name] = record.extra
            continue
        said = state.get("state") if is_last else "failed"
        record.status, record.terminated = _STATES.get(str(said), ("aborted" if said else "completed", None))
        record.stop_reason = said if isinstance(said, str) else None
        record.error = message if is_last and isinstance(message := state.get("error_message"), str) else None
        record.started_at = moment(state.get("created_at"))
        record.ended_at = moment(state.get("updated_at")) if is_last else None
        about = {**_about(value, rollout, state), "attempts_without_answer": empty} if is_last else {}
        extra = {"attempt_id": name, **(record.extra or {}), **about}
        record.extra = {key: item for key, item in extra.items() if item not in (None, {}, [])}
        if records:
            record.relation = "retry"
            record.parent_episode_id = episode_text_id(records[-1], file)
        record.source_format = NAME
        records.append(record)
    return records


def _with_events(value: Any) -> Any:
    """A rollout of 0.1 as a line of an archive; any other value as it is."""
    if not isinstance(value, dict) or "triplets" not in value or "rollout" in value:
        return value
    task = as_object(value.get("task"))
    mode = task.get("mode")
    triplets = value["triplets"] if isinstance(value["triplets"], list) else []
    events: list[dict[str, Any]] = []
    for triplet in triplets:
        asked, said = (as_object(as_object(triplet).get(key)).get("token_ids") for key in ("prompt", "response"))
        data = {"prompt_token_ids": asked, "response_token_ids": said}
        events.append({"event_type": "model_request", "data": data})
        if (reward := as_object(triplet).get("reward")) is not None:
            events.append({"event_type": "reward", "data": {"value": reward}})
    last = {"event_type": "reward", "data": {"value": value.get("final_reward")}}
    if value.get("final_reward") is not None and events[-1:] != [last]:
        events.append(last)
    rollout = {"rollout_id": value.get("rollout_id"), "task": rest(task, "rollout_id", "input", "mode")}
    rollout |= {"input": task.get("input"), "is_train": None if mode is None else mode == "train"}
    about = [as_object(triplet).get("metadata") for triplet in triplets]
    left = rest(value, *_OF_0_1, "task") or {}
    return {"rollout": rollout, "events": events} | left | ({"triplets": about} if any(about) else {})


def _events(given: Any) -> Iterator[tuple[str, Event]]:
    """Events in order, with their attempts: a list, or lists by attempt."""
    lists = given.items() if isinstance(given, dict) else [("0", given or [])]
    for name, events in lists:
        for event in msgspec.convert(events, list[Event]):
            yield name if event.attempt_id is None else str(event.attempt_id), event


def _about(value: dict[str, Any], rollout: _Rollout, state: dict[str, Any]) -> dict[str, Any]:
    """What is said of a rollout and has no column."""
    about = rest(value["rollout"], "is_train", *_ENDED) or {}
    if isinstance(rollout.status, dict):
        about["status"] = rest(state, *_ENDED)
    more = {"resources": value.get("resources"), **(rest(value, "rollout", "events", "resources") or {})}
    return {key: _without_secrets(without_secrets(item)) for key, item in {"rollout": about, **more}.items()}


def _without_secrets(value: Any) -> Any:
    """Settings without the values of variables that hold keys: {name, value}, as pods list them."""
    if isinstance(value, list):
        return [_without_secrets(item) for item in value]
    if not isinstance(value, dict):
        return value
    name = value.get("name")
    is_secret = "value" in value and isinstance(name, str) and name.upper().endswith(_SECRETS)
    return {key: _without_secrets(item) for key, item in value.items() if not (is_secret and key == "value")}


def _fields(rollout: _Rollout) -> dict[str, Any]:
    """What a rollout says of each of its attempts."""
    metadata, given = rollout.metadata or {}, rollout.input if isinstance(rollout.input, dict) else {}
    round_, trial = whole(metadata.get("batch_idx")), whole(metadata.get("trial_idx_in_group"))
    return {
        "task_id": _task(rollout),
        "rollout_index": sibling_number(rollout.rollout_id) if round_ is None or trial is None else trial,
        "collection_round": round_,
        "split": None if rollout.is_train is None else "train" if rollout.is_train else "val",
        "ground_truth": next((given[key] for key in ("ground_truth", "answer", "solution") if key in given), None),
    }


def _task(rollout: _Rollout) -> str:
    given = rollout.input if isinstance(rollout.input, dict) else {}
    name = next((given[key] for key in ("data_id", "instance_id", "task_id") if given.get(key) not in (None, "")), None)
    if isinstance(name, str | int):
        return str(name)
    if rollout.input is None:
        return rollout.rollout_id
    return ids.to_text(ids.bytes_hash(msgspec.json.encode(rollout.input, order="sorted")))


FORMAT = Format(
    NAME,
    "agent-lightning 1.0 archives and events",
    recognise,
    read,
    no_trajectory,
    is_whole=True,
    run_folder=its_folder,
)
