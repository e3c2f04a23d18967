"""The return that the environment itself reported."""

from typing import ClassVar, Literal

import polars as pl

from pipelines.score.scorers.protocol import Columns, Scorer, ScorerInputs


class EnvReturn(Scorer):
    """R = `episodes.env_return`, or the sum of `steps.reward` over the active steps.

    Source: the environment. One score per episode; O(episodes), or O(steps) with `source="rewards"`.
    """

    name: ClassVar[str] = "env_return"
    columns: ClassVar[Columns] = Columns(episodes=("env_return",), steps=("reward", "is_active"))

    source: Literal["env_return", "rewards"] = "env_return"
    """The reported return, or the sum of step rewards; one unknown reward makes the sum unknown."""

    def reads(self) -> Columns:
        """The return alone, unless it is summed."""
        return self.columns if self.source == "rewards" else Columns(episodes=("env_return",))

    def _score(self, inputs: ScorerInputs) -> pl.DataFrame:
        if self.source == "env_return":
            reason = pl.when(pl.col("env_return").is_null()).then(pl.lit("the environment reported no return"))
            return inputs.episodes.select("episode_id", value="env_return", reason=reason)
        reward = pl.col("reward")
        sums = (
            inputs.steps.filter(pl.col("is_active").fill_null(True))
            .group_by("episode_id")
            .agg(value=reward.sum(), unknown=reward.null_count())
        )
        return inputs.episodes.join(sums, on="episode_id", how="left", maintain_order="left").select(
            "episode_id",
            value=pl.when(pl.col("unknown") == 0).then("value"),
            reason=pl.when(pl.col("unknown").is_null())
            .then(pl.lit("the episode has no active step"))
            .when(pl.col("unknown") > 0)
            .then(pl.format("{} active steps have no reward", "unknown")),
        )
