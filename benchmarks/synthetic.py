"""Synthetic lakes for the benchmarks: real tables through the lake's own writer, sizes and shapes as in practice."""

from pathlib import Path

import numpy as np
import polars as pl

import lake
from lake import ids
from lake.contracts import conform
from lake.lake import Lake
from lake.store import Store
from lake.tables import TABLES

STEPS_PER_EPISODE = 20
GROUP_SIZE = 8
_CHUNK_EPISODES = 25_000
_STATE_BYTES = 300


def steps_lake(path: Path, num_steps: int, seed: int = 0) -> Lake:
    """A lake of episodes with 20 steps, groups of 8, state texts of about 300 bytes, 30 states a group."""
    lake.open(path, create=True)
    store = Store(str(path))
    rng = np.random.default_rng(seed)
    num_episodes = num_steps // STEPS_PER_EPISODE
    pool = _texts(rng, 20_000)
    hashes = np.array([ids.text_hash(text) for text in pool.to_list()])
    for first in range(0, num_episodes, _CHUNK_EPISODES):
        n = min(_CHUNK_EPISODES, num_episodes - first)
        write_id = ids.fresh_id()
        episodes_E = np.arange(first, first + n)
        groups_E = episodes_E // GROUP_SIZE
        store.append("steps", _steps(rng, episodes_E, groups_E, write_id, pool, hashes))
        version, _ = store.files("episodes")
        store.append_episodes(_episodes(rng, episodes_E, groups_E, write_id), version)
    return lake.open(path)


def _texts(rng: np.random.Generator, n: int) -> pl.Series:
    words = np.array([f"{kind}{i}" for kind in ("room", "door", "key", "chest", "lamp", "shelf") for i in range(200)])
    length = _STATE_BYTES // 7
    return pl.Series("state", [" ".join(row) for row in words[rng.integers(0, len(words), (n, length))]])


def _steps(
    rng: np.random.Generator,
    episodes_E: np.ndarray,
    groups_E: np.ndarray,
    write_id: int,
    pool: pl.Series,
    hashes: np.ndarray,
) -> pl.DataFrame:
    n = len(episodes_E) * STEPS_PER_EPISODE
    episode_N = np.repeat(episodes_E, STEPS_PER_EPISODE)
    group_N = np.repeat(groups_E, STEPS_PER_EPISODE)
    state_N = (group_N * 30 + rng.integers(0, 30, n)) % len(pool)
    frame = pl.DataFrame(
        {
            "episode_id": episode_N,
            "step_index": np.tile(np.arange(STEPS_PER_EPISODE), len(episodes_E)),
            "group_id": group_N,
            "state_hash": hashes[state_N],
            "state": pool.gather(state_N),
            "reward": np.where(rng.random(n) < 0.1, rng.random(n), 0.0),
            "is_action_valid": rng.random(n) < 0.95,
        }
    ).with_columns(
        pl.lit("synthetic").alias("run_id"),
        pl.lit(write_id).alias("write_id"),
        pl.lit(value=True).alias("is_active"),
        pl.lit(value=True).alias("trainable"),
        pl.lit(value=False).alias("is_copied_context"),
        pl.lit("[]").alias("context"),
        pl.lit("open door").alias("action"),
    )
    return conform(frame, TABLES["steps"])


def _episodes(rng: np.random.Generator, episodes_E: np.ndarray, groups_E: np.ndarray, write_id: int) -> pl.DataFrame:
    frame = pl.DataFrame(
        {
            "episode_id": episodes_E,
            "group_id": groups_E,
            "rollout_index": episodes_E % GROUP_SIZE,
            "env_return": (rng.random(len(episodes_E)) < 0.4).astype(float),
        }
    ).with_columns(
        pl.lit("synthetic").alias("run_id"),
        pl.col("group_id").cast(pl.String).alias("task_id"),
        pl.lit(0).alias("attempt"),
        pl.lit(write_id).alias("write_id"),
        pl.lit("completed").alias("status"),
        pl.lit(STEPS_PER_EPISODE).alias("num_steps"),
        pl.lit(0).alias("content_hash"),
        pl.lit("synthetic").alias("source_format"),
    )
    return conform(frame, TABLES["episodes"])
