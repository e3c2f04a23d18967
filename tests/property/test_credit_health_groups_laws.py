"""Group figures and integrity findings against slow oracles, on everything that can happen to a group."""

from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lake.ids import text_hash
from pipelines.credit import GiGPO
from pipelines.credit.health import (
    SCHEMA,
    IntegrityConfig,
    IntegrityReport,
    check_groups,
    diagnose,
    diagnose_groups,
    summarise,
)
from testkit import group_oracle
from testkit.credit_strategies import configs, frame, step_rows
from testkit.examples import examples

Row = dict[str, Any]
EPISODES = {
    "episode_id": pl.Int64,
    "group_id": pl.Int64,
    "run_id": pl.String,
    "episode_score": pl.Float64,
    "task_id": pl.String,
    "policy": pl.String,
    "policy_version": pl.Int64,
    "expected_group_size": pl.Int32,
    "spare": pl.Int64,
    "num_steps": pl.Int32,
    "initial_messages": pl.String,
}
STEPS = {
    "episode_id": pl.Int64,
    "step_index": pl.Int32,
    "state_hash": pl.Int64,
    "action": pl.String,
    "tool_calls": pl.String,
    "state_is_error": pl.Boolean,
}


@st.composite
def groups(draw: st.DrawFn, **options: Any) -> tuple[list[Row], list[Row]]:
    """Estimator rows with actions and error marks, and their episodes."""
    rows = draw(step_rows(**options))
    first_owner: dict[int, Row] = {}
    for row in rows:
        row["action"] = draw(st.sampled_from(["go", "look", ""]))
        row["tool_calls"] = draw(st.sampled_from([None, None, '[{"name":"f"}]']))
        row["state_is_error"] = row["state"] == "kitchen"
        row["state_hash"] = None if row["state"] is None else text_hash(row["state"])
        first_owner.setdefault(row["episode_id"], row)
    episodes = [
        {
            **{name: row[name] for name in ("episode_id", "group_id", "episode_score")},
            "run_id": draw(st.sampled_from(["a", "a", "b"])),
            "task_id": draw(st.sampled_from(["t", "t", "u", None])),
            "policy": draw(st.sampled_from(["p", "p", "q", None])),
            "policy_version": draw(st.sampled_from([1, 1, 2, None])),
            "expected_group_size": draw(st.sampled_from([None, 1, 2, 3])),
            "spare": draw(st.sampled_from([None, 0, 1])),
            "num_steps": draw(st.sampled_from([None, sum(r["episode_id"] == row["episode_id"] for r in rows), 2])),
            "initial_messages": draw(st.sampled_from(["hello", "hello", "bye", None])),
        }
        for row in first_owner.values()
    ]
    return rows, episodes


def tables(rows: list[Row], episodes: list[Row]) -> tuple[pl.LazyFrame, pl.LazyFrame]:
    return pl.LazyFrame(episodes, schema=EPISODES), pl.LazyFrame(
        [{n: row[n] for n in STEPS} for row in rows], schema=STEPS
    )


def inputs(rows: list[Row]) -> pl.LazyFrame:
    estimator_columns = frame([]).columns
    return frame([{name: row[name] for name in estimator_columns} for row in rows]).lazy()


def assert_alike(actual: list[Row], expected: list[Row]) -> None:
    assert [row["group_id"] for row in actual] == [row["group_id"] for row in expected]
    for ours, theirs in zip(actual, expected, strict=True):
        assert set(ours) == set(theirs)
        for name, value in theirs.items():
            close = pytest.approx(value, rel=1e-9, abs=1e-12) if isinstance(value, float) else value
            assert ours[name] == close, (name, ours, theirs)


@settings(deadline=None, max_examples=examples(25))
@given(groups(), configs(episode_source="score"))
def test_figures_equal_the_oracle(drawn: tuple[list[Row], list[Row]], config: GiGPO) -> None:
    rows, advantage_of = drawn
    episodes, steps = tables(rows, advantage_of)
    advantages = config.advantages(inputs(rows)).collect()
    report = check_groups(episodes, steps)
    actual = diagnose_groups(advantages.lazy(), episodes, steps, report.findings).collect()
    assert actual.schema == SCHEMA
    expected = group_oracle.diagnostics(advantages.to_dicts(), advantage_of, rows, dict(report.findings.iter_rows()))
    assert_alike(actual.to_dicts(), expected)


@settings(deadline=None, max_examples=examples(15))
@given(groups(), configs(episode_source="score"))
def test_figures_agree_with_the_summary(drawn: tuple[list[Row], list[Row]], config: GiGPO) -> None:
    """What is added up over groups is what is counted over rows, but for episodes without an active step."""
    rows, advantage_of = drawn
    episodes, _ = tables(rows, advantage_of)
    advantages = config.advantages(inputs(rows)).collect()
    with_rows = episodes.join(advantages.lazy(), on="episode_id", how="semi")
    figures = diagnose_groups(advantages.lazy(), with_rows).collect()
    counted = summarise(advantages.lazy()).model_dump()
    summed = diagnose(figures.lazy()).model_dump()
    assert {name: summed[name] for name in counted} == counted


@settings(deadline=None, max_examples=examples(20))
@given(groups(), st.data())
def test_figures_do_not_depend_on_what_they_are_computed_with(
    drawn: tuple[list[Row], list[Row]], data: st.DataObject
) -> None:
    """Episodes and steps in any order, groups one at a time."""
    rows, advantage_of = drawn
    episodes, steps = tables(rows, advantage_of)
    advantages = GiGPO().advantages(inputs(rows)).collect()
    expected = diagnose_groups(advantages.lazy(), episodes, steps).collect()
    shuffled = (pl.LazyFrame(data.draw(st.permutations(advantage_of)), schema=EPISODES), steps.reverse())
    assert diagnose_groups(advantages.lazy(), *shuffled).collect().equals(expected)
    one_by_one = [
        diagnose_groups(
            advantages.lazy().filter(pl.col("group_id") == group), episodes.filter(pl.col("group_id") == group), steps
        )
        for group in expected["group_id"]
    ]
    assert pl.concat(one_by_one).collect().equals(expected)


@settings(deadline=None, max_examples=examples(25))
@given(groups(inactive=False))
def test_findings_equal_the_oracle(drawn: tuple[list[Row], list[Row]]) -> None:
    rows, advantage_of = drawn
    report = check_groups(*tables(rows, advantage_of))
    expected = group_oracle.findings(advantage_of, rows)
    assert dict(report.findings.iter_rows()) == expected
    counted = [name for text in expected.values() for name in text.split(",")]
    assert report.counts() == {name: counted.count(name) for name in sorted(set(counted))}
    assert report.findings["group_id"].is_sorted()


@settings(deadline=None, max_examples=examples(20))
@given(groups(inactive=False))
def test_reports_can_be_cut_anywhere_between_groups(drawn: tuple[list[Row], list[Row]]) -> None:
    rows, advantage_of = drawn
    episodes, steps = tables(rows, advantage_of)
    config = IntegrityConfig(examples=2)
    undivided = check_groups(episodes, steps, config)
    reports = [
        check_groups(episodes.filter(pl.col("group_id") == group), steps, config)
        for group in sorted({row["group_id"] for row in advantage_of})
    ]
    merged = IntegrityReport.merge(reports)
    assert merged.counts() == undivided.counts()
    assert merged.findings.equals(undivided.findings)
    assert merged.checked == undivided.checked
