"""Whether answers, or all actions, have the form that was asked for."""

from types import ModuleType
from typing import ClassVar, Literal

import polars as pl

from pipelines.score.scorers import format_rules, json_schema, texts
from pipelines.score.scorers.answers import AnswerScorer
from pipelines.score.scorers.format_rules import Rule
from pipelines.score.scorers.protocol import Columns, ScorerInputs
from pipelines.score.scorers.texts import is_blank

_STEPS = ("action", "is_active", "is_copied_context", "tool_calls")


class FormatValidity(AnswerScorer):
    """1 if the text obeys the rule, else 0.

    Source: the format rewards of DeepSeek-R1 (arXiv 2501.12948); as a check, any. Rules: a regular expression, JSON, a
    small JSON schema, tags. Of actions, each gets a score and the episode their mean; an action that is only a native
    tool call has no text and gets none. O(characters); JSON is decoded in Python, once for each distinct text.
    """

    name: ClassVar[str] = "format_validity"
    columns: ClassVar[Columns] = Columns(steps=_STEPS)
    helpers: ClassVar[tuple[ModuleType, ...]] = (format_rules, json_schema, texts)

    rule: Rule
    """What the text has to obey."""
    of: Literal["answer", "actions"] = "answer"
    """The answer, or every action."""

    def _score(self, inputs: ScorerInputs) -> pl.DataFrame:
        if self.of == "actions":
            return self._of_actions(inputs)
        answered = self.answers(inputs)
        value = pl.col("value")
        reason = None if self.no_answer is not None else self.no_answer_reason()
        return answered.with_columns(value=self._obeyed(answered.get_column("answer"))).select(
            "episode_id",
            value=value.fill_null(self.no_answer) if self.no_answer is not None else value,
            reason=pl.when(value.is_null()).then(pl.lit(reason, pl.String)),
        )

    def _of_actions(self, inputs: ScorerInputs) -> pl.DataFrame:
        only_calls = is_blank(pl.col("action")) & pl.col("tool_calls").is_not_null()
        counts = pl.col("is_active").fill_null(True) & ~pl.col("is_copied_context").fill_null(False)
        steps = inputs.steps.filter(counts & ~only_calls).sort("episode_id", "step_index")
        parts = steps.select(part=self.extracted(pl.col("action"))).get_column("part")
        scored = steps.select(
            "episode_id",
            "step_index",
            value=self._obeyed(parts).fill_null(0.0 if self.no_answer is None else self.no_answer),
        )
        means = scored.group_by("episode_id").agg(
            pl.col("value").mean(),
            metrics=pl.struct(actions=pl.len(), valid=(pl.col("value") == 1.0).sum()).struct.json_encode(),
        )
        episodes = inputs.episodes.join(means, on="episode_id", how="left", maintain_order="left").with_columns(
            reason=pl.when(pl.col("value").is_null()).then(pl.lit("no action has text"))
        )
        return pl.concat([episodes, scored], how="diagonal")

    def _obeyed(self, parts: pl.Series) -> pl.Series:
        return self.rule.obeyed(parts).cast(pl.Float64)
