"""Episodes, steps and tool calls while they run: what an agent says of itself, as frames.

Every method may be called from any thread or task, and none raises into the agent: what cannot be taken as it was meant
is counted and told once. Of an episode no more is kept in memory than its open steps.
"""

import asyncio
import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Self

from lake import ids
from lake.errors import UsageError
from lake.formats.base.rows import ShapeError
from lake.formats.chat.messages import Message, checked, decision, tool_call
from lake.live.frames import Begin, End, Frame, FrameError, Reward, Score, Span, Step, Tool, fitted, new_key, plain
from lake.live.off import OFF
from lake.live.sink import Sink, guarded
from lake.records import (
    EpisodeRecord,
    Json,
    ScoreRecord,
    SpanRecord,
    StepRecord,
    TokensRecord,
    episode_id,
    excerpt,
)

_ERROR_LENGTH = 4000
_OF_STEPS = frozenset(StepRecord.__struct_fields__) - {"context", "action", "tool_calls", "reasoning", "tokens"}
_OF_ENDS = frozenset(End.__struct_fields__) - {"ended_at"}


class Episode:
    """One rollout of an agent; a context, sync or async. An exception that ends it is recorded and goes on."""

    def __init__(self, sink: Sink, record: EpisodeRecord) -> None:
        self._sink = sink
        self._key = new_key()
        self._lock = threading.RLock()
        self._wall, self._tick = time.time(), time.monotonic()
        self._frames, self._steps, self._tools = itertools.count(), itertools.count(), itertools.count()
        self._end = End()
        self._is_ended = self._is_lost = False
        self._last_step: int | None = None
        self._has_initial = False
        record.started_at = record.started_at or self._now()
        self.record = record
        """What is known of it from its beginning."""
        self._put(Begin(episode=record))

    @property
    def id(self) -> str:
        """Its id in the lake, as people see it."""
        return ids.to_text(episode_id(self.record, self.record.run_id or ""))

    @guarded(OFF)
    def step(self, *, context: Sequence[Any] | None = None, state: str | None = None, **fields: Any) -> "LiveStep":
        """A decision begins: a context, in which `action` says what was decided.

        Args:
            context: the messages that the policy has seen since the step before (of the first step: all). Unless given,
                the results of the tool calls since.
            state: what the policy saw last, if it is no message: the text of a game, say.
            fields: further ones of `lake.StepRecord`, as far as they are known: model, policy_version, agent_id, ...
        """
        with self._lock:
            index = next(self._steps)
            self._last_step = index
        return LiveStep(self, index, context, state, fields)

    @guarded(OFF)
    def tool_call(self, name: str, arguments: Json = None, *, call_id: str | None = None) -> "ToolCall":
        """A tool is called, outside of its step; see `LiveStep.tool_call`."""
        return ToolCall(self, self._last_step, name, arguments, call_id)

    @guarded()
    def reward(self, value: float) -> None:
        """What the environment gave for the episode as a whole (`env_return`); the last one counts."""
        self._put(Reward(value=_number(value)))

    @guarded()
    def score(
        self,
        scorer: str,
        value: float | None,
        *,
        step_index: int | None = None,
        reason: str | None = None,
        metrics: dict[str, Json] | None = None,
    ) -> None:
        """What a judge, a metric or a person says of the episode, or of one of its steps."""
        number = None if value is None else _number(value)
        said = ScoreRecord(scorer=scorer, value=number, step_index=step_index, reason=reason, metrics=metrics)
        self._put(Score(score=said))

    @guarded()
    def span(self, record: SpanRecord) -> None:
        """A raw trace event of whatever runs the agent."""
        self._put(Span(span=record))

    @guarded()
    def observe(self, messages: Sequence[Any]) -> None:
        """What the environment said after the last step; the results of its tool calls unless given."""
        self._end.final_observation = _messages(messages)

    @guarded()
    def update(self, **fields: Any) -> None:
        """What is known by now of the whole: status, stop_reason, terminated, ground_truth, cost, extra, ..."""
        for name, value in fields.items():
            if name in _OF_ENDS:
                setattr(self._end, name, value)
            else:
                self._end.extra = (self._end.extra or {}) | {name: plain(value)}
                valid = ", ".join(sorted(_OF_ENDS))
                self._sink.trouble(f"Episode.update has no `{name}`, so it went to `extra`; valid: {valid}")

    @guarded()
    def end(self, **fields: Any) -> None:
        """Finish it, unless it is finished; leaving the context does so too. `fields` are those of `update`."""
        self.update(**fields)
        self._finish()
        self._sink.sync()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._failed(error)
        self.end()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._failed(error)
        await _beside_the_loop(self.end)

    @guarded()
    def _failed(self, error: BaseException | None) -> None:
        if error is not None and not self._is_ended:
            # Somebody stopped it, or it failed by itself.
            self._end.status = "failed" if isinstance(error, Exception) else "aborted"
            self._end.error = _told(error)

    def _finish(self) -> None:
        with self._lock:
            if self._is_ended:
                return
            self._end.ended_at = self._now()
            try:
                self._put(self._end)
            except FrameError:
                self._end, wrong = fitted(self._end)
                self._end.extra = (self._end.extra or {}) | {"not_taken": wrong}
                self._put(self._end)
                self._sink.trouble(
                    f"values of an episode's end are of the wrong type and went to `extra`: {list(wrong)}"
                )
            self._is_ended = True
        if not self._is_lost:
            self._sink.count("finished")
            self._sink.on_finished()

    def _put(self, frame: Frame) -> None:
        """Hand a frame on, in the order of the calls. Raises FrameError, UsageError: the episode has ended."""
        with self._lock:
            if self._is_ended:
                raise UsageError("the episode has ended; judgements that come later are added with `Lake.add_scores`")
            if not self._is_lost:
                self._is_lost = not self._sink.take(self._key, next(self._frames), frame)

    def _now(self) -> datetime:
        """The time by the clock as it was at the beginning: one that is set meanwhile reorders nothing."""
        return datetime.fromtimestamp(self._wall + time.monotonic() - self._tick, UTC)


class LiveStep:
    """One decision; a context, sync or async. It is recorded when the context is left, if `action` was called."""

    def __init__(
        self, episode: Episode, index: int, context: Sequence[Any] | None, state: str | None, fields: dict[str, Any]
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
        call = ToolCall(self._episode, self.index, name, arguments, call_id)
        if not self._is_done:
            call.call_id = call_id or self._free_id(name)
            self._calls.append(call)
        return call

    @guarded()
    def reward(self, value: float) -> None:
        """What the environment gave for this step, now or after it; the last one counts."""
        self._episode._put(Reward(value=_number(value), step_index=self.index))

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
            await _beside_the_loop(self._done, error)
        else:
            self._done(error)

    def _free_id(self, name: str) -> str:
        """The id of the first tool call of a name that the action made and nobody has answered."""
        taken = {call.call_id for call in self._calls}
        for made in (self._answer or {}).get("tool_calls") or ():
            function = made.get("function") if isinstance(made, dict) else None
            if isinstance(function, dict) and function.get("name") == name and made.get("id") not in taken:
                return str(made["id"])
        return f"call-{self.index}-{len(self._calls)}"

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
            frame.step.extra = (frame.step.extra or {}) | {"error": _told(error)}
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
            since = _messages(context) if context is not None else []
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
        self, episode: Episode, step_index: int | None, name: str, arguments: Json, call_id: str | None
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
            await _beside_the_loop(self._done, error)
        else:
            self._done(error)

    @guarded()
    def _done(self, error: BaseException | None) -> None:
        frame = self._frame
        frame.call_id, frame.ended_at = self.call_id, self._episode._now()
        if error is not None and frame.error is None:
            frame.error = _told(error)
        self._episode._put(frame)


async def _beside_the_loop(function: Callable[..., None], *args: Any) -> None:
    """Call what may wait for a disk; an event loop has others to serve meanwhile."""
    try:
        await asyncio.to_thread(function, *args)
    except RuntimeError:
        # The loop is closing, or it is none of asyncio's.
        function(*args)


def _number(value: Any) -> float:
    """A finite number. Raises ValueError, TypeError: a reward of NaN would have its whole episode rejected."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value!r} was given; valid: a finite number")
    return number


def _messages(given: Sequence[Any]) -> list[Message]:
    """Messages of a chat, as plain values. Raises ShapeError."""
    plainly = [message if type(message) is dict else plain(message) for message in given]
    return [checked(message, f"context[{index}]") for index, message in enumerate(plainly)]


def _told(error: BaseException) -> str:
    return excerpt(f"{type(error).__name__}: {error}"[:_ERROR_LENGTH])
