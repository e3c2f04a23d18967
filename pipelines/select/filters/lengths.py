"""Filters by length, of episodes in steps, tokens and characters, of single steps in characters; and over-long ones."""

from typing import Literal

import polars as pl
from pydantic import Field

from pipelines.select.base import DROPS, Filter, Unknown, dropped, unknown_test

_UNITS = {"steps": pl.col("num_steps"), "tokens": pl.col("tokens"), "characters": pl.col("characters")}
_TOKENS = ("completion_tokens", "engine_tokens")


class Length(Filter):
    """Drops what is shorter or longer than its limits; a limit that is None does not bind.

    Steps are `episodes.num_steps`. Tokens are those the policy sampled: `episodes.completion_tokens`, else the sum of
    the engine's action tokens. Characters are those of actions, reasoning and tool calls over the active steps. A
    step's characters are those of its action text; a step outside the limits is dropped alone, its episode stays.
    """

    kind: Literal["length"] = "length"
    min_steps: int | None = Field(None, ge=0)
    """Fewest steps of an episode."""
    max_steps: int | None = Field(None, ge=0)
    """Most steps of an episode."""
    min_tokens: int | None = Field(None, ge=0)
    """Fewest sampled tokens of an episode."""
    max_tokens: int | None = Field(None, ge=0)
    """Most sampled tokens of an episode."""
    min_characters: int | None = Field(None, ge=0)
    """Fewest characters of an episode."""
    max_characters: int | None = Field(None, ge=0)
    """Most characters of an episode."""
    min_action_characters: int | None = Field(None, ge=0)
    """Fewest characters of a step's action."""
    max_action_characters: int | None = Field(None, ge=0)
    """Most characters of a step's action."""
    unknown: Unknown = "drop"
    """Episodes whose number of tokens is not known, where it is limited."""

    def facts(self) -> frozenset[str]:
        """Of the units that are limited."""
        tokens = _TOKENS if self._limits("tokens") != (None, None) else ()
        characters = ("characters",) if self._limits("characters") != (None, None) else ()
        return frozenset((*tokens, *characters))

    def drops(self, episodes: pl.DataFrame, steps: pl.LazyFrame) -> pl.DataFrame:
        """Episodes outside their limits, and steps of the others outside theirs."""
        tests = []
        if set(_TOKENS) <= set(episodes.columns):
            episodes = episodes.with_columns(tokens=pl.coalesce(*_TOKENS))
        for unit, value in _UNITS.items():
            low, high = self._limits(unit)
            if unit == "tokens" and (low, high) != (None, None):
                tests += unknown_test("tokens", self.unknown)
            tests += _outside(value, low, high, unit)
        whole = dropped(episodes, *tests) if tests else pl.DataFrame(schema=DROPS)
        low, high = self._limits("action_characters")
        if low is None and high is None:
            return whole
        left = episodes.select("episode_id").join(whole, on="episode_id", how="anti")
        return pl.concat([whole, _steps_outside(steps, left, low, high)])

    def _limits(self, unit: str) -> tuple[int | None, int | None]:
        return getattr(self, f"min_{unit}"), getattr(self, f"max_{unit}")


def _outside(value: pl.Expr, low: int | None, high: int | None, unit: str) -> list[tuple[pl.Expr, pl.Expr]]:
    """Tests of a value against its limits; the reason has both figures."""
    tests = []
    if low is not None:
        tests.append((value < low, pl.format("{} < {} {}", value, low, pl.lit(unit))))
    if high is not None:
        tests.append((value > high, pl.format("{} > {} {}", value, high, pl.lit(unit))))
    return tests


def _steps_outside(steps: pl.LazyFrame, left: pl.DataFrame, low: int | None, high: int | None) -> pl.DataFrame:
    size = pl.col("size")
    tests = _outside(size, low, high, "characters of the action")
    sized = steps.select("episode_id", "step_index", pl.col("action").str.len_chars().alias("size"))
    reason = pl.coalesce(*(pl.when(test).then(words) for test, words in tests))
    marked = sized.with_columns(reason=reason).filter(pl.col("reason").is_not_null())
    return marked.join(left.lazy(), on="episode_id", how="semi").select(list(DROPS)).collect(engine="streaming")


class OverLong(Filter):
    """Drops truncated episodes, and single steps whose generation ran into a limit (DAPO's overlong filtering).

    What a limit cut off has the score of the limit, not of the attempt.
    """

    kind: Literal["over_long"] = "over_long"
    episodes: Literal["drop", "keep"] = "drop"
    """Episodes with status truncated."""
    finish_reasons: tuple[str, ...] = ("length", "max_tokens")
    """Values of `steps.finish_reason` that mean a cut; such steps are dropped, their episodes stay. Empty: no steps."""

    def drops(self, episodes: pl.DataFrame, steps: pl.LazyFrame) -> pl.DataFrame:
        """Truncated episodes, and cut steps of the others."""
        is_cut = pl.col("status") == "truncated" if self.episodes == "drop" else pl.lit(value=False)
        reason = pl.format("truncated after {} steps", pl.col("num_steps"))
        whole = dropped(episodes, (is_cut, reason))
        if not self.finish_reasons:
            return whole
        left = episodes.lazy().select("episode_id").join(whole.lazy(), on="episode_id", how="anti")
        cut = steps.filter(pl.col("finish_reason").is_in(list(self.finish_reasons)))
        words = pl.format("generation cut: finish_reason {}", pl.col("finish_reason"))
        found = cut.select("episode_id", "step_index", words.alias("reason")).join(left, on="episode_id", how="semi")
        return pl.concat([whole, found.select(list(DROPS)).collect(engine="streaming")])
