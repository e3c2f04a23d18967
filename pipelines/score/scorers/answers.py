"""Scorers of the answer's content: matches with the ground truth, quality, and terms of a rubric."""

from difflib import SequenceMatcher
from functools import reduce
from operator import or_
from typing import Any, ClassVar, Literal, Self

import msgspec
import polars as pl
from pydantic import Field, model_validator

from pipelines.score.scorers.protocol import (
    ANSWER_STEPS,
    AnswerScorer,
    Normalise,
    ScorerColumns,
    ScorerInputs,
    TruthScorer,
    divide,
    parse_number,
    read_truths,
    split_words,
)


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
    """With several truths: one must match, or all must."""
    numbers: bool = False
    """Under `equals`: compare as numbers where answer and truth are numbers (`$1,000` and `1000.0`)."""
    tolerance: float = Field(default=1e-9, ge=0.0)
    """Maximum relative difference of equal numbers."""

    def compare(self, pairs: pl.DataFrame) -> pl.DataFrame:
        """Return whether one truth matches, or all; metrics count the matches."""
        answer, truth, matches = pl.col("a"), pl.col("b"), pl.col("matches")
        is_match = answer.str.contains(truth, literal=True) if self.mode == "contains" else answer == truth
        if self.mode == "equals" and self.numbers:
            number, target = parse_number(pl.col("answer")), parse_number(pl.col("truth"))
            close = (number - target).abs() <= self.tolerance * pl.max_horizontal(target.abs(), pl.lit(1.0))
            is_match |= close.fill_null(False)
        return (
            pairs.with_columns(matches=is_match)
            .group_by("episode_id")
            .agg(
                value=(matches.all() if self.require == "all" else matches.any()).cast(pl.Float64),
                why=pl.lit(None, pl.String),
                metrics=pl.struct(truths=pl.len(), matched=matches.sum()).struct.json_encode(),
            )
        )


class FuzzyMatch(TruthScorer):
    """The best similarity of the normalised answer a to one of the normalised truths b, from 0 to 1.

    .. code-block:: text

        token_f1   2 P R / (P + R), P = common words / words of a, R = common words / words of b   (with multiplicity)
        jaccard    |A and B| / |A or B| over the sets of words
        difflib    2 M / (|a| + |b|) over characters, M = matching characters (Ratcliff and Obershelp; no junk)

    Source: token_f1 as SQuAD scores it (arXiv 1606.05250); difflib is Python's SequenceMatcher with autojunk off, so
    that long texts have the same formula. One score per episode. token_f1 and jaccard are O(words); difflib is
    quadratic in characters at worst, hence `max_characters`.
    """

    name: ClassVar[str] = "fuzzy_match"

    measure: Literal["token_f1", "jaccard", "difflib"] = "token_f1"
    """Measure of similarity."""
    normalise: Normalise = Normalise(punctuation=True, articles=True)
    """Normalisation of answer and truth before the comparison."""
    max_characters: int = Field(default=2000, ge=1)
    """Under `difflib`: texts longer than this, after normalisation, are not compared (the score is NULL)."""

    def compare(self, pairs: pl.DataFrame) -> pl.DataFrame:
        """Return the best similarity; unknown if one of the truths could not be compared."""
        similarity = pl.col("similarity")
        return (
            self._measure(pairs)
            .group_by("episode_id")
            .agg(value=pl.when(similarity.null_count() == 0).then(similarity.max()))
            .with_columns(
                why=pl.when(pl.col("value").is_null()).then(
                    pl.lit(f"answer or truth is longer than max_characters = {self.max_characters}")
                ),
                metrics=pl.lit(None, pl.String),
            )
        )

    def _measure(self, pairs: pl.DataFrame) -> pl.DataFrame:
        if self.measure == "difflib":
            return pairs.with_columns(similarity=self._difflib(pairs))
        pairs = pairs.with_columns(words_a=split_words(pl.col("a")), words_b=split_words(pl.col("b")))
        if self.measure == "jaccard":
            common = pl.col("words_a").list.set_intersection("words_b").list.len()
            union = pl.col("words_a").list.set_union("words_b").list.len()
            return pairs.with_columns(similarity=pl.when(union > 0).then(common / union).otherwise(0.0))
        return measure_token_f1(pairs)

    def _difflib(self, pairs: pl.DataFrame) -> pl.Series:
        """Return the ratio of each pair; compute it once per distinct pair, as a matcher caches its second text."""
        short = pl.max_horizontal(pl.col("a").str.len_chars(), pl.col("b").str.len_chars()) <= self.max_characters
        distinct = pairs.filter(short).select("a", "b").unique().sort("b", "a")
        matcher: SequenceMatcher[str] = SequenceMatcher(autojunk=False)
        ratios = []
        second: str | None = None
        for answer, truth in distinct.iter_rows():
            if truth != second:
                matcher.set_seq2(second := truth)
            matcher.set_seq1(answer)
            ratios.append(matcher.ratio())
        similarities = distinct.with_columns(pl.Series("similarity", ratios, dtype=pl.Float64))
        return pairs.join(similarities, on=["a", "b"], how="left", maintain_order="left").get_column("similarity")


def measure_token_f1(pairs: pl.DataFrame) -> pl.DataFrame:
    """Add `similarity` to pairs: the F1 of the common words of words_a and words_b (lists), with multiplicity."""
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


_HEADING = r"(?m)^#{1,6}\s+.+|^[A-Z\s]{5,}$"
_LIST = r"(?m)^\s*[-*\x{2022}]\s+|^\s*\d+\.\s+"
_CONCLUSION = ("conclusion", "summary", "in summary", "to conclude", "overall")
_EXAMPLE = ("for example", "for instance", "such as", "e.g.", "specifically")
_REASONING = ("because", "therefore", "thus", "since", "as a result", "consequently")


class AnswerQuality(AnswerScorer):
    """0.3 structure + 0.4 depth, plus 0.3 similarity where there is a reference; at most 0.7 without one, 1 with.

    .. code-block:: text

        structure   paragraphs: two or more 0.3, one 0.1;  headings: two or more 0.3, one 0.15;  a list 0.2;
                    a word of conclusion 0.2
        depth       characters: 200 to 2000 0.4, 100 to 199 0.2, more 0.3;  a word of example 0.2;
                    0.05 for each word of reasoning, at most 0.2;  a digit 0.2
        similarity  |A and B| / |A or B| over the sets of lower-cased words of answer and reference

    Source: MassGen's RewardComputer, its expressions and words: a heading is a Markdown one, or a stretch of capitals
    and whitespace; words match inside words (`since` in `sincere`). MassGen adds 0.3 times the mean of the user's
    metrics; use a reward for that. It scores an empty answer 0, as `no_answer = 0.0` does here. One score per episode;
    O(characters).
    """

    name: ClassVar[str] = "answer_quality"
    columns: ClassVar[ScorerColumns] = ScorerColumns(episodes=("ground_truth",), steps=ANSWER_STEPS)

    reference: Literal["none", "ground_truth"] = "none"
    """Compare with the ground truth (the best of several truths; without any the score is unknown), or do not."""
    truth_path: str = ""
    """Path of the reference in the ground truth, keys and positions separated by dots; empty: the whole."""

    def reads(self) -> ScorerColumns:
        """Return the columns; the ground truth only if it is the reference."""
        return self.columns if self.reference == "ground_truth" else ScorerColumns(steps=ANSWER_STEPS)

    def _score(self, inputs: ScorerInputs) -> pl.DataFrame:
        answered = self.answers(inputs).with_columns(structure=measure_structure(), depth=measure_depth())
        value = 0.3 * pl.col("structure") + 0.4 * pl.col("depth")
        error, reason = pl.lit(None, pl.String), pl.lit(None, pl.String)
        terms = ["structure", "depth"]
        if self.reference == "ground_truth":
            truth = read_truths(inputs.episodes, self.truth_path)
            pairs = truth.explode("truths", empty_as_null=True).join(answered, on="episode_id")
            best = measure_jaccard(pl.col("answer"), pl.col("truths")).max()
            for frame in (truth.drop("truths"), pairs.group_by("episode_id").agg(similarity=best)):
                answered = answered.join(frame, on="episode_id", how="left", maintain_order="left")
            value += 0.3 * pl.col("similarity")
            error, reason = pl.col("truth_error"), pl.col("truth_reason")
            terms.append("similarity")
        unanswered = pl.coalesce(error, reason).is_null() & pl.col("answer").is_null()
        no_answer = pl.lit(self.no_answer_reason() if self.no_answer is None else None, pl.String)
        return answered.select(
            "episode_id",
            value=pl.when(unanswered).then(pl.lit(self.no_answer, pl.Float64)).otherwise(value),
            reason=pl.when(unanswered).then(no_answer).otherwise(reason),
            error=error,
            metrics=pl.when(pl.col("answer").is_not_null()).then(pl.struct(terms).struct.json_encode()),
        )


def measure_structure() -> pl.Expr:
    """Return the structure of the column `answer`, 0 to 1."""
    text = pl.col("answer")
    paragraphs = text.str.split("\n\n").list.eval(pl.element().str.strip_chars() != "").list.sum()
    headings = text.str.count_matches(_HEADING)
    return (
        _grade_count(paragraphs, 0.1, 0.3)
        + _grade_count(headings, 0.15, 0.3)
        + 0.2 * text.str.contains(_LIST).cast(pl.Float64)
        + 0.2 * _contains_any(text, _CONCLUSION)
    )


def measure_depth() -> pl.Expr:
    """Return the depth of the column `answer`, 0 to 1."""
    text = pl.col("answer")
    length = text.str.len_chars()
    of_length = (
        pl.when(length < 100).then(0.0).when(length < 200).then(0.2).when(length <= 2000).then(0.4).otherwise(0.3)
    )
    reasons = pl.sum_horizontal(_contains_any(text, (word,)) for word in _REASONING)
    return (
        of_length
        + 0.2 * _contains_any(text, _EXAMPLE)
        + pl.min_horizontal(pl.lit(0.2), 0.05 * reasons)
        + 0.2 * text.str.contains(r"\d").cast(pl.Float64)
    )


def measure_jaccard(text: pl.Expr, reference: pl.Expr) -> pl.Expr:
    """Return the number of common words over that of all words, lower-cased; 0 where both texts are empty."""
    sets = [split_words(column.str.to_lowercase()) for column in (text, reference)]
    union = sets[0].list.set_union(sets[1]).list.len()
    common = sets[0].list.set_intersection(sets[1]).list.len()
    return pl.when(union > 0).then(common / union).when(union == 0).then(0.0)


def _grade_count(count: pl.Expr, single: float, several: float) -> pl.Expr:
    return pl.when(count >= 2).then(several).when(count == 1).then(single).when(count == 0).then(0.0)


def _contains_any(text: pl.Expr, phrases: tuple[str, ...]) -> pl.Expr:
    """Return 1.0 if one of the phrases occurs, else 0.0."""
    lower = text.str.to_lowercase()
    return reduce(or_, (lower.str.contains(phrase, literal=True) for phrase in phrases)).cast(pl.Float64)


_TEXTS = ("criterion", "description", "text", "name", "title")


class RubricTerms(AnswerScorer):
    """quality_weight * quality + efficiency_weight * efficiency + coverage_weight * coverage.

    .. code-block:: text

        quality     0 with min_criteria to max_criteria criteria; else minus the relative distance, at least -1
        efficiency  0 with at most max_questions turns before the rubric; else minus the relative excess, at least -1
        coverage    share of the true criteria that some written criterion resembles (word Jaccard >= threshold)

    The rubric is the answer, JSON: a list of criteria, or an object with such a list; the true one is the ground
    truth. A criterion is a text, or an object with one. The agreement of the scores under both rubrics is a reward over
    two scorers (`pipelines.score.rewards`), and these terms are a component of it. Source: the terms of rubric-manager
    training; the limits and weights are ours. O(characters + product of both rubrics' numbers of criteria).
    """

    name: ClassVar[str] = "rubric_terms"
    columns: ClassVar[ScorerColumns] = ScorerColumns(episodes=("ground_truth",), steps=ANSWER_STEPS)

    criteria_key: str = "criteria"
    """Key of the list of criteria, in objects."""
    min_criteria: int = Field(default=3, ge=1)
    """Minimum number of criteria."""
    max_criteria: int = Field(default=10, ge=1)
    """Maximum number of criteria."""
    max_questions: int = Field(default=3, ge=0)
    """Turns before the rubric without a penalty."""
    threshold: float = Field(default=0.5, gt=0.0, le=1.0)
    """Minimum word overlap of two matching criteria."""
    quality_weight: float = 1.0
    """Weight of quality."""
    efficiency_weight: float = 1.0
    """Weight of efficiency."""
    coverage_weight: float = 1.0
    """Weight of coverage; 0: the ground truth is not needed."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_criteria > self.max_criteria:
            msg = f"min_criteria is {self.min_criteria}, above max_criteria, {self.max_criteria}"
            raise ValueError(msg)
        return self

    def _score(self, inputs: ScorerInputs) -> pl.DataFrame:
        answered = self._add_criteria(self.answers(inputs), "answer", "written")
        truth = self._add_criteria(inputs.episodes.select("episode_id", "ground_truth"), "ground_truth", "true")
        turns = inputs.steps.filter(pl.col("is_active").fill_null(True)).group_by("episode_id").agg(turns=pl.len())
        coverage = self._measure_coverage(answered, truth)
        episodes = answered
        for frame in (truth.drop("ground_truth"), turns, coverage):
            episodes = episodes.join(frame, on="episode_id", how="left", maintain_order="left")
        count, questions = pl.col("written").list.len(), pl.col("turns").cast(pl.Int64) - 1
        episodes = episodes.with_columns(
            quality=-_measure_excess(self.min_criteria - count.cast(pl.Int64), self.min_criteria)
            - _measure_excess(count.cast(pl.Int64) - self.max_criteria, self.max_criteria),
            efficiency=-_measure_excess(questions - self.max_questions, max(self.max_questions, 1)),
        )
        weights = {
            "quality": self.quality_weight,
            "efficiency": self.efficiency_weight,
            "coverage": self.coverage_weight,
        }
        value = pl.sum_horizontal(
            (weight * pl.col(name) for name, weight in weights.items() if weight), ignore_nulls=False
        )
        unanswered = pl.col("answer").is_null()
        return episodes.select(
            "episode_id",
            value=pl.when(unanswered)
            .then(pl.lit(self.no_answer, pl.Float64))
            .when(pl.col("written").is_not_null())
            .then(value),
            reason=pl.when(unanswered)
            .then(pl.lit(self.no_answer_reason() if self.no_answer is None else None, pl.String))
            .when(pl.col("written").is_null())
            .then(pl.lit("the answer is not a rubric: it has no JSON list of criteria"))
            .when(pl.col("coverage").is_null() & pl.lit(self.coverage_weight != 0.0))
            .then(pl.lit("the ground truth is not a rubric: it has no JSON list of criteria")),
            metrics=pl.when(pl.col("written").is_not_null()).then(pl.struct(*weights).struct.json_encode()),
        )

    def _add_criteria(self, frame: pl.DataFrame, column: str, name: str) -> pl.DataFrame:
        """Add the criteria of a JSON column; NULL where it has none."""
        distinct = frame.get_column(column).unique().drop_nulls()
        lists = [parse_criteria(text, self.criteria_key) for text in distinct.to_list()]
        rubrics = pl.DataFrame({column: distinct, name: lists}, schema={column: pl.String, name: pl.List(pl.String)})
        return frame.join(rubrics, on=column, how="left", maintain_order="left")

    def _measure_coverage(self, answered: pl.DataFrame, truth: pl.DataFrame) -> pl.DataFrame:
        """Return episode_id and coverage of the episodes with both rubrics."""
        rubrics = answered.drop_nulls("written").join(truth.drop_nulls("true"), on="episode_id")
        pairs = (
            rubrics.select("episode_id", "written", "true")
            .explode("true")
            .with_row_index("place")
            .explode("written", empty_as_null=True)
            .with_columns(alike=measure_jaccard(pl.col("written"), pl.col("true")) >= self.threshold)
        )
        return (
            pairs.group_by("episode_id", "place")
            .agg(pl.col("alike").any())
            .group_by("episode_id")
            .agg(coverage=pl.col("alike").mean())
        )


def parse_criteria(document: str, key: str) -> list[str] | None:
    """Return the texts of a rubric's criteria; None if the text is not a rubric."""
    try:
        rubric: Any = msgspec.json.decode(document)
    except (msgspec.DecodeError, RecursionError):
        return None
    criteria = rubric.get(key) if isinstance(rubric, dict) else rubric
    if not isinstance(criteria, list):
        return None
    texts = []
    for criterion in criteria:
        text = criterion
        if isinstance(criterion, dict):
            text = next((criterion[name] for name in _TEXTS if isinstance(criterion.get(name), str)), None)
        if not isinstance(text, str):
            return None
        texts.append(text)
    return texts


def _measure_excess(excess: pl.Expr, unit: int) -> pl.Expr:
    """Return the excess as a share of a unit, 0 to 1."""
    return divide(excess.clip(lower_bound=0), unit).clip(upper_bound=1.0)
