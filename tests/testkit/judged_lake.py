"""A lake with judgements of every kind, some of them superseded, and slow obvious readings of its tables."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl

import lake
from lake import Lake
from testkit.lakes import add_credit, add_training, rollout, siblings

Row = dict[str, Any]
AT = datetime(2026, 1, 1, tzinfo=UTC)


def score_rows(steps: list[Row], scorer: str, values: Iterable[float | None], **fields: Any) -> pl.DataFrame:
    """Rows for `scores`: of whole episodes where `steps` are episodes."""
    rows = [
        {
            "episode_id": row["episode_id"],
            "step_index": row.get("step_index"),
            "group_id": row["group_id"],
            "run_id": row["run_id"],
            "scorer": scorer,
            "scorer_version": "1",
            "value": value,
            "error": "no judge" if value is None else None,
            "reason": fields.get("reason"),
        }
        for row, value in zip(steps, values, strict=True)
    ]
    return pl.DataFrame(rows, infer_schema_length=None)


def selection_rows(episodes: list[Row], dropped: dict[int, str], steps: Iterable[tuple[int, int]] = ()) -> pl.DataFrame:
    """Rows for `selections`: episodes by position that a filter drops, and single steps."""
    rows_chosen: list[Row] = [
        row_keys(row) | {"step_index": None, "kept": n not in dropped, "filter": dropped.get(n)}
        for n, row in enumerate(episodes)
    ]
    rows_chosen += [row_keys(episodes[n]) | {"step_index": step, "kept": False, "filter": "long"} for n, step in steps]
    return pl.DataFrame(rows_chosen, infer_schema_length=None).with_columns(selection=pl.lit("s"))


def row_keys(row: Row) -> Row:
    return {name: row[name] for name in ("episode_id", "group_id", "run_id")}


def note(
    row: Row, author: str, label: str, value: float | None, text: str | None, second: int, step: int | None
) -> Row:
    keys = {key: row[key] for key in ("episode_id", "group_id", "run_id")}
    return keys | {
        "step_index": step,
        "annotation_id": second,
        "author": author,
        "label": label,
        "value": value,
        "text": text,
        "at": AT + timedelta(seconds=second),
    }


def judged_lake(folder: Path) -> Lake:
    """Dead, mixed and unscored groups, and judgements given twice, written over, taken back, resumed or retracted."""
    lk = lake.open(folder, create=True)
    with lk.job(kind="collect", run_id="one") as job:
        job.record(
            [
                *siblings("mixed", [1.0, 0.0, 0.0, 1.0], expected_group_size=4, policy_version=1),
                *siblings("dead", [0.5, 0.5, 0.5], expected_group_size=4),
                *siblings("alone", [2.0]),
                rollout("mixed", 4, None, status="failed", error="gone", expected_group_size=4, policy_version=2),
            ]
        )
    with lk.job(kind="collect", run_id="two") as job:
        job.record(siblings("mixed", [-1.0, None, 3.0], num_steps=4))
        job.record([rollout("extra", 0, 1.0)])
    episode_id = rows(lk, "episodes WHERE task_id = 'extra'")[0]["episode_id"]
    lk.retract([episode_id], "a test")
    add_credit(lk)
    add_credit(lk, gamma=0.5)
    add_credit(lk)
    episodes = rows(lk, "episodes ORDER BY run_id, task_id, rollout_index")
    steps = rows(lk, "steps ORDER BY run_id, group_id, episode_id, step_index")
    with lk.job(kind="score", parameters={"judge": 1}) as job:
        job.write("scores", score_rows(steps[:6], "judge", [0.1, None, 0.3, 1.4, 0.5, 0.6]))
        job.write("scores", score_rows(episodes[:4], "judge", [1.0, 1.0, 1.0, None], reason="fine"))
    with lk.job(kind="score", parameters={"judge": 1}) as job:
        job.write("scores", score_rows(steps[:2], "judge", [0.9, 0.8]))
    with lk.job(kind="score", parameters={"other": 1}) as job:
        job.write("scores", score_rows(episodes, "other", [float(n % 2) for n in range(len(episodes))]))
    with lk.job(kind="select", parameters={"n": 1}) as job:
        job.write("selections", selection_rows(episodes, {0: "old", 1: "old"}))
    with lk.job(kind="select", parameters={"n": 2}) as job:
        job.write("selections", selection_rows(episodes[:6], {1: "dead", 2: "dead", 3: "short"}, [(0, 1), (1, 0)]))
    with lk.job(kind="annotate") as job:
        notes = [
            note(episodes[0], "ann", "quality", 1.0, None, 1, None),
            note(episodes[0], "ann", "quality", 2.0, "better", 2, None),
            note(episodes[0], "bob", "quality", 3.0, None, 1, None),
            note(episodes[0], "ann", "quality", None, "at a step", 3, 0),
            note(episodes[1], "ann", "mode", None, "lost", 1, None),
            note(episodes[1], "ann", "mode", None, None, 2, None),
        ]
        job.write("annotations", pl.DataFrame(notes, infer_schema_length=None))
    add_training(lk, updates=3, episodes_per_update=4, run_id="trained")
    with lk.job(kind="train", run_id="resumed") as job:
        batches = [
            {"attempt": attempt, "optimizer_step": step, "episode_id": episodes[e]["episode_id"]}
            | {"first_step": 0, "last_step": last, "action_tokens": 1, "epoch": epoch, "token_weights": weights}
            for attempt, step, e, last, epoch, weights in [
                (0, 0, 0, 2, 0, [0.5, 0.0, 0.25]),
                (0, 1, 1, 2, 0, None),
                (0, 2, 2, 2, 0, None),
                (1, 1, 1, 1, 0, None),
                (1, 2, 0, 2, 1, None),
            ]
        ]
        for attempt in (0, 1):
            mine = [row for row in batches if row["attempt"] == attempt]
            job.write("batches", pl.DataFrame(mine).drop("attempt").with_columns(attempt=pl.lit(attempt, pl.Int32)))
    return lk


def rows(lk: Lake, source: str) -> list[Row]:
    return lk.sql(f"SELECT * FROM {source}").to_dicts()


def same(actual: Iterable[Row], expected: Iterable[Row], *key: str) -> None:
    """Equal rows in any order; floats to 12 digits."""

    def order(row: Row) -> str:
        return repr([row[name] for name in key])

    ours, right = sorted(actual, key=order), sorted(expected, key=order)
    assert [order(row) for row in ours] == [order(row) for row in right]
    for our_row, theirs in zip(ours, right, strict=True):
        for name, value in theirs.items():
            assert name in our_row
            if isinstance(value, float) and isinstance(our_row[name], float):
                assert math.isclose(our_row[name], value, rel_tol=1e-12, abs_tol=1e-12), (name, our_row, theirs)
            else:
                assert our_row[name] == value, (name, our_row, theirs)


def ended(lk: Lake) -> dict[int, datetime]:
    return {row["job_id"]: row["at"] for row in rows(lk, "jobs WHERE event = 'succeeded'")}


def newest(candidates: list[Row], when: dict[int, datetime], *key: str) -> list[Row]:
    """Rows of the newest job for each value of the key."""
    best: dict[Any, tuple[datetime, int]] = {}
    for row in candidates:
        key_of_row = tuple(row[name] for name in key)
        best[key_of_row] = max(
            best.get(key_of_row, (datetime.min.replace(tzinfo=UTC), 0)), (when[row["job_id"]], row["job_id"])
        )
    return [row for row in candidates if best[tuple(row[name] for name in key)][1] == row["job_id"]]


def deviation(values: list[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def drop_unknown(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def grouped(candidates: Iterable[Row], *key: str) -> dict[Any, list[Row]]:
    groups: dict[Any, list[Row]] = defaultdict(list)
    for row in candidates:
        groups[tuple(row[name] for name in key)].append(row)
    return groups


def consumed(lk: Lake) -> list[Row]:
    """Batches, the newest attempt winning from its first step on."""
    rows_out = []
    for _, batches in grouped(rows(lk, "batches"), "job_id").items():
        firsts: dict[int, int] = {}
        for row in batches:
            firsts[row["attempt"]] = min(firsts.get(row["attempt"], row["optimizer_step"]), row["optimizer_step"])
        for row in batches:
            later = [first for attempt, first in firsts.items() if attempt > row["attempt"]]
            if not any(first <= row["optimizer_step"] for first in later):
                rows_out.append(row)
    return rows_out
