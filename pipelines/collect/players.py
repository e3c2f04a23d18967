"""Players: the protocol of whatever plays one rollout, and what the manager says and hears of it.

There are two kinds: an environment with a policy (`play_environment.py`), and an agent before an endpoint (`agents/`).
The manager (`manager/`) owns how many run at once, their time-outs, attempts, and what is left of them when the process
dies; a player knows one rollout only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from lake.errors import TrajlakeError
from lake.records import EpisodeRecord, StepRecord
from pipelines.collect.environments import Task
from pipelines.collect.policies import Message

SURPLUS: Final = "surplus"
"""`stop_reason` of rollouts that are aborted because enough of their siblings have finished; the view
`left_out_siblings` finds them by it."""
EPISODE_TIMEOUT: Final = "episode_timeout"
"""`stop_reason` of rollouts that are cut off because their time is up; the message that they are cancelled with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Which rollout is to be played."""

    task: Task
    run_id: str | None = None
    rollout_index: int = 0
    """Number among the siblings."""
    attempt: int = 0
    """How often it was tried before."""
    collection_round: int | None = None
    expected_group_size: int | None = None
    seed: int = 0
    """Of the policy's randomness: every rollout and attempt has its own; see `episode_records.rollout_seed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a rollout ended, by the names of `EpisodeRecord`."""

    status: str = "completed"
    """completed, truncated, aborted, failed."""
    terminated: bool | None = None
    stop_reason: str | None = None
    error: str | None = None
    env_return: float | None = None
    final_observation: list[Message] | None = None
    num_steps: int = 0
    completion_tokens: int | None = None


class RolloutLog(Protocol):
    """Where a player writes what happens, durably, as it happens."""

    @property
    def steps(self) -> list[StepRecord]:
        """Steps that are there already: of a rollout that was carried over, or that a kill interrupted."""
        ...

    def begin(self, record: EpisodeRecord) -> None:
        """The episode as it begins, without steps. A rollout that goes on says the same again.

        Raises:
            StartError: a sibling began in other messages.
        """
        ...

    async def step(self, record: StepRecord) -> None:
        """A decision was taken, and this came of it. Waits while the disk has no room."""
        ...

    def takes(self, status: str) -> bool:
        """Whether a rollout that was played to `status` is still wanted, and counts from now on.

        Asked by players that record by themselves, before they record the end. False: it is recorded as aborted
        (`SURPLUS`), since enough of its siblings finished before it.
        """
        ...


class Player(Protocol):
    """Whatever plays rollouts, many at once. Made outside of an event loop; used in one."""

    @property
    def is_recorder(self) -> bool:
        """It records its rollouts itself (the proxy does an agent's), and writes to no log."""
        ...

    @property
    def plays_together(self) -> bool:
        """It decides for several rollouts at once, and what it samples depends on which."""
        ...

    def gather(self, is_filling: Callable[[int], bool]) -> None:
        """Be told of a round: `is_filling(n)` says whether more rollouts are about to begin than the n that have."""
        ...

    async def settle(self) -> None:
        """Have all that ended in the lake, also what an earlier process left; before it is asked what is there."""
        ...

    async def play(self, rollout: Rollout, log: RolloutLog) -> Ending:
        """Play one rollout to its end; a failure of the environment or the agent is an ending, too.

        Cancelled, it leaves nothing running: the environment is closed, the agent's address takes no more calls.

        Raises:
            EngineGoneError: of engines that are gone for good: nothing more can be played, and what is open stays so.
            EngineError: of anything else that engines did; the rollout is tried again by the manager.
            StartError: as `RolloutLog.begin`.
            ReplayError: it was interrupted, and cannot go on.
        """
        ...

    @property
    def problem(self) -> str | None:
        """Why nothing goes on at the moment, for people who watch; None: it goes on."""
        ...

    def figures(self) -> dict[str, float]:
        """Counts so far, by name: calls, retries, tokens, drifted; and what is so now: `in_flight`, `slots`."""
        ...

    async def close(self) -> None:
        """Let go of engines, proxies and connections."""
        ...


class StartError(TrajlakeError, ValueError):
    """Siblings begin differently, so their rewards cannot be compared."""


class ReplayError(TrajlakeError, RuntimeError):
    """A rollout that was interrupted cannot go on: the environment answers otherwise, or the policy cannot."""
