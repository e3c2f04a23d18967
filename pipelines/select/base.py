"""What a filter is: a frozen configuration that says which rows it drops, and why, with the figures.

A filter sees the episodes that the filters before it left, as a narrow frame of facts, and their steps. It returns
drops only; whatever it does not name stays. Unknown is never 0: a fact that is NULL is dropped with a reason of its
own, or kept where the filter says `unknown = "keep"`.

Facts are read with SQL, so that texts never leave the database. Always there: episode_id, group_id (the group that
filters compare in: as collected, or as a credit job used it), collected_group_id, run_id, task_id, write_id, status,
num_steps, score (float64, NULL = unscored).
"""

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import polars as pl
from pydantic import BaseModel

from lake import ids
from lake.errors import DataRefusedError
from lake.judgements.credit import Credit
from lake.judgements.predicates import select_where
from lake.judgements.scores import ENV_RETURN, episode_scores
from lake.read.snapshot import Snapshot
from pipelines.credit.flags import STATE

DROPS = {"episode_id": pl.Int64, "step_index": pl.Int32, "reason": pl.String}
"""Schema of drops: step_index NULL drops the whole episode."""
Unknown = Literal["drop", "keep"]
UNKNOWN = {
    "score": "unscored",
    "tokens": "number of tokens unknown",
    "version": "policy version unknown",
    "credit_state": "no scored sibling in the credit job",
}
"""Fact -> the reason of a drop because it is NULL, which `unknown = "keep"` spares."""


class Filter(BaseModel, ABC, frozen=True, extra="forbid"):
    """Base of the filters."""

    kind: str
    """Name of the filter."""
    primary: ClassVar[str | None] = None
    """The option that `--filter KIND=VALUE` sets."""

    def facts(self) -> frozenset[str]:
        """Names of the facts it reads beyond those that every episode has, by `read_facts`."""
        return frozenset()

    @abstractmethod
    def drops(self, episodes: pl.DataFrame, steps: pl.LazyFrame) -> pl.DataFrame:
        """Rows of `DROPS`, episodes at most once: what it drops of the episodes that are left (their facts).

        The active steps that are left, of these episodes and maybe of others, have the columns of `steps`, lazily.
        """


def dropped(episodes: pl.DataFrame, *tests: tuple[pl.Expr, pl.Expr]) -> pl.DataFrame:
    """Whole episodes that a test marks (NULL is false); the first test that applies gives the reason."""
    reason = pl.coalesce(*(pl.when(test).then(words) for test, words in tests), pl.lit(None, pl.String))
    marked = episodes.select("episode_id", pl.lit(None, pl.Int32).alias("step_index"), reason.alias("reason"))
    return marked.filter(pl.col("reason").is_not_null())


def unknown_test(column: str, unknown: Unknown) -> list[tuple[pl.Expr, pl.Expr]]:
    """The test that drops episodes whose fact is NULL; none if they are kept."""
    return [(pl.col(column).is_null(), pl.lit(UNKNOWN[column]))] if unknown == "drop" else []


def shown(value: pl.Expr | float) -> pl.Expr:
    """A number in a reason, to six digits: 3, 0.5, 1.25e-7."""
    number = value if isinstance(value, pl.Expr) else pl.lit(float(value))
    return number.cast(pl.Float64).round_sig_figs(6).cast(pl.String).str.strip_suffix(".0")


def with_scores(snapshot: Snapshot, episodes: pl.DataFrame, score: str) -> pl.DataFrame:
    """Episodes with `score` (float64, NULL = unscored) in place of `env_return`: that, or a scorer's or reward's value.

    By NAME (its current version) or NAME@VERSION; UsageError if nothing of that name scored an episode.
    """
    if score == ENV_RETURN:
        return episodes.rename({ENV_RETURN: "score"})
    values = episode_scores(snapshot, score)
    return episodes.drop(ENV_RETURN).join(values, on="episode_id", how="left", maintain_order="left")


def scores_hash(episodes: pl.DataFrame) -> int:
    """Hash of the scores that were read: other scores, other result."""
    return ids.bytes_hash(episodes.select("episode_id", "score").sort("episode_id").write_csv().encode())


_KEYS = ("episode_id", "group_id", "run_id", "task_id", "write_id", "status", "num_steps", "env_return")
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
"""Tool calls without the ids that the engine made up for them: those differ where the calls do not."""
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
"""Facts that sum up an episode's active steps. characters: what the policy wrote (action, reasoning, tool calls).
oldest_version: of the weights of any step. actions, decisions: hash of the sequence of actions, and of (state, action)
pairs, NULL if a state is not known; ids of tool calls left out."""
OF_TOKENS = {"engine_tokens": "max(sampled)::BIGINT"}
"""Facts that sum up the engine's token rows; of several encodings, the one with most tokens."""
_SAMPLED = """
(
    SELECT episode_id, sum(n_action) AS sampled FROM tokens WHERE provenance = 'engine'
    GROUP BY episode_id, encoding_id
)
"""
CREDIT_STATE = "credit_state"
"""live, dead, singleton or unscored: the state of the episode's group in the credit job; NULL without one."""


def read_episodes(snapshot: Snapshot, where: str | None) -> pl.DataFrame:
    """Keys, status, length and environment return of the selected episodes; raises as `select_where`."""
    return select_where(snapshot, (*_KEYS, "group_id AS collected_group_id"), where)


def read_facts(
    snapshot: Snapshot, episodes: pl.DataFrame, needed: frozenset[str], *, everything: bool = False
) -> pl.DataFrame:
    """Episodes with the facts that filters need; `everything`: they are all episodes of the snapshot."""
    tables = {
        "episodes": OF_EPISODES,
        "(SELECT * FROM steps WHERE is_active)": OF_STEPS,
        _SAMPLED: OF_TOKENS,
    }
    # Ids instead of the predicate again: that may be a different one each time it is asked (random() < 0.1).
    inside = "" if everything else "WHERE episode_id IN (SELECT unnest($ids::BIGINT[]))"
    params = None if everything else {"ids": episodes["episode_id"].to_list()}
    for table, facts in tables.items():
        chosen = ", ".join(f"{facts[name]} AS {name}" for name in sorted(needed & facts.keys()))
        if not chosen:
            continue
        grouped = "" if table == "episodes" else "GROUP BY episode_id"
        found = snapshot.sql(f"SELECT episode_id, {chosen} FROM {table} {inside} {grouped}", params)
        episodes = episodes.join(found, on="episode_id", how="left", maintain_order="left")
    return episodes


def with_credit(snapshot: Snapshot, episodes: pl.DataFrame, credit: Credit) -> pl.DataFrame:
    """The episodes that a credit job covered, with its group_id and `credit_state`; DataRefusedError if it is none."""
    rows = f"FROM {credit.rows}"
    groups = snapshot.sql(
        f"SELECT e.episode_id, e.group_id, g.state AS {CREDIT_STATE}"
        f" FROM (SELECT episode_id, max(group_id) AS group_id {rows} GROUP BY episode_id) AS e"
        f" JOIN (SELECT group_id, {STATE} AS state {rows} GROUP BY group_id) AS g USING (group_id)"
    )
    covered = episodes.drop("group_id").join(groups, on="episode_id", how="inner").sort("episode_id")
    if covered.is_empty():
        msg = f"{credit.title} covered none of the {episodes.height} selected episodes; choose another --credit"
        raise DataRefusedError(msg)
    return covered
