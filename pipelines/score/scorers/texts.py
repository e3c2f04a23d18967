"""Texts made comparable, the answer of an episode, and the ground truth that it is compared with.

Whitespace is Unicode's White_Space, punctuation is ASCII's (Python's `string.punctuation`), as in the SQuAD script.
"""

from abc import abstractmethod
from typing import Any, ClassVar, Literal, Self

import msgspec
import polars as pl
from pydantic import BaseModel, model_validator

from pipelines.score.scorers.protocol import Columns, Scorer, ScorerInputs

_PUNCTUATION = r"[!-/:-@\[-`{-~]"
_NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"


class Normalise(BaseModel, frozen=True, extra="forbid"):
    """What is taken for the same text. With all five on: the SQuAD evaluation (arXiv 1606.05250), after NFKC."""

    unicode: bool = True
    """Unicode's compatibility form NFKC: full-width digits, ligatures and the like become plain."""
    lowercase: bool = True
    """Letters in lower case."""
    punctuation: bool = False
    """ASCII punctuation is dropped (`1,286.50` becomes `128650`)."""
    articles: bool = False
    """The words a, an, the are dropped."""
    whitespace: bool = True
    """Runs of whitespace are one space, none at the ends."""

    def apply(self, text: pl.Expr) -> pl.Expr:
        """The text, normalised in the order of the options; O(characters)."""
        if self.unicode:
            text = text.str.normalize("NFKC")
        if self.lowercase:
            text = text.str.to_lowercase()
        if self.punctuation:
            text = text.str.replace_all(_PUNCTUATION, "")
        if self.articles:
            text = text.str.replace_all(r"\b(a|an|the)\b", " ")
        if self.whitespace:
            text = text.str.replace_all(r"\s+", " ").str.strip_chars(" ")
        return text


def number(text: pl.Expr) -> pl.Expr:
    """The number a text is, `$`, `%`, commas and whitespace aside; NULL if it is none."""
    bare = text.str.replace_all(r"[\s,$%]", "")
    value = pl.when(bare.str.contains(_NUMBER)).then(bare).cast(pl.Float64, strict=False)
    return pl.when(value.is_finite()).then(value)


def words(text: pl.Expr) -> pl.Expr:
    """Lists of the text's words: whatever stands between whitespace."""
    return text.str.extract_all(r"\S+")


def is_blank(text: pl.Expr) -> pl.Expr:
    """Whether nothing but whitespace is there (NULL is blank)."""
    return text.str.strip_chars().fill_null("") == ""


def pattern_fault(pattern: str) -> str | None:
    """Why a regular expression (Rust's syntax, linear time on every text) cannot be used; None if it can."""
    try:
        pl.Series([""]).str.contains(pattern, strict=True)
    except pl.exceptions.ComputeError as error:
        return " ".join(str(error).split())
    return None


ANSWER_STEPS = ("action", "is_active")
"""Columns of `steps` that `AnswerScorer.answers` reads."""


class AnswerScorer(Scorer):
    """Base of the scorers that look at an episode's answer."""

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
    try:
        pl.Series([""]).str.extract(pattern, 1)
    except pl.exceptions.ComputeError:
        return False
    return True


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
        truth = truths(inputs.episodes, self.truth_path)
        pairs = (
            truth.drop_nulls("truths")
            .select("episode_id", truth="truths")
            .explode("truth", empty_as_null=False, keep_nulls=False)
            .with_columns(b=plain(pl.col("truth")))
            .filter(pl.col("b") != "")
            .join(answered.drop_nulls("answer"), on="episode_id")
        )
        return (
            answered.join(truth, on="episode_id", how="left", maintain_order="left")
            .join(self.compared(pairs), on="episode_id", how="left", maintain_order="left")
            .select("episode_id", *self._outcome())
        )

    @abstractmethod
    def compared(self, pairs: pl.DataFrame) -> pl.DataFrame:
        """Verdicts of (answer, truth, both normalised as a, b) pairs: episode_id, value, why not (or NULL), metrics."""

    def _outcome(self) -> list[pl.Expr]:
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
    """What each episode's ground truth (JSON) says at a path: keys and positions separated by dots.

    episode_id, truths (list of texts, NULL if there are none), truth_reason (why there are none), truth_error (why they
    cannot be read); in the order of the episodes. Numbers and booleans are their JSON text; a list gives its elements,
    nested lists and objects left out. Each distinct text is decoded once in Python; siblings share theirs.
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
