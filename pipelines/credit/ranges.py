"""Ranges: whole groups that are read, computed and written together, in bounded memory.

Groups are put where their data files are (the files of one commit, or the stretch of a compacted file), so that a range
reads few files and each file is read by few ranges. A group is never split, nor is a batch that is normalised over: a
range is as long as its budget, or as its one long group or batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from lake.snapshot import Snapshot
from lake.visibility import DataFile

_FEWEST_ROWS = 200_000
"""Steps below which a range is not worth a file of its own."""


@dataclass(frozen=True, slots=True)
class Range:
    """Whole groups, and the files that hold them.

    Attributes:
        episodes: rows of `select_episodes`, sorted by (group_id, episode_id).
        files: table -> data files that can hold rows of these episodes.
    """

    episodes: pl.DataFrame
    files: dict[str, tuple[DataFile, ...]]


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
    files = {name: _Files(snapshot.files(name), by_write=True) for name in ("episodes", "steps")}
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


def longest_unit(episodes: pl.DataFrame, units: pl.DataFrame | None) -> int:
    """Steps of the largest group, or of the most that have to be computed together.

    Args:
        episodes: rows of `select_episodes`.
        units: as for `plan_ranges`.
    """
    parts = episodes.with_columns(unit="group_id") if units is None else episodes.join(units, on="group_id")
    return int(parts.group_by("unit").agg(pl.col("num_steps").cast(pl.Int64).sum())["num_steps"].max() or 0)  # type: ignore[arg-type]


class _Files:
    """The data files of a table, found by whose rows they hold.

    Args:
        files: of the table.
        by_write: its rows were written with their episodes, under one write_id.
    """

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
