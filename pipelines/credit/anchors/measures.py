"""What anchor definitions would give, measured on a lake's steps before any credit is computed. Nothing is written.

Axes: `_N` rows in canonical order, `_V` distinct texts.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import process_time
from typing import Self

import numpy as np
import polars as pl

from lake.errors import DataRefusedError
from lake.judgements.predicates import select_where
from lake.read.parquet import collected
from lake.read.snapshot import Snapshot
from lake.tables import TABLES
from pipelines.credit.anchors import Anchors, Chain
from pipelines.credit.anchors.definition import States
from pipelines.credit.anchors.key_stages import LastStates
from pipelines.credit.anchors.texts import CanonicalJson, ExactText, NoErrors, Substitution, Substitutions, ToolResults
from pipelines.credit.estimators.protocol import STATE_COLUMNS
from pipelines.credit.health.groups import choice, decisions
from pipelines.credit.inputs.batch import Bools, StepBatch
from pipelines.credit.inputs.columns import KEYS, InputNeeds, select_inputs

ACTIONS = ("action", "tool_calls")
"""Columns that say what was done; a frame may have none of them."""


@dataclass(frozen=True, slots=True)
class Walks:
    """Active steps of episodes, in the order in which they were taken."""

    batch: StepBatch
    included_N: Bools
    """Rows whose episode takes part."""
    facts: pl.DataFrame
    """Per row `group_id`, `episode_id` (Int64: which run of rows), `included`, `taken` (hash of the action, NULL where
    actions are not known), `led_here` (that of the step before, NULL at the first), `is_error` (the mark, NULL if there
    is none), `score` (of the episode, NULL if it has none), `has_actions`."""

    @classmethod
    def of(cls, steps: pl.LazyFrame, columns: tuple[str, ...]) -> Self:
        """Read, sort and check steps; DataRefusedError without an active one, ContractError as in `StepBatch.of`.

        They have keys, the columns that definitions read, and where known `status`, `episode_score`, `is_active`,
        `action`, `tool_calls`, `state_is_error`.
        """
        present = steps.collect_schema().names()
        extras = [name for name in (*ACTIONS, "state_is_error") if name in present]
        needs = InputNeeds(anchor_columns=tuple(dict.fromkeys((*columns, *extras))))
        batch = StepBatch.of(collected(select_inputs(steps, needs)), needs)
        if batch is None:
            msg = "there are no active steps to measure anchors on; collect or ingest episodes first"
            raise DataRefusedError(msg)
        included_N = ~batch.episodes.spread(batch.broken_E & np.isnan(batch.score_E))
        actions = [name for name in ACTIONS if name in extras]
        rows = batch.frame.select(
            pl.Series("group_id", batch.groups.ids_N()),
            pl.Series("episode_id", batch.episodes.ids_N()),
            pl.Series("included", included_N),
            (choice(actions) if actions else pl.lit(None, pl.UInt64)).alias("taken"),
            (
                pl.col("state_is_error").cast(pl.Boolean) if "state_is_error" in extras else pl.lit(None, pl.Boolean)
            ).alias("is_error"),
            pl.Series("score", batch.episodes.spread(batch.score_E), nan_to_null=True),
            pl.lit(bool(actions)).alias("has_actions"),
        )
        return cls(batch, included_N, rows.with_columns(before("taken").alias("led_here")))

    def texts(self) -> tuple[pl.Series, pl.DataFrame]:
        """The states: a code of each row's text (NULL: unknown), and `code` and `text` of each distinct one."""
        states = States.of(self.batch, self.included_N, reads_state=True, reads_text=True)
        return states.codes_N.alias("code"), states.texts()

    def copies(self) -> pl.DataFrame:
        """Per group: group_id, episodes (all, also those without part), and copies of an earlier one among them."""
        steps = self.batch.frame.select("state_hash", taken=self.facts["taken"], episode_id=self.facts["episode_id"])
        groups = self.facts.unique("episode_id", maintain_order=True).select("episode_id", "group_id")
        known = pl.col("decisions").drop_nulls()
        figures = groups.join(decisions(steps), on="episode_id").group_by("group_id", maintain_order=True)
        return figures.agg(episodes=pl.len(), copies=known.len() - known.n_unique())


def before(name: str) -> pl.Expr:
    """A column's value at the episode's step before, NULL at its first."""
    same = pl.col("episode_id") == pl.col("episode_id").shift()
    return pl.when(same).then(pl.col(name).shift())


def after(name: str) -> pl.Expr:
    """A column's value at the episode's next step, NULL at its last."""
    same = pl.col("episode_id") == pl.col("episode_id").shift(-1)
    return pl.when(same).then(pl.col(name).shift(-1))


_NUMBERS = Substitutions(substitutions=(Substitution(pattern="[0-9]+", replacement="0"),))
CANDIDATES: dict[str, Anchors] = {
    "exact": ExactText(),
    "no errors": NoErrors(),
    "tool results": ToolResults(),
    "json": CanonicalJson(),
    "numbers alike": _NUMBERS,
    "numbers alike, no errors": Chain(steps=(NoErrors(), _NUMBERS)),
    "last 2 states": LastStates(k=2),
}
"""What is measured where nothing is asked for: cheap definitions that show what the texts are like."""


def columns_of(definitions: Iterable[Anchors], present: list[str]) -> tuple[str, ...]:
    """The columns that definitions read, once each."""
    return tuple(dict.fromkeys(name for definition in definitions for name in definition.columns(present)))


def measure(walks: Walks, definitions: Mapping[str, Anchors]) -> pl.DataFrame:
    """Figures of each definition over the same steps; the walks have the columns that the definitions read.

    One row per definition, by the name it is shown under. Shares of the steps of episodes that take part (`steps` of
    them): `known` (have a key), `shared` (two or more episodes of the group visited the state), `singleton` (no other
    step has it). `states`: distinct ones; over those that are shared: `episodes` (mean of the episodes that visited
    them), `one_action` (share where all took the same action), `ways_in` (mean of the distinct actions that led there),
    `errors` (share of their steps whose state is marked as an error text). `seconds` of CPU. NULL: cannot be known.
    """
    return pl.concat(_measured(name, definition, walks) for name, definition in definitions.items())


def _measured(name: str, definition: Anchors, walks: Walks) -> pl.DataFrame:
    began = process_time()
    keys_N = definition.keys(walks.batch, walks.included_N)
    seconds = process_time() - began
    rows = walks.facts.with_columns(keys_N.alias("key")).filter("included")
    states = (
        rows.lazy()
        .filter(pl.col("key").is_not_null())
        .group_by("group_id", "key")
        .agg(
            pl.len().alias("steps"),
            pl.col("episode_id").n_unique().alias("episodes"),
            pl.when(pl.col("has_actions").any()).then(pl.col("taken").n_unique()).alias("actions"),
            pl.when(pl.col("has_actions").any()).then(pl.col("led_here").drop_nulls().n_unique()).alias("ways_in"),
            pl.col("is_error").sum().alias("errors"),
            pl.col("is_error").count().alias("marked"),
        )
    )
    steps, shared = pl.col("steps"), pl.col("episodes") >= 2
    return states.select(
        pl.lit(name).alias("anchors"),
        pl.lit(rows.height).alias("steps"),
        (steps.sum() / rows.height).alias("known"),
        (steps.filter(shared).sum() / rows.height).alias("shared"),
        ((steps == 1).sum() / rows.height).alias("singleton"),
        pl.len().alias("states"),
        pl.col("episodes").filter(shared).mean(),
        (pl.col("actions").filter(shared) == 1).mean().alias("one_action"),
        pl.col("ways_in").filter(shared).mean(),
        pl.when(pl.col("marked").filter(shared).sum() > 0)
        .then(pl.col("errors").filter(shared).sum() / steps.filter(shared).sum())
        .alias("errors"),
        pl.lit(seconds).alias("seconds"),
    ).collect()


def largest_anchors(walks: Walks, definition: Anchors, count: int) -> pl.DataFrame:
    """The shared anchors with most steps, and how differently they were reached. The walks hold `state` as well.

    One row per key that two or more episodes of a group visited, most steps first: `state` (its text; of several, the
    first), `steps` and `groups` (there), `states_before` and `actions_before` (distinct states that it followed, and
    actions that led to it), `actions` (distinct ones that were taken there), `score_std` (mean over its groups, weighed
    by steps, of the deviation of the episodes' scores). NULL where it cannot be known.
    """
    codes_N, texts_V = walks.texts()
    keys_N = definition.keys(walks.batch, walks.included_N)
    rows = walks.facts.with_columns(keys_N.alias("key"), codes_N.alias("code")).filter("included")
    rows = rows.with_columns(before("key").alias("came")).filter(pl.col("key").is_not_null())
    of_groups = rows.group_by("key", "group_id").agg(
        pl.len().alias("n"), pl.col("episode_id").n_unique().alias("episodes"), pl.col("score").std(ddof=1)
    )
    shared = of_groups.filter(pl.col("episodes") >= 2)
    known = pl.col("score").is_not_null()
    sizes = shared.group_by("key").agg(
        pl.col("n").sum().alias("steps"),
        pl.len().alias("groups"),
        ((pl.col("score") * pl.col("n")).sum() / pl.col("n").filter(known).sum()).fill_nan(None).alias("score_std"),
    )
    largest = sizes.sort("steps", "key", descending=[True, False]).head(count)
    visits = rows.join(shared, on=["key", "group_id"], how="semi").join(largest.select("key"), on="key", how="semi")
    acted = pl.when(pl.col("has_actions").any())
    reached = (
        visits.join(texts_V, on="code", how="left")
        .group_by("key")
        .agg(
            pl.col("text").min().alias("state"),
            pl.col("came").drop_nulls().n_unique().alias("states_before"),
            acted.then(pl.col("led_here").drop_nulls().n_unique()).alias("actions_before"),
            acted.then(pl.col("taken").n_unique()).alias("actions"),
        )
    )
    names = ["state", "steps", "groups", "states_before", "actions_before", "actions", "score_std"]
    return largest.join(reached, on="key", maintain_order="left").select(names)


def steps_to_measure(
    snapshot: Snapshot, definitions: Sequence[Anchors], *, where: str | None = None, groups: int | None = None
) -> pl.LazyFrame:
    """The steps that definitions are measured on, of some groups of a lake; the states are read in any case.

    `where` is a SQL predicate over `episodes`; `groups` takes at most so many groups, those with the smallest ids,
    which are hashes and so a fair sample. UsageError for a bad predicate, DataRefusedError if no episode is selected.
    """
    of_steps, of_episodes = TABLES["steps"].names, TABLES["episodes"].names
    present = [*of_steps, *of_episodes]
    wanted = columns_of(definitions, present)
    own = [name for name in wanted if name in of_episodes and name not in of_steps]
    chosen = ["episode_id", "group_id", "status", "env_return AS episode_score", *own]
    episodes = select_where(snapshot, list(dict.fromkeys(chosen)), where)
    if groups is not None:
        kept = episodes["group_id"].unique().sort().head(groups)
        episodes = episodes.filter(pl.col("group_id").is_in(kept.implode()))
    others = (name for name in (*STATE_COLUMNS, *wanted, "is_active", "state_is_error", *ACTIONS) if name in of_steps)
    read = [name for name in dict.fromkeys(others) if name not in KEYS]
    steps = snapshot.scan("steps").select("episode_id", "step_index", *read)
    return steps.join(episodes.lazy(), on="episode_id", how="inner")
