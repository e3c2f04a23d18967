"""The parts of a credit job, each against the obvious slow way: steps put in order, groups cut into ranges, inputs
hashed, figures taken.
"""

import random
from typing import Any

import numpy as np
import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from lake.read.parquet import DataFile
from pipelines.credit import GiGPO
from pipelines.credit import health as group_figures
from pipelines.credit.inputs import (
    _TableFiles,
    arrange_steps,
    compute_rows_per_range,
    hash_groups,
    hash_inputs,
    measure_episodes,
)
from testkit.credit_strategies import frame, step_rows
from testkit.examples import examples

# ---------------------------------------------------------------- steps in order


@st.composite
def files_of_steps(draw: st.DrawFn) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Steps as some files hold them, and episodes, some of which lack steps and some steps have none."""
    numbers = draw(st.lists(st.integers(0, 30), min_size=1, max_size=8, unique=True))
    lengths = [draw(st.integers(0, 4)) for _ in numbers]
    rows = [
        {"episode_id": e, "step_index": i, "state_hash": draw(st.integers(0, 5))}
        for e, n in zip(numbers, lengths, strict=True)
        for i in range(n)
    ]
    if draw(st.booleans()):
        rows = draw(st.permutations(rows))
    schema = {"episode_id": pl.Int64, "step_index": pl.Int32, "state_hash": pl.Int64}
    present = draw(st.lists(st.sampled_from([*numbers, 40, 41]), min_size=1, unique=True))
    episodes = pl.DataFrame(
        {
            "episode_id": present,
            "group_id": [draw(st.integers(0, 3)) for _ in present],
            "score": [draw(st.sampled_from([None, 0.5])) for _ in present],
        },
        schema={"episode_id": pl.Int64, "group_id": pl.Int64, "score": pl.Float64},
    )
    return pl.DataFrame(rows, schema=schema), episodes.sort("group_id", "episode_id")


@given(files_of_steps())
def test_steps_are_put_in_order_as_a_join_and_a_sort_do(given_: tuple[pl.DataFrame, pl.DataFrame]) -> None:
    steps, episodes = given_
    actual = arrange_steps(steps, episodes, ["score"])
    expected = steps.join(episodes, on="episode_id").sort("group_id", "episode_id", "step_index")
    assert_frame_equal(actual, expected.select(actual.columns), check_exact=True)


@given(files_of_steps())
def test_figures_of_episodes_are_those_of_a_group_by(given_: tuple[pl.DataFrame, pl.DataFrame]) -> None:
    steps = arrange_steps(*given_, [])
    index = pl.col("step_index")
    expected = steps.group_by("episode_id").agg(
        pl.len().alias("count"),
        index.min().alias("first"),
        index.max().alias("last"),
        index.n_unique().alias("distinct"),
        pl.col("state_hash").filter(index == 0).first().alias("first_state"),
    )
    actual = measure_episodes(steps).sort("episode_id")
    assert_frame_equal(actual, expected.sort("episode_id"), check_dtypes=False)


# ---------------------------------------------------------------- figures of groups


@settings(max_examples=examples(30))
@given(step_rows())
def test_figures_of_groups_are_those_of_a_group_by(steps: list[dict[str, Any]]) -> None:
    rows = GiGPO(revisits="first", default_step_reward=0.0).advantages(frame(steps).lazy()).collect()
    if rows.is_empty():
        assert group_figures.summarise_steps(rows).is_empty()
        return
    flags = pl.col("flags").str.split(",")
    member = pl.col("a_step").is_not_null() & (pl.col("anchor_size") > 0) & ~flags.list.contains("revisit")
    shared = pl.col("anchor_episodes") >= 2
    advantage = pl.col("advantage")
    expected = rows.group_by("group_id").agg(
        flags.list.contains("dead_group").first().alias("is_dead"),
        pl.len().alias("steps"),
        advantage.count().alias("defined_steps"),
        advantage.mean().alias("advantage_mean"),
        advantage.std().alias("advantage_std"),
        advantage.min().alias("advantage_min"),
        advantage.max().alias("advantage_max"),
        pl.col("anchor_key").filter(member).n_unique().alias("anchors"),
        (member & (pl.col("anchor_size") == 1)).sum().alias("singleton_steps"),
        shared.sum().alias("shared_steps"),
        pl.struct("anchor_key", "anchor_episodes").filter(member & shared).unique().struct[1].mean().alias("met"),
        (pl.col("a_episode") * pl.col("a_step") < 0).sum().alias("sign_disagreements"),
    )
    actual = group_figures.summarise_steps(rows)
    expected = expected.rename({"met": "anchor_episodes_mean"}).select(actual.columns)
    assert_frame_equal(
        actual.sort("group_id"), expected.sort("group_id"), check_dtypes=False, rel_tol=1e-9, abs_tol=1e-9
    )
    fates = group_figures.find_participants(rows)
    out = rows.group_by("episode_id").agg(
        takes_part=~flags.list.eval(pl.element().is_in(["excluded", "unscored"])).list.any().first()
    )
    assert_frame_equal(fates.sort("episode_id"), out.sort("episode_id"))


# ---------------------------------------------------------------- hashes of inputs

MEMBERS = st.lists(
    st.fixed_dictionaries(
        {
            "group_id": st.integers(0, 3),
            "write_id": st.integers(0, 2),
            "episode_score": st.sampled_from([None, 0.0, 1.0, -1.0]),
            "score_other": st.sampled_from([None, 0.0, 1.0]),
        }
    ),
    min_size=1,
    max_size=8,
)


def selected(members: list[dict[str, Any]]) -> pl.DataFrame:
    """Members as `select_episodes` gives them."""
    types = {"group_id": pl.Int64, "write_id": pl.Int64, "episode_score": pl.Float64, "score_other": pl.Float64}
    frame = pl.DataFrame(members, schema=types).with_row_index("episode_id")
    return frame.with_columns(
        pl.col("episode_id").cast(pl.Int64),
        collected_group_id="group_id",
        run_id=pl.lit("r"),
        status=pl.lit("completed"),
        num_steps=pl.lit(2, pl.Int32),
    ).sort("group_id", "episode_id")


def inputs(frame: pl.DataFrame) -> dict[int, frozenset[Any]]:
    names = ["episode_id", "write_id", "episode_score", "score_other"]
    return {
        key[0]: frozenset(part.select(names).iter_rows())
        for key, part in frame.partition_by("group_id", as_dict=True).items()
    }


def hashes(frame: pl.DataFrame, **options: bool) -> dict[int, int]:
    return dict(hash_groups(frame, **options).select("group_id", "input_fingerprint").iter_rows())


@given(MEMBERS, st.data())
def test_a_groups_hash_is_its_members_and_their_scores(members: list[dict[str, Any]], data: st.DataObject) -> None:
    first = selected(members)
    other_members = [dict(member) for member in members]
    changed = data.draw(st.sampled_from(other_members))
    name = data.draw(st.sampled_from(["write_id", "episode_score", "score_other", "group_id"]))
    changed[name] = data.draw(st.sampled_from([0, 1, 2] if name in ("write_id", "group_id") else [None, 0.0, 1.0]))
    other_rows = selected(other_members)
    same = {group for group in inputs(first) if inputs(first)[group] == inputs(other_rows).get(group)}
    before, after = hashes(first), hashes(other_rows)
    assert {group for group in before if before[group] == after.get(group)} == same
    undivided, then = hashes(first, of_batch=True), hashes(other_rows, of_batch=True)
    assert (undivided == then) == (inputs(first) == inputs(other_rows))
    if undivided != then:
        assert not set(undivided.items()) & set(then.items()), "under a batch every group changes with any of them"
    assert (hash_inputs(hash_groups(first)) == hash_inputs(hash_groups(other_rows))) == (before == after)


def test_hashes_are_pinned() -> None:
    """They are stored: another machine or version has to find the same."""
    frame = selected([{"group_id": 1, "write_id": 5, "episode_score": 0.5, "score_other": None}])
    assert hashes(frame) == {1: PINNED}
    negative = frame.with_columns(pl.lit(-0.0).alias("episode_score"))
    assert hashes(negative) == hashes(frame.with_columns(pl.lit(0.0).alias("episode_score")))
    groups = hash_groups(frame)
    assert groups.row(0, named=True) | {"input_fingerprint": 0} == {
        "group_id": 1,
        "input_fingerprint": 0,
        "episodes": 1,
        "steps": 2,
    }
    assert hash_inputs(groups, where=None) != hash_inputs(groups, where="true")


PINNED = 269538828213956160


# ---------------------------------------------------------------- files of ranges


@given(st.integers(0, 2**16))
def test_every_file_that_holds_a_row_of_the_episodes_is_found(number: int) -> None:
    rng = random.Random(number)
    rows = pl.DataFrame(
        {
            "episode_id": range(20),
            "run_id": [rng.choice("ab") for _ in range(20)],
            "collected_group_id": [rng.randrange(6) for _ in range(20)],
            "write_id": [rng.randrange(4) for _ in range(20)],
        }
    )
    compacted = [w for w in range(4) if rng.random() < 0.5]
    files, held_keys = [], {}
    for name, part in [
        *((f"w{w}", rows.filter(pl.col("write_id") == w)) for w in range(4) if w not in compacted),
        *(("mixed", rows.filter(pl.col("write_id").is_in(compacted))) for _ in range(1)),
    ]:
        if part.height:
            ranges = {
                "run_id": (part["run_id"].min(), part["run_id"].max()),
                "group_id": (part["collected_group_id"].min(), part["collected_group_id"].max()),
            }
            known_ranges = {k: v if rng.random() < 0.8 else (None, None) for k, v in ranges.items()}
            write_id = None if name == "mixed" else int(name[1:])
            files.append(DataFile(name, part.height, 1, frozenset(), write_id, known_ranges))
            held_keys[name] = set(part["episode_id"])
    sample = rows.sample(rng.randint(1, 20), seed=number)
    for by_write in (True, False):
        paths = {file.path for file in _TableFiles(files, by_write=by_write).find_files(sample)}
        needed = {name for name, episodes in held_keys.items() if episodes & set(sample["episode_id"])}
        assert needed <= paths
    exact = {file.path for file in _TableFiles(files, by_write=True).find_files(sample) if file.write_id is not None}
    assert exact == {name for name in needed if name != "mixed"}


@given(st.integers(0, 10**9), st.integers(1, 10**7), st.integers(1, 64))
def test_ranges_keep_the_budget_and_every_worker_busy(steps: int, budget: int, workers: int) -> None:
    rows = compute_rows_per_range(steps, budget, workers)
    assert 1 <= rows <= max(1, budget)
    if rows < budget and rows > 200_000:
        assert steps / rows > workers


def test_arranged_moves_nothing_that_is_in_order() -> None:
    steps = pl.DataFrame({"episode_id": [3, 3, 5], "step_index": [0, 1, 0]})
    episodes = pl.DataFrame({"episode_id": [3, 5], "group_id": [1, 1]})
    actual = arrange_steps(steps, episodes, [])
    assert np.shares_memory(actual["step_index"].to_numpy(), steps["step_index"].to_numpy())
