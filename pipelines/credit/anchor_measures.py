"""What anchor definitions would give, measured on a lake's steps before any credit is computed. Nothing is written.

Axes: `_N` rows in canonical order.
"""

from collections.abc import Mapping, Sequence
from time import process_time

import numpy as np
import polars as pl

from lake.errors import DataRefusedError
from lake.judgements.predicates import select_where
from lake.reading import collected
from lake.snapshot import Snapshot
from lake.tables import TABLES
from pipelines.credit.anchors import (
    Anchors,
    CanonicalJson,
    Chain,
    ExactText,
    LastStates,
    NoErrors,
    Substitution,
    Substitutions,
    ToolResults,
)
from pipelines.credit.batch import StepBatch
from pipelines.credit.columns import KEYS, InputNeeds, select_inputs
from pipelines.credit.purity import choice
from pipelines.credit.segments import Bools

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
_ACTIONS = ("action", "tool_calls")


def measure_anchors(steps: pl.LazyFrame, definitions: Mapping[str, Anchors]) -> pl.DataFrame:
    """Figures of each definition over the same steps.

    Args:
        steps: one row per step: keys, the columns the definitions read, and where known `status`, `episode_score`,
            `is_active`, `action`, `tool_calls`, `state_is_error`.
        definitions: by the name they are shown under.

    Returns:
        One row per definition. Shares of the steps of episodes that take part (`steps` of them): `known` (have a key),
        `shared` (two or more episodes of the group visited the state), `singleton` (no other step has it). `states`:
        distinct ones; over those that are shared: `episodes` (mean of the episodes that visited them), `one_action`
        (share where all took the same action), `ways_in` (mean of the distinct actions that led there), `errors` (share
        of their steps whose state is an error text). `seconds` of CPU. NULL where it cannot be known.
    """
    present = steps.collect_schema().names()
    read = dict.fromkeys(name for definition in definitions.values() for name in definition.columns(present))
    extras = [name for name in (*_ACTIONS, "state_is_error") if name in present]
    needs = InputNeeds(anchor_columns=tuple(dict.fromkeys((*read, *extras))))
    batch = StepBatch.of(collected(select_inputs(steps, needs)), needs)
    if batch is None:
        msg = "there are no active steps to measure anchors on; collect or ingest episodes first"
        raise DataRefusedError(msg)
    included_N = ~batch.episodes.spread(batch.broken_E & np.isnan(batch.score_E))
    facts = _facts(batch, included_N, extras)
    return pl.concat(_measured(name, definition, batch, included_N, facts) for name, definition in definitions.items())


def _facts(batch: StepBatch, included_N: Bools, extras: Sequence[str]) -> pl.DataFrame:
    """What is known of each row beside its key: its group and episode, what was done there and just before."""
    columns = [pl.col("episode_id"), pl.Series("group_id", batch.groups.ids_N()), pl.Series("included", included_N)]
    rows = batch.frame.with_columns(columns)
    actions = [name for name in _ACTIONS if name in extras]
    taken = choice(actions) if actions else pl.lit(None, pl.UInt64)
    is_error = pl.col("state_is_error").cast(pl.Boolean) if "state_is_error" in extras else pl.lit(None, pl.Boolean)
    rows = rows.select("group_id", "episode_id", "included", taken.alias("taken"), is_error.alias("is_error"))
    led_here = pl.when(pl.col("episode_id") == pl.col("episode_id").shift()).then(pl.col("taken").shift())
    return rows.with_columns(led_here.alias("led_here"), pl.lit(bool(actions)).alias("has_actions"))


def _measured(name: str, definition: Anchors, batch: StepBatch, included_N: Bools, facts: pl.DataFrame) -> pl.DataFrame:
    began = process_time()
    keys_N = definition.keys(batch, included_N)
    seconds = process_time() - began
    rows = facts.with_columns(keys_N.alias("key")).filter("included")
    states = (
        rows.lazy()
        .filter(pl.col("key").is_not_null())
        .group_by("group_id", "key")
        .agg(
            pl.len().alias("steps"),
            pl.col("episode_id").n_unique().alias("episodes"),
            pl.when(pl.col("has_actions").any()).then(pl.col("taken").n_unique()).alias("actions"),
            pl.when(pl.col("has_actions").any()).then(pl.col("led_here").n_unique()).alias("ways_in"),
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


def steps_to_measure(
    snapshot: Snapshot, definitions: Sequence[Anchors], *, where: str | None = None, groups: int | None = None
) -> pl.LazyFrame:
    """The steps that `measure_anchors` reads, of some groups of a lake.

    Args:
        snapshot: where to read.
        definitions: say which columns are needed.
        where: SQL predicate over `episodes`; None takes all.
        groups: at most so many groups: those with the smallest ids, which are hashes and so a fair sample. None: all.

    Raises:
        UsageError: a predicate that is none.
        DataRefusedError: no episode is selected.
    """
    of_steps, of_episodes = TABLES["steps"].names, TABLES["episodes"].names
    present = [*of_steps, *of_episodes]
    wanted = dict.fromkeys(name for definition in definitions for name in definition.columns(present))
    own = [name for name in wanted if name in of_episodes and name not in of_steps]
    chosen = ["episode_id", "group_id", "status", "env_return AS episode_score", *own]
    episodes = select_where(snapshot, list(dict.fromkeys(chosen)), where)
    if groups is not None:
        kept = episodes["group_id"].unique().sort().head(groups)
        episodes = episodes.filter(pl.col("group_id").is_in(kept.implode()))
    others = (name for name in (*wanted, "is_active", "state_is_error", *_ACTIONS) if name in of_steps)
    read = [name for name in dict.fromkeys(others) if name not in KEYS]
    steps = snapshot.scan("steps").select("episode_id", "step_index", *read)
    return steps.join(episodes.lazy(), on="episode_id", how="inner")
