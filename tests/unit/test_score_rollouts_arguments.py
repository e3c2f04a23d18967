"""What a call cannot be made with is said before anything runs; what may not be meant is said, too."""

from functools import partial
from typing import Any

import pytest

from lake.errors import UsageError
from pipelines.score import reward_function
from pipelines.score.reward_function import MODES, Mode, RewardFunction, as_reward_function
from pipelines.score.rollouts import (
    ARGUMENTS,
    RolloutInput,
    check_arguments,
    list_arguments,
    make_call,
    make_joint_call,
)
from testkit.wording import Wording


def check(function: RewardFunction, **arguments: Any) -> list[str]:
    declared = function.describe()
    return check_arguments(
        function.name,
        function.mode,
        arguments,
        parameters=declared["parameters"],
        required=declared["required"],
        takes_all=declared["takes_all"],
        fixed=declared["fixed"],
    )


@reward_function
def strict(messages: Any, task_id: str, *, threshold: float, words: int = 3) -> float:
    return threshold


@reward_function
def lenient(messages: Any, *, threshold: float = 1.0, **kwargs: Any) -> float:
    return threshold


def test_a_parameter_that_nothing_fills_is_refused_with_the_flag_that_does() -> None:
    with pytest.raises(UsageError, match=r"`strict` needs argument `threshold`: .* add --arg threshold=\.\.\.$"):
        check(strict)
    assert check(strict, threshold=1) == []


def test_an_argument_that_the_function_does_not_take_is_refused() -> None:
    with pytest.raises(UsageError, match=r"`strict` takes no arguments `a`, `b`, .* own arguments: threshold, words$"):
        check(strict, threshold=1, b=1, a=2)


def test_an_argument_for_kwargs_is_said(wording: Wording) -> None:
    (fault,) = check(lenient, nope=1, threshold=2)
    assert "`nope` is not a parameter" in wording(fault)
    assert fault.endswith("own arguments: threshold")
    assert check(lenient, threshold=2) == []


@pytest.mark.parametrize("name", ["messages", "ground_truth", "env_return", "steps", "_judge_answers"])
def test_what_the_lake_gives_cannot_be_set(name: str) -> None:
    from pipelines.score.reward_function import KNOWN_ANSWERS

    with pytest.raises(UsageError, match="cannot be set"):
        check(lenient, **{KNOWN_ANSWERS if name.startswith("_") else name: 3})


@pytest.mark.parametrize("mode", MODES)
def test_the_names_that_a_call_fills_are_those_of_the_call(mode: Mode) -> None:
    """The oracle is the call itself, made of a rollout that has every argument."""
    rollout = RolloutInput(1, 1, "r", (), (), dict.fromkeys(ARGUMENTS))
    call = make_call(rollout, {}) if mode == "pointwise" else make_joint_call([rollout], {})
    assert list_arguments(mode) >= call.keys()
    assert list_arguments(mode) - call.keys() == (set() if mode == "pointwise" else {"ground_truth", "ground_truths"})


@pytest.mark.parametrize("name", ["ground_truth_list", "ground_truths", "ground_truth"])
def test_a_joint_call_hands_over_the_truths_by_each_of_their_names(name: str) -> None:
    namespace: dict[str, Any] = {}
    exec(f"def judge(rollouts_messages, {name}=None): return {name}", namespace)
    function = reward_function(namespace["judge"])
    assert check(function) == []
    rollouts = [RolloutInput(n, 1, "r", (), (), {"messages": [], "ground_truth": n}) for n in (1, 2)]
    assert [result.score for result in function(**make_joint_call(rollouts, {}))] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("mode", "name", "near"),
    [
        ("batch", "env_returns", "env_return"),
        ("group", "task_id_list", "task_id"),
        ("group", "messages", "rollouts_messages"),
        ("pointwise", "ground_truths", "ground_truth"),
        ("pointwise", "ground_truth_list", "ground_truth"),
    ],
)
def test_a_default_that_a_near_name_would_leave_in_silence_is_refused(mode: Mode, name: str, near: str) -> None:
    namespace: dict[str, Any] = {}
    exec(f"def judge(status, {name}=None, **kwargs): return 1.0", namespace)
    function = reward_function(mode=mode)(namespace["judge"])
    with pytest.raises(UsageError) as refused:
        check(function)
    assert {f"`{name}`", f"`{near}`"} <= set(refused.value.args[0].replace(";", " ").replace(",", " ").split())
    assert check(function, **{name: 1}) == [], "a value of the user's"


def test_what_a_call_has_to_fill() -> None:
    @reward_function
    def all_kinds(chat: Any, /, task_id: str, second: int, *rest: Any, key: int, filled: int = 1, **kwargs: Any) -> int:
        return len(chat)

    assert all_kinds.required == ["task_id", "second", "key"]
    assert all_kinds(messages=[1, 2], task_id="t", second=1, key=2).score == 2.0

    @reward_function
    def by_keyword(*, messages: Any, key: int) -> int:
        return len(messages)

    assert by_keyword.required == ["key"]

    @reward_function(mode="batch")
    def many(rollouts_messages: Any, ground_truth: Any, ground_truth_list: Any, env_return: Any) -> list[int]:
        return [1]

    assert check(many) == []


def test_messages_that_are_positional_only_are_given() -> None:
    @reward_function
    def count(messages: Any, /) -> int:
        return len(messages)

    assert count(messages=[1, 2, 3]).score == 3.0


# ---------------------------------------------------------------- by name, in any order

ROW = {name: name for name in ARGUMENTS} | {"messages": [{"role": "user", "content": "hi"}], "env_return": 2.0}
"""What a call gives."""


class Judge:
    """Its instances, and their methods, are functions too."""

    def __call__(self, env_return: float, messages: Any) -> float:
        return env_return + len(messages)

    def method(self, env_return: float, /, messages: Any) -> float:
        return env_return + len(messages)


def outcome_first(env_return: float, messages: Any, words: int = 10) -> float:
    return env_return + len(messages) + words


def positional_only(env_return: float, words: int = 10, messages: Any = (), /, *, task_id: str) -> float:
    return env_return + len(messages) + words + (task_id == "task_id") - 1


def starred(env_return: float, *rest: Any, messages: Any, **kwargs: Any) -> float:
    return env_return + len(messages) + 10 * (not rest) * (kwargs.keys() == ROW.keys() - {"env_return", "messages"})


def nothing_named(*rest: Any, **kwargs: Any) -> float:
    return kwargs["env_return"] + len(kwargs["messages"]) + 10 * (not rest)


@pytest.mark.parametrize(
    ("function", "score"),
    [
        (lambda env_return: env_return, 2.0),
        (lambda *, env_return: env_return, 2.0),
        (lambda env_return, /: env_return, 2.0),
        (lambda task_id, env_return=0.5, nobody=1.0: env_return + nobody + (task_id == "task_id"), 4.0),
        (lambda chat, /: len(chat), 1.0),
        (outcome_first, 13.0),
        (positional_only, 13.0),
        (starred, 13.0),
        (nothing_named, 13.0),
        (Judge(), 3.0),
        (Judge().method, 3.0),
        (partial(outcome_first, words=3), 6.0),
        (partial(outcome_first, 7.0), 18.0),
        (partial(outcome_first, env_return=0.0), 11.0),
        (partial(starred, env_return=5.0, messages=()), 15.0),
    ],
)
def test_parameters_are_filled_by_name_in_any_order(function: Any, score: float) -> None:
    judge = as_reward_function(function)
    assert check(judge) == []
    assert judge(**ROW).score == score


def test_messages_are_messages_wherever_they_stand() -> None:
    assert reward_function(lambda env_return, messages: messages[0].role == "user")(**ROW).score == 1.0


def test_several_rollouts_by_name_in_any_order() -> None:
    @reward_function
    def many(env_return: Any, rollouts_messages: Any) -> list[float]:
        return [value + len(messages) for value, messages in zip(env_return, rollouts_messages, strict=True)]

    assert many.mode == "batch"
    assert check(many) == []
    joint = {"rollouts_messages": [[{"role": "user"}], []], "env_return": [1.0, 5.0], "task_id": ["a", "b"]}
    assert [result.score for result in many(**joint)] == [2.0, 5.0]
    alone = reward_function(mode="group")(lambda env_return: env_return)
    assert [result.score for result in alone(**joint)] == [1.0, 5.0]


def test_calls_by_hand_give_parameters_in_their_own_order() -> None:
    assert as_reward_function(outcome_first)(1.0, [], 2).score == 3.0
    assert as_reward_function(positional_only)(1.0, 2, [1], task_id="task_id").score == 4.0
    assert as_reward_function(lambda env_return, *rest: env_return + sum(rest))(1.0, 2.0, 3.0).score == 6.0


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (
            lambda reward: reward,
            "`f` needs argument `reward`: .* A rollout gives messages, .*, steps. For a value ",
        ),
        (lambda conversation, **kwargs: 1.0, "`f` needs argument `conversation`: .* add --arg conversation="),
        (lambda messages, second, /: 1.0, "`f` needs argument `second`"),
        (lambda: 1.0, "`f` takes nothing from a rollout: .* A rollout gives messages, ground_truth, "),
        (lambda *args: 1.0, "`f` takes nothing from a rollout"),
        (lambda *, words=3: 1.0, "`f` takes nothing from a rollout"),
    ],
)
def test_a_parameter_that_no_row_fills_is_refused_with_what_there_is(function: Any, words: str) -> None:
    function.__name__ = "f"
    with pytest.raises(UsageError, match=words):
        check(as_reward_function(function))


def test_what_a_partial_has_filled_is_no_argument() -> None:
    with pytest.raises(UsageError, match="argument `words` of `reward` is filled by functools"):
        check(as_reward_function(partial(starred, words=3)), words=4)
