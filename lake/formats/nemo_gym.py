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

A decision is a run of what the model wrote (reasoning, messages, calls) between what it was given. Items for training
carry `prompt_token_ids`, `generation_token_ids` and `generation_log_probs`, on the last item of a call: exact tokens.
Aviary writes a list of items per step, each the whole history up to it; those steps are put together. What stands in
for tokens that are not there (a message without text, of the one token 0) is left out. DeepSWE's rows have no request:
{task_index, instance_id, reward, trajectory: {model, output}, ...}.

There is no version. Source: NVIDIA-NeMo/Gym, rollout_collection.py and openai_utils.py (00536e7a140e),
responses_api_agents/aviary_agent (01c85079b325).
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from lake.formats.base.fields import Scores, free_number, is_score_name, number, prompt_task, whole
from lake.formats.base.format import Format
from lake.formats.base.look import Look
from lake.formats.base.rows import Item, items_of, line_values, rest
from lake.formats.base.source import Input
from lake.formats.chat.chat_messages import answered
from lake.formats.chat.messages import Conversation, Message, text_of
from lake.formats.chat.response_items import chat_tool, item_messages
from lake.formats.chat.tokens import Lineage
from lake.formats.tracing.shapes import text
from lake.records import EpisodeRecord, Index

NAME = "nemo_gym"
_OF_REQUEST = ("input", "instructions", "tools", "model", "metadata", "stream", "background", "store", "user")
_KNOWN = (
    *("responses_create_params", "response", "reward", "terminated", "truncated", "agent_ref", "_ng_failure_class"),
    *("_ng_task_index", "_ng_rollout_index", "task_idx", "ground_truth", "expected_answer"),
)
_TOKENS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


class _Usage(msgspec.Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None


class _Response(msgspec.Struct):
    output: list[Any] | None = None
    model: str | None = None
    usage: _Usage | None = None
    incomplete_details: dict[str, Any] | None = None
    error: Any = None
    tools: list[Any] | None = None


class _Request(msgspec.Struct):
    input: str | list[Any] = []
    instructions: str | None = None
    model: str | None = None
    tools: list[Any] | None = None


class _Row(msgspec.Struct):
    responses_create_params: _Request
    response: _Response | None = None
    reward: float | None = None
    terminated: bool | None = None
    truncated: bool | None = None
    agent_ref: dict[str, Any] | None = None
    task_index: int | str | None = msgspec.field(name="_ng_task_index", default=None)
    task_idx: int | str | None = None
    failure: Any = msgspec.field(name="_ng_failure_class", default=None)


def recognise(look: Look) -> bool:
    """Whether lines have a request of the Responses API, and what came of it."""
    return look.kind in ("lines", "object") and any(
        (isinstance(value.get("responses_create_params", ""), dict) and ("response" in value or "reward" in value))
        or _has_no_request(value)
        for value in look.objects
    )


def _has_no_request(value: dict[str, Any]) -> bool:
    trajectory = value.get("trajectory")
    return "task_index" in value and isinstance(trajectory, dict) and isinstance(trajectory.get("output"), list)


def no_trajectory(look: Look) -> str | None:
    """What a file beside the rollouts is."""
    if look.objects and all("mean/reward" in value for value in look.objects) and look.has("mean/reward", "agent_ref"):
        return "its rows are NeMo Gym's means of rewards; ingest the rollouts they are made of (rollouts.jsonl)"
    if look.kind == "lines" and look.has("_ng_task_index", "mean/reward"):
        return (
            "its lines are NeMo Gym's means of rewards by task; ingest the rollouts they are made of (rollouts.jsonl)"
        )
    if look.has("_ng_task_index", "verdict", "findings"):
        return "its lines are NeMo Gym's verdicts on rollouts; ingest the rollouts beside it (rollouts.jsonl)"
    if look.kind == "lines" and look.has("responses_create_params") and not recognise(look):
        return (
            "its lines are requests of NeMo Gym without responses (a data set, or materialized inputs); ingest the "
            "rollouts that were collected for them (rollouts.jsonl)"
        )
    return None


def read(file: Input) -> Iterator[Item]:
    """Records and rejects of a file, with line numbers from 1."""
    for item in line_values(file):
        yield from items_of(item, NAME, lambda value: [to_record(value, file)])


def to_record(value: Any, file: Input) -> EpisodeRecord:
    """A line as an episode.

    Raises:
        ShapeError, msgspec.ValidationError: a request, a response or an item of the wrong shape.
    """
    if isinstance(value, dict) and _has_no_request(value):
        task_name = value.get("instance_id", value["task_index"])
        named = {"responses_create_params": {}, "response": value["trajectory"], "_ng_task_index": task_name}
        value = (rest(value, "trajectory", "instance_id") or {}) | named
    row = msgspec.convert(value, _Row)
    request, response = row.responses_create_params, row.response or _Response()
    chat = _chat(request, response)
    names = [str(name) for name in (row.task_index, row.task_idx) if name is not None and str(name).strip()]
    task = names[0] if names else prompt_task([request.instructions, request.input])
    agent_id = name if isinstance(name := (row.agent_ref or {}).get("name"), str) else None
    others = rest(value, *_KNOWN) or {}
    scores = Scores()
    if row.reward is not None:
        scores.add("reward", row.reward)
    for key in [key for key, score in others.items() if is_score_name(key) and number(score) is not None]:
        scores.add(key, others.pop(key))
    truths = [value[key] for key in ("ground_truth", "expected_answer") if value.get(key) is not None]
    if truths[1:]:
        others["expected_answer"] = truths[1]
    usage = response.usage or _Usage()
    record = EpisodeRecord(
        task_id=task,
        rollout_index=free_number(file, value.get("_ng_rollout_index"), task, agent_id),
        agent_id=agent_id,
        policy=response.model or request.model,
        env_return=row.reward,
        ground_truth=truths[0] if truths else None,
        prompt_tokens=whole(usage.input_tokens),
        completion_tokens=whole(usage.output_tokens),
        tools=[chat_tool(tool) for tool in request.tools or response.tools or ()] or None,
        sampling=rest(value["responses_create_params"], *_OF_REQUEST),
        initial_messages=chat.initial_messages,
        final_observation=chat.final_observation,
        steps=chat.steps,
        scores=scores.records,
        extra=others | _left(value, agent_id) or None,
    )
    _tell_end(record, row, response)
    return record


def _tell_end(record: EpisodeRecord, row: _Row, response: _Response) -> None:
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
        record.error = text(failure)


def _left(value: dict[str, Any], agent_id: str | None) -> dict[str, Any]:
    """What no column holds of the agent, the request and the response, which repeats the request."""
    params, response = value["responses_create_params"], value.get("response") or {}
    repeated = [key for key, item in response.items() if params.get(key) == item]
    known = ("output", "model", "incomplete_details", "error", "object", "usage", "tools", *repeated)
    usage = rest(response.get("usage") or {}, "input_tokens", "output_tokens", "total_tokens")
    kept = {
        "agent_ref": rest(value.get("agent_ref") or {}, *(("name",) if agent_id else ())),
        "request": {key: params[key] for key in _OF_REQUEST[4:] if params.get(key) is not None},
        "response": (rest(response, *known) or {}) | ({"usage": usage} if usage else {}),
    }
    return {key: item for key, item in kept.items() if item}


def _chat(request: _Request, response: _Response) -> Conversation:
    """The decisions of a response, with their tokens."""
    asked = [{"role": "user", "content": request.input}] if isinstance(request.input, str) else request.input
    before: list[Message] = [{"role": "system", "content": request.instructions}] if request.instructions else []
    before += [message for message, _ in item_messages(asked, "responses_create_params.input")]
    said = item_messages(
        [item for item in _flat(response.output or [], asked) if not _is_stand_in(item)], "response.output"
    )
    chat = answered([*before, *(message for message, _ in said)], len(before), place="messages")
    lineage = Lineage()
    for index, (step, items) in enumerate(zip(chat.steps, filter(None, (items for _, items in said)), strict=True)):
        exact = next((item for item in items if item.get("generation_token_ids")), None)
        if exact is not None:
            prompt_ids, action_ids = (msgspec.convert(exact.get(key), list[Index], strict=False) for key in _TOKENS[:2])
            logprobs = msgspec.convert(exact.get(_TOKENS[2]), list[float] | None)
            step.tokens = lineage.add(index, prompt_ids, action_ids, logprobs or None)
    return chat


def _is_stand_in(item: Any) -> bool:
    return isinstance(item, dict) and item.get("generation_token_ids") == [0] and not text_of(item.get("content"))


def _flat(output: list[Any], asked: list[Any]) -> list[Any]:
    """The items of a response; of lists that each repeat the history up to their step, every item once."""
    if not any(isinstance(item, list) for item in output):
        return output
    found: list[Any] = []
    before: list[Any] = []
    for step in msgspec.convert(output, list[list[dict[str, Any]]]):
        is_whole = bool(before) and len(step) > len(before) and _is_same(step[0], before[0])
        found += step[len(before) :] if is_whole else step
        before = step
    is_asked = len(found) >= len(asked) and all(map(_is_same, found, asked))
    return found[len(asked) :] if is_asked else found


def _is_same(item: Any, other: Any) -> bool:
    keys = ("role", "content", "name", "arguments", "output")
    return all(isinstance(one, dict) for one in (item, other)) and all(item.get(key) == other.get(key) for key in keys)


FORMAT = Format(NAME, "NeMo Gym rollouts", recognise, read, no_trajectory, by_line=True)
