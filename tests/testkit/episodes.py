"""Small episodes, the files they come in, and what a reader of a lake sees of them.

`episode` makes a record from a few numbers; `contents` is what two lakes with the same episodes must share;
`assert_whole` is what every snapshot must satisfy, no matter who writes or dies in the meantime.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from lake import EpisodeRecord, Snapshot, StepRecord, TokensRecord

PRIVATE = ("write_id", "job_id", "at", "source_uri")
"""Columns that say who wrote a row, when, and which of two overlapping files it came from."""
FACTS = ("episodes", "steps", "tokens", "rejects")


def episode(
    task: str = "task", index: int = 0, *, steps: int = 2, tokens: bool = False, **fields: Any
) -> EpisodeRecord:
    """A rollout whose texts name its task, number and step; with tokens that extend one another if asked."""
    return EpisodeRecord(
        task_id=task,
        rollout_index=index,
        steps=[
            StepRecord(
                state=f"{task}.{index} sees {n}",
                action=f"act {n}",
                reward=float(n),
                tokens=TokensRecord(context_ids=[n, n + 1], action_ids=[7, n], action_logprobs=[-0.5, -0.25])
                if tokens
                else None,
            )
            for n in range(steps)
        ],
        **fields,
    )


def line(record: EpisodeRecord) -> bytes:
    """A record as a line of our JSONL format."""
    return msgspec.json.encode(record) + b"\n"


def write_lines(path: Path, items: Iterable[EpisodeRecord | bytes]) -> Path:
    """A JSONL file of records, and of raw lines as they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(item if isinstance(item, bytes) else line(item) for item in items))
    return path


def contents(snapshot: Snapshot, tables: Sequence[str] = FACTS) -> dict[str, pl.DataFrame]:
    """The visible rows of the fact tables in a fixed order, without the columns that differ from run to run."""
    frames = {}
    for name in tables:
        frame = snapshot.scan(name).drop(PRIVATE, strict=False).collect()
        frames[name] = frame.sort(pl.all().cast(pl.String) if name == "rejects" else frame.columns[:3])
    return frames


def assert_same(actual: dict[str, pl.DataFrame], expected: dict[str, pl.DataFrame]) -> None:
    """Two lakes show the same."""
    for name, frame in expected.items():
        assert actual[name].equals(frame), f"{name}: {actual[name].height} rows, expected {frame.height}"


def assert_whole(snapshot: Snapshot) -> int:
    """Every visible episode has all its steps once, no step is without its episode; returns the number of episodes."""
    episodes = snapshot.scan("episodes").select("episode_id", "num_steps").collect()
    steps = snapshot.scan("steps").select("episode_id", "step_index").collect()
    assert episodes["episode_id"].is_unique().all()
    expected = episodes.select("episode_id", step_index=pl.int_ranges("num_steps", dtype=pl.Int32)).explode(
        "step_index"
    )
    order = ["episode_id", "step_index"]
    assert steps.sort(order).equals(expected.sort(order))
    tokens = snapshot.scan("tokens").filter(pl.col("provenance") == "engine").select(order).collect()
    assert not tokens.is_duplicated().any()
    assert tokens.join(steps, on=order, how="anti").is_empty()
    return episodes.height
