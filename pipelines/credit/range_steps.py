"""The steps of a range in canonical order, with what belongs to their episodes, read without a join or a sort.

Files are sorted by episode and step, so the rows of an episode come in runs. A run is looked up once, and if runs are
in order, as they are within a file, no row is moved at all.

Axes: `_N` rows, `_R` runs of rows of one episode, `_E` episodes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from lake.reading import collected, scan_pruned
from lake.tables import TABLES
from lake.visibility import DataFile
from pipelines.credit.purity import decisions
from pipelines.credit.segments import Ints, Segments


def read_rows(
    name: str,
    files: Sequence[DataFile],
    options: Mapping[str, Any],
    columns: Sequence[str | pl.Expr],
    episodes: pl.DataFrame,
    keep: pl.Expr | None = None,
) -> pl.DataFrame:
    """What `scan_rows` finds, in memory."""
    return collected(scan_rows(name, files, options, columns, episodes, keep))


def scan_rows(
    name: str,
    files: Sequence[DataFile],
    options: Mapping[str, Any],
    columns: Sequence[str | pl.Expr],
    episodes: pl.DataFrame,
    keep: pl.Expr | None = None,
) -> pl.LazyFrame:
    """Rows of some episodes' groups, in the order of the files; rows of other episodes may be among them.

    Args:
        name: the table.
        files: where the rows can be.
        options: Polars' storage options.
        columns: what to read; what an expression makes of a text is kept, not the text.
        episodes: rows of `select_episodes`.
        keep: a further condition.
    """
    rows = scan_pruned(files, TABLES[name], options)
    if name != "steps" or sum(file.rows for file in files) > episodes["num_steps"].sum():
        groups = episodes["collected_group_id"].unique()
        rows = rows.filter(pl.col("group_id").is_between(groups.min(), groups.max()))
        rows = rows.filter(pl.col("group_id").is_in(groups.implode()))
    if keep is not None:
        rows = rows.filter(keep)
    return rows.select(columns)


def arranged(steps: pl.DataFrame, episodes: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
    """The steps of the given episodes in the episodes' order.

    Args:
        steps: episode_id, step_index and others, in the order of the files.
        episodes: episode_id, group_id and others, sorted by (group_id, episode_id).
        columns: columns of `episodes` that every step gets.

    Returns:
        The columns of `steps`, and `group_id` and `columns` of the step's episode, sorted by (group_id, episode_id,
        step_index); steps of other episodes are left out.
    """
    ids_N = steps["episode_id"].to_numpy()
    starts_R = np.flatnonzero(np.append(True, ids_N[1:] != ids_N[:-1])) if len(ids_N) else np.zeros(0, np.int64)
    lengths_R = np.diff(starts_R, append=len(ids_N))
    rank_R = _ranks(ids_N[starts_R], episodes["episode_id"].to_numpy())
    if (rank_R < 0).any() or (np.diff(rank_R) <= 0).any():
        order_R = np.lexsort((steps["step_index"].to_numpy()[starts_R], rank_R))
        order_R = order_R[rank_R[order_R] >= 0]
        starts_R, lengths_R, rank_R = starts_R[order_R], lengths_R[order_R], rank_R[order_R]
        steps = steps[_rows_of(starts_R, lengths_R)]
    rank_N = np.repeat(rank_R, lengths_R).astype(np.uint32)
    index_N = steps["step_index"].to_numpy()
    if ((index_N[1:] < index_N[:-1]) & (rank_N[1:] == rank_N[:-1])).any():  # along a z-order curve they may
        order_N = np.lexsort((index_N, rank_N))
        steps, rank_N = steps[order_N], rank_N[order_N]
    return steps.with_columns(episodes[name].gather(rank_N).alias(name) for name in ("group_id", *columns))


def episode_figures(steps: pl.DataFrame) -> pl.DataFrame:
    """How each episode's steps are numbered, where it starts, and what was seen and done in it.

    Args:
        steps: of `arranged`, with state_hash, and `taken` and `is_active` if actions were read.

    Returns:
        episode_id, count, first and last step_index, distinct (step indices), first_state (hash; NULL without a
        step 0), and with `taken` what `purity.decisions` says: one row per episode that has steps.
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


def _rows_of(starts_R: Ints, lengths_R: Ints) -> Ints:
    """Row numbers of runs, one run after the other."""
    before_R = np.cumsum(lengths_R) - lengths_R
    rows_N: Ints = np.arange(lengths_R.sum()) + np.repeat(starts_R - before_R, lengths_R)
    return rows_N
