"""Figures of each group over advantages in canonical order.

By segment reductions: a group-by would cost as much again as the advantages themselves.

Axes: `_N` rows, `_E` episodes, `_P` groups.
"""

import numpy as np
import polars as pl

from pipelines.credit.flags import Flag
from pipelines.credit.segments import Bools, Floats, Segments


def of_steps(rows: pl.DataFrame) -> pl.DataFrame:
    """Per group: its advantages and its anchors.

    An anchor of n member rows is counted as n times 1/n: no grouping by anchor is needed.

    Args:
        rows: advantages as an estimator returns them, sorted by (group_id, episode_id, step_index).

    Returns:
        group_id, is_dead, steps, defined_steps, advantage_mean, _std, _min, _max, anchors, singleton_steps,
        shared_steps, anchor_episodes_mean, sign_disagreements; NULL where there is nothing to take a figure of.
    """
    groups = _runs(rows, "group_id")
    advantage_N, a_step_N = _floats(rows["advantage"]), _floats(rows["a_step"])
    size_N, episodes_N = rows["anchor_size"].to_numpy(), rows["anchor_episodes"].to_numpy()
    member_N = ~np.isnan(a_step_N) & (size_N > 0) & ~_carry(rows["flags"], Flag.REVISIT)
    shared_N = episodes_N >= 2
    part_N = np.where(member_N, 1.0 / np.maximum(size_N, 1), 0.0)
    shared_part_N = np.where(shared_N, part_N, 0.0)
    shared_P = np.round(groups.sum(shared_part_N))
    met_P = np.round(groups.sum(shared_part_N * episodes_N))
    disagree_N = _floats(rows["a_episode"]) * a_step_N < 0
    return pl.DataFrame(
        {
            "group_id": rows["group_id"].gather(groups.starts_K),
            "is_dead": _carry(rows["flags"].gather(groups.starts_K), Flag.DEAD_GROUP),
            "steps": groups.lengths_K,
            "defined_steps": groups.count(~np.isnan(advantage_N)),
            **_spread_of(advantage_N, groups),
            "anchors": np.round(groups.sum(part_N)),
            "singleton_steps": groups.count(member_N & (size_N == 1)),
            "shared_steps": groups.count(shared_N),
            "anchor_episodes_mean": _known(met_P / np.maximum(shared_P, 1.0), shared_P > 0),
            "sign_disagreements": groups.count(disagree_N),
        }
    )


def of_episodes(rows: pl.DataFrame) -> pl.DataFrame:
    """Per episode: episode_id, and takes_part (it is scored, not excluded, and the estimator found out anything of it).

    Args:
        rows: as for `of_steps`.
    """
    episodes = _runs(rows, "episode_id")
    first = rows.select("episode_id", "flags")[episodes.starts_K]
    found_N = rows.select(pl.any_horizontal(pl.col("a_episode", "a_step", "advantage").is_not_null())).to_series()
    takes_part_E = episodes.any(found_N.to_numpy()) & ~_carry(first["flags"], Flag.EXCLUDED, Flag.UNSCORED)
    return first.select("episode_id", pl.Series("takes_part", takes_part_E))


def _carry(texts_N: pl.Series, *flags: Flag) -> Bools:
    """Whether each row has one of some flags; every distinct text is looked at once, and most often none has."""
    having = [text for text in texts_N.unique() if not set(flags).isdisjoint(text.split(","))]
    carry_N: Bools = texts_N.is_in(having).to_numpy() if having else np.zeros(len(texts_N), np.bool_)
    return carry_N


def _spread_of(values_N: Floats, groups: Segments) -> dict[str, pl.Series]:
    """Mean, sample deviation, smallest and largest of the known values of each group."""
    known_N = ~np.isnan(values_N)
    count_P = groups.count(known_N)
    mean_P = groups.sum(np.where(known_N, values_N, 0.0)) / np.maximum(count_P, 1)
    square_N = np.where(known_N, values_N - groups.spread(mean_P), 0.0) ** 2
    std_P = np.sqrt(groups.sum(square_N) / np.maximum(count_P - 1, 1))
    return {
        "advantage_mean": _known(mean_P, count_P > 0),
        "advantage_std": _known(std_P, count_P > 1),
        "advantage_min": _known(groups.min(np.where(known_N, values_N, np.inf)), count_P > 0),
        "advantage_max": _known(groups.max(np.where(known_N, values_N, -np.inf)), count_P > 0),
    }


def _known(values_P: Floats, known_P: Bools) -> pl.Series:
    return pl.Series(np.where(known_P, values_P, np.nan), nan_to_null=True)


def _floats(column: pl.Series) -> Floats:
    return column.fill_null(np.nan).to_numpy()


def _runs(rows: pl.DataFrame, name: str) -> Segments:
    values = rows[name]
    opens_N = values.ne_missing(values.shift()).to_numpy().copy()
    opens_N[:1] = True
    return Segments.opening_at(opens_N)
