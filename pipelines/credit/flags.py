"""Why an advantage is what it is, or unknown: a closed vocabulary, stored as one short string per row."""

from collections import Counter
from collections.abc import Mapping
from enum import StrEnum

import numpy as np
import polars as pl

from lake.read.text_table import counted
from pipelines.credit.inputs.batch import Bools

STATE = """
CASE
    WHEN max(group_size) IS NULL THEN 'absent'
    WHEN bool_or(group_size >= 2 AND NOT contains(',' || flags || ',', ',dead_group,')) THEN 'live'
    WHEN max(group_size) >= 2 THEN 'dead'
    WHEN max(group_size) = 1 THEN 'singleton'
    ELSE 'unscored'
END
"""
"""SQL: whether a group has a signal, by its rows of `advantages`. live: two or more scored siblings that differ."""


class Flag(StrEnum):
    """What is special about a row. Members are in alphabetical order: a row's flags are written in this order."""

    CONSTANT_ANCHOR = "constant_anchor"
    """Two or more rows share the anchor state and all have the same step score: the step advantage is exactly 0."""
    CONSTANT_BATCH = "constant_batch"
    """All scores (or returns) that the batch compares are the same: the advantage is exactly 0."""
    CONSTANT_STEP = "constant_step"
    """The steps that it is compared with all have the same return: the advantage is exactly 0."""
    DEAD_GROUP = "dead_group"
    """Two or more scored siblings, all with the same score: the group says nothing about the outcome."""
    EXCLUDED = "excluded"
    """The episode takes part in nothing: aborted or failed and not scored, or truncated under `truncated="exclude"`."""
    LEFT_OUT = "left_out"
    """The anchor definition leaves this state out (an error text, say): the step advantage is exactly 0."""
    MASKED = "masked"
    """Truncated under `truncated="mask"`: counts in the statistics, its own advantage is NULL."""
    REVISIT = "revisit"
    """A later visit of its trajectory to the anchor under `revisits="first"`: the step advantage is 0."""
    SINGLETON_ANCHOR = "singleton_anchor"
    """No other row has this anchor state: the step advantage is exactly 0."""
    SINGLETON_BATCH = "singleton_batch"
    """The batch has one scored episode (or step): nothing to compare it with, and the advantage is exactly 0."""
    SINGLETON_GROUP = "singleton_group"
    """The group has one scored trajectory: nothing to compare it with."""
    SINGLETON_STEP = "singleton_step"
    """No other trajectory of the group has this step: the advantage is exactly 0."""
    TRUNCATED = "truncated"
    """The episode was cut off by a limit."""
    UNKNOWN_BATCH = "unknown_batch"
    """The batch key of the episode is NULL, so it belongs to no batch."""
    UNKNOWN_LENGTH = "unknown_length"
    """The length of the episode is NULL, so it has no weight."""
    UNKNOWN_RETURN = "unknown_return"
    """A reward at this step or a later one is NULL, so the return-to-go is not known."""
    UNKNOWN_STATE = "unknown_state"
    """The state is NULL, which equals no other, so no step shares its anchor: the step advantage is exactly 0."""
    UNKNOWN_VALUE = "unknown_value"
    """A value estimate at this step or a later one is NULL, or that of a truncated episode's end."""
    UNSCORED = "unscored"
    """The episode's score is NULL, so its episode advantage is not known."""


def join_flags(masks_N: Mapping[Flag, Bools]) -> pl.Series:
    """String series `flags`: for each row the names of the flags that are set, sorted, comma-separated; maybe empty."""
    num_rows = len(next(iter(masks_N.values())))
    flags = sorted(flag for flag, mask_N in masks_N.items() if mask_N.any())
    codes_N = np.zeros(num_rows, np.int32)
    for bit, flag in enumerate(flags):
        codes_N |= masks_N[flag].astype(np.int32) << bit
    texts = [",".join(flag for bit, flag in enumerate(flags) if code >> bit & 1) for code in range(1 << len(flags))]
    return pl.Series("flags", texts, dtype=pl.String).gather(pl.Series(codes_N))


_REMEDIES = {
    Flag.UNSCORED: "the episode has no score: `trajlake score`, or another --score",
    Flag.UNKNOWN_BATCH: "`batch_key` is NULL: take another column for it",
    Flag.UNKNOWN_LENGTH: "the episode has no token count: --set length=steps",
    Flag.UNKNOWN_RETURN: "a reward is NULL from there on: --rewards SCORER, or --set step_source=terminal_score, "
    "which takes the episode's score",
    Flag.UNKNOWN_VALUE: "no value estimate is stored (`value_estimate`; `final_value_estimate` where it was cut off)",
    Flag.MASKED: "the episode was truncated: --set truncated=keep trains on it",
    Flag.EXCLUDED: "the episode failed, was aborted or, under truncated=exclude, cut off",
}


def count_unknown(rows: pl.DataFrame) -> Counter[str]:
    """Steps without an advantage by the flags that say why; a step with two such flags counts for both."""
    counted: Counter[str] = Counter()
    texts = rows.lazy().filter(pl.col("advantage").is_null()).group_by("flags").agg(pl.len()).collect()
    for text, steps in texts.iter_rows():
        counted.update({flag: steps for flag in text.split(",") if flag in set(_REMEDIES)})
    return counted


def in_words(unknown: Mapping[str, int]) -> list[str]:
    """A line per reason that `count_unknown` found, the most frequent first."""
    ordered = sorted(unknown.items(), key=lambda item: (-item[1], item[0]))
    return [
        f"advantages unknown in {counted(steps, 'step')}, {flag}: {_REMEDIES[Flag(flag)]}" for flag, steps in ordered
    ]
