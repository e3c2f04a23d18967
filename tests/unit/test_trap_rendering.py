"""Traps of chat templates: what they leave out, take away later, open by themselves or join together.

Each template is a caricature of one in use; the rule is the same for all: a row's tokens are what the template writes
for the conversation up to there, and what it cannot write is refused with a reason.
"""

import functools
import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast  # noqa: TID253

from lake.errors import DataRefusedError
from trainer.data.render import (
    UNRENDERABLE,
    ChatTurn,
    Renderer,
    Rendering,
    TurnText,
    UnrenderableError,
    loses_reasoning,
    read_turns,
    refuse_unrendered,
)
from trainer.policy.tiny_model import CHAT_TEMPLATE, build_tokenizer

CONTENT_ONLY = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As of SmolLM2 and the first Llama 3: tool calls are not written."""
NAMES_ONLY = CONTENT_ONLY.replace(
    "{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}"
)
LAST_CALLS_ONLY = CONTENT_ONLY.replace(
    "{{ m.content }}",
    "{{ m.content }}{% if loop.last %}{% for c in m.tool_calls or [] %}[{{ c.function | tojson }}]{% endfor %}"
    "{% endif %}",
)
"""Tool calls are cleared from the history once they have been answered."""
PROMPT_OPENS_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n{{ m.reasoning_content or '' }}</think>\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
"""As of Qwen3's thinking models: the generation prompt holds the opening marker already."""
PROMPT_ALONE_OPENS_THINKING = PROMPT_OPENS_THINKING.replace("<think>\n{{ m.reasoning_content or '' }}</think>\n", "")
TOOL_RESULTS_JOINED = (
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>{{ m.content }}</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function | tojson }}]{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As of Qwen: tool results that follow each other share one user turn."""


def call(name: str = "look", **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def turn(index: int, action: str, *added: tuple[str, str], **fields: Any) -> ChatTurn:
    messages = [{"role": role, "content": content} for role, content in added]
    return ChatTurn(index, messages, {"role": "assistant", "content": action, **fields})


@functools.cache
def tokenizer(template: str) -> PreTrainedTokenizerFast:
    fast = build_tokenizer(["Open the door, please.", "look at the garden <think></think>"], 320)
    fast.chat_template = template
    return fast


def spans(template: str, *turns: ChatTurn) -> list[TurnText]:
    return Renderer(tokenizer(template)).render_turns(list(turns), None)


def render_whole(template: str, *turns: ChatTurn) -> str:
    messages = [message for turn in turns for message in [*turn.added, turn.action]]
    return str(tokenizer(template).apply_chat_template(messages, tokenize=False))


@pytest.mark.parametrize("template", [CONTENT_ONLY, NAMES_ONLY])
def test_a_template_that_leaves_tool_calls_out_does_not_teach_silence(template: str) -> None:
    acts = turn(0, "", ("user", "Open the door"), tool_calls=[call(direction="north")])
    with pytest.raises(UnrenderableError, match="template_drops_tool_calls"):
        spans(template, acts)
    (span,) = spans(template, turn(0, "Which one?", ("user", "Open the door")))
    assert span.action == "Which one?<|im_end|>"
    (span,) = spans(CHAT_TEMPLATE, acts)
    assert '{"name": "look", "arguments": {"direction": "north"}}' in span.action


@pytest.mark.parametrize(
    "odd",
    [
        {"function": {"name": None}},
        {"function": "look"},
        "look",
        {"name": "no name"},
    ],
)
def test_calls_whose_names_cannot_be_looked_for_are_not_missed(odd: Any) -> None:
    (span,) = spans(CHAT_TEMPLATE.replace("tojson", "string"), turn(0, "", ("user", "Open"), tool_calls=[odd]))
    assert span.action.endswith("</tool_call><|im_end|>")


def test_a_run_is_refused_when_its_template_leaves_tool_calls_out() -> None:
    def done(**counts: int) -> Rendering:
        return Rendering(Counter({"rendered": 0, "present": 0} | counts), dict.fromkeys(counts, "run r, task t"))

    words = r"3 episodes are rendered, others cannot be: 5 template_drops_tool_calls, for example run r, .*jinja"
    with pytest.raises(DataRefusedError, match=words):
        refuse_unrendered(done(rendered=2, present=1, template_drops_tool_calls=5))
    words = r"0 episodes are rendered, others cannot be: 3 special_token_text, for example run r, task t \(a text"
    with pytest.raises(DataRefusedError, match=words):
        refuse_unrendered(done(special_token_text=3))
    refuse_unrendered(done(rendered=2, special_token_text=3))
    refuse_unrendered(done())
    assert all(why for why in UNRENDERABLE.values())


def test_tool_calls_cleared_from_the_history_open_a_sequence() -> None:
    turns = [
        turn(0, "", ("user", "Open the door"), tool_calls=[call(direction="north")]),
        turn(1, "It is open.", ("tool", "click")),
        turn(2, "Yes.", ("user", "Sure?")),
    ]
    texts = spans(LAST_CALLS_ONLY, *turns)
    assert [span.extends for span in texts] == [None, None, 1]
    assert texts[0].action == '[{"name": "look", "arguments": {"direction": "north"}}]<|im_end|>'
    assert "north" not in texts[1].context
    assert "".join(span.context + span.action for span in texts[1:]) + "\n" == render_whole(LAST_CALLS_ONLY, *turns)


def test_thinking_that_the_prompt_opened_is_not_opened_again_in_the_action() -> None:
    (span,) = spans(PROMPT_OPENS_THINKING, turn(0, "It is open.", ("user", "Open the door"), reasoning_content="hm\n"))
    assert span.context.endswith("<|im_start|>assistant\n<think>\n")
    assert span.action == "hm\n</think>\nIt is open.<|im_end|>"


def test_an_answer_that_does_not_go_on_where_the_prompt_stopped_is_refused() -> None:
    with pytest.raises(UnrenderableError, match="template_rewrites_prompt"):
        spans(PROMPT_ALONE_OPENS_THINKING, turn(0, "It is open.", ("user", "Open the door")))


def test_thinking_stripped_from_earlier_turns_is_still_learned_where_it_was_thought() -> None:
    turns = [
        turn(0, "Opening.", ("user", "Open the door"), reasoning_content="first\n"),
        turn(1, "Done.", ("user", "And?"), reasoning_content="second\n"),
    ]
    texts = spans(PROMPT_OPENS_THINKING, *turns)
    assert [span.extends for span in texts] == [None, None]
    assert "first" in texts[0].action
    assert "first" not in texts[1].context
    assert "second" in texts[1].action


def test_results_of_parallel_tools_are_written_as_the_whole_chat_writes_them() -> None:
    """Message by message each result would get its own turn, and other tokens."""
    turns = [
        turn(0, "", ("user", "Look around"), tool_calls=[call(at="door"), call(at="garden")]),
        turn(1, "Two things.", ("tool", "a door"), ("tool", "a garden")),
        turn(2, "Yes.", ("user", "Sure?")),
    ]
    texts = spans(TOOL_RESULTS_JOINED, *turns)
    assert "".join(span.context + span.action for span in texts) + "\n" == render_whole(TOOL_RESULTS_JOINED, *turns)
    assert [span.extends for span in texts] == [None, 0, 1]
    assert texts[1].context.count("<|im_start|>user") == 1


@pytest.mark.parametrize("marked", [False, True])
def test_actions_are_found_without_the_generation_blocks_of_a_template(marked: bool) -> None:
    """transformers' return_assistant_tokens_mask needs them and gives zeros without; nothing here asks for it."""
    body = "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n" if marked else "{{ m.content }}<|im_end|>\n"
    plain = "{{ m.content }}<|im_end|>\n"
    template_text = "{% if m.role == 'assistant' %}" + body + "{% else %}" + plain + "{% endif %}"
    template = CONTENT_ONLY.replace(plain, template_text)
    turns = [turn(0, "It is open.", ("user", "Open the door")), turn(1, "Yes.", ("user", "Sure?"))]
    assert [span.action for span in spans(template, *turns)] == ["It is open.<|im_end|>", "Yes.<|im_end|>"]


def test_agents_that_take_turns_have_a_conversation_each() -> None:
    """Text of interleaved sub-agents: neither sees the other's messages."""
    turns = [
        ChatTurn(0, [{"role": "user", "content": "Open"}], {"role": "assistant", "content": "A0"}, "a"),
        ChatTurn(1, [{"role": "user", "content": "Look"}], {"role": "assistant", "content": "B0"}, "b"),
        ChatTurn(2, [{"role": "user", "content": "And?"}], {"role": "assistant", "content": "A1"}, "a"),
        ChatTurn(3, [{"role": "user", "content": "See?"}], {"role": "assistant", "content": "B1"}, "b"),
    ]
    texts = spans(CHAT_TEMPLATE, *turns)
    assert [span.extends for span in texts] == [None, None, 0, 1]
    for mine in (0, 1):
        text = "".join(span.context + span.action for span in texts[mine::2])
        assert text + "\n" == render_whole(CHAT_TEMPLATE, *turns[mine::2])
    rows = list(Renderer(tokenizer(CHAT_TEMPLATE)).build_rows(5, texts, {}))
    lengths = [row["n_context"] + row["n_action"] for row in rows]
    assert [row["prefix_length"] for row in rows] == [0, 0, lengths[0], lengths[1]]


def test_a_call_with_a_history_of_its_own_is_not_shown_what_was_said_before() -> None:
    """As the recorder notes it: step 1 opens a conversation, 2 continues from step 0, 3 from the one before."""
    notes = [{}, {"history": "rewritten", "tools": [{"name": "look"}]}, {"follows": 0}, {}, {"follows": 9}]
    rows = [
        {
            "step_index": index,
            "context": json.dumps([{"role": "user", "content": f"Q{index}"}]),
            "state": None,
            "state_role": None,
            "action": f"A{index}",
            "reasoning": None,
            "tool_calls": None,
            "extra": json.dumps(note),
        }
        for index, note in enumerate(notes)
    ]
    texts = spans(CHAT_TEMPLATE, *read_turns("[]", rows))
    assert [span.extends for span in texts] == [None, None, 0, 2, 3], "a step that is not there is not followed"
    assert "Q0" not in texts[1].context
    assert ["look" in span.context for span in texts] == [False, True, False, False, False]


@pytest.mark.parametrize(
    ("reason", "learned"), [("length", False), ("max_tokens", False), ("stop", True), (None, True)]
)
def test_an_action_that_was_cut_off_does_not_teach_to_stop_there(reason: str | None, learned: bool) -> None:
    """The template writes an end token that no one sampled: it is there, as context."""
    row = {"step_index": 0, "context": None, "state": "Go", "state_role": None, "action": "It is", "reasoning": None}
    turns = read_turns(None, [row | {"tool_calls": None, "finish_reason": reason}])
    renderer = Renderer(tokenizer(CHAT_TEMPLATE))
    (only_row,) = renderer.build_rows(5, renderer.render_turns(turns, None), {})
    end = tokenizer(CHAT_TEMPLATE).eos_token_id
    assert only_row["action_ids"][-1] == end
    assert only_row["action_mask"] == [True] * (only_row["n_action"] - 1) + [learned]
    assert only_row["n_trained"] == only_row["n_action"] - (not learned)


def test_without_an_end_token_in_the_template_a_cut_action_is_all_there_is() -> None:
    bare = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    bare += "{% if add_generation_prompt %}[assistant]{% endif %}"
    cut = ChatTurn(0, [{"role": "user", "content": "Go"}], {"role": "assistant", "content": "It is"}, is_cut=True)
    renderer = Renderer(tokenizer(bare))
    (row,) = renderer.build_rows(5, renderer.render_turns([cut], None), {})
    assert all(row["action_mask"])


def test_reasoning_that_a_template_does_not_write_is_noticed() -> None:
    thought = turn(0, "It is open.", ("user", "Open"), reasoning_content="hm\n")
    for template, lost in ((CONTENT_ONLY, True), (PROMPT_OPENS_THINKING, False), (CHAT_TEMPLATE, False)):
        (span,) = spans(template, thought)
        assert loses_reasoning(thought, span.action) == lost
    assert not loses_reasoning(turn(0, "It is open.", ("user", "Open")), "It is open.")


def test_a_turn_may_end_by_another_marker_than_the_tokenizers_end_token() -> None:
    """Gemma: <eos> ends documents, <end_of_turn> ends turns, and the newline after it is no one's action."""
    gemma = CONTENT_ONLY.replace("<|im_end|>", "<end_of_turn>")
    fast = build_tokenizer(["Open the door, please."], 320)
    fast.chat_template = gemma
    fast.add_special_tokens({"additional_special_tokens": ["<end_of_turn>"]})
    renderer = Renderer(fast)
    turns = [turn(0, "It is open.", ("user", "Open the door")), turn(1, "Yes.", ("user", "Sure?"))]
    texts = renderer.render_turns(turns, None)
    assert [span.action for span in texts] == ["It is open.<end_of_turn>", "Yes.<end_of_turn>"]
    assert texts[1].context.startswith("\n<|im_start|>user")
    (row,) = renderer.build_rows(5, renderer.render_turns([replace(turns[0], is_cut=True)], None), {})
    assert row["action_mask"] == [True] * (row["n_action"] - 1) + [False]


@pytest.mark.parametrize("swallows", [False, True])
def test_no_space_slips_in_where_a_tokenizer_puts_one_before_every_text(swallows: bool) -> None:
    """Sentencepiece, as of Llama 2: each turn encoded alone would begin with a space that the chat lacks."""
    pieces = ["<|im_end|>", *"\u2581\nabcdeghinopqrstuxyOY|<>_.?"]
    model = tokenizers.models.BPE({piece: number for number, piece in enumerate(pieces)}, [])
    plain = tokenizers.Tokenizer(model)
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
    plain.decoder = tokenizers.decoders.Metaspace(prepend_scheme="first")
    end = tokenizers.AddedToken("<|im_end|>", special=True, rstrip=swallows)
    fast = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token=end, chat_template=CONTENT_ONLY)
    assert fast.tokenize("a")[0] == "\u2581"
    turns = [turn(0, "tis open.", ("user", "open it")), turn(1, "Yes.", ("user", "so?"))]
    renderer = Renderer(fast)
    rows = list(renderer.build_rows(5, renderer.render_turns(turns, None), {}))
    ids = [i for row in rows for i in row["context_ids"] + row["action_ids"]]
    messages = [message for turn in turns for message in [*turn.added, turn.action]]
    expected = fast.encode(fast.apply_chat_template(messages, tokenize=False), add_special_tokens=False)
    if swallows:
        assert len(ids) > len(expected), "nothing to encode behind: such a marker would take a newline along"
    else:
        assert ids == expected[: len(ids)]
        assert fast.decode(expected[len(ids) :]) == "\n"


WRITES_PYTHON = CHAT_TEMPLATE.replace("(function.arguments | tojson)", "ARGUMENTS")


@pytest.mark.parametrize("written", ["call.function.arguments", "call.function.arguments.at"])
def test_arguments_that_a_template_writes_as_python_does_are_refused(written: str) -> None:
    acts = turn(0, "", ("user", "Look"), tool_calls=[call(at={"door": True})])
    with pytest.raises(UnrenderableError, match="template_writes_python"):
        spans(WRITES_PYTHON.replace("ARGUMENTS", f"' at ' ~ {written}"), acts)
    (span,) = spans(WRITES_PYTHON.replace("ARGUMENTS", f"' at ' ~ ({written} | tojson)"), acts)
    assert '"door": true' in span.action


def step_of(context: Any, **fields: Any) -> dict[str, Any]:
    row = {"step_index": 0, "context": json.dumps(context), "state": None, "state_role": None, "action": "ok"}
    return row | {"reasoning": None, "tool_calls": None, "finish_reason": None} | fields


PARTS = [{"type": "text", "text": "Look."}, {"type": "input_text", "text": "What do you see?"}, "Say."]


@pytest.mark.parametrize("template", [CONTENT_ONLY, CHAT_TEMPLATE, TOOL_RESULTS_JOINED])
@pytest.mark.parametrize("role", ["user", "tool", "assistant"])
def test_parts_of_text_are_joined_and_never_written_as_python_writes_a_list(template: str, role: str) -> None:
    """As list of parts, as one part, and as text: three ways of writing one message."""
    first = json.dumps([{"role": "user", "content": PARTS[:1]}])
    as_text = [{"role": role, "content": "Look.\nWhat do you see?\nSay."}]
    texts = [
        spans(template, *read_turns(first, [step_of([{"role": role, "content": content}])]))
        for content in (PARTS, {"type": "text", "text": as_text[0]["content"]}, as_text[0]["content"])
    ]
    assert texts[0] == texts[1] == texts[2]
    text = "".join(span.context + span.action for span in texts[0])
    assert "Look.\nWhat do you see?\nSay." in text
    assert "{" not in text.replace("<|im_start|>", "")


@pytest.mark.parametrize(
    ("part", "fragment"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "a part of type 'image_url'"),
        ({"type": "unheard_of", "text": "x"}, "a part of type 'unheard_of'"),
        ({"type": "text", "text": None}, "a part of type 'text'"),
        ({"text": "x"}, "a value of type dict"),
        ([PARTS[0]], "a value of type list"),
        (7, "a value of type int"),
        (None, "a value of type NoneType"),
    ],
)
def test_content_that_is_no_text_is_refused_with_its_place(part: Any, fragment: str) -> None:
    later = [{"role": "user", "content": "hi"}, {"role": "tool", "content": [PARTS[0], part]}]
    with pytest.raises(UnrenderableError) as error:
        read_turns(None, [step_of([]), step_of(later, step_index=1)])
    assert (error.value.reason, error.value.position) == (
        "content_not_text",
        f"step 1, message 1 of its context (tool): {fragment}",
    )
    with pytest.raises(UnrenderableError, match=r"message 0 of initial_messages \(system\)"):
        read_turns(json.dumps([{"role": "system", "content": [part]}]), [step_of([])])
