"""Why advantages are unknown, and what to do about each reason: the flags of the steps without one, counted."""

from collections import Counter
from collections.abc import Mapping

import polars as pl

from pipelines.credit.flags import Flag

_REMEDIES = {
    Flag.UNSCORED: "the episode has no score: `trajlake score`, or another --score",
    Flag.UNKNOWN_BATCH: "`batch_key` is NULL: take another column for it",
    Flag.UNKNOWN_LENGTH: "the episode has no token count: --set length=steps",
    Flag.UNKNOWN_RETURN: "a reward is NULL from there on: --rewards SCORER, or take the episode's score",
    Flag.UNKNOWN_VALUE: "no value estimate is stored (`value_estimate`; `final_value_estimate` where it was cut off)",
    Flag.MASKED: "the episode was truncated: --set truncated=keep trains on it",
    Flag.EXCLUDED: "the episode failed, was aborted or, under truncated=exclude, cut off",
}


def count_unknown(rows: pl.DataFrame) -> Counter[str]:
    """Steps without an advantage by the flags that say why; a step with two such flags counts for both.

    Args:
        rows: as an estimator returns them: `advantage` and `flags`.
    """
    counted: Counter[str] = Counter()
    texts = rows.lazy().filter(pl.col("advantage").is_null()).group_by("flags").agg(pl.len()).collect()
    for text, steps in texts.iter_rows():
        counted.update({flag: steps for flag in text.split(",") if flag in set(_REMEDIES)})
    return counted


def in_words(unknown: Mapping[str, int]) -> list[str]:
    """A line per reason, the most frequent first.

    Args:
        unknown: of `count_unknown`.
    """
    ordered = sorted(unknown.items(), key=lambda item: (-item[1], item[0]))
    return [f"advantages unknown in {steps} steps, {flag}: {_REMEDIES[Flag(flag)]}" for flag, steps in ordered]
