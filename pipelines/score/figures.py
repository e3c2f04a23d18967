"""What became of scored episodes, in figures: of a commit, of a part, and of a run, which adds them up."""

from collections import Counter
from dataclasses import dataclass, field

import polars as pl

from pipelines.score.rows import EXAMPLES, Scored

_TEXTS = 100
"""Different errors and reasons of a commit that are counted; some functions never say the same twice."""


@dataclass
class Figures:
    """Figures of scored episodes."""

    counts: Counter[str] = field(default_factory=Counter)
    """Of committed rows, see `counts_of`."""
    errors: Counter[str] = field(default_factory=Counter)
    """Errors of whole episodes, with their numbers of episodes."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Why episodes without an error have no score, alike."""
    unmatched: int = 0
    """Step outputs that match no step."""
    answers: int = 0
    """Answers of judges that were asked anew."""
    examples: list[str] = field(default_factory=list)
    """The first errors, each with its episode."""

    def take(self, scored: Scored) -> None:
        """Count what was scored and is not committed yet."""
        self.unmatched += scored.unmatched
        self.examples += scored.examples[: EXAMPLES - len(self.examples)]

    def commit(self, scores: pl.DataFrame, asked: int, answers: int) -> None:
        """Count rows (`SCHEMA`) that are in the lake, of so many episodes that were asked for."""
        self.counts.update(counts_of(scores, asked))
        self.errors.update(_texts(scores, pl.col("error").is_not_null(), "error"))
        self.reasons.update(_texts(scores, pl.col("value").is_null() & pl.col("error").is_null(), "reason"))
        self.answers += answers

    def merge(self, other: "Figures", *, is_committed: bool = True) -> None:
        """Add those of a part; without what `commit` counts, where its rows are still to be committed."""
        self.unmatched += other.unmatched
        self.examples += other.examples[: EXAMPLES - len(self.examples)]
        if is_committed:
            self.counts.update(other.counts)
            self.errors.update(other.errors)
            self.reasons.update(other.reasons)
            self.answers += other.answers


def counts_of(scores: pl.DataFrame, asked: int) -> dict[str, int]:
    """What was committed. known: episodes with a score (of steps, for a scorer that judges steps alone)."""
    is_whole, is_known = pl.col("step_index").is_null(), pl.col("value").is_not_null()
    whole = scores.filter(is_whole)
    of_steps = scores.join(whole, on="episode_id", how="anti")
    known = pl.concat([rows.filter(is_known)["episode_id"].unique() for rows in (whole, of_steps)])
    failed = scores.filter(pl.col("error").is_not_null())["episode_id"].unique()
    episodes = scores["episode_id"].n_unique()
    return {
        "known": len(known),
        "failed": len(failed),
        "unscored": episodes - pl.concat([known, failed]).n_unique(),
        "steps": scores["step_index"].count(),
        "known_steps": scores.filter(~is_whole & is_known).height,
        "overtaken": asked - episodes,
        "rows_in": episodes,
        "rows_out": len(scores),
    }


def _texts(scores: pl.DataFrame, test: pl.Expr, column: str) -> dict[str, int]:
    """The most frequent texts of whole episodes that a test marks, with their numbers."""
    whole = scores.filter(pl.col("step_index").is_null() & test).drop_nulls(column)
    counted = whole.group_by(column, maintain_order=True).len().sort("len", descending=True, maintain_order=True)
    return dict(counted.head(_TEXTS).iter_rows())
