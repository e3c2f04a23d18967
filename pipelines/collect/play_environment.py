"""One rollout of an environment: a speaker decides, the environment answers, and each step is written as it happens.

Whatever the environment does wrong (it raises, hangs, answers what is no outcome) is the rollout's own failure, with
its error; the other rollouts go on. What the engines do wrong is raised: the manager knows whether to try again.

A rollout that was interrupted goes on: the environment is played once more through the actions that are recorded, and
each answer has to be the recorded one. One that answers otherwise cannot be continued honestly (`ReplayError`).
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import Any

import msgspec

from lake.errors import TrajlakeError
from lake.live.sink import told
from lake.records import StepRecord
from pipelines.collect.engines import ContextFullError
from pipelines.collect.engines.sharing import Shared
from pipelines.collect.environments import Environment, Outcome
from pipelines.collect.environments.checked import wrong_outcome
from pipelines.collect.episode_records import Sums, begun, decided
from pipelines.collect.players import Ending, ReplayError, Rollout, RolloutLog
from pipelines.collect.policies import Conversation, Decision, Message, Speaker
from pipelines.collect.policies.lockstep import LockStepSpeaker
from pipelines.collect.user_code import FAULTS, is_cancellation

_CLOSING_SECONDS = 10.0
_log = logging.getLogger("trajlake")


class EnvironmentPlayer:
    """Plays environments with a speaker.

    Args:
        make: a fresh environment; every rollout gets one.
        speaker: who decides.
        engines: the servers behind it, if they are closed with this.
        step_seconds: a reset or a step of the environment that takes longer is a failure; None: no limit.
        call_seconds: so is a decision.
        max_steps: decisions after which a rollout is truncated; None leaves it to the environment.
    """

    is_recorder = False

    def __init__(
        self,
        make: Callable[[], Environment],
        speaker: Speaker,
        *,
        engines: Shared[Any] | None = None,
        step_seconds: float | None = None,
        call_seconds: float | None = None,
        max_steps: int | None = None,
    ) -> None:
        self._make, self._speaker, self._engines = make, speaker, engines
        self._step_seconds, self._call_seconds, self._max_steps = step_seconds, call_seconds, max_steps

    @property
    def plays_together(self) -> bool:
        """So does a policy in this process."""
        return isinstance(self._speaker, LockStepSpeaker)

    def gather(self, is_filling: Callable[[int], bool]) -> None:
        """Such a policy waits for all that can be decided for together."""
        if isinstance(self._speaker, LockStepSpeaker):
            self._speaker.is_filling = is_filling

    async def settle(self) -> None:
        """The manager records its rollouts."""

    @property
    def problem(self) -> str | None:
        """What its engines wait for."""
        return None if self._engines is None else self._engines.problem

    def figures(self) -> dict[str, float]:
        """What the speaker counts, and how its engines are doing."""
        found: dict[str, float] = dict(self._speaker.counts)
        if self._engines is not None:
            counts = self._engines.counts()
            found |= {"calls": counts.calls, "tokens": counts.tokens, "retries": counts.retries}
            found |= {"in_flight": counts.running, "slots": sum(member.most for member in self._engines.members)}
        return found

    async def close(self) -> None:
        """Let go of the speaker's connections, and of its engines."""
        await self._speaker.close()
        if self._engines is not None:
            await self._engines.close()

    async def play(self, rollout: Rollout, log: RolloutLog) -> Ending:
        """See `Player.play`. Raises ReplayError, StartError, EngineError."""
        sums = Sums()
        try:
            environment = self._made()
        except _EnvironmentError as error:
            return sums.ending("failed", stop_reason="environment_error", error=str(error))
        try:
            return await self._play(environment, rollout, log, sums)
        except _EnvironmentError as error:
            return sums.ending("failed", stop_reason=error.stop_reason, error=str(error))
        except ContextFullError as error:
            return sums.ending("truncated", terminated=False, stop_reason="context", error=str(error))
        finally:
            await _closed(environment)

    async def _play(self, environment: Environment, rollout: Rollout, log: RolloutLog, sums: Sums) -> Ending:
        card = self._speaker.card
        now = await self._answered(environment.reset(rollout.task), "reset")
        log.begin(begun(rollout, now, card, environment=environment.name, split=environment.split))
        key = f"{rollout.run_id}/{rollout.collection_round}/{rollout.task.seed}/{rollout.rollout_index}"
        with closing(self._speaker.open(rollout.seed, key=key, tools=now.tools)) as conversation:
            turns: list[tuple[list[Message], Decision]] = []
            for step in log.steps:
                turns.append((now.messages, _taken(step)))
                now = await self._replayed(environment, now, step, len(turns) - 1)
                sums.add(step)
            if turns:
                conversation.resume(turns)
            while not now.done and (self._max_steps is None or sums.num_steps < self._max_steps):
                decision = await self._decided(conversation, now)
                after = await self._answered(environment.step(decision.message), f"step {sums.num_steps}")
                if not math.isfinite((sums.env_return or 0.0) + (after.reward or 0.0)):
                    raise _EnvironmentError(f"step {sums.num_steps}: the rewards add up to no finite return")
                step = decided(now, decision, after, card, is_first=not sums.num_steps)
                sums.add(step)
                now = after
                await log.step(step)
            if now.done:
                return sums.ended(now)
            return sums.ending("truncated", terminated=False, stop_reason="max_steps", final_observation=now.messages)

    async def _replayed(self, environment: Environment, before: Outcome, step: StepRecord, index: int) -> Outcome:
        """Take a recorded action again. Raises ReplayError: something else came of it than then."""
        decision = _taken(step)
        after = await self._answered(environment.step(decision.message), f"step {index}")
        again = decided(before, decision, after, self._speaker.card, is_first=not index)
        for name in StepRecord.__struct_fields__:
            then, now = (msgspec.json.encode(getattr(one, name), order="sorted") for one in (step, again))
            if then != now:
                raise ReplayError(
                    f"step {index} was played again and its `{name}` is another: {_excerpt(then)} was recorded, and "
                    f"now it is {_excerpt(now)}; the environment does not answer equal actions alike"
                )
        return after

    async def _decided(self, conversation: Conversation, now: Outcome) -> Decision:
        try:
            async with asyncio.timeout(self._call_seconds) as limit:
                return await conversation.decide(now.messages, admissible=now.admissible)
        except TimeoutError as error:
            if not limit.expired():
                raise
            message = f"a call of the policy took longer than {self._call_seconds:g} s (--call-timeout)"
            raise _EnvironmentError(message, "call_timeout") from error

    def _made(self) -> Environment:
        try:
            return self._make()
        except TrajlakeError:
            raise  # a package that is not installed, say: no rollout can be played
        except FAULTS as error:
            raise _EnvironmentError(f"the environment could not be made: {told(error)}") from error

    async def _answered(self, answer: Awaitable[Outcome], what: str) -> Outcome:
        """What an environment answers. Raises _EnvironmentError: it raised, took too long, or answered no outcome."""
        try:
            async with asyncio.timeout(self._step_seconds) as limit:
                outcome = await answer
        except FAULTS as error:
            if is_cancellation(error):
                raise
            if isinstance(error, TimeoutError) and limit.expired():
                message = f"{what} of the environment took longer than {self._step_seconds:g} s (--step-timeout)"
                raise _EnvironmentError(message, "step_timeout") from error
            raise _EnvironmentError(f"{what}: {told(error)}") from error
        if problem := wrong_outcome(outcome):
            raise _EnvironmentError(f"{what} of the environment answered {problem}")
        return outcome


class _EnvironmentError(Exception):
    """What an environment did wrong, for the rollout's record."""

    def __init__(self, message: str, stop_reason: str = "environment_error") -> None:
        super().__init__(message)
        self.stop_reason = stop_reason


def _taken(step: StepRecord) -> Decision:
    """The decision that a step records."""
    return Decision(
        action=step.action,
        finish_reason=step.finish_reason,
        tokens=step.tokens,
        reasoning=step.reasoning,
        tool_calls=step.tool_calls,
        model=step.model,
        policy_version=step.policy_version,
        is_action_valid=step.is_action_valid,
        prompt_tokens=step.prompt_tokens,
        completion_tokens=step.completion_tokens,
        extra=step.extra,
    )


async def _closed(environment: Environment) -> None:
    """Close an environment; what goes wrong then takes nothing from what it played."""
    try:
        async with asyncio.timeout(_CLOSING_SECONDS):
            await environment.close()
    except FAULTS as error:
        if is_cancellation(error):
            raise
        _log.warning("an environment could not be closed: %s", told(error))


def _excerpt(data: bytes) -> str:
    text = data.decode(errors="replace")
    return text if len(text) <= 200 else f"{text[:200]}..."
