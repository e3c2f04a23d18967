"""Play one rollout of an environment: the policy decides, the environment answers, and each step is recorded at once.

A fault of the environment (exception, timeout, invalid outcome) or of a scripted policy fails its rollout, with the
error, and no other rollout. A fault of the engines is raised, so that the manager can decide on a retry.

To resume an interrupted rollout, the environment replays the recorded actions, and each answer must equal the recorded
one. Otherwise the rollout cannot continue (`ReplayError`).
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import Any

import msgspec

from lake.errors import TrajlakeError
from lake.live.sink import format_exception
from lake.records import StepRecord
from lake.storage.objects import Objects
from pipelines.collect.engines import ContextFullError
from pipelines.collect.engines.pool import ServerPool
from pipelines.collect.environments import Environment, Outcome
from pipelines.collect.environments.loading import describe_outcome_fault
from pipelines.collect.players import Ending, ReplayError, Rollout, RolloutLog, StepTotals, build_episode, build_step
from pipelines.collect.policies import Conversation, Decision, Message, PolicyClient
from pipelines.collect.policies.rendering import ContextRenderer
from pipelines.collect.policies.scripted import HumanPolicy, PolicyFaultError, QuitError
from pipelines.collect.policies.transformers_policy import LockStepClient
from pipelines.collect.user_code import FAULTS, is_cancellation

_CLOSING_SECONDS = 10.0
_log = logging.getLogger("trajlake")


class EnvironmentPlayer:
    """Plays environments with a policy client.

    Args:
        make: makes an environment for each rollout.
        client: the policy client.
        engines: its servers, if they are closed with this player.
        step_seconds: timeout of a reset or step of the environment. None: no limit.
        call_seconds: timeout of a decision. None: no limit.
        max_steps: decisions after which a rollout is truncated. None: the environment decides.
    """

    is_recorder = False

    def __init__(
        self,
        make: Callable[[], Environment],
        client: PolicyClient,
        *,
        engines: ServerPool[Any] | None = None,
        step_seconds: float | None = None,
        call_seconds: float | None = None,
        max_steps: int | None = None,
    ) -> None:
        self._make, self._client, self._engines = make, client, engines
        self._step_seconds, self._call_seconds, self._max_steps = step_seconds, call_seconds, max_steps

    @property
    def plays_together(self) -> bool:
        """Whether the policy runs in this process."""
        return isinstance(self._client, LockStepClient)

    def gather(self, is_filling: Callable[[int], bool]) -> None:
        """Pass `is_filling` to a policy in this process, which batches its decisions."""
        if isinstance(self._client, LockStepClient):
            self._client.is_filling = is_filling

    async def settle(self) -> None:
        """Do nothing: the manager records the rollouts."""

    def store_tokenizer(self, objects: Objects) -> None:
        """Store the tokenizer of a client that encodes text itself, so that the viewer can show the text of tokens."""
        renderer = getattr(self._client, "renderer", None)
        if isinstance(renderer, ContextRenderer):
            renderer.store_tokenizer(objects)

    @property
    def problem(self) -> str | None:
        """What its engines wait for."""
        return None if self._engines is None else self._engines.problem

    def count_work(self) -> dict[str, float]:
        """Return the client's counts and the state of its engines."""
        counts: dict[str, float] = dict(self._client.counts)
        if self._engines is not None:
            engines = self._engines.counts()
            counts |= {"calls": engines.calls, "tokens": engines.tokens, "retries": engines.retries}
            counts |= {"in_flight": engines.running, "slots": sum(member.most for member in self._engines.members)}
        return counts

    async def close(self) -> None:
        """Close the client and its engines."""
        await self._client.close()
        if self._engines is not None:
            await self._engines.close()

    async def play(self, rollout: Rollout, log: RolloutLog) -> Ending:
        """See `Player.play`. Raises ReplayError, StartError, EngineError."""
        sums = StepTotals()
        try:
            environment = self._make()
        except TrajlakeError:
            raise  # affects all rollouts, such as a missing package
        except FAULTS as error:
            message = f"the environment could not be created: {format_exception(error)}"
            return sums.ending("failed", stop_reason="environment_error", error=message)
        try:
            ending = await self._play(environment, rollout, log, sums)
        except _EnvironmentError as error:
            return sums.ending("failed", stop_reason=error.stop_reason, error=str(error))
        except ContextFullError as error:
            return sums.ending("truncated", terminated=False, stop_reason="context", error=str(error))
        else:
            if isinstance(self._client, HumanPolicy):
                self._client.show_end(ending)
            return ending
        finally:
            await _close_environment(environment)

    async def _play(self, environment: Environment, rollout: Rollout, log: RolloutLog, sums: StepTotals) -> Ending:
        card = self._client.card
        now = await self._await_outcome(environment.reset(rollout.task), "reset")
        log.begin(build_episode(rollout, now, card, environment=environment.name, split=environment.split))
        with closing(self._client.open(rollout.seed, key=rollout.key, tools=now.tools)) as conversation:
            turns: list[tuple[list[Message], Decision]] = []
            for step in log.steps:
                turns.append((now.messages, _decision_of(step)))
                now = await self._replay_step(environment, now, step, len(turns) - 1)
                sums.add(step)
            if turns:
                conversation.resume(turns)
            while not now.done and (self._max_steps is None or sums.num_steps < self._max_steps):
                try:
                    decision = await self._await_decision(conversation, now)
                except QuitError:
                    return sums.ending(
                        "truncated", terminated=False, stop_reason="quit", final_observation=now.messages
                    )
                after = await self._await_outcome(environment.step(decision.message), f"step {sums.num_steps}")
                if not math.isfinite((sums.env_return or 0.0) + (after.reward or 0.0)):
                    raise _EnvironmentError(f"step {sums.num_steps}: the sum of rewards is not finite")
                step = build_step(now, decision, after, card, is_first=not sums.num_steps)
                sums.add(step)
                now = after
                await log.step(step)
            if now.done:
                return sums.ended(now)
            return sums.ending("truncated", terminated=False, stop_reason="max_steps", final_observation=now.messages)

    async def _replay_step(self, environment: Environment, before: Outcome, step: StepRecord, index: int) -> Outcome:
        """Replay a recorded action. Raises ReplayError: its outcome differs."""
        decision = _decision_of(step)
        after = await self._await_outcome(environment.step(decision.message), f"step {index}")
        again = build_step(before, decision, after, self._client.card, is_first=not index)
        for name in StepRecord.__struct_fields__:
            then, now = (msgspec.json.encode(getattr(record, name), order="sorted") for record in (step, again))
            if then != now:
                raise ReplayError(
                    f"step {index} was replayed with another `{name}`: {_excerpt(then)} was recorded, and "
                    f"now it is {_excerpt(now)}; the environment does not answer equal actions equally"
                )
        return after

    async def _await_decision(self, conversation: Conversation, now: Outcome) -> Decision:
        try:
            async with asyncio.timeout(self._call_seconds) as limit:
                return await conversation.decide(now.messages, admissible=now.admissible)
        except PolicyFaultError as error:
            raise _EnvironmentError(str(error), "policy_error") from error
        except TimeoutError as error:
            if not limit.expired():
                raise
            message = f"a call of the policy took longer than {self._call_seconds:g} s (player.call_seconds)"
            raise _EnvironmentError(message, "call_timeout") from error

    async def _await_outcome(self, answer: Awaitable[Outcome], call_name: str) -> Outcome:
        """Await the environment's answer. Raises _EnvironmentError: an exception, a timeout or an invalid outcome."""
        try:
            async with asyncio.timeout(self._step_seconds) as limit:
                outcome = await answer
        except FAULTS as error:
            if is_cancellation(error):
                raise
            if isinstance(error, TimeoutError) and limit.expired():
                limit_text = f"{self._step_seconds:g} s (player.step_seconds)"
                message = f"{call_name} of the environment took longer than {limit_text}"
                raise _EnvironmentError(message, "step_timeout") from error
            raise _EnvironmentError(f"{call_name}: {format_exception(error)}") from error
        if problem := describe_outcome_fault(outcome):
            raise _EnvironmentError(f"{call_name} of the environment answered {problem}")
        return outcome


class _EnvironmentError(Exception):
    """A fault of an environment or a scripted policy, for the rollout's record."""

    def __init__(self, message: str, stop_reason: str = "environment_error") -> None:
        super().__init__(message)
        self.stop_reason = stop_reason


def _decision_of(step: StepRecord) -> Decision:
    """Return the decision that a step records."""
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


async def _close_environment(environment: Environment) -> None:
    """Close an environment; a fault is logged and does not affect the rollout."""
    try:
        async with asyncio.timeout(_CLOSING_SECONDS):
            await environment.close()
    except FAULTS as error:
        if is_cancellation(error):
            raise
        _log.warning("an environment could not be closed: %s", format_exception(error))


def _excerpt(data: bytes) -> str:
    text = data.decode(errors="replace")
    return text if len(text) <= 200 else f"{text[:200]}..."
