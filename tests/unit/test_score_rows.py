"""From what a function returned to rows of `scores`: unknown is NULL, and every NULL has a reason or an error."""

from typing import Any

import polars as pl
import pytest

from lake import ids
from pipelines.score import EvaluateResult, MetricResult, StepOutput
from pipelines.score.reward_function import to_plain
from pipelines.score.rollouts import RolloutInput
from pipelines.score.rows import (
    DEFAULT_REASON,
    EXAMPLES,
    LONGEST_TEXT,
    SCHEMA,
    ResultReading,
    ScoredEpisodes,
    add_result,
)

ROLLOUT = RolloutInput(7, 8, "r", (0, 1, 2), (2, 4, 6), {})


def added(
    value: Any, error: str | None = None, **reading: Any
) -> tuple[dict[str, Any], dict[int, Any], ScoredEpisodes]:
    """The episode's row, the steps' rows by step, and the whole."""
    scored = ScoredEpisodes()
    add_result(scored, ROLLOUT, value, error, ResultReading(**reading))
    first, *rest = scored.frame().to_dicts()
    assert first["step_index"] is None
    assert {(row["episode_id"], row["group_id"], row["run_id"]) for row in [first, *rest]} == {(7, 8, "r")}
    return first, {row["step_index"]: row for row in rest}, scored


def test_a_full_result_is_kept_in_full() -> None:
    result = EvaluateResult(
        score=0.5,
        reason="so so",
        metrics={"a": MetricResult(score=1.0, reason="fine"), "b": 2},
        step_outputs=[StepOutput(step_index=1, base_reward=-1.0, reason="bad", metrics={"m": 1})],
        trajectory_info={"t": 1},
    )
    row, steps, scored = added(to_plain(result), isolation="strong")
    assert (row["value"], row["reason"], row["error"], row["isolation"]) == (0.5, "so so", None, "strong")
    assert row["metrics"] == (
        '{"a":{"score":1.0,"is_score_valid":true,"reason":"fine","data":{},"success":null},"b":2,"trajectory_info":{"t":1}}'
    )
    assert list(steps) == [1]
    columns = {name: steps[1][name] for name in ("value", "reason", "error", "isolation", "metrics")}
    assert columns == {"value": -1.0, "reason": "bad", "error": None, "isolation": "strong", "metrics": '{"m":1}'}
    assert (scored.episodes, scored.unmatched, scored.examples) == (1, 0, [])
    assert scored.frame().schema == pl.Schema(SCHEMA)


def test_a_number_is_a_score() -> None:
    row, steps, _ = added(0.25)
    assert (row["value"], row["reason"], row["error"], row["metrics"], steps) == (0.25, None, None, None, {})


def test_no_score_without_a_fault_is_null_without_an_error() -> None:
    """A function that rewards steps only, or to which an episode says nothing."""
    row, steps, scored = added(
        {"score": None, "reason": "no tool", "step_outputs": [{"step_index": 0, "base_reward": 2}]}
    )
    assert (row["value"], row["reason"], row["error"]) == (None, "no tool", None)
    assert steps[0]["value"] == 2.0
    assert scored.examples == []


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ({"score": 0.0, "error": "the judge was away"}, "the judge was away"),
        (
            {"score": 0.0, "is_score_valid": False, "reason": "no answer"},
            "the function reports that its score is not valid: no answer",
        ),
        ({"score": 0.0, "is_score_valid": False}, "the function reports that its score is not valid"),
        (None, "the function returned None; where there is no score, return EvaluateResult(score=None, reason="),
        ("high", "the function returned str; valid: a number"),
        ({"score": []}, "the function returned an invalid EvaluateResult: "),
        ({"score": 10**400}, "the function returned an invalid EvaluateResult: "),
        (10**400, "the function returned an integer that no float64 holds"),
    ],
)
def test_a_fault_is_null_and_an_error_and_never_zero(value: Any, error: str) -> None:
    row, steps, scored = added(value, default_step_reward=None)
    assert row["value"] is None
    assert row["error"].startswith(error)
    assert steps == {}
    assert scored.examples == [f"episode {ids.to_text(7)}: {row['error']}"]


def test_a_call_that_failed_gives_no_step_rewards_not_even_the_default() -> None:
    row, steps, _ = added(None, "timeout: 10 s", default_step_reward=0.0)
    assert (row["value"], row["error"], steps) == (None, "timeout: 10 s", {})
    row, steps, _ = added(
        {"error": "e", "step_outputs": [{"step_index": 0, "base_reward": 1}]}, default_step_reward=0.0
    )
    assert (row["error"], steps) == ("e", {})


def test_a_score_that_is_not_valid_leaves_its_steps_alone() -> None:
    value = {"score": 1, "is_score_valid": False, "step_outputs": [{"step_index": 0, "base_reward": 1}]}
    row, steps, _ = added(value)
    assert (row["value"], steps[0]["value"]) == (None, 1.0)


def test_the_default_fills_steps_without_an_output_only_where_it_was_asked_for() -> None:
    value = {"score": 1, "step_outputs": [{"step_index": 1, "base_reward": 1}, {"step_index": 2, "base_reward": None}]}
    assert {step: row["value"] for step, row in added(value)[1].items()} == {1: 1.0, 2: None}
    filled = added(value, default_step_reward=-0.1)[1]
    assert {step: row["value"] for step, row in filled.items()} == {0: -0.1, 1: 1.0, 2: None}
    assert [filled[step]["reason"] for step in range(3)] == [DEFAULT_REASON, None, None]


def test_outputs_that_match_no_step_are_an_error_beside_the_score() -> None:
    value = {"score": 1, "step_outputs": [{"step_index": 9, "base_reward": 1}, {"step_index": 0, "base_reward": 2}]}
    row, steps, scored = added(value)
    assert row["value"] == 1.0
    assert "step_index 9: valid are " in row["error"]
    assert "steps 0 to 2" in row["error"]
    assert {step: row["value"] for step, row in steps.items()} == {0: 2.0}
    assert scored.unmatched == 1
    assert scored.examples == [f"episode {ids.to_text(7)}: {row['error']}"]


def test_the_declared_meaning_of_step_index_is_used() -> None:
    value = {"step_outputs": [{"step_index": 2, "base_reward": 1}]}
    assert list(added(value, step_index="step")[1]) == [2]
    assert list(added(value, step_index="message")[1]) == [0]
    assert added(value, step_index="auto")[1] == {}


def test_long_texts_are_cut_and_odd_ones_are_written() -> None:
    row, _, _ = added({"score": 1, "reason": "x" * 10_000, "metrics": {"a": float("nan")}})
    assert row["reason"] == "x" * LONGEST_TEXT + " ... [10000 characters]"
    assert row["metrics"] == '{"a":null}'
    assert added({"score": 1, "reason": "\ud800"})[0]["reason"] == "\\ud800"


def test_a_few_errors_are_examples() -> None:
    scored = ScoredEpisodes()
    for _ in range(EXAMPLES + 2):
        add_result(scored, ROLLOUT, None, "e", ResultReading())
    assert len(scored.examples) == EXAMPLES
    assert scored.frame()["error"].to_list() == ["e"] * (EXAMPLES + 2)
