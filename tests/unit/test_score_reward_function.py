"""The decorator, the results and the messages, as a function's author meets them; nothing here runs in a sandbox."""

import asyncio
import inspect
from typing import Any, Dict, List, Optional  # noqa: UP035 - as the functions that are brought along spell it

import msgspec
import pytest

from pipelines.score import EvaluateResult, Message, MetricResult, StepOutput, reward_function
from pipelines.score.reward_function import (
    Record,
    RewardFunction,
    as_reward_function,
    get_judge_run,
    read_result,
    to_plain,
)

CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4", "tool_calls": [{"id": "c", "function": {"name": "add", "arguments": "{}"}}]},
]


# ---------------------------------------------------------------- a function of another library


@reward_function
def brought_along(
    messages: List[Message],  # noqa: UP006
    ground_truth: Optional[List[Message]] = None,  # noqa: UP006, UP045
    strict: bool = False,
    **kwargs: Any,
) -> EvaluateResult:
    """Written for reward-kit: only the import line is ours."""
    if not messages:
        return EvaluateResult(
            score=0.0,
            reason="No messages",
            metrics={"match": MetricResult(score=0.0, is_score_valid=False, reason="No messages")},
        )
    last = messages[-1]
    if isinstance(last, Message):
        text = last.content or ""
    elif isinstance(last, dict):
        text = last.get("content", "")
    expected = ""
    if ground_truth and len(ground_truth) > 0:
        expected = ground_truth[0].content or ""
    match = text.strip() == expected.strip() if strict else expected.strip() in text
    metrics: Dict[str, MetricResult] = {  # noqa: UP006
        "match": MetricResult(score=1.0 if match else 0.0, is_score_valid=match, reason=f"expected {expected!r}"),
        "calls": MetricResult(score=float(len(last.tool_calls or [])), reason="calls", is_score_valid=True),
    }
    outputs = [
        StepOutput(step_index=i, base_reward=0.5, reason=m["role"], metrics={"named": m.tool_calls[0].function.name})
        for i, m in enumerate(messages)
        if m.role == "assistant" and m.tool_calls
    ]
    return EvaluateResult(score=metrics["match"]["score"], reason="done", metrics=metrics, step_outputs=outputs)


def test_a_function_written_for_reward_kit_runs_unchanged() -> None:
    evaluation = brought_along(messages=CHAT, ground_truth=[{"role": "assistant", "content": "4"}], unknown="ignored")
    assert evaluation.score == evaluation["score"] == 1.0
    assert evaluation.is_score_valid
    assert evaluation.metrics["match"].reason == evaluation["metrics"]["match"]["reason"] == "expected '4'"
    assert evaluation.step_outputs is not None
    assert (evaluation.step_outputs[0].step_index, evaluation.step_outputs[0].metrics) == (1, {"named": "add"})
    assert brought_along(messages=[], ground_truth=None)["reason"] == "No messages"
    by_message = brought_along([Message(**m) for m in CHAT], ground_truth=[Message(role="x", content="5")], strict=True)
    assert by_message.score == 0.0


def test_messages_answer_to_attributes_and_to_keys() -> None:
    message = Message(CHAT[1])
    assert isinstance(message, dict)
    assert message.role == message["role"] == "assistant"
    assert message.tool_calls[0].function.name == message["tool_calls"][0]["function"]["name"] == "add"
    assert message.name is None
    assert message.reasoning_content is None
    assert message.get("name", "nobody") == "nobody"
    assert hasattr(message, "content")
    assert not hasattr(message, "contents")
    assert getattr(message, "weight", 1) is None
    with pytest.raises(AttributeError, match="a Message with role, content, tool_calls has no `contents`"):
        _ = message.contents
    with pytest.raises(AttributeError, match="a Record with no keys has no `x`"):
        _ = Record().x
    assert Message(role="user", content=None).model_dump(exclude_none=True) == {"role": "user"}
    assert Message.model_validate({"role": "user"}).role == "user"
    assert Message(content=[{"type": "text", "text": "t"}]).content[0].text == "t"


def test_results_answer_to_attributes_and_to_keys() -> None:
    result = EvaluateResult(score=0.5, reason="so")
    assert "score" in result
    assert "scores" not in result
    assert result.get("reason") == "so"
    assert result.get("nothing", 3) == 3
    assert dict(result)["score"] == dict(result.items())["score"] == 0.5
    assert list(result.keys()) == list(result)
    assert result.values()[0] == 0.5
    assert result.model_dump()["metrics"] == {}
    with pytest.raises(KeyError, match="nothing"):
        _ = result["nothing"]
    assert MetricResult(score=1.0, success=True, reason="older spelling")["success"] is True


def test_results_do_not_share_what_they_begin_with() -> None:
    first, second = EvaluateResult(), EvaluateResult()
    first.metrics["a"] = 1
    assert second.metrics == {}
    assert first.step_outputs is None


# ---------------------------------------------------------------- the decorator


def test_with_and_without_arguments_and_brackets() -> None:
    def function(messages: Any, **kwargs: Any) -> float:
        """Judge."""
        return float(len(messages))

    for scorer in (reward_function(function), reward_function()(function), reward_function(mode="pointwise")(function)):
        assert isinstance(scorer, RewardFunction)
        assert scorer(messages=CHAT).score == scorer(CHAT).score == 2.0
        assert (scorer.name, scorer.__doc__, scorer.mode) == ("function", "Judge.", "pointwise")
        assert inspect.unwrap(scorer) is function
        assert scorer.__trajlake_reward__ == scorer.describe()
    assert as_reward_function(scorer) is scorer
    assert as_reward_function(function)(messages=CHAT).score == 2.0


def test_everything_that_is_declared_is_described() -> None:
    @reward_function(
        mode="group",
        requires_network=True,
        step_index="message",
        concurrency=3,
        timeout=9,
        requirements="numpy",
        id="x",
    )
    async def judged(rollouts_messages: Any, env_return: Any = None, *, words: int = 3) -> list[float]:
        return [0.0]

    assert judged.describe() == {
        "name": "judged",
        "mode": "group",
        "is_async": True,
        "requires_network": True,
        "step_index": "message",
        "concurrency": 3,
        "timeout": 9,
        "requirements": ["numpy"],
        "parameters": ["env_return", "rollouts_messages", "words"],
        "required": [],
        "takes_all": False,
        "fixed": [],
    }
    assert msgspec.json.decode(msgspec.json.encode(judged.describe())) == judged.describe()


def test_arguments_that_a_function_does_not_take_are_left_out() -> None:
    @reward_function
    def few(messages: Any, task_id: str = "none") -> float:
        return float(task_id == "t")

    assert few(messages=[], task_id="t", steps=[], extra={}).score == 1.0
    assert few([], "t").score == 1.0

    @reward_function
    def all_of_them(messages: Any, **kwargs: Any) -> float:
        return float(len(kwargs))

    assert all_of_them(messages=[], a=1, b=2).score == 2.0

    @reward_function
    def otherwise_named(conversation: Any, /) -> float:
        return float(len(conversation))

    assert otherwise_named(messages=CHAT).score == 2.0


def test_a_function_of_many_rollouts_is_known_by_its_parameters() -> None:
    @reward_function
    def many(rollouts_messages: Any, **kwargs: Any) -> list[Any]:
        return [messages[-1].content == "4" for messages in rollouts_messages]

    assert many.mode == "batch"
    assert [result.score for result in many(rollouts_messages=[CHAT, CHAT[:1]])] == [1.0, 0.0]


def test_the_ground_truths_of_many_rollouts_have_two_names() -> None:
    @reward_function
    def many(rollouts_messages: Any, ground_truth: Any = None) -> list[float]:
        return [float(truth) for truth in ground_truth]

    outcomes = many(rollouts_messages=[[], []], ground_truth_list=[1, 2], task_id=["a", "b"])
    assert [result.score for result in outcomes] == [1.0, 2.0]


def test_async_functions_are_awaited() -> None:
    @reward_function
    async def later(messages: Any) -> dict[str, float]:
        await asyncio.sleep(0)
        return {"score": 0.25}

    assert asyncio.run(later(messages=CHAT)) == EvaluateResult(score=0.25)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"mode": "pairwise"}, "`f`: mode is 'pairwise'; valid: pointwise, batch, group"),
        ({"step_index": "turn"}, "`f`: step_index is 'turn'; valid: auto, step, message"),
    ],
)
def test_what_cannot_be_declared_is_refused(declared: dict[str, Any], message: str) -> None:
    def f(messages: Any) -> float:
        return 0.0

    with pytest.raises(ValueError, match=message):
        reward_function(**declared)(f)


def test_what_is_no_function_and_a_call_without_messages_are_refused() -> None:
    with pytest.raises(TypeError, match="decorates functions, not a str"):
        reward_function("x")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="`brought_along` is called with `messages`"):
        brought_along(ground_truth=[])


# ---------------------------------------------------------------- results of calls


@pytest.mark.parametrize(
    ("value", "score"),
    [(1, 1.0), (True, 1.0), (0.5, 0.5), ({"score": 2}, 2.0), (EvaluateResult(score=3.0), 3.0), ({"error": "e"}, None)],
)
def test_numbers_dictionaries_and_results_are_results(value: Any, score: float | None) -> None:
    assert read_result(value).score == score


def test_numbers_and_models_of_other_libraries_are_results() -> None:
    np = pytest.importorskip("numpy")
    pydantic = pytest.importorskip("pydantic")

    class Their(pydantic.BaseModel):  # type: ignore[misc, name-defined]
        score: float
        metrics: dict[str, Any]

    assert read_result(np.float32(0.5)).score == 0.5
    assert read_result(Their(score=0.5, metrics={"a": np.int64(2)})) == EvaluateResult(score=0.5, metrics={"a": 2})
    assert to_plain((np.array([1, 2]), {"a": Message(role="u")})) == [[1, 2], {"a": {"role": "u"}}]


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (None, TypeError, r'returned None; .* return EvaluateResult\(score=None, reason="\.\.\."\)$'),
        ("0.5", TypeError, "returned str; valid"),
        ([0.5], TypeError, "returned list; valid"),
        ({"scor": 1}, TypeError, r"returned a dictionary with keys \['scor'\]; valid"),
        ({1, 2}, TypeError, "a set is not JSON data"),
        (float("nan"), ValueError, "returned the score nan; valid: a finite number, or None"),
        (float("inf"), ValueError, "returned the score inf"),
        (10**400, ValueError, "returned an integer that no float64 holds"),
        ({"score": "high"}, ValueError, r"returned an invalid EvaluateResult: .*`\$.score`"),
        ({"score": 1, "step_outputs": [{"step_index": 0}]}, ValueError, "missing required field `base_reward`"),
        (EvaluateResult(score="high"), ValueError, "fields of a wrong type"),  # type: ignore[arg-type]
        (EvaluateResult(score=1.0, step_outputs=[3]), ValueError, "fields of a wrong type"),  # type: ignore[list-item]
        (
            EvaluateResult(step_outputs=[StepOutput(4, float("-inf"))]),
            ValueError,
            "returned the reward -inf for step 4; valid: a finite number",
        ),
    ],
)
def test_anything_else_is_refused_with_what_is_valid(value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read_result(value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([0.5], "`f` returned 1 results for 2 rollouts; valid: one for each, in order"),
        (0.5, r"`f` returned a float; valid: a list with one result per rollout \(2\)"),
        ([0.5, "x"], "`f` returned str; valid"),
    ],
)
def test_a_list_has_one_result_per_rollout(value: Any, message: str) -> None:
    @reward_function(mode="batch")
    def f(rollouts_messages: Any) -> Any:
        return value

    with pytest.raises(TypeError, match=message):
        f(rollouts_messages=[[], []])


# ---------------------------------------------------------------- inside a run, with judges


def test_a_call_brings_its_judges_answers_along() -> None:
    """`judge_known` goes in, `judge_answers` comes out; the function sees neither."""

    @reward_function(requires_network=True)
    def judged(messages: Any, **kwargs: Any) -> float:
        run = get_judge_run()
        assert run is not None
        assert kwargs == {"task_id": "t"}
        run.fresh.append({"request_id": "r"})
        if run.answers:
            raise LookupError(*run.answers)
        return 1.0

    assert get_judge_run() is None
    outcome = judged(messages=[], task_id="t", judge_known={})
    assert outcome["score"] == 1.0
    assert outcome["judge_answers"] == [{"request_id": "r"}]
    failed = judged(messages=[], task_id="t", judge_known={"q": "a"})
    assert failed == {"error": "LookupError: q", "judge_answers": [{"request_id": "r"}]}
    assert get_judge_run() is None


def test_a_call_of_many_brings_them_last() -> None:
    @reward_function(mode="group", requires_network=True)
    async def judged(rollouts_messages: Any) -> list[float]:
        run = get_judge_run()
        assert run is not None
        run.fresh.append({"request_id": "r"})
        if run.answers:
            raise LookupError
        return [1.0] * len(rollouts_messages)

    *results, last = asyncio.run(judged(rollouts_messages=[[], []], judge_known={}))
    assert [result["score"] for result in results] == [1.0, 1.0]
    assert last == {"judge_answers": [{"request_id": "r"}]}
    failed = asyncio.run(judged(rollouts_messages=[[], []], judge_known={"q": "a"}))
    assert failed == [{"error": "LookupError: "}] * 2 + [{"judge_answers": [{"request_id": "r"}]}]
