"""mini-swe-agent trajectories: `.traj.json`, one JSON document per run; before 1.0 the bare list of its messages.

.. code-block:: text

    trajectory_format   mini-swe-agent-1 (commands in the text) or mini-swe-agent-1.1 (tool calls)
    info                exit_status, submission, model_stats {instance_cost, api_calls}, mini_version,
                        config {agent, model, environment and their types}
    messages            chat messages; each may have `extra`: of the assistant's {actions, response, cost, timestamp},
                        of an observation {raw_output, returncode, ...}. The last may have the role `exit`.
    instance_id         in SWE-bench runs

With the Responses API an assistant's message is the answer itself (`object: response`, `output` items), and a result
is a `function_call_output` item. A decision is an assistant's message. `extra.response` repeats it, and gives model,
tokens and finish reason; `extra.actions` repeats the tool calls, or the command in the text.

The task is the instance, else a hash of the first user message, which holds the task's text. The sibling number is a
hash of what the first decision has that no other has (its time and response id); of all messages, where it has neither.
The reward is the benchmark's and stands elsewhere.

Source: mini-swe-agent 2.4.6 (agents/default.py, models/), files of 1.x and of 2.x.
"""

import json
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec

from lake.formats.base.documents import gathered, is_array, problem_of, with_parts
from lake.formats.base.fields import moment, number, prompt_task, sibling_number
from lake.formats.base.format import Format, past_its_own
from lake.formats.base.look import Look
from lake.formats.base.rows import Item, ShapeError, UnsupportedError, array_values, items_of, rest
from lake.formats.base.secrets import without_secrets
from lake.formats.base.source import Input
from lake.formats.chat.answers import of_input, of_output, tell
from lake.formats.chat.messages import Message, conversation, text_of
from lake.formats.chat.sessions import complete
from lake.formats.chat.tokens import Lineage
from lake.records import EpisodeRecord, Reject, StepRecord

NAME = "mini_swe_agent"
_FORMATS = ("mini-swe-agent-1", "mini-swe-agent-1.1")
_OWN_WORDS = re.compile(r"SUBMIT_FINAL_OUTPUT|SWE_AGENT_FINAL_OUTPUT|mswea_bash_command")
_OWN_FIELDS = re.compile(r'"(?:mini_version|trajectory_format)"\s*:\s*"(?:mini-swe-agent|\d)|"minisweagent\.')
_LIMITS = ("LimitsExceeded", "TimeExceeded", "CostLimitExceeded", "StepLimitExceeded")


class _Info(msgspec.Struct):
    """What the run says of itself."""

    exit_status: str | None = None
    mini_version: str | None = None
    model_stats: dict[str, Any] | None = None
    config: dict[str, Any] | None = None
    exception_str: str | None = None


class _Run(msgspec.Struct):
    """A document."""

    messages: list[Any]
    info: _Info | None = None
    trajectory_format: str | None = None
    instance_id: str | None = None


def recognise(look: Look) -> bool:
    """Whether a file is a run, or the bare messages of one."""
    if look.kind == "array":
        first = look.first
        is_chat = first.get("role") in ("system", "user") and "content" in first
        return is_chat and (_OWN_WORDS.search(look.text) is not None or look.path.name.endswith(".traj.json"))
    if look.kind not in ("object", "lines"):
        return False
    if str(look.first.get("trajectory_format")).startswith("mini-swe-agent"):
        return True
    info = look.first.get("info")
    if isinstance(info, dict) and {"exit_status", "submission"} <= info.keys() and "messages" in look.first:
        return True
    return look.has("info") and _OWN_FIELDS.search(look.text) is not None


def read(file: Input) -> Iterator[Item]:
    """The record of a file, and the rejects if it is damaged."""
    if is_array(file.path):
        yield from _bare(file)
        return
    for item, is_cut in with_parts(file, "messages"):
        yield from items_of(item, NAME, partial(_records, is_cut=is_cut))


def _bare(file: Input) -> Iterator[Item]:
    """A list of messages: those that are damaged are rejects, the others make the episode."""
    messages: list[Any] = []
    lost = 0
    is_cut = False
    for item in array_values(file):
        if isinstance(item, Reject):
            is_cut = is_cut or item.reason == "truncated"
        elif (problem := problem_of(item)) is not None:
            item.problem = problem
        else:
            try:
                messages.append(_message(item.value, item.index))
                continue
            except ShapeError as error:
                item.problem = str(error)
        lost += 1
        yield from items_of(item, NAME, lambda _: ())
    if messages or not lost:
        run = gathered({"messages": messages})
        yield from items_of(run, NAME, partial(_records, is_cut=is_cut, lost=lost))


def _records(value: Any, *, is_cut: bool, lost: int = 0) -> list[EpisodeRecord]:
    run = msgspec.convert(value, _Run)
    if run.trajectory_format not in (None, *_FORMATS):
        known = f"{_FORMATS[0]} to {_FORMATS[-1]}"
        raise UnsupportedError(f"`trajectory_format` is {run.trajectory_format!r}; known: {known}")
    messages = [_message(message, index) for index, message in enumerate(run.messages)]
    chat = conversation(messages)
    lineage = Lineage()
    for index, step in enumerate(chat.steps):
        _complete(step, lineage, index)
    info = run.info or _Info()
    given_model = (info.config or {}).get("model")
    model = given_model if isinstance(given_model, dict) else {}
    asked = next((text_of(m.get("content"), "\n") for m in chat.initial_messages if m["role"] == "user"), "")
    extra = rest(value, "messages", "trajectory_format", "instance_id", "info") or {}
    if kept := rest(value.get("info") or {}, "exit_status"):
        extra["info"] = kept
    extra |= {"is_cut": True} if is_cut else {}
    extra |= {"lost_messages": lost} if lost else {}
    record = EpisodeRecord(
        task_id=run.instance_id or prompt_task(asked),
        rollout_index=_sibling(run.messages),
        sampling=without_secrets(kwargs) if isinstance(kwargs := model.get("model_kwargs"), dict) else None,
        steps=[],
        cost=number((info.model_stats or {}).get("instance_cost")),
        started_at=chat.steps[0].started_at if chat.steps else None,
        source_version=run.trajectory_format,
        extra=without_secrets(extra) or None,
    )
    complete(record, chat)
    record.policy = name if isinstance(name := model.get("model_name"), str) else record.policy
    _end(record, info, is_cut=is_cut)
    return [record]


def _end(record: EpisodeRecord, info: _Info, *, is_cut: bool) -> None:
    said = record.stop_reason = info.exit_status or None
    if is_cut or (said is None and info.exit_status is not None):
        record.status = "aborted"
    elif said == "Submitted":
        record.terminated = True
    elif said in _LIMITS:
        record.status, record.terminated = "truncated", False
    elif said is not None and said.startswith("User"):
        record.status = "aborted"
    elif said is not None:
        record.status, record.error = "failed", info.exception_str or said


def _message(given: Any, index: int) -> Message:
    """A message in the form of chat APIs. Raises ShapeError: it is none."""
    place = f"messages[{index}]"
    if isinstance(given, dict) and "role" not in given and "output" in given and given.get("object") == "response":
        answer = {key: value for key, value in given.items() if key not in ("output", "extra")}
        extra = given["extra"] if isinstance(given.get("extra"), dict) else {}
        return of_output(given["output"], f"{place}.output") | {"extra": extra | {"response": answer}}
    return of_input(given, place)


def _complete(step: StepRecord, lineage: Lineage, index: int) -> None:
    """Write on a decision what `extra` says of its call; what repeats the message is left out."""
    kept = step.extra or {}
    step.started_at = moment(kept.get("timestamp"))
    if step.started_at is not None:
        del kept["timestamp"]
    of_message = kept.pop("extra", None)
    if not isinstance(of_message, dict):
        step.extra = kept | ({"extra": of_message} if of_message is not None else {}) or None
        return
    step.started_at = moment(of_message.get("timestamp")) or step.started_at
    step.cost = number(of_message.get("cost"))
    answer = of_message.get("response")
    response = tell(step, answer, lineage, index) if isinstance(answer, dict) else answer
    more = rest(of_message, "cost", "response", *(("actions",) if step.tool_calls else ())) or {}
    more |= {"response": response} if response is not None else {}
    step.extra = kept | ({"extra": more} if more else {}) or None


def _sibling(messages: list[Any]) -> int:
    """A number by the first answer's time and id; by all messages if it has neither."""
    for message in messages:
        if isinstance(message, dict) and (message.get("role") == "assistant" or "output" in message):
            extra: dict[str, Any] = given if isinstance(given := message.get("extra"), dict) else {}
            answer: dict[str, Any] = said if isinstance(said := extra.get("response"), dict) else message
            marks = [answer.get("id"), extra.get("timestamp", message.get("timestamp"))]
            if marks != [None, None]:
                return sibling_number(json.dumps(marks))
            break
    return sibling_number(json.dumps(messages, sort_keys=True))


FORMAT = Format(
    NAME, "mini-swe-agent trajectories (.traj.json)", recognise, read, is_whole=True, run_folder=past_its_own
)
