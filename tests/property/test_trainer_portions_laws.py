"""Laws of portions: nothing that is selected or planned depends on how many there are, and no value changes in them."""

from dataclasses import fields
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import settings as limited
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

import lake
from lake import Lake
from lake.judgements.credit import find_credit
from lake.records import EpisodeRecord
from testkit.examples import examples, mostly_slow_cases
from testkit.lakes import add_credit
from testkit.training import config, token_episodes, token_step
from trainer.config import TrainConfig
from trainer.data import token_rows
from trainer.data.plan import Plan
from trainer.data.selection import TrainingSelection, _count_drops, select
from trainer.data.token_rows import Portions, compact, concat_portions


@pytest.fixture(scope="module")
def lk(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Two runs in several files: policy versions of steps, tokens and episodes, forks, inactive steps, credit."""
    lk = lake.open(tmp_path_factory.mktemp("lake"), create=True)
    rng = np.random.default_rng(0)
    for run, part in (("old", slice(0, 7)), ("new", slice(7, None))):
        with lk.job(kind="collect", run_id=run) as job:
            job.record(token_episodes(tasks=4)[part])
    odd = []
    for index, (version, is_active) in enumerate([(3, True), (None, False), (9, True)]):
        steps = [token_step(rng, 2, 3, step={"policy_version": version, "is_active": is_active}) for _ in range(3)]
        fork = token_step(rng, 2, 2, policy_version=2)
        assert fork.tokens is not None
        fork.tokens.prefix_step_index = 0
        odd.append(EpisodeRecord(task_id="odd", rollout_index=index, env_return=float(index), steps=[*steps, fork]))
    with lk.job(kind="collect", run_id="new") as job:
        job.record(odd)
    add_credit(lk)
    return lk


def selected(lk: Lake, settings: TrainConfig) -> TrainingSelection:
    snapshot = lk.snapshot()
    return select(snapshot, settings, settings.loss.needs, source=find_credit(snapshot, None))


def same(first: Any, second: Any) -> bool:
    if isinstance(first, pl.DataFrame):
        assert_frame_equal(first, second, check_exact=True)
        return True
    return bool(first == second)


SETTINGS = {
    "too_long": config(max_length=9),
    "stale": config(max_staleness=3, unknown_staleness="drop"),
    "ppo": config("ppo", options={"unit": "episode"}),
    "awr": config("awr", epochs=2),
    "dpo": config("dpo"),
    "kto": config("kto"),
}
CASES = [(name, size) for name in SETTINGS for size in (1, 4, 20)]


@pytest.mark.parametrize(
    ("name", "size"), mostly_slow_cases(CASES, ("too_long", 1), ("stale", 4), ("ppo", 20), ("dpo", 20), ("kto", 20))
)
def test_any_number_of_portions_gives_the_same_selection_and_plan(
    lk: Lake, monkeypatch: pytest.MonkeyPatch, name: str, size: int
) -> None:
    settings = SETTINGS[name]
    undivided = selected(lk, settings)
    monkeypatch.setattr(token_rows, "PORTION", size)
    episodes = lk.sql("SELECT episode_id, num_steps FROM episodes ORDER BY 1")
    assert len(Portions(episodes).episodes) > 2
    actual = selected(lk, settings)
    for field in fields(TrainingSelection):
        assert same(getattr(actual, field.name), getattr(undivided, field.name)), field.name
    plans = [Plan(selection, settings) for selection in (actual, undivided)]
    assert plans[0].plan_hash == plans[1].plan_hash
    for first_step, second_step in zip(*(plan.steps for plan in plans), strict=True):
        assert first_step.episodes_E.tolist() == second_step.episodes_E.tolist()
        assert (first_step.tokens, first_step.squared_lengths, first_step.units) == (
            second_step.tokens,
            second_step.squared_lengths,
            second_step.units,
        )


_EPISODES = st.dictionaries(st.integers(0, 2**63 - 1), st.integers(0, 5), max_size=12)


@limited(max_examples=examples(50))
@given(_EPISODES, st.lists(st.integers(0, 2**63 - 1), max_size=5), st.integers(1, 6), st.randoms())
def test_rows_are_dealt_to_their_episodes_portion(
    episodes: dict[int, int], unrelated: list[int], size: int, rnd: Any
) -> None:
    schema = {"episode_id": pl.Int64, "num_steps": pl.Int32}
    frame = pl.DataFrame(sorted(episodes.items()), schema=schema, orient="row")
    rows = [(episode, step) for episode, steps in episodes.items() for step in range(steps)]
    rows += [(episode, 0) for episode in unrelated if episode not in episodes]
    rnd.shuffle(rows)
    stored = pl.DataFrame(rows, schema={"episode_id": pl.Int64, "step": pl.Int64}, orient="row")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_rows, "PORTION", size)
        portions = Portions(frame)
        read = list(portions.read([stored[:3].lazy(), stored[3:].lazy()]))
    assert_frame_equal(pl.concat(portions.episodes), frame)
    for portion, mine in zip(portions.episodes, read, strict=True):
        expected = stored.filter(pl.col("episode_id").is_in(portion["episode_id"].implode()))
        assert_frame_equal(mine, expected, check_row_order=False)
        steps = portion["num_steps"].to_list()
        assert sum(steps[:-1]) < size + max(steps, default=0), "but for its last episode"


_VALUES = st.sampled_from([0.0, -0.0, float("nan"), 1.5, None])


@limited(max_examples=examples(50))
@given(st.lists(st.lists(st.tuples(_VALUES, st.sampled_from(["a", "b", None])), max_size=4), min_size=1, max_size=4))
def test_no_value_changes_bit_for_bit_where_it_is_held_once(
    pieces: list[list[tuple[float | None, str | None]]],
) -> None:
    frames = []
    for number, rows in enumerate(pieces):
        frame = pl.DataFrame(rows, schema={"value": pl.Float64, "word": pl.String}, orient="row")
        frames.append(frame.with_row_index("number").with_columns(part=pl.lit(number)))
    undivided = pl.concat(frames)

    def bits(frame: pl.DataFrame) -> list[tuple[Any, ...]]:
        return [(None if value is None else np.float64(value).tobytes(), *rest) for value, *rest in frame.rows()]

    for compacted in (compact(undivided), concat_portions([compact(frame) for frame in frames])):
        assert compacted.schema == undivided.schema
        for first, second in zip(
            bits(compacted.select("value", "word", "number", "part")),
            bits(undivided.select("value", "word", "number", "part")),
            strict=True,
        ):
            assert first == second


def test_a_column_of_one_value_takes_no_memory() -> None:
    frame = pl.DataFrame(
        {"number": range(1000), "one": [1.0] * 1000, "none": pl.Series([None] * 1000, dtype=pl.Float64)}
    )
    assert compact(frame).estimated_size() < frame.select("number").estimated_size() + 100


def test_more_dropped_tokens_than_32_bits_hold_are_counted() -> None:
    """`n_action` is int32, and so is Polars' sum of it."""
    members = pl.DataFrame(
        {"episode_id": [1, 2], "n_action": [2**31 - 1] * 2, "reason": ["stale"] * 2, "repeated": [False] * 2},
        schema_overrides={"n_action": pl.Int32},
    )
    episodes = pl.DataFrame({"episode_id": [1, 2], "num_steps": [1, 3]}, schema_overrides={"num_steps": pl.Int32})
    expected = [("no_tokens", 1, 2, None), ("stale", 2, 2, 2 * (2**31 - 1))]
    assert _count_drops([members], [episodes]).rows() == expected
