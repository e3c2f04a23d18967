"""SWE-agent trajectories: `<instance_id>.traj`, one JSON document per instance, and demonstration files.

.. code-block:: text

    trajectory   [{action, observation, response, thought, state, execution_time, query, extra_info}], one a model call
    history      [{role, content, agent, message_type, is_demo, action, thought, tool_calls, tool_call_ids,
                 thinking_blocks}], the chat at its end
    info         exit_status, submission (the patch), model_stats {instance_cost, tokens_sent, tokens_received,
                 api_calls}, swe_agent_version, review
    environment, replay_config (an object or JSON text: model, problem_statement {id}), attempts (of the retrying agent)

Versions: 0.x has no `query`, and `state` is text; early 1.0 calls it `messages`; a demonstration has `history` alone.
A decision is an entry of `trajectory`. Its text is `response`; its tool calls and thinking stand in `history`. What it
saw is the end of its `query`, or of `history` where there is none; the rest of `query` is a repetition and dropped.
Entries by which the tool itself says that it stops are kept and not trained on. In a demonstration the assistant
entries of `history` are the decisions; among others, entries with `is_demo` never are.

The task is the instance: `problem_statement.id`, else the file's name, which the tool makes of it. The sibling number
is a hash, of the first entry if that holds a time, else of all: no file says which of its task's rollouts it is. Each
of several `attempts` is a sibling; the score `best_attempt` says which one was chosen. The reward is the benchmark's
and stands elsewhere; a reviewer's verdict is the score `review`.

Source: SWE-agent's agents.py of 0.x and 1.x, and files of both.
"""

import json
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec

from lake.formats.base.documents import with_parts
from lake.formats.base.fields import Scores, number, sibling_number
from lake.formats.base.format import Format, past_its_own
from lake.formats.base.look import Look
from lake.formats.base.rows import Item, UnsupportedError, items_of, rest
from lake.formats.base.secrets import without_secrets
from lake.formats.base.source import Input, stem
from lake.formats.chat.messages import Conversation, Message, checked, conversation, decision, text_of
from lake.records import EpisodeRecord

NAME = "swe_agent"
_KEYS = frozenset(("trajectory", "history", "info", "environment", "attempts", "replay_config"))
_ATTEMPTS = re.compile(r'\A\s*\{\s*"attempts"\s*:\s*\[\s*\{\s*"trajectory"\s*:')
_RESPONSE = re.compile(r'"response"\s*:\s*"')
_LIMITS = ("exit_cost", "exit_context", "exit_total_execution_time", "exit_command_timeout")
_ENDED_BY_AGENT = ("submitted", "exit_forfeit", "exit_command")
_FAULTS = ("exit_format", "exit_api", "exit_error", "exit_environment_error")
_PATCH = ("edited_files30", "edited_files50", "edited_files70", "submission", "exit_status", "review", "model_stats")
_MOST = 1 << 63


class _Entry(msgspec.Struct):
    """One model call."""

    response: str | None
    action: str | None = None
    observation: str | None = None
    thought: str | None = None
    query: list[Any] | None = None
    messages: list[Any] | None = None

    @property
    def sent(self) -> list[Any]:
        """The messages that the model was sent."""
        return [message for message in self.query or self.messages or () if message]

    @property
    def is_call(self) -> bool:
        """Whether a model was asked, as opposed to the tool that says why it stops."""
        if self.query is not None or self.messages is not None:
            return bool(self.sent)
        return bool(self.response) or not (self.action or "").startswith("exit_")


class _Attempt(msgspec.Struct):
    """A whole run of the agent."""

    trajectory: list[_Entry] | None = None
    history: list[Any] | None = None
    info: dict[str, Any] | None = None
    environment: str | None = None
    replay_config: dict[str, Any] | str | None = None


def recognise(look: Look) -> bool:
    """Whether a file is a trajectory or a demonstration."""
    if look.kind not in ("object", "lines") or not look.objects:
        return False
    keys, history = look.first.keys(), look.first.get("history")
    if {"trajectory", "history"} <= keys or {"trajectory", "environment", "info"} <= keys:
        return True
    if _ATTEMPTS.search(look.text) or ("trajectory" in keys and keys <= _KEYS and _RESPONSE.search(look.text)):
        return True
    first = history[0] if isinstance(history, list) and history else None
    return keys <= _KEYS and isinstance(first, dict) and {"role", "agent"} <= first.keys()


def read(file: Input) -> Iterator[Item]:
    """The record of a file, or one for each of its attempts, and the reject if it is damaged."""
    for item, is_cut in with_parts(file, "trajectory", "history"):
        yield from items_of(item, NAME, partial(_records, file=file, is_cut=is_cut))


def _records(value: Any, file: Input, *, is_cut: bool) -> list[EpisodeRecord]:
    attempts = value.get("attempts") if isinstance(value, dict) else None
    if not isinstance(attempts, list) or not attempts:
        return [_record(value, file, "", is_cut=is_cut)]
    records = [_record(attempt, file, f"attempts[{at}].") for at, attempt in enumerate(attempts)]
    info = value.get("info")
    if isinstance(info, dict) and info.get("best_attempt_idx") in range(len(attempts)):
        # As a score it is no part of the content: the attempt's own file beside this one is the same episode.
        for index, record in enumerate(records):
            is_best = index == info["best_attempt_idx"]
            scores = Scores()
            scores.add("best_attempt", is_best, metrics=rest(info, "best_attempt_idx", *_PATCH) if is_best else None)
            record.scores += scores.records
    return records


def _record(value: Any, file: Input, place: str, *, is_cut: bool = False) -> EpisodeRecord:
    attempt = msgspec.convert(value, _Attempt)
    history = [_message(message, f"{place}history[{at}]") for at, message in enumerate(attempt.history or ())]
    if attempt.trajectory is None:
        chat = _demonstration(history, f"{place}history")
    else:
        chat = _Alignment(attempt.trajectory, value["trajectory"], history, f"{place}trajectory").chat()
    config, info = _config(attempt.replay_config), attempt.info or {}
    model, stats = _at(config, "agent", "model"), _at(info, "model_stats")
    record = EpisodeRecord(
        task_id=_text(_at(config, "problem_statement").get("id")) or stem(file.path),
        rollout_index=_sibling(value),
        environment=attempt.environment,
        policy=_text(model.get("name")),
        sampling={key: model[key] for key in ("temperature", "top_p") if number(model.get(key)) is not None} or None,
        steps=chat.steps,
        initial_messages=chat.initial_messages,
        final_observation=chat.final_observation,
        prompt_tokens=_count(stats.get("tokens_sent")),
        completion_tokens=_count(stats.get("tokens_received")),
        cost=number(stats.get("instance_cost")),
        source_version=_version(info),
    )
    scores = Scores()
    if isinstance(review := info.get("review"), dict):
        scores.add("review", review.get("accept"), metrics=rest(review, "accept"))
    record.scores = scores.records
    extra = rest(value, "trajectory", "history", "environment", "info", "replay_config", "attempts") or {}
    known = ("exit_status", "review") if scores.records else ("exit_status",)
    extra |= {"info": kept} if (kept := rest(info, *known)) else {}
    extra |= {"replay_config": config or attempt.replay_config} if attempt.replay_config else {}
    if is_cut:
        record.status, extra["is_cut"] = "aborted", True
    elif attempt.trajectory is not None:
        _end(record, info, attempt.trajectory)
    record.extra = without_secrets(extra) or None
    return record


def _end(record: EpisodeRecord, info: dict[str, Any], entries: list[_Entry]) -> None:
    """How it ended, by the exit status; `submitted (exit_cost)` is a patch that was taken when the limit came."""
    said = _text(info.get("exit_status"))
    if said is None:
        record.status = "aborted"
        return
    record.stop_reason = said
    if any(limit in said for limit in _LIMITS):
        record.status, record.terminated = "truncated", False
    elif any(fault in said for fault in _FAULTS):
        record.status = "failed"
        record.error = entries[-1].thought or said if entries and not entries[-1].is_call else said
    elif said.startswith(_ENDED_BY_AGENT):
        record.terminated = True


def _demonstration(history: list[Message], place: str) -> Conversation:
    """A demonstration: its assistant entries, unless it marks some of them as taken from elsewhere."""
    own = [m for m in history if m["role"] == "assistant" and not m.get("is_demo")]
    chat = conversation(
        history, is_decision=lambda m: m["role"] == "assistant" and not (own and m.get("is_demo")), place=place
    )
    for step in chat.steps:
        step.extra = _without_thought(step.extra or {}, step.action) or None
    return chat


class _Alignment:
    """Entries of a trajectory, and the messages of the history that they are."""

    def __init__(self, entries: list[_Entry], given: list[dict[str, Any]], history: list[Message], place: str) -> None:
        self._entries, self._given, self._history = entries, given, history
        self._sent = [
            [_message(message, f"{place}[{at}].query[{n}]") for n, message in enumerate(_new(entry.sent, at))]
            for at, entry in enumerate(entries)
        ]
        self._done = 0
        """Messages of the history before the next one that is not passed."""

    def chat(self) -> Conversation:
        """The entries as decisions."""
        found = Conversation()
        last: _Entry | None = None
        for index, entry in enumerate(self._entries):
            before = self._done
            said = self._said(entry)
            since = self._sent[index] or self._observed(before, last, is_first=index == 0)
            if index == 0:
                found.initial_messages = since
            elif last is not None and last.observation and not _holds(since, last.observation):
                # What the tool made of it was cut; this is the whole.
                previous = found.steps[-1]
                previous.extra = (previous.extra or {}) | {"observation": last.observation}
            found.steps.append(decision(self._acted(index, said), since, is_first=index == 0))
            found.steps[-1].trainable = entry.is_call
            if entry.is_call and entry.response and entry.action is not None and not entry.action.strip():
                found.steps[-1].is_action_valid = False
            last = entry
        if self._entries:
            found.final_observation = self._observed(self._done, last, is_first=False, is_end=True)
        else:
            found.initial_messages = self._history
        return found

    def _said(self, entry: _Entry) -> Message | None:
        """The message of the history that an entry is; what the model had to say again is in none."""
        is_next = True
        for at in range(self._done, len(self._history)):
            message = self._history[at]
            if message["role"] != "assistant" or message.get("is_demo"):
                continue
            is_same = text_of(message.get("content")) == (entry.response or "")
            if is_same and (is_next or (entry.response and message.get("action") == entry.action)):
                self._done = at + 1
                return message
            is_next = False
        return None

    def _observed(self, before: int, last: _Entry | None, *, is_first: bool, is_end: bool = False) -> list[Message]:
        """What stands in the history between two decisions; where it does not, what the environment said."""
        end = len(self._history) if is_end else self._done - 1
        if is_first and self._done == 0:
            is_own = (at for at, m in enumerate(self._history) if m["role"] == "assistant" and not m.get("is_demo"))
            end = next(is_own, len(self._history))
        messages = self._history[before : max(end, before)]
        if not messages and last is not None and last.observation is not None:
            return [{"role": "user", "content": last.observation}]
        return messages

    def _acted(self, index: int, said: Message | None) -> Message:
        entry, given = self._entries[index], self._given[index]
        kept = rest(given, "response", "observation", "query", "messages") or {}
        kept = {key: value for key, value in kept.items() if value not in ({}, [], "")}
        kept = _without_thought(kept, entry.response or "")
        from_history = {
            key: said[key] for key in ("tool_calls", "reasoning_content", "thinking_blocks") if said and said.get(key)
        }
        return kept | from_history | {"role": "assistant", "content": entry.response}


def _new(sent: list[Any], index: int) -> list[Any]:
    """Of what a call was sent, what came since the call before; all of it for the first."""
    if index == 0:
        return sent
    acted = [at for at, m in enumerate(sent) if isinstance(m, dict) and m.get("role") == "assistant"]
    return sent[acted[-1] + 1 :] if acted else sent


def _message(given: Any, place: str) -> Message:
    """A message of the history in the form of chat APIs. Raises ShapeError: it is none."""
    message = dict(checked(given, place))
    if isinstance(blocks := message.get("thinking_blocks"), list):
        thoughts = [block.get("thinking") for block in blocks if isinstance(block, dict)]
        message.setdefault("reasoning_content", "".join(t for t in thoughts if isinstance(t, str)) or None)
    ids = message.get("tool_call_ids")
    if message["role"] == "tool" and isinstance(ids, list) and len(ids) == 1:
        message["tool_call_id"] = message.pop("tool_call_ids")[0]
    return {key: value for key, value in message.items() if value is not None or key == "content"}


def _without_thought(extra: dict[str, Any], response: str) -> dict[str, Any]:
    """Without a thought that only repeats a part of the response."""
    thought = extra.get("thought")
    if isinstance(thought, str) and thought.strip() in response:
        return {key: value for key, value in extra.items() if key != "thought"}
    return extra


def _holds(messages: list[Message], observation: str) -> bool:
    return any(observation.strip() in text_of(message.get("content"), "\n") for message in messages)


def _sibling(value: dict[str, Any]) -> int:
    entries = value.get("trajectory") or []
    marks = [{k: v for k, v in entry.items() if k not in ("query", "messages")} for entry in entries]
    if marks and marks[0].get("execution_time"):
        marks = marks[:1]
    return sibling_number(json.dumps(marks or value.get("history"), sort_keys=True))


def _config(given: dict[str, Any] | str | None) -> dict[str, Any]:
    try:
        config = msgspec.json.decode(given) if isinstance(given, str) else given
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def _version(info: dict[str, Any]) -> str | None:
    version = _text(info.get("swe_agent_version"))
    if version is not None and (major := re.match(r"(\d+)\.", version)) and major[1] not in ("0", "1"):
        raise UnsupportedError(f"`info.swe_agent_version` is {version!r}; known: 0.x and 1.x")
    return version


def _at(value: dict[str, Any], *keys: str) -> dict[str, Any]:
    for key in keys:
        inner = value.get(key)
        value = inner if isinstance(inner, dict) else {}
    return value


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value.strip() else None


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < _MOST else None


FORMAT = Format(NAME, "SWE-agent trajectories (.traj)", recognise, read, is_whole=True, run_folder=past_its_own)
