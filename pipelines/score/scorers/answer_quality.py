"""How well an answer is built: structure, depth, and likeness to a reference."""

from functools import reduce
from operator import or_
from types import ModuleType
from typing import ClassVar, Literal

import polars as pl

from pipelines.score.scorers import texts
from pipelines.score.scorers.protocol import Columns, ScorerInputs
from pipelines.score.scorers.texts import ANSWER_STEPS, AnswerScorer, words

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
    and whitespace; words are looked for inside words (`since` in `sincere`). It adds 0.3 times the mean of given
    metrics: do that with a reward. It scores an empty answer 0: `no_answer = 0.0` does. One score per episode;
    O(characters).
    """

    name: ClassVar[str] = "answer_quality"
    columns: ClassVar[Columns] = Columns(episodes=("ground_truth",), steps=ANSWER_STEPS)
    helpers: ClassVar[tuple[ModuleType, ...]] = (texts,)

    reference: Literal["none", "ground_truth"] = "none"
    """Compare with the ground truth (the best of several truths; without any the score is unknown), or do not."""
    truth_path: str = ""
    """Where the reference is in the ground truth, keys and positions separated by dots; empty: the whole."""

    def reads(self) -> Columns:
        """No ground truth, unless it is the reference."""
        return self.columns if self.reference == "ground_truth" else Columns(steps=ANSWER_STEPS)

    def _score(self, inputs: ScorerInputs) -> pl.DataFrame:
        answered = self.answers(inputs).with_columns(structure=structure(), depth=depth())
        value = 0.3 * pl.col("structure") + 0.4 * pl.col("depth")
        unread, reason = pl.lit(None, pl.String), pl.lit(None, pl.String)
        parts = ["structure", "depth"]
        if self.reference == "ground_truth":
            answered = self._with_similarity(answered, inputs.episodes)
            value += 0.3 * pl.col("similarity")
            unread, reason = pl.col("truth_error"), pl.col("truth_reason")
            parts.append("similarity")
        unanswered = pl.coalesce(unread, reason).is_null() & pl.col("answer").is_null()
        no_answer = pl.lit(self.no_answer_reason() if self.no_answer is None else None, pl.String)
        return answered.select(
            "episode_id",
            value=pl.when(unanswered).then(pl.lit(self.no_answer, pl.Float64)).otherwise(value),
            reason=pl.when(unanswered).then(no_answer).otherwise(reason),
            error=unread,
            metrics=pl.when(pl.col("answer").is_not_null()).then(pl.struct(parts).struct.json_encode()),
        )

    def _with_similarity(self, answered: pl.DataFrame, episodes: pl.DataFrame) -> pl.DataFrame:
        truth = texts.truths(episodes, self.truth_path)
        pairs = truth.explode("truths", empty_as_null=True).join(answered, on="episode_id")
        similarity = pairs.group_by("episode_id").agg(similarity=jaccard(pl.col("answer"), pl.col("truths")).max())
        return answered.join(truth.drop("truths"), on="episode_id", how="left", maintain_order="left").join(
            similarity, on="episode_id", how="left", maintain_order="left"
        )


def structure() -> pl.Expr:
    """Structure of the column `answer`, 0 to 1."""
    text = pl.col("answer")
    paragraphs = text.str.split("\n\n").list.eval(pl.element().str.strip_chars() != "").list.sum()
    headings = text.str.count_matches(_HEADING)
    return (
        _step(paragraphs, 0.1, 0.3)
        + _step(headings, 0.15, 0.3)
        + 0.2 * text.str.contains(_LIST).cast(pl.Float64)
        + 0.2 * _says(text, _CONCLUSION)
    )


def depth() -> pl.Expr:
    """Depth of the column `answer`, 0 to 1."""
    text = pl.col("answer")
    length = text.str.len_chars()
    of_length = (
        pl.when(length < 100).then(0.0).when(length < 200).then(0.2).when(length <= 2000).then(0.4).otherwise(0.3)
    )
    reasons = pl.sum_horizontal(_says(text, (word,)) for word in _REASONING)
    return (
        of_length
        + 0.2 * _says(text, _EXAMPLE)
        + pl.min_horizontal(pl.lit(0.2), 0.05 * reasons)
        + 0.2 * text.str.contains(r"\d").cast(pl.Float64)
    )


def jaccard(one: pl.Expr, other: pl.Expr) -> pl.Expr:
    """Words in common over words in either, lower-cased; 0 where neither has any."""
    sets = [words(text.str.to_lowercase()) for text in (one, other)]
    union = sets[0].list.set_union(sets[1]).list.len()
    common = sets[0].list.set_intersection(sets[1]).list.len()
    return pl.when(union > 0).then(common / union).when(union == 0).then(0.0)


def _step(count: pl.Expr, one: float, more: float) -> pl.Expr:
    return pl.when(count >= 2).then(more).when(count == 1).then(one).when(count == 0).then(0.0)


def _says(text: pl.Expr, phrases: tuple[str, ...]) -> pl.Expr:
    """1.0 if one of the phrases occurs, else 0.0."""
    lower = text.str.to_lowercase()
    return reduce(or_, (lower.str.contains(phrase, literal=True) for phrase in phrases)).cast(pl.Float64)
