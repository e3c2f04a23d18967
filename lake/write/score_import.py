"""Late knowledge: rewards, labels and step rewards that arrive after their rollouts, from a file or a frame.

A row names its episode by `episode_id` (an integer, or the 13 characters) or by its natural key: `task_id`, and as far
as they tell episodes apart `run_id`, `rollout_index`, `attempt`, `agent_id`, `collection_round`. `step_index` is the
step, NULL or absent for the whole episode. `value` is the score, NULL if there is none; a truth value is 1 or 0.
`scorer` is who says so, unless one name is given for all; `reason` and `error` are kept.

A row whose episode the lake does not hold, or which fits several, is a reject `unmatched`; one that says nothing is
`invalid`. The same file again adds nothing; a score that has changed since takes the place of the former one.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from lake import ids
from lake.errors import FormatError, QueryError, UsageError
from lake.lake import Lake
from lake.records import Reject
from lake.write.frames import as_polars
from lake.write.rows import SCORE_COLUMNS
from lake.write.scores import IMPORTED, add_scores

_KEY = ("run_id", "task_id", "rollout_index", "attempt", "agent_id", "collection_round")
_VALUES = ("value", "score", "reward")
_KNOWN = frozenset((*_KEY, *_VALUES, "episode_id", "step_index", "scorer", "reason", "error"))
_READERS = {
    ".csv": "read_csv",
    ".tsv": "read_csv",
    ".json": "read_json",
    ".jsonl": "read_json",
    ".ndjson": "read_json",
    ".parquet": "read_parquet",
}
EXAMPLES = 5


class ScoresReport(msgspec.Struct):
    """What became of the rows."""

    source: str
    rows: int = 0
    new: int = 0
    present: int = 0
    unmatched: int = 0
    """Rows that name no episode of the lake, or several, or a step that it does not have."""
    invalid: int = 0
    """Rows that say nothing, or say something of the same episode or step twice."""
    scorers: list[str] = []
    examples: list[str] = []
    """The first of those that were not taken, in words."""


def import_file(lake: Lake, path: Path, *, name: str | None = None) -> ScoresReport:
    """Take the scores of a CSV, JSON, JSONL or Parquet file; see `Lake.add_scores`."""
    import duckdb

    suffix = next((suffix for suffix in reversed(path.suffixes) if suffix in _READERS), None)
    if suffix is None:
        raise FormatError(f"{path} is of no form that scores are read from; valid: {', '.join(_READERS)}")
    if not path.is_file():
        raise FormatError(f"{path}: no such file; give the path of a readable file")
    try:
        with duckdb.connect() as connection:
            found = connection.sql(f"FROM {_READERS[suffix]}($path)", params={"path": str(path)})
            rows = as_polars(found.to_arrow_table())
    except duckdb.Error as error:
        raise QueryError(f"{path}: {error}") from error
    return _add(lake, rows, name, path.name)


def add_frame(lake: Lake, frame: Any, *, name: str | None = None) -> ScoresReport:
    """Take the scores of a frame; see `Lake.add_scores`."""
    return _add(lake, as_polars(frame), name, "frame")


def _add(lake: Lake, given: pl.DataFrame, name: str | None, source: str) -> ScoresReport:
    rows = _typed(given, name, source)
    report = ScoresReport(source, rows=rows.height)
    matched = _matched(lake, rows, [column for column in _KEY if column in given.columns])
    said = pl.col("value").is_not_null() | pl.col("reason").is_not_null() | pl.col("error").is_not_null()
    problem = (
        pl.when(pl.col("episodes") == 0)
        .then(pl.lit("no episode of the lake has this key"))
        .when(pl.col("episodes") > 1)
        .then(pl.format("{} episodes of the lake have this key; add columns that tell them apart", "episodes"))
        .when(pl.col("step_index").is_not_null() & ~pl.col("step_index").is_between(0, pl.col("num_steps") - 1))
        .then(pl.format("its episode has {} steps, counted from 0", "num_steps"))
    )
    unmatched = problem.is_not_null()
    twice = ~unmatched & (pl.struct("episode_id", "step_index", "scorer").is_duplicated())
    checked = matched.with_columns(
        problem=problem,
        unmatched=unmatched,
        invalid=pl.when(twice)
        .then(pl.lit("the same episode or step has several rows of this scorer"))
        .when(~unmatched & (~said | pl.col("scorer").is_null()))
        .then(pl.lit("it has no value, no reason and no error, or no scorer")),
    )
    bad = checked.filter(pl.col("unmatched") | pl.col("invalid").is_not_null())
    good = checked.join(bad, on="row", how="anti")
    report.unmatched = int(bad["unmatched"].sum())
    report.invalid = bad.height - report.unmatched
    report.scorers = sorted(good["scorer"].unique())
    if bad.height:
        _reject(lake, bad, given, report)
    metrics = pl.lit(None, pl.String).alias("metrics")
    added = add_scores(lake, good.with_columns(metrics).select(*SCORE_COLUMNS), version=IMPORTED, source=source)
    report.new, report.present = added.new, added.present
    return report


def _typed(given: pl.DataFrame, name: str | None, source: str) -> pl.DataFrame:
    """The rows with the columns that are known, in their types, and their number."""
    value = next((column for column in _VALUES if column in given.columns), None)
    if value is None:
        raise UsageError(f"{source} has no column of values ({', '.join(given.columns)}); valid: {', '.join(_VALUES)}")
    if "episode_id" not in given.columns and "task_id" not in given.columns:
        raise UsageError(
            f"{source} names no episodes ({', '.join(given.columns)}); valid: a column `episode_id`, or `task_id` and "
            f"what else tells them apart ({', '.join(_KEY)})"
        )
    if name is None and "scorer" not in given.columns:
        raise UsageError("who gave these scores? give --name NAME, or a column `scorer`")
    if name is not None and (not name.strip() or "@" in name):
        raise UsageError(f"{name!r} is no name of a scorer; valid: a name that is not blank and has no @")
    types = {"value": pl.Float64, "step_index": pl.Int32, "rollout_index": pl.Int32, "attempt": pl.Int32}
    types |= {"collection_round": pl.Int32, "episode_id": pl.Int64}
    typed = given.select(column for column in given.columns if column in _KNOWN).with_columns(
        pl.col(value).alias("value")
    )
    if "episode_id" in typed.columns:
        typed = typed.with_columns(pl.Series("episode_id", list(map(_id, typed["episode_id"])), dtype=pl.Int64))
    columns: list[pl.Expr | pl.Series] = []
    for column in ("episode_id", *_KEY, "step_index", "value", "scorer", "reason", "error"):
        dtype = types.get(column, pl.String)
        if column not in typed.columns:
            columns.append(pl.lit(None, dtype).alias(column))
            continue
        try:
            columns.append(typed[column].cast(dtype).alias(column))
        except pl.exceptions.PolarsError as error:
            what = f"{source}: the column `{column}` is not of type {dtype}: {error}"
            raise UsageError(what.splitlines()[0]) from error
    rows = typed.select(columns).with_row_index("row")
    rows = rows.with_columns(value=pl.when(pl.col("value").is_finite()).then("value"))
    return rows if name is None else rows.with_columns(scorer=pl.lit(name))


def _id(value: object) -> int | None:
    """An id as it may stand in a file; None if it is none."""
    try:
        return ids.from_text(value) if isinstance(value, str) else ids.as_ids([value])[0]  # type: ignore[list-item]
    except (TypeError, ValueError, IndexError):
        return None


def _matched(lake: Lake, rows: pl.DataFrame, keys: Sequence[str]) -> pl.DataFrame:
    """Each row with the episode that it names: its id, its number of steps, and how many there are."""
    known = lake.snapshot().scan("episodes").select("episode_id", "num_steps", *_KEY).collect()
    by_id = rows.filter(pl.col("episode_id").is_not_null()).join(known.drop(_KEY), on="episode_id", how="left")
    by_key = rows.filter(pl.col("episode_id").is_null()).drop("episode_id")
    if keys:
        by_key = by_key.join(known.drop(set(_KEY) - set(keys)), on=keys, how="left", nulls_equal=True)
    joined = pl.concat([by_id, by_key], how="diagonal_relaxed")
    counted = joined.group_by("row").agg(episodes=pl.col("num_steps").count())
    return joined.unique("row", keep="first").join(counted, on="row").sort("row")


def _reject(lake: Lake, bad: pl.DataFrame, given: pl.DataFrame, report: ScoresReport) -> None:
    raws = given.select(pl.struct(pl.all()).struct.json_encode()).to_series() if given.width else None
    rejects = []
    for row in bad.iter_rows(named=True):
        message = row["problem"] or row["invalid"]
        raw = "" if raws is None else raws[row["row"]]
        reason = "unmatched" if row["unmatched"] else "invalid"
        rejects.append(Reject(position=row["row"], reason=reason, message=message, raw=raw))
        if len(report.examples) < EXAMPLES:
            report.examples.append(f"row {row['row']} ({raw}): {message}")
    with lake.job(kind="score", parameters={"source": report.source, "rejected": len(rejects)}) as job:
        job.reject(rejects, report.source, "scores")
        job.counts |= {"rows_in": report.rows, "rows_dropped": len(rejects)}
