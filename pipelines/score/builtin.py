"""A built-in scorer as the score job sees it: columnar, in this process, some thousand steps at a time."""

from collections.abc import Iterator
from typing import Any

import polars as pl

from lake.snapshot import Snapshot
from pipelines.score.rollouts import KEYS, parts
from pipelines.score.rows import EXAMPLES, SCHEMA, Scored, example
from pipelines.score.scorers import Scorer, read_inputs


class BuiltIn:
    """A scorer of `pipelines.score.scorers`.

    Args:
        scorer: with its options.
        name: under which its scores are kept; its own unless given.
    """

    is_grouped = False
    printed = ""

    def __init__(self, scorer: Scorer, name: str | None = None) -> None:
        self.scorer = scorer
        self.name = name or scorer.name

    @property
    def version(self) -> str:
        """Hash of its source and options, as 13 characters."""
        return self.scorer.version

    @property
    def parameters(self) -> dict[str, Any]:
        """Its options."""
        return {"builtin": self.scorer.name, "options": self.scorer.model_dump(mode="json", by_alias=True)}

    def is_current(self) -> bool:
        """It is loaded, and stays what it is."""
        return True

    def score(self, snapshot: Snapshot, episodes: pl.DataFrame) -> Iterator[Scored]:
        """Score episodes, a part at a time, in the order of the files; see `UserFunction.score`."""
        for part in parts(episodes):
            rows = self.scorer.scores(read_inputs(snapshot, part, self.scorer.reads()))
            frame = rows.join(part.select(*KEYS), on="episode_id").with_columns(isolation=pl.lit(None, pl.String))
            scored = Scored(episodes=len(part), frames=[frame.select(*SCHEMA)])
            failed = frame.filter(pl.col("error").is_not_null())
            for episode_id, error in failed.select("episode_id", "error").head(EXAMPLES).iter_rows():
                scored.examples.append(example(episode_id, error))
            yield scored
