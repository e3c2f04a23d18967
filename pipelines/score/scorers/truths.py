"""What an answer is compared with: the texts of the ground truth, and the frame of a scorer that compares."""

from abc import abstractmethod
from typing import Any, ClassVar

import msgspec
import polars as pl

from pipelines.score.scorers.answers import ANSWER_STEPS, AnswerScorer
from pipelines.score.scorers.protocol import Columns, ScorerInputs
from pipelines.score.scorers.texts import Normalise


class TruthScorer(AnswerScorer):
    """Base of the scorers that compare the answer with the ground truth."""

    columns: ClassVar[Columns] = Columns(episodes=("ground_truth",), steps=ANSWER_STEPS)

    truth_path: str = ""
    """Where the truth is in the ground truth, keys and positions separated by dots; empty: the whole."""
    normalise: Normalise = Normalise()
    """What is taken for the same text."""

    def _score(self, inputs: ScorerInputs) -> pl.DataFrame:
        plain = self.normalise.apply
        answered = self.answers(inputs).with_columns(a=plain(pl.col("answer")))
        told = truths(inputs.episodes, self.truth_path)
        pairs = (
            told.drop_nulls("truths")
            .select("episode_id", truth="truths")
            .explode("truth", empty_as_null=False, keep_nulls=False)
            .with_columns(b=plain(pl.col("truth")))
            .filter(pl.col("b") != "")
            .join(answered.drop_nulls("answer"), on="episode_id")
        )
        return (
            answered.join(told, on="episode_id", how="left", maintain_order="left")
            .join(self.compared(pairs), on="episode_id", how="left", maintain_order="left")
            .select("episode_id", *self._outcome())
        )

    @abstractmethod
    def compared(self, pairs: pl.DataFrame) -> pl.DataFrame:
        """Verdicts: episode_id, value, why (what failed; NULL where there is a value), metrics of the pairs' episodes.

        Args:
            pairs: episode_id, answer, truth, and both normalised (a, b); a row per truth.
        """

    def _outcome(self) -> list[pl.Expr]:
        """value, reason, error and metrics of an episode."""
        error = pl.coalesce("truth_error", "why")
        unanswered = pl.col("answer").is_null() & pl.coalesce("truth_error", "truth_reason").is_null()
        return [
            pl.when(unanswered).then(pl.lit(self.no_answer, pl.Float64)).otherwise("value").alias("value"),
            pl.when(unanswered)
            .then(pl.lit(self.no_answer_reason() if self.no_answer is None else None, pl.String))
            .when(pl.col("value").is_null() & error.is_null())
            .then(pl.coalesce("truth_reason", pl.lit("the ground truth is empty after normalisation")))
            .alias("reason"),
            error.alias("error"),
            pl.col("metrics"),
        ]


def truths(episodes: pl.DataFrame, path: str) -> pl.DataFrame:
    """What each episode's ground truth says.

    JSON has no fixed shape, so each distinct text is decoded once in Python; siblings share theirs.

    Args:
        episodes: episode_id and ground_truth (JSON).
        path: keys and positions separated by dots; empty for the whole.

    Returns:
        episode_id, truths (list of texts, NULL if there are none), truth_reason (why there are none), truth_error (why
        they cannot be read); in the order of the episodes. Numbers and booleans are their JSON text; a list gives its
        elements, nested lists and objects left out.
    """
    distinct = episodes.get_column("ground_truth").unique().drop_nulls()
    read = [_truths(text, path) for text in distinct.to_list()]
    names = ("truths", "truth_reason", "truth_error")
    types = pl.List(pl.String), pl.String, pl.String
    known = pl.DataFrame(read, schema=list(zip(names, types, strict=True)), orient="row").with_columns(distinct)
    return (
        episodes.select("episode_id", "ground_truth")
        .join(known, on="ground_truth", how="left", maintain_order="left")
        .with_columns(
            truth_reason=pl.when(pl.col("ground_truth").is_null())
            .then(pl.lit("the episode has no ground truth"))
            .otherwise("truth_reason")
        )
        .drop("ground_truth")
    )


def _truths(text: str, path: str) -> tuple[list[str] | None, str | None, str | None]:
    """Texts, why there are none, and why they cannot be read."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None, None, "the ground truth is not JSON"
    for key in path.split(".") if path else ():
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            return None, f"the ground truth has nothing at {path!r}", None
    found = [_scalar(part) for part in (value if isinstance(value, list) else [value])]
    if texts := [part for part in found if part is not None]:
        return texts, None, None
    return None, f"the ground truth has no text at {path!r}" if path else "the ground truth has no text", None


def _scalar(value: Any) -> str | None:
    if isinstance(value, str):
        return value
    return None if value is None or isinstance(value, (dict, list)) else msgspec.json.encode(value).decode()
