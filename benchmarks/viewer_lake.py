"""The lake of the viewer's benchmarks: a million episodes, as many runs leave them, nothing compacted.

8 siblings, 6 steps, 12 states a group, states of 300 characters with an id of their own, tool calls, a context that
repeats the state, four runs of ten rounds together, a scorer, a GiGPO job over all steps, and a training job.
"""

import sys
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import numpy as np
import polars as pl

sys.path[:0] = [str(Path(__file__).parents[1])]

import lake  # noqa: E402
from lake import ids  # noqa: E402
from lake.storage.objects import Objects  # noqa: E402
from lake.storage.store import Store  # noqa: E402
from lake.tables import TABLES  # noqa: E402
from lake.tables.contracts import conform  # noqa: E402
from pipelines.credit import GiGPO  # noqa: E402
from pipelines.credit.job import run_credit  # noqa: E402

SIBLINGS, STEPS, STATES, CHUNK = 8, 6, 12, 5_000
TOOLS = [f"{verb}_{what}" for verb in ("get", "find", "book", "cancel") for what in ("order", "flight", "user", "bag")]
RUNS = 4
UPDATES, BATCH = 2_000, 64
METRICS = ("loss", "kl", "entropy", "grad_norm", "clip_share", "reward", "length", "lr")


def make(path: Path, episodes: int) -> None:
    """The lake, 5,000 episodes a commit."""
    lk = lake.open(path, create=True)
    for first in range(0, episodes, CHUNK):
        add_episodes(path, first, min(first + CHUNK, episodes))
    _scores(lk)
    run_credit(lk, GiGPO())
    _training(lk)


def add_episodes(path: Path, first: int, end: int) -> None:
    """One commit: the episodes with these numbers, `end` left out."""
    store, rng, number_E = Store(Objects(path)), np.random.default_rng(first), np.arange(first, end)
    facts = _episodes(rng, number_E, ids.fresh_id())
    store.append("steps", _steps(rng, facts, number_E, _sentences()))
    version, _ = store.files("episodes")
    store.append_episodes([store.stage("episodes", facts)], version)


@cache
def _sentences() -> pl.Series:
    rng = np.random.default_rng(0)
    words = np.array([f"{kind}{i}" for kind in ("room", "door", "key", "chest", "lamp", "shelf") for i in range(200)])
    return pl.Series([" ".join(row) for row in words[rng.integers(0, len(words), (20_000, 40))]])


def _episodes(rng: np.random.Generator, number_E: np.ndarray, write_id: int) -> pl.DataFrame:
    groups = [ids.key_hash("group", int(n)) for n in range(number_E[0] // SIBLINGS, number_E[-1] // SIBLINGS + 1)]
    frame = pl.DataFrame(
        {
            "episode_id": [ids.key_hash("episode", int(n)) for n in number_E],
            "group_id": np.repeat(groups, SIBLINGS)[: len(number_E)],
            "rollout_index": number_E % SIBLINGS,
            "collection_round": number_E // 100_000,
            "policy_version": number_E // 100_000,
            "env_return": (rng.random(len(number_E)) < 0.4).astype(float),
            "task_id": [str(n // SIBLINGS % 1_000) for n in number_E],
            "run_id": [f"run {n * RUNS // 1_000_000}" for n in number_E],
        }
    ).with_columns(
        pl.lit(write_id).alias("write_id"),
        pl.lit(0).alias("attempt"),
        pl.lit("completed").alias("status"),
        pl.lit(STEPS).alias("num_steps"),
        pl.lit(0).alias("content_hash"),
        pl.lit("synthetic").alias("source_format"),
        pl.lit("tiny").alias("policy"),
        pl.lit('[{"role":"system","content":"You help travellers. Look things up before you change them."}]').alias(
            "initial_messages"
        ),
    )
    return conform(frame, TABLES["episodes"])


def _steps(rng: np.random.Generator, facts: pl.DataFrame, number_E: np.ndarray, sentences: pl.Series) -> pl.DataFrame:
    n = len(number_E) * STEPS
    state_N = np.repeat(number_E // SIBLINGS, STEPS) * STATES + rng.integers(0, STATES, n)
    frame = pl.DataFrame(
        {
            "step_index": np.tile(np.arange(STEPS), len(number_E)),
            "state_number": state_N,
            "says": sentences.gather(state_N % len(sentences)),
            "tool": pl.Series(TOOLS).gather(rng.integers(0, len(TOOLS), n)),
            "reward": np.where(rng.random(n) < 0.1, rng.random(n), 0.0),
            "is_action_valid": rng.random(n) < 0.95,
            "state_is_error": rng.random(n) < 0.05,
        }
    )
    ident = pl.format("R{}X", pl.col("state_number") * 7_919)
    state = pl.format("reservation {}: {}", ident, "says")
    many = {name: facts[name].gather(np.repeat(np.arange(len(facts)), STEPS)) for name in ("episode_id", "group_id")}
    frame = frame.with_columns(**many, run_id=facts["run_id"].gather(np.repeat(np.arange(len(facts)), STEPS)))
    frame = frame.with_columns(
        state=state,
        context=pl.concat_str(pl.lit('[{"role":"tool","content":"'), state, pl.lit('"}]')),
        action=pl.format("look up {}", ident),
        tool_calls=pl.concat_str(
            pl.lit('[{"name":"'), "tool", pl.lit('","arguments":"{\\"id\\": \\"'), ident, pl.lit('\\"}"}]')
        ),
        state_hash=pl.col("state_number").hash().reinterpret(signed=True).abs(),
    ).with_columns(
        pl.lit(facts["write_id"][0]).alias("write_id"),
        pl.lit(value=True).alias("is_active"),
        pl.lit(value=True).alias("trainable"),
        pl.lit(value=False).alias("is_copied_context"),
    )
    return conform(frame.drop("state_number", "says", "tool"), TABLES["steps"])


def _scores(lk: lake.Lake) -> None:
    """A judge's score of every episode."""
    query = "SELECT run_id, group_id, episode_id, rollout_index / 8 AS value FROM episodes"
    with lk.job(kind="score", run_id="run 0") as job:
        names = {"scorer": pl.lit("judge"), "scorer_version": pl.lit("1"), "step_index": pl.lit(None, pl.Int32)}
        job.write("scores", lk.sql(query).with_columns(**names))


def _training(lk: lake.Lake) -> None:
    """A job of `UPDATES` updates of `BATCH` episodes each, drawn from the whole lake, with metrics and checkpoints."""
    rng, rows = np.random.default_rng(1), UPDATES * BATCH
    episode_E = lk.sql("SELECT episode_id FROM episodes")["episode_id"].sort().to_numpy()
    update_N = np.repeat(np.arange(UPDATES), BATCH)
    batches = pl.DataFrame({"optimizer_step": update_N, "episode_id": rng.choice(episode_E, rows)}).with_columns(
        first_step=0, last_step=STEPS - 1, action_tokens=pl.lit(40 * STEPS), epoch=0
    )
    began = pl.lit(datetime(2026, 1, 1, tzinfo=UTC))
    metrics = pl.concat(
        pl.DataFrame({"step": np.arange(UPDATES), "name": name, "value": rng.normal(size=UPDATES)}) for name in METRICS
    ).with_columns(at=began + pl.duration(seconds="step"))
    with lk.job(kind="train", run_id="run 0", parameters={"loss": "ppo"}) as job:
        job.write("metrics", metrics)
        job.write("batches", batches.unique(("optimizer_step", "episode_id")))
