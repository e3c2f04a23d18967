"""What a scorer is to the job, and what one is told that scores a part of the episodes in a worker process."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import polars as pl

from lake.read.snapshot import Snapshot
from pipelines.score.rows import Scored
from pipelines.score.sandbox.contract import Level, SandboxLimits


@dataclass
class Share:
    """How a worker process scores its part."""

    until: float
    """When it should stop to begin calls (`time.monotonic`): what it has by then is about to be committed."""
    level: Level | None
    """The weakest isolation of all machines of the run, which is what the scores are said to have had."""
    stopped: bool = False
    """Its time was up before all episodes were scored."""

    def stop(self) -> bool:
        """Whether its time is up; to be asked where something is left to do."""
        self.stopped = time.monotonic() >= self.until
        return self.stopped


class Work(Protocol):
    """A scorer as the job sees it."""

    name: str
    is_grouped: bool
    """A call judges all siblings of a group."""
    is_batched: bool
    """A call judges several rollouts, and which ones may matter."""
    notes: Sequence[str]
    """What its user should know before it runs: options without effect, arguments that may not be meant."""
    printed: str
    """The end of what it printed."""

    @property
    def version(self) -> str:
        """Equal versions give equal scores."""

    @property
    def parameters(self) -> dict[str, Any]:
        """For the job's row."""

    def is_current(self) -> bool:
        """Whether it is still what its version stands for."""

    def check(self, snapshot: Snapshot) -> None:
        """Called before anything runs: UsageError if an option names something that the lake does not have."""

    @property
    def asked(self) -> SandboxLimits | None:
        """What isolation a machine must be able to give; None if nothing of a user's runs."""

    def score(self, snapshot: Snapshot, episodes: pl.DataFrame, share: Share | None = None) -> Iterator[Scored]:
        """Rows of the episodes as they come; nothing, now and then, where they take long.

        `share`: the episodes are a part of the run's, and this is a worker process.
        """
