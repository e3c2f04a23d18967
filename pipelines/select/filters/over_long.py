"""Over-long: what a limit cut off. Its score is that of the limit, not of the attempt (DAPO's overlong filtering)."""

from typing import Literal

import polars as pl

from pipelines.select.base import DROPS, Filter, dropped


class OverLong(Filter):
    """Drops truncated episodes, and single steps whose generation ran into a limit."""

    kind: Literal["over_long"] = "over_long"
    """Name of the filter."""
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
