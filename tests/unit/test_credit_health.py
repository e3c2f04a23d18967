"""The diagnosis of a job: sums over groups, and warnings in words exactly where a figure looks wrong."""

from typing import Any

import polars as pl
import pytest

from pipelines.credit.health import SCHEMA, CreditDiagnosis, diagnose

FINE: dict[str, Any] = {
    "episodes": 40,
    "steps": 100,
    "undefined_steps": 0,
    "groups": 10,
    "live_groups": 8,
    "dead_groups": 2,
    "singleton_groups": 0,
    "unscored_groups": 0,
    "shared_steps": 70,
    "singleton_steps": 30,
    "has_anchors": True,
    "anchors": 45,
    "one_action_anchors": 3,
    "error_anchors": 0,
    "error_steps": 0,
    "empty_steps": 0,
    "sign_disagreements": 4,
    "dead_score": 0.0,
    "dead_groups_at_score": 2,
}
UNREAD = ("one_action_anchors", "error_anchors", "error_steps", "empty_steps")
"""Figures that a job may not have looked for."""


def diagnosis(**changes: Any) -> CreditDiagnosis:
    return CreditDiagnosis.model_validate(FINE | changes)


def test_nothing_is_said_where_nothing_looks_wrong() -> None:
    assert diagnosis().warnings() == []
    assert diagnosis(**dict.fromkeys(UNREAD)).warnings() == []


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"singleton_steps": 36}, "36% of the steps are in a state that no other step of their group has"),
        (
            {"live_groups": 4, "dead_groups": 6, "dead_groups_at_score": 5, "dead_score": 0.5},
            "In 6 of 10 groups all episodes have the same score, so A_E is 0 there; in 5 of them the score is 0.5.",
        ),
        (
            {"live_groups": 4, "dead_groups": 0, "singleton_groups": 4, "unscored_groups": 2},
            "6 of 10 groups have fewer",
        ),
        ({"undefined_steps": 51}, "51 of 100 advantages are unknown"),
        ({"error_steps": 4, "error_anchors": 1}, "4 of the 70 steps with a shared state are at error texts"),
        ({"empty_steps": None}, "How many of the 70 steps with a shared state are at empty states is unknown"),
        ({"empty_steps": 4}, "4 of the 70 steps with a shared state are at empty states (blank, [] or null)"),
    ],
)
def test_each_warning_says_what_and_what_to_do(changes: dict[str, Any], fragment: str) -> None:
    warnings = diagnosis(**changes).warnings()
    assert len(warnings) == 1
    assert fragment in warnings[0]
    assert warnings[0].endswith("--lake LAKE`"), "a warning ends with the command to run"


def test_lonely_steps_point_to_the_command_that_tells_why() -> None:
    assert diagnosis(singleton_steps=90).warnings()[0].endswith("`trajlake anchors --lake LAKE`")


@pytest.mark.parametrize(
    "changes",
    [
        {"singleton_steps": 35},
        {"live_groups": 5, "dead_groups": 5},
        {"undefined_steps": 50},
        {"error_steps": 3, "error_anchors": 1},
        {"empty_steps": 3},
        {"live_groups": 5, "dead_groups": 0, "singleton_groups": 5},
    ],
)
def test_the_thresholds_themselves_are_fine(changes: dict[str, Any]) -> None:
    assert diagnosis(**changes).warnings() == []


def test_estimators_without_anchors_are_not_blamed_for_them() -> None:
    assert diagnosis(has_anchors=False, singleton_steps=100, shared_steps=0).warnings() == []


def test_nothing_at_all() -> None:
    nothing = diagnose(pl.LazyFrame(schema=SCHEMA))
    assert nothing.warnings() == []
    assert nothing.shared_fraction is None
    without_figure = {"has_anchors", "dead_score", *UNREAD}
    assert nothing.model_dump(exclude=without_figure) == {name: 0 for name in FINE if name not in without_figure}
    assert nothing.dead_score is None


def group(**values: Any) -> dict[str, Any]:
    usual = dict.fromkeys(SCHEMA) | {"episodes": 2, "scored": 2, "is_dead": False, "steps": 5}
    zero = dict.fromkeys(("defined_steps", "anchors", "singleton_steps", "shared_steps", "sign_disagreements"), 1)
    return usual | zero | values


def test_groups_are_added_up() -> None:
    rows = [
        group(
            group_id=1,
            is_dead=True,
            score_min=1.0,
            one_action_anchors=2,
            error_steps=3,
            error_anchors=1,
            empty_steps=2,
        ),
        group(group_id=2, scored=1, defined_steps=5, shared_steps=0),
        group(group_id=3, scored=0, **dict.fromkeys(UNREAD, 0)),
        group(group_id=4, episodes=4, scored=4, **dict.fromkeys(UNREAD, 0) | {"one_action_anchors": 1}),
        group(group_id=5, episodes=0, scored=0, steps=0, defined_steps=0, anchors=0),
    ]
    diagnosis = diagnose(pl.LazyFrame(rows, schema=SCHEMA))
    assert diagnosis.model_dump() == {
        "episodes": 10,
        "steps": 20,
        "undefined_steps": 12,
        "groups": 4,
        "live_groups": 1,
        "dead_groups": 1,
        "singleton_groups": 1,
        "unscored_groups": 1,
        "shared_steps": 3,
        "singleton_steps": 4,
        "has_anchors": True,
        "anchors": 4,
        "one_action_anchors": 3,
        "error_anchors": 1,
        "error_steps": 3,
        "empty_steps": 2,
        "sign_disagreements": 4,
        "dead_score": 1.0,
        "dead_groups_at_score": 1,
    }
    assert diagnosis.shared_fraction == 0.15


@pytest.mark.parametrize(("scores", "expected"), [([0, 1, 0], (0, 2)), ([1, 0], (0, 1)), ([None], (None, 0))])
def test_the_score_of_most_dead_groups(scores: list[float | None], expected: tuple[float | None, int]) -> None:
    """All siblings fail, or all succeed: the figure says which. The live group with score 1 does not count."""
    dead = [group(group_id=number, is_dead=score is not None, score_min=score) for number, score in enumerate(scores)]
    rows = [*dead, group(group_id=99, score_min=1.0)]
    diagnosis = diagnose(pl.LazyFrame(rows, schema=SCHEMA))
    assert (diagnosis.dead_score, diagnosis.dead_groups_at_score) == expected


def test_figures_nobody_read_stay_unknown() -> None:
    diagnosis = diagnose(pl.LazyFrame([group(group_id=1)], schema=SCHEMA))
    assert diagnosis.model_dump(include=set(UNREAD)) == dict.fromkeys(UNREAD)


def test_a_figure_that_one_group_lacks_is_unknown_of_all() -> None:
    """A group that an older job computed stands next to new ones: what it was not asked for is not 0."""
    rows = [group(group_id=1, error_steps=1, empty_steps=1), group(group_id=2, error_steps=2)]
    diagnosis = diagnose(pl.LazyFrame(rows, schema=SCHEMA))
    assert (diagnosis.error_steps, diagnosis.empty_steps) == (3, None)
