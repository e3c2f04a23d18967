"""GiGPO, group-in-group policy optimisation (arXiv 2505.10978), over all the trajectories you have.

Two comparisons, no critic: a trajectory against its siblings (as GRPO does), and a step against the other steps that
were taken from the same state (the anchor). docs/guides/gigpo.md lists where this differs from paper and reference
code, and why.

Axes: `_N` rows, `_E` episodes.
"""

from typing import Literal, Self

import numpy as np
import polars as pl
from pydantic import BaseModel, ConfigDict, Field, model_validator

from pipelines.credit.anchor_groups import AnchorGroups, Revisits
from pipelines.credit.anchors import Anchors, ExactText
from pipelines.credit.batch import StepBatch
from pipelines.credit.columns import output_schema, select_inputs
from pipelines.credit.episode_credit import Baseline, episode_credit
from pipelines.credit.flags import Flag, join_flags
from pipelines.credit.normalise import Norm, Singleton
from pipelines.credit.returns import discounted_returns
from pipelines.credit.segments import Floats


class GiGPO(BaseModel):
    r"""Advantages of a step i of trajectory tau(i), whose siblings are the task group g(i).

    .. code-block:: text

        return-to-go        G_i = sum_{k >= t} gamma^(k - t) r_k           (no bootstrap)
        episode score       R(tau)
        step score          S_i = G_i - c [i invalid]
        episode advantage   A_E = (R(tau(i)) - mean_g R) / (std_g R + 1e-6) - c [i invalid] / max(std_g R, c)
        step advantage      A_S = (S_i - mean_a S) / (std_a S + 1e-6)      over the anchor group a(i)
        advantage           A   = A_E + omega A_S                          or omega A_E + (1 - omega) A_S

    with one R per trajectory (`baseline="trajectories"`); `mean_norm` leaves the divisions out. Under
    `baseline="rows"` R(tau(i)) - c [i invalid] is normalised over the rows of the group, as the reference code does.
    Standard deviations are sample deviations; a group of equal values gives exactly 0, and so does a state that nobody
    else visited. A term of weight 0 is left out of the sum, its NULLs included: `omega=0` is GRPO.

    NULL is unknown, never 0. An episode without a score has no A_E and is no sibling; a step with a NULL reward at or
    after it has no return and is no member of its anchor.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    gamma: float = Field(default=0.95, ge=0.0, le=1.0)
    """Discount of the return-to-go."""
    omega: float = Field(default=1.0, ge=0.0)
    """Weight of the step advantage (`sum`), or of the episode advantage (`convex`, at most 1)."""
    combination: Literal["sum", "convex"] = "sum"
    """`sum`: A_E + omega * A_S. `convex`: omega * A_E + (1 - omega) * A_S."""
    episode_norm: Norm = "mean_std_norm"
    """Centre, or centre and scale, the episode scores of a group."""
    step_norm: Norm = "mean_std_norm"
    """Centre, or centre and scale, the step scores of an anchor group."""
    baseline: Baseline = "trajectories"
    """Unit of the group statistics: every trajectory once, or every step row once (the reference code)."""
    singleton: Singleton = "zero"
    """A task group of one unit has A_E = 0, or its raw score (`raw`, the reference code)."""
    invalid_action_penalty: float = Field(default=0.1, ge=0.0)
    """c, in the unit of the rewards: taken from the score of a row whose action was malformed."""
    episode_source: Literal["score", "sum_rewards"] = "score"
    """R: the `episode_score` column, or the undiscounted sum of the episode's `reward`s."""
    step_source: Literal["rewards", "terminal_score", "rewards_plus_terminal"] = "rewards"
    """r: the `reward` column; 0 with `episode_score` on the last step; or `reward` plus `episode_score` on the last."""
    default_step_reward: float | None = None
    """Value of a NULL `reward`. None: it stays unknown."""
    truncated: Literal["keep", "mask", "exclude"] = "keep"
    """Truncated episodes: like others; in the statistics, own advantage NULL; or as if absent."""
    revisits: Revisits = "keep"
    """Members of an anchor group: every visit, or the first visit of each trajectory (later ones get A_S = 0)."""
    anchors: Anchors = ExactText()
    """When two steps are in the same state."""

    @model_validator(mode="after")
    def _convex_weight(self) -> Self:
        if self.combination == "convex" and self.omega > 1.0:
            msg = f'omega is {self.omega}; under combination="convex" it weighs A_E and lies in [0, 1]'
            raise ValueError(msg)
        return self

    def advantages(self, steps: pl.LazyFrame) -> pl.LazyFrame:
        """Advantages of every active step. Lazy: values are read and checked when the result is collected.

        Args:
            steps: one row per step, in any order: `episode_id`, `group_id` (integer or string), `step_index`
                (0, 1, 2, ... within the episode), `state_hash` (int64) or `state` (text), `reward` and
                `episode_score` (nullable numbers, where the sources need them), and optionally `status` (all
                completed), `is_active` (all active; inactive rows are dropped first), `is_action_valid` (all valid).

        Returns:
            One row per active step, sorted by (group_id, episode_id, step_index): `episode_id`, `step_index`,
            `group_id`, `anchor_key` (int64), `return_to_go`, `a_episode`, `a_step`, `advantage` (float64, NULL where
            unknown), `group_size` (scored siblings that take part), `anchor_size` (rows of the anchor group that take
            part), `anchor_episodes` (distinct trajectories among them; all int32), `flags` (see `Flag`). The bits do
            not depend on the order of the input rows.

        Raises:
            ContractError: a column is missing or of a wrong type (at once), or values break the contract (on
                collecting; see `check_steps`).
        """
        present = steps.collect_schema().names()
        inputs = select_inputs(steps, needed=self._needed(), anchor_columns=self.anchors.columns(present))
        schema = output_schema(inputs.collect_schema())
        # The rows of a group depend on each other: filters stay above this step (Polars' default for map_batches).
        return inputs.map_batches(lambda frame: self._credit(frame, schema), schema=schema)

    def _needed(self) -> list[str]:
        """Columns the two sources read."""
        rewards = self.episode_source == "sum_rewards" or self.step_source != "terminal_score"
        score = self.episode_source == "score" or self.step_source != "rewards"
        return ["reward"] * rewards + ["episode_score"] * score

    def _credit(self, inputs: pl.DataFrame, schema: pl.Schema) -> pl.DataFrame:
        """The job itself, on a frame that fits in memory."""
        batch = StepBatch.of(inputs)
        if batch is None:
            return pl.DataFrame(schema=schema)
        reward_N = batch.reward_N
        if self.default_step_reward is not None:
            reward_N = np.where(np.isnan(reward_N), self.default_step_reward, reward_N)
        return_N = discounted_returns(self._step_rewards(batch, reward_N), batch.episodes, self.gamma)
        score_E = batch.score_E if self.episode_source == "score" else batch.episodes.sum(reward_N)
        excluded_E = batch.broken_E & np.isnan(batch.score_E)
        if self.truncated == "exclude":
            excluded_E |= batch.truncated_E
        excluded_N = batch.episodes.spread(excluded_E)
        anchor_key = self.anchors.keys(batch, ~excluded_N)
        episode = episode_credit(
            batch,
            score_E,
            excluded_E,
            norm=self.episode_norm,
            baseline=self.baseline,
            singleton=self.singleton,
            penalty=self.invalid_action_penalty,
        )
        step = AnchorGroups.of(batch, anchor_key).credit(
            return_N - self.invalid_action_penalty * batch.invalid_N,
            ~excluded_N & anchor_key.is_not_null().to_numpy(),
            self.step_norm,
            self.revisits,
        )
        truncated_N = batch.episodes.spread(batch.truncated_E)
        masked_N = truncated_N & (self.truncated == "mask")
        advantage_N = self._combine(episode.a_episode_N, step.a_step_N)
        advantage_N[masked_N] = np.nan
        flags = {
            Flag.CONSTANT_ANCHOR: step.tied_N,
            Flag.DEAD_GROUP: batch.groups.spread(episode.dead_P),
            Flag.EXCLUDED: excluded_N,
            Flag.MASKED: masked_N,
            Flag.REVISIT: step.revisit_N,
            Flag.SINGLETON_ANCHOR: step.single_N,
            Flag.SINGLETON_GROUP: batch.groups.spread(episode.size_P == 1),
            Flag.TRUNCATED: truncated_N,
            Flag.UNKNOWN_RETURN: np.isnan(return_N),
            Flag.UNKNOWN_STATE: anchor_key.is_null().to_numpy(),
            Flag.UNSCORED: batch.episodes.spread(np.isnan(score_E)),
        }
        return batch.frame.select("episode_id", "step_index", "group_id").with_columns(
            anchor_key.alias("anchor_key"),
            _nullable("return_to_go", return_N),
            _nullable("a_episode", episode.a_episode_N),
            _nullable("a_step", step.a_step_N),
            _nullable("advantage", advantage_N),
            pl.Series("group_size", batch.groups.spread(episode.size_P)),
            pl.Series("anchor_size", step.size_N),
            pl.Series("anchor_episodes", step.episodes_N),
            join_flags(flags),
        )

    def _step_rewards(self, batch: StepBatch, reward_N: Floats) -> Floats:
        """Step rewards r, from the chosen source."""
        if self.step_source == "rewards":
            return reward_N
        terminal_N = np.zeros_like(reward_N)
        terminal_N[batch.episodes.last_K] = batch.score_E
        return terminal_N if self.step_source == "terminal_score" else reward_N + terminal_N

    def _combine(self, a_episode_N: Floats, a_step_N: Floats) -> Floats:
        """A of every row, NaN where a term that counts is unknown."""
        weights = (1.0, self.omega) if self.combination == "sum" else (self.omega, 1.0 - self.omega)
        advantages = (a_episode_N, a_step_N)
        return sum(
            (weight * a_N for weight, a_N in zip(weights, advantages, strict=True) if weight != 0.0),
            start=np.zeros_like(a_step_N),
        )


def _nullable(name: str, values_N: Floats) -> pl.Series:
    return pl.Series(name, values_N, nan_to_null=True)
