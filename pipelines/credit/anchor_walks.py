"""The steps that anchor definitions are judged by: who was where, came from where, and did what.

Axes: `_N` rows in canonical order.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import polars as pl

from lake.errors import DataRefusedError
from lake.reading import collected
from pipelines.credit.anchors.states import States
from pipelines.credit.batch import StepBatch
from pipelines.credit.columns import InputNeeds, select_inputs
from pipelines.credit.purity import choice, decisions
from pipelines.credit.segments import Bools

ACTIONS = ("action", "tool_calls")
"""Columns that say what was done; a frame may have none of them."""


@dataclass(frozen=True, slots=True)
class Walks:
    """Active steps of episodes, in the order in which they were taken.

    Attributes:
        batch: the rows as an estimator would get them.
        included_N: rows whose episode takes part.
        facts: per row `group_id`, `episode_id` (Int64: which run of rows), `included`, `taken` (what was done: a hash,
            NULL where actions are not known), `led_here` (what was done at the step before, NULL at the first),
            `is_error` (the mark, NULL if there is none), `score` (of the episode, NULL if it has none), `has_actions`.
    """

    batch: StepBatch
    included_N: Bools
    facts: pl.DataFrame

    @classmethod
    def of(cls, steps: pl.LazyFrame, columns: tuple[str, ...]) -> Self:
        """Read, sort and check.

        Args:
            steps: one row per step: keys, `columns`, and where known `status`, `episode_score`, `is_active`, `action`,
                `tool_calls`, `state_is_error`.
            columns: what definitions read.

        Raises:
            DataRefusedError: there is no active step.
            ContractError: see `StepBatch.of`.
        """
        present = steps.collect_schema().names()
        extras = [name for name in (*ACTIONS, "state_is_error") if name in present]
        needs = InputNeeds(anchor_columns=tuple(dict.fromkeys((*columns, *extras))))
        batch = StepBatch.of(collected(select_inputs(steps, needs)), needs)
        if batch is None:
            msg = "there are no active steps to measure anchors on; collect or ingest episodes first"
            raise DataRefusedError(msg)
        included_N = ~batch.episodes.spread(batch.broken_E & np.isnan(batch.score_E))
        return cls(batch, included_N, _facts(batch, included_N, extras))

    def texts(self) -> tuple[pl.Series, pl.DataFrame]:
        """The states: a code of each row's text (NULL: unknown), and `code` and `text` of each distinct one."""
        states = States.of(self.batch, self.included_N, reads_state=True, reads_text=True)
        return states.codes_N.alias("code"), states.texts()

    def copies(self) -> pl.DataFrame:
        """Per group: group_id, episodes, and copies: those that are exact copies of an earlier one.

        Every episode counts, whether it takes part or not.
        """
        steps = self.batch.frame.select("state_hash", taken=self.facts["taken"], episode_id=self.facts["episode_id"])
        groups = self.facts.unique("episode_id", maintain_order=True).select("episode_id", "group_id")
        known = pl.col("decisions").drop_nulls()
        figures = groups.join(decisions(steps), on="episode_id").group_by("group_id", maintain_order=True)
        return figures.agg(episodes=pl.len(), copies=known.len() - known.n_unique())


def _facts(batch: StepBatch, included_N: Bools, extras: list[str]) -> pl.DataFrame:
    actions = [name for name in ACTIONS if name in extras]
    rows = batch.frame.select(
        pl.Series("group_id", batch.groups.ids_N()),
        pl.Series("episode_id", batch.episodes.ids_N()),
        pl.Series("included", included_N),
        (choice(actions) if actions else pl.lit(None, pl.UInt64)).alias("taken"),
        (pl.col("state_is_error").cast(pl.Boolean) if "state_is_error" in extras else pl.lit(None, pl.Boolean)).alias(
            "is_error"
        ),
        pl.Series("score", batch.episodes.spread(batch.score_E), nan_to_null=True),
        pl.lit(bool(actions)).alias("has_actions"),
    )
    return rows.with_columns(before("taken").alias("led_here"))


def before(name: str) -> pl.Expr:
    """A column's value at the episode's step before, NULL at its first."""
    same = pl.col("episode_id") == pl.col("episode_id").shift()
    return pl.when(same).then(pl.col(name).shift())


def after(name: str) -> pl.Expr:
    """A column's value at the episode's next step, NULL at its last."""
    same = pl.col("episode_id") == pl.col("episode_id").shift(-1)
    return pl.when(same).then(pl.col(name).shift(-1))
