"""Texts made comparable: normalisation as expressions over a whole column.

Whitespace is Unicode's White_Space, punctuation is ASCII's (Python's `string.punctuation`), as in the SQuAD script.
"""

import polars as pl
from pydantic import BaseModel, ConfigDict

_PUNCTUATION = r"[!-/:-@\[-`{-~]"
_NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"


class Normalise(BaseModel):
    """What is taken for the same text. With all five on: the SQuAD evaluation (arXiv 1606.05250), after NFKC."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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
