"""Synthetic lakes for the benchmarks: real tables through the lake's own writer, sizes and shapes as in practice."""

from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa

import lake
from lake import ids
from lake.lake import Lake
from lake.storage.objects import Objects
from lake.storage.store import Store
from lake.tables import TABLES
from lake.tables.contracts import conform

STEPS_PER_EPISODE = 20
GROUP_SIZE = 8
_CHUNK_EPISODES = 25_000
_STATE_BYTES = 300


def steps_lake(
    path: Path,
    num_steps: int,
    seed: int = 0,
    *,
    state_bytes: int = _STATE_BYTES,
    distinct: int = 20_000,
    text: bool = True,
) -> Lake:
    """A lake of episodes with 20 steps, groups of 8, 30 states a group.

    Args:
        path: where to make it.
        num_steps: of all episodes together.
        seed: decides states, rewards and outcomes.
        state_bytes: length of a state, about.
        distinct: different states in all.
        text: store the states beside their hashes.
    """
    lake.open(path, create=True)
    store = Store(Objects(path))
    rng = np.random.default_rng(seed)
    num_episodes = num_steps // STEPS_PER_EPISODE
    pool = _texts(rng, distinct, state_bytes)
    hashes = np.array([ids.text_hash(text) for text in pool.to_list()])
    pool = pool if text else pl.Series("state", [""] * len(pool))
    for first in range(0, num_episodes, _CHUNK_EPISODES):
        n = min(_CHUNK_EPISODES, num_episodes - first)
        write_id = ids.fresh_id()
        episodes_E = np.arange(first, first + n)
        groups_E = episodes_E // GROUP_SIZE
        store.append("steps", _steps(rng, episodes_E, groups_E, write_id, pool, hashes))
        version, _ = store.files("episodes")
        store.append_episodes([store.stage("episodes", _episodes(rng, episodes_E, groups_E, write_id))], version)
    return lake.open(path)


def _texts(rng: np.random.Generator, n: int, state_bytes: int) -> pl.Series:
    words = np.array([f"{kind}{i}" for kind in ("room", "door", "key", "chest", "lamp", "shelf") for i in range(200)])
    length = state_bytes // 7
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


def tokens_lake(path: Path, num_rows: int, tokens_per_row: int = 200, seed: int = 0) -> Lake:
    """A lake of engine tokens: episodes of 20 rows, half of each row's tokens context, half action, log-probabilities.

    Token ids follow a Zipf law, as text does, so that they compress as text does.
    """
    lake.open(path, create=True)
    store = Store(Objects(path))
    rng = np.random.default_rng(seed)
    num_episodes = num_rows // STEPS_PER_EPISODE
    for first in range(0, num_episodes, 2_500):
        episodes_E = np.arange(first, min(first + 2_500, num_episodes))
        groups_E = episodes_E // GROUP_SIZE
        write_id = ids.fresh_id()
        store.append("tokens", _tokens(rng, episodes_E, groups_E, write_id, tokens_per_row // 2))
        store.append("steps", _steps(rng, episodes_E, groups_E, write_id, pl.Series("state", ["s"]), np.array([0])))
        version, _ = store.files("episodes")
        store.append_episodes([store.stage("episodes", _episodes(rng, episodes_E, groups_E, write_id))], version)
    return lake.open(path)


def _tokens(
    rng: np.random.Generator, episodes_E: np.ndarray, groups_E: np.ndarray, write_id: int, half: int
) -> pl.DataFrame:
    n = len(episodes_E) * STEPS_PER_EPISODE
    lengths_N = rng.integers(half // 2, half + half // 2, n)
    offsets = np.concatenate([[0], np.cumsum(lengths_N)]).astype(np.int32)
    step_N = np.tile(np.arange(STEPS_PER_EPISODE), len(episodes_E))
    ends = np.cumsum(2 * lengths_N)
    starts_E = np.repeat(ends[::STEPS_PER_EPISODE] - 2 * lengths_N[::STEPS_PER_EPISODE], STEPS_PER_EPISODE)

    def lists(values: pa.Array) -> pl.Series:
        series = pl.from_arrow(pa.ListArray.from_arrays(pa.array(offsets), values))
        assert isinstance(series, pl.Series)
        return series

    def zipf() -> pa.Array:
        return pa.array(np.minimum(rng.zipf(1.3, offsets[-1]), 31_999).astype(np.int32))

    frame = pl.DataFrame(
        {
            "episode_id": np.repeat(episodes_E, STEPS_PER_EPISODE),
            "step_index": step_N,
            "group_id": np.repeat(groups_E, STEPS_PER_EPISODE),
            "n_context": lengths_N,
            "n_action": lengths_N,
            "n_trained": lengths_N,
            "prefix_step_index": pl.Series(step_N - 1).set(pl.Series(step_N == 0), None),
            "prefix_length": ends - 2 * lengths_N - starts_E,
            "context_ids": lists(zipf()),
            "action_ids": lists(zipf()),
            "action_logprobs": lists(pa.array(-rng.exponential(1.0, offsets[-1]).astype(np.float32))),
            "action_mask": lists(pa.array(np.ones(offsets[-1], bool))),
        }
    ).with_columns(
        pl.lit(1).alias("encoding_id"),
        pl.lit("synthetic").alias("run_id"),
        pl.lit(write_id).alias("write_id"),
        pl.lit("engine").alias("provenance"),
        pl.lit(value=True).alias("has_logprobs"),
        pl.lit(1.0).alias("temperature"),
        pl.lit(1.0).alias("top_p"),
        pl.lit(0).alias("top_k"),
        pl.lit(0.0).alias("min_p"),
        pl.lit("processed").alias("logprobs_mode"),
    )
    return conform(frame, TABLES["tokens"])


def lengths_lake(path: Path, num_episodes: int, seed: int = 0, *, chunk: int = 250_000) -> Lake:
    """A lake of episodes of one step whose token rows hold lengths and no tokens: what a plan is made of.

    Ids are spread as hashes are. A sequence has 50 to 1,500 tokens.
    """
    lake.open(path, create=True)
    store = Store(Objects(path))
    rng = np.random.default_rng(seed)
    for first in range(0, num_episodes, chunk):
        n = min(chunk, num_episodes - first)
        write_id = ids.fresh_id()
        numbers_E = np.arange(first, first + n)
        episodes_E = (ids.splitmix64(numbers_E.astype(np.uint64)) & np.uint64(ids.MASK)).astype(np.int64)
        groups_E = episodes_E[numbers_E // GROUP_SIZE * GROUP_SIZE - first]
        facts = pl.DataFrame({"episode_id": episodes_E, "group_id": groups_E, "step_index": np.zeros(n, np.int32)})
        one_of_all = {"run_id": pl.lit("synthetic"), "write_id": pl.lit(write_id)}
        steps = facts.with_columns(
            **one_of_all,
            is_active=pl.lit(value=True),
            trainable=pl.lit(value=True),
            is_copied_context=pl.lit(value=False),
            context=pl.lit("[]"),
            action=pl.lit("a"),
        )
        empty = pl.Series([[]] * n, dtype=pl.List(pl.Int32))
        tokens = facts.with_columns(
            **one_of_all,
            encoding_id=pl.lit(1),
            provenance=pl.lit("engine"),
            n_context=pl.Series(rng.integers(25, 750, n)),
            n_action=pl.Series(rng.integers(25, 750, n)),
            prefix_length=pl.lit(0),
            has_logprobs=pl.lit(value=False),
            context_ids=empty,
            action_ids=empty,
            action_mask=empty.cast(pl.List(pl.Boolean)),
        ).with_columns(n_trained="n_action")
        store.append("tokens", conform(tokens, TABLES["tokens"]))
        store.append("steps", conform(steps, TABLES["steps"]))
        episodes = _episodes(rng, numbers_E, numbers_E, write_id).with_columns(
            episode_id=pl.Series(episodes_E), group_id=pl.Series(groups_E), num_steps=pl.lit(1, pl.Int32)
        )
        version, _ = store.files("episodes")
        store.append_episodes([store.stage("episodes", conform(episodes, TABLES["episodes"]))], version)
    return lake.open(path)
