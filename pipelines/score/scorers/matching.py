"""Whether the answer equals, or contains, what the ground truth says, or how much it resembles it."""

from difflib import SequenceMatcher
from typing import ClassVar, Literal

import polars as pl
from pydantic import Field

from pipelines.score.scorers.texts import Normalise, TruthScorer, number, words


class ExactMatch(TruthScorer):
    """1 if the normalised answer matches one of the normalised truths (or every one of them), else 0.

    .. code-block:: text

        equals     n(answer) = n(truth)       or, with numbers, |x - y| <= tolerance * max(1, |y|)
        contains   n(truth) occurs in n(answer)

    Source: the exact match of SQuAD (arXiv 1606.05250); `contains` with `require="all"` and `answer="all"` is how
    tau-bench checks outputs (arXiv 2406.12045). One score per episode; O(characters x truths).
    """

    name: ClassVar[str] = "exact_match"

    mode: Literal["equals", "contains"] = "equals"
    """Compare whole texts, or look for the truth inside the answer."""
    require: Literal["any", "all"] = "any"
    """Of several truths, one suffices, or all are needed."""
    numbers: bool = False
    """Under `equals`: compare as numbers where answer and truth are numbers (`$1,000` and `1000.0`)."""
    tolerance: float = Field(default=1e-9, ge=0.0)
    """Relative difference of numbers that are the same."""

    def compared(self, pairs: pl.DataFrame) -> pl.DataFrame:
        """Whether one truth matches, or all; metrics count them."""
        matches = pl.col("matches")
        return (
            pairs.with_columns(matches=self._matches())
            .group_by("episode_id")
            .agg(
                value=(matches.all() if self.require == "all" else matches.any()).cast(pl.Float64),
                why=pl.lit(None, pl.String),
                metrics=pl.struct(truths=pl.len(), matched=matches.sum()).struct.json_encode(),
            )
        )

    def _matches(self) -> pl.Expr:
        plain, truth = pl.col("a"), pl.col("b")
        if self.mode == "contains":
            return plain.str.contains(truth, literal=True)
        if not self.numbers:
            return plain == truth
        x, y = number(pl.col("answer")), number(pl.col("truth"))
        close = (x - y).abs() <= self.tolerance * pl.max_horizontal(y.abs(), pl.lit(1.0))
        return (plain == truth) | close.fill_null(False)


class FuzzyMatch(TruthScorer):
    """The best similarity of the normalised answer a to one of the normalised truths b, from 0 to 1.

    .. code-block:: text

        token_f1   2 P R / (P + R), P = common words / words of a, R = common words / words of b   (with multiplicity)
        jaccard    |A and B| / |A or B| over the sets of words
        difflib    2 M / (|a| + |b|) over characters, M = matching characters (Ratcliff and Obershelp; no junk)

    Source: token_f1 as SQuAD scores it (arXiv 1606.05250); difflib is Python's SequenceMatcher with autojunk off, so
    that long texts get no other formula. One score per episode. token_f1 and jaccard are O(words); difflib is
    quadratic in characters at worst, hence `max_characters`.
    """

    name: ClassVar[str] = "fuzzy_match"

    measure: Literal["token_f1", "jaccard", "difflib"] = "token_f1"
    """Which similarity."""
    normalise: Normalise = Normalise(punctuation=True, articles=True)
    """What is taken for the same text."""
    max_characters: int = Field(default=2000, ge=1)
    """Under `difflib`: texts longer than this, after normalisation, are not compared (the score is NULL)."""

    def compared(self, pairs: pl.DataFrame) -> pl.DataFrame:
        """The best similarity; unknown if one of the truths could not be compared."""
        similarity = pl.col("similarity")
        return (
            self._measured(pairs)
            .group_by("episode_id")
            .agg(value=pl.when(similarity.null_count() == 0).then(similarity.max()))
            .with_columns(
                why=pl.when(pl.col("value").is_null()).then(
                    pl.lit(f"answer or truth is longer than max_characters = {self.max_characters}")
                ),
                metrics=pl.lit(None, pl.String),
            )
        )

    def _measured(self, pairs: pl.DataFrame) -> pl.DataFrame:
        if self.measure == "difflib":
            return pairs.with_columns(similarity=self._difflib(pairs))
        pairs = pairs.with_columns(words_a=words(pl.col("a")), words_b=words(pl.col("b")))
        if self.measure == "jaccard":
            common = pl.col("words_a").list.set_intersection("words_b").list.len()
            union = pl.col("words_a").list.set_union("words_b").list.len()
            return pairs.with_columns(similarity=pl.when(union > 0).then(common / union).otherwise(0.0))
        return token_f1(pairs)

    def _difflib(self, pairs: pl.DataFrame) -> pl.Series:
        """The ratio of each distinct pair, once; a matcher keeps what it knows of its second text, the truth."""
        short = pl.max_horizontal(pl.col("a").str.len_chars(), pl.col("b").str.len_chars()) <= self.max_characters
        distinct = pairs.filter(short).select("a", "b").unique().sort("b", "a")
        matcher: SequenceMatcher[str] = SequenceMatcher(autojunk=False)
        ratios = []
        second: str | None = None
        for a, b in distinct.iter_rows():
            if b != second:
                matcher.set_seq2(second := b)
            matcher.set_seq1(a)
            ratios.append(matcher.ratio())
        known = distinct.with_columns(pl.Series("similarity", ratios, dtype=pl.Float64))
        return pairs.join(known, on=["a", "b"], how="left", maintain_order="left").get_column("similarity")


def token_f1(pairs: pl.DataFrame) -> pl.DataFrame:
    """Pairs with `similarity`: the F1 of the words_a and words_b (lists) in common, each as often as both have it."""
    numbered = pairs.with_row_index("pair")
    counts = [
        numbered.select("pair", word=side)
        .explode("word", empty_as_null=False)
        .group_by("pair", "word")
        .agg(pl.len().alias(side))
        for side in ("words_a", "words_b")
    ]
    common = (
        counts[0]
        .join(counts[1], on=["pair", "word"])
        .group_by("pair")
        .agg(common=pl.min_horizontal("words_a", "words_b").sum())
    )
    total = pl.col("words_a").list.len() + pl.col("words_b").list.len()
    return (
        numbered.join(common, on="pair", how="left", maintain_order="left")
        .with_columns(similarity=pl.when(total > 0).then(2.0 * pl.col("common").fill_null(0) / total).otherwise(0.0))
        .drop("pair", "common")
    )
