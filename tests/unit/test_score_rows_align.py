"""Which step a step output means, and what is said of those that mean none."""

from typing import Any

import pytest

from pipelines.score import StepOutput
from pipelines.score.rows import EXAMPLES, align_steps
from testkit.wording import Wording

STEPS = (0, 1, 2, 3)
MESSAGES = (2, 4, 6, 9)


def outputs(*indices: Any) -> list[StepOutput]:
    return [StepOutput(step_index=index, base_reward=float(n)) for n, index in enumerate(indices)]


def rewards(alignment: Any) -> dict[int, float]:
    return {step: output.base_reward for step, output in alignment.outputs.items()}


@pytest.mark.parametrize(
    ("indices", "meaning", "expected"),
    [
        ((0, 1, 3), "auto", {0: 0.0, 1: 1.0, 3: 2.0}),
        ((9, 2), "auto", {3: 0.0, 0: 1.0}),
        (("9", "2"), "auto", {3: 0.0, 0: 1.0}),
        ((2,), "step", {2: 0.0}),
        ((2,), "message", {0: 0.0}),
        ((), "auto", {}),
    ],
)
def test_an_output_means_a_step_or_a_message(indices: Any, meaning: Any, expected: dict[int, float]) -> None:
    alignment = align_steps(outputs(*indices), STEPS, MESSAGES, meaning)
    assert rewards(alignment) == expected
    assert alignment.faults == []
    assert alignment.error is None


def test_what_may_mean_both_means_nothing(wording: Wording) -> None:
    alignment = align_steps(outputs(2), STEPS, MESSAGES)
    assert alignment.outputs == {}
    (fault,) = alignment.faults
    assert "step 2 or message 2 (step 0)" in wording(fault)
    assert '@reward_function(step_index="step")' in fault


def test_where_both_readings_agree_nothing_is_ambiguous() -> None:
    """An episode that begins with the assistant: step 0 is message 0."""
    assert rewards(align_steps(outputs(0), (0, 1), (0, 2))) == {0: 0.0}
    assert align_steps(outputs(0, 2), (0, 1), (0, 2)).faults == []
    assert rewards(align_steps(outputs(0, 2), (0, 1), (0, 2))) == {0: 0.0, 1: 1.0}


@pytest.mark.parametrize("meaning", ["auto", "step", "message"])
@pytest.mark.parametrize("index", [-1, 10, "last", "", "1.0", True, "²"])
def test_what_means_no_step_is_told_with_what_is_valid(index: Any, meaning: Any) -> None:
    alignment = align_steps(outputs(index), STEPS, MESSAGES, meaning)
    assert alignment.outputs == {}
    assert alignment.faults == [f"step_index {index!r}: valid are steps 0 to 3, or messages 2, 4, 6, 9"]
    assert alignment.error is not None
    assert alignment.error.startswith("1 step outputs match ")


def test_the_reading_that_fits_more_is_taken_and_the_rest_is_told() -> None:
    alignment = align_steps(outputs(2, 4, 6, 7), STEPS, MESSAGES)
    assert rewards(alignment) == {0: 0.0, 1: 1.0, 2: 2.0}
    assert alignment.faults == ["step_index 7: valid are steps 0 to 3, or messages 2, 4, 6, 9"]


def test_a_second_output_for_a_step_is_told_and_the_first_stays() -> None:
    alignment = align_steps(outputs(1, 1, "1"), STEPS, MESSAGES)
    assert rewards(alignment) == {1: 0.0}
    assert len(alignment.faults) == 2
    assert all("step_index 1 means step 1" in fault for fault in alignment.faults)


def test_an_episode_without_steps_matches_nothing() -> None:
    alignment = align_steps(outputs(0), (), ())
    (fault,) = alignment.faults
    assert fault.startswith("step_index 0: ")
    assert fault.endswith("has no steps")


def test_steps_need_not_begin_at_zero() -> None:
    """Steps that are not active are not there."""
    alignment = align_steps(outputs(3, 5), (3, 5), (1, 4))
    assert rewards(alignment) == {3: 0.0, 5: 1.0}


def test_many_faults_are_counted_and_a_few_spelled_out() -> None:
    alignment = align_steps(outputs(*range(100, 112)), STEPS, MESSAGES)
    assert len(alignment.faults) == 12
    assert alignment.error is not None
    assert alignment.error.count("step_index") == EXAMPLES
    assert alignment.error.endswith(f"; and {12 - EXAMPLES} more")
