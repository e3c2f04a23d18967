"""The steps of an ATIF document: the decisions of an episode, and what was observed between them.

Of an episode that was read from ATIF, the messages are what `lake.formats.atif.document` makes of steps and results, so
they are turned back into these, key by key. Where a message of the user may have been either, a step or a result that
answers no call, reading gives the same for both.

Of any other episode, a tool's answer is a result of the step that called it. What an assistant said that is no decision
of the episode is a step that is marked as copied.
"""

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

import msgspec

from lake.export.target import Exported, Losses, Row, call_of, is_decision, last_words, prompts
from lake.formats.atif.document import OURS
from lake.formats.atif.reader import NAME
from lake.formats.chat.messages import text_of
from lake.records import EpisodeRecord, StepRecord, TokensRecord

_IMAGES = {".png": "image/png", ".gif": "image/gif", ".webp": "image/webp", ".jpg": "image/jpeg", ".jpeg": "image/jpeg"}
_TEXTS = frozenset(("text", "input_text", "output_text"))
_SOURCES = {"system": "system", "developer": "system"}
_ROLES = frozenset(("system", "user"))
_OF_A_RESULT = frozenset(("role", "name", "tool_call_id", "content"))
_OF_A_STEP = frozenset(("role", "content", "tool_calls", "tool_call_extra", "observation"))
_HAVE_A_PLACE = frozenset(
    ("state", "action", "context", "reasoning", "tool_calls", "is_copied_context", "model", "started_at")
) | frozenset(("prompt_tokens", "completion_tokens", "cost", "tokens"))


def steps_of(exported: Exported, refs: dict[int, list[Row]], losses: Losses) -> list[Row]:
    """The steps of an episode's document; `refs`: the sub-agents that came out of a decision."""
    return (_Kept if exported.record.source_format == NAME else _Made)(exported, refs, losses).steps


class Prompts:
    """The whole prompt of each decision whose tokens are known."""

    def __init__(self, steps: Sequence[StepRecord]) -> None:
        self._steps = steps
        self._ends: dict[int, list[int]] = {}

    def before(self, index: int, tokens: TokensRecord) -> list[int]:
        """All tokens before an action; asked for step by step."""
        prefix = tokens.prefix_step_index
        start = prefix if isinstance(prefix, int) else index - 1 if prefix is not None and index else None
        prompt = [*(self._ends[start] if start is not None else ()), *tokens.context_ids]
        self._ends[index] = [*prompt, *tokens.action_ids]
        return prompt


def tokens_are_in_trial(record: EpisodeRecord) -> bool:
    """Whether tokens that were read from a trial's result have something beside them that only stands there."""
    return record.source_format == NAME and any((step.extra or {}).get("rollout_details") for step in record.steps)


class _Steps:
    """Steps, one after the other."""

    def __init__(self, exported: Exported, refs: dict[int, list[Row]], losses: Losses) -> None:
        self.steps: list[Row] = []
        self._exported = exported
        self._losses = losses
        self._prompts = Prompts(exported.record.steps)
        self._has_tokens = not tokens_are_in_trial(exported.record)
        record = exported.record
        for index, (step, since) in enumerate(zip(record.steps, prompts(record), strict=True)):
            self._observe(since)
            if step.state is not None or is_decision(step):
                self._add(self._decision(index, step))
            for ref in refs.get(index, ()) if self.steps else ():
                self._result({"subagent_trajectory_ref": [ref]})
        self._observe(last_words(record))

    def _observe(self, messages: Sequence[Row]) -> None:
        raise NotImplementedError

    def _decision(self, index: int, step: StepRecord) -> Row:
        raise NotImplementedError

    def _add(self, step: Row) -> None:
        numbered = {"step_id": len(self.steps) + 1} | step
        self.steps.append({key: value for key, value in numbered.items() if value is not None})

    def _result(self, result: Row) -> None:
        """What came back for the last step."""
        self.steps[-1].setdefault("observation", {"results": []})["results"].append(result)

    def _metrics(self, index: int, step: StepRecord, kept: Row) -> Row | None:
        counted = {
            "prompt_tokens": step.prompt_tokens,
            "completion_tokens": step.completion_tokens,
            "cost_usd": step.cost,
        }
        metrics = kept | {key: value for key, value in counted.items() if value is not None}
        if (tokens := step.tokens) is not None and self._has_tokens:
            metrics |= {
                "prompt_token_ids": self._prompts.before(index, tokens),
                "completion_token_ids": tokens.action_ids,
            }
            if tokens.action_logprobs is not None:
                metrics["logprobs"] = tokens.action_logprobs
        return metrics or None

    def _judged(self, index: int) -> Row:
        credit = self._exported.credit_S.get(index)
        return {} if credit is None or credit.advantage is None else {"advantage": credit.advantage}


class _Kept(_Steps):
    """Of an episode that was read from ATIF."""

    def _observe(self, messages: Sequence[Row]) -> None:
        answers = [place for place, message in enumerate(messages) if self._answers(message)]
        last = answers[-1] if answers else -1
        for place, message in enumerate(messages):
            is_result = message["role"] == "tool" or (message["role"] == "user" and self._came_back(message))
            if self.steps and (place <= last or is_result):
                result = {key: value for key, value in message.items() if key not in _OF_A_RESULT}
                result["content"] = message.get("content")
                if message["role"] == "tool":
                    result = {"source_call_id": message.get("tool_call_id")} | result
                self._result({key: value for key, value in result.items() if value is not None})
            else:
                self._add(self._step(message, message["role"] if message["role"] in _ROLES else "user"))

    def _answers(self, message: Row) -> bool:
        """Whether a message is the answer to a call of the last step."""
        calls = self.steps[-1].get("tool_calls", ()) if self.steps else ()
        return message["role"] == "tool" and message.get("tool_call_id") in [call.get("tool_call_id") for call in calls]

    def _came_back(self, message: Row) -> bool:
        """Whether a message is rather a result than a step: steps have times here, and it has none."""
        last = self.steps[-1] if self.steps else {}
        return last.get("source") == "agent" and "timestamp" in last and not message.keys() & {"timestamp", "step_id"}

    def _step(self, message: Row, source: str) -> Row:
        step = {"source": source, "message": message.get("content")}
        step |= {key: value for key, value in message.items() if key not in _OF_A_STEP}
        if (calls := message.get("tool_calls")) is not None:
            more = message.get("tool_call_extra") or {}
            step["tool_calls"] = [_call_back(call, more.get(str(place))) for place, call in enumerate(calls)]
        if refs := message.get("observation"):
            step["observation"] = {"results": list(refs)}
        return step

    def _decision(self, index: int, step: StepRecord) -> Row:
        extra = dict(step.extra or {})
        metrics = self._metrics(index, step, extra.pop("metrics", {}))
        extra.pop("rollout_details", None)  # stands in the trial
        message = {"content": step.action, "tool_calls": step.tool_calls} | extra
        made = self._step(message, "agent")
        made.setdefault("timestamp", _time(step))
        if judged := self._judged(index):
            made["extra"] = made.get("extra", {}) | {OURS: judged}
        if step.is_copied_context:
            made["is_copied_context"] = True
        return made | {"model_name": step.model, "reasoning_content": step.reasoning, "metrics": metrics}


class _Made(_Steps):
    """Of an episode of another source."""

    def _observe(self, messages: Sequence[Row]) -> None:
        for message in messages:
            role, content = message["role"], self._content(message.get("content"))
            if role == "assistant":
                calls = self._calls(message.get("tool_calls"))
                copied = {"reasoning_content": message.get("reasoning_content"), "is_copied_context": True}
                self._add({"source": "agent", "message": content, "tool_calls": calls} | copied)
            elif role == "tool" and self.steps and self.steps[-1]["source"] == "agent":
                self._result(self._answer(message, content))
            else:
                extra = {} if role in ("system", "user") else {"role": role}
                extra |= {key: message[key] for key in ("tool_call_id", "name") if message.get(key) is not None}
                step = {"source": _SOURCES.get(role, "user"), "message": content}
                self._add(step | ({"extra": {OURS: extra}} if extra else {}))

    def _answer(self, message: Row, content: Any) -> Row:
        """What a tool gave back: to the call that it names, or else to the first that nothing came back for."""
        last = self.steps[-1]
        calls = [call["tool_call_id"] for call in last.get("tool_calls", ())]
        answered = {result.get("source_call_id") for result in last.get("observation", {}).get("results", ())}
        given = message.get("tool_call_id")
        open_calls = [call for call in calls if call not in answered]
        found = given if given in calls else next(iter(open_calls), None) if given is None else None
        result: Row = {"content": content} if found is None else {"source_call_id": found, "content": content}
        extra = {} if found is not None or given is None else {"tool_call_id": given}
        if message.get("is_error"):
            extra["is_error"] = True
        return result | ({"extra": {OURS: extra}} if extra else {})

    def _decision(self, index: int, step: StepRecord) -> Row:
        extra = dict(step.extra or {})
        content = self._content(extra.pop("content", step.action))
        fields = {name: getattr(step, name) for name in step.__struct_fields__ if name not in _HAVE_A_PLACE}
        left = StepRecord(state="", action="", **(fields | {"extra": extra or None}))
        judged = self._judged(index) | left_of(left, "state", "action")
        if step.tokens is not None:
            about = left_of(step.tokens, "context_ids", "action_ids", "action_logprobs", "prefix_step_index")
            judged |= {"tokens": about} if about else {}
        return {
            "source": "agent",
            "timestamp": _time(step),
            "model_name": step.model,
            "message": content,
            "reasoning_content": step.reasoning,
            "tool_calls": self._calls(step.tool_calls),
            "metrics": self._metrics(index, step, {}),
            "is_copied_context": step.is_copied_context or None,
            "extra": {OURS: judged} if judged else None,
        }

    def _calls(self, calls: Sequence[Any] | None) -> list[Row] | None:
        made = []
        for place, given in enumerate(calls or ()):
            call = call_of(given)
            arguments = call.arguments if isinstance(call.arguments, dict) else {"value": call.arguments}
            call_id = call.id if call.id is not None else f"call-{len(self.steps) + 1}-{place}"
            made.append({"tool_call_id": call_id, "function_name": call.name or "unknown", "arguments": arguments})
        return made or None

    def _content(self, content: Any) -> Any:
        """Text, or parts of it and of images."""
        if not isinstance(content, list):
            return content or ""
        parts: list[Row] = []
        for part in content:
            if isinstance(part, str):
                parts.append({"type": "text", "text": part})
            elif isinstance(part, dict) and (image := _image(part)) is not None:
                parts.append(image)
            elif isinstance(part, dict) and part.get("type") in _TEXTS and isinstance(part.get("text"), str):
                parts.append({"type": "text", "text": part["text"]})
            else:
                self._losses.add("parts that are neither text nor images")
        return parts if any(part["type"] == "image" for part in parts) else text_of(parts, "\n")


def _call_back(given: Any, extra: Any) -> Row:
    call = call_of(given)
    raw = (
        given["function"]["arguments"] if isinstance(given, dict) and "arguments" in given.get("function", {}) else None
    )
    made = {"tool_call_id": call.id, "function_name": call.name or "", "arguments": raw, "extra": extra}
    return {key: value for key, value in made.items() if value is not None}


def _image(part: Row) -> Row | None:
    """An image as ATIF has it: its type and its address, which may hold its data."""
    given, source = part.get("image_url"), part.get("source")
    url = given.get("url") if isinstance(given, dict) else given
    if isinstance(source, dict) and isinstance(source.get("data"), str):
        url = f"data:{source.get('media_type')};base64,{source['data']}"
    if not isinstance(url, str):
        return None
    kind = url[5:].partition(";")[0] if url.startswith("data:") else _IMAGES.get(PurePosixPath(url).suffix.lower())
    return {"type": "image", "source": {"media_type": kind, "path": url}} if kind in _IMAGES.values() else None


def left_of(record: Any, *known: str) -> Row:
    """The fields of a record that are not at their defaults, without those that have a place elsewhere."""
    return {key: value for key, value in msgspec.to_builtins(record).items() if key not in known}


def _time(step: StepRecord) -> str | None:
    return None if step.started_at is None else step.started_at.isoformat().replace("+00:00", "Z")
