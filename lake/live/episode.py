"""Episodes while they run: what an agent says of itself, as frames.

Every method may be called from any thread or task, and none raises into the agent: what cannot be taken as it was meant
is counted and told once. Of an episode no more is kept in memory than its open steps, and some hashes of each call.
"""

import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from lake import ids
from lake.errors import UsageError
from lake.formats.chat.chat_completions import Completion
from lake.live.calls.prefixes import Known, Prefixes
from lake.live.calls.shapes import Asked
from lake.live.calls.steps import Call, span_of, unanswered_step
from lake.live.contexts import Context
from lake.live.frames import (
    SOURCE_FORMAT,
    Begin,
    End,
    Frame,
    FrameError,
    Reward,
    Score,
    Span,
    Step,
    fitted,
    new_key,
    plain,
)
from lake.live.off import OFF
from lake.live.sink import Sink, guarded, told
from lake.live.steps import LiveStep, ToolCall, is_value, messages, number
from lake.records import EpisodeRecord, Json, ScoreRecord, SpanRecord, as_str, episode_id, sampling_of

_NEVER_LEFT = "never_left"
"""`stop_reason` of episodes that were open when their recorder was closed."""
_OF_ENDS = frozenset(End.__struct_fields__) - {"ended_at"}


class Episode(Context):
    """One rollout of an agent; a context, sync or async. An exception that ends it is recorded and goes on."""

    def __init__(self, sink: Sink, record: EpisodeRecord) -> None:
        self._sink = sink
        self._key = new_key()
        self._lock = threading.RLock()
        self._wall, self._tick = time.time(), time.monotonic()
        self._frames, self._steps, self._tools = itertools.count(), itertools.count(), itertools.count()
        self._end = End()
        self._is_begun = self._is_ended = self._is_lost = False
        self._why_ended = "the episode has ended"
        self._last_step: LiveStep | None = None
        self._open_steps: dict[int, LiveStep] = {}
        """Steps that were not left yet, by their index."""
        self._calls = Prefixes()
        """Where prompts may go on from."""
        self._recorded: int | None = None
        """Index of the step that was recorded last."""
        self._unanswered: Call | None = None
        """The last call that failed."""
        self._failed_calls = 0
        record.started_at = record.started_at or self._now()
        settings = sampling_of(record.sampling)
        self._sampling = {name: value for name, value in settings.items() if value is not None}
        """How every call was sampled that does not say it itself, as who began the episode says."""
        self.record = record
        """What is known of it from its beginning: until the first thing is recorded, of its first call too."""
        sink.open[self._key] = self

    @property
    def id(self) -> str:
        """Its id in the lake, as people see it."""
        return ids.to_text(episode_id(self.record, self.record.run_id or ""))

    @guarded(OFF)
    def step(
        self,
        *,
        messages: Sequence[Any] | None = None,
        request: Mapping[str, Any] | None = None,
        context: Sequence[Any] | None = None,
        state: str | None = None,
        **fields: Any,
    ) -> LiveStep:
        """A decision begins: a context, in which `answer` or `action` says what was decided.

        What the policy saw is given in one of four ways; with none, it is the results of the tool calls since the step
        before.

        Args:
            messages: the whole conversation, as the model is given it. What is new is found: a conversation that goes
                on with none of this episode's is a rewritten history, and recorded as a whole.
            request: all arguments of the call, as a client library takes them: `messages` (or `input`, `prompt`),
                model, tools, temperature, ...
            context: the messages since the step before alone (of the first step: all).
            state: what the policy saw last, if it is no message: the text of a game, say.
            fields: further ones of `lake.StepRecord`, as far as they are known: model, policy_version, agent_id, ...
        """
        if request is not None and not isinstance(request, Mapping):
            self._sink.trouble(f"`request` of a step is {type(request).__name__}; valid: the arguments of a call")
            request = {}
        if messages is not None:
            request = {"messages": messages, **(request or {})}
        step = LiveStep(self, next(self._steps), _kept(request), _kept(context), state, fields)
        self._last_step = self._open_steps[step.index] = step
        return step

    @guarded(OFF)
    def tool_call(self, name: str, arguments: Json = None, *, call_id: str | None = None) -> ToolCall:
        """A tool is called that the last step asked for; see `LiveStep.tool_call`."""
        if self._last_step is None:
            return ToolCall(self, None, name, arguments, call_id)
        return self._last_step.tool_call(name, arguments, call_id=call_id)

    @guarded()
    def reward(self, value: float) -> None:
        """What the environment gave for the episode as a whole (`env_return`); the last one counts."""
        self._put(Reward(value=number(value)))

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
        given = None if value is None else number(value)
        said = ScoreRecord(scorer=scorer, value=given, step_index=step_index, reason=reason, metrics=metrics)
        self._put(Score(score=said))

    @guarded()
    def span(self, record: SpanRecord) -> None:
        """A raw trace event of whatever runs the agent."""
        self._put(Span(span=record))

    @guarded()
    def observe(self, seen: Sequence[Any]) -> None:
        """What the environment said after the last step; the results of its tool calls unless given."""
        self._end.final_observation = messages(seen)

    @guarded()
    def update(self, **fields: Any) -> None:
        """What is known by now of the whole: status, stop_reason, terminated, ground_truth, cost, extra, ..."""
        for name, value in fields.items():
            if is_value(name, value, _OF_ENDS):
                setattr(self._end, name, value)
            else:
                said = as_str(value) if name in _OF_ENDS else plain(value)
                self._end.extra = (self._end.extra or {}) | {name: said}
                valid = ", ".join(sorted(_OF_ENDS))
                self._sink.trouble(
                    f"Episode.update takes no such `{name}`, so it went to `extra`; valid: {valid}; numbers are finite"
                )

    @guarded()
    def end(self, **fields: Any) -> None:
        """Finish it, unless it is finished; leaving the context does so too. `fields` are those of `update`."""
        self.update(**fields)
        self._finish()
        self._sink.sync()

    def _leave(self, error: BaseException | None) -> None:
        self._failed(error)
        self.end()

    def _must_wait(self) -> bool:
        return True

    @guarded()
    def _failed(self, error: BaseException | None) -> None:
        if error is not None and not self._is_ended:
            # Somebody stopped it, or it failed by itself.
            self._end.status = "failed" if isinstance(error, Exception) else "aborted"
            self._end.error = told(error)

    def _describe(self, asked: Asked, answer: Completion | None) -> None:
        """Take from a call what holds for the whole episode, as long as nothing of it is recorded."""
        with self._lock:
            if not self._is_begun:
                record = self.record
                record.tools = asked.tools if record.tools is None else record.tools
                record.sampling = asked.settings if record.sampling is None else record.sampling
                record.policy = record.policy or (answer.model if answer else None) or asked.model

    def _put_step(self, frame: Step, samples: list[Known]) -> None:
        """Hand a step on; later ones may go on from it. Raises FrameError, UsageError: see `_put`."""
        self._put(frame)
        self._recorded = frame.index
        if samples:
            self._calls.add(samples)

    def _put_failed(self, call: Call) -> None:
        """Hand a call that failed on, as a span: it is no decision."""
        steps = 0 if self._recorded is None else self._recorded + 1
        span = span_of(call, f"call-{self._failed_calls}", steps)
        span.trace_id = SOURCE_FORMAT
        self._put(Span(span=span))
        self._failed_calls += 1
        self._unanswered = call

    def _stop(self, timeout: float) -> bool:
        """End it as it stands, for nobody does so any more; whether it was open, and could be had within `timeout` s.

        It may go on in another thread: what that one says from now on is told, and not recorded.
        """
        if not self._lock.acquire(timeout=timeout):
            return False
        try:
            if self._is_ended:
                return False
            self._why_ended = "the recorder was closed before the episode was left"
            if self._end.status == "completed":
                self._end.status = "aborted"
            self._end.stop_reason = self._end.stop_reason or _NEVER_LEFT
            self._finish()
        finally:
            self._lock.release()
        return True

    @guarded()
    def _finish(self) -> None:
        with self._lock:
            if self._is_ended:
                return
            for step in list(self._open_steps.values()):
                step._leave(None)
            if self._recorded is None and self._unanswered is not None:
                failed = self._unanswered
                self._put(unanswered_step(failed.asked.messages, failed.asked.model, failed.started_at))
                if self._end.status == "completed":
                    self._end.status, self._end.error = "failed", self._end.error or self._unanswered.error
            if self._failed_calls:
                self._end.extra = {"failed_calls": self._failed_calls} | (self._end.extra or {})
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
            self._sink.open.pop(self._key, None)
        if not self._is_lost:
            self._sink.count("finished")
            self._sink.on_finished()

    def _put(self, frame: Frame) -> None:
        """Hand a frame on, in the order of the calls. Raises FrameError, UsageError: the episode has ended."""
        with self._lock:
            if self._is_ended:
                raise UsageError(f"{self._why_ended}; judgements that come later are added with `Lake.add_scores`")
            if not self._is_begun:
                self._is_begun = True
                self._hand_on(Begin(episode=self.record))
            self._hand_on(frame)

    def _hand_on(self, frame: Frame) -> None:
        if not self._is_lost:
            self._is_lost = not self._sink.take(self._key, self._frames, frame)

    def _now(self) -> datetime:
        """The time by the clock as it was at the beginning: one that is set meanwhile reorders nothing."""
        return datetime.fromtimestamp(self._wall + time.monotonic() - self._tick, UTC)


def _kept(given: Any) -> Any:
    """What an agent gave, as it is now: it adds to its lists while the model answers."""
    if isinstance(given, Mapping):
        return {name: _kept(value) for name, value in given.items()}
    return list(given) if type(given) is list else given
