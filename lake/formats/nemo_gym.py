"""NeMo Gym rollouts: `rollouts.jsonl` and `example_rollouts.jsonl`, a line per rollout.

.. code-block:: text

    responses_create_params   request of the Responses API     prompt, tools, sampling parameters
    response                  {output: [items], model, usage}  decisions and observations, in order
    reward                    of the resources server          return, and the score `reward`
    terminated, truncated     since gymnasium environments     how it ended
    _ng_task_index, _ng_rollout_index; task_idx (aviary)       task and sibling; else equal requests are siblings
    agent_ref                 {type, name}                     agent
    _ng_failure_class         of failed rollouts               status failed, error
    <further>                 of the verifier                  scores where named like one, else extra

Episode: a line. DeepSWE's rows have no request: {task_index, instance_id, reward, trajectory: {model, output}, ...}.
Step: a run of what the model wrote (reasoning, messages, calls) between two inputs. Items for training have
`prompt_token_ids`, `generation_token_ids` and `generation_log_probs` on the last item of a call: exact tokens. Aviary
writes a list of items per step, each with the history up to it. A placeholder for missing tokens (a message without
text, of the one token 0) is dropped. Refused: means of rewards, verdicts, and requests without responses.

The format has no version. Source: NVIDIA-NeMo/Gym, rollout_collection.py and openai_utils.py (00536e7a140e),
responses_api_agents/aviary_agent (01c85079b325).
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from lake.formats.base.fields import (
    ScoreList,
    as_object,
    as_text,
    choose_rollout_index,
    is_score_name,
    make_prompt_task_id,
    parse_count,
    parse_number,
    split_group,
)
from lake.formats.base.format import FileHead, Format, Item
from lake.formats.base.rows import convert_values, omit_fields, read_line_values
from lake.formats.base.source import Input
from lake.formats.chat.completions import Lineage, group_items, to_chat_tool
from lake.formats.chat.data_sets import parse_answers_from
from lake.formats.chat.messages import ChatDecisions, Message, join_text
from lake.formats.tracing.payloads import to_text
from lake.records import EpisodeRecord, Index

NAME = "nemo_gym"
_REQUEST_KEYS = ("input", "instructions", "tools", "model", "metadata", "stream", "background", "store", "user")
_MAPPED_KEYS = (
    *("responses_create_params", "response", "reward", "terminated", "truncated", "agent_ref", "_ng_failure_class"),
    *("_ng_task_index", "_ng_rollout_index", "task_idx", "ground_truth", "expected_answer"),
)


class _GymUsage(msgspec.Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None


class _GymResponse(msgspec.Struct):
    output: list[Any] | None = None
    model: str | None = None
    usage: _GymUsage | None = None
    incomplete_details: dict[str, Any] | None = None
    error: Any = None
    tools: list[Any] | None = None


class _GymRequest(msgspec.Struct):
    input: str | list[Any] = []
    instructions: str | None = None
    model: str | None = None
    tools: list[Any] | None = None


class _GymRow(msgspec.Struct):
    responses_create_params: _GymRequest
    response: _GymResponse | None = None
    reward: float | None = None
    terminated: bool | None = None
    truncated: bool | None = None
    agent_ref: dict[str, Any] | None = None
    task_index: int | str | None = msgspec.field(name="_ng_task_index", default=None)
    task_idx: int | str | None = None
    failure: Any = msgspec.field(name="_ng_failure_class", default=None)


def recognise(look: FileHead) -> bool:
    """Return whether lines have a request of the Responses API with its response or reward."""
    return look.kind in ("lines", "object") and any(
        (isinstance(value.get("responses_create_params", ""), dict) and ("response" in value or "reward" in value))
        or _has_no_request(value)
        for value in look.objects
    )


def _has_no_request(value: dict[str, Any]) -> bool:
    trajectory = value.get("trajectory")
    return "task_index" in value and isinstance(trajectory, dict) and isinstance(trajectory.get("output"), list)


def no_trajectory(look: FileHead) -> str | None:
    """Name the tool's files that hold no rollouts."""
    is_mean = look.has("mean/reward", "agent_ref") and all("mean/reward" in value for value in look.objects)
    kind = None
    if is_mean or (look.kind == "lines" and look.has("_ng_task_index", "mean/reward")):
        kind = "NeMo Gym's means of rewards by task or agent"
    elif look.has("_ng_task_index", "verdict", "findings"):
        kind = "NeMo Gym's verdicts on rollouts"
    elif look.kind == "lines" and look.has("responses_create_params") and not recognise(look):
        kind = "requests of NeMo Gym without responses (a data set, or materialized inputs)"
    return kind and f"its rows are {kind}; ingest the rollouts that belong to them (rollouts.jsonl)"


def read(file: Input) -> Iterator[Item]:
    """Yield records and rejects of a file, with line numbers from 1."""
    return convert_values(read_line_values(file), NAME, lambda value: [build_record(value, file)])


def build_record(value: Any, file: Input) -> EpisodeRecord:
    """Return a line as an episode. Raises ShapeError, msgspec.ValidationError: it has another shape."""
    if isinstance(value, dict) and _has_no_request(value):
        task_name = value.get("instance_id", value["task_index"])
        fields = {"responses_create_params": {}, "response": value["trajectory"], "_ng_task_index": task_name}
        value = (omit_fields(value, "trajectory", "instance_id") or {}) | fields
    row = msgspec.convert(value, _GymRow)
    request, response = row.responses_create_params, row.response or _GymResponse()
    chat = _parse_response(request, response)
    names = [str(name) for name in (row.task_index, row.task_idx) if name is not None and str(name).strip()]
    truths = [value[key] for key in ("ground_truth", "expected_answer") if value.get(key) is not None]
    task = names[0] if names else make_prompt_task_id([request.instructions, request.input])
    key = as_text(value.get("_ng_group_id"))
    if key is not None or not names:
        task = split_group(file, task, key=key, truth=truths)
    agent_id = name if isinstance(name := (row.agent_ref or {}).get("name"), str) else None
    extra = omit_fields(value, *_MAPPED_KEYS) or {}
    scores = ScoreList()
    if row.reward is not None:
        scores.add("reward", row.reward)
    for key in [key for key, score in extra.items() if is_score_name(key) and parse_number(score) is not None]:
        scores.add(key, extra.pop(key))
    if truths[1:]:
        extra["expected_answer"] = truths[1]
    usage = response.usage or _GymUsage()
    record = EpisodeRecord(
        task_id=task,
        rollout_index=choose_rollout_index(file, value.get("_ng_rollout_index"), task, agent_id),
        agent_id=agent_id,
        policy=response.model or request.model,
        env_return=row.reward,
        ground_truth=truths[0] if truths else None,
        prompt_tokens=parse_count(usage.input_tokens),
        completion_tokens=parse_count(usage.output_tokens),
        tools=[to_chat_tool(tool) for tool in request.tools or response.tools or ()] or None,
        sampling=omit_fields(value["responses_create_params"], *_REQUEST_KEYS),
        **chat.fields,
        scores=scores.records,
        extra=extra | _collect_extra(value, agent_id) or None,
    )
    _set_end(record, row, response)
    return record


def _set_end(record: EpisodeRecord, row: _GymRow, response: _GymResponse) -> None:
    reason = (response.incomplete_details or {}).get("reason")
    if isinstance(reason, str):
        record.stop_reason = reason
        if record.steps:
            record.steps[-1].finish_reason = reason
    is_cut = row.truncated or (reason is not None and not row.terminated)
    record.terminated = True if row.terminated else False if is_cut else None
    failure = row.failure if row.failure is not None else response.error
    record.status = "failed" if failure else "truncated" if is_cut else "completed"
    if failure:
        record.error = to_text(failure)


def _collect_extra(value: dict[str, Any], agent_id: str | None) -> dict[str, Any]:
    """Return the fields of agent, request and response that no column holds; the response repeats the request."""
    params, response = value["responses_create_params"], value.get("response") or {}
    repeated_keys = [key for key, field in response.items() if params.get(key) == field]
    mapped_keys = ("output", "model", "incomplete_details", "error", "object", "usage", "tools", *repeated_keys)
    usage = omit_fields(response.get("usage") or {}, "input_tokens", "output_tokens", "total_tokens")
    extra = {
        "agent_ref": omit_fields(value.get("agent_ref") or {}, *(("name",) if agent_id else ())),
        "request": {key: params[key] for key in _REQUEST_KEYS[4:] if params.get(key) is not None},
        "response": (omit_fields(response, *mapped_keys) or {}) | ({"usage": usage} if usage else {}),
    }
    return {key: fields for key, fields in extra.items() if fields}


def _parse_response(request: _GymRequest, response: _GymResponse) -> ChatDecisions:
    prompt = [{"role": "user", "content": request.input}] if isinstance(request.input, str) else request.input
    before: list[Message] = [{"role": "system", "content": request.instructions}] if request.instructions else []
    before += [message for message, _ in group_items(prompt, "responses_create_params.input")]
    items = [
        item
        for item in _flatten(response.output or [], prompt)
        if as_object(item).get("generation_token_ids") != [0] or join_text(item.get("content"))
    ]
    groups = group_items(items, "response.output")
    chat = parse_answers_from([*before, *(message for message, _ in groups)], len(before), location="messages")
    lineage = Lineage()
    for index, (step, items) in enumerate(zip(chat.steps, filter(None, (items for _, items in groups)), strict=True)):
        for exact in [item for item in items if item.get("generation_token_ids")][:1]:
            keys = ("prompt_token_ids", "generation_token_ids")
            prompt_ids, action_ids = (msgspec.convert(exact.get(key), list[Index], strict=False) for key in keys)
            logprobs = msgspec.convert(exact.get("generation_log_probs"), list[float] | None)
            step.tokens = lineage.add(index, prompt_ids, action_ids, logprobs or None)
    return chat


def _flatten(output: list[Any], prompt: list[Any]) -> list[Any]:
    """Return the items of a response, each once. Lists of items each repeat the history up to their step."""
    if not any(isinstance(item, list) for item in output):
        return output
    items: list[Any] = []
    before: list[Any] = []
    for step in msgspec.convert(output, list[list[dict[str, Any]]]):
        repeats = bool(before) and len(step) > len(before) and _are_equal_items(step[0], before[0])
        items += step[len(before) :] if repeats else step
        before = step
    has_prompt = len(items) >= len(prompt) and all(map(_are_equal_items, items, prompt))
    return items[len(prompt) :] if has_prompt else items


def _are_equal_items(a_item: Any, b_item: Any) -> bool:
    are_objects = isinstance(a_item, dict) and isinstance(b_item, dict)
    return are_objects and all(
        a_item.get(key) == b_item.get(key) for key in ("role", "content", "name", "arguments", "output")
    )


FORMAT = Format(NAME, "NeMo Gym rollouts", recognise, read, no_trajectory, by_line=True)
