"""Calls that repeat their history: which earlier one each continues from, in messages and in tokens."""

import pytest

from lake.formats.base.rows import ShapeError
from lake.formats.chat.completions import Lineage
from lake.formats.chat.messages import CallHistory
from lake.records import TokensRecord

SYSTEM = {"role": "system", "content": "Be short."}
ASK = {"role": "user", "content": "1 + 2?"}
SAY = {"role": "assistant", "content": "It is 3."}
MORE = {"role": "user", "content": "And 4?"}


def test_a_prompt_goes_on_from_the_call_that_it_begins_with() -> None:
    calls = CallHistory()
    calls.add([SYSTEM, ASK], SAY)
    step = calls.add([SYSTEM, ASK, SAY, MORE], SAY)
    assert (step.state, step.context) == ("And 4?", [MORE])
    assert (calls.initial_messages, calls.follows) == ([SYSTEM, ASK], [None, 0])


def test_what_a_client_makes_of_an_answer_does_not_matter() -> None:
    calls = CallHistory()
    calls.add([ASK], SAY | {"content": "<think>1, 2</think> It is 3."})
    assert calls.add([ASK, SAY, MORE], SAY).context == [MORE]


def test_of_several_calls_the_one_with_the_longest_prompt_counts() -> None:
    calls = CallHistory()
    calls.add([ASK], SAY)
    calls.add([ASK, SAY, MORE], SAY)
    assert calls.add([ASK, SAY, MORE, SAY, ASK], SAY).context == [ASK]
    assert calls.add([ASK, SAY, MORE], SAY).context == [MORE], "sampled again"
    assert calls.follows == [None, 0, 1, 0]


def test_a_history_that_was_cut_is_all_new() -> None:
    calls = CallHistory()
    calls.add([ASK], SAY)
    step = calls.add([SYSTEM, MORE, SAY, ASK], SAY)
    assert (step.context, step.state) == ([SYSTEM, MORE, SAY, ASK], "1 + 2?")
    assert calls.follows == [None, None]


def test_examples_in_the_first_prompt_are_no_calls() -> None:
    calls = CallHistory()
    step = calls.add([ASK, SAY, MORE], SAY)
    assert (step.context, calls.follows, len(calls.steps)) == ([], [None], 1)


def test_a_wrong_message_is_named() -> None:
    with pytest.raises(ShapeError, match=r"`the prompt\[1\].role` is None"):
        CallHistory().add([ASK, {"content": "x"}], SAY, location="the prompt")


def test_tokens_extend_the_longest_sequence_and_of_equals_the_newest() -> None:
    lineage = Lineage()
    assert lineage.add(0, [1], [2]) == TokensRecord(context_ids=[1], action_ids=[2], prefix_step_index=None)
    assert lineage.add(1, [1, 2, 3], [4]).prefix_step_index == 0
    assert lineage.add(2, [1, 2, 3], [4]).context_ids == [3]
    third = lineage.add(3, [1, 2, 3, 4, 5], [6], [-0.5])
    assert (third.prefix_step_index, third.context_ids, third.action_logprobs) == (2, [5], [-0.5])
    assert lineage.add(4, [9], [1]).prefix_step_index is None
    other_lineage = Lineage()
    other_lineage.add(0, [1, 2], [3])
    other_lineage.add(1, [1], [2])
    assert other_lineage.add(2, [1, 2, 3, 4], [5]).prefix_step_index == 0, "a newer one that is shorter does not count"
