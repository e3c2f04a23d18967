"""Base class, shared options and flags of estimators: frozen configurations that turn steps into advantages.

An estimator file holds its options, its formula and `credit()`. `Estimator` selects, checks and sorts the input and
makes the output. The credit job uses only this class. Option classes: a score per episode (`ScoreOptions`), returns of
steps (`ReturnOptions`), a batch (`BatchOptions`). `PRESETS` follow other code. `Flag` explains an advantage.

Axes: `_N` rows, `_E` episodes, `_P` task groups.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from sys import modules
from types import ModuleType
from typing import Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt
import polars as pl
from pydantic import BaseModel, Field, model_validator

from lake.read.text_table import count_noun
from pipelines.credit.estimators.normalise import StepCredit, discount_rewards
from pipelines.credit.steps import Bools, Floats, InputNeeds, StepBatch, make_output_schema, select_inputs

STATE = """
CASE
    WHEN max(group_size) IS NULL THEN 'absent'
    WHEN bool_or(group_size >= 2 AND NOT contains(',' || flags || ',', ',dead_group,')) THEN 'live'
    WHEN max(group_size) >= 2 THEN 'dead'
    WHEN max(group_size) = 1 THEN 'singleton'
    ELSE 'unscored'
END
"""
"""SQL expression over a group's rows of `advantages`: its state. live: two or more scored siblings that differ."""


class Flag(StrEnum):
    """Reason why an advantage is 0, unknown or unusual. Rows list their flags in this alphabetical order."""

    CONSTANT_ANCHOR = "constant_anchor"
    """Two or more rows share the anchor state with equal step scores: the step advantage is exactly 0."""
    CONSTANT_BATCH = "constant_batch"
    """All scores (or returns) of the batch are equal: the advantage is exactly 0."""
    CONSTANT_STEP = "constant_step"
    """All compared steps have the same return: the advantage is exactly 0."""
    DEAD_GROUP = "dead_group"
    """The group has two or more scored siblings, all with the same score."""
    EXCLUDED = "excluded"
    """The episode is not compared: aborted or failed without a score, or truncated under `truncated="exclude"`."""
    LEFT_OUT = "left_out"
    """The anchor definition excludes this state, such as an error text: the step advantage is exactly 0."""
    MASKED = "masked"
    """The episode is truncated under `truncated="mask"`: it counts in the statistics, its advantage is NULL."""
    REVISIT = "revisit"
    """The trajectory visited the anchor before, under `revisits="first"`: the step advantage is 0."""
    SINGLETON_ANCHOR = "singleton_anchor"
    """No other row has this anchor state: the step advantage is exactly 0."""
    SINGLETON_BATCH = "singleton_batch"
    """The batch has one scored episode (or step): the advantage is exactly 0."""
    SINGLETON_GROUP = "singleton_group"
    """The group has one scored trajectory, so there is no comparison."""
    SINGLETON_STEP = "singleton_step"
    """No other trajectory of the group has this step: the advantage is exactly 0."""
    TRUNCATED = "truncated"
    """The episode was cut off by a limit."""
    UNKNOWN_BATCH = "unknown_batch"
    """The batch key of the episode is NULL."""
    UNKNOWN_LENGTH = "unknown_length"
    """The length of the episode is NULL."""
    UNKNOWN_RETURN = "unknown_return"
    """A reward at this step or a later one is NULL, so the return-to-go is unknown."""
    UNKNOWN_STATE = "unknown_state"
    """The state is NULL, so the step has no anchor: the step advantage is exactly 0."""
    UNKNOWN_VALUE = "unknown_value"
    """A value estimate at this step or a later one is NULL, or the final value of a truncated episode is."""
    UNSCORED = "unscored"
    """The episode's score is NULL, so its episode advantage is unknown."""


def join_flags(masks_N: Mapping[Flag, Bools]) -> pl.Series:
    """Return the series `flags`: the sorted names of each row's flags, separated by commas."""
    num_rows = len(next(iter(masks_N.values())))
    flags = sorted(flag for flag, mask_N in masks_N.items() if mask_N.any())
    codes_N = np.zeros(num_rows, np.int32)
    for bit, flag in enumerate(flags):
        codes_N |= masks_N[flag].astype(np.int32) << bit
    texts = [",".join(flag for bit, flag in enumerate(flags) if code >> bit & 1) for code in range(1 << len(flags))]
    return pl.Series("flags", texts, dtype=pl.String).gather(pl.Series(codes_N))


_REMEDIES = {
    Flag.UNSCORED: "the episode has no score: `trajlake score`, or another --score",
    Flag.UNKNOWN_BATCH: "`batch_key` is NULL: take another column for it",
    Flag.UNKNOWN_LENGTH: "the episode has no token count: --set length=steps",
    Flag.UNKNOWN_RETURN: "a reward is NULL from there on: --rewards SCORER, or --set step_source=terminal_score, "
    "which takes the episode's score",
    Flag.UNKNOWN_VALUE: "no value estimate is stored (`value_estimate`; `final_value_estimate` where it was cut off)",
    Flag.MASKED: "the episode was truncated: --set truncated=keep trains on it",
    Flag.EXCLUDED: "the episode failed, was aborted or, under truncated=exclude, cut off",
}


def count_unknown(rows: pl.DataFrame) -> Counter[str]:
    """Count the steps without an advantage by reason; a step with two reasons counts for both."""
    counted: Counter[str] = Counter()
    texts = rows.lazy().filter(pl.col("advantage").is_null()).group_by("flags").agg(pl.len()).collect()
    for text, steps in texts.iter_rows():
        counted.update({flag: steps for flag in text.split(",") if flag in set(_REMEDIES)})
    return counted


def describe_unknown(unknown: Mapping[str, int]) -> list[str]:
    """Return a line per reason of `count_unknown`, the most frequent first."""
    ordered = sorted(unknown.items(), key=lambda item: (-item[1], item[0]))
    return [
        f"advantages unknown in {count_noun(steps, 'step')}, {flag}: {_REMEDIES[Flag(flag)]}" for flag, steps in ordered
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditRows:
    """Advantages over the rows of a batch, with their terms; None stands for a term that is not computed."""

    advantage_N: Floats
    """NaN where unknown."""
    size_P: npt.NDArray[np.int32]
    """Compared siblings of each group."""
    flags: Mapping[Flag, Bools]
    return_N: Floats | None = None
    """Return-to-go, NaN where unknown."""
    a_episode_N: Floats | None = None
    a_step_N: Floats | None = None
    anchor_key: pl.Series | None = None
    """NULL where unknown."""
    anchors: StepCredit | None = None

    def frame(self, batch: StepBatch) -> pl.DataFrame:
        """Return the rows in the columns of `make_output_schema`."""
        none_N = np.zeros(len(self.advantage_N), np.int32)
        key = pl.lit(None, pl.Int64) if self.anchor_key is None else self.anchor_key
        return batch.frame.select("episode_id", "step_index", "group_id").with_columns(
            key.alias("anchor_key"),
            _to_nullable("return_to_go", self.return_N),
            _to_nullable("a_episode", self.a_episode_N),
            _to_nullable("a_step", self.a_step_N),
            _to_nullable("advantage", self.advantage_N),
            pl.Series("group_size", batch.groups.spread(self.size_P)),
            pl.Series("anchor_size", none_N if self.anchors is None else self.anchors.size_N),
            pl.Series("anchor_episodes", none_N if self.anchors is None else self.anchors.episodes_N),
            join_flags(self.flags),
        )


def _to_nullable(name: str, values_N: Floats | None) -> pl.Series | pl.Expr:
    if values_N is None:
        return pl.lit(None, pl.Float64).alias(name)
    return pl.Series(name, values_N, nan_to_null=True)


STATE_COLUMNS = ("state", "state_hash")
"""Columns of `steps` that hold a state."""


class Estimator(BaseModel, ABC, frozen=True, extra="forbid", allow_inf_nan=False):
    """Base of all estimators."""

    name: ClassVar[str]
    """Name on the command line and in a job's parameters."""
    incremental: ClassVar[bool] = True
    """Whether a group's advantages depend on that group alone. False: on the batch of `batch_key`."""

    @abstractmethod
    def input_needs(self, present: Sequence[str] = STATE_COLUMNS) -> InputNeeds:
        """Return the required columns; an anchor definition may choose among the present ones."""

    @abstractmethod
    def credit(self, batch: StepBatch) -> CreditRows:
        """Compute the advantages of checked, sorted, active steps that fit in memory."""

    def advantages(self, steps: pl.LazyFrame) -> pl.LazyFrame:
        """Compute the advantages of all active steps, lazily: collecting reads and checks the values.

        Args:
            steps: one row per step, in any order: `episode_id`, `group_id` (integer or string), `step_index`
                (0, 1, 2, ... within the episode), the columns of `input_needs()`, `reward` and `episode_score`
                (nullable numbers, where the sources need them), and optionally `status` (all completed), `is_active`
                (all active; inactive rows are dropped first), `is_action_valid` (all valid).

        Returns:
            One row per active step, sorted by (group_id, episode_id, step_index): `episode_id`, `step_index`,
            `group_id`, `anchor_key` (int64), `return_to_go`, `a_episode`, `a_step`, `advantage` (float64, NULL where
            unknown, and in all rows of a column that the estimator does not compute), `group_size` (compared, scored
            siblings), `anchor_size` (rows of the step's comparison, itself included; 0 without one), `anchor_episodes`
            (distinct trajectories among them; all int32), `flags` (see `Flag`). The order of the input rows does not
            change the bits.

        Raises:
            ContractError: a column is missing or has a wrong type (raised at once), or values break the contract
                (raised on collecting; see `check_steps`).
        """
        needs = self.input_needs(steps.collect_schema().names())
        inputs = select_inputs(steps, needs)
        schema = make_output_schema(inputs.collect_schema())

        def compute(frame: pl.DataFrame) -> pl.DataFrame:
            batch = StepBatch.of(frame, needs)
            return pl.DataFrame(schema=schema) if batch is None else self.credit(batch).frame(batch)

        # The rows of a group depend on each other: filters stay above this step (Polars' default for map_batches).
        return inputs.map_batches(compute, schema=schema)

    @classmethod
    def code(cls) -> tuple[ModuleType, ...]:
        """Return the modules of the estimator's classes, whose source decides the numbers."""
        names = {home.__module__ for home in cls.__mro__ if home.__module__.startswith("pipelines.")}
        return tuple(modules[name] for name in sorted(names))


ALL = "all"
"""Batch key that puts all episodes of the job into one batch."""
_NO_BATCH_KEY = frozenset({"episode_id", "step_index", "reward", "episode_score", "status", "is_active"})


class RewardOptions(Estimator, ABC):
    """Options of all estimators about episodes and rewards."""

    default_step_reward: float | None = None
    """Value of a NULL `reward`; None: unknown."""
    truncated: Literal["keep", "mask", "exclude"] = "keep"
    """Truncated episodes: keep; mask (they count in the statistics, their advantage is NULL); or exclude."""

    def input_needs(self, present: Sequence[str] = STATE_COLUMNS) -> InputNeeds:
        """Return the required columns; see `Estimator.input_needs`."""
        return InputNeeds()

    def _rewards_N(self, batch: StepBatch) -> Floats:
        if self.default_step_reward is None:
            return batch.reward_N
        return np.where(np.isnan(batch.reward_N), self.default_step_reward, batch.reward_N)

    def _excluded_E(self, batch: StepBatch, assigned_E: Floats) -> Bools:
        """Return the episodes without a part in any comparison.

        These are aborted or failed episodes without an assigned score, and truncated ones under `exclude`. The rewards
        that a broken rollout collected are not an assigned score.
        """
        excluded_E: Bools = batch.broken_E & np.isnan(assigned_E)
        return excluded_E | batch.truncated_E if self.truncated == "exclude" else excluded_E

    def _masked_N(self, batch: StepBatch) -> Bools:
        """Return the rows that count in the statistics and get no advantage."""
        return batch.episodes.spread(batch.truncated_E) & (self.truncated == "mask")

    def _flag_endings(self, batch: StepBatch, excluded_E: Bools) -> Mapping[Flag, Bools]:
        return {
            Flag.EXCLUDED: batch.episodes.spread(excluded_E),
            Flag.MASKED: self._masked_N(batch),
            Flag.TRUNCATED: batch.episodes.spread(batch.truncated_E),
        }


class ScoreOptions(RewardOptions, ABC):
    """Options of the episode score."""

    episode_source: Literal["score", "sum_rewards"] = "score"
    """Source of R: the column `episode_score`, or the undiscounted sum of the episode's rewards."""

    def input_needs(self, present: Sequence[str] = STATE_COLUMNS) -> InputNeeds:
        """Return the required columns; see `Estimator.input_needs`."""
        needs = super().input_needs(present)
        if self.episode_source == "score":
            return replace(needs, episode_score=True)
        return replace(needs, step_columns=(*needs.step_columns, "reward"))

    def _scores_E(self, batch: StepBatch) -> Floats:
        """Return R of each episode, NaN where unknown."""
        return batch.score_E if self.episode_source == "score" else batch.episodes.sum(self._rewards_N(batch))


class ReturnOptions(RewardOptions, ABC):
    """Options of the returns of steps."""

    gamma: float = Field(default=0.95, ge=0.0, le=1.0)
    """Discount of the return-to-go."""
    step_source: Literal["rewards", "terminal_score", "rewards_plus_terminal"] = "rewards"
    """Source of r: `reward`; 0 with `episode_score` on the last step; or `reward` plus `episode_score` on the last."""

    def input_needs(self, present: Sequence[str] = STATE_COLUMNS) -> InputNeeds:
        """Return the required columns; see `Estimator.input_needs`."""
        needs = super().input_needs(present)
        rewards = ("reward",) * (self.step_source != "terminal_score")
        return replace(
            needs,
            step_columns=(*needs.step_columns, *rewards),
            episode_score=needs.episode_score or self.step_source != "rewards",
        )

    def _step_rewards_N(self, batch: StepBatch) -> Floats:
        """Return the step rewards r of `step_source`."""
        reward_N = self._rewards_N(batch)
        if self.step_source == "rewards":
            return reward_N
        terminal_N = np.zeros_like(reward_N)
        terminal_N[batch.episodes.last_K] = batch.score_E
        return terminal_N if self.step_source == "terminal_score" else reward_N + terminal_N

    def _returns_N(self, batch: StepBatch) -> Floats:
        """Return the return-to-go G, NaN where unknown."""
        return discount_rewards(self._step_rewards_N(batch), batch.episodes, self.gamma)

    def _siblings_P(self, batch: StepBatch, return_N: Floats, excluded_E: Bools) -> npt.NDArray[np.int32]:
        """Count the compared trajectories of each group with a known return."""
        return batch.siblings.count(~excluded_E & ~np.isnan(return_N[batch.episodes.starts_K]))


class BatchOptions(RewardOptions, ABC):
    """Options of the batch for normalisation. The batch decides the numbers, so it has no default."""

    incremental: ClassVar[bool] = False

    batch_key: str | None = None
    """Column of `episodes` whose equal values form a batch, or `all`. Required."""

    @model_validator(mode="after")
    def _check_batch_key(self) -> Self:
        if self.batch_key is None and self.incremental:
            return self  # without a batch, groups are independent
        if self.batch_key is None or self.batch_key in _NO_BATCH_KEY:
            fault = "none is given" if self.batch_key is None else f"{self.batch_key!r} cannot be one"
            msg = (
                f"{self.name} normalises over a batch of episodes, so it needs batch_key, and {fault}. Name the column "
                "of episodes that tells batches apart, for example batch_key=policy_version or "
                "batch_key=collection_round; batch_key=all makes one batch of everything the job covers"
            )
            raise ValueError(msg)
        return self

    def input_needs(self, present: Sequence[str] = STATE_COLUMNS) -> InputNeeds:
        """Return the required columns; see `Estimator.input_needs`."""
        needs = super().input_needs(present)
        if self.batch_key is None or self.batch_key == ALL:
            return needs
        return replace(needs, episode_columns=(*needs.episode_columns, self.batch_key))

    def _keys_E(self, batch: StepBatch) -> pl.Series:
        return self._keys_N(batch).gather(batch.episodes.starts_K)

    def _keys_N(self, batch: StepBatch) -> pl.Series:
        if self.batch_key is None or self.batch_key == ALL:
            return pl.repeat(0, len(batch.reward_N), dtype=pl.Int8, eager=True)
        return batch.frame[self.batch_key]


PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "gigpo": {
        "verl-agent": {
            "gamma": 0.95,
            "omega": 1.0,
            "combination": "sum",
            "episode_norm": "mean_norm",
            "step_norm": "mean_norm",
            "baseline": "rows",
            "singleton": "raw",
            "invalid_action_penalty": 0.1,
            "revisits": "keep",
            "truncated": "keep",
            "episode_source": "sum_rewards",
            "anchors": {"kind": "exact"},
        }
    }
}
"""Estimator -> name -> options; explicit options override them. verl-agent: its defaults, with the gamma of its GiGPO
scripts (its default is 1)."""
