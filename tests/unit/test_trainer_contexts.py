"""Hashes of contexts: equal exactly where all token ids before the action are, however they are cut into rows."""

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from lake import Lake
from lake.records import EpisodeRecord, StepRecord, TokensRecord
from testkit.pair_worlds import context_of, meeting_episodes
from testkit.training import token_lake
from trainer.data.sequences import hash_contexts, link_sequences
from trainer.data.token_rows import Portions, read_token_rows

Row = tuple[list[int], list[int]]


def episode(index: int, *rows: Row, **tokens: Any) -> EpisodeRecord:
    """Context and action of each step; `tokens` go to the last one."""
    steps = [
        StepRecord(
            state="s",
            action="a",
            tokens=TokensRecord(context_ids=context, action_ids=action, **(tokens if number == len(rows) - 1 else {})),
        )
        for number, (context, action) in enumerate(rows)
    ]
    return EpisodeRecord(task_id="t", rollout_index=index, steps=steps)


def prints(lk: Lake, *, condition: pl.Expr | None = None) -> pl.DataFrame:
    """Fingerprints by rollout_index and step_index."""
    snapshot = lk.snapshot()
    episodes = lk.scan("episodes").select("episode_id", "rollout_index", "num_steps").collect().sort("episode_id")
    members = link_sequences(pl.concat(read_token_rows(snapshot, Portions(episodes))))
    condition_used = ~pl.col("repeated") if condition is None else condition
    frame = hash_contexts(snapshot, members.with_columns(wanted=condition_used))
    return frame.join(episodes, on="episode_id").sort("rollout_index", "step_index")


def hashes(frame: pl.DataFrame, index: int, step: int, name: str = "context_hash") -> Any:
    return frame.row(by_predicate=(pl.col("rollout_index") == index) & (pl.col("step_index") == step), named=True)[name]


def test_rows_may_cut_the_same_tokens_differently(tmp_path: Path) -> None:
    appended = episode(0, ([1, 2], [3]), ([4], [5]))
    rendered = episode(1, ([9], [9]), ([1, 2, 3, 4], [5]), prefix_step_index=None)
    other_record = episode(2, ([1, 2], [7]), ([4], [5]))
    frame = prints(token_lake(tmp_path, [appended, rendered, other_record]))
    assert hashes(frame, 0, 1) == hashes(frame, 1, 1)
    assert hashes(frame, 0, 1) != hashes(frame, 2, 1), "an earlier action is part of the context"
    assert hashes(frame, 0, 0) == hashes(frame, 2, 0)
    assert frame["context_tokens"].to_list() == [2, 4, 1, 4, 2, 4]
    assert len({hashes(frame, index, 1, "action_hash") for index in range(3)}) == 1
    assert hashes(frame, 0, 0, "action_hash") != hashes(frame, 2, 0, "action_hash")


def test_where_a_context_ends_counts(tmp_path: Path) -> None:
    frame = prints(token_lake(tmp_path, [episode(0, ([1], [2, 3])), episode(1, ([1, 2], [3]))]))
    assert hashes(frame, 0, 0) != hashes(frame, 1, 0)
    assert hashes(frame, 0, 0, "action_hash") != hashes(frame, 1, 0, "action_hash")


@pytest.mark.parametrize("writes", [1, 5])
def test_against_the_records_with_forks_and_several_files(tmp_path: Path, writes: int) -> None:
    episodes = [e for seed in range(3) for e in meeting_episodes(seed, tasks=3, siblings=5)]
    for number, record in enumerate(episodes):
        record.task_id, record.rollout_index = "t", number
    frame = prints(token_lake(tmp_path, episodes, writes=writes))
    by_context: dict[tuple[int, ...], set[int]] = {}
    rows = iter(frame.iter_rows(named=True))
    for record in episodes:
        for step in range(len(record.steps)):
            row, context = next(rows), context_of(record, step)
            assert (row["rollout_index"], row["step_index"]) == (record.rollout_index, step)
            assert row["context_tokens"] == len(context)
            by_context.setdefault(tuple(context), set()).add(row["context_hash"])
    assert next(rows, None) is None
    assert all(len(keys) == 1 for keys in by_context.values())
    assert len({key for keys in by_context.values() for key in keys}) == len(by_context) > 20


def test_only_what_is_wanted_comes_back(tmp_path: Path) -> None:
    lk = token_lake(tmp_path, [episode(0, ([1], [2]), ([3], [4]), ([5], [6]))])
    hashes_of_one, everything = prints(lk, condition=pl.col("step_index") == 1), prints(lk)
    assert hashes_of_one["step_index"].to_list() == [1]
    assert hashes_of_one.equals(everything.filter(pl.col("step_index") == 1))
