"""What the values of a credit input must satisfy, checked with a few vectorised passes.

The reference code takes row order for time and lets NaN through: both go wrong in silence. Here every fault is an
error that names the episode and says what to do. NULL is not a fault: it means unknown.
"""

import polars as pl

from lake.errors import ContractError
from pipelines.credit.columns import KEYS, STATUSES

LARGEST = 1e100
"""Rewards and scores beyond this overflow when squared and summed; they are a fault, like NaN and infinity."""


def check_steps(frame: pl.DataFrame) -> None:
    """Check a frame that is sorted by `KEYS`.

    Raises:
        ContractError: a NULL key; an episode in two groups; step_index not 0, 1, 2, ... ; a status outside the closed
            set; a score or status that changes within an episode; a reward or score that is NaN, infinite or beyond
            1e100 (rewards of inactive rows are not looked at).
    """
    for name in KEYS:
        if nulls := frame[name].null_count():
            msg = f"steps: {name} is NULL in {nulls} rows. Every step needs its episode, its group and its number."
            raise ContractError(msg)
    opens = pl.col("episode_id").ne_missing(pl.col("episode_id").shift()) | pl.col("group_id").ne_missing(
        pl.col("group_id").shift()
    )
    expected = pl.when(opens).then(0).otherwise(pl.col("step_index").shift().cast(pl.Int64) + 1)
    within = ~opens
    active = pl.col("is_active")
    # The first mask counts rows; each of the others marks the rows of one fault.
    faults = frame.lazy().select(
        opens.alias("opens"),
        (pl.col("step_index") != expected).alias("step"),
        (~pl.col("status").is_in(STATUSES)).fill_null(value=True).alias("status"),
        (within & pl.col("status").ne_missing(pl.col("status").shift())).alias("status_changes"),
        (within & pl.col("episode_score").ne_missing(pl.col("episode_score").shift())).alias("score_changes"),
        (active & ~(pl.col("reward").abs() <= LARGEST)).fill_null(value=False).alias("reward"),
        (~(pl.col("episode_score").abs() <= LARGEST)).fill_null(value=False).alias("score"),
    )
    counts = faults.sum().collect().row(0, named=True)
    episodes = counts.pop("opens")
    for fault, rows in counts.items():
        if rows:
            raise ContractError(_message(fault, frame, faults))
    if frame["episode_id"].n_unique() != episodes:
        raise ContractError(_two_groups(frame))


def _message(fault: str, frame: pl.DataFrame, faults: pl.LazyFrame) -> str:
    """Say what is wrong with the first row that has the fault, and what to do."""
    row = frame.filter(faults.select(fault).collect().to_series()).row(0, named=True)
    before = f"steps: episode {row['episode_id']!r}"
    at = f"{before}, step_index {row['step_index']}"
    return {
        "step": f"{at}: duplicate, missing or negative step. An episode's steps are numbered 0, 1, 2, ... once each, "
        "inactive ones included; remove duplicates or ingest the whole episode.",
        "status": f"{at}: status {row['status']!r} is none of {', '.join(STATUSES)}. Map it to one of them.",
        "status_changes": f"{at}: status {row['status']!r} differs from the step before. A status belongs to the "
        "whole episode; join it by episode_id.",
        "score_changes": f"{at}: episode_score {row['episode_score']} differs from the step before. A score belongs "
        "to the whole episode; join it by episode_id.",
        "reward": f"{at}: reward {row['reward']} is not a finite number below 1e100. Write NULL where the reward is "
        "not known, or repair the source.",
        "score": f"{before}: episode_score {row['episode_score']} is not a finite number below 1e100. Write NULL where "
        "the episode is not scored, or repair the scorer.",
    }[fault]


def _two_groups(frame: pl.DataFrame) -> str:
    """Name the first episode that occurs in more than one group."""
    groups = frame.group_by("episode_id").agg(pl.col("group_id").unique().sort())
    row = groups.filter(pl.col("group_id").list.len() > 1).sort("episode_id").row(0, named=True)
    return (
        f"steps: episode {row['episode_id']!r} is in {len(row['group_id'])} groups "
        f"({', '.join(map(repr, row['group_id'][:3]))}). An episode belongs to one group: give each grouping a job of "
        "its own."
    )
