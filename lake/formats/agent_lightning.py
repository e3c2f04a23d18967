"""agent-lightning (Microsoft, MIT) from version 1.0 on: archives of rollouts, events alone, and rollouts of 0.1.

.. code-block:: text

    an archive's line   {rollout, events, resources}; events may also be by attempt: {attempt_id: [event]}
    rollout             {rollout_id, input, is_train, config, metadata {batch_idx, sample_idx_in_batch, ...}, status}
                        status: text, next to job_name, error_message, created_at, ..., or an object of them
    event               {event_type, rollout_id, attempt_id, timestamp, data}; a line, or an element of an array, as
                        `GET /api/rollouts/ID/events` answers; those of a rollout need not be neighbours
    model_request       data {request, response (an object, or the chunks of a stream), server {model, version},
                        model_version, latency_ms, http_status, status, retry_count, usage, finish_reason}
                        of `?format=triplet` only {prompt_token_ids, response_token_ids, response_log_probs, server}
    reward              data {value, message, source, reason, ...}
    a rollout of 0.1    {rollout_id, task {input, mode}, triplets [{prompt {token_ids}, response {token_ids}, reward}],
                        final_reward, trace, logs, metadata}

An episode is an attempt of a rollout; the one that the rollout names (else the last) is its last attempt. Siblings have
the same input: task_id is its `data_id`, `instance_id` or `task_id`, else its hash, else (events alone) the id of the
rollout. The rollout index is `trial_idx_in_group` inside a batch, else a hash of the rollout's id. `collection_round`
is the batch. A decision is an answered model request; failed ones are stored in extra. The version of a server is the
policy's. `env_return` is the last reward; every reward is a score, called `reward`. Keys and passwords are removed.

Source: agentlightning/schemas.py, server/proxy.py, server/routes, 2026.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from lake import ids
from lake.formats.base.fields import ScoreList, as_object, hash_rollout_index, parse_count, parse_number, parse_time
from lake.formats.base.format import FileHead, Format, Item, get_parent_folder, read_head
from lake.formats.base.json_array import Element
from lake.formats.base.rows import (
    SHAPE_ERRORS,
    ShapeError,
    convert_value,
    convert_values,
    explain_error,
    make_episode_text_id,
    omit_fields,
    read_values,
)
from lake.formats.base.secrets import remove_keys
from lake.formats.base.source import Input
from lake.formats.chat.completions import Completion, Lineage, parse_completion
from lake.formats.chat.messages import CallHistory, build_decision, check_message
from lake.formats.tracing.episodes import group_traces
from lake.records import EpisodeRecord, Index, Reject, StepRecord, read_sampling

NAME = "agent_lightning"
_STATES = {"succeeded": ("completed", True), "failed": ("failed", None), "timeout": ("truncated", False)}
"""State of a rollout -> status, terminated; in any other state it did not end."""
_KEYS_0_1 = ("rollout_id", "triplets", "final_reward")
_STATUS_KEYS = ("status", "state", "error_message", "created_at", "updated_at")
_SECRET_SUFFIXES = ("_KEY", "_TOKEN", "_SECRET", "_PASSWORD")
_REQUEST_FIELDS = ("messages", "prompt", "model", "tools", "stream", "return_token_ids", "logprobs", "stream_options")
_EXTRA_KEYS = ("http_status", "retry_count", "adjusted_params", "routed_experts")
_Piece = tuple[str, int, Any] | Reject


class RolloutEvent(msgspec.Struct):
    """An event of an attempt."""

    event_type: str
    data: dict[str, Any] = {}
    attempt_id: str | int | None = None
    timestamp: float | None = None


class _ModelRequest(msgspec.Struct):
    request: dict[str, Any] | None = None
    response: Any = None
    server: dict[str, Any] | None = None
    model: str | None = None
    model_version: int | None = None
    status: str | None = None
    prompt_token_ids: list[Index] | None = None
    response_token_ids: list[Index] | None = None
    response_log_probs: list[float] | None = None


class _ArchiveRollout(msgspec.Struct):
    rollout_id: str
    input: Any = None
    is_train: bool | None = None
    status: str | dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None


def recognise(head: FileHead) -> bool:
    """Return whether a file holds rollouts with events, or events of rollouts."""
    return any(head.has(*keys) for keys in (("rollout", "events"), ("event_type", "rollout_id", "data"), _KEYS_0_1))


def no_trajectory(head: FileHead) -> str | None:
    """Describe the server's lists without events."""
    if head.has("rollout_id", "input", "status") and not head.has("events") and not head.has("span_id"):
        return "it lists rollouts of agent-lightning; ingest their events (GET /api/rollouts/ID/events) or their spans"
    if head.has("items", "next_after", "total_terminal") or head.has("rollout", "attempts"):
        return "it says which rollouts of agent-lightning have ended; ingest their events"
    return None


def read(file: Input) -> Iterator[Item]:
    """Read records and rejects; a position is that of an archive's line, or of a rollout's first event."""
    head = read_head(file.path)
    if head.has("rollout", "events") or head.has(*_KEYS_0_1):
        lines = read_values(file, by_line=True)
        yield from convert_values(lines, NAME, lambda line: convert_rollout(_convert_0_1(line), file))
        return
    lost: dict[str, int] = {}
    pieces = group_by_rollout(read_values(file, by_line=True), _check_event, lost)
    for item in group_traces(pieces):
        if isinstance(item, Reject):
            yield item
            continue
        rollout_id, element = item
        element.value = {"rollout": {"rollout_id": rollout_id}, "events": element.value}
        if rollout_id in lost:
            element.value["lost_events"] = lost[rollout_id]
        yield from convert_value(element, NAME, lambda document: convert_rollout(document, file))


def group_by_rollout(
    items: Iterable[Element | Reject], check: Callable[[Any], None], lost: dict[str, int]
) -> Iterator[_Piece]:
    """Yield events or spans with their rollout. Invalid ones become rejects, and `lost` counts them by rollout."""
    for item in items:
        if isinstance(item, Reject):
            yield item
            continue
        problem = item.problem
        rollout_id = item.value.get("rollout_id") if isinstance(item.value, dict) else None
        try:
            if problem is None:
                check(item.value)
        except SHAPE_ERRORS as error:
            problem = explain_error(error).replace("events[0].", "")
        if problem is None:
            yield str(rollout_id), item.index, item.value
            continue
        if isinstance(rollout_id, str):
            lost[rollout_id] = lost.get(rollout_id, 0) + 1
        yield Reject(position=item.index, reason="invalid", message=problem, raw=item.raw)


def _check_event(event: Any) -> None:
    if not isinstance(event, dict) or not isinstance(event.get("rollout_id"), str):
        raise ShapeError("`rollout_id` of the event is no text; valid: the id of its rollout")
    EventAttempt([(0, msgspec.convert(event, RolloutEvent))])


def convert_rollout(document: Any, file: Input) -> list[EpisodeRecord]:
    """Convert a rollout to an episode for each attempt, the last one last.

    Raises:
        msgspec.ValidationError: wrong keys or types.
        ShapeError: requests, responses or messages of the wrong form.
    """
    if not isinstance(document, dict):
        raise ShapeError(f"Expected `object`, got `{type(document).__name__}`")
    rollout = msgspec.convert(document.get("rollout"), _ArchiveRollout)
    attempts: dict[str, list[tuple[int, RolloutEvent]]] = {}
    events = document.get("events")
    index = 0
    for name, listed in events.items() if isinstance(events, dict) else [("0", events or [])]:
        for event in msgspec.convert(listed, list[RolloutEvent]):
            attempt_id = name if event.attempt_id is None else str(event.attempt_id)
            attempts.setdefault(attempt_id, []).append((index, event))
            index += 1
    state = rollout.status if isinstance(rollout.status, dict) else {**document["rollout"], "state": rollout.status}
    last_id = state.get("succeeded_attempt_id") or state.get("last_attempt_id")
    if last_id in attempts:
        attempts[last_id] = attempts.pop(last_id)
    fields = _build_rollout_fields(rollout)
    records: list[EpisodeRecord] = []
    empty: dict[str, Any] = {}
    for number, (attempt_id, attempt_events) in enumerate((attempts or {"0": []}).items()):
        record = EventAttempt(attempt_events).build_record(attempt=len(records), **fields)
        is_last = number == max(len(attempts), 1) - 1
        if not is_last and not record.steps and not record.scores:
            empty[attempt_id] = record.extra
            continue
        outcome = state.get("state") if is_last else "failed"
        record.status, record.terminated = _STATES.get(str(outcome), ("aborted" if outcome else "completed", None))
        record.stop_reason = outcome if isinstance(outcome, str) else None
        record.error = message if is_last and isinstance(message := state.get("error_message"), str) else None
        record.started_at = parse_time(state.get("created_at"))
        record.ended_at = parse_time(state.get("updated_at")) if is_last else None
        extra = {"attempt_id": attempt_id, **(record.extra or {})}
        if is_last:
            extra |= {**_build_extra(document, rollout, state), "attempts_without_answer": empty}
        record.extra = {key: field for key, field in extra.items() if field not in (None, {}, [])}
        if records:
            record.relation = "retry"
            record.parent_episode_id = make_episode_text_id(records[-1], file)
        record.source_format = NAME
        records.append(record)
    return records


def _convert_0_1(document: Any) -> Any:
    """Convert a rollout of 0.1 to a line of an archive; any other value stays unchanged."""
    if not isinstance(document, dict) or "triplets" not in document or "rollout" in document:
        return document
    task = as_object(document.get("task"))
    mode = task.get("mode")
    triplets = [as_object(t) for t in document["triplets"]] if isinstance(document["triplets"], list) else []
    events: list[dict[str, Any]] = []
    for triplet in triplets:
        tokens = {f"{key}_token_ids": as_object(triplet.get(key)).get("token_ids") for key in ("prompt", "response")}
        events.append({"event_type": "model_request", "data": tokens})
        if (reward := triplet.get("reward")) is not None:
            events.append({"event_type": "reward", "data": {"value": reward}})
    last = {"event_type": "reward", "data": {"value": document.get("final_reward")}}
    if document.get("final_reward") is not None and events[-1:] != [last]:
        events.append(last)
    rollout = {"rollout_id": document.get("rollout_id"), "task": omit_fields(task, "rollout_id", "input", "mode")}
    rollout |= {"input": task.get("input"), "is_train": None if mode is None else mode == "train"}
    metadata = [triplet.get("metadata") for triplet in triplets]
    extra = omit_fields(document, *_KEYS_0_1, "task") or {}
    return {"rollout": rollout, "events": events} | extra | ({"triplets": metadata} if any(metadata) else {})


def _build_extra(document: dict[str, Any], rollout: _ArchiveRollout, state: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a rollout without a column."""
    fields = omit_fields(document["rollout"], "is_train", *_STATUS_KEYS) or {}
    if isinstance(rollout.status, dict):
        fields["status"] = omit_fields(state, *_STATUS_KEYS)
    further = omit_fields(document, "rollout", "events", "resources") or {}
    extra = {"rollout": fields, "resources": document.get("resources"), **further}
    return {key: _remove_secret_variables(remove_keys(field)) for key, field in extra.items()}


def _remove_secret_variables(node: Any) -> Any:
    """Return settings without the values of variables that hold keys: {name, value}, as pods list them."""
    if isinstance(node, list):
        return [_remove_secret_variables(inner) for inner in node]
    if not isinstance(node, dict):
        return node
    name = node.get("name")
    is_secret = "value" in node and isinstance(name, str) and name.upper().endswith(_SECRET_SUFFIXES)
    pairs = ((key, inner) for key, inner in node.items() if not (is_secret and key == "value"))
    return {key: _remove_secret_variables(inner) for key, inner in pairs}


def _build_rollout_fields(rollout: _ArchiveRollout) -> dict[str, Any]:
    """Return the fields that all attempts of a rollout share."""
    metadata, task = rollout.metadata or {}, as_object(rollout.input)
    batch, trial = parse_count(metadata.get("batch_idx")), parse_count(metadata.get("trial_idx_in_group"))
    name = next((task[key] for key in ("data_id", "instance_id", "task_id") if task.get(key) not in (None, "")), None)
    if isinstance(name, str | int):
        task_id = str(name)
    elif rollout.input is None:
        task_id = rollout.rollout_id
    else:
        task_id = ids.to_text(ids.bytes_hash(msgspec.json.encode(rollout.input, order="sorted")))
    return {
        "task_id": task_id,
        "rollout_index": hash_rollout_index(rollout.rollout_id) if batch is None or trial is None else trial,
        "collection_round": batch,
        "split": None if rollout.is_train is None else "train" if rollout.is_train else "val",
        "ground_truth": next((task[key] for key in ("ground_truth", "answer", "solution") if key in task), None),
    }


class EventAttempt:
    """Builds the record of one attempt from its events and their positions."""

    def __init__(self, events: list[tuple[int, RolloutEvent]]) -> None:
        self.history, self.lineage, self.scores = CallHistory(), Lineage(), ScoreList()
        self.other_events: list[dict[str, Any]] = []
        self.failed_requests: list[dict[str, Any]] = []
        self.sampling: dict[str, Any] | None = None
        self.tools: list[Any] | None = None
        self.reward: float | None = None
        for index, event in events:
            if event.event_type == "model_request":
                self._add_request(event, f"events[{index}].data")
            elif event.event_type == "reward":
                self._add_reward(event)
            else:
                fields = {"event_type": event.event_type, "timestamp": event.timestamp, "data": event.data}
                self.other_events.append(fields)

    def build_record(self, **fields: Any) -> EpisodeRecord:
        """Return the record; `fields` come from the rollout."""
        steps = self.history.steps
        versions = {step.policy_version for step in steps}
        events = [remove_keys(event) for event in self.other_events]
        return EpisodeRecord(
            policy=next((step.model for step in steps if step.model), None),
            policy_version=versions.pop() if len(versions) == 1 else None,
            env_return=self.reward,
            scores=self.scores.records,
            tools=self.tools,
            sampling=self.sampling,
            initial_messages=self.history.initial_messages,
            steps=steps,
            extra={"events": events, "failed_requests": self.failed_requests},
            **fields,
        )

    def _add_reward(self, event: RolloutEvent) -> None:
        reason = event.data.get("reason")
        reward = parse_number(event.data.get("value"))
        self.scores.add(
            "reward",
            event.data.get("value"),
            reason=event.data.get("message") if reason is None else reason,
            metrics=omit_fields(event.data, "value", "reason", *(("message",) if reason is None else ())),
        )
        self.reward = self.reward if reward is None else reward

    def _add_request(self, event: RolloutEvent, path: str) -> None:
        fields = msgspec.convert(event.data, _ModelRequest)
        answer = _parse_answer(fields, path)
        has_failed = fields.status == "error" or (parse_number(event.data.get("http_status")) or 0) >= 400
        if has_failed or (answer.message is None and not answer.action_ids):
            self.failed_requests.append(remove_keys({"timestamp": event.timestamp, **event.data}))
            return
        request, server = fields.request or {}, fields.server or {}
        step = self._add_step(request, answer, path)
        index = len(self.history.steps) - 1
        settings = remove_keys(omit_fields(request, *_REQUEST_FIELDS)) or None
        version = server.get("version", fields.model_version)
        version = version if isinstance(version, int) and not isinstance(version, bool) else None
        step.model = answer.model or server.get("model") or fields.model or request.get("model")
        step.policy_version = version
        step.finish_reason, step.prompt_tokens = answer.finish_reason, answer.prompt_tokens
        step.completion_tokens = answer.completion_tokens
        latency = parse_number(event.data.get("latency_ms"))
        step.latency = None if latency is None else latency / 1000
        if answer.prompt_ids and answer.action_ids:
            tokens = answer.prompt_ids, answer.action_ids, answer.logprobs
            step.tokens = self.lineage.add(index, *tokens, policy_version=version, **read_sampling(request))
        tools = request.get("tools")
        if index == 0:
            self.sampling, self.tools = settings, tools if isinstance(tools, list) else None
        extra = {
            **(step.extra or {}),
            **answer.extra,
            **{name: event.data[name] for name in _EXTRA_KEYS if event.data.get(name)},
            "timestamp": event.timestamp,
            "server": omit_fields(server, "model", "version"),
            "tools": tools if tools != self.tools else None,
        }
        extra = {key: field for key, field in remove_keys(extra).items() if field not in (None, {}, [])}
        # Also for a call without settings: those of the episode would apply to it otherwise.
        step.extra = (extra if settings == self.sampling else extra | {"sampling": settings or {}}) or None

    def _add_step(self, request: dict[str, Any], answer: Completion, path: str) -> StepRecord:
        prompt = request.get("messages", request.get("prompt"))
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        message = answer.message or {"role": "assistant", "content": ""}
        if isinstance(prompt, list) and not all(isinstance(entry, int) for entry in prompt):
            messages = [
                {key: field for key, field in m.items() if field is not None} if isinstance(m, dict) else m
                for m in prompt
            ]
            return self.history.add(messages, message, location=f"{path}.request.messages")
        # Only the tokens of the prompt are known.
        step = build_decision(check_message(message, f"{path}.response"), [], is_first=not self.history.steps)
        step.state = None
        self.history.steps.append(step)
        self.history.follows.append(None)
        return step


def _parse_answer(fields: _ModelRequest, path: str) -> Completion:
    if fields.response_token_ids is not None and fields.response is None:
        logprobs = fields.response_log_probs
        return Completion(
            prompt_ids=fields.prompt_token_ids or [],
            action_ids=fields.response_token_ids,
            logprobs=logprobs if logprobs and len(logprobs) == len(fields.response_token_ids) else None,
        )
    return Completion() if fields.response is None else parse_completion(fields.response, f"{path}.response")


FORMAT = Format(
    NAME,
    "agent-lightning 1.0 archives and events",
    recognise,
    read,
    no_trajectory,
    is_whole=True,
    run_folder=get_parent_folder,
)
