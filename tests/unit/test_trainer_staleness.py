"""Staleness: versions behind the newest of the collecting run, by the oldest part of a step."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from lake import Lake
from lake.records import EpisodeRecord
from testkit.copies import empty_lake
from testkit.training import config, token_step
from trainer.data.plan import Plan
from trainer.data.selection import select
from trainer.data.stream import Stream
from trainer.losses import Needs

Step = tuple[int | None, int | None, list[list[int]] | None]
"""Version of the step, of its tokens, and the tokens' spans."""


def episode(task: str, version: int | None, *steps: Step) -> EpisodeRecord:
    rng = np.random.default_rng(0)
    records = []
    for of_step, of_tokens, spans in steps:
        record = token_step(rng, 2, 3, step={"policy_version": of_step}, policy_version=of_tokens)
        assert record.tokens is not None
        if spans is not None:
            record.tokens.version_spans = spans
        records.append(record)
    return EpisodeRecord(task_id=task, rollout_index=0, env_return=1.0, policy_version=version, steps=records)


def lake_of(folder: Path, **runs: list[EpisodeRecord]) -> Lake:
    lk = empty_lake(folder)
    for run, episodes in runs.items():
        with lk.job(kind="collect", run_id=run) as job:
            job.record(episodes)
    return lk


def trained(lk: Lake, **fields: Any) -> tuple[dict[tuple[str, int], int | None], dict[str, int]]:
    """(task, step) -> staleness of what is trained, and what is dropped by reason."""
    snapshot = lk.snapshot()
    selection = select(snapshot, config(**fields), Needs())
    tasks = snapshot.scan("episodes").select("episode_id", "task_id").collect()
    rows = selection.members.filter(pl.col("trained")).join(tasks, on="episode_id")
    return (
        {(task, step): behind for task, step, behind in rows.select("task_id", "step_index", "staleness").iter_rows()},
        dict(selection.drops.select("reason", "steps").iter_rows()),
    )


def test_the_oldest_version_of_a_step_counts_and_tokens_go_before_steps_before_episodes(tmp_path: Path) -> None:
    lk = lake_of(
        tmp_path,
        a=[
            episode("tokens", 1, (2, 7, None), (2, 9, None)),
            episode("spans", 1, (2, 9, [[9, 0, 0], [10, 1, 2]]), (2, 10, [[10, 0, 1], [4, 2, 2]])),
            episode("step", 1, (6, None, None), (None, None, None)),
        ],
    )
    staleness, drops = trained(lk)
    assert staleness == {
        ("tokens", 0): 3,
        ("tokens", 1): 1,
        ("spans", 0): 1,
        ("spans", 1): 6,
        ("step", 0): 4,
        ("step", 1): 9,
    }
    assert drops == {}


def test_versions_are_compared_inside_a_collecting_run_only(tmp_path: Path) -> None:
    lk = lake_of(
        tmp_path,
        a=[episode("x", 3, (None, None, None)), episode("y", 5, (None, None, None))],
        b=[episode("z", 100, (None, None, None))],
    )
    assert trained(lk)[0] == {("x", 0): 2, ("y", 0): 0, ("z", 0): 0}
    assert trained(lk, where="task_id <> 'y'")[0] == {("x", 0): 0, ("z", 0): 0}, "the newest of what is selected"


def test_steps_above_the_limit_are_dropped_and_unknown_ones_stay(tmp_path: Path) -> None:
    versions = episode("known", None, (None, 2, None), (None, 3, None), (None, 5, None))
    lk = lake_of(tmp_path, a=[versions, episode("unknown", None, (None, None, None))])
    for limit, n_remaining in ((None, 4), (3, 4), (2, 3), (0, 2)):
        selection, drops = trained(lk, max_staleness=limit)
        assert len(selection) == n_remaining
        assert drops == ({"stale": 4 - n_remaining} if n_remaining < 4 else {})
        assert selection["unknown", 0] is None


def test_unknown_versions_can_be_dropped_too(tmp_path: Path) -> None:
    lk = lake_of(tmp_path, a=[episode("known", 1, (None, None, None)), episode("unknown", None, (None, None, None))])
    assert trained(lk, max_staleness=5, unknown_staleness="drop") == ({("known", 0): 0}, {"stale": 1})
    assert len(trained(lk, unknown_staleness="drop")[0]) == 2, "without a limit nothing is too old"


def test_batches_say_how_old_each_token_is(tmp_path: Path) -> None:
    lk = lake_of(
        tmp_path, a=[episode("known", 4, (None, None, None), (None, 6, None)), episode("not", None, (None, None, None))]
    )
    for where, expected in ((None, [0.0] * 3 + [2.0] * 3 + ["nan"] * 3), ("task_id = 'not'", None)):
        snapshot, settings = lk.snapshot(), config(where=where)
        plan = Plan(select(snapshot, settings, Needs()), settings)
        with Stream(snapshot, plan, Needs(), settings) as stream:
            ((_, (batch,)),) = stream.steps()
        if expected is None:
            assert batch.staleness_N is None
        else:
            assert batch.staleness_N is not None
            staleness = ["nan" if np.isnan(value) else value for value in batch.staleness_N.tolist()]
            assert sorted(staleness, key=str) == sorted(expected, key=str)


def test_spans_are_stored_as_json(tmp_path: Path) -> None:
    """What `trainer.data.sequences` decodes."""
    lk = lake_of(tmp_path, a=[episode("t", 1, (None, 1, [[1, 0, 1], [2, 2, 2]]))])
    assert json.loads(lk.scan("tokens").collect()["version_spans"][0]) == [[1, 0, 1], [2, 2, 2]]
