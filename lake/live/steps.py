"""Steps and tool calls while they run: what was seen, decided and given back, as frames of their episode."""

import math
import time
from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from lake.errors import UsageError
from lake.formats.base.rows import ShapeError
from lake.formats.base.secrets import redacted
from lake.formats.chat.chat_completions import Completion
from lake.formats.chat.messages import Message, checked, decision, tool_call
from lake.live.calls.address import Address
from lake.live.calls.clients import api_of, body_of, read_answer, read_request, sent
from lake.live.calls.prefixes import Heads, Known, Prompt
from lake.live.calls.shapes import CHAT, Asked
from lake.live.calls.steps import Call, describe, made_step, run_of, tokens_of
from lake.live.contexts import Context
from lake.live.frames import FrameError, Reward, Step, Tool, fitted, plain
from lake.live.off import OFF
from lake.live.sink import guarded, told
from lake.records import Index, Json, StepRecord, TokensRecord, as_str, printable

if TYPE_CHECKING:
    from lake.live.episode import Episode

_OF_STEPS = frozenset(StepRecord.__struct_fields__) - {"context", "action", "tool_calls", "reasoning", "tokens"}
_NONE: Sequence[int] = ()


class LiveStep(Context):
    """One decision; a context, sync or async. It is recorded when the context is left, with what was decided.

    Left with tool calls and no other action, these are what was decided.
    """

    def __init__(
        self,
        episode: "Episode",
        index: int,
        request: Mapping[str, Any] | None,
        context: Sequence[Any] | None,
        state: str | None,
        fields: dict[str, Any],
    ) -> None:
        self.index = index
        """Which step of the episode it is; later frames refer to it by this."""
        self._sink = episode._sink
        self._episode = episode
        self._request, self._context, self._fields = request, context, fields
        self._state = None if state is None else as_text(state)
        self._call: Call | None = None
        self._tokens: TokensRecord | None = None
        self._tools: list[ToolCall] = []
        self._decided: float | None = None
        """When its first tool was called, before it was said what was decided."""
        self._began, self._started_at = time.monotonic(), episode._now()
        self._is_done = False

    @guarded()
    def answer(
        self, response: Any, *, engine: str | None = None, logprobs_mode: str | None = None, **fields: Any
    ) -> None:
        """What the model answered, as its client library gives it: the text, calls, model, usage and tokens in it.

        An answer that cannot be read is the span of a call that failed, and no decision.

        Args:
            response: of chat completions, completions, Responses or Anthropic's messages, an object or its JSON; of a
                stream, the list of its chunks.
            engine: what sampled it, and its version: `vllm 0.32.0`.
            logprobs_mode: how its log-probabilities were computed: `raw` or `processed`.
            fields: further ones of `lake.StepRecord`: policy_version, cost, ...
        """
        given = sent(response)
        api = api_of(self._request or {}, given)
        self._fields |= fields
        try:
            found = read_answer(api, given, response)
        except ShapeError as error:
            problem = f"the answer cannot be read: {redacted(str(error))}"
            self._call = self._made_call(api, None, error=problem, partial=given)
            self._sink.trouble(f"LiveStep.answer: {problem}")
            return
        self._call = self._made_call(api, found, engine=engine, logprobs_mode=logprobs_mode)

    @guarded()
    def action(
        self,
        content: Any = None,
        *,
        tool_calls: Sequence[Any] | None = None,
        reasoning: str | None = None,
        tokens: TokensRecord | None = None,
        prompt_ids: Sequence[int] = _NONE,
        action_ids: Sequence[int] = _NONE,
        action_logprobs: Sequence[float] | None = None,
        **fields: Any,
    ) -> None:
        """What was decided, where it is not at hand as a client library's answer.

        Args:
            content: its text, or the assistant's message as a chat API gives it (a mapping, or a client's object).
            tool_calls: as chat APIs have them; those of `tool_call` in this step unless given.
            reasoning: the text of its reasoning, where that is kept apart.
            tokens: the exact tokens as the lake keeps them: what was added since an earlier step.
            prompt_ids: instead of `tokens`: the ids of the whole prompt, as the engine saw them. What is new is found.
            action_ids: with `prompt_ids`: the ids that were sampled.
            action_logprobs: one for each of them.
            fields: further ones of `lake.StepRecord`: finish_reason, prompt_tokens, completion_tokens, cost, ...
        """
        if content is not None and not isinstance(content, str | list):
            said = sent(content)
            content = said if isinstance(said, dict) else as_text(said)
        message = {"role": "assistant"} | (content if isinstance(content, dict) else {"content": content})
        if tool_calls is not None:
            message["tool_calls"] = tool_calls
        if reasoning is not None:
            message["reasoning_content"] = reasoning
        self._fields |= fields
        is_plain = self._request is None and tool_calls is None and type(content) is str
        answer = Completion(message=message if is_plain else sent(message))
        try:
            checked(answer.message, "action")
        except ShapeError as error:
            answer.extra["action_not_taken"] = answer.message
            answer.message = {"role": "assistant", "content": as_text(content)}
            self._sink.trouble(f"LiveStep.action: {error}")
        if prompt_ids is not _NONE or action_ids is not _NONE:
            try:
                answer.prompt_ids, answer.action_ids, answer.logprobs = exact(prompt_ids, action_ids, action_logprobs)
            except ValueError as error:
                answer.extra["tokens_left_out"] = str(error)
                self._sink.trouble(f"LiveStep.action: {error}")
        self._tokens = tokens
        self._call = self._made_call(CHAT if self._request is None else api_of(self._request), answer)

    @guarded(OFF)
    def tool_call(self, name: str, arguments: Json = None, *, call_id: str | None = None) -> "ToolCall":
        """A tool is called: a context, in which `result` says what it gave back.

        Args:
            name: the tool's.
            arguments: an object, or JSON text.
            call_id: which of the action's tool calls it is; the first of its name that is left unless given.
        """
        call = ToolCall(self._episode, self.index, name, arguments, call_id or self._free_id(name))
        if self._call is None and not self._tools:
            self._decided = time.monotonic()
        self._tools.append(call)
        return call

    @guarded()
    def reward(self, value: float) -> None:
        """What the environment gave for this step, now or after it; the last one counts."""
        given = number(value)
        if self._is_done:
            self._episode._put(Reward(value=given, step_index=self.index))
        else:
            self._fields["reward"] = given

    @guarded()
    def score(self, scorer: str, value: float | None, *, reason: str | None = None) -> None:
        """What a judge, a metric or a person says of this step."""
        self._episode.score(scorer, value, step_index=self.index, reason=reason)

    def _enter(self) -> None:
        self._began = time.monotonic()

    def _made_call(self, api: str, answer: Completion | None, **fields: Any) -> Call:
        """The call of a model that this step is. Raises UsageError: it has been left."""
        if self._is_done:
            raise UsageError("the step has been left, or its episode has ended: what was decided is told before that")
        asked, extra = Asked(messages=[]), {}
        if self._request is not None:
            try:
                asked = read_request(api, body_of(self._request))
            except ShapeError as error:
                extra["request_not_read"] = str(error)
                self._sink.trouble(f"the request of a step cannot be read: {told(error)}")
        version, model = self._fields.get("policy_version"), self._fields.get("model")
        asked.model = asked.model or (model if isinstance(model, str) else None)
        call = Call(
            address=Address(),
            api=api,
            asked=asked,
            answer=answer,
            started_at=self._started_at,
            latency=(self._decided or time.monotonic()) - self._began,
            policy_version=version if isinstance(version, int) else None,
            defaults=self._episode._sampling,
            extra=extra,
            **fields,
        )
        self._episode._describe(asked, answer)
        return call

    def _free_id(self, name: str) -> str | None:
        """The id of the first tool call of a name that the action made and nobody has answered; else one to make."""
        taken = {call.call_id for call in self._tools}
        message = _message(self._call)
        for made in message.get("tool_calls") or ():
            function = made.get("function") if isinstance(made, dict) else None
            if isinstance(function, dict) and function.get("name") == name and made.get("id") not in taken:
                return str(made["id"])
        return None if self._is_done else f"call-{self.index}-{len(self._tools)}"

    @guarded()
    def _leave(self, error: BaseException | None) -> None:
        episode = self._episode
        with episode._lock:
            if self._is_done:
                return
            if self._call is None and self._tools:
                self.action(tool_calls=self._tool_calls())
            call = self._call
            if call is None and error is not None and self._request is not None:
                call = self._made_call(api_of(self._request), None, error=told(error))
            self._is_done = True
            episode._open_steps.pop(self.index, None)
            if call is None:
                self._sink.count("undecided")
                if error is None:
                    raise UsageError(
                        "a step without an action and without tool calls is not recorded; call `step.answer(response)` "
                        "or `step.action(text)` in its context"
                    )
                return
            if call.answer is None:
                episode._put_failed(call)
                return
            frame, samples = self._seen_whole(call, call.answer) if self._request is not None else self._seen_new(call)
            self._complete(frame.step, error)
            try:
                episode._put_step(frame, samples)
            except FrameError:
                frame.step, wrong = fitted(frame.step)
                frame.step.extra = (frame.step.extra or {}) | {"not_taken": wrong}
                episode._put_step(frame, samples)
                self._sink.trouble(f"values of a step are of the wrong type and went to its `extra`: {list(wrong)}")

    def _seen_whole(self, call: Call, answer: Completion) -> tuple[Step, list[Known]]:
        """The step of a call whose whole prompt is known."""
        episode = self._episode
        made = made_step(
            call,
            answer,
            Prompt(call.asked, answer.prompt_ids),
            episode.record,
            episode._calls,
            episode._key,
            self.index,
            is_first=episode._recorded is None,
        )
        if made.before is not None:
            made.before.times += 1
        step = made.frame.step
        step.tool_calls = step.tool_calls or self._tool_calls()
        return made.frame, made.samples

    def _seen_new(self, call: Call) -> tuple[Step, list[Known]]:
        """The step of which it was said what was new to it."""
        answer, episode = call.answer or Completion(), self._episode
        message = _message(call)
        if not message.get("tool_calls") and (made := self._tool_calls()):
            message["tool_calls"] = made
        extra = dict(answer.extra)
        try:
            since = messages(self._context) if self._context is not None else []
        except ShapeError as error:
            since, extra["context_not_taken"] = [], plain(self._context)
            self._sink.trouble(f"the context of a step is no list of messages and went to its `extra`: {error}")
        if self._context is None and self._state is not None:
            since = [{"role": "user", "content": self._state}]
        step = decision(message, since, is_first=False)
        describe(step, call, answer)
        if self._state is not None:
            step.state = self._state
        step.extra = (step.extra or {}) | extra or None
        frame = Step(index=self.index, step=step, saw_results=self._context is None and self._state is None)
        if episode._recorded is None and not frame.saw_results:
            frame.initial_messages, step.context = step.context, []
        return frame, self._sampled(step, call, answer) if answer.prompt_ids else []

    def _sampled(self, step: StepRecord, call: Call, answer: Completion) -> list[Known]:
        """Give a step its tokens; where later prompts may go on from them."""
        calls, key = self._episode._calls, self._episode._key
        step.tokens = tokens_of(call, answer, Prompt(call.asked, answer.prompt_ids), calls, key)
        return [Known(owner=key, step=self.index, end=Heads(), tokens=run_of(step.tokens, calls, key))]

    def _tool_calls(self) -> list[Json] | None:
        """The tools that were called, as the calls of an action that does not say them."""
        return [tool_call(call.name, call.arguments, call.call_id) for call in self._tools] or None

    def _complete(self, step: StepRecord, error: BaseException | None) -> None:
        """Write on a step what was said of it by name."""
        step.tokens = self._tokens or step.tokens
        given = self._fields.pop("extra", {})
        extra: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {"extra": given}
        for name, value in list(self._fields.items()):
            if is_value(name, value, _OF_STEPS):
                setattr(step, name, value)
            else:
                extra[name] = as_str(value) if name in _OF_STEPS else value
                valid = f"valid: {', '.join(sorted(_OF_STEPS))}; numbers are finite"
                self._sink.trouble(f"a step takes no such `{name}`, so it went to its `extra`; {valid}")
        if error is not None:
            extra["error"] = told(error)
        if extra:
            step.extra = (step.extra or {}) | extra


class ToolCall(Context):
    """One execution of a tool; a context, sync or async, or without one: then `result` or `failed` records it."""

    def __init__(
        self, episode: "Episode", step_index: int | None, name: str, arguments: Json, call_id: str | None
    ) -> None:
        self._sink, self._episode = episode._sink, episode
        self.name, self.arguments, self.call_id = str(name), arguments, call_id
        self._frame = Tool(number=next(episode._tools), name=self.name, step_index=step_index, arguments=arguments)
        self._frame.started_at = episode._now()
        self._is_inside = False

    @guarded()
    def result(self, value: Any) -> None:
        """What it gave back: text, or anything that JSON can hold."""
        self._frame.result = value
        if not self._is_inside:
            self._leave(None)

    @guarded()
    def failed(self, message: str) -> None:
        """It gave back an error; an exception that leaves the context says so by itself."""
        self._frame.error = redacted(as_str(message))
        if not self._is_inside:
            self._leave(None)

    def _enter(self) -> None:
        self._is_inside = True

    @guarded()
    def _leave(self, error: BaseException | None) -> None:
        frame = self._frame
        frame.call_id, frame.ended_at = self.call_id, self._episode._now()
        if error is not None and frame.error is None:
            frame.error = told(error)
        self._episode._put(frame)


def is_value(name: str, value: Any, names: Container[str]) -> bool:
    """Whether something is a field, by name, and can be: a number of a table is finite."""
    return name in names and not (isinstance(value, float) and not math.isfinite(value))


def number(value: Any) -> float:
    """A finite number. Raises ValueError, TypeError: text is none, and NaN would have its whole episode rejected."""
    found = math.nan if isinstance(value, str | bytes | bytearray) else float(value)
    if not math.isfinite(found):
        raise ValueError(f"{value!r} was given; valid: a finite number")
    return found


def messages(given: Sequence[Any]) -> list[Message]:
    """Messages of a chat, as plain values. Raises ShapeError."""
    plainly = [message if type(message) is dict else plain(message) for message in given]
    return [checked(message, f"context[{index}]") for index, message in enumerate(plainly)]


def as_text(value: Any) -> str:
    """A text, or JSON of what is none."""
    return printable(value) if isinstance(value, str) else msgspec.json.encode(sent(value)).decode()


def exact(
    prompt_ids: Sequence[int], action_ids: Sequence[int], logprobs: Sequence[float] | None
) -> tuple[list[int], list[int], list[float] | None]:
    """Tokens of a call as plain numbers. Raises ValueError: they are none, or not as many."""
    try:
        prompt, sampled = (msgspec.convert(_listed(ids), list[Index]) for ids in (prompt_ids, action_ids))
        values = None if logprobs is None else msgspec.convert(_listed(logprobs), list[float])
    except msgspec.ValidationError as error:
        raise ValueError(f"the tokens of a step are left out: {error}") from error
    if bool(prompt) != bool(sampled) or (values is not None and len(values) != len(sampled)):
        count = "no" if values is None else len(values)
        raise ValueError(
            f"the tokens of a step are left out: {len(prompt)} prompt_ids, {len(sampled)} action_ids and {count} "
            "action_logprobs; valid: some of both ids, and as many log-probabilities as action_ids"
        )
    return prompt, sampled, values


def _listed(values: Any) -> Any:
    return values if type(values) is list else plain(values)


def _message(call: Call | None) -> Message:
    """What was answered so far."""
    return (call.answer.message if call is not None and call.answer is not None else None) or {"role": "assistant"}
