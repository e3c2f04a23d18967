"""Players: the protocol of what plays one rollout, its exchange with the manager, and rollouts as records.

There are two kinds: an environment with a policy (`play_environment.py`), and an agent with an endpoint (`agents/`).
The manager (`manager/`) owns concurrency, timeouts, attempts and crash recovery; a player knows one rollout only.

Records contain no wall-clock times: equal seeds must give an equal episode, or recording it again would be a conflict
instead of a replay.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from lake import ids
from lake.errors import TrajlakeError
from lake.formats.chat.messages import build_decision as observed
from lake.records import EpisodeRecord, StepRecord
from lake.storage.objects import Objects
from pipelines.collect.environments import Outcome, Task
from pipelines.collect.policies import Decision, Message, PolicyCard

SURPLUS: Final = "surplus"
"""`stop_reason` of rollouts that are aborted because enough siblings have finished; the view `left_out_siblings`
searches for it."""
EPISODE_TIMEOUT: Final = "episode_timeout"
"""`stop_reason` of rollouts that are cut off by their time limit; also the message of their cancellation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """The rollout to play."""

    task: Task
    run_id: str | None = None
    rollout_index: int = 0
    """Index among the siblings."""
    attempt: int = 0
    """Number of earlier attempts."""
    collection_round: int | None = None
    expected_group_size: int | None = None
    seed: int = 0
    """Seed of the policy's randomness, different for every rollout and attempt; see `derive_rollout_seed`."""

    @property
    def key(self) -> str:
        """The text by which rollouts of a batch are ordered."""
        return f"{self.run_id}/{self.collection_round}/{self.task.seed}/{self.rollout_index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a rollout ended, with the field names of `EpisodeRecord`."""

    status: str = "completed"
    """One of completed, truncated, aborted, failed."""
    terminated: bool | None = None
    stop_reason: str | None = None
    error: str | None = None
    env_return: float | None = None
    final_observation: list[Message] | None = None
    num_steps: int = 0
    completion_tokens: int | None = None


class RolloutLog(Protocol):
    """The durable log that a player writes to during a rollout."""

    @property
    def steps(self) -> list[StepRecord]:
        """Steps of a carried-over rollout, or of one that a crash interrupted."""

    def begin(self, record: EpisodeRecord) -> None:
        """Record the start of the episode, without steps. A resumed rollout passes the same record again.

        Raises:
            StartError: a sibling started with different messages.
        """

    async def step(self, record: StepRecord) -> None:
        """Record a decision and its outcome. Wait while the disk is full."""

    def takes(self, status: str) -> bool:
        """Return whether a rollout that ended with `status` is still needed, and count it if so.

        Players that record their own rollouts call it before they record the end. False: record it as aborted
        (`SURPLUS`), since enough siblings finished before it.
        """


class Player(Protocol):
    """Plays many rollouts concurrently. It is created outside of an event loop and used in one."""

    @property
    def is_recorder(self) -> bool:
        """Whether it records its rollouts itself (the proxy does for agents) and writes to no log."""

    @property
    def plays_together(self) -> bool:
        """Whether it decides for several rollouts at once, so that samples depend on the batch."""

    def gather(self, is_filling: Callable[[int], bool]) -> None:
        """Receive `is_filling` of a round: `is_filling(n)` says whether more than n rollouts are about to start."""

    async def settle(self) -> None:
        """Deliver all ended rollouts to the lake, including those of earlier processes, before it is queried."""

    def store_tokenizer(self, objects: Objects) -> None:
        """Store in the lake the tokenizer that made the tokens, if the player has it."""

    async def play(self, rollout: Rollout, log: RolloutLog) -> Ending:
        """Play one rollout to its end; a failure of the environment or the agent is an ending too.

        A cancelled call leaves nothing running: the environment is closed, and the agent's address accepts no more
        calls.

        Raises:
            EngineGoneError: the engines are permanently gone. No rollout can continue, and open ones stay open.
            EngineError: another failure of an engine; the manager retries the rollout.
            StartError: see `RolloutLog.begin`.
            ReplayError: the rollout was interrupted and cannot resume.
        """

    @property
    def problem(self) -> str | None:
        """Why nothing progresses at the moment, or None."""

    def count_work(self) -> dict[str, float]:
        """Return counts by name (calls, retries, tokens, drifted) and current values (`in_flight`, `slots`)."""

    async def close(self) -> None:
        """Close engines, proxies and connections."""


class StartError(TrajlakeError, ValueError):
    """Siblings started differently, so their rewards cannot be compared."""


class ReplayError(TrajlakeError, RuntimeError):
    """An interrupted rollout cannot resume: the environment answers differently, or the policy does not support it."""


SOURCE_FORMAT = "recorder"
"""`source_format` of rollouts; part of the keys of groups and episodes."""


def derive_rollout_seed(run_seed: int, collection_round: int, start: int, index: int, attempt: int = 0) -> int:
    """Derive the seed of the policy's randomness for one sibling and attempt."""
    again = (attempt,) if attempt else ()
    return ids.key_hash("rollout", run_seed, collection_round, start, index, *again)


def build_episode(
    rollout: Rollout, first: Outcome, card: PolicyCard, *, environment: str, split: str | None
) -> EpisodeRecord:
    """Build the record of an episode at its start, without steps."""
    task = rollout.task
    extra: dict[str, Any] = dict(first.extra or {})
    if task.data:
        extra["task"] = task.data
    return EpisodeRecord(
        task_id=task.name or first.task_id or f"{environment}/{task.seed}",
        steps=[],
        run_id=rollout.run_id,
        rollout_index=rollout.rollout_index,
        attempt=rollout.attempt,
        collection_round=rollout.collection_round,
        expected_group_size=rollout.expected_group_size,
        environment=environment,
        split=split,
        policy=card.name,
        policy_version=card.version,
        seed=task.seed,
        ground_truth=first.ground_truth if task.ground_truth is None else task.ground_truth,
        tools=first.tools,
        initial_messages=first.messages,
        sampling=card.sampling,
        tokenizer=card.tokenizer,
        chat_template=card.chat_template,
        source_format=SOURCE_FORMAT,
        extra=extra or None,
    )


def build_step(before: Outcome, decision: Decision, after: Outcome, card: PolicyCard, *, is_first: bool) -> StepRecord:
    """Build the record of a decision, the observation before it and its outcome."""
    step = observed(decision.message, before.messages, is_first=is_first)
    if before.is_error is not None:
        step.state_is_error = before.is_error
    step.reasoning = decision.reasoning
    step.reward = after.reward
    step.is_action_valid = decision.is_action_valid if after.is_action_valid is None else after.is_action_valid
    step.model = decision.model or card.name
    step.policy_version = card.version if decision.policy_version is None else decision.policy_version
    step.finish_reason = decision.finish_reason
    step.tokens = decision.tokens
    step.prompt_tokens, step.completion_tokens = decision.prompt_tokens, decision.completion_tokens
    step.extra = (decision.extra or {}) | (after.extra or {}) or None
    return step


def count_sampled_tokens(step: StepRecord) -> int | None:
    """Return the sampled tokens of a step; None if unknown."""
    return step.completion_tokens if step.tokens is None else len(step.tokens.action_ids)


@dataclass(slots=True)
class StepTotals:
    """Totals over the steps of a rollout."""

    num_steps: int = 0
    env_return: float | None = None
    """None if no step was rewarded."""
    completion_tokens: int | None = None
    """None if unknown for all steps."""

    def add(self, step: StepRecord) -> None:
        """Add a step."""
        self.num_steps += 1
        if step.reward is not None:
            self.env_return = (self.env_return or 0.0) + step.reward
        if (tokens := count_sampled_tokens(step)) is not None:
            self.completion_tokens = (self.completion_tokens or 0) + tokens

    def ending(self, status: str, **fields: Any) -> Ending:
        """Build an ending with these totals; `fields` are those of `Ending`."""
        return Ending(
            status=status,
            env_return=self.env_return,
            num_steps=self.num_steps,
            completion_tokens=self.completion_tokens,
            **fields,
        )

    def ended(self, last: Outcome) -> Ending:
        """Build the ending of a rollout that its environment ended."""
        return self.ending(
            "completed" if last.terminated else "truncated",
            terminated=last.terminated,
            stop_reason="environment" if last.terminated else "horizon",
            final_observation=last.messages,
        )
