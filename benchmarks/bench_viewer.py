"""Pages and searches of the viewer over a million episodes and six million steps, uncompacted: CPU and wall seconds.

    python benchmarks/bench_viewer.py [--lake LAKE] [--episodes 1000000]

Makes the lake, unless an earlier call did: 8 siblings, 6 steps, 12 states a group, states of 300 characters with an id
of their own, tool calls, a context that repeats the state, a scorer, four runs. Every question is asked of a new
reader, as after Refresh (cold), and again of the same one (warm); answers that Streamlit remembers are not counted.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import lake  # noqa: E402
from lake import ids  # noqa: E402
from lake.search import place  # noqa: E402
from lake.storage.objects import Objects  # noqa: E402
from lake.storage.store import Store  # noqa: E402
from lake.tables import TABLES  # noqa: E402
from lake.tables.contracts import conform  # noqa: E402
from viewer.pinned import Reader  # noqa: E402
from viewer.queries import Sort, Window, episodes, facets  # noqa: E402
from viewer.queries.episodes import FACETS, EpisodeFilter  # noqa: E402

SIBLINGS, STEPS, STATES, CHUNK = 8, 6, 12, 5_000
TOOLS = [f"{verb}_{what}" for verb in ("get", "find", "book", "cancel") for what in ("order", "flight", "user", "bag")]
RUNS = 4


def make(path: Path, episodes: int) -> None:
    """The lake, 5,000 episodes a commit."""
    lake.open(path, create=True)
    store, rng = Store(Objects(path)), np.random.default_rng(0)
    words = np.array([f"{kind}{i}" for kind in ("room", "door", "key", "chest", "lamp", "shelf") for i in range(200)])
    sentences = pl.Series([" ".join(row) for row in words[rng.integers(0, len(words), (20_000, 40))]])
    for first in range(0, episodes, CHUNK):
        number_E = np.arange(first, min(first + CHUNK, episodes))
        write_id = ids.fresh_id()
        facts = _episodes(rng, number_E, write_id)
        store.append("steps", _steps(rng, facts, number_E, sentences))
        version, _ = store.files("episodes")
        store.append_episodes(store.stage("episodes", facts), version)
    _scores(lake.open(path))


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


def timed(what: str, cold: Callable[[], object], warm: Callable[[], object] | None = None) -> None:
    """Print CPU and wall seconds of a call, and of a second one."""
    figures = []
    for work in (cold, warm or cold):
        cpu, wall = time.process_time(), time.perf_counter()
        work()
        figures += [time.process_time() - cpu, time.perf_counter() - wall]
    print(f"| {what} | {' | '.join(f'{figure:.2f}' for figure in figures)} |", flush=True)


def page(reader: Reader, wanted: EpisodeFilter, order: Sort | None, number: int) -> None:
    """What a page of the list asks."""
    episodes.totals(reader, wanted, order)
    rows = episodes.page(reader, wanted, order, Window.page(number))
    episodes.scores_of(reader, tuple(rows["episode_id"]))


def lists(lk: lake.Lake) -> None:
    """A page of the list, by filter and order, and the one after it."""
    steep = Sort("outcome", descending=True)
    cases: list[tuple[str, EpisodeFilter, Sort | None, int]] = [
        ("list", EpisodeFilter(), None, 1),
        ("list, deep page", EpisodeFilter(), None, 20_000),
        ("list by outcome", EpisodeFilter(), steep, 1),
        ("one run, outcome from 0.5", EpisodeFilter(run="run 1", low=0.5), None, 1),
        ("by a scorer", EpisodeFilter(score="judge", low=0.5), steep, 1),
        ("one tool", EpisodeFilter(tool=TOOLS[0]), None, 1),
    ]
    for what, wanted, order, number in cases:
        reader = Reader(lk.snapshot())

        timed(what, partial(page, reader, wanted, order, number), partial(page, reader, wanted, order, number + 1))


def searches(lk: lake.Lake) -> None:
    """The index, then what is found with it."""
    reader = Reader(lk.snapshot())
    timed("index", lambda: reader.holding("nothing like it"))
    for text in ("R7919X", "lamp199 shelf3", TOOLS[0], "door", '"look up R7919X"'):
        cold = Reader(lk.snapshot())
        number = cold.holding(text).height
        timed(f"`{text}`: {number:,} episodes", partial(find, lk, text))


def find(lk: lake.Lake, text: str) -> None:
    """A search that nobody made before."""
    Reader(lk.snapshot()).holding(text)


def facet_counts(lk: lake.Lake) -> None:
    """Counts of each facet."""
    for facet in FACETS:
        reader = Reader(lk.snapshot())
        timed(f"facet {facet}", partial(facets.values, reader, facet, EpisodeFilter()))


def main() -> None:
    """Make the lake, ask."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lake", type=Path, help="a lake that an earlier call made, or where to make it")
    parser.add_argument("--episodes", type=int, default=1_000_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ[place.ENVIRONMENT] = folder
        path = given.lake or Path(folder, "lake")
        if not path.exists():
            make(path, given.episodes)
        lk = lake.open(path)
        print("| question | cold, CPU s | wall s | warm, CPU s | wall s |\n| --- | --- | --- | --- | --- |")
        Reader(lk.snapshot()).sql("SELECT count(*) FROM episodes")
        for part in (lists, searches, facet_counts):
            part(lk)


if __name__ == "__main__":
    main()
