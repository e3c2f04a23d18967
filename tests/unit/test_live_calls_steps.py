"""Whole histories, clients' answers and whole prompts of tokens: the recorder finds what is new to a step.

1. Histories: what was new, as the reader of logs of requests has it, which is the oracle.
2. Tokens: what was new, as the readers of files have it.
3. Answers, as client libraries give them.
"""

from collections.abc import Iterator
from typing import Any

import pydantic
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lake.formats.chat.completions import LOGPROBS_LEFT_OUT, Lineage
from lake.formats.chat.messages import CallHistory
from lake.live.calls.apis import CHAT, COMPLETIONS, MESSAGES, RESPONSES, build_body, detect_api
from lake.records import StepRecord, TokensRecord, fill_sampling
from testkit.spooled_episodes import Spooled, spooled


@pytest.fixture(scope="module")
def into(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spooled]:
    with spooled(tmp_path_factory.mktemp("spool")) as rollouts:
        yield rollouts


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, *calls: str) -> dict[str, Any]:
    tool_calls = [
        {"id": f"{text}-{name}", "type": "function", "function": {"name": name, "arguments": "{}"}} for name in calls
    ]
    return {"role": "assistant", "content": text} | ({"tool_calls": tool_calls} if tool_calls else {})


# ---------------------------------------------------------------- 1. histories

ANSWERS = st.sampled_from([(), ("look",), ("look", "go")])
NEXT = st.tuples(st.integers(0, 20), ANSWERS, st.integers(1, 2), st.booleans())
"""The call it continues from (if there is such), the tools that it calls, messages since, whether it fails."""


@given(st.lists(NEXT, min_size=1, max_size=8))
@example([(9, (), 1, False), (9, (), 1, True), (0, (), 1, False), (1, (), 1, False), (1, (), 1, False)])
def test_what_is_new_in_a_history_is_what_the_reader_of_requests_finds(into: Spooled, turns: list[Any]) -> None:
    """Conversations that continue, fork, begin anew and interleave, with calls that failed among them."""
    oracle, histories = CallHistory(), list[list[Any]]()
    with into.episode(extra={"turns": len(turns)}) as episode:
        for number, (cut_at, tools, count, fails) in enumerate(turns):
            earlier = histories[cut_at] if cut_at < len(histories) else [user(f"begin {number}")]
            prompt = [*earlier, *(user(f"{number}.{index}") for index in range(count))]
            if fails:
                with pytest.raises(TimeoutError), episode.step(messages=prompt):
                    raise TimeoutError
                continue
            message = assistant(f"answer {number}", *tools)
            oracle.add(prompt, message)
            with episode.step(messages=prompt) as step:
                prompt.append(message)  # as agents do before they say what was answered
                step.action(message)
            results = [
                {"role": "tool", "tool_call_id": c["id"], "content": "ok"} for c in message.get("tool_calls", ())
            ]
            histories.append([*prompt, *results])
    record = into.records()[-1]
    if not oracle.steps:
        assert (record.status, [step.trainable for step in record.steps]) == ("failed", [False])
        return
    assert record.initial_messages == oracle.initial_messages
    assert [step_fields(step) for step in record.steps] == [step_fields(step) for step in oracle.steps]
    assert [follows(step, index) for index, step in enumerate(record.steps)] == oracle.follows


def step_fields(step: StepRecord) -> tuple[Any, ...]:
    return step.context, step.state, step.state_role, step.action, step.tool_calls


def follows(step: StepRecord, index: int) -> int | None:
    """The step that a step continues from, as its row says it."""
    extra = step.extra or {}
    if not index or extra.get("history") == "rewritten":
        return None
    return int(extra.get("follows", index - 1))


def test_a_history_that_was_rewritten_opens_a_conversation_and_says_so(into: Spooled) -> None:
    with into.episode() as episode:
        for prompt in ([user("a")], [user("a"), assistant("1"), user("b")], [user("a and b, in short")]):
            with episode.step(messages=prompt) as step:
                step.action(str(len(prompt)))
    first, second, third = into.records()[-1].steps
    assert (first.extra, second.extra, third.extra) == (None, None, {"history": "rewritten"})
    assert third.context == [user("a and b, in short")]


def test_tools_that_ran_are_spans_and_their_results_stand_in_the_history_alone(into: Spooled) -> None:
    with into.episode() as episode:
        messages = [user("a")]
        for tools in (("look",), ()):
            with episode.step(messages=messages) as step:
                step.action(message := assistant("x", *tools))
                messages.append(message)
                for name in tools:
                    with step.tool_call(name) as call:
                        call.result("a door")
                        messages.append({"role": "tool", "tool_call_id": call.call_id, "content": "a door"})
    record = into.records()[-1]
    assert [step.state for step in record.steps] == ["a", "a door"]
    assert record.final_observation is None
    assert [span.attributes for span in record.spans] == [
        {"gen_ai.tool.call.id": "x-look"},
    ]


# ---------------------------------------------------------------- 2. tokens


@given(st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(0, 3), min_size=1, max_size=3)), max_size=5))
def test_what_is_new_in_a_prompt_is_what_the_readers_of_files_find(into: Spooled, turns: list[Any]) -> None:
    lineage, sequences = Lineage(), [[]]
    expected: list[TokensRecord] = []
    with into.episode() as episode:
        for number, (cut_at, ids) in enumerate(turns):
            prompt = [*sequences[cut_at % len(sequences)], *ids]
            expected.append(lineage.add(number, prompt, ids, [-0.5] * len(ids)))
            sequences.append([*prompt, *ids])
            with episode.step(state="s") as step:
                step.action("a", prompt_ids=prompt, action_ids=ids, action_logprobs=[-0.5] * len(ids))
    tokens_read = [step.tokens for step in into.records()[-1].steps]
    assert [t and t.context_ids for t in tokens_read] == [t.context_ids for t in expected]
    for index, (tokens, expected_tokens) in enumerate(zip(tokens_read, expected, strict=True)):
        assert tokens is not None
        # Of equal sequences either may be extended.
        assert sequence_of(tokens_read, index) == sequence_of(expected, index)
        assert (tokens.prefix_step_index is None) == (expected_tokens.prefix_step_index is None)
        assert tokens.action_logprobs == expected_tokens.action_logprobs


def sequence_of(tokens: list[Any], index: int) -> list[int]:
    """The whole sequence that a step's tokens say."""
    first_token = tokens[index]
    before = [] if first_token.prefix_step_index is None else sequence_of(tokens, first_token.prefix_step_index)
    return [*before, *first_token.context_ids, *first_token.action_ids]


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ({"prompt_ids": [1, 2]}, "2 prompt_ids, 0 action_ids"),
        ({"prompt_ids": [1], "action_ids": [2], "action_logprobs": []}, "1 action_ids and 0 action_logprobs"),
        ({"prompt_ids": [1], "action_ids": ["two"]}, "Expected `int`"),
        ({"prompt_ids": [-1], "action_ids": [2]}, ">= 0"),
        ({"prompt_ids": 5, "action_ids": [2]}, "Expected `array`"),
    ],
)
def test_tokens_that_cannot_be_are_left_out_with_the_reason(into: Spooled, tokens: dict[str, Any], says: str) -> None:
    before = into.troubles
    with into.episode() as episode, episode.step(state="s") as step:
        step.action("a", **tokens)
    (step_record,) = into.records()[-1].steps
    assert step_record.tokens is None
    assert says in (step_record.extra or {})["tokens_left_out"]
    assert into.troubles == before + 1


def test_log_probabilities_that_are_none_are_left_out_with_the_reason(into: Spooled) -> None:
    with into.episode() as episode, episode.step(state="s") as step:
        step.action("a", prompt_ids=[1], action_ids=[2, 3], action_logprobs=[-0.5, 5.0])
    (step_record,) = into.records()[-1].steps
    assert step_record.tokens is not None
    assert (step_record.tokens.action_ids, step_record.tokens.action_logprobs) == ([2, 3], None)
    assert "5.0" in (step_record.extra or {})[LOGPROBS_LEFT_OUT]


# ---------------------------------------------------------------- 3. answers


class Object(pydantic.BaseModel):
    """As client libraries have them: fields that were never set, and fields of the engine's own."""

    model_config = pydantic.ConfigDict(extra="allow")
    refusal: str | None = None


def as_object(value: Any) -> Any:
    if isinstance(value, dict):
        return Object(**{key: as_object(item) for key, item in value.items()})
    return [as_object(item) for item in value] if isinstance(value, list) else value


CHOICE = {"index": 0, "message": assistant("hello"), "finish_reason": "stop", "token_ids": [3]}
CHOICE["logprobs"] = {"content": [{"token": "x", "logprob": -0.25}]}
ANSWER = {
    "id": "cmpl-1",
    "object": "chat.completion",
    "model": "policy-7b",
    "choices": [CHOICE],
    "usage": {"prompt_tokens": 2, "completion_tokens": 1},
    "prompt_token_ids": [1, 2],
}
DELTAS = [{"role": "assistant", "content": "hel"}, {"content": "lo"}]
CHUNKS = [{"model": "policy-7b", "choices": [{"index": 0, "delta": delta}]} for delta in DELTAS]
CHUNKS += [{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": ANSWER["usage"]}]
ITEM = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hello"}]}
USED = {"input_tokens": 2, "output_tokens": 1}
RESPONSE = {"object": "response", "model": "policy-7b", "status": "completed", "output": [ITEM], "usage": USED}
MESSAGE = {"type": "message", "role": "assistant", "model": "policy-7b", "stop_reason": "end_turn", "usage": USED}
MESSAGE["content"] = [{"type": "text", "text": "hello"}]


@pytest.mark.parametrize("form", ["object", "JSON"])
@pytest.mark.parametrize("how", ["messages", "context"])
@pytest.mark.parametrize("answer", [ANSWER, CHUNKS, RESPONSE, MESSAGE])
def test_an_answer_says_the_action_the_model_and_what_was_used(into: Spooled, answer: Any, form: str, how: str) -> None:
    payload = as_object(answer) if form == "object" else answer
    with into.episode() as episode, episode.step(**{how: [as_object(user("hi"))]}) as step:
        step.answer(payload, engine="vllm 1", logprobs_mode="raw", cost=0.5)
    record = into.records()[-1]
    (only_step,) = record.steps
    assert (only_step.state, only_step.action, only_step.model, record.policy) == (
        "hi",
        "hello",
        "policy-7b",
        "policy-7b",
    )
    assert (only_step.prompt_tokens, only_step.completion_tokens, only_step.cost) == (2, 1, 0.5)
    assert (record.prompt_tokens, record.completion_tokens) == (2, 1)
    assert only_step.finish_reason in ("stop", "completed", "end_turn")
    if answer is ANSWER:
        assert only_step.tokens == TokensRecord(
            context_ids=[1, 2],
            action_ids=[3],
            action_logprobs=[-0.25],
            prefix_step_index=None,
            logprobs_mode="raw",
            engine="vllm 1",
        )


@pytest.mark.parametrize(
    ("options", "temperatures"),
    [({}, [0.5, None]), ({"sampling": {"temperature": 0.25}}, [0.5, 0.25])],
    ids=["calls", "episode"],
)
def test_a_call_without_settings_has_the_temperature_of_its_episode_not_of_another_call(
    into: Spooled, options: dict[str, Any], temperatures: list[float | None]
) -> None:
    with into.episode(**options) as episode:
        for number, settings in enumerate([{"temperature": 0.5}, {}]):
            with episode.step(request={"model": "m", "messages": [user(f"hi {number}")], **settings}) as step:
                step.answer(ANSWER)
    record = into.records()[-1]
    fill_sampling(record)
    assert [step.tokens and step.tokens.temperature for step in record.steps] == temperatures


@pytest.mark.parametrize(
    "answer", [12, object(), {"choices": []}, {}, [], [{"choices": 3}], {"choices": [{"text": 5}]}]
)
def test_an_answer_that_cannot_be_read_is_a_call_that_failed(into: Spooled, answer: Any) -> None:
    before = into.troubles
    with into.episode() as episode:
        with episode.step(messages=[user("a")], model="m") as step:
            step.answer(answer)
        with episode.step(messages=[user("a")]) as step:
            step.answer("a text is an answer too")
    record = into.records()[-1]
    assert [step.action for step in record.steps] == ["a text is an answer too"]
    assert ["the answer cannot" in str(span.error) for span in record.spans] == [True]
    assert record.extra == {"failed_calls": 1}
    assert into.troubles == before + 1


@pytest.mark.parametrize("request_", ["text", {"messages": "no messages"}, {"messages": [{"content": "no role"}]}, {}])
def test_a_request_that_cannot_be_read_is_told_and_the_answer_is_recorded(into: Spooled, request_: Any) -> None:
    before = into.troubles
    with into.episode() as episode, episode.step(request=request_) as step:
        step.answer(ANSWER)
    (step_record,) = into.records()[-1].steps
    assert (step_record.state, step_record.action) == (None, "hello")
    assert "request_not_read" in (step_record.extra or {})
    assert into.troubles > before


def test_tools_and_settings_of_the_first_request_are_the_episodes_and_others_stand_at_their_steps(
    into: Spooled,
) -> None:
    secret = {"extra_headers": {"Authorization": "Bearer abc"}, "api_key": "abc", "timeout": 3}
    with into.episode() as episode:
        for temperature, tools in ((0.5, ["t"]), (0.5, ["t"]), (1.0, None)):
            arguments = {"temperature": temperature, "tools": tools, "extra_body": {"top_k": 5, "seed": None}, **secret}
            with episode.step(messages=[user("a")], request=arguments) as step:
                step.action("b")
    record = into.records()[-1]
    assert (record.tools, record.sampling) == (["t"], {"temperature": 0.5, "top_k": 5})
    _, second, third = record.steps
    assert second.extra == {"history": "rewritten"}
    assert third.extra == {"history": "rewritten", "sampling": {"temperature": 1.0, "top_k": 5}}


class NotGiven:
    """As clients spell an argument that is not there."""


def test_arguments_become_the_body_that_a_client_sends() -> None:
    arguments = {"model": "m", "extra_body": {"return_token_ids": True}, "timeout": 5, "stop": NotGiven(), "n": (1, 2)}
    assert build_body(arguments) == {"model": "m", "return_token_ids": True, "n": [1, 2]}


def test_the_api_of_a_call_is_told_by_what_only_it_has() -> None:
    assert detect_api({"messages": []}, ANSWER) == detect_api({}, CHUNKS) == CHAT
    assert detect_api({"prompt": "a"}, {"choices": []}) == COMPLETIONS
    assert detect_api({"messages": []}, RESPONSE) == detect_api({"input": "a"}) == RESPONSES
    assert detect_api({}, [{"type": "response.created"}]) == RESPONSES
    assert (
        detect_api({}, MESSAGE)
        == detect_api({"system": "s"})
        == detect_api({}, [{"type": "message_start"}])
        == MESSAGES
    )
