"""Small real lakes for tests: episodes, credit and training, written through the lake's own jobs.

Everything is a function of its arguments. `build_lake` records episodes; `add_credit` and `add_training` add what a
credit job and a training job write. `sample_episodes` is the usual content: two rounds of three tasks with four
siblings each, one task mixed, one dead, one with an unscored sibling.
"""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl

from lake import Lake
from lake.records import EpisodeRecord, StepRecord
from pipelines.credit import GiGPO
from pipelines.credit.job import run_credit
from testkit.copies import copied, empty_lake

RUN = "demo"


def rollout(
    task: str,
    index: int,
    outcome: float | None,
    *,
    num_steps: int = 3,
    policy_version: int | None = 0,
    **fields: Any,
) -> EpisodeRecord:
    """An episode that starts in the state its siblings start in, passes one of two halls, and ends alone.

    The last step is rewarded with the outcome, the others with 0; an unknown outcome leaves all rewards unknown.
    """
    halls = ["You are at the gate.", f"You are in hall {index % 2}."]
    halls += [f"You are on path {index}.{n}." for n in range(2, num_steps)]
    steps = [
        StepRecord(
            state=state,
            state_role="user",
            action=f"go {'left' if (index + n) % 2 else 'right'}",
            reasoning=f"Plan {n} of rollout {index}.",
            reward=None if outcome is None else outcome * (n == num_steps - 1),
            policy_version=policy_version,
        )
        for n, state in enumerate(halls[:num_steps])
    ]
    values: dict[str, Any] = {
        "task_id": task,
        "rollout_index": index,
        "env_return": outcome,
        "environment": "maze",
        "policy": "tiny",
        "policy_version": policy_version,
        "collection_round": 0,
        "seed": 7,
        "initial_messages": [
            {"role": "system", "content": "You walk through a maze."},
            {"role": "user", "content": halls[0]},
        ],
        "final_observation": [{"role": "user", "content": "The end."}],
        "steps": steps,
    }
    return EpisodeRecord(**(values | fields))


def siblings(task: str, outcomes: Sequence[float | None], **fields: Any) -> list[EpisodeRecord]:
    """One group: a rollout per outcome."""
    return [rollout(task, index, outcome, **fields) for index, outcome in enumerate(outcomes)]


def sample_episodes() -> list[EpisodeRecord]:
    """24 episodes: rounds 0 and 1 of tasks `mixed`, `dead` and `partial` (one sibling failed and is not scored)."""
    episodes = []
    for number in (0, 1):
        shared: dict[str, Any] = {"collection_round": number, "policy_version": 10 * number}
        episodes += siblings("mixed", [1.0, 0.0, 0.0, 1.0 * number], **shared)
        episodes += siblings("dead", [1.0, 1.0, 1.0, 1.0], **shared)
        episodes += siblings("partial", [1.0, 0.0, 0.0], **shared)
        episodes.append(rollout("partial", 3, None, status="failed", error="the tool server went away", **shared))
    return episodes


def build_lake(folder: Path, episodes: Sequence[EpisodeRecord] | None = None, *, run_id: str = RUN) -> Lake:
    """A lake with episodes (`sample_episodes` unless given), recorded by one collect job."""
    if episodes is None and run_id == RUN:
        return copied("sample", lambda template: build_lake(template, sample_episodes()), folder)
    lk = empty_lake(folder)
    with lk.job(kind="collect", run_id=run_id, parameters={"environment": "maze"}) as job:
        counts = job.record(sample_episodes() if episodes is None else episodes)
        job.counts |= {"rows_out": counts.new, "rejected": counts.rejected}
    return lk


def add_credit(lk: Lake, **config: Any) -> int:
    """Advantages of every episode by GiGPO with the given configuration; the credit job's id."""
    return run_credit(lk, GiGPO(**config), force=True).job_id


def add_training(
    lk: Lake, *, updates: int = 4, episodes_per_update: int = 6, run_id: str = RUN, advantages: str | None = None
) -> int:
    """A training job that took the lake's episodes in order, with two metrics and a checkpoint; its id."""
    episodes = lk.scan("episodes").sort("collection_round", "task_id", "rollout_index").collect()
    began = datetime(2026, 1, 1, tzinfo=UTC)
    metrics, batches = [], []
    for update in range(updates):
        at = began + timedelta(seconds=update)
        metrics += [
            {"step": update, "name": "loss", "value": 1.0 / (1 + update), "at": at},
            {"step": update, "name": "kl", "value": None if update == 0 else 0.01 * update, "at": at},
        ]
        for row in episodes.slice(update * episodes_per_update, episodes_per_update).iter_rows(named=True):
            batches.append(
                {
                    "optimizer_step": update,
                    "episode_id": row["episode_id"],
                    "first_step": 0,
                    "last_step": row["num_steps"] - 1,
                    "action_tokens": 5 * row["num_steps"],
                    "epoch": 0,
                }
            )
    checkpoint = {
        "optimizer_step": updates,
        "run_id": run_id,
        "policy_version": updates,
        "uri": "checkpoints/last",
        "sha256": "0" * 64,
        "at": began + timedelta(seconds=updates),
        "data_snapshot": "{}",
        "cursor": "{}",
    }
    with lk.job(kind="train", run_id=run_id, parameters={"loss": "ppo", "advantages": advantages}) as job:
        job.write("metrics", pl.DataFrame(metrics))
        job.write("batches", pl.DataFrame(batches))
        job.write("checkpoints", pl.DataFrame([checkpoint | {"attempt": 0}]))
    return job.job_id


def full_lake(folder: Path) -> Lake:
    """A lake with episodes, one credit job and one training job."""

    def make(template: Path) -> None:
        lk = build_lake(template)
        add_credit(lk)
        add_training(lk)

    return copied("episodes, credit and training", make, folder)


def judged_lake(folder: Path) -> Lake:
    """Two chats without any reward, which `judge` scored; the first with a long reason, its time and its tokens."""
    start = datetime(2026, 1, 1, tzinfo=UTC)
    fields: dict[str, Any] = {"ended_at": start + timedelta(seconds=90), "completion_tokens": 1234, "cost": 0.5}
    records = [
        rollout("t", 0, None, started_at=start, ground_truth={"answer": "42"}, **fields),
        rollout("t", 1, None),
    ]
    records[0].steps[0].latency = 2.5
    lk = build_lake(folder, records)
    rows = lk.sql("SELECT episode_id, group_id, run_id FROM episodes ORDER BY rollout_index")
    values = {"value": [0.25, 1.0], "reason": [f"It {'really ' * 200}failed.", "Fine."]}
    named = {"scorer": pl.lit("judge"), "scorer_version": pl.lit("1"), "step_index": pl.lit(None, pl.Int32)}
    with lk.job(kind="score") as job:
        job.write("scores", rows.with_columns(*(pl.Series(*item) for item in values.items()), **named))
    return lk
