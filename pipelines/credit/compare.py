"""Two credit jobs side by side, before a GPU is spent; and a control for learning claims.

Where they agree, which steps have opposite signs, which groups are live in one of them alone. Everything is aggregated
by DuckDB over the tables (`pipelines/sql/compare_*.sql`); joins that outgrow the memory spill to a temporary folder.

The control: if training on shuffled advantages does as well as on the real ones, the credit taught nothing. The shuffle
is a credit job of its own, because an advantage that no table holds cannot reach a gradient. Steps of dead groups keep
theirs: a trainer that leaves dead groups out must see the same number of steps either way.
"""

from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np
import polars as pl

from lake import ids
from lake.errors import DataRefusedError
from lake.judgements.credit import Credit, find_credit
from lake.lake import Lake
from lake.read.parquet import collected
from lake.read.query import Limits
from lake.read.show import printable, tool_calls
from lake.read.snapshot import Snapshot
from pipelines.credit.flags import STATE, Flag

LEVELS = ("advantage", "a_episode", "a_step")
"""Columns of `advantages` that are compared."""
ZERO = 1e-9
"""An advantage no larger than this has no sign: rounding leaves such remainders where a score equals its mean."""
_EXCERPT = 120


@dataclass(frozen=True, slots=True)
class Comparison:
    """What two credit jobs have in common and what not; `_1` is the first of them, `_2` the second."""

    one: Credit
    two: Credit
    levels: pl.DataFrame
    """A row for each of LEVELS: level, and the columns of `pipelines/sql/compare_level.sql`."""
    groups: pl.DataFrame
    """A row per collected group, those that are live in one alone first; see `pipelines/sql/compare_groups.sql`."""
    examples: pl.DataFrame
    """run_id, task_id, rollout_index, episode_id, step_index, advantage_1, advantage_2, change, group_id, action (an
    excerpt): the steps whose advantage changed most."""

    @property
    def signal(self) -> pl.DataFrame:
        """How many groups are what in each: state_1, state_2, change, groups."""
        keys = ["state_1", "state_2", "change"]
        return self.groups.group_by(keys).agg(groups=pl.len().cast(pl.Int64)).sort(keys)


def compare(snapshot: Snapshot, one: str, two: str, *, examples: int = 10, memory: str | None = None) -> Comparison:
    """Compare the advantages of two credit jobs, step by step and group by group.

    Each is an estimator's name, or the id of a credit series or job, or its beginning. A job means its series as it was
    when the job ended. `memory` limits DuckDB, for example `2GB`; None leaves it its own (80 % of the machine's).
    UsageError if there is no such estimator, series or job; DataRefusedError if no step is covered by both.
    """
    chosen = find_credit(snapshot, one, place="compare"), find_credit(snapshot, two, place="compare")
    sources = {"one": chosen[0].rows, "two": chosen[1].rows}
    with snapshot.session(Limits(memory=memory)) as session:

        def ask(name: str, params: dict[str, Any], **parts: str) -> pl.DataFrame:
            return session.query(compare_sql(name, **sources, **parts), params)

        levels = pl.concat(
            ask("level", {"zero": ZERO}, level=level).insert_column(0, pl.Series("level", [level])) for level in LEVELS
        )
        groups = ask("groups", {"zero": ZERO}, state=STATE)
        if groups.filter(~pl.col("change").is_in(["only_1", "only_2"])).is_empty():
            counts = levels.row(0, named=True)
            msg = (
                f"{chosen[0].title} and {chosen[1].title} have no group in common ({counts['covered_1']} and "
                f"{counts['covered_2']} steps); compare jobs over the same episodes"
            )
            raise DataRefusedError(msg)
        found = ask("examples", {"examples": examples})
    shown = [_excerpt(*row) for row in found.select("action", "tool_calls").rows()]
    steps = found.drop("tool_calls").with_columns(pl.Series("action", shown, dtype=pl.String))
    return Comparison(*chosen, levels, groups, steps)


def compare_sql(name: str, **parts: str) -> str:
    """The query level, groups or examples, with the parts that no parameter can be: never a user's text."""
    text = (files("pipelines") / "sql" / f"compare_{name}.sql").read_text(encoding="utf-8")
    return text.format(**parts)


def _excerpt(action: str, calls: str | None) -> str:
    line = " ".join(printable(" ".join([action, *tool_calls(calls)])).split())
    return line if len(line) <= _EXCERPT else f"{line[: _EXCERPT - 3]}..."


_VALUES = ["return_to_go", "a_episode", "a_step", "advantage"]
_STAMPS = ["job_id", "series_id", "write_id"]


def shuffle_advantages(lake: Lake, job_id: int, seed: int) -> tuple[int, int]:
    """Write a credit job (job_id, series_id) whose live rows are a permutation of another's, drawn by the seed."""
    snapshot = lake.snapshot()
    of = find_credit(snapshot, ids.to_text(job_id))
    rows = collected(snapshot.scan("advantages").filter(pl.col("job_id") == job_id).drop(_STAMPS))
    rows = rows.sort("group_id", "episode_id", "step_index")
    is_live_N = (~pl.Series(rows["flags"].str.split(",").list.contains(Flag.DEAD_GROUP.value))).to_numpy()
    live = np.flatnonzero(is_live_N)
    order_N = np.arange(rows.height)
    order_N[live] = np.random.default_rng(seed).permutation(live)
    shuffled = rows.with_columns(rows.select([*_VALUES, "defined"])[order_N])
    parameters = {"estimator": "shuffled", "of": ids.to_text(job_id), "seed": seed}
    with lake.job(
        kind="credit",
        parameters=parameters,
        # One series for all that are shuffled of one series: rounds of a loop stand beside one another, as theirs do.
        series={"estimator": "shuffled", "of": ids.to_text(of.series_id)},
        snapshot=snapshot,
    ) as job:
        job.write("advantages", shuffled)
        job.counts |= {"rows_in": rows.height, "rows_out": rows.height}
    return job.job_id, job.series_id
