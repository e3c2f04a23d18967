"""Ranges: whole groups that are read, computed and written together, in bounded memory.

Groups are put where their data files are (the files of one commit, or the stretch of a compacted file), so that a range
reads few files and each file is read by few ranges. A group is never split, nor is a batch that is normalised over: a
range is as long as its budget, or as its one long group or batch. What a step takes is known from measurement, texts
aside, whose length is looked up in a sample of the lake.

The steps of a range are put in canonical order, with what belongs to their episodes, without a join or a sort: files
are sorted by episode and step, so the rows of an episode come in runs. A run is looked up once, and if runs are in
order, as they are within a file, no row is moved at all.

Axes: `_N` rows, `_R` runs of rows of one episode, `_E` episodes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from lake.errors import UsageError
from lake.read.parquet import collected, scan_pruned
from lake.read.snapshot import Snapshot
from lake.read.visibility import DataFile
from lake.tables import TABLES
from pipelines.credit.health.groups import decisions
from pipelines.credit.inputs.batch import Ints, Segments

MEMORY_GB = 2.0
"""Default budget."""
_BYTES_PER_STEP = 400
"""Peak of a range in bytes per step, without texts: inputs, intermediate arrays, rows, and the encoded file."""
_COPIES_OF_TEXT = 3
"""A text is held as it was read, in canonical order, and normalised."""
_SAMPLE = 2_000


def bytes_per_step(snapshot: Snapshot, columns: Sequence[str]) -> float:
    """What a step takes at the peak of its range, holding some columns of `steps`; hashed texts are not held."""
    texts = [name for name in columns if TABLES["steps"].polars()[name] == pl.String]
    sample = collected(snapshot.scan("steps").select(texts or "episode_id").head(_SAMPLE))
    wide = sum(int(sample[name].str.len_bytes().sum()) for name in texts) / max(1, sample.height)
    return _BYTES_PER_STEP + _COPIES_OF_TEXT * wide


def budget_rows(step_bytes: float, memory_gb: float, workers: int) -> int:
    """Steps of a range, so that `workers` ranges at once stay within a budget in GB (10^9 bytes).

    What the process takes anyway is not counted. UsageError for a budget of nothing.
    """
    if not memory_gb > 0:
        msg = f"a memory budget of {memory_gb} GB holds nothing; the default is {MEMORY_GB}"
        raise UsageError(msg)
    return max(1, int(memory_gb * 1e9 / workers / step_bytes))


def beyond_budget(steps: int, step_bytes: float, memory_gb: float, workers: int, *, what: str) -> str:
    """What to say, before it runs, of a part (a group, a batch) that exceeds the budget and cannot be split."""
    return (
        f"the largest {what} has {steps:,} steps and is computed whole: about {steps * step_bytes / 1e9:.2g} GB, "
        f"more than the {memory_gb / workers:.2g} GB that --memory leaves each worker. If the machine has less, give "
        f"fewer --workers, or take a smaller {what}"
    )


_OF_ITS_WRITE = ("episodes", "steps")
"""Tables whose rows of an episode bear the write_id that brought it."""
_FEWEST_ROWS = 200_000
"""Steps below which a range is not worth a file of its own."""


@dataclass(frozen=True, slots=True)
class Range:
    """Whole groups, and the files that hold them."""

    episodes: pl.DataFrame
    """Rows of `select_episodes`, sorted by (group_id, episode_id)."""
    files: dict[str, tuple[DataFile, ...]]
    """Table -> data files that can hold rows of these episodes."""


def rows_per_range(steps: int, budget_rows: int, workers: int) -> int:
    """Steps of a range: two ranges a worker where there is enough, so that one is written while another is computed."""
    return max(1, min(budget_rows, max(_FEWEST_ROWS, -(-steps // (2 * workers)))))


def plan_ranges(
    snapshot: Snapshot,
    episodes: pl.DataFrame,
    rows: int | None,
    judgements: Sequence[str] = (),
    units: pl.DataFrame | None = None,
) -> list[Range]:
    """Cut a job's groups into ranges.

    Args:
        snapshot: where the files are.
        episodes: rows of `select_episodes` to compute, sorted by (group_id, episode_id).
        rows: steps of a range; None makes one range of everything.
        judgements: tables whose rows of these episodes are read beside `episodes` and `steps`.
        units: group_id and unit, of groups that have to be computed together; None where each stands alone.
    """
    files = {name: _Files(snapshot.files(name), by_write=True) for name in _OF_ITS_WRITE}
    files |= {name: _Files(snapshot.files(name), by_write=False) for name in judgements}
    if rows is None:
        return [Range(episodes, {name: found.holding(episodes) for name, found in files.items()})]
    homes = episodes.with_columns(home=files["steps"].homes(episodes))
    homes = homes.with_columns(unit="group_id") if units is None else homes.join(units, on="group_id")
    together = homes.group_by("unit").agg(
        pl.col("num_steps").sum(), pl.col("home", "run_id", "collected_group_id").min()
    )
    numbered = together.sort("home", "run_id", "collected_group_id", "unit").select(
        "unit", number=(pl.col("num_steps").cum_sum() - pl.col("num_steps")) // rows
    )
    of_groups = homes.select("group_id", "unit").unique().join(numbered, on="unit").drop("unit")
    of_episodes = episodes.join(of_groups, on="group_id", maintain_order="left")
    parts = of_episodes.partition_by("number", as_dict=True, include_key=False)
    return [
        Range(part, {name: found.holding(part) for name, found in files.items()})
        for _, part in sorted(parts.items(), key=lambda item: item[0])
    ]


def batch_units(snapshot: Snapshot, episodes: pl.DataFrame, batch_key: str) -> pl.DataFrame:
    """The parts of a job that can be computed apart: group_id and unit, one row per group; equal units go together.

    Two groups belong together if they have episodes of one batch, and so do those that a third one links: the parts of
    the graph whose nodes are batches and whose edges are groups with episodes of several.
    """
    if batch_key not in episodes.columns:
        keys = collected(snapshot.scan("episodes").select("episode_id", batch_key))
        episodes = episodes.select("group_id", "episode_id").join(keys, on="episode_id", how="left")
    # The first row of each batch is its number: equality is a group-by's, of whatever type the key is.
    rows = episodes.select("group_id", key=pl.col(batch_key)).with_row_index("row")
    number = pl.when(pl.col("key").is_not_null()).then(pl.col("row").min().over("key"))
    of_groups = rows.select("group_id", number.cast(pl.Int64).alias("batch")).unique()
    first = of_groups.group_by("group_id").agg(pl.col("batch").min().alias("first"))
    links = of_groups.join(first, on="group_id").filter(pl.col("batch") != pl.col("first")).select("first", "batch")
    heads = _heads(links.unique().rows())
    moved = pl.DataFrame(list(heads.items()), schema={"first": pl.Int64, "head": pl.Int64}, orient="row")
    units = first.join(moved, on="first", how="left").with_row_index("place")
    alone = -1 - pl.col("place").cast(pl.Int64)  # no episode of the group is in a batch
    return units.select("group_id", unit=pl.coalesce("head", "first", alone))


def _heads(links: list[tuple[int, int]]) -> dict[int, int]:
    """For each linked batch, the one that stands for its part."""
    above: dict[int, int] = {}

    def head(batch: int) -> int:
        while above.setdefault(batch, batch) != batch:
            above[batch] = above[above[batch]]
            batch = above[batch]
        return batch

    for one, other in links:
        above[head(one)] = head(other)
    return {batch: head(batch) for batch in list(above)}


def longest_unit(episodes: pl.DataFrame, units: pl.DataFrame | None) -> int:
    """Steps of the largest group, or of the most that have to be computed together (`units`)."""
    parts = episodes.with_columns(unit="group_id") if units is None else episodes.join(units, on="group_id")
    return int(parts.group_by("unit").agg(pl.col("num_steps").cast(pl.Int64).sum())["num_steps"].max() or 0)  # type: ignore[arg-type]


class _Files:
    """The data files of a table, found by whose rows they hold; `by_write`: each was written with its episodes."""

    def __init__(self, files: Sequence[DataFile], *, by_write: bool) -> None:
        ordered = sorted(files, key=_place)
        self._single = [file for file in ordered if by_write and file.write_id is not None]
        self._mixed = [file for file in ordered if not (by_write and file.write_id is not None)]
        homes = pl.DataFrame(
            {"write_id": [file.write_id for file in self._single], "home": range(len(self._single))},
            schema={"write_id": pl.Int64, "home": pl.Int64},
        )
        self._homes = homes.unique("write_id", keep="first")

    def homes(self, episodes: pl.DataFrame) -> pl.Series:
        """Number of the file of each episode's commit; those of compacted files come last."""
        found = episodes.select("write_id").join(self._homes, on="write_id", how="left", maintain_order="left")
        return found["home"].fill_null(len(self._single))

    def holding(self, episodes: pl.DataFrame) -> tuple[DataFile, ...]:
        """Files that can hold rows of some episodes."""
        write_ids = set(episodes["write_id"].unique().to_list())
        single = [file for file in self._single if file.write_id in write_ids]
        known = pl.Series([file.write_id for file in single], dtype=pl.Int64)
        elsewhere = episodes.filter(~pl.col("write_id").is_in(known.implode()))
        if elsewhere.is_empty() or not self._mixed:
            return tuple(single)
        ends = elsewhere.group_by("run_id").agg(
            pl.col("collected_group_id").min().alias("low"), pl.col("collected_group_id").max().alias("high")
        )
        stretches = ends.rows()
        return (*single, *(file for file in self._mixed if any(_overlaps(file, *ends) for ends in stretches)))


def _place(file: DataFile) -> tuple[str, int, str]:
    run, _ = file.ranges.get("run_id", (None, None))
    group, _ = file.ranges.get("group_id", (None, None))
    return (run or "", group or 0, file.path)


def _overlaps(file: DataFile, run: str, low: int, high: int) -> bool:
    """Whether a file's ranges allow rows of groups from `low` to `high` of a run; what is not known is allowed."""
    first_run, last_run = file.ranges.get("run_id", (None, None))
    first, last = file.ranges.get("group_id", (None, None))
    return (
        (first_run is None or first_run <= run)
        and (last_run is None or run <= last_run)
        and (first is None or first <= high)
        and (last is None or low <= last)
    )


def read_rows(
    name: str,
    files: Sequence[DataFile],
    options: Mapping[str, Any],
    columns: Sequence[str | pl.Expr],
    episodes: pl.DataFrame,
    keep: pl.Expr | None = None,
) -> pl.DataFrame:
    """Rows of some episodes' groups, in the order of the files; rows of other episodes may be among them.

    What an expression in `columns` makes of a text is kept, not the text. `options` are Polars' storage options.
    """
    rows = scan_pruned(files, TABLES[name], options)
    if name != "steps" or sum(file.rows for file in files) > episodes["num_steps"].sum():
        groups = episodes["collected_group_id"].unique()
        rows = rows.filter(pl.col("group_id").is_between(groups.min(), groups.max()))
        rows = rows.filter(pl.col("group_id").is_in(groups.implode()))
    if keep is not None:
        rows = rows.filter(keep)
    if name in _OF_ITS_WRITE and len({file.place for file in files}) > 1:
        # Several lakes may hold an episode: what the first of them wrote is read (`lake.read.joined_snapshot`).
        written = ["episode_id", "write_id"]
        rows = rows.join(episodes.lazy().select(written), on=written, how="semi", maintain_order="left")
    return collected(rows.select(columns))


def arranged(steps: pl.DataFrame, episodes: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
    """The steps of the given episodes in canonical order; those of other episodes are left out.

    Steps (episode_id, step_index and others) come in the order of the files, episodes sorted by (group_id, episode_id).
    Each step gets `group_id` and `columns` of its episode.
    """
    ids_N = steps["episode_id"].to_numpy()
    starts_R = np.flatnonzero(np.append(True, ids_N[1:] != ids_N[:-1])) if len(ids_N) else np.zeros(0, np.int64)
    lengths_R = np.diff(starts_R, append=len(ids_N))
    rank_R = _ranks(ids_N[starts_R], episodes["episode_id"].to_numpy())
    if (rank_R < 0).any() or (np.diff(rank_R) <= 0).any():
        order_R = np.lexsort((steps["step_index"].to_numpy()[starts_R], rank_R))
        order_R = order_R[rank_R[order_R] >= 0]
        starts_R, lengths_R, rank_R = starts_R[order_R], lengths_R[order_R], rank_R[order_R]
        before_R = np.cumsum(lengths_R) - lengths_R
        steps = steps[np.arange(lengths_R.sum()) + np.repeat(starts_R - before_R, lengths_R)]
    rank_N = np.repeat(rank_R, lengths_R).astype(np.uint32)
    index_N = steps["step_index"].to_numpy()
    if ((index_N[1:] < index_N[:-1]) & (rank_N[1:] == rank_N[:-1])).any():  # along a z-order curve they may
        order_N = np.lexsort((index_N, rank_N))
        steps, rank_N = steps[order_N], rank_N[order_N]
    return steps.with_columns(episodes[name].gather(rank_N).alias(name) for name in ("group_id", *columns))


def episode_figures(steps: pl.DataFrame) -> pl.DataFrame:
    """How each episode's steps are numbered, where it starts, and what was seen and done in it.

    Takes `arranged` steps with state_hash, and `taken` and `is_active` if actions were read. Per episode that has
    steps: episode_id, count, first and last step_index, distinct (step indices), first_state (hash; NULL without a
    step 0), and with `taken` what `purity.decisions` says.
    """
    index_N, ids_N = steps["step_index"].to_numpy(), steps["episode_id"].to_numpy()
    opens_N = np.ones(len(ids_N), np.bool_)
    opens_N[1:] = ids_N[1:] != ids_N[:-1]
    episodes = Segments.opening_at(opens_N)
    new_N = opens_N.copy()
    new_N[1:] |= index_N[1:] != index_N[:-1]
    first_E = index_N[episodes.starts_K]
    hash_E = steps["state_hash"].gather(episodes.starts_K)
    figures = pl.DataFrame(
        {
            "episode_id": ids_N[episodes.starts_K],
            "count": episodes.lengths_K,
            "first": first_E,
            "last": index_N[episodes.last_K],
            "distinct": episodes.count(new_N),
            "first_state": hash_E.set(pl.Series(first_E != 0, dtype=pl.Boolean), None),
        }
    )
    if "taken" not in steps.columns:
        return figures
    active_N = steps["is_active"].fill_null(value=True)
    active = steps if active_N.all() else steps.filter(active_N)
    found = decisions(active)
    if active is steps:
        return figures.with_columns(found["decisions"])
    return figures.join(found, on="episode_id", how="left", maintain_order="left")


def _ranks(ids_R: Ints, ids_E: Ints) -> Ints:
    """Position of each id among the episodes; -1 for others."""
    sorter_E = np.argsort(ids_E)
    found_R = np.minimum(np.searchsorted(ids_E, ids_R, sorter=sorter_E), len(ids_E) - 1)
    rank_R: Ints = sorter_E[found_R]
    rank_R[ids_E[rank_R] != ids_R] = -1
    return rank_R
