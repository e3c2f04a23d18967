"""What a written rubric looks like beside the one it should be: size, questions asked, coverage."""

from types import ModuleType
from typing import Any, ClassVar, Self

import msgspec
import polars as pl
from pydantic import Field, model_validator

from pipelines.score.scorers import answer_quality, protocol
from pipelines.score.scorers.answer_quality import jaccard
from pipelines.score.scorers.protocol import Columns, ScorerInputs, divided
from pipelines.score.scorers.texts import ANSWER_STEPS, AnswerScorer

_TEXTS = ("criterion", "description", "text", "name", "title")


class RubricTerms(AnswerScorer):
    """quality_weight * quality + efficiency_weight * efficiency + coverage_weight * coverage.

    .. code-block:: text

        quality     0 with min_criteria to max_criteria criteria; else minus the relative distance, at least -1
        efficiency  0 with at most max_questions turns before the rubric; else minus the relative excess, at least -1
        coverage    share of the true criteria that some written criterion resembles (word Jaccard >= threshold)

    The rubric is the answer, JSON: a list of criteria, or an object with such a list; the true one is the ground
    truth. A criterion is a text, or an object with one. Agreement of the scores under both rubrics is a reward over two
    scorers (`pipelines.score.reward_definition`), and this is a component of it. Source: the terms of rubric-manager
    training; the limits and weights are ours. O(characters + criteria of both rubrics, multiplied).
    """

    name: ClassVar[str] = "rubric_terms"
    columns: ClassVar[Columns] = Columns(episodes=("ground_truth",), steps=ANSWER_STEPS)
    helpers: ClassVar[tuple[ModuleType, ...]] = (answer_quality, protocol)

    criteria_key: str = "criteria"
    """Key of the list of criteria, in objects."""
    min_criteria: int = Field(default=3, ge=1)
    """Fewer are too few."""
    max_criteria: int = Field(default=10, ge=1)
    """More are too many."""
    max_questions: int = Field(default=3, ge=0)
    """Turns before the rubric that cost nothing."""
    threshold: float = Field(default=0.5, gt=0.0, le=1.0)
    """Word overlap from which two criteria are the same."""
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
        answered = self._criteria(self.answers(inputs), "answer", "written")
        truth = self._criteria(inputs.episodes.select("episode_id", "ground_truth"), "ground_truth", "true")
        turns = inputs.steps.filter(pl.col("is_active").fill_null(True)).group_by("episode_id").agg(turns=pl.len())
        covered = self._coverage(answered, truth)
        facts = answered
        for frame in (truth.drop("ground_truth"), turns, covered):
            facts = facts.join(frame, on="episode_id", how="left", maintain_order="left")
        count, questions = pl.col("written").list.len(), pl.col("turns").cast(pl.Int64) - 1
        facts = facts.with_columns(
            quality=-_beyond(self.min_criteria - count.cast(pl.Int64), self.min_criteria)
            - _beyond(count.cast(pl.Int64) - self.max_criteria, self.max_criteria),
            efficiency=-_beyond(questions - self.max_questions, max(self.max_questions, 1)),
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
        return facts.select(
            "episode_id",
            value=pl.when(unanswered)
            .then(pl.lit(self.no_answer, pl.Float64))
            .when(pl.col("written").is_not_null())
            .then(value),
            reason=self._reason(unanswered),
            metrics=pl.when(pl.col("written").is_not_null()).then(pl.struct(*weights).struct.json_encode()),
        )

    def _reason(self, unanswered: pl.Expr) -> pl.Expr:
        no_answer = pl.lit(self.no_answer_reason() if self.no_answer is None else None, pl.String)
        untold = pl.col("coverage").is_null() & pl.lit(self.coverage_weight != 0.0)
        return (
            pl.when(unanswered)
            .then(no_answer)
            .when(pl.col("written").is_null())
            .then(pl.lit("the answer is no rubric: no JSON list of criteria"))
            .when(untold)
            .then(pl.lit("the ground truth is no rubric: no JSON list of criteria"))
        )

    def _criteria(self, frame: pl.DataFrame, column: str, name: str) -> pl.DataFrame:
        """The frame with the criteria that a JSON column holds; NULL where it holds none."""
        distinct = frame.get_column(column).unique().drop_nulls()
        lists = [criteria(text, self.criteria_key) for text in distinct.to_list()]
        known = pl.DataFrame({column: distinct, name: lists}, schema={column: pl.String, name: pl.List(pl.String)})
        return frame.join(known, on=column, how="left", maintain_order="left")

    def _coverage(self, answered: pl.DataFrame, truth: pl.DataFrame) -> pl.DataFrame:
        """episode_id and coverage of the episodes that have both rubrics."""
        both = answered.drop_nulls("written").join(truth.drop_nulls("true"), on="episode_id")
        pairs = (
            both.select("episode_id", "written", "true")
            .explode("true")
            .with_row_index("place")
            .explode("written", empty_as_null=True)
            .with_columns(alike=jaccard(pl.col("written"), pl.col("true")) >= self.threshold)
        )
        return (
            pairs.group_by("episode_id", "place")
            .agg(pl.col("alike").any())
            .group_by("episode_id")
            .agg(coverage=pl.col("alike").mean())
        )


def criteria(text: str, key: str) -> list[str] | None:
    """Texts of a rubric's criteria; None if the text is no rubric. A true rubric without criteria is none either."""
    try:
        value: Any = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    parts = value.get(key) if isinstance(value, dict) else value
    if not isinstance(parts, list):
        return None
    found = [_criterion(part) for part in parts]
    return [part for part in found if part is not None] if all(part is not None for part in found) else None


def _criterion(part: Any) -> str | None:
    if isinstance(part, dict):
        part = next((part[name] for name in _TEXTS if isinstance(part.get(name), str)), None)
    return part if isinstance(part, str) else None


def _beyond(excess: pl.Expr, unit: int) -> pl.Expr:
    """The excess as a share of a unit, 0 to 1."""
    return divided(excess.clip(lower_bound=0), unit).clip(upper_bound=1.0)
