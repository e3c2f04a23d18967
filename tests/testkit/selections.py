"""Facts of episodes for tests of filters, and slow, obvious filters in plain Python to compare with."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import polars as pl
from hypothesis import strategies as st

from lake.judgements.selections import draw_lots
from pipelines.select import (
    Combined,
    DeadGroups,
    Dedup,
    Diversity,
    Filter,
    Length,
    MinReward,
    OverLong,
    Staleness,
    Status,
    SuccessBalance,
    TopQ,
)

Row = dict[str, Any]
Drops = set[tuple[int, int | None]]
EPISODES = {
    "episode_id": pl.Int64,
    "group_id": pl.Int64,
    "collected_group_id": pl.Int64,
    "run_id": pl.String,
    "task_id": pl.String,
    "write_id": pl.Int64,
    "status": pl.String,
    "num_steps": pl.Int32,
    "score": pl.Float64,
    "policy": pl.String,
    "policy_version": pl.Int64,
    "oldest_version": pl.Int64,
    "completion_tokens": pl.Int64,
    "engine_tokens": pl.Int64,
    "characters": pl.Int64,
    "actions": pl.String,
    "decisions": pl.String,
}
STEPS = {
    "episode_id": pl.Int64,
    "step_index": pl.Int32,
    "is_active": pl.Boolean,
    "action": pl.String,
    "finish_reason": pl.String,
}


def episode_row(episode_id: int = 1, **fields: Any) -> Row:
    """Facts of an episode that no filter minds."""
    row: Row = {
        "episode_id": episode_id,
        "group_id": 1,
        "run_id": "run",
        "task_id": "task",
        "write_id": 0,
        "status": "completed",
        "num_steps": 2,
        "score": 1.0,
        "policy": "tiny",
        "policy_version": 3,
        "oldest_version": 3,
        "completion_tokens": 20,
        "engine_tokens": None,
        "characters": 100,
        "actions": f"actions {episode_id}",
        "decisions": f"decisions {episode_id}",
    } | fields
    return {"collected_group_id": row["group_id"]} | row


def frames(episodes: Iterable[Row], steps: Iterable[Row] | None = None) -> tuple[pl.DataFrame, pl.LazyFrame]:
    """Episodes and steps as filters get them; plain active steps unless given."""
    episodes = list(episodes)
    if steps is None:
        steps = [
            {"episode_id": e["episode_id"], "step_index": n, "is_active": True, "action": "go", "finish_reason": "stop"}
            for e in episodes
            for n in range(e["num_steps"])
        ]
    facts = pl.DataFrame(episodes, schema=EPISODES | {"credit_state": pl.String} if _credited(episodes) else EPISODES)
    return facts, pl.LazyFrame(list(steps), schema=STEPS)


def _credited(episodes: list[Row]) -> bool:
    return any("credit_state" in row for row in episodes)


def pairs(drops: pl.DataFrame) -> Drops:
    """The rows a filter dropped."""
    pairs = drops.select("episode_id", "step_index").rows()
    assert len(pairs) == len(set(pairs)), "a filter dropped a row twice"
    return set(pairs)


# ---------------------------------------------------------------- the obvious filters


def expected_drops(part: Filter, episodes: list[Row], steps: list[Row]) -> Drops:
    """What a filter drops, by loops over rows."""
    return _ORACLES[type(part)](part, episodes, steps)


def _by(rows: Iterable[Row], *names: str) -> list[list[Row]]:
    groups: dict[Any, list[Row]] = defaultdict(list)
    for row in rows:
        groups[tuple(row[name] for name in names)].append(row)
    return list(groups.values())


def _drop_episodes(rows: Iterable[Row]) -> Drops:
    return {(row["episode_id"], None) for row in rows}


def _dead_groups(part: DeadGroups, episodes: list[Row], _: list[Row]) -> Drops:
    drops: Drops = set()
    for members in _by(episodes, "group_id"):
        scored = [row for row in members if row["score"] is not None]
        if part.unknown == "drop":
            drops |= _drop_episodes(row for row in members if row["score"] is None)
        values = [row["score"] for row in scored]
        is_dead = len(values) >= 2 and max(values) - min(values) <= 1e-9 * max(1, abs(max(values)))
        if is_dead or (len(values) == 1 and part.singletons == "drop"):
            drops |= _drop_episodes(members)
    return drops


def _min_reward(part: MinReward, episodes: list[Row], _: list[Row]) -> Drops:
    low = (row for row in episodes if row["score"] is not None and row["score"] < part.at_least)
    unscored = (row for row in episodes if row["score"] is None and part.unknown == "drop")
    return _drop_episodes(low) | _drop_episodes(unscored)


def _diversity(part: Diversity, episodes: list[Row], _: list[Row]) -> Drops:
    drops: Drops = set()
    for members in _by(episodes, "group_id"):
        distinct = len({row["actions"] for row in members})
        if distinct < part.min_distinct or distinct < part.min_share * len(members):
            drops |= _drop_episodes(members)
    return drops


def _length(part: Length, episodes: list[Row], steps: list[Row]) -> Drops:
    def outside(value: int, low: int | None, high: int | None) -> bool:
        return (low is not None and value < low) or (high is not None and value > high)

    drops: Drops = set()
    for row in episodes:
        tokens = row["completion_tokens"] if row["completion_tokens"] is not None else row["engine_tokens"]
        limited = part.min_tokens is not None or part.max_tokens is not None
        if (
            outside(row["num_steps"], part.min_steps, part.max_steps)
            or outside(row["characters"], part.min_characters, part.max_characters)
            or (limited and tokens is None and part.unknown == "drop")
            or (tokens is not None and outside(tokens, part.min_tokens, part.max_tokens))
        ):
            drops |= _drop_episodes([row])
    remaining = {row["episode_id"] for row in episodes} - {episode for episode, _ in drops}
    for step in steps:
        size = len(step["action"])
        if step["episode_id"] in remaining and outside(size, part.min_action_characters, part.max_action_characters):
            drops.add((step["episode_id"], step["step_index"]))
    return drops


def _over_long(part: OverLong, episodes: list[Row], steps: list[Row]) -> Drops:
    cut = [row for row in episodes if row["status"] == "truncated" and part.episodes == "drop"]
    remaining = {row["episode_id"] for row in episodes} - {row["episode_id"] for row in cut}
    return _drop_episodes(cut) | {
        (step["episode_id"], step["step_index"])
        for step in steps
        if step["episode_id"] in remaining and step["finish_reason"] in part.finish_reasons
    }


def _staleness(part: Staleness, episodes: list[Row], _: list[Row]) -> Drops:
    def version(row: Row) -> int | None:
        versions = [row[name] for name in ("policy_version", "oldest_version") if row[name] is not None]
        return min(versions) if versions else None

    drops: Drops = set()
    scope = {"run": ("run_id",), "policy": ("policy",), "all": ()}[part.within]
    for members in _by(episodes, *scope):
        versions = [v for v in map(version, members) if v is not None]
        now = part.now if part.now is not None else max(versions, default=0)
        for row in members:
            mine = version(row)
            if (mine is None and part.unknown == "drop") or (mine is not None and now - mine > part.max_behind):
                drops |= _drop_episodes([row])
    return drops


def _lot(row: Row, *seeds: str | int) -> tuple[int, int]:
    """An episode's lot, drawn alone."""
    return draw_lots(pl.Series([row["episode_id"]], dtype=pl.Int64), *seeds)[0], row["episode_id"]


def _success_balance(part: SuccessBalance, episodes: list[Row], _: list[Row]) -> Drops:
    drops: Drops = set()
    for members in _by(episodes, "task_id"):
        if part.unknown == "drop":
            drops |= _drop_episodes(row for row in members if row["score"] is None)
        wins = [row for row in members if row["score"] is not None and row["score"] >= part.success]
        losses = [row for row in members if row["score"] is not None and row["score"] < part.success]
        if not wins or not losses:
            drops |= _drop_episodes(wins + losses) if part.one_sided == "drop" else set()
            continue
        for mine, opposite in ((wins, losses), (losses, wins)):
            quota = max(1, math.floor(len(opposite) * part.max_ratio))
            drops |= _drop_episodes(sorted(mine, key=lambda row: _lot(row, "success_balance", part.seed))[quota:])
    return drops


def _top_q(part: TopQ, episodes: list[Row], _: list[Row]) -> Drops:
    drops: Drops = set()
    for members in _by(episodes, "task_id"):
        if part.unknown == "drop":
            drops |= _drop_episodes(row for row in members if row["score"] is None)
        scored = [row for row in members if row["score"] is not None]
        scored.sort(key=lambda row: (-row["score"], *_lot(row, "top_q", part.seed)))
        quota = part.count if part.fraction is None else math.ceil(len(scored) * part.fraction - 1e-9)
        drops |= _drop_episodes(scored[max(1, quota or 0) :])
    return drops


def _dedup(part: Dedup, episodes: list[Row], _: list[Row]) -> Drops:
    scope = {"group": ("group_id",), "task": ("task_id",), "all": ()}[part.within]
    drops: Drops = set()
    for members in _by(episodes, part.by, *scope):
        if members[0][part.by] is not None:
            drops |= _drop_episodes(sorted(members, key=lambda row: row["episode_id"])[1:])
    return drops


def _status(part: Status, episodes: list[Row], _: list[Row]) -> Drops:
    return _drop_episodes(row for row in episodes if row["status"] not in part.keep)


def _combined(part: Combined, episodes: list[Row], steps: list[Row]) -> Drops:
    drops_of_filters = [expected_drops(inner, episodes, steps) for inner in part.filters]

    def dropped(drops: Drops, episode_id: int, step: int | None) -> bool:
        return (episode_id, None) in drops or (episode_id, step) in drops

    agree: Callable[[Iterable[bool]], bool] = any if part.keep == "all" else all
    episodes_dropped = {
        (row["episode_id"], None)
        for row in episodes
        if agree(dropped(d, row["episode_id"], None) for d in drops_of_filters)
    }
    single = {
        (step["episode_id"], step["step_index"])
        for step in steps
        if agree(dropped(d, step["episode_id"], step["step_index"]) for d in drops_of_filters)
    }
    return episodes_dropped | {key for key in single if (key[0], None) not in episodes_dropped}


_ORACLES: dict[type[Filter], Callable[[Any, list[Row], list[Row]], Drops]] = {
    DeadGroups: _dead_groups,
    MinReward: _min_reward,
    Diversity: _diversity,
    Length: _length,
    OverLong: _over_long,
    Staleness: _staleness,
    SuccessBalance: _success_balance,
    TopQ: _top_q,
    Dedup: _dedup,
    Status: _status,
    Combined: _combined,
}


# ---------------------------------------------------------------- strategies


def _optional(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


_UNKNOWN = st.sampled_from(["drop", "keep"])
_SCORES = _optional(st.sampled_from([0.0, 0.1, 0.5, 1.0, 1.0 + 1e-12, -2.0]))
_VERSIONS = _optional(st.integers(0, 4))
_SIMPLE: list[st.SearchStrategy[Any]] = [
    st.builds(DeadGroups, singletons=_UNKNOWN, unknown=_UNKNOWN),
    st.builds(MinReward, at_least=st.sampled_from([0.0, 0.5, 1.0]), unknown=_UNKNOWN),
    st.builds(Diversity, min_distinct=st.integers(1, 3), min_share=st.sampled_from([0.0, 0.5, 1.0])),
    st.builds(
        Length,
        min_steps=_optional(st.integers(0, 2)),
        max_steps=_optional(st.integers(1, 3)),
        max_tokens=_optional(st.integers(5, 25)),
        min_characters=_optional(st.integers(0, 60)),
        max_action_characters=_optional(st.integers(0, 3)),
        unknown=_UNKNOWN,
    ),
    st.builds(OverLong, episodes=_UNKNOWN, finish_reasons=st.sampled_from([(), ("length",), ("length", "stop")])),
    st.builds(
        Staleness,
        max_behind=st.integers(0, 2),
        now=_optional(st.integers(2, 5)),
        within=st.sampled_from(["run", "policy", "all"]),
        unknown=_UNKNOWN,
    ),
    st.builds(
        SuccessBalance,
        max_ratio=st.sampled_from([1.0, 1.5, 3.0]),
        one_sided=_UNKNOWN,
        seed=st.integers(0, 2),
        unknown=_UNKNOWN,
    ),
    st.builds(TopQ, fraction=st.sampled_from([0.1, 0.3, 0.5, 1.0]), seed=st.integers(0, 2), unknown=_UNKNOWN),
    st.builds(TopQ, count=st.integers(1, 3), unknown=_UNKNOWN),
    st.builds(Dedup, by=st.sampled_from(["actions", "decisions"]), within=st.sampled_from(["group", "task", "all"])),
    st.builds(Status, keep=st.sampled_from([("completed",), ("completed", "truncated"), ("failed", "aborted")])),
]
_COMBINED = st.builds(
    Combined,
    filters=st.lists(st.one_of(_SIMPLE), min_size=1, max_size=3).map(tuple),
    keep=st.sampled_from(["all", "any"]),
)
KINDS = [*_SIMPLE, _COMBINED]
"""A strategy for each way of configuring a filter."""
FILTERS: st.SearchStrategy[Filter] = st.one_of(KINDS)
"""Filters of every kind."""


@st.composite
def collections(draw: st.DrawFn) -> tuple[list[Row], list[Row]]:
    """Up to 12 episodes of up to two tasks with two groups each, and their active steps."""
    episodes, steps = [], []
    for number in range(draw(st.integers(1, 12))):
        episode_id = draw(st.integers(0, 1 << 62)) * 16 + number
        task = draw(st.integers(0, 1))
        row = episode_row(
            episode_id % (1 << 63),
            group_id=2 * task + draw(st.integers(0, 1)),
            task_id=f"task {task}",
            run_id=draw(st.sampled_from("ab")),
            policy=draw(_optional(st.sampled_from("pq"))),
            status=draw(st.sampled_from(["completed", "truncated", "aborted", "failed"])),
            num_steps=draw(st.integers(1, 3)),
            score=draw(_SCORES),
            policy_version=draw(_VERSIONS),
            oldest_version=draw(_VERSIONS),
            completion_tokens=draw(_optional(st.integers(0, 30))),
            engine_tokens=draw(_optional(st.integers(0, 30))),
            characters=draw(st.integers(0, 100)),
            actions=draw(st.sampled_from("xyz")),
            decisions=draw(_optional(st.sampled_from("xy"))),
        )
        episodes.append(row)
        for index in range(row["num_steps"]):
            keys = {"episode_id": row["episode_id"], "step_index": index, "is_active": True}
            words = {
                "action": "g" * draw(st.integers(0, 4)),
                "finish_reason": draw(st.sampled_from(["stop", "length"])),
            }
            steps.append(keys | words)
    return episodes, steps
