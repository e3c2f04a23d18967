"""Scorers of recorded step numbers: the environment's return, and a penalty for the distance to a reference policy."""

from typing import ClassVar, Literal

import polars as pl
from pydantic import Field

from lake.errors import UsageError
from lake.read.snapshot import Snapshot
from pipelines.score.scorers.protocol import Scorer, ScorerColumns, ScorerInputs


class EnvReturn(Scorer):
    """R = `episodes.env_return`, or the sum of `steps.reward` over the active steps.

    Source: the environment. One score per episode; O(episodes), or O(steps) with `source="rewards"`.
    """

    name: ClassVar[str] = "env_return"
    columns: ClassVar[ScorerColumns] = ScorerColumns(episodes=("env_return",), steps=("reward", "is_active"))

    source: Literal["env_return", "rewards"] = "env_return"
    """The reported return, or the sum of step rewards; a single unknown reward makes the sum unknown."""

    def reads(self) -> ScorerColumns:
        """Return the columns; steps only for the sum."""
        return self.columns if self.source == "rewards" else ScorerColumns(episodes=("env_return",))

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


class KlInReward(Scorer):
    r"""-beta k1 for each step, with k1 estimated from the sampled tokens.

    .. code-block:: text

        k1 = sum over the step's sampled tokens of  log pi(token) - log pi_ref(token) = -log_ratio
        value = -beta k1 = beta log_ratio

    pi is the behaviour policy, pi_ref the checkpoint; `ratios.log_ratio` holds log pi_ref - log pi, stored numbers
    without a gradient. k1 is an unbiased estimate of KL(pi, pi_ref) with a high variance. In the reward, k1 is the
    estimator with the correct gradient (arXiv 2506.09477; arXiv 2512.21852 finds it best). A penalty per token would
    need token rewards, which the lake does not have, so this penalty is per step. Every active step gets a row, and
    the episode their sum. O(steps).
    """

    name: ClassVar[str] = "kl_in_reward"
    columns: ClassVar[ScorerColumns] = ScorerColumns(
        steps=("is_active", "trainable", "is_copied_context"), ratios=("checkpoint", "policy_version", "log_ratio")
    )

    checkpoint: str
    """Name of the reference in `ratios.checkpoint`."""
    policy_version: int | None = None
    """Version of its weights, where the name has several versions."""
    beta: float = Field(default=1.0, ge=0.0)
    """Weight; with 1 the score is -k1 itself, and a reward can weigh it."""

    def check(self, snapshot: Snapshot) -> None:
        """Raise UsageError if `ratios` has no row of the checkpoint or its version, with the valid ones."""
        recorded = snapshot.sql("SELECT DISTINCT checkpoint, policy_version FROM ratios ORDER BY ALL NULLS FIRST")
        versions = recorded.filter(checkpoint=self.checkpoint)
        matches = versions if self.policy_version is None else versions.filter(policy_version=self.policy_version)
        if matches.height:
            return
        version = "" if self.policy_version is None else f", policy_version {self.policy_version}"
        valid = (
            name if number is None else f"{name} (policy_version {number})"
            for name, number in (versions if versions.height else recorded).iter_rows()
        )
        msg = (
            f"kl_in_reward: `ratios` has no rows of checkpoint {self.checkpoint!r}{version}; it has: "
            f"{', '.join(valid) or 'no rows at all'}"
        )
        raise UsageError(msg)

    def _score(self, inputs: ScorerInputs) -> pl.DataFrame:
        counts = (
            pl.col("is_active").fill_null(True)
            & pl.col("trainable").fill_null(True)
            & ~pl.col("is_copied_context").fill_null(False)
        )
        ratios = inputs.ratios.filter(pl.col("checkpoint") == self.checkpoint)
        if self.policy_version is not None:
            ratios = ratios.filter(pl.col("policy_version") == self.policy_version)
        ratio = pl.col("log_ratio")
        step_ratios = ratios.group_by("episode_id", "step_index").agg(
            rows=pl.len(),
            spread=ratio.max() - ratio.min(),
            ratio=pl.when(ratio.null_count() == 0).then(ratio.first()),
        )
        clash = pl.col("spread") > 0
        steps = (
            inputs.steps.filter(counts)
            .sort("episode_id", "step_index")
            .join(step_ratios, on=["episode_id", "step_index"], how="left", maintain_order="left")
            .select(
                "episode_id",
                "step_index",
                value=pl.when(~clash.fill_null(False)).then(self.beta * pl.col("ratio")),
                error=pl.when(pl.col("rows").is_null())
                .then(pl.lit(f"`ratios` has no row of checkpoint {self.checkpoint!r} for the step"))
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
