"""Late knowledge: rewards, labels and step rewards that arrive after their rollouts, from a file or a frame.

A row names its episode by `episode_id` (an integer, or the 13 characters) or by its natural key: `task_id`, and as far
as they tell episodes apart `run_id`, `rollout_index`, `attempt`, `agent_id`, `collection_round`, `seed`. `step_index`
is the step, NULL or absent for the whole episode. `value` (or `score`, or `reward`, if there is no such column) is the
score, NULL if there is none; a truth value is 1 or 0.
`scorer` is who says so, unless one name is given for all; `reason` and `error` are kept.

A row whose episode the lake does not hold, or which fits several, is a reject `unmatched`; one that has a cell of the
wrong type, says nothing, or says something else than another row of the same, is `invalid`. The same file again adds
nothing; a score that has changed since takes the place of the former one.
"""

import sys
from collections.abc import Iterator
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import polars as pl

from lake.errors import FormatError, UsageError
from lake.records import Reject, printable
from lake.write import score_files
from lake.write.frames import as_polars
from lake.write.rows import SCORE_COLUMNS
from lake.write.score_files import Given, converted, of_frame, read
from lake.write.scores import IMPORTED, add_scores
from lake.write.sources import located

if TYPE_CHECKING:
    from lake.lake import Lake

_KEY = ("run_id", "task_id", "rollout_index", "attempt", "agent_id", "collection_round", "seed")
_VALUES = ("value", "score", "reward")
_SAME = ("episode_id", "step_index", "scorer")
_SAID = ("value", "reason", "error")
_TEXTS = ("run_id", "task_id", "agent_id", "scorer", "reason", "error")
_WHOLE = ("rollout_index", "attempt", "collection_round", "seed", "step_index")
EXAMPLES = 5
_REJECTS_AT_ONCE = 100_000


class ScoresReport(msgspec.Struct):
    """What became of the rows: each is new, present, unmatched or invalid."""

    source: str
    rows: int = 0
    new: int = 0
    present: int = 0
    unmatched: int = 0
    """Rows that name no episode of the lake, or several, or a step that it does not have."""
    invalid: int = 0
    """Rows that cannot be read, say nothing, or contradict one another."""
    scorers: list[str] = []
    examples: list[str] = []
    """The first of those that were not taken, in words."""


def import_file(lake: "Lake", path: str | Path, *, name: str | None = None) -> ScoresReport:
    """Take the scores of a CSV, JSON, JSONL or Parquet file, packed or not; see `Lake.add_scores`.

    Raises:
        FormatError: missing, empty, damaged, or no such file.
        UsageError: several files; columns that name no episode or no value.
    """
    with located([str(path)], getattr(sys.stdin, "buffer", BytesIO())) as (argument,):
        if argument.label:
            raise UsageError(f"{path} stands for several files; give one file of scores")
        file = argument.files[0]
        try:
            given = read(file.path, file.name)
        except FormatError as error:
            raise FormatError(str(error).replace(str(file.path), argument.name)) from error
    return _add(lake, given, name)


def add_frame(lake: "Lake", frame: Any, *, name: str | None = None) -> ScoresReport:
    """Take the scores of a frame; see `Lake.add_scores`."""
    return _add(lake, of_frame(as_polars(frame), "frame"), name)


def _add(lake: "Lake", given: Given, name: str | None) -> ScoresReport:
    report = ScoresReport(given.source, rows=len(given.positions) + len(given.unread))
    bad = scores = pl.DataFrame(schema={"row": pl.UInt32, "kind": pl.String, "problem": pl.String})
    if given.positions or not given.unread:
        rows = _matched(lake, _typed(given, name)).with_columns(_PROBLEM, _KIND)
        rows = _without_contradictions(rows)
        good = rows.filter(pl.col("problem").is_null())
        scores = good.unique(_SAME, keep="first", maintain_order=True)
        bad = rows.filter(pl.col("problem").is_not_null())
        report.scorers = sorted(good["scorer"].unique())
        report.present = good.height - scores.height
    report.unmatched = bad.filter(pl.col("kind") == "unmatched").height
    report.invalid = bad.height - report.unmatched + len(given.unread)
    if rejected := bad.height + len(given.unread):
        first = sorted(chain(given.unread[:EXAMPLES], *_rejects(bad[:EXAMPLES], given)), key=lambda one: one.position)
        report.examples = [f"row {one.position} ({one.raw}): {one.message}" for one in first[:EXAMPLES]]
        with lake.job(kind="score", parameters={"source": given.source, "rejected": rejected}) as job:
            for rejects in chain([given.unread] if given.unread else [], _rejects(bad, given)):
                job.reject(rejects, given.source, "scores")
            job.counts |= {"rows_in": report.rows, "rows_dropped": rejected}
    if not scores.is_empty():
        whole = scores.with_columns(metrics=pl.lit(None, pl.String)).select(*SCORE_COLUMNS)
        added = add_scores(lake, whole.cast(dict(SCORE_COLUMNS.items())), version=IMPORTED, source=given.source)
        report.new += added.new
        report.present += added.present
    return report


_IS_UNMATCHED = (pl.col("episodes") != 1) | ~pl.col("step_index").is_between(0, pl.col("num_steps") - 1)
_PROBLEM = (
    pl.when(pl.col("wrong_cell").is_not_null())
    .then("wrong_cell")
    .when(pl.col("episodes") == 0)
    .then(pl.lit("no episode of the lake has this key"))
    .when(pl.col("episodes") > 1)
    .then(pl.format("{} episodes of the lake have this key; add columns that tell them apart", "episodes"))
    .when(_IS_UNMATCHED)
    .then(pl.format("its episode has {} steps, counted from 0", "num_steps"))
    .when(pl.col("scorer").fill_null("").str.strip_chars().eq("") | pl.col("scorer").str.contains("@"))
    .then(pl.lit("its scorer has no name, or one with @"))
    .when(pl.col("value").is_infinite())
    .then(pl.lit("its value is infinite"))
    .when(pl.all_horizontal(pl.col(_SAID).is_null()))
    .then(pl.lit("it has no value, no reason and no error"))
    .alias("problem")
)
_KIND = (
    pl.when(pl.col("wrong_cell").is_null() & _IS_UNMATCHED)
    .then(pl.lit("unmatched"))
    .otherwise(pl.lit("invalid"))
    .alias("kind")
)


def _without_contradictions(rows: pl.DataFrame) -> pl.DataFrame:
    """One problem more: rows that say different things of the same. Nobody knows which of them is meant."""
    said = rows.filter(pl.col("problem").is_null()).unique((*_SAME, *_SAID))
    twice = said.filter(pl.struct(_SAME).is_duplicated()).select(*_SAME, twice=True).unique()
    found = rows.join(twice, on=_SAME, how="left", nulls_equal=True, maintain_order="left")
    text = pl.lit("other rows of this scorer say something else of the same episode or step")
    is_one = pl.col("twice").is_not_null() & pl.col("problem").is_null()
    return found.with_columns(problem=pl.when(is_one).then(text).otherwise("problem"))


def _typed(given: Given, name: str | None) -> pl.DataFrame:
    """The columns that are known, in their types, and the number of each row. Raises UsageError: see `import_file`."""
    there, source = given.columns, given.source
    value = next((column for column in _VALUES if column in there), None)
    if value is None:
        raise UsageError(f"{source} has no column of values ({', '.join(there)}); valid: {', '.join(_VALUES)}")
    if "episode_id" not in there and "task_id" not in there:
        raise UsageError(
            f"{source} names no episodes ({', '.join(there)}); valid: a column `episode_id`, or `task_id` and what "
            f"else tells them apart ({', '.join(_KEY)})"
        )
    if name is None and "scorer" not in there:
        raise UsageError("who gave these scores? give --name NAME, or a column `scorer`")
    if name is not None and not (
        isinstance(name, str) and name.strip() and "@" not in name and printable(name) == name
    ):
        raise UsageError(f"{name!r} is no name of a scorer; valid: a text that is not blank and has no @")
    count = len(given.positions)
    nothing = [None] * count
    wrong_cells: dict[int, str] = {}

    def cells(column: str, convert: Any, valid: str, dtype: pl.DataType) -> pl.Series:
        if column not in there:
            return pl.Series(nothing, dtype=dtype)
        found, wrong = converted(given, column, convert, valid)
        wrong_cells.update(wrong | wrong_cells)
        return pl.Series(found, dtype=dtype)

    named = there.get("episode_id", nothing)
    columns = {
        "row": pl.Series(range(count), dtype=pl.UInt32),
        "value": cells(value, score_files.number, "a number, a truth value", pl.Float64()),
        **{column: cells(column, score_files.whole, "a whole number", pl.Int64()) for column in _WHOLE},
        **{column: cells(column, score_files.name, "a text", pl.String()) for column in _TEXTS},
        "has_id": pl.Series([cell is not None for cell in named], dtype=pl.Boolean),
        "episode_id": pl.Series(list(map(score_files.episode_id, named)), dtype=pl.Int64),
    }
    columns["wrong_cell"] = pl.Series(list(map(wrong_cells.get, range(count))), dtype=pl.String)
    rows = pl.DataFrame(columns)
    return rows if name is None else rows.with_columns(scorer=pl.lit(name))


def _matched(lake: "Lake", rows: pl.DataFrame) -> pl.DataFrame:
    """Each row with the episode that it names: its id, its number of steps, and how many there are.

    A row with an id that is none does not fall back on its natural key. A column that is empty tells nothing apart.
    """
    keys = [name for name in _KEY if rows[name].null_count() < rows.height]
    known = lake.snapshot().scan("episodes").select("episode_id", "num_steps", *_KEY).collect()
    known = known.cast({name: rows.schema[name] for name in _KEY})
    by_id = rows.filter("has_id").join(known.drop(_KEY), on="episode_id", how="left")
    by_key = rows.filter(~pl.col("has_id")).drop("episode_id")
    if "task_id" in keys:
        by_key = by_key.join(known.drop(set(_KEY) - set(keys)), on=keys, how="left", nulls_equal=True)
    joined = pl.concat([by_id, by_key], how="diagonal_relaxed")
    counted = joined.group_by("row").agg(episodes=pl.col("num_steps").count())
    return joined.unique("row", keep="first").join(counted, on="row").sort("row")


def _rejects(bad: pl.DataFrame, given: Given) -> Iterator[list[Reject]]:
    """The rejects of some rows, not all at once."""
    for part in bad.select("row", "kind", "problem").iter_slices(_REJECTS_AT_ONCE):
        rows = part["row"].to_list()
        texts = given.texts(rows)
        yield [
            Reject(position=given.positions[row], reason=kind, message=problem, raw=raw)
            for row, kind, problem, raw in zip(rows, part["kind"], part["problem"], texts, strict=True)
        ]
