"""Laws of the filters, and every filter against a slow, obvious one (`testkit.selections`)."""

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.select import Combined, Filter, Selection, TopQ, apply
from testkit.examples import examples
from testkit.selections import FILTERS, KINDS, Row, collections, expected_drops, frames, pairs

Collection = tuple[list[Row], list[Row]]


@pytest.mark.parametrize("number", range(len(KINDS)))
@settings(max_examples=examples(13))
@given(st.data())
def test_a_filter_drops_what_the_obvious_one_drops(number: int, data: st.DataObject) -> None:
    part, (episodes, steps) = data.draw(KINDS[number]), data.draw(collections())
    drops = part.drops(*frames(episodes, steps))
    assert pairs(drops) == expected_drops(part, episodes, steps)
    assert drops["reason"].null_count() == 0
    assert drops.filter(pl.col("reason") == "").is_empty()


@settings(max_examples=examples(20))
@given(FILTERS, collections(), st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(part: Filter, collection: Collection, rng: object) -> None:
    episodes, steps = collection
    shuffled = episodes.copy(), steps.copy()
    for rows in shuffled:
        rng.shuffle(rows)  # type: ignore[attr-defined]
    order = ["episode_id", "step_index"]
    first, second = part.drops(*frames(episodes, steps)), part.drops(*frames(*shuffled))
    assert first.sort(order).equals(second.sort(order))


@settings(max_examples=examples(30))
@given(FILTERS.filter(lambda part: not isinstance(part, Combined)), collections())
def test_a_filter_applied_twice_drops_nothing_new(part: Filter, collection: Collection) -> None:
    """All but a fraction: half of a half is a quarter, and says so."""
    if isinstance(part, TopQ) and part.fraction is not None:
        return
    outcome = apply(Selection(name="twice", filters=(part, part)), *frames(*collection))
    assert outcome.report["dropped_episodes"][1] == 0
    assert outcome.report["dropped_steps"][1] == 0


@settings(max_examples=examples(15))
@given(st.sampled_from([0.1, 0.5, 0.9]), collections())
def test_a_fraction_of_a_fraction_is_of_what_is_left(fraction: float, collection: Collection) -> None:
    part = TopQ(fraction=fraction)
    once = apply(Selection(name="once", filters=(part,)), *frames(*collection))
    episode_ids = set(once.rows.filter("kept")["episode_id"])
    rest = [row for row in collection[0] if row["episode_id"] in episode_ids]
    twice = apply(Selection(name="twice", filters=(part, part)), *frames(*collection))
    assert set(twice.rows.filter("kept")["episode_id"]) == episode_ids - {e for e, _ in expected_drops(part, rest, [])}


@settings(max_examples=examples(30))
@given(st.lists(FILTERS, min_size=1, max_size=4), collections())
def test_what_is_kept_and_what_is_dropped_is_everything(filters: list[Filter], collection: Collection) -> None:
    episodes, steps = collection
    selection = Selection(name="all", filters=tuple(filters))
    outcome = apply(selection, *frames(episodes, steps))
    rows, report = outcome.rows, outcome.report
    episode_rows = rows.filter(pl.col("step_index").is_null())
    assert sorted(episode_rows["episode_id"]) == sorted(row["episode_id"] for row in episodes)
    assert rows.select("episode_id", "step_index").is_unique().all()
    assert rows.filter(pl.col("kept") != pl.col("filter").is_null()).is_empty()
    assert rows.filter(pl.col("kept") != pl.col("reason").is_null()).is_empty()
    assert set(rows["filter"].drop_nulls()) <= set(selection.labels)
    assert report["filter"].to_list() == selection.labels
    assert report["dropped_episodes"].sum() + episode_rows["kept"].sum() == len(episodes)
    assert report["dropped_steps"].sum() + report["steps_left"][-1] == len(steps)
    assert report["episodes_left"][-1] == episode_rows["kept"].sum()


@settings(max_examples=examples(30))
@given(st.lists(FILTERS, min_size=1, max_size=3), collections())
def test_filters_in_order_see_what_those_before_them_left(filters: list[Filter], collection: Collection) -> None:
    episodes, steps = collection
    by_filter: dict[str, set[tuple[int, int | None]]] = {}
    selection = Selection(name="order", filters=tuple(filters))
    for label, part in zip(selection.labels, selection.filters, strict=True):
        drops = expected_drops(part, episodes, steps)
        remaining = [s for s in steps if (s["episode_id"], s["step_index"]) not in drops]
        with_steps = {step["episode_id"] for step in remaining}
        had_steps = {step["episode_id"] for step in steps}
        drops |= {(row["episode_id"], None) for row in episodes if row["episode_id"] in had_steps - with_steps}
        dropped = {episode for episode, step in drops if step is None}
        by_filter[label] = drops
        episodes = [row for row in episodes if row["episode_id"] not in dropped]
        steps = [step for step in remaining if step["episode_id"] not in dropped]
    rows = apply(selection, *frames(*collection)).rows
    for label, drops in by_filter.items():
        assert pairs(rows.filter(pl.col("filter") == label)) == drops
