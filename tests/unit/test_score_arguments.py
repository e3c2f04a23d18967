"""What a call cannot be made with is said before anything runs; what may not be meant is said, too."""

from typing import Any

import pytest

from lake.errors import UsageError
from pipelines.score import reward_function
from pipelines.score.arguments import check_arguments, given_arguments
from pipelines.score.reward_function import MODES, Mode, RewardFunction
from pipelines.score.rollouts import Rollout, joint_call, one_call


def check(function: RewardFunction, **arguments: Any) -> list[str]:
    declared = function.describe()
    return check_arguments(
        function.name,
        function.mode,
        arguments,
        parameters=declared["parameters"],
        required=declared["required"],
        takes_all=declared["takes_all"],
    )


@reward_function
def strict(messages: Any, task_id: str, *, threshold: float, words: int = 3) -> float:
    return threshold


@reward_function
def lenient(messages: Any, *, threshold: float = 1.0, **kwargs: Any) -> float:
    return threshold


def test_a_parameter_that_nothing_fills_is_refused_with_the_flag_that_does() -> None:
    with pytest.raises(UsageError, match=r"`strict` needs argument `threshold`: .*; add --arg threshold=\.\.\.$"):
        check(strict)
    assert check(strict, threshold=1) == []


def test_an_argument_that_the_function_does_not_take_is_refused() -> None:
    with pytest.raises(UsageError, match=r"`strict` takes no arguments `a`, `b`, .* own arguments: threshold, words$"):
        check(strict, threshold=1, b=1, a=2)


def test_an_argument_for_kwargs_is_said() -> None:
    (said,) = check(lenient, nope=1, threshold=2)
    assert said.startswith("argument `nope` is no parameter of `lenient`: it goes to **kwargs, and each value of it ")
    assert said.endswith("own arguments: threshold")
    assert check(lenient, threshold=2) == []


@pytest.mark.parametrize("name", ["messages", "ground_truth", "env_return", "steps", "_judge_answers"])
def test_what_the_lake_gives_cannot_be_set(name: str) -> None:
    from pipelines.score import judging

    with pytest.raises(UsageError, match="comes from the lake and cannot be set"):
        check(lenient, **{judging.ARGUMENT if name.startswith("_") else name: 3})


@pytest.mark.parametrize("mode", MODES)
def test_the_names_that_a_call_fills_are_those_of_the_call(mode: Mode) -> None:
    """The oracle is the call itself, made of a rollout that has every argument."""
    from pipelines.score.rollouts import ARGUMENTS

    rollout = Rollout(1, 1, "r", (), (), dict.fromkeys(ARGUMENTS))
    call = one_call(rollout, {}) if mode == "pointwise" else joint_call([rollout], {})
    assert given_arguments(mode) >= call.keys()
    assert given_arguments(mode) - call.keys() == (set() if mode == "pointwise" else {"ground_truth"})


def test_what_a_call_has_to_fill() -> None:
    @reward_function
    def all_kinds(chat: Any, /, task_id: str, other: int, *rest: Any, key: int, filled: int = 1, **kwargs: Any) -> int:
        return len(chat)

    assert all_kinds.required == ["task_id", "other", "key"]
    assert all_kinds(messages=[1, 2], task_id="t", other=1, key=2).score == 2.0

    @reward_function
    def by_keyword(*, messages: Any, key: int) -> int:
        return len(messages)

    assert by_keyword.required == ["key"]

    @reward_function(mode="batch")
    def many(rollouts_messages: Any, ground_truth: Any, ground_truth_list: Any, env_return: Any) -> list[int]:
        return [1]

    assert check(many) == []
    with pytest.raises(TypeError, match="nothing fills the positional-only words; give a default"):
        reward_function(lambda messages, words, /: 1)


def test_messages_that_are_positional_only_are_given() -> None:
    @reward_function
    def count(messages: Any, /) -> int:
        return len(messages)

    assert count(messages=[1, 2, 3]).score == 3.0
