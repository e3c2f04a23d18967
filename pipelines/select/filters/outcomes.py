"""Filters by how an episode ended (its status, its score), and by the age of its policy."""

from typing import ClassVar, Literal, Self

import polars as pl
from pydantic import Field, model_validator

from lake.judgements.seeded_draws import draw_lots
from pipelines.select.base import Filter, Unknown, dropped, shown, unknown_test

Ending = Literal["completed", "truncated", "aborted", "failed"]


class Status(Filter):
    """Keeps episodes whose status is one of `keep`."""

    kind: Literal["status"] = "status"
    primary: ClassVar[str | None] = "keep"
    keep: tuple[Ending, ...] = Field(("completed", "truncated"), min_length=1)
    """The endings that stay."""

    def drops(self, episodes: pl.DataFrame, steps: pl.LazyFrame) -> pl.DataFrame:
        """Episodes that ended otherwise."""
        return dropped(episodes, (~pl.col("status").is_in(list(self.keep)), pl.format("status {}", pl.col("status"))))


class MinReward(Filter):
    """Keeps episodes with a score of at least `at_least` (filtered behaviour cloning, RFT, STaR)."""

    kind: Literal["min_reward"] = "min_reward"
    primary: ClassVar[str | None] = "at_least"
    at_least: float
    """Smallest score that stays."""
    unknown: Unknown = "drop"
    """Episodes that are not scored."""

    def drops(self, episodes: pl.DataFrame, steps: pl.LazyFrame) -> pl.DataFrame:
        """Episodes below it."""
        score = pl.col("score")
        reason = pl.format("score {} < {}", shown(score), shown(self.at_least))
        return dropped(episodes, *unknown_test("score", self.unknown), (score < self.at_least, reason))


class TopQ(Filter):
    """Keeps the `count` best episodes of a task or group, or the best `fraction` of them (rounded up, so never none).

    Best means the highest score; equal scores are ordered by a number drawn from (seed, episode_id). A fraction is one
    of what the filters before it left: applied again it takes a share of that share. A count is not affected by that.
    Easy tasks do not dominate: rejection sampling with a cap.
    """

    kind: Literal["top_q"] = "top_q"
    primary: ClassVar[str | None] = "fraction"
    fraction: float | None = Field(None, gt=0, le=1)
    """Share of a task's scored episodes that stays."""
    count: int | None = Field(None, ge=1)
    """Number of a task's episodes that stays."""
    within: Literal["task", "group"] = "task"
    """Whose best: of all rollouts of a task, or of the siblings of one group."""
    seed: int = 0
    """Orders episodes of equal score."""
    unknown: Unknown = "drop"
    """Episodes that are not scored. Kept ones do not count."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.fraction is None) == (self.count is None):
            msg = "give fraction or count, one of them"
            raise ValueError(msg)
        return self

    def drops(self, episodes: pl.DataFrame, steps: pl.LazyFrame) -> pl.DataFrame:
        """All but the best."""
        scored = episodes.filter(pl.col("score").is_not_null())
        lots = draw_lots(scored["episode_id"], "top_q", self.seed)
        scope = f"{self.within}_id"
        ranked = scored.with_columns(lots, size=pl.len().over(scope)).with_columns(
            place=pl.struct(-pl.col("score"), "lot", "episode_id").rank("ordinal").over(scope)
        )
        # The share of 10 at 0.3 is 3, not 4: the product may lie above by a rounding error.
        share = pl.lit(self.count) if self.fraction is None else (pl.col("size") * self.fraction - 1e-9).ceil()
        quota = pl.max_horizontal(pl.lit(1), share.cast(pl.Int64))
        reason = pl.format(
            "place {} of {} in its {} with score {}, beyond {}", pl.col("place"), pl.col("size"), pl.lit(self.within),
            shown(pl.col("score")), quota,
        )  # fmt: skip
        low = dropped(ranked, (pl.col("place") > quota, reason))
        unscored = unknown_test("score", self.unknown)
        return pl.concat([low, dropped(episodes, *unscored)]) if unscored else low


class SuccessBalance(Filter):
    """Keeps, per task, at most `max_ratio` episodes of the more frequent outcome for each of the other.

    Success is a score of at least `success`. Of the more frequent outcome max(1, floor(max_ratio x the other)) episodes
    stay, drawn from (seed, episode_id). A task with one outcome alone is left as it is, unless `one_sided = "drop"`.
    """

    kind: Literal["success_balance"] = "success_balance"
    primary: ClassVar[str | None] = "max_ratio"
    max_ratio: float = Field(1.0, ge=1)
    """Episodes of the more frequent outcome for each of the other."""
    success: float = 0.5
    """Smallest score of a success."""
    one_sided: Literal["drop", "keep"] = "keep"
    """Tasks whose episodes all succeeded, or all failed."""
    seed: int = 0
    """Decides who stays."""
    unknown: Unknown = "drop"
    """Episodes that are not scored."""

    def drops(self, episodes: pl.DataFrame, steps: pl.LazyFrame) -> pl.DataFrame:
        """Episodes beyond the balance."""
        lots = draw_lots(episodes["episode_id"], "success_balance", self.seed)
        facts = episodes.with_columns(lots, outcome=pl.col("score") >= self.success)
        outcome = pl.col("outcome")
        wins, losses = (e.sum().over("task_id") for e in (outcome, ~outcome))
        facts = facts.with_columns(
            mine=pl.when(outcome).then(wins).otherwise(losses),
            others=pl.when(outcome).then(losses).otherwise(wins),
            place=pl.struct("lot", "episode_id").rank("ordinal").over("task_id", "outcome"),
        )
        quota = pl.max_horizontal(pl.lit(1), (pl.col("others") * self.max_ratio).floor().cast(pl.Int64))
        is_known, alone = outcome.is_not_null(), pl.col("others") == 0
        named = pl.when(outcome).then(pl.lit("successes")).otherwise(pl.lit("failures"))
        over = pl.format(
            "{} {} for {} of the other, above {} to 1", pl.col("mine"), named, pl.col("others"), shown(self.max_ratio)
        )
        tests = [
            *unknown_test("score", self.unknown),
            (is_known & ~alone & (pl.col("place") > quota), over),
        ]
        if self.one_sided == "drop":
            tests.append((is_known & alone, pl.format("its task has {} only", named)))
        return dropped(facts, *tests)


class Staleness(Filter):
    """Keeps episodes at most `max_behind` policy versions behind.

    An episode is as old as its oldest part: the smallest of `episodes.policy_version` and its active steps' (weights
    may change while it runs). Versions are counted from `now`, or from the newest episode of the same scope that the
    filters before it left.
    """

    kind: Literal["staleness"] = "staleness"
    primary: ClassVar[str | None] = "max_behind"
    max_behind: int = Field(ge=0)
    """Versions behind."""
    now: int | None = None
    """The current version; None takes the newest one that is there, per scope."""
    within: Literal["run", "policy", "all"] = "run"
    """Scope in which version numbers are comparable: a run, a policy's name, everything."""
    unknown: Unknown = "drop"
    """Episodes without a known version."""

    def facts(self) -> frozenset[str]:
        """Versions, and the policy's name where that is the scope."""
        return frozenset({"policy_version", "oldest_version"} | ({"policy"} if self.within == "policy" else set()))

    def drops(self, episodes: pl.DataFrame, steps: pl.LazyFrame) -> pl.DataFrame:
        """Episodes that are too old."""
        scope = {"run": ["run_id"], "policy": ["policy"], "all": []}[self.within]
        episodes = episodes.with_columns(version=pl.min_horizontal("policy_version", "oldest_version"))
        version = pl.col("version")
        newest = version.max().over(scope) if scope else version.max()
        now = newest if self.now is None else pl.lit(self.now)
        reason = pl.format("{} > {} versions behind", now - version, self.max_behind)
        return dropped(
            episodes,
            *unknown_test("version", self.unknown),
            (now - version > self.max_behind, reason),
        )
