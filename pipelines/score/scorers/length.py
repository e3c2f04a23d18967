"""How long answers, actions or episodes are, against soft limits."""

from types import ModuleType
from typing import ClassVar, Literal, Self

import polars as pl
from pydantic import Field, model_validator

from pipelines.score.scorers import protocol, texts
from pipelines.score.scorers.protocol import Columns, ScorerInputs, divided
from pipelines.score.scorers.texts import AnswerScorer, words

_ACTIONS = ("action", "is_active", "is_copied_context")
_TOKENS = ("encoding_id", "provenance", "n_action")


class Length(AnswerScorer):
    r"""0 inside the limits, down to -1 beyond them.

    .. code-block:: text

        L <= max_length - cache            0
        L <= max_length                    (max_length - cache - L) / cache
        L >  max_length                    -1
        L <  min_length                    -(min_length - L) / min_length, in addition

    Source: the soft overlong punishment of DAPO (arXiv 2503.14476, equation 13), which counts the tokens of the
    response (there max_length 20480, cache 4096); the lower limit is ours. Tokens are the engine's (`tokens.n_action`;
    rendered ones do not count). Inactive steps and copied context count nothing. O(characters), or O(steps) for tokens.
    """

    name: ClassVar[str] = "length"
    columns: ClassVar[Columns] = Columns(steps=_ACTIONS, tokens=_TOKENS)
    helpers: ClassVar[tuple[ModuleType, ...]] = (protocol, texts)

    max_length: int = Field(ge=1)
    """Where the penalty is complete."""
    cache: int = Field(default=0, ge=0)
    """Width of the soft range below it; 0 is a hard limit."""
    min_length: int = Field(default=0, ge=0)
    """Shorter is penalised as well; 0: never."""
    unit: Literal["tokens", "characters", "words"] = "tokens"
    """What is counted."""
    of: Literal["episode", "steps", "answer"] = "episode"
    """All actions together; each action (then the episode's score is their mean); or the answer (not in tokens)."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.cache > self.max_length:
            msg = f"cache is {self.cache}, more than max_length, {self.max_length}; it is the width of the soft range"
            raise ValueError(msg)
        if self.min_length > self.max_length - self.cache:
            msg = f"min_length is {self.min_length}, above max_length - cache, {self.max_length - self.cache}"
            raise ValueError(msg)
        if self.of == "answer" and self.unit == "tokens":
            msg = 'tokens of an answer are not known apart; count characters or words, or use of="steps"'
            raise ValueError(msg)
        return self

    def reads(self) -> Columns:
        """Texts or token counts."""
        steps = _ACTIONS if self.unit != "tokens" else _ACTIONS[1:]
        return Columns(steps=steps, tokens=_TOKENS if self.unit == "tokens" else ())

    def _score(self, inputs: ScorerInputs) -> pl.DataFrame:
        if self.of == "answer":
            counted = self.answers(inputs).select("episode_id", length=self._count(pl.col("answer")))
            return self._graded(counted, pl.lit(self.no_answer_reason()))
        steps = self._steps(inputs).with_columns(value=self._penalty())
        length = pl.col("length")
        known = length.null_count() == 0
        summed = steps.group_by("episode_id").agg(
            length=pl.when(known).then(length.sum()), mean=pl.when(known).then(pl.col("value").mean())
        )
        episodes = inputs.episodes.join(summed, on="episode_id", how="left", maintain_order="left")
        why = pl.lit("no tokens of the engine are stored for some step" if self.unit == "tokens" else "no active step")
        graded = self._graded(episodes, why)
        if self.of == "episode":
            return graded
        reason = pl.when(length.is_null()).then(pl.lit("no tokens of the engine are stored for the step"))
        means = graded.with_columns(value=episodes.get_column("mean"))
        metrics = pl.struct("length").struct.json_encode()
        return pl.concat([means, steps.with_columns(reason=reason, metrics=metrics)], how="diagonal_relaxed")

    def _steps(self, inputs: ScorerInputs) -> pl.DataFrame:
        """episode_id, step_index and length of each action; NULL where it is not known."""
        counts = pl.col("is_active").fill_null(True) & ~pl.col("is_copied_context").fill_null(False)
        steps = inputs.steps.filter(counts).sort("episode_id", "step_index")
        if self.unit != "tokens":
            return steps.select("episode_id", "step_index", length=self._count(pl.col("action")))
        n_action = pl.col("n_action")
        engine = (
            inputs.tokens.filter(pl.col("provenance") == "engine")
            .group_by("episode_id", "step_index")
            .agg(length=pl.when(n_action.n_unique() == 1).then(n_action.first()).cast(pl.Int64))
        )
        keys = steps.select("episode_id", "step_index")
        return keys.join(engine, on=["episode_id", "step_index"], how="left", maintain_order="left")

    def _count(self, text: pl.Expr) -> pl.Expr:
        count = text.str.len_chars() if self.unit == "characters" else words(text).list.len()
        return count.cast(pl.Int64)

    def _graded(self, counted: pl.DataFrame, why: pl.Expr) -> pl.DataFrame:
        length = pl.col("length")
        value = self._penalty()
        return counted.select(
            "episode_id",
            value=value if self.no_answer is None or self.of != "answer" else value.fill_null(self.no_answer),
            reason=pl.when(length.is_null() & pl.lit(self.no_answer is None or self.of != "answer")).then(why),
            metrics=pl.when(length.is_not_null()).then(pl.struct("length").struct.json_encode()),
        )

    def _penalty(self) -> pl.Expr:
        """The formula over the column `length`."""
        length = pl.col("length")
        soft = self.max_length - self.cache
        over = (
            pl.when(length <= soft)
            .then(0.0)
            .when(length <= self.max_length)
            .then(divided(soft - length, max(self.cache, 1)))
            .when(length > self.max_length)
            .then(-1.0)
        )
        if self.min_length == 0:
            return over
        return over - divided((self.min_length - length).clip(lower_bound=0), self.min_length)
