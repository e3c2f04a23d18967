"""Drift, by hand: each kind with its first token and how many there are."""

import asyncio

import pytest

from pipelines.collect.policies.engine_policy import (
    Drift,
    DriftCounts,
    EnginePolicy,
    build_drift_record,
    compute_drift,
    is_left_out,
)
from testkit.chat_models import ToyEngine, generated, tokenizer_of


def token(text: str, manner: str = "chatml") -> int:
    [token] = tokenizer_of(manner).encode(text, add_special_tokens=False)
    return token


def extras(manner: str, *answers: list[int]):
    """What is stored of each decision, and the lengths of the prompts."""
    waiting = list(answers)
    engine = ToyEngine(lambda _: generated(waiting.pop(0)))
    policy = EnginePolicy(engine, tokenizer_of(manner), name="x")

    async def play():
        talk = policy.open(0, key="k")
        return [await talk.decide([{"role": "user", "content": "a"}]) for _ in answers]

    decisions = asyncio.run(play())
    return [decision.extra for decision in decisions], [len(request.prompt_ids) for request, _ in engine.seen], policy


END = token("<|im_end|>")
SPELLED = [token("e"), token("a"), token("s"), token("t")]


def test_the_words_below_are_single_tokens_and_can_be_spelled():
    assert tokenizer_of("chatml").encode("go east", add_special_tokens=False) == [token("go"), token(" east")]
    assert tokenizer_of("chatml").decode([token("go"), token(" "), *SPELLED]) == "go east"


@pytest.mark.parametrize(
    ("answer", "drift"),
    [
        ([token("go"), token(" east"), END], None),
        ([token("go"), token(" east")], None),
        ([token("go"), token(" "), *SPELLED, END], {"retokenised": {"first": 1, "tokens": 5}}),
        ([token("g"), token("o"), token(" east"), END], {"retokenised": {"first": 0, "tokens": 2}}),
        ([token("g"), token("o")], {"retokenised": {"first": 0, "tokens": 2}}),
        ([END, END], None),
    ],
)
def test_another_split_of_the_same_text_is_told_at_once(answer, drift):
    [extra], [prompt], _ = extras("chatml", answer)
    if drift is not None:
        drift["retokenised"]["first"] += prompt
    assert extra == (drift and {"drift": drift})


def test_a_split_across_the_border_of_prompt_and_answer_is_told_too():
    """The template opens an answer by "\\n<think>\\n"; a line end that the model adds would be one token with that."""
    manner = "opens reasoning"
    tokenizer = tokenizer_of(manner)
    tokenizer_ids = tokenizer.encode("\n\n", add_special_tokens=False)
    [extra], [prompt], _ = extras(manner, [token("\n", manner), END])
    merged = len(tokenizer_ids) == 1
    assert (extra == {"drift": {"retokenised": {"first": prompt - 1, "tokens": 2}}}) == merged


def test_white_space_that_the_template_trims_is_left_out():
    [_, extra], [prompt, _], policy = extras("trims", [token(" "), token("go"), END], [token("go"), END])
    assert extra == {"drift": {"unrendered": {"first": prompt, "tokens": 1}}}
    assert policy.counts["unrendered_tokens"] == 1


def test_an_answer_that_the_template_writes_otherwise_is_rewritten():
    [_, extra], [prompt, _], _ = extras("shouts", [token("go"), END], [token("g"), END])
    assert extra == {"drift": {"rewritten": {"first": prompt, "tokens": 1}}}


def test_what_the_template_changes_at_the_beginning_is_told_there():
    [_, extra], [prompt, _], _ = extras("counts", [token("go"), END], [token("go"), END])
    assert extra == {"drift": {"rewritten": {"first": 0, "tokens": prompt + 2}}}


def test_both_kinds_of_one_decision_are_stored():
    [_, extra], prompts, policy = extras("shouts", [token("go"), END], [token("g"), token("o"), END])
    assert extra == {
        "drift": {"rewritten": {"first": prompts[0], "tokens": 1}, "retokenised": {"first": prompts[1], "tokens": 2}}
    }
    assert policy.counts["drifted"] == 1
    assert policy.counts["retokenised"] == policy.counts["rewritten"] == 1


def test_differences_are_between_the_first_and_the_last():
    assert compute_drift("rewritten", [1, 2, 3], [1, 2, 3]) is None
    assert compute_drift("rewritten", [1, 2, 3, 4], [1, 9, 9, 4], offset=10) == Drift("rewritten", 11, 2)
    assert compute_drift("rewritten", [1, 2], [1, 5, 2]) == Drift("rewritten", 1, 0)
    assert compute_drift("rewritten", [1, 1, 1], [1]) == Drift("rewritten", 1, 2)
    assert compute_drift("rewritten", [], [1]) == Drift("rewritten", 0, 0)


def test_left_out_is_what_only_lacks_something():
    assert is_left_out("abc", "ac")
    assert not is_left_out("abc", "acb")


def test_counts_are_of_decisions_and_of_tokens():
    counts = DriftCounts()
    counts.add([])
    counts.add([Drift("unrendered", 3, 4), Drift("retokenised", 9, 2)])
    assert counts.record() == {
        "decisions": 2,
        "drifted": 1,
        "retokenised": 1,
        "retokenised_tokens": 2,
        "unrendered": 1,
        "unrendered_tokens": 4,
        "rewritten": 0,
        "rewritten_tokens": 0,
    }
    assert build_drift_record([Drift("unrendered", 3, 4)]) == {"unrendered": {"first": 3, "tokens": 4}}
