"""Conversations over any template: what is recorded is what the engine saw; every difference to a rendering is
reported."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.collect.policies.engine_policy import EnginePolicy, EnginePolicyOptions
from testkit.chat_models import APPENDING, TEMPLATES, ToyEngine, generated, tokenizer_of
from testkit.examples import examples

VOCABULARY = len(tokenizer_of("chatml"))
IDS = st.lists(st.integers(0, VOCABULARY - 1), max_size=8)
SAID = st.sampled_from(["go east", " look ", "<think>hm</think>go", "", "\n", "\N{SNOWMAN}", "<|im_start|>", "a" * 9])
SHOWN = st.one_of(SAID, st.text(st.characters(exclude_categories=["Cs"]), max_size=12))


@st.composite
def turns(draw, manner: str):
    """Messages, and ids of the answer: whole texts, any ids at all, with one of the ends or cut off."""
    tokenizer = tokenizer_of(manner)
    roles = st.sampled_from(["user", "system"])
    messages = draw(st.lists(st.builds(lambda r, t: {"role": r, "content": t}, roles, SHOWN), min_size=1, max_size=2))
    ids = draw(st.one_of(IDS, SAID.map(lambda text: tokenizer.encode(text, add_special_tokens=False))))
    end = draw(st.sampled_from([[], ["<|im_end|>"], ["<|turn|>"]]))
    return messages, [*ids, *tokenizer.convert_tokens_to_ids(end)] or [5]


@st.composite
def conversations(draw):
    manner = draw(st.sampled_from(sorted(TEMPLATES)))
    return manner, draw(st.lists(turns(manner), min_size=1, max_size=5))


def played(manner, turns_S):
    """The decisions, and what the engine was asked."""
    waiting = [ids for _, ids in turns_S]
    engine = ToyEngine(lambda _: generated(waiting.pop(0)))
    policy = EnginePolicy(engine, tokenizer_of(manner), name="x", options=EnginePolicyOptions(tool_format="none"))

    async def play():
        talk = policy.open(1, key="k")
        return [await talk.decide(messages) for messages, _ in turns_S]

    return policy, asyncio.run(play()), engine.seen


@given(conversations())
@settings(max_examples=examples(150))
def test_recorded_tokens_add_up_to_what_the_engine_saw(conversation):
    _, decisions, prompts = played(*conversation)
    sequence: list[int] = []
    for decision, (request, generation) in zip(decisions, prompts, strict=True):
        tokens = decision.tokens
        sequence = [*([] if tokens.prefix_step_index is None else sequence), *tokens.context_ids]
        assert sequence == list(request.prompt_ids)
        sequence += tokens.action_ids
        assert tokens.action_ids == generation.ids
        assert tokens.action_logprobs == generation.logprobs


@given(conversations())
@settings(max_examples=examples(150))
def test_a_sequence_without_drift_is_the_rendering_of_its_conversation_and_with_it_is_not(conversation):
    """The oracle renders and tokenises everything anew at every turn."""
    manner, turns_S = conversation
    tokenizer = tokenizer_of(manner)
    policy, decisions, prompts = played(manner, turns_S)
    messages: list[dict] = []
    is_drifted = False
    for (added, _), decision, (request, _) in zip(turns_S, decisions, prompts, strict=True):
        messages += added
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        drift = (decision.extra or {}).get("drift", {})
        if decision.tokens.prefix_step_index is None:
            assert drift.keys() & {"rewritten", "unrendered"}
            is_drifted = False
        else:
            assert not drift.keys() & {"rewritten", "unrendered"}
        is_same = list(request.prompt_ids) == tokenizer.encode(prompt, add_special_tokens=False)
        assert is_same != is_drifted
        is_drifted |= "retokenised" in drift
        action = decision.tokens.action_ids
        has_ended = action[-1] in policy.end_ids
        messages.append({"role": "assistant", "content": tokenizer.decode(action[:-1] if has_ended else action)})


@given(st.sampled_from(APPENDING), st.data())
@settings(max_examples=examples(60))
def test_templates_that_leave_earlier_turns_alone_make_one_sequence(manner, data):
    end = "<|turn|>" if manner == "other end" else "<|im_end|>"
    drawn = data.draw(st.lists(st.tuples(SHOWN, SAID, st.booleans()), min_size=1, max_size=5))
    encode = tokenizer_of(manner).encode
    turns_S = [
        ([{"role": "user", "content": prompt}], encode(answer + end * ends, add_special_tokens=False) or [5])
        for prompt, answer, ends in drawn
    ]
    policy, decisions, _ = played(manner, turns_S)
    assert all(decision.tokens.prefix_step_index is not None for decision in decisions)
    assert policy.counts["rewritten"] == policy.counts["unrendered"] == 0


@given(conversations(), st.data())
@settings(max_examples=examples(60))
def test_a_resumed_conversation_asks_what_an_undisturbed_one_asks(conversation, data):
    manner, turns_S = conversation
    at = data.draw(st.integers(0, len(turns_S) - 1))
    policy, decisions, prompts = played(manner, turns_S)
    talk = policy.open(1, key="k")
    talk.resume([(messages, decision) for (messages, _), decision in zip(turns_S[:at], decisions[:at], strict=True)])
    waiting = [ids for _, ids in turns_S[at:]]
    policy.engine = ToyEngine(lambda _: generated(waiting.pop(0)))
    again = asyncio.run(talk.decide(turns_S[at][0]))
    assert policy.engine.seen[0][0] == prompts[at][0]
    assert again == decisions[at]
