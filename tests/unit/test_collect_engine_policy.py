"""The policy over an engine: which prompts the engine is shown, and what is recorded of its answers."""

import asyncio
from dataclasses import replace

import pytest

from lake.errors import DataRefusedError, UsageError
from lake.ids import key_hash
from lake.records import EpisodeRecord, StepRecord, check
from pipelines.collect.engines import ContextFullError, EngineGoneError, Sampling
from pipelines.collect.policies.engine_policy import EnginePolicy, EnginePolicyOptions
from pipelines.collect.policies.rendering import ContextRenderer
from testkit.chat_models import LOOK, TEMPLATES, ToyEngine, generated, saying, tokenizer_of
from trainer.online.demo import build_tokenizer

END = "<|im_end|>"


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def conversation(engine: ToyEngine, manner: str = "chatml", *, seed=7, tools=None, **options):
    policy = EnginePolicy(engine, tokenizer_of(manner), name="tiny", options=EnginePolicyOptions(**options))
    return policy, policy.open(seed, key="run/0", tools=tools)


def decide(talk, *turns):
    async def all_of_them():
        return [await talk.decide(messages) for messages in turns]

    return asyncio.run(all_of_them())


def text_of(manner: str, ids) -> str:
    return tokenizer_of(manner).decode(list(ids))


def test_a_decision_records_what_was_sampled_and_how():
    tokenizer = tokenizer_of("chatml")
    ids = tokenizer.encode("go east" + END, add_special_tokens=False)
    spans = [(3, 0, 0), (4, 1, len(ids) - 1)]
    engine = ToyEngine(lambda _: generated(ids, versions=spans))
    sampling = Sampling(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, max_tokens=20)
    policy, talk = conversation(engine, sampling=sampling)
    [decision] = decide(talk, user("Room attic."))
    tokens = decision.tokens
    assert (decision.action, decision.finish_reason, decision.policy_version) == ("go east", "stop", 3)
    assert text_of("chatml", tokens.context_ids) == "<|im_start|>user\nRoom attic.<|im_end|>\n<|im_start|>assistant\n"
    assert (tokens.action_ids, tokens.action_logprobs) == (ids, [-float(n + 1) for n in range(len(ids))])
    assert (tokens.temperature, tokens.top_p, tokens.top_k, tokens.min_p) == (0.7, 0.9, 5, 0.1)
    assert (tokens.logprobs_mode, tokens.engine, tokens.dtype) == ("processed", "toy 1", "float32")
    assert (tokens.policy_version, tokens.version_spans, tokens.constrained) == (3, spans, None)
    assert (decision.prompt_tokens, decision.completion_tokens) == (len(tokens.context_ids), len(ids))
    assert decision.extra is None
    request = engine.seen[0][0]
    assert (request.sampling, request.key) == (sampling, "run/0")
    assert request.stop_ids == [tokenizer.eos_token_id]
    card = policy.card
    assert (card.name, card.version, card.sampling["temperature"], card.sampling["max_action_tokens"]) == (
        "tiny",
        None,
        0.7,
        20,
    )


def test_a_token_that_the_tokenizer_lacks_is_of_another_model_and_refused():
    """It would be recorded as no text at all, and trained on as if it were one."""
    tokenizer = tokenizer_of("chatml")
    beyond = 1 + max(tokenizer.get_vocab().values())
    _, talk = conversation(ToyEngine(lambda _: generated([beyond - 1, beyond])))
    with pytest.raises(UsageError, match=f"sampled token {beyond}.* another model"):
        decide(talk, user("Room attic."))


def test_a_prompt_that_a_closed_vocabulary_cannot_write_is_told_with_the_tokenizer():
    renderer = ContextRenderer(build_tokenizer(["word"]))
    with pytest.raises(ValueError, match=r"no tokens for .* 'another'"):
        renderer.encode("another", is_inside=False)


def test_one_version_needs_no_spans_and_an_unknown_one_is_none():
    ids = tokenizer_of("chatml").encode("look" + END, add_special_tokens=False)
    for version in (3, None):
        engine = ToyEngine(lambda _, version=version: generated(ids, version=version))
        [decision] = decide(conversation(engine)[1], user("a"))
        assert (decision.policy_version, decision.tokens.version_spans) == (version, None)


def test_seeds_are_of_the_rollout_and_the_turn():
    engine = ToyEngine(saying(tokenizer_of("chatml"), "a", "b", "c", "a", "b"))
    decide(conversation(engine, seed=7)[1], user("1"), user("2"))
    decide(conversation(engine, seed=8)[1], user("1"))
    decide(conversation(engine, seed=7)[1], user("1"), user("2"))
    seeds = [request.seed for request, _ in engine.seen]
    assert seeds == [key_hash("decision", seed, turn, 0) for seed, turn in ((7, 0), (7, 1), (8, 0), (7, 0), (7, 1))]


def test_only_what_the_template_writes_behind_an_answer_is_new():
    engine = ToyEngine(saying(tokenizer_of("chatml"), "go east", "look"))
    first, second = decide(conversation(engine)[1], user("Room attic."), user("Room hall."))
    assert text_of("chatml", second.tokens.context_ids) == (
        "\n<|im_start|>user\nRoom hall.<|im_end|>\n<|im_start|>assistant\n"
    )
    grown = first.tokens.context_ids + first.tokens.action_ids + second.tokens.context_ids
    assert engine.seen[1][0].prompt_ids == grown


def test_an_answer_that_was_cut_off_is_ended_in_the_next_context():
    engine = ToyEngine(saying(tokenizer_of("chatml"), "go...", "look"))
    first, second = decide(conversation(engine)[1], user("a"), user("b"))
    assert (first.finish_reason, first.action) == ("length", "go")
    assert text_of("chatml", second.tokens.context_ids).startswith(END + "\n<|im_start|>user\nb")
    assert second.extra is None


def test_an_answer_ends_by_the_marker_of_the_template_and_not_by_the_end_token_alone():
    tokenizer = tokenizer_of("other end")
    engine = ToyEngine(saying(tokenizer, "go", "look", end="<|turn|>"))
    first, second = decide(conversation(engine, "other end")[1], user("a"), user("b"))
    assert engine.seen[0][0].stop_ids == [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|turn|>")]
    assert first.action == "go"
    assert first.extra is second.extra is None
    assert text_of("other end", second.tokens.context_ids).startswith("\n<|im_start|>user\nb")


def test_another_end_than_the_templates_is_drift_and_a_sequence_of_its_own():
    engine = ToyEngine(saying(tokenizer_of("other end"), "go", "look"))  # <|im_end|>, which ends no turn here
    first, second = decide(conversation(engine, "other end")[1], user("a"), user("b"))
    assert first.action == "go"
    assert second.tokens.prefix_step_index is None
    assert second.extra["drift"] == {"rewritten": {"first": len(engine.seen[0][0].prompt_ids) + 1, "tokens": 1}}
    assert text_of("other end", second.tokens.context_ids).startswith("<|im_start|>user\na<|turn|>\n")


def test_what_an_engine_breaks_off_goes_on_from_its_last_token():
    ids = tokenizer_of("chatml").encode("go east, look, go" + END, add_special_tokens=False)
    pieces = [
        generated([], "abort"),
        generated(ids[:2], "abort", 3),
        generated(ids[2:3], "abort", 3),
        generated(ids[3:], version=4),
    ]
    engine = ToyEngine(lambda _: pieces.pop(0))
    _, talk = conversation(engine, sampling=Sampling(max_tokens=30))
    [decision] = decide(talk, user("a"))
    assert (decision.tokens.action_ids, decision.finish_reason) == (ids, "stop")
    assert decision.tokens.version_spans == [(3, 0, 2), (4, 3, len(ids) - 1)]
    assert [request.sampling.max_tokens for request, _ in engine.seen] == [30, 30, 28, 27]
    assert list(engine.seen[3][0].prompt_ids) == decision.tokens.context_ids + ids[:3]
    assert engine.seen[2][0].seed != engine.seen[1][0].seed


def test_an_engine_that_breaks_off_for_ever_is_given_up():
    engine = ToyEngine(lambda _: generated([], "abort"))
    with pytest.raises(EngineGoneError, match="run/0: 8 answers in a"):
        decide(conversation(engine)[1], user("a"))


def test_a_broken_off_answer_of_a_schema_begins_again():
    ids = tokenizer_of("chatml").encode("{}" + END, add_special_tokens=False)
    pieces = [generated(ids[:1], "abort", constrained=[True]), generated(ids, constrained=[True] * len(ids))]
    engine = ToyEngine(lambda _: pieces.pop(0))
    [decision] = decide(conversation(engine, schema={"type": "object"})[1], user("a"))
    assert (decision.tokens.action_ids, decision.tokens.constrained) == (ids, [True] * len(ids))
    assert [request.schema for request, _ in engine.seen] == [{"type": "object"}] * 2


def test_after_an_error_the_same_can_be_asked_again():
    tokenizer, failing = tokenizer_of("chatml"), [ContextFullError("full")]

    def answer(request):
        if failing:
            raise failing.pop()
        return saying(tokenizer, "go")(request)

    engine = ToyEngine(answer)
    talk = conversation(engine)[1]
    with pytest.raises(ContextFullError):
        decide(talk, user("a"))
    [decision] = decide(talk, user("a"))
    assert text_of("chatml", decision.tokens.context_ids).count("user") == 1


def tool_turns() -> list[list[dict]]:
    return [user("Where is the key?"), [{"role": "tool", "content": "a door", "tool_call_id": "call_0_0"}]]


def test_tools_are_in_the_first_prompt_and_calls_are_read_and_answered():
    call = '<tool_call>{"name": "look", "arguments": {"at":"door"}}</tool_call>'
    engine = ToyEngine(saying(tokenizer_of("tools"), "I look." + call, "There."))
    first, second = decide(conversation(engine, "tools", tools=[LOOK])[1], *tool_turns())
    assert "Tools: [" in text_of("tools", first.tokens.context_ids)
    assert first.action == "I look."
    assert first.tool_calls == [
        {"id": "call_0_0", "type": "function", "function": {"name": "look", "arguments": '{"at": "door"}'}}
    ]
    assert first.is_action_valid is None
    assert (
        text_of("tools", second.tokens.context_ids) == "\n<|im_start|>tool\na door<|im_end|>\n<|im_start|>assistant\n"
    )
    assert second.extra is None


def test_a_call_that_cannot_be_read_stays_in_the_text_and_is_told():
    engine = ToyEngine(saying(tokenizer_of("tools"), '<tool_call>{"name": 3}</tool_call>'))
    [decision] = decide(conversation(engine, "tools", tools=[LOOK])[1], user("a"))
    assert (decision.tool_calls, decision.is_action_valid) == (None, False)
    assert decision.action == '<tool_call>{"name": 3}</tool_call>'
    assert decision.extra["tool_call_fault"].endswith("names no function")


def test_without_tools_nothing_is_a_call():
    engine = ToyEngine(saying(tokenizer_of("tools"), '<tool_call>{"name": "look"}</tool_call>'))
    [decision] = decide(conversation(engine, "tools")[1], user("a"))
    assert (decision.tool_calls, decision.is_action_valid) == (None, None)


def test_tools_whose_calls_cannot_be_told_are_refused():
    with pytest.raises(UsageError, match=r"player\.tool_format=hermes"):
        conversation(ToyEngine(saying(tokenizer_of("chatml"))), tools=[LOOK])


def test_a_template_that_wants_calls_apart_gets_them_apart():
    call = '<tool_call>{"name": "look", "arguments": {"at": "door"}}</tool_call>'
    engine = ToyEngine(saying(tokenizer_of("calls before answers"), "Well." + call, "There."))
    _, talk = conversation(engine, "calls before answers", tools=[LOOK], tool_format="hermes")
    _, second = decide(talk, *tool_turns())
    assert second.tokens.prefix_step_index is None
    assert 'Well.[look{"at": "door"}]<|im_end|>' in text_of("calls before answers", second.tokens.context_ids)
    assert set(second.extra["drift"]) == {"rewritten"}


def test_messages_that_a_template_cannot_write_are_refused_by_their_roles():
    engine = ToyEngine(saying(tokenizer_of("calls before answers"), "Well."))
    with pytest.raises(DataRefusedError, match=r"its last roles: user, tool.*follows no call"):
        decide(conversation(engine, "calls before answers")[1], [*user("a"), {"role": "tool", "content": "b"}])


def test_content_of_parts_is_text_and_images_are_refused():
    engine = ToyEngine(saying(tokenizer_of("chatml"), "ok"))
    talk = conversation(engine)[1]
    [decision] = decide(
        talk, [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    )
    assert "user\na\nb<|im_end|>" in text_of("chatml", decision.tokens.context_ids)
    with pytest.raises(DataRefusedError, match="image_url"):
        decide(talk, [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])


def test_reasoning_is_kept_apart_and_word_for_word_in_the_next_prompt():
    engine = ToyEngine(saying(tokenizer_of("opens reasoning"), "hm\n</think>\n\ngo", "b</think>c"))
    first, second = decide(conversation(engine, "opens reasoning")[1], user("a"), user("b"))
    assert (first.reasoning, first.action) == ("hm", "go")
    assert (second.reasoning, second.action, second.extra) == ("b", "c", None)
    assert second.tokens.prefix_step_index is not None


def test_reasoning_that_the_template_drops_opens_a_sequence_with_the_whole_prompt():
    engine = ToyEngine(saying(tokenizer_of("drops reasoning"), "<think>hm</think>go", "look", "look"))
    policy, talk = conversation(engine, "drops reasoning")
    first, second, third = decide(talk, user("a"), user("b"), user("c"))
    assert (first.reasoning, first.action) == ("hm", "go")
    assert second.tokens.prefix_step_index is None
    assert engine.seen[1][0].prompt_ids == second.tokens.context_ids
    assert "<think>" not in text_of("drops reasoning", second.tokens.context_ids)
    at = len(first.tokens.context_ids)
    dropped = len(tokenizer_of("drops reasoning").encode("<think>hm</think>"))
    assert second.extra["drift"] == {"unrendered": {"first": at, "tokens": dropped}}
    assert third.extra is None
    assert policy.counts["decisions"] == 3
    assert (policy.counts["unrendered"], policy.counts["unrendered_tokens"]) == (1, dropped)


def resumed(manner: str, answers: tuple[str, ...], turns: list[list[dict]], at: int):
    """Decisions of a conversation, of another that continues after `at` of them, and the prompts of both."""
    engine = ToyEngine(saying(tokenizer_of(manner), *answers, *answers[at:]))
    decisions = decide(conversation(engine, manner)[1], *turns)
    again = conversation(engine, manner)[1]
    again.resume(list(zip(turns[:at], decisions[:at], strict=True)))
    return decisions, decide(again, *turns[at:]), [request for request, _ in engine.seen]


@pytest.mark.parametrize("manner", ["chatml", "drops reasoning", "shouts", "counts"])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_resumed_conversation_goes_on_exactly(manner, at):
    answers = ("go...", "<think>hm</think>go", "east", "look")
    turns = [user(text) for text in "abcd"]
    decisions, rest, requests = resumed(manner, answers, turns, at)
    assert rest == decisions[at:]
    assert requests[4:] == requests[at:4]


def test_a_turn_without_its_tokens_is_rendered_and_opens_a_sequence():
    engine = ToyEngine(saying(tokenizer_of("chatml"), "go", "look"))
    talk = conversation(engine)[1]
    [first] = decide(talk, user("a"))
    again = conversation(engine)[1]
    again.resume([(user("a"), replace(first, tokens=None))])
    [second] = decide(again, user("b"))
    assert second.tokens.prefix_step_index is None
    assert "assistant\ngo<|im_end|>\n<|im_start|>user\nb" in text_of("chatml", second.tokens.context_ids)


def test_a_template_without_a_tokenizer_of_chats_is_refused():
    tokenizer = tokenizer_of("trims")
    template, tokenizer.chat_template = tokenizer.chat_template, None
    try:
        with pytest.raises(DataRefusedError, match="has no chat template"):
            EnginePolicy(ToyEngine(saying(tokenizer)), tokenizer, name="x")
    finally:
        tokenizer.chat_template = template


@pytest.mark.parametrize("manner", TEMPLATES)
def test_episodes_are_taken_by_a_lake(manner):
    engine = ToyEngine(saying(tokenizer_of(manner), "<think>hm</think> go...", "b ", "c"))
    steps = [
        StepRecord(state="s", action=d.action, tokens=d.tokens, extra=d.extra)
        for d in decide(conversation(engine, manner)[1], user("a"), user("b"), user("c"))
    ]
    assert check(EpisodeRecord(task_id="t", steps=steps)) is None


@pytest.mark.parametrize(("fragment", "ends"), [("7", [7]), ("[7, 9]", [7, 9]), ("null", [])])
def test_an_answer_also_ends_by_what_the_models_generation_config_names(tmp_path, monkeypatch, fragment, ends):
    tokenizer = tokenizer_of("chatml")
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {fragment}, "top_p": 0.8}}')
    monkeypatch.setattr(tokenizer, "name_or_path", str(tmp_path))
    engine = ToyEngine(lambda _: generated([*tokenizer.encode("go"), *ends[-1:]], "stop"))
    [decision] = decide(conversation(engine)[1], user("a"))
    assert engine.seen[0][0].stop_ids == [tokenizer.eos_token_id, *ends]
    assert decision.action == "go"
