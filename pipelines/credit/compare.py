"""Comparison of two credit jobs before training, and shuffled advantages as a control.

The comparison gives the agreement, the steps with opposite signs, and the groups that are live in one job only. DuckDB
aggregates the tables (`pipelines/sql/compare_*.sql`); large joins spill to a temporary folder.

Control: if training on shuffled advantages does as well as on the real ones, the credit taught nothing. The shuffle is
a separate credit job, because trainers read advantages from the table. Steps of dead groups keep their advantages, so a
trainer that drops dead groups sees the same number of steps.
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
from lake.read.episode_text import format_tool_calls, make_printable
from lake.read.parquet import collect_rows
from lake.read.query import QueryLimits
from lake.read.snapshot import Snapshot
from pipelines.credit.estimators.protocol import STATE, Flag

LEVELS = ("advantage", "a_episode", "a_step")
"""Compared columns of `advantages`."""
ZERO = 1e-9
"""Advantages up to this size have no sign: they are rounding errors of a score equal to its mean."""
_EXCERPT = 120


@dataclass(frozen=True, slots=True)
class CreditComparison:
    """Agreement and differences of two credit jobs; `_1` is the first, `_2` the second."""

    first: Credit
    second: Credit
    levels: pl.DataFrame
    """One row per level of LEVELS: level, and the columns of `pipelines/sql/compare_level.sql`."""
    groups: pl.DataFrame
    """One row per collected group, first those live in one job only; see `pipelines/sql/compare_groups.sql`."""
    examples: pl.DataFrame
    """run_id, task_id, rollout_index, episode_id, step_index, advantage_1, advantage_2, change, group_id, action (an
    excerpt): the steps whose advantage changed most."""

    @property
    def signal(self) -> pl.DataFrame:
        """Count the groups by their states: state_1, state_2, change, groups."""
        keys = ["state_1", "state_2", "change"]
        return self.groups.group_by(keys).agg(groups=pl.len().cast(pl.Int64)).sort(keys)


def compare(
    snapshot: Snapshot, first: str, second: str, *, examples: int = 10, memory: str | None = None
) -> CreditComparison:
    """Compare the advantages of two credit jobs, step by step and group by group.

    `first` and `second` are an estimator's name, or the id of a credit series or job, or a prefix of the id. A job
    means its series at the end of the job. `memory` limits DuckDB, for example `2GB`; None means 80 % of the memory.

    Raises:
        UsageError: an unknown estimator, series or job.
        DataRefusedError: the jobs have no group in common.
    """
    sides = find_credit(snapshot, first, option="compare"), find_credit(snapshot, second, option="compare")
    sources = {"one": sides[0].rows, "two": sides[1].rows}
    with snapshot.session(QueryLimits(memory=memory)) as session:

        def ask(name: str, params: dict[str, Any], **sources_of: str) -> pl.DataFrame:
            return session.query(read_compare_sql(name, **sources, **sources_of), params)

        levels = pl.concat(
            ask("level", {"zero": ZERO}, level=level).insert_column(0, pl.Series("level", [level])) for level in LEVELS
        )
        groups = ask("groups", {"zero": ZERO}, state=STATE)
        if groups.filter(~pl.col("change").is_in(["only_1", "only_2"])).is_empty():
            counts = levels.row(0, named=True)
            msg = (
                f"{sides[0].title} and {sides[1].title} have no group in common ({counts['covered_1']} and "
                f"{counts['covered_2']} steps); compare jobs over the same episodes"
            )
            raise DataRefusedError(msg)
        changes = ask("examples", {"examples": examples})
    actions = [
        " ".join(make_printable(" ".join([action, *format_tool_calls(calls)])).split())
        for action, calls in changes.select("action", "tool_calls").iter_rows()
    ]
    actions = [line if len(line) <= _EXCERPT else f"{line[: _EXCERPT - 3]}..." for line in actions]
    steps = changes.drop("tool_calls").with_columns(pl.Series("action", actions, dtype=pl.String))
    return CreditComparison(*sides, levels, groups, steps)


def read_compare_sql(name: str, **fragments: str) -> str:
    """Read the query level, groups or examples, with SQL fragments filled in, which must not come from a user."""
    text = (files("pipelines") / "sql" / f"compare_{name}.sql").read_text(encoding="utf-8")
    return text.format(**fragments)


_VALUES = ["return_to_go", "a_episode", "a_step", "advantage"]
_STAMPS = ["job_id", "series_id", "write_id"]


def shuffle_advantages(lake: Lake, job_id: int, seed: int) -> tuple[int, int]:
    """Write a credit job whose live rows are a seeded permutation of another job's; return its job_id and series_id."""
    snapshot = lake.snapshot()
    source = find_credit(snapshot, ids.to_text(job_id))
    rows = collect_rows(snapshot.scan("advantages").filter(pl.col("job_id") == job_id).drop(_STAMPS))
    rows = rows.sort("group_id", "episode_id", "step_index")
    is_live_N = (~pl.Series(rows["flags"].str.split(",").list.contains(Flag.DEAD_GROUP.value))).to_numpy()
    live = np.flatnonzero(is_live_N)
    order_N = np.arange(rows.height)
    order_N[live] = np.random.default_rng(seed).permutation(live)
    permutation = rows.with_columns(rows.select([*_VALUES, "defined"])[order_N])
    parameters = {"estimator": "shuffled", "of": ids.to_text(job_id), "seed": seed}
    with lake.job(
        kind="credit",
        parameters=parameters,
        # All shuffles of a series share one series, so the rounds of a loop do too.
        series={"estimator": "shuffled", "of": ids.to_text(source.series_id)},
        snapshot=snapshot,
    ) as job:
        job.write("advantages", permutation)
        job.counts |= {"rows_in": rows.height, "rows_out": rows.height}
    return job.job_id, job.series_id
