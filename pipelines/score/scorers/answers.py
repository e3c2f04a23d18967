"""The answer of an episode: which text that is, and what its absence means."""

from types import ModuleType
from typing import ClassVar, Literal, Self

import polars as pl
from pydantic import model_validator

from pipelines.score.scorers import texts
from pipelines.score.scorers.protocol import Scorer, ScorerInputs
from pipelines.score.scorers.texts import is_blank, pattern_fault

ANSWER_STEPS = ("action", "is_active")
"""Columns of `steps` that `AnswerScorer.answers` reads."""


class AnswerScorer(Scorer):
    """Base of the scorers that look at an episode's answer."""

    helpers: ClassVar[tuple[ModuleType, ...]] = (texts,)

    answer: Literal["last_text", "last", "all"] = "last_text"
    """The last action that has text; the last action; or all actions, joined by newlines."""
    extract: str | None = None
    """Regular expression (Rust's syntax) of the part that counts: its last match, or that match's first group."""
    no_answer: float | None = None
    """Score of an episode without an answer. None: unknown."""

    @model_validator(mode="after")
    def _extracts(self) -> Self:
        if self.extract is not None and (fault := pattern_fault(self.extract)) is not None:
            msg = f"extract {self.extract!r} is no regular expression: {fault}"
            raise ValueError(msg)
        return self

    def answers(self, inputs: ScorerInputs) -> pl.DataFrame:
        """episode_id and answer, in the order of the episodes; NULL where there is none. O(characters)."""
        text = pl.col("action")
        steps = inputs.steps.filter(pl.col("is_active").fill_null(True))
        if self.answer != "last":
            steps = steps.filter(~is_blank(text))
        chosen = text.get(pl.col("step_index").arg_max())
        if self.answer == "all":
            chosen = text.sort_by("step_index").str.join("\n")
        found = steps.group_by("episode_id").agg(answer=chosen)
        answer = self.extracted(pl.col("answer"))
        if self.answer == "last":
            answer = pl.when(~is_blank(answer)).then(answer)
        return (
            inputs.episodes.select("episode_id")
            .join(found, on="episode_id", how="left", maintain_order="left")
            .select("episode_id", answer=answer)
        )

    def extracted(self, text: pl.Expr) -> pl.Expr:
        """The part of a text that counts; NULL where there is none."""
        if self.extract is None:
            return text
        last = text.str.extract_all(self.extract).list.last()
        return pl.coalesce(last.str.extract(self.extract, 1), last) if _has_group(self.extract) else last

    def no_answer_reason(self) -> str:
        """Why an answer is NULL."""
        return "the episode has no answer" if self.extract is None else "the episode has no answer that `extract` finds"


def _has_group(pattern: str) -> bool:
    """Whether a pattern has a group to extract."""
    try:
        pl.Series([""]).str.extract(pattern, 1)
    except pl.exceptions.ComputeError:
        return False
    return True
