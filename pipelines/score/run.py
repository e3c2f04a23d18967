"""Scores of one run on their way into the lake: what is committed when, and what others were faster with."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import polars as pl

from lake.errors import ConflictError
from lake.lake import Lake
from lake.read.episodes import KEYS
from lake.read.snapshot import Snapshot
from lake.write.claims import Commit, commit_unclaimed
from pipelines.score.figures import Figures, counts_of
from pipelines.score.functions import ScoreConfig
from pipelines.score.pending import Pending, taken
from pipelines.score.rows import Scored
from pipelines.score.work import Work

KIND = "score"
ORDER = (*KEYS, "step_index")
"""Of rows in a file: as the lake's own."""


@dataclass(frozen=True)
class Progress:
    """Where a run stands; what it has scored is committed."""

    done: int
    """Episodes scored so far."""
    total: int
    """Episodes to score."""
    failed: int
    """Those with an error."""
    seconds: float
    """Since the start."""


@dataclass
class ScoreRun:
    """Scores on their way into the lake."""

    lake: Lake
    snapshot: Snapshot
    work: Work
    series: dict[str, Any]
    series_id: int
    parameters: dict[str, Any]
    jobs: set[int]
    """Jobs whose scores do not count as another run's: those known at the start, and our own."""
    job_ids: list[int] = field(default_factory=list)
    done: int = 0
    """Episodes scored so far."""
    figures: Figures = field(default_factory=Figures)
    printed: str = ""
    """The end of what the function printed in processes of its own."""
    waiting: int = 0
    """Episodes that are not committed yet."""
    _parts: list[Scored] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._began

    def score(self, pending: Pending, config: ScoreConfig, progress: Callable[[Progress], None] | None) -> None:
        """Score what is pending, committed by number and by time; interrupted or not, what has been scored stays."""
        committed_at = time.monotonic()
        try:
            for scored in self.work.score(self.snapshot, pending.episodes):
                self.add(scored)
                if self.waiting >= config.commit_episodes or time.monotonic() - committed_at >= config.commit_seconds:
                    self.commit()
                    committed_at = time.monotonic()
                    if progress is not None:
                        progress(self.progress(pending))
        finally:
            self.commit()

    def progress(self, pending: Pending) -> Progress:
        """Where the run stands."""
        return Progress(self.done, len(pending.episodes), self.figures.counts["failed"], self.seconds)

    def add(self, scored: Scored) -> None:
        """Take what was scored, which may be nothing."""
        if not scored.episodes:
            return
        self._parts.append(scored)
        self.waiting += scored.episodes
        self.done += scored.episodes
        self.figures.take(scored)

    def commit(self) -> None:
        """Make what was scored visible; see `require_current`, `commit_rows`."""
        if not self._parts:
            return
        parts, self._parts = self._parts, []
        self.require_current()
        scores = pl.concat([part.frame() for part in parts]).sort(*ORDER, nulls_last=False)
        answers = [frame for part in parts for frame in part.responses]
        self.commit_rows(scores, pl.concat(answers) if answers else None, sum(part.answers for part in parts))
        self.waiting = 0

    def require_current(self) -> None:
        """Raise ConflictError if the scorer's source has changed: what was not committed is dropped."""
        if not self.work.is_current():
            msg = (
                f"the source of {self.work.name} changed while it ran: what was not committed is dropped; run it again"
            )
            raise ConflictError(msg)

    def commit_rows(self, scores: pl.DataFrame, responses: pl.DataFrame | None, answers: int) -> None:
        """Make rows visible, without what another run has scored or someone has taken out meanwhile.

        ConflictError if that happens again and again.
        """
        asked = scores["episode_id"].n_unique()

        def made(kept: pl.DataFrame, present: pl.Series) -> Commit:
            return Commit({"scores": self.named(kept)} | _kept_responses(responses, present), counts_of(kept, asked))

        claimed = partial(self.claimed, episode_ids=scores["episode_id"].unique())
        kept, job_id = commit_unclaimed(
            self.lake, scores, claimed=claimed, made=made, refusal=self.refusal, **self.of_job
        )
        self.own(job_id)
        self.figures.commit(kept, asked, answers)

    def own(self, job_id: int | None) -> None:
        """Note a job of ours; None if there was nothing to write."""
        if job_id is not None:
            self.jobs.add(job_id)
            self.job_ids.append(job_id)

    def claimed(self, now: Snapshot, episode_ids: pl.Series) -> pl.DataFrame:
        """Those of some episodes that another run has scored meanwhile."""
        return taken(now, self.series_id, episode_ids, frozenset(self.jobs)).to_frame()

    def named(self, scores: pl.DataFrame) -> pl.DataFrame:
        """Rows with the scorer's name and version."""
        return named(scores, self.series)

    @property
    def refusal(self) -> str:
        """Why rows cannot be committed as they are."""
        return f"another run has scored the same episodes with {self.work.name} meanwhile"

    @property
    def of_job(self) -> dict[str, Any]:
        """Arguments of the run's jobs."""
        return {"kind": KIND, "parameters": self.parameters, "series": self.series, "snapshot": self.snapshot}


def named(scores: pl.DataFrame, series: Mapping[str, Any]) -> pl.DataFrame:
    """Rows (`SCHEMA`) with the name and version of the scorer whose series this is."""
    return scores.with_columns(scorer=pl.lit(series["scorer"]), scorer_version=pl.lit(series["version"]))


def _kept_responses(responses: pl.DataFrame | None, present: pl.Series) -> dict[str, pl.DataFrame]:
    """Answers of judges; one that told something of an episode that was taken out goes for its siblings, too."""
    if responses is None:
        return {}
    gone = responses.filter(~pl.col("episode_id").is_in(present.implode()))
    return {"responses": responses.join(gone, on="request_id", how="anti")}
