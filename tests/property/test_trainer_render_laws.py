"""Rendering any conversation under an append-only template: one sequence, whose text is the template's own."""

import functools
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast  # noqa: TID253

from testkit.examples import examples
from trainer.data.render import ChatTurn, Renderer
from trainer.policy.tiny_model import build_tokenizer

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<|>"), max_size=20)
CALLS = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.just("function"),
            "function": st.fixed_dictionaries({"name": st.just("f"), "arguments": st.just({"x": 1})}),
        }
    ),
    max_size=2,
)


@st.composite
def conversations(draw: st.DrawFn) -> list[ChatTurn]:
    turns = []
    for index in range(draw(st.integers(1, 4))):
        roles = st.sampled_from(["user", "tool", "system"])
        added = [{"role": draw(roles), "content": draw(TEXTS)} for _ in range(draw(st.integers(index == 0, 2)))]
        action: dict[str, Any] = {"role": "assistant", "content": draw(TEXTS)}
        if calls := draw(CALLS):
            action["tool_calls"] = calls
        turns.append(ChatTurn(index, added, action))
    return turns


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(["the quick brown fox", "jumps over the lazy dog", "user assistant tool system"], 330)


def whole_text(turns: list[ChatTurn], *, last_newline: bool = False) -> str:
    messages = [message for turn in turns for message in [*turn.added, turn.action]]
    text = str(tokenizer().apply_chat_template(messages, tokenize=False))
    return text if last_newline else text.removesuffix("\n")


@given(conversations())
@settings(max_examples=examples(60))
def test_the_spans_are_the_templates_text_end_to_end(turns: list[ChatTurn]) -> None:
    spans = Renderer(tokenizer()).render_turns(turns, None)
    assert "".join(span.context + span.action for span in spans) == whole_text(turns)
    assert [span.extends for span in spans] == [None, *range(len(turns) - 1)]
    assert all(span.action.endswith("<|im_end|>") for span in spans)


@given(conversations())
@settings(max_examples=examples(60))
def test_the_rows_decode_to_the_same_text_and_know_their_place(turns: list[ChatTurn]) -> None:
    renderer = Renderer(tokenizer())
    rows = list(renderer.build_rows(1, renderer.render_turns(turns, None), {}))
    ids: list[int] = []
    for row in rows:
        assert row["prefix_length"] == len(ids)
        ids += row["context_ids"] + row["action_ids"]
        assert (row["n_context"], row["n_action"]) == (len(row["context_ids"]), len(row["action_ids"]))
        assert row["action_ids"][-1] == tokenizer().eos_token_id
    assert tokenizer().decode(ids) == whole_text(turns)


@given(conversations(), st.integers(1, 4))
@settings(max_examples=examples(40))
def test_a_longer_conversation_leaves_earlier_rows_as_they_were(turns: list[ChatTurn], count: int) -> None:
    renderer = Renderer(tokenizer())
    long = list(renderer.build_rows(1, renderer.render_turns(turns, None), {}))
    short = list(renderer.build_rows(1, renderer.render_turns(turns[:count], None), {}))
    assert long[: len(short)] == short
