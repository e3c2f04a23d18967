"""Integrity checks: what each finds, how it is reported, and what is not known says nothing."""

from typing import Any

import polars as pl
import pytest
from pydantic import ValidationError

from lake import ids
from lake.errors import DataRefusedError
from pipelines.credit.health import FINDINGS, IntegrityConfig, IntegrityReport, check_groups
from pipelines.credit.inputs import measure_episodes
from testkit.wording import Wording

Row = dict[str, Any]


def episodes(*rows: Row) -> pl.LazyFrame:
    """Episodes 0, 1, ... of group 7, scored and alike unless said."""
    usual = {
        "group_id": 7,
        "task_id": "task",
        "expected_group_size": len(rows),
        "policy": "p",
        "policy_version": 3,
        "num_steps": 2,
        "initial_messages": '["system"]',
        "episode_score": 1.0,
    }
    return pl.LazyFrame([{"episode_id": n} | usual | row for n, row in enumerate(rows)], infer_schema_length=None)


def steps(*indices: list[int], first_states: list[int] | None = None) -> pl.LazyFrame:
    """Steps of episodes 0, 1, ... with the given numbers."""
    rows = [
        {"episode_id": e, "step_index": index, "state_hash": (first_states or [5] * 9)[e] if index == 0 else 100 + e}
        for e, numbers in enumerate(indices)
        for index in numbers
    ]
    return pl.LazyFrame(rows, schema={"episode_id": pl.Int64, "step_index": pl.Int32, "state_hash": pl.Int64})


def findings_by_group(report: IntegrityReport) -> dict[int, str]:
    return dict(report.findings.iter_rows())


def test_a_whole_group_has_no_findings() -> None:
    report = check_groups(episodes({}, {}), steps([0, 1], [1, 0]))
    assert (report.checked, report.problems, report.findings.height) == (1, (), 0)
    assert report.counts() == {}
    assert report.lines() == []
    report.raise_refused()


@pytest.mark.parametrize(
    ("rows", "finding"),
    [
        ([{"expected_group_size": 3}, {"expected_group_size": 3}], "incomplete"),
        ([{"expected_group_size": 1}, {"expected_group_size": 1}], "oversized"),
        ([{"task_id": "a"}, {"task_id": "b"}], "several_tasks"),
        ([{"initial_messages": "a"}, {"initial_messages": "b"}], "several_starts"),
        ([{"policy_version": 1}, {"policy_version": 2}], "mixed_policies"),
        ([{"policy": "a"}, {"policy": "b"}], "mixed_policies"),
        ([{}], "singleton"),
        ([{}, {"episode_score": None}], "singleton"),
    ],
)
def test_findings_of_episodes(rows: list[Row], finding: str) -> None:
    report = check_groups(episodes(*rows), steps(*[[0, 1]] * len(rows)))
    assert findings_by_group(report) == {7: finding}
    assert report.counts() == {finding: 1}


@pytest.mark.parametrize("numbers", [[0, 2], [1, 2], [0, 0], [0], [0, 1, 2], [0, 0, 1], [], [-1, 0]], ids=str)
def test_broken_steps(numbers: list[int]) -> None:
    assert findings_by_group(check_groups(episodes({}, {}), steps([0, 1], numbers))) == {7: "broken_steps"}


def test_steps_are_not_counted_where_their_number_is_not_known() -> None:
    rows = episodes({"num_steps": None}, {"num_steps": None})
    assert findings_by_group(check_groups(rows, steps([0, 1], [0, 1, 2]))) == {}
    assert findings_by_group(check_groups(rows, steps([0, 1], [0, 2]))) == {7: "broken_steps"}
    assert findings_by_group(check_groups(rows, steps([0, 1], []))) == {}


def test_another_first_state_is_another_start() -> None:
    assert findings_by_group(check_groups(episodes({}, {}), steps([0, 1], [0, 1], first_states=[5, 6]))) == {
        7: "several_starts"
    }


def test_unknown_is_not_wrong() -> None:
    unknown = dict.fromkeys(("task_id", "policy", "policy_version", "initial_messages", "expected_group_size"))
    assert findings_by_group(check_groups(episodes({}, unknown), steps([0, 1], [0, 1]))) == {}
    bare = episodes({}, {}).select("episode_id", "group_id")
    assert findings_by_group(check_groups(bare)) == {}
    assert findings_by_group(check_groups(episodes({}).select("episode_id", "group_id"))) == {7: "singleton"}
    assert findings_by_group(check_groups(bare, steps([0, 1], [0, 1]).drop("state_hash"))) == {}


def decided(*walks: str | None, active: int | None = None) -> pl.DataFrame:
    """What a job knows of the steps of episodes 0, 1, ...: a letter each, None for an unknown state."""
    rows = [
        {
            "episode_id": episode,
            "step_index": index,
            "state_hash": None if letter == "?" else ord(letter),
            "taken": ord(letter) // 2,
            "is_active": active is None or index < active,
        }
        for episode, walk in enumerate(walks)
        for index, letter in enumerate(walk or "")
    ]
    types = {"episode_id": pl.Int64, "step_index": pl.Int32, "state_hash": pl.Int64, "taken": pl.UInt64}
    return measure_episodes(pl.DataFrame(rows, schema=types | {"is_active": pl.Boolean}))


@pytest.mark.parametrize(
    ("walks", "copies"),
    [
        (["ab", "ab", "ac"], 1),
        (["ab", "ab", "ab"], 2),
        (["ab", "ba", "aa"], 0),  # the order counts
        (["ab", "abb", "a"], 0),
        (["bb", "cc"], 0),  # the same actions in other states
        (["a?", "a?", "a?"], 0),  # what is unknown equals nothing
    ],
)
def test_copied_siblings(walks: list[str], copies: int, wording: Wording) -> None:
    rows = episodes(*({"num_steps": len(walk), "task_id": "12"} for walk in walks))
    report = check_groups(rows, decided(*walks).lazy(), IntegrityConfig(one_start="off"))
    assert findings_by_group(report) == ({7: "copied_siblings"} if copies else {})
    assert report.counts() == ({"copied_siblings": 1, "copies": copies} if copies else {})
    if copies:
        (line,) = report.lines()
        assert wording(line).startswith(f"copied_siblings: {copies} of 3 episodes ")
        assert f"(task 12: {copies} of 3)" in line
        assert "by=decisions,within=group" in line


def test_copies_in_other_groups_are_no_siblings() -> None:
    rows = episodes({"group_id": 1}, {"group_id": 2}, {"group_id": 2}).with_columns(expected_group_size=None)
    report = check_groups(rows, decided("ab", "ab", "ab").lazy(), IntegrityConfig(singleton="off"))
    assert findings_by_group(report) == {2: "copied_siblings"}
    assert IntegrityReport.merge([report, report]).counts() == {"copied_siblings": 2, "copies": 2}


def test_steps_after_the_end_make_no_difference_to_a_copy() -> None:
    rows = episodes({}, {})
    assert findings_by_group(check_groups(rows, decided("ab", "ac", active=1).lazy())) == {7: "copied_siblings"}


def test_a_given_size_stands_in_for_the_recorded_one() -> None:
    rows = episodes({"expected_group_size": 2}, {"expected_group_size": 2})
    assert findings_by_group(check_groups(rows)) == {}
    assert findings_by_group(check_groups(rows, config=IntegrityConfig(expected_group_size=4))) == {7: "incomplete"}


def test_findings_of_a_group_are_joined_in_order() -> None:
    report = check_groups(episodes({"task_id": "a"}, {"task_id": "b", "policy": "q", "episode_score": None}))
    assert findings_by_group(report) == {7: "mixed_policies,several_tasks,singleton"}
    assert [problem.finding for problem in report.problems] == ["mixed_policies", "several_tasks", "singleton"]


def test_groups_are_looked_at_apart_and_named_by_task(wording: Wording) -> None:
    rows = episodes({"group_id": 9}, {"group_id": 9}, {"group_id": 4, "task_id": "12"})
    rows = rows.with_columns(expected_group_size=2)
    report = check_groups(rows)
    assert findings_by_group(report) == {4: "incomplete,singleton"}
    assert report.checked == 2
    first, second = map(wording, report.lines())
    assert first.startswith("incomplete: ")
    assert "(task 12: 1 of 2)" in first
    assert "--check complete=off" in first
    assert second.startswith("singleton: ")
    assert "(task 12: 1 scored of 1)" in second
    assert "`trajlake score " in second
    assert second.endswith("--grouping merged")


def test_a_group_without_a_known_task_is_named_by_its_id() -> None:
    report = check_groups(pl.LazyFrame({"episode_id": ["e"], "group_id": ["g"]}))
    assert "(group g: 1 scored of 1)" in report.lines()[0]
    numbered = check_groups(pl.LazyFrame({"episode_id": [1], "group_id": [7]}))
    assert f"(group {ids.to_text(7)}: 1 scored of 1)" in numbered.lines()[0]


def test_examples_are_few_and_say_that_there_are_more() -> None:
    rows = episodes(*({"group_id": group} for group in range(5))).with_columns(expected_group_size=1)
    problem = check_groups(rows, config=IntegrityConfig(examples=2)).problems[0]
    assert problem.groups == 5
    assert problem.examples == ("task task: 1 scored of 1", "task task: 1 scored of 1")
    assert ", ...)" in problem.line(5)
    assert "in 5 groups. " in check_groups(rows, config=IntegrityConfig(examples=0)).lines()[0]


def test_what_is_off_is_not_found() -> None:
    rows = episodes({"task_id": "a"}, {"task_id": "b"})
    assert findings_by_group(check_groups(rows, config=IntegrityConfig(one_task="off"))) == {}


def test_refusing_stops_with_groups_and_remedy(wording: Wording) -> None:
    rows = episodes({"task_id": "a"}, {"task_id": "b", "policy": "q"})
    report = check_groups(rows)
    with pytest.raises(DataRefusedError) as caught:
        report.raise_refused()
    message = str(caught.value)
    assert wording(message).startswith("of 1 group: several_tasks: ")
    assert "(tasks a, ...: 2 tasks)" in message
    assert "`trajlake group -h`" in message
    assert message.endswith("--check one_task=warn")
    check_groups(rows, config=IntegrityConfig(one_task="warn")).raise_refused()
    with pytest.raises(DataRefusedError, match="--check mixed_policies=warn --check one_task=warn"):
        check_groups(rows, config=IntegrityConfig(mixed_policies="refuse")).raise_refused()


def test_reports_of_parts_make_the_report_of_the_whole() -> None:
    rows = episodes(*({"group_id": group, "task_id": str(n)} for group in range(4) for n in range(group % 2 + 1)))
    config = IntegrityConfig(examples=2, one_task="warn")
    report = check_groups(rows, config=config)
    reports = [check_groups(rows.filter(pl.col("group_id") % 2 == part), config=config) for part in (1, 0)]
    merged = IntegrityReport.merge(reports)
    assert merged.checked == report.checked
    assert merged.problems == report.problems
    assert merged.findings.equals(report.findings)


def test_a_report_of_nothing() -> None:
    empty = IntegrityReport.merge([])
    assert (empty.checked, empty.problems, empty.findings.height) == (0, (), 0)
    none = check_groups(episodes({}).filter(pl.lit(value=False)))
    assert (none.checked, none.problems) == (0, ())
    assert IntegrityReport.merge([none, none]).findings.schema == empty.findings.schema


def test_every_finding_has_its_check_and_its_place_in_the_documentation() -> None:
    assert list(FINDINGS) == sorted(FINDINGS)
    for name, finding in FINDINGS.items():
        assert finding.check in IntegrityConfig.model_fields
        assert len(finding.fault) > 10
        assert len(finding.then) > 10
        assert name.isidentifier()


@pytest.mark.parametrize(
    "options", [{"complete": "maybe"}, {"expected_group_size": 0}, {"surprise": 1}, {"examples": -1}]
)
def test_options_that_cannot_be_meant_are_refused(options: Row) -> None:
    with pytest.raises(ValidationError):
        IntegrityConfig.model_validate(options)
