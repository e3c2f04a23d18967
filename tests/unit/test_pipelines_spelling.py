"""Filters and steps as people spell them on the command line; lots that are the same everywhere."""

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lake.errors import UsageError
from lake.judgements.selections import draw_lots
from lake.settings import validate
from pipelines.groupings import STEPS, Grouping
from pipelines.select.filters import FILTERS
from pipelines.select.job import Selection
from pipelines.spelling import parse_part


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("dead_groups", {"kind": "dead_groups"}),
        ("max_steps=30", {"kind": "length", "max_steps": 30}),
        ("length:min_steps=2,max_steps=30", {"kind": "length", "min_steps": 2, "max_steps": 30}),
        (" length : max_tokens = 9", {"kind": "length", "max_tokens": 9}),
        ("at_least=0.5", {"kind": "min_reward", "at_least": 0.5}),
        ("min_reward=0.5", {"kind": "min_reward", "at_least": 0.5}),
        ("staleness=4", {"kind": "staleness", "max_behind": 4}),
        ("top_q=0.25", {"kind": "top_q", "fraction": 0.25}),
        ("top_q:count=2", {"kind": "top_q", "count": 2}),
        ("status=completed", {"kind": "status", "keep": ["completed"]}),
        ("status:keep=completed|truncated", {"kind": "status", "keep": ["completed", "truncated"]}),
        ("dedup:by=decisions,within=all", {"kind": "dedup", "by": "decisions", "within": "all"}),
        (
            "success_balance:max_ratio=2,one_sided=drop",
            {"kind": "success_balance", "max_ratio": 2, "one_sided": "drop"},
        ),
    ],
)
def test_a_filter_is_spelled_by_name_by_option_or_by_both(text: str, expected: dict[str, object]) -> None:
    assert parse_part(text, FILTERS, "filter") == expected
    assert validate(Selection, {"name": "s", "filters": [expected]}, "select: ").filters[0].kind == expected["kind"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dead", r"unknown filter 'dead'\. Valid: dead_groups, min_reward"),
        ("", "unknown filter ''"),
        ("colour=red", "'colour' is not an option of any"),
        ("seed=3", "'seed' belongs to success_balance and top_q: write KIND:seed="),
        ("dedup=actions", "'dedup' is not an option of any"),
        ("length:steps=3", "'steps=3' is not an option; write KEY=VALUE with one of min_steps, max_steps"),
        ("length:max_steps", "'max_steps' is not an option; write KEY=VALUE"),
        ("length:", "'' is not an option"),
        ("length:kind=status", "'kind=status' is not an option"),
    ],
)
def test_a_filter_that_is_none_is_refused_with_what_there_is(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_part(text, FILTERS, "filter")


def test_steps_of_a_grouping_are_spelled_alike() -> None:
    drawn = parse_part("subsample:size=8,draws=4", STEPS, "step")
    assert drawn == {"kind": "subsample", "size": 8, "draws": 4}
    dropped = parse_part("drop_failed:statuses=failed", STEPS, "step")
    assert dropped == {"kind": "drop_failed", "statuses": ["failed"]}
    assert parse_part("max_behind=2", STEPS, "step") == {"kind": "staleness_cap", "max_behind": 2}
    with pytest.raises(UsageError, match="unknown step 'halve'"):
        parse_part("halve", STEPS, "step")


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({}, "group: `name` is missing; `steps` is missing$"),
        ({"name": "a/0", "steps": [{"kind": "drop_failed"}]}, "group: `name` is 'a/0'; valid: letters, digits"),
        ({"name": "a", "steps": []}, r"group: `steps` is \[\]; valid: at least 1"),
        ({"name": "a", "steps": [{"kind": "subsample"}]}, "group: `steps.0.subsample.size` is missing"),
        ({"name": "a", "steps": [{"kind": "subsample", "size": 0}]}, "`steps.0.subsample.size` is 0; valid: 1 or more"),
    ],
)
def test_a_definition_with_faults_names_the_fields(settings: dict[str, object], fault: str) -> None:
    with pytest.raises(UsageError, match=fault):
        validate(Grouping, settings, "group: ")


# ---------------------------------------------------------------- lots


def slow_lot(value: int) -> int:
    """splitmix64's output function, in integers of Python."""
    mask = (1 << 64) - 1
    value = (value + 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)


@given(st.lists(st.integers(0, (1 << 63) - 1), max_size=5), st.text(max_size=3), st.integers(0, 9))
def test_a_lot_is_the_mixed_sum_of_id_and_seed(episode_ids: list[int], purpose: str, seed: int) -> None:
    from lake import ids

    offset = ids.key_hash("lot", purpose, seed)
    lots = draw_lots(pl.Series(episode_ids, dtype=pl.Int64), purpose, seed)
    assert lots.to_list() == [slow_lot(slow_lot((e + offset) % (1 << 64))) for e in episode_ids]


def test_the_reference_value_of_splitmix64() -> None:
    """First output for seed 1234567 of the published generator."""
    assert slow_lot(1234567) == 6457827717110365317


def test_lots_are_spread_evenly_and_independently() -> None:
    ids_E = pl.Series(range(40_000), dtype=pl.Int64)
    first, second = (draw_lots(ids_E, "draw", seed).to_numpy() / 2.0**64 for seed in (0, 1))
    counts = np.histogram(first, bins=10, range=(0, 1))[0]
    assert abs(counts - 4000).max() < 300
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.02
