"""Steps and tool calls while they run: what was seen, decided and given back, as frames of their episode."""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

from lake.errors import UsageError
from lake.formats.base.rows import ShapeError
from lake.formats.chat.messages import Message, checked, decision, tool_call
from lake.live.frames import FrameError, Reward, Step, Tool, fitted, plain
from lake.live.off import OFF
from lake.live.sink import guarded
from lake.records import Json, StepRecord, TokensRecord, excerpt

if TYPE_CHECKING:
    from lake.live.episode import Episode

_ERROR_LENGTH = 4000
"""Characters of an exception that are kept."""
_OF_STEPS = frozenset(StepRecord.__struct_fields__) - {"context", "action", "tool_calls", "reasoning", "tokens"}


class LiveStep:
    """One decision; a context, sync or async. It is recorded when the context is left, if `action` was called."""

    def __init__(
        self, episode: "Episode", index: int, context: Sequence[Any] | None, state: str | None, fields: dict[str, Any]
    ) -> None:
        self.index = index
        """Which step of the episode it is; later frames refer to it by this."""
        self._sink = episode._sink
        self._episode = episode
        self._context, self._state, self._fields = context, state, fields
        self._answer: Message | None = None
        self._tokens: TokensRecord | None = None
        self._calls: list[ToolCall] = []
        self._began = self._acted = 0.0
        self._started_at = episode._now()
        self._is_done = False

    @guarded()
    def action(
        self,
        content: Any = None,
        *,
        tool_calls: Sequence[Any] | None = None,
        reasoning: str | None = None,
        tokens: TokensRecord | None = None,
        **fields: Any,
    ) -> None:
        """What was decided.

        Args:
            content: its text, or the assistant's message as a chat API gives it (a mapping, or a client's object).
            tool_calls: as chat APIs have them; those of `tool_call` in this step unless given.
            reasoning: the text of its reasoning, where that is kept apart.
            tokens: the exact tokens, as the engine saw and sampled them.
            fields: further ones of `lake.StepRecord`: finish_reason, prompt_tokens, completion_tokens, cost, ...
        """
        self._acted = time.monotonic()
        if content is not None and not isinstance(content, str | list):
            said = plain(content)
            content = said if isinstance(said, dict) else str(said)
        answer = {"role": "assistant"} | (content if isinstance(content, dict) else {"content": content})
        if tool_calls is not None:
            answer["tool_calls"] = [plain(call) for call in tool_calls]
        if reasoning is not None:
            answer["reasoning_content"] = reasoning
        self._answer, self._tokens = checked(answer, "action"), tokens
        self._fields |= fields

    @guarded(OFF)
    def tool_call(self, name: str, arguments: Json = None, *, call_id: str | None = None) -> "ToolCall":
        """A tool is called: a context, in which `result` says what it gave back.

        Args:
            name: the tool's.
            arguments: an object, or JSON text.
            call_id: which of the action's tool calls it is; the first of its name that is left unless given.
        """
        call = ToolCall(self._episode, self.index, name, arguments, call_id or self._free_id(name))
        self._calls.append(call)
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

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._done(error)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._sink.must_wait:
            await beside_the_loop(self._done, error)
        else:
            self._done(error)

    def _free_id(self, name: str) -> str | None:
        """The id of the first tool call of a name that the action made and nobody has answered; else one to make."""
        taken = {call.call_id for call in self._calls}
        for made in (self._answer or {}).get("tool_calls") or ():
            function = made.get("function") if isinstance(made, dict) else None
            if isinstance(function, dict) and function.get("name") == name and made.get("id") not in taken:
                return str(made["id"])
        return None if self._is_done else f"call-{self.index}-{len(self._calls)}"

    @guarded()
    def _done(self, error: BaseException | None) -> None:
        if self._is_done:
            return
        self._is_done = True
        if self._answer is None:
            if error is None:
                raise UsageError("a step without an `action` is not recorded; call `step.action(text)` in its context")
            return
        episode = self._episode
        frame = self._frame()
        if error is not None:
            frame.step.extra = (frame.step.extra or {}) | {"error": told(error)}
        with episode._lock:
            if not episode._has_initial and not frame.saw_results:
                frame.initial_messages, frame.step.context = frame.step.context, []
            episode._has_initial = True
            try:
                episode._put(frame)
            except FrameError:
                frame.step, wrong = fitted(frame.step)
                frame.step.extra = (frame.step.extra or {}) | {"not_taken": wrong}
                episode._put(frame)
                self._sink.trouble(f"values of a step are of the wrong type and went to its `extra`: {list(wrong)}")

    def _frame(self) -> Step:
        answer = self._answer or {}
        if not answer.get("tool_calls") and self._calls:
            answer["tool_calls"] = [tool_call(call.name, call.arguments, call.call_id) for call in self._calls]
        context, extra = self._context, dict(self._fields.pop("extra", None) or {})
        try:
            since = messages(context) if context is not None else []
        except ShapeError as error:
            since, extra["context_not_taken"] = [], plain(context)
            self._sink.trouble(f"the context of a step is no list of messages and went to its `extra`: {error}")
        if context is None and self._state is not None:
            since = [{"role": "user", "content": self._state}]
        step = decision(answer, since, is_first=False)
        step.tokens, step.started_at = self._tokens, self._started_at
        step.latency = self._acted - self._began if self._began else None
        if self._state is not None:
            step.state = self._state
        for name, value in self._fields.items():
            if name in _OF_STEPS:
                setattr(step, name, value)
            else:
                extra[name] = value
                self._sink.trouble(
                    f"a step has no `{name}`, so it went to its `extra`; valid: {', '.join(sorted(_OF_STEPS))}"
                )
        if extra:
            step.extra = (step.extra or {}) | extra
        return Step(index=self.index, step=step, saw_results=context is None and self._state is None)


class ToolCall:
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
            self._done(None)

    @guarded()
    def failed(self, message: str) -> None:
        """It gave back an error; an exception that leaves the context says so by itself."""
        self._frame.error = str(message)
        if not self._is_inside:
            self._done(None)

    def __enter__(self) -> Self:
        self._is_inside = True
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._done(error)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._sink.must_wait:
            await beside_the_loop(self._done, error)
        else:
            self._done(error)

    @guarded()
    def _done(self, error: BaseException | None) -> None:
        frame = self._frame
        frame.call_id, frame.ended_at = self.call_id, self._episode._now()
        if error is not None and frame.error is None:
            frame.error = told(error)
        self._episode._put(frame)


async def beside_the_loop(function: Callable[..., None], *args: Any) -> None:
    """Call what may wait for a disk; an event loop has others to serve meanwhile."""
    try:
        await asyncio.to_thread(function, *args)
    except RuntimeError:
        # The loop is closing, or it is none of asyncio's.
        function(*args)


def number(value: Any) -> float:
    """A finite number. Raises ValueError, TypeError: a reward of NaN would have its whole episode rejected."""
    found = float(value)
    if not math.isfinite(found):
        raise ValueError(f"{value!r} was given; valid: a finite number")
    return found


def messages(given: Sequence[Any]) -> list[Message]:
    """Messages of a chat, as plain values. Raises ShapeError."""
    plainly = [message if type(message) is dict else plain(message) for message in given]
    return [checked(message, f"context[{index}]") for index, message in enumerate(plainly)]


def told(error: BaseException) -> str:
    """An exception as the text of a table."""
    return excerpt(f"{type(error).__name__}: {error}"[:_ERROR_LENGTH])
