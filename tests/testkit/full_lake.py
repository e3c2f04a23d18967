"""A lake with rows in every table, of several writes, jobs and attempts, some of them hidden from readers.

`testkit.lakes` makes lakes as the pipelines fill them; this one is for tests of the lake layer alone.
"""

from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import polars as pl

from lake import Lake
from lake.tables import TABLES
from lake.tables.columns import Type
from testkit.copies import copied, empty_lake
from testkit.episodes import episode

AT = datetime(2026, 1, 1, tzinfo=UTC)


class OnPurposeError(Exception):
    """What a job fails with, because the test wants it to."""


def give_up() -> NoReturn:
    """Fail."""
    raise OnPurposeError


def advantages(steps: pl.DataFrame, value: float | None = 0.5) -> pl.DataFrame:
    """Rows for `advantages`, one a step."""
    sizes = {name: pl.lit(1, pl.Int32) for name in ("group_size", "anchor_size", "anchor_episodes")}
    keys = steps.select("episode_id", "step_index", "group_id", "run_id")
    return keys.with_columns(
        defined=pl.lit(value is not None), advantage=pl.lit(value, pl.Float64), flags=pl.lit(""), **sizes
    )


def scores(steps: pl.DataFrame, value: float = 1.0) -> pl.DataFrame:
    """Rows for `scores`, one a step."""
    keys = steps.select("episode_id", "step_index", "group_id", "run_id")
    return keys.with_columns(scorer=pl.lit("s"), scorer_version=pl.lit("1"), value=pl.lit(value))


def rendered(steps: pl.DataFrame) -> pl.DataFrame:
    """Rows for `tokens` as a render job makes them, one a step."""
    keys = steps.select("episode_id", "step_index", "group_id", "run_id")
    counts = {name: pl.lit(1, pl.Int32) for name in ("n_context", "n_action", "n_trained")}
    return keys.with_columns(
        encoding_id=pl.lit(7),
        provenance=pl.lit("rendered"),
        has_logprobs=pl.lit(value=False),
        prefix_length=pl.lit(0, pl.Int32),
        context_ids=pl.lit([1]),
        action_ids=pl.lit([2]),
        action_mask=pl.lit([True]),
        **counts,
    )


def batch(episode_id: int, step: int = 0) -> dict[str, Any]:
    """A row for `batches`."""
    return {
        "optimizer_step": step,
        "episode_id": episode_id,
        "first_step": 0,
        "last_step": 1,
        "action_tokens": 2,
        "epoch": 0,
    }


def metric(step: int, value: float | None = 1.0, name: str = "loss") -> dict[str, Any]:
    """A row for `metrics`."""
    return {"step": step, "name": name, "value": value, "at": AT}


def checkpoint(step: int = 1) -> dict[str, Any]:
    """A row for `checkpoints`."""
    return {
        "optimizer_step": step,
        "run_id": "run",
        "policy_version": step,
        "uri": f"checkpoints/{step}",
        "sha256": "0" * 64,
        "at": AT,
        "data_snapshot": "{}",
        "cursor": "{}",
    }


def reject(number: int) -> dict[str, Any]:
    """A row for `rejects`."""
    return {
        "reject_id": number,
        "source_uri": "file",
        "source_format": "jsonl",
        "position": number,
        "reason": "malformed",
        "message": "not JSON",
        "raw": "{",
        "at": AT,
    }


def span(episode_id: int, group_id: int) -> dict[str, Any]:
    """A row for `spans`."""
    return {
        "episode_id": episode_id,
        "group_id": group_id,
        "run_id": "run",
        "trace_id": "t",
        "span_id": "s",
        "kind": "tool",
        "name": "search",
    }


def judgements(episode_id: int, group_id: int) -> dict[str, dict[str, Any]]:
    """A row for each of the other judgement tables."""
    keys = {"episode_id": episode_id, "group_id": group_id, "run_id": "run"}
    of_group = TABLES["credit_groups"]
    counts = {c.name: 1 for c in of_group.columns if c.required and c.type is Type.SMALL_INT}
    return {
        "groupings": keys | {"grouping": "half", "collected_group_id": group_id},
        "selections": keys | {"selection": "short", "kept": False, "filter": "length", "reason": "31 > 30"},
        "ratios": keys
        | {
            "step_index": 0,
            "encoding_id": 7,
            "checkpoint": "run/1",
            "temperature": 1.0,
            "n_action": 1,
            "logprobs": [-0.5],
        },
        "credit_groups": {"group_id": group_id, "run_id": "run", "is_dead": False, "findings": ""} | counts,
        "responses": {"request_id": episode_id, "episode_id": episode_id, "model": "m", "at": AT, "answer": "0.5"},
        "annotations": keys | {"annotation_id": episode_id, "author": "ann", "label": "good", "at": AT, "text": "yes"},
    }


def add_round(lk: Lake, number: int, *, fail: bool = False) -> None:
    """Episodes, judgements of them, and training on those; the judging job may fail after it has written."""
    with lk.job(kind="collect", run_id="run", parameters={"round": number}) as job:
        job.record([episode(f"task {number}", index, tokens=True) for index in range(2)])
        long = {"log": "x" * 70_000}
        job.record(
            [episode(f"task {number}", 9, steps=1), episode(f"task {number}", 9, steps=1, attempt=1, extra=long)]
        )
        job.write("rejects", pl.DataFrame([reject(number)]))
    tasks = lk.scan("episodes").filter(pl.col("task_id") == f"task {number}").select("episode_id")
    # Sorted, as the order of a scan is no one's promise: the same episode is judged every time.
    steps = lk.scan("steps").join(tasks, on="episode_id").collect().sort("episode_id", "step_index")
    job = lk.job(kind="credit", parameters={"round": number})
    with suppress(OnPurposeError), job:
        # In two writes each: a reader must see both or none.
        for half in (steps.head(2), steps.tail(2)):
            job.write("advantages", advantages(half))
            job.write("scores", scores(half))
            job.write("tokens", rendered(half))
        first = steps.row(0, named=True)
        job.write("spans", pl.DataFrame([span(first["episode_id"], first["group_id"])]))
        for name, row in judgements(first["episode_id"], first["group_id"]).items():
            job.write(name, pl.DataFrame([row]))
        if fail:
            give_up()
    with lk.job(kind="train", run_id="run", parameters={"round": number}) as job:
        job.write("batches", pl.DataFrame([batch(steps["episode_id"][0])]))
        job.write("metrics", pl.DataFrame([metric(0), metric(1, None)]))
        job.write("checkpoints", pl.DataFrame([checkpoint()]))


def full_lake(folder: Path) -> Lake:
    """Two rounds that succeeded, and one whose judging job failed."""

    def make(template: Path) -> None:
        lk = empty_lake(template)
        add_round(lk, 0)
        add_round(lk, 1, fail=True)
        add_round(lk, 2)

    return copied("three rounds", make, folder)
