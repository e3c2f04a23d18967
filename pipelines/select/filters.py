"""Filters: frozen configurations that drop episodes and steps, each drop with its reason and figures.

A filter gets the remaining episodes, as a narrow frame of facts, and their steps. It returns drops; other rows stay. An
unknown fact (NULL) is never 0: the filter drops the episode with a separate reason, or keeps it with
`unknown = "keep"`.

SQL computes the facts, so texts stay in the database. All episodes have episode_id, group_id (the collected one, or a
credit job's), collected_group_id, run_id, task_id, write_id, status, num_steps, score (float64, NULL = unscored).
`FILTERS` maps names to classes, `AnyFilter` validates a filter from a mapping.
"""

from abc import ABC, abstractmethod
from typing import Annotated, ClassVar, Literal, Self, get_args

import polars as pl
from pydantic import BaseModel, Field, model_validator

from lake import ids
from lake.errors import DataRefusedError
from lake.judgements.credit import Credit
from lake.judgements.scores import ENV_RETURN, read_episode_scores
from lake.judgements.selections import draw_lots, select_where
from lake.read.snapshot import Snapshot
from pipelines.credit.estimators.protocol import STATE

DROPS = {"episode_id": pl.Int64, "step_index": pl.Int32, "reason": pl.String}
"""Schema of drops; a NULL step_index drops the episode."""
Unknown = Literal["drop", "keep"]
UNKNOWN = {
    "score": "unscored",
    "tokens": "number of tokens unknown",
    "version": "policy version unknown",
    "credit_state": "no scored sibling in the credit job",
}
"""Fact -> reason of a drop because the fact is NULL, which `unknown = "keep"` prevents."""


class Filter(BaseModel, ABC, frozen=True, extra="forbid"):
    """Base of the filters."""

    kind: str
    """Name of the filter."""
    primary: ClassVar[str | None] = None
    """Option that `--filter KIND=VALUE` sets."""

    def facts(self) -> frozenset[str]:
        """Return the names of the facts of `read_facts` that the filter reads."""
        return frozenset()

    @abstractmethod
    def drops(self, episodes: pl.DataFrame, steps: pl.LazyFrame) -> pl.DataFrame:
        """Return the drops (rows of `DROPS`, each episode at most once) among the remaining episodes.

        `steps` are the remaining active steps, lazily; steps of other episodes may be among them.
        """


def drop_marked(episodes: pl.DataFrame, *tests: tuple[pl.Expr, pl.Expr]) -> pl.DataFrame:
    """Drop the episodes that a test marks (NULL is false); the first matching test gives the reason."""
    reason = pl.coalesce(*(pl.when(test).then(words) for test, words in tests), pl.lit(None, pl.String))
    drops = episodes.select("episode_id", pl.lit(None, pl.Int32).alias("step_index"), reason.alias("reason"))
    return drops.filter(pl.col("reason").is_not_null())


def build_unknown_tests(column: str, unknown: Unknown) -> list[tuple[pl.Expr, pl.Expr]]:
    """Return the test that drops episodes whose fact is NULL, or no test if they are kept."""
    return [(pl.col(column).is_null(), pl.lit(UNKNOWN[column]))] if unknown == "drop" else []


def format_figure(value: pl.Expr | float) -> pl.Expr:
    """Format a number in a reason to six digits: 3, 0.5, 1.25e-7."""
    number = value if isinstance(value, pl.Expr) else pl.lit(float(value))
    return number.cast(pl.Float64).round_sig_figs(6).cast(pl.String).str.strip_suffix(".0")


def add_scores(snapshot: Snapshot, episodes: pl.DataFrame, score: str) -> pl.DataFrame:
    """Replace `env_return` by `score` (float64, NULL = unscored): the return, or a scorer's or reward's value.

    `score` is NAME (current version) or NAME@VERSION; UsageError if no scorer of that name scored an episode.
    """
    if score == ENV_RETURN:
        return episodes.rename({ENV_RETURN: "score"})
    values = read_episode_scores(snapshot, score)
    return episodes.drop(ENV_RETURN).join(values, on="episode_id", how="left", maintain_order="left")


_EPISODE_COLUMNS = ("episode_id", "group_id", "run_id", "task_id", "write_id", "status", "num_steps", "env_return")
_CALLS = r"""
CASE
    WHEN tool_calls IS NULL OR tool_calls = '[]' THEN ''
    WHEN json_valid(tool_calls) AND json_type(tool_calls) = 'ARRAY' THEN list_transform(
        tool_calls::JSON[],
        lambda c : CASE WHEN json_type(c) = 'OBJECT' THEN json_merge_patch(c, '{"id": null}') ELSE c END
    )::VARCHAR
    ELSE tool_calls
END
"""
"""SQL: tool calls without their ids, which the engine draws."""
_ACTION = f"action || chr(31) || {_CALLS}"
OF_EPISODES = {"policy": "policy", "policy_version": "policy_version", "completion_tokens": "completion_tokens"}
"""Facts that are columns of `episodes`."""
OF_STEPS = {
    "characters": f"sum(length(action) + coalesce(length(reasoning), 0) + length({_CALLS}))::BIGINT",
    "oldest_version": "min(policy_version)",
    "actions": f"md5(string_agg(md5({_ACTION}), '' ORDER BY step_index))",
    "decisions": f"""
        CASE WHEN count(state_hash) = count(*)
            THEN md5(string_agg(md5(state_hash || chr(31) || {_ACTION}), '' ORDER BY step_index))
        END
    """,
}
"""Facts over an episode's active steps. characters: of action, reasoning and tool calls. oldest_version: smallest
policy version of a step. actions, decisions: hash of the sequence of actions, and of (state, action) pairs (NULL if a
state is unknown), without ids of tool calls."""
OF_TOKENS = {"engine_tokens": "max(sampled)::BIGINT"}
"""Facts over the engine's token rows, of the encoding with most tokens."""
_SAMPLED = """
(
    SELECT episode_id, sum(n_action) AS sampled FROM tokens WHERE provenance = 'engine'
    GROUP BY episode_id, encoding_id
)
"""
CREDIT_STATE = "credit_state"
"""Fact: state of the episode's group in the credit job (live, dead, singleton, unscored); NULL without a group."""


def read_episodes(snapshot: Snapshot, where: str | None) -> pl.DataFrame:
    """Read keys, status, length and environment return of the selected episodes; raises as `select_where`."""
    return select_where(snapshot, (*_EPISODE_COLUMNS, "group_id AS collected_group_id"), where)


def read_facts(
    snapshot: Snapshot, episodes: pl.DataFrame, needed: frozenset[str], *, everything: bool = False
) -> pl.DataFrame:
    """Add the facts that filters need; `everything`: these are all episodes of the snapshot."""
    tables = {
        "episodes": OF_EPISODES,
        "(SELECT * FROM steps WHERE is_active)": OF_STEPS,
        _SAMPLED: OF_TOKENS,
    }
    # Use ids instead of the predicate, which may differ at each evaluation (random() < 0.1).
    inside = "" if everything else "WHERE episode_id IN (SELECT unnest($ids::BIGINT[]))"
    params = None if everything else {"ids": episodes["episode_id"].to_list()}
    for table, facts in tables.items():
        columns = ", ".join(f"{facts[name]} AS {name}" for name in sorted(needed & facts.keys()))
        if not columns:
            continue
        group_clause = "" if table == "episodes" else "GROUP BY episode_id"
        rows = snapshot.sql(f"SELECT episode_id, {columns} FROM {table} {inside} {group_clause}", params)
        episodes = episodes.join(rows, on="episode_id", how="left", maintain_order="left")
    return episodes


def add_credit(snapshot: Snapshot, episodes: pl.DataFrame, credit: Credit) -> pl.DataFrame:
    """Keep the episodes of a credit job, with its group_id and `credit_state`; DataRefusedError without any."""
    rows = f"FROM {credit.rows}"
    groups = snapshot.sql(
        f"SELECT e.episode_id, e.group_id, g.state AS {CREDIT_STATE}"
        f" FROM (SELECT episode_id, max(group_id) AS group_id {rows} GROUP BY episode_id) AS e"
        f" JOIN (SELECT group_id, {STATE} AS state {rows} GROUP BY group_id) AS g USING (group_id)"
    )
    covered_episodes = episodes.drop("group_id").join(groups, on="episode_id", how="inner").sort("episode_id")
    if covered_episodes.is_empty():
        msg = f"{credit.title} covered none of the {episodes.height} selected episodes; choose another --credit"
        raise DataRefusedError(msg)
    return covered_episodes


_TOLERANCE = 1e-9


class DeadGroups(Filter):
    """Drops groups without signal: siblings with equal scores say nothing about the outcome.

    A group is dead if two or more siblings are scored and max - min <= 1e-9 max(1, |max|) over their scores, because
    sums of equal rewards differ in the last digit. Only the remaining scored siblings count. With a credit job, its
    groups and flags decide instead, as in training. Other names: "reward has non-zero deviation"; dynamic sampling in
    DAPO (arXiv 2503.14476).
    """

    kind: Literal["dead_groups"] = "dead_groups"
    singletons: Unknown = "drop"
    """Action for groups with one scored sibling, which have no comparison."""
    unknown: Unknown = "drop"
    """Action for unscored episodes."""

    def drops(self, episodes: pl.DataFrame, steps: pl.LazyFrame) -> pl.DataFrame:
        """Drop episodes of dead groups, lone episodes and unscored ones."""
        unscored = build_unknown_tests("score", self.unknown)
        if CREDIT_STATE in episodes.columns:
            state = pl.col(CREDIT_STATE)
            tests = [(state == "dead", pl.lit("its group is dead in the credit job"))]
            if self.singletons == "drop":
                tests.append((state == "singleton", pl.lit("the only scored one of its group in the credit job")))
            if self.unknown == "drop":
                tests.append((state == "unscored", pl.lit(UNKNOWN[CREDIT_STATE])))
            return drop_marked(episodes, *tests)
        score = pl.col("score")
        low, high, scored = (e.over("group_id") for e in (score.min(), score.max(), score.count()))
        is_dead = (scored >= 2) & (high - low <= _TOLERANCE * pl.max_horizontal(pl.lit(1.0), high.abs()))
        tests = [*unscored, (is_dead, pl.format("{} scored siblings, all at {}", scored, format_figure(high)))]
        if self.singletons == "drop":
            tests.append((scored == 1, pl.lit("1 scored sibling, nothing to compare with")))
        return drop_marked(episodes, *tests)


class Diversity(Filter):
    """Drops groups with too few distinct responses.

    A response is an episode's sequence of actions and tool calls (without call ids). Only the remaining episodes of a
    group count.
    """

    kind: Literal["diversity"] = "diversity"
    min_distinct: int = Field(2, ge=1)
    """Minimum number of distinct responses of a group."""
    min_share: float = Field(0.0, ge=0, le=1)
    """Minimum number of distinct responses per rollout of a group."""

    def facts(self) -> frozenset[str]:
        """Return the hash of the actions."""
        return frozenset({"actions"})

    def drops(self, episodes: pl.DataFrame, steps: pl.LazyFrame) -> pl.DataFrame:
        """Drop episodes of groups with too few distinct responses."""
        distinct, size = (e.over("group_id") for e in (pl.col("actions").n_unique(), pl.len()))
        summary = pl.format("{} distinct responses of {} siblings", distinct, size)
        return drop_marked(
            episodes,
            (distinct < self.min_distinct, pl.format("{}, below {}", summary, self.min_distinct)),
            (
                distinct < self.min_share * size,
                pl.format("{}, below {} of them", summary, format_figure(self.min_share)),
            ),
        )


_SCOPES = {"group": ["group_id"], "task": ["task_id"], "all": []}


class Dedup(Filter):
    """Keeps one of several equal episodes: the one with the smallest episode_id.

    `actions`: equal sequences of actions and tool calls (without call ids). `decisions`: equal sequences of states and
    actions.
    """

    kind: Literal["dedup"] = "dedup"
    by: Literal["actions", "decisions"] = "actions"
    """Compared sequence."""
    within: Literal["group", "task", "all"] = "task"
    """Scope of the search for copies."""

    def facts(self) -> frozenset[str]:
        """Return the compared hash."""
        return frozenset({self.by})

    def drops(self, episodes: pl.DataFrame, steps: pl.LazyFrame) -> pl.DataFrame:
        """Drop all but the first of equal episodes."""
        first = pl.col("episode_id").min().over([self.by, *_SCOPES[self.within]])
        copies = episodes.with_columns(first=first).filter(
            (pl.col("first") != pl.col("episode_id")) & pl.col(self.by).is_not_null()
        )
        reason = pl.format("the same {} as {}", pl.lit(self.by), pl.col("first").map_elements(ids.to_text, pl.String))
        return copies.select("episode_id", step_index=pl.lit(None, pl.Int32), reason=reason).select(list(DROPS))


_UNITS = {"steps": pl.col("num_steps"), "tokens": pl.col("tokens"), "characters": pl.col("characters")}
_TOKENS = ("completion_tokens", "engine_tokens")


class Length(Filter):
    """Drops episodes and steps outside length limits; None means no limit.

    Steps are `episodes.num_steps`. Tokens are the sampled ones: `episodes.completion_tokens`, else the sum of the
    engine's action tokens. An episode's characters are those of actions, reasoning and tool calls of its active steps.
    A step's characters are those of its action text. A step outside the limits is dropped without its episode.
    """

    kind: Literal["length"] = "length"
    min_steps: int | None = Field(None, ge=0)
    """Minimum number of steps of an episode."""
    max_steps: int | None = Field(None, ge=0)
    """Maximum number of steps of an episode."""
    min_tokens: int | None = Field(None, ge=0)
    """Minimum number of sampled tokens of an episode."""
    max_tokens: int | None = Field(None, ge=0)
    """Maximum number of sampled tokens of an episode."""
    min_characters: int | None = Field(None, ge=0)
    """Minimum number of characters of an episode."""
    max_characters: int | None = Field(None, ge=0)
    """Maximum number of characters of an episode."""
    min_action_characters: int | None = Field(None, ge=0)
    """Minimum number of characters of a step's action."""
    max_action_characters: int | None = Field(None, ge=0)
    """Maximum number of characters of a step's action."""
    unknown: Unknown = "drop"
    """Action for episodes with an unknown number of tokens, if it is limited."""

    def facts(self) -> frozenset[str]:
        """Return the facts of the limited units."""
        tokens = _TOKENS if self._limits("tokens") != (None, None) else ()
        characters = ("characters",) if self._limits("characters") != (None, None) else ()
        return frozenset((*tokens, *characters))

    def drops(self, episodes: pl.DataFrame, steps: pl.LazyFrame) -> pl.DataFrame:
        """Drop episodes outside their limits, and steps of the remaining episodes outside theirs."""
        tests = []
        if set(_TOKENS) <= set(episodes.columns):
            episodes = episodes.with_columns(tokens=pl.coalesce(*_TOKENS))
        for unit, value in _UNITS.items():
            low, high = self._limits(unit)
            if unit == "tokens" and (low, high) != (None, None):
                tests += build_unknown_tests("tokens", self.unknown)
            tests += _build_limit_tests(value, low, high, unit)
        episode_drops = drop_marked(episodes, *tests) if tests else pl.DataFrame(schema=DROPS)
        low, high = self._limits("action_characters")
        if low is None and high is None:
            return episode_drops
        remaining = episodes.select("episode_id").join(episode_drops, on="episode_id", how="anti")
        tests = _build_limit_tests(pl.col("size"), low, high, "characters of the action")
        reason = pl.coalesce(*(pl.when(test).then(words) for test, words in tests))
        action_sizes = steps.select("episode_id", "step_index", pl.col("action").str.len_chars().alias("size"))
        oversized_steps = action_sizes.with_columns(reason=reason).filter(pl.col("reason").is_not_null())
        step_drops = oversized_steps.join(remaining.lazy(), on="episode_id", how="semi").select(list(DROPS))
        return pl.concat([episode_drops, step_drops.collect(engine="streaming")])

    def _limits(self, unit: str) -> tuple[int | None, int | None]:
        return getattr(self, f"min_{unit}"), getattr(self, f"max_{unit}")


def _build_limit_tests(value: pl.Expr, low: int | None, high: int | None, unit: str) -> list[tuple[pl.Expr, pl.Expr]]:
    """Return tests of a value against its limits; the reason has both numbers."""
    tests = []
    if low is not None:
        tests.append((value < low, pl.format("{} < {} {}", value, low, pl.lit(unit))))
    if high is not None:
        tests.append((value > high, pl.format("{} > {} {}", value, high, pl.lit(unit))))
    return tests


class OverLong(Filter):
    """Drops truncated episodes, and steps whose generation reached a limit (DAPO's overlong filtering).

    The score of a truncated episode reflects the limit, not the attempt.
    """

    kind: Literal["over_long"] = "over_long"
    episodes: Literal["drop", "keep"] = "drop"
    """Action for episodes with status truncated."""
    finish_reasons: tuple[str, ...] = ("length", "max_tokens")
    """Values of `steps.finish_reason` of cut steps, which are dropped without their episodes. Empty: no steps."""

    def drops(self, episodes: pl.DataFrame, steps: pl.LazyFrame) -> pl.DataFrame:
        """Drop truncated episodes, and cut steps of the remaining episodes."""
        is_cut = pl.col("status") == "truncated" if self.episodes == "drop" else pl.lit(value=False)
        reason = pl.format("truncated after {} steps", pl.col("num_steps"))
        episode_drops = drop_marked(episodes, (is_cut, reason))
        if not self.finish_reasons:
            return episode_drops
        remaining = episodes.lazy().select("episode_id").join(episode_drops.lazy(), on="episode_id", how="anti")
        cut = steps.filter(pl.col("finish_reason").is_in(list(self.finish_reasons)))
        words = pl.format("generation cut: finish_reason {}", pl.col("finish_reason"))
        step_drops = cut.select("episode_id", "step_index", words.alias("reason")).join(
            remaining, on="episode_id", how="semi"
        )
        return pl.concat([episode_drops, step_drops.select(list(DROPS)).collect(engine="streaming")])


Ending = Literal["completed", "truncated", "aborted", "failed"]


class Status(Filter):
    """Keeps episodes whose status is one of `keep`."""

    kind: Literal["status"] = "status"
    primary: ClassVar[str | None] = "keep"
    keep: tuple[Ending, ...] = Field(("completed", "truncated"), min_length=1)
    """Statuses to keep."""

    def drops(self, episodes: pl.DataFrame, steps: pl.LazyFrame) -> pl.DataFrame:
        """Drop episodes with another status."""
        return drop_marked(
            episodes, (~pl.col("status").is_in(list(self.keep)), pl.format("status {}", pl.col("status")))
        )


class MinReward(Filter):
    """Keeps episodes with a score of at least `at_least` (filtered behaviour cloning, RFT, STaR)."""

    kind: Literal["min_reward"] = "min_reward"
    primary: ClassVar[str | None] = "at_least"
    at_least: float
    """Minimum score."""
    unknown: Unknown = "drop"
    """Action for unscored episodes."""

    def drops(self, episodes: pl.DataFrame, steps: pl.LazyFrame) -> pl.DataFrame:
        """Drop episodes below the minimum."""
        score = pl.col("score")
        reason = pl.format("score {} < {}", format_figure(score), format_figure(self.at_least))
        return drop_marked(episodes, *build_unknown_tests("score", self.unknown), (score < self.at_least, reason))


class TopQ(Filter):
    """Keeps the `count` best episodes of a task or group, or the best `fraction` (rounded up, so at least one).

    Best means the highest score; a draw from (seed, episode_id) orders equal scores. A fraction refers to the remaining
    episodes, so a second application takes a share of the share; a count does not change. This is rejection sampling
    with a cap, so easy tasks do not dominate.
    """

    kind: Literal["top_q"] = "top_q"
    primary: ClassVar[str | None] = "fraction"
    fraction: float | None = Field(None, gt=0, le=1)
    """Share of a task's scored episodes to keep."""
    count: int | None = Field(None, ge=1)
    """Number of a task's episodes to keep."""
    within: Literal["task", "group"] = "task"
    """Scope of the ranking: all rollouts of a task, or the siblings of a group."""
    seed: int = 0
    """Seed of the order of equal scores."""
    unknown: Unknown = "drop"
    """Action for unscored episodes. Kept ones do not count."""

    @model_validator(mode="after")
    def _check_limit(self) -> Self:
        if (self.fraction is None) == (self.count is None):
            msg = "set either fraction or count"
            raise ValueError(msg)
        return self

    def drops(self, episodes: pl.DataFrame, steps: pl.LazyFrame) -> pl.DataFrame:
        """Drop all but the best."""
        scored = episodes.filter(pl.col("score").is_not_null())
        lots = draw_lots(scored["episode_id"], "top_q", self.seed)
        scope = f"{self.within}_id"
        ranks = scored.with_columns(lots, size=pl.len().over(scope)).with_columns(
            place=pl.struct(-pl.col("score"), "lot", "episode_id").rank("ordinal").over(scope)
        )
        # 0.3 of 10 is 3, not 4: subtract the rounding error of the product.
        share = pl.lit(self.count) if self.fraction is None else (pl.col("size") * self.fraction - 1e-9).ceil()
        quota = pl.max_horizontal(pl.lit(1), share.cast(pl.Int64))
        reason = pl.format(
            "place {} of {} in its {} with score {}, beyond {}", pl.col("place"), pl.col("size"), pl.lit(self.within),
            format_figure(pl.col("score")), quota,
        )  # fmt: skip
        low = drop_marked(ranks, (pl.col("place") > quota, reason))
        unscored = build_unknown_tests("score", self.unknown)
        return pl.concat([low, drop_marked(episodes, *unscored)]) if unscored else low


class SuccessBalance(Filter):
    """Keeps, per task, at most `max_ratio` episodes of the more frequent outcome per episode of the rarer one.

    Success is a score of at least `success`. Of the more frequent outcome max(1, floor(max_ratio x rarer)) episodes
    stay, drawn from (seed, episode_id). A task with one outcome stays unchanged, unless `one_sided = "drop"`.
    """

    kind: Literal["success_balance"] = "success_balance"
    primary: ClassVar[str | None] = "max_ratio"
    max_ratio: float = Field(1.0, ge=1)
    """Maximum number of episodes of the more frequent outcome per episode of the rarer one."""
    success: float = 0.5
    """Minimum score of a success."""
    one_sided: Literal["drop", "keep"] = "keep"
    """Action for tasks whose episodes all succeeded or all failed."""
    seed: int = 0
    """Seed of the draw."""
    unknown: Unknown = "drop"
    """Action for unscored episodes."""

    def drops(self, episodes: pl.DataFrame, steps: pl.LazyFrame) -> pl.DataFrame:
        """Drop episodes beyond the ratio."""
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
        outcome_name = pl.when(outcome).then(pl.lit("successes")).otherwise(pl.lit("failures"))
        over = pl.format(
            "{} {} for {} of the other, above {} to 1",
            pl.col("mine"),
            outcome_name,
            pl.col("others"),
            format_figure(self.max_ratio),
        )
        tests = [
            *build_unknown_tests("score", self.unknown),
            (is_known & ~alone & (pl.col("place") > quota), over),
        ]
        if self.one_sided == "drop":
            tests.append((is_known & alone, pl.format("its task has {} only", outcome_name)))
        return drop_marked(facts, *tests)


class Staleness(Filter):
    """Keeps episodes at most `max_behind` policy versions behind.

    An episode's version is the smallest of `episodes.policy_version` and of its active steps, because weights may
    change while it runs. The reference version is `now`, or that of the newest remaining episode of the scope.
    """

    kind: Literal["staleness"] = "staleness"
    primary: ClassVar[str | None] = "max_behind"
    max_behind: int = Field(ge=0)
    """Maximum number of versions behind."""
    now: int | None = None
    """Current version; None takes the newest one of the scope."""
    within: Literal["run", "policy", "all"] = "run"
    """Scope of comparable version numbers: a run, a policy's name, everything."""
    unknown: Unknown = "drop"
    """Action for episodes of unknown version."""

    def facts(self) -> frozenset[str]:
        """Return the versions, and the policy's name for that scope."""
        return frozenset({"policy_version", "oldest_version"} | ({"policy"} if self.within == "policy" else set()))

    def drops(self, episodes: pl.DataFrame, steps: pl.LazyFrame) -> pl.DataFrame:
        """Drop episodes that are too old."""
        scope = {"run": ["run_id"], "policy": ["policy"], "all": []}[self.within]
        episodes = episodes.with_columns(version=pl.min_horizontal("policy_version", "oldest_version"))
        version = pl.col("version")
        newest = version.max().over(scope) if scope else version.max()
        now = newest if self.now is None else pl.lit(self.now)
        reason = pl.format("{} > {} versions behind", now - version, self.max_behind)
        return drop_marked(
            episodes,
            *build_unknown_tests("version", self.unknown),
            (now - version > self.max_behind, reason),
        )


SimpleFilter = (
    DeadGroups | MinReward | Diversity | Length | OverLong | Staleness | SuccessBalance | TopQ | Dedup | Status
)
_KEYS = ["episode_id", "step_index"]


class Combined(Filter):
    """Applies all filters to the same input.

    `all`: a row stays if all filters keep it. `any`: a row stays if one filter keeps it; a step is dropped if each
    filter drops it or its episode. A drop has the reasons of all filters that dropped the row.
    """

    kind: Literal["combined"] = "combined"
    filters: tuple[Annotated[SimpleFilter, Field(discriminator="kind")], ...] = Field(min_length=1)
    """Filters to combine."""
    keep: Literal["all", "any"] = "all"
    """Filters that must keep a row: all, or any of them."""

    def facts(self) -> frozenset[str]:
        """Return the facts of all filters."""
        return frozenset[str]().union(*(member.facts() for member in self.filters))

    def drops(self, episodes: pl.DataFrame, steps: pl.LazyFrame) -> pl.DataFrame:
        """Combine the drops of the filters."""
        drops = pl.concat(
            member.drops(episodes, steps).with_columns(
                pl.format("{}: {}", pl.lit(member.kind), pl.col("reason")).alias("reason"), part=pl.lit(number)
            )
            for number, member in enumerate(self.filters)
        )
        episode_drops = _merge_drops(drops.filter(pl.col("step_index").is_null()))
        single = drops.filter(pl.col("step_index").is_not_null())
        if self.keep == "any":
            # A filter that drops an episode drops its steps too.
            inherited = drops.filter(pl.col("step_index").is_null()).drop("step_index")
            step_keys = single.select(_KEYS).unique()
            single = pl.concat([single, step_keys.join(inherited, on="episode_id").select(single.columns)])
            episode_drops = episode_drops.filter(pl.col("parts") == len(self.filters))
        steps_dropped = _merge_drops(single)
        if self.keep == "any":
            steps_dropped = steps_dropped.filter(pl.col("parts") == len(self.filters))
        steps_dropped = steps_dropped.join(episode_drops, on="episode_id", how="anti")
        return pl.concat([episode_drops, steps_dropped]).select(list(DROPS))


def _merge_drops(rows: pl.DataFrame) -> pl.DataFrame:
    """Join the reasons of each key and count its filters."""
    return rows.group_by(_KEYS).agg(
        reason=pl.col("reason").sort_by("part").str.join("; "), parts=pl.col("part").n_unique()
    )


AnyFilter = Annotated[SimpleFilter | Combined, Field(discriminator="kind")]
FILTERS: dict[str, type[Filter]] = {
    cls.model_fields["kind"].default: cls for cls in (*get_args(SimpleFilter), Combined)
}
"""Name -> class, in the order of the documentation."""
