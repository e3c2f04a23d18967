"""A run's ranks around the lake and the run folder: rank 0 reads and writes, the others are told and follow.

Every rank goes through the same code; what only rank 0 may do stands here, or asks `Ranks.leads`.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import polars as pl

from lake.jobs import Job
from lake.judgements.credit import Credit
from lake.lake import Lake
from trainer.backends.ranks import Ranks
from trainer.config import TrainConfig
from trainer.data.preparation import Prepared, prepare_at
from trainer.runs.runs import RunFolder


@dataclass(slots=True)
class FollowedJob:
    """Rank 0's job as another rank sees it: it writes nothing."""

    job_id: int
    """The training job."""
    attempt: int
    """Number of this attempt."""
    counts: dict[str, Any] = field(default_factory=dict)
    """Figures that nobody reads."""

    def write(self, name: str, frame: pl.DataFrame) -> None:
        """Rank 0 writes the rows."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Rank 0 ends the job."""


RunJob = Job | FollowedJob
"""The training job on any rank."""


@contextmanager
def locked(folder: RunFolder, ranks: Ranks) -> Iterator[None]:
    """Keep other runs out of the folder.

    Raises:
        UsageError: another run trains there.
    """
    with ExitStack() as stack:

        def take() -> None:
            stack.enter_context(folder.locked())

        ranks.told_by_zero(take)
        yield


def run_job(make: Callable[[], Job], ranks: Ranks) -> RunJob:
    """The run's job: rank 0 makes it, the others follow."""
    made: list[Job] = []

    def told() -> tuple[int, int]:
        made.append(make())
        return made[0].job_id, made[0].attempt

    job_id, attempt = ranks.told_by_zero(told)
    return made[0] if made else FollowedJob(job_id, attempt)


def leased(lk: Lake, prepared: Prepared, run_id: str, ranks: Ranks) -> AbstractContextManager[object]:
    """Keeps the run's data from vacuum while it trains."""
    return lk.lease(prepared.snapshot, f"train {run_id}") if ranks.leads else nullcontext()


def prepared_together(lk: Lake, config: TrainConfig, make: Callable[[], Prepared], ranks: Ranks) -> Prepared:
    """The run's data and plan: rank 0 finds them, renders what is only text, and says where; the others do the same.

    Args:
        lk: the lake.
        config: resolved.
        make: what rank 0 does.
        ranks: who takes part.
    """
    made: list[Prepared] = []

    def told() -> tuple[dict[str, int], Credit | None]:
        made.append(make())
        return made[0].snapshot.versions, made[0].selection.source

    versions, source = ranks.told_by_zero(told)
    return made[0] if made else prepare_at(lk.at(versions), config, source)
