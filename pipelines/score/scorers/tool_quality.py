"""How useful a tool's result looks: the quality factors of MassGen's RewardComputer."""

from collections.abc import Callable

import polars as pl

_NOTHING = ("", "0", "0.0", "-0.0", "false", "[]", "{}")
"""JSON values that Python counts as false, as Polars' JSONPath spells them; null it does not spell at all."""


def quality(calls: pl.DataFrame) -> pl.DataFrame:
    """Calls with `quality`, 0 to 1, in the order given. O(characters); only results of search and code are parsed.

    Args:
        calls: tool and result (text, or JSON) among other columns.
    """
    tool = pl.col("tool").str.to_lowercase().fill_null("")
    judge = (
        pl.when(tool.str.contains("search", literal=True))
        .then(pl.lit("search"))
        .when(tool.str.contains("code|execute"))
        .then(pl.lit("code"))
        .when(tool.str.contains("vote|new_answer"))
        .then(pl.lit("neutral"))
        .otherwise(pl.lit("other"))
    )
    # One frame per judge: in one when/then every branch would parse every result.
    placed = calls.with_row_index("place").with_columns(judge=judge)
    rated = [placed.filter(pl.col("judge") == name).with_columns(quality=rating()) for name, rating in _RATINGS.items()]
    return pl.concat(rated).sort("place").drop("place", "judge")


def has(column: str, key: str) -> pl.Expr:
    """Whether a JSON object has something under a key: not null, false, 0 or empty."""
    value = pl.col(column).str.json_path_match(f"$.{key}")
    return (~value.is_in(_NOTHING)).fill_null(False)


def is_object(column: str) -> pl.Expr:
    """Whether a text is a JSON object."""
    return _is_json(column, "{")


def _is_json(column: str, opening: str) -> pl.Expr:
    text = pl.col(column)
    begins = text.str.strip_chars_start().str.starts_with(opening)
    return (begins & text.str.json_path_match("$").is_not_null()).fill_null(False)


def _search() -> pl.Expr:
    long = pl.col("result").str.len_chars() > 100
    return _rated(0.3, ("results", "articles"), pl.when(long).then(1.0).otherwise(0.7))


def _code() -> pl.Expr:
    faulty = pl.col("result").str.to_lowercase().str.contains("error|exception")
    return _rated(0.2, ("output", "stdout"), pl.when(faulty).then(0.3).otherwise(1.0))


def _rated(error: float, useful: tuple[str, str], text: pl.Expr) -> pl.Expr:
    """Quality of a result: nothing 0, an object by what it has, a list 0.5, a text as given."""
    result = pl.col("result")
    empty = (result == "") | result.str.replace_all(r"\s+", "").is_in(["{}", "[]"])
    found = has("result", useful[0]) | has("result", useful[1])
    of_object = pl.when(has("result", "error")).then(error).when(found).then(1.0).otherwise(0.5)
    return (
        pl.when(empty)
        .then(0.0)
        .when(is_object("result"))
        .then(of_object)
        .when(_is_json("result", "["))
        .then(0.5)
        .otherwise(text)
    )


_RATINGS: dict[str, Callable[[], pl.Expr]] = {
    "search": _search,
    "code": _code,
    "neutral": lambda: pl.lit(0.5),
    "other": lambda: pl.lit(1.0),
}
