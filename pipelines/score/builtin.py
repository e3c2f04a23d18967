"""A built-in scorer as the score job sees it: columnar, in this process, some thousand steps at a time."""

from collections.abc import Iterator, Sequence
from typing import Any

import polars as pl

from lake.read.snapshot import Snapshot
from pipelines.score.config import ScoreConfig
from pipelines.score.rollouts import KEYS, parts
from pipelines.score.rows import EXAMPLES, SCHEMA, Scored, example
from pipelines.score.scorers import Scorer, read_inputs

_EFFECTIVE = frozenset(("name", "arguments", "commit_seconds", "commit_episodes"))
"""Options of [score] that a built-in scorer heeds."""


class BuiltIn:
    """A scorer of `pipelines.score.scorers`; of the config its name and how often it commits have an effect."""

    is_grouped = False
    printed = ""

    def __init__(self, scorer: Scorer, config: ScoreConfig | None = None) -> None:
        self.scorer = scorer
        config = config or ScoreConfig()
        self.name = config.name or scorer.name
        idle = sorted(config.model_fields_set - _EFFECTIVE)
        self.notes: Sequence[str] = [f"{option} has no effect on a built-in scorer" for option in idle]

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
        """Score episodes, a part at a time, in the order of the files; UsageError if an option finds nothing here."""
        self.scorer.check(snapshot)
        for part in parts(episodes):
            rows = self.scorer.scores(read_inputs(snapshot, part, self.scorer.reads()))
            frame = rows.join(part.select(*KEYS), on="episode_id").with_columns(isolation=pl.lit(None, pl.String))
            scored = Scored(episodes=len(part), frames=[frame.select(*SCHEMA)])
            failed = frame.filter(pl.col("error").is_not_null())
            for episode_id, error in failed.select("episode_id", "error").head(EXAMPLES).iter_rows():
                scored.examples.append(example(episode_id, error))
            yield scored
