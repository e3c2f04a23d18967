"""A penalty for leaving the reference policy, as a reward of steps."""

from typing import ClassVar

import polars as pl
from pydantic import Field

from lake.errors import UsageError
from lake.read.snapshot import Snapshot
from pipelines.score.scorers.protocol import Columns, Scorer, ScorerInputs


class KlInReward(Scorer):
    r"""-beta k1 for each step, with k1 estimated from the tokens that were sampled.

    .. code-block:: text

        k1 = sum over the step's sampled tokens of  log pi(token) - log pi_ref(token) = -log_ratio
        value = -beta k1 = beta log_ratio

    pi is the behaviour policy, pi_ref the checkpoint; `ratios.log_ratio` holds log pi_ref - log pi, stored numbers
    through which no gradient flows. k1 is unbiased for KL(pi, pi_ref), with a high variance; in the reward it is the
    estimator whose gradient is right (arXiv 2506.09477; arXiv 2512.21852 finds it best). A penalty of single tokens
    needs token rewards, which nothing here has: this one is of steps. Every active step gets a row, the episode their
    sum. O(steps).
    """

    name: ClassVar[str] = "kl_in_reward"
    columns: ClassVar[Columns] = Columns(
        steps=("is_active", "trainable", "is_copied_context"), ratios=("checkpoint", "policy_version", "log_ratio")
    )

    checkpoint: str
    """Name of the reference in `ratios.checkpoint`."""
    policy_version: int | None = None
    """Version of its weights, where the name alone stands for several."""
    beta: float = Field(default=1.0, ge=0.0)
    """Weight; keep it 1 and weigh the score in a reward, to see k1 itself."""

    def check(self, snapshot: Snapshot) -> None:
        """UsageError for a checkpoint, or a version of it, that `ratios` has nothing of, with those that there are."""
        there = snapshot.sql("SELECT DISTINCT checkpoint, policy_version FROM ratios ORDER BY ALL NULLS FIRST")
        named = there.filter(checkpoint=self.checkpoint)
        wanted = named if self.policy_version is None else named.filter(policy_version=self.policy_version)
        if wanted.height:
            return
        version = "" if self.policy_version is None else f", policy_version {self.policy_version}"
        valid = (
            name if number is None else f"{name} (policy_version {number})"
            for name, number in (named if named.height else there).iter_rows()
        )
        msg = (
            f"kl_in_reward: `ratios` has nothing of checkpoint {self.checkpoint!r}{version}; there is: "
            f"{', '.join(valid) or 'nothing of any'}"
        )
        raise UsageError(msg)

    def _score(self, inputs: ScorerInputs) -> pl.DataFrame:
        counts = (
            pl.col("is_active").fill_null(True)
            & pl.col("trainable").fill_null(True)
            & ~pl.col("is_copied_context").fill_null(False)
        )
        chosen = inputs.ratios.filter(pl.col("checkpoint") == self.checkpoint)
        if self.policy_version is not None:
            chosen = chosen.filter(pl.col("policy_version") == self.policy_version)
        ratio = pl.col("log_ratio")
        known = chosen.group_by("episode_id", "step_index").agg(
            rows=pl.len(),
            spread=ratio.max() - ratio.min(),
            ratio=pl.when(ratio.null_count() == 0).then(ratio.first()),
        )
        clash = pl.col("spread") > 0
        steps = (
            inputs.steps.filter(counts)
            .sort("episode_id", "step_index")
            .join(known, on=["episode_id", "step_index"], how="left", maintain_order="left")
            .select(
                "episode_id",
                "step_index",
                value=pl.when(~clash.fill_null(False)).then(self.beta * pl.col("ratio")),
                error=pl.when(pl.col("rows").is_null())
                .then(pl.lit(f"`ratios` has nothing of checkpoint {self.checkpoint!r} for the step"))
                .when(clash)
                .then(pl.format("`ratios` has {} different rows for the step; name a policy_version", "rows"))
                .when(pl.col("ratio").is_null())
                .then(pl.lit("the behaviour policy's log-probabilities are unknown")),
            )
        )
        value = pl.col("value")
        sums = steps.group_by("episode_id").agg(
            value=pl.when(value.null_count() == 0).then(value.sum()), steps=pl.len(), unknown=value.null_count()
        )
        episodes = inputs.episodes.join(sums, on="episode_id", how="left", maintain_order="left").select(
            "episode_id",
            value="value",
            reason=pl.when(pl.col("steps").is_null()).then(pl.lit("the episode has no step of the policy")),
            error=pl.when(pl.col("unknown") > 0).then(pl.format("unknown at {} of {} steps", "unknown", "steps")),
        )
        return pl.concat([episodes, steps], how="diagonal")
