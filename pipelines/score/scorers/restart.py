"""Whether it was right to start over."""

from typing import ClassVar

import polars as pl

from pipelines.score.scorers.protocol import Columns, Scorer, ScorerInputs


class Restart(Scorer):
    """Reward of a decision to restart, from the quality before and after; an episode's score is the mean.

    .. code-block:: text

        no restart       0.5 if the quality before is above 0.7, else -0.3
        restart          improvement above 0.2: 1;  above 0: 0.5;  else -0.5
        restart pending  0 (no quality after it is recorded)

    Read from coordination spans with `action_type` `restart_decision`: `should_restart`, `previous_quality` and
    `new_quality` in `action_data`. Source: MassGen's RewardComputer. MassGen itself records no qualities: without
    `previous_quality` a decision's reward is unknown. A decision that belongs to a step scores the step. O(spans).
    """

    name: ClassVar[str] = "restart"
    columns: ClassVar[Columns] = Columns(spans=("step_index", "kind", "attributes"))

    pending: float | None = 0.0
    """Reward while the outcome of a restart is not known. None: unknown."""

    def _score(self, inputs: ScorerInputs) -> pl.DataFrame:
        attribute = pl.col("attributes").str.json_path_match
        decisions = inputs.spans.filter(
            (pl.col("kind") == "coordination") & (attribute("$.action_type") == "restart_decision")
        ).select(
            "episode_id",
            "step_index",
            restarts=attribute("$.action_data.should_restart"),
            before=attribute("$.action_data.previous_quality").cast(pl.Float64, strict=False),
            after=attribute("$.action_data.new_quality").cast(pl.Float64, strict=False),
        )
        rewarded = decisions.with_columns(reward=self._reward())
        means = _means(rewarded, ["episode_id"])
        episodes = (
            inputs.episodes.select("episode_id")
            .join(means, on="episode_id", how="left", maintain_order="left")
            .with_columns(
                reason=pl.when(pl.col("metrics").is_null())
                .then(pl.lit("no decision to restart is recorded"))
                .otherwise("reason")
            )
        )
        steps = _means(rewarded.drop_nulls("step_index"), ["episode_id", "step_index"])
        return pl.concat([episodes, steps.sort("episode_id", "step_index")], how="diagonal")

    def _reward(self) -> pl.Expr:
        restarts, before = pl.col("restarts"), pl.col("before")
        improvement = pl.col("after") - before
        return (
            pl.when(before.is_null())
            .then(None)
            .when(restarts == "false")
            .then(pl.when(before > 0.7).then(0.5).otherwise(-0.3))
            .when(restarts != "true")
            .then(None)
            .when(improvement.is_null())
            .then(pl.lit(self.pending, pl.Float64))
            .when(improvement > 0.2)
            .then(1.0)
            .when(improvement > 0.0)
            .then(0.5)
            .when(restarts == "true")
            .then(-0.5)
        )


def _means(decisions: pl.DataFrame, keys: list[str]) -> pl.DataFrame:
    reward = pl.col("reward")
    return decisions.group_by(keys).agg(
        value=pl.when(reward.null_count() == 0).then(reward.mean()),
        reason=pl.when(reward.null_count() > 0).then(
            pl.format("the qualities of {} of {} decisions are not recorded", reward.null_count(), pl.len())
        ),
        metrics=pl.struct(decisions=pl.len()).struct.json_encode(),
    )
