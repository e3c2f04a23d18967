"""Any OpenAI-compatible endpoint as a policy: what is sent, what comes of the answer, and that no key is kept."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from lake.errors import UsageError
from pipelines.collect.engines import (
    ContextFullError,
    EngineAnswerError,
    EngineError,
    EngineFailedError,
    EngineGoneError,
    EngineRefusedError,
    Sampling,
)
from pipelines.collect.engines.chat import ChatEndpoint, ChatOptions, ChatPolicy
from pipelines.collect.engines.http import read_key
from pipelines.collect.engines.pool import PoolConfig, ServerPool
from pipelines.collect.policies import Decision
from testkit.engine_server import Engine, engine_server
from testkit.token_engine import Fault, token_engine

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is the key?"}]
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
QUICK = PoolConfig(first_pause=0.01, tries=3)


def played(
    url: str,
    do: Callable[[ChatPolicy], Awaitable[Any]],
    *,
    timeout: float = 60,
    key: str | None = None,
    **options: Any,
) -> Any:
    """What a coroutine gives that is handed a policy."""

    async def open_and_run() -> Any:
        shared = ServerPool([ChatEndpoint(url, timeout=timeout, key=key)], QUICK)
        policy = ChatPolicy(shared, ChatOptions(**({"model": "policy"} | options)))
        try:
            return await do(policy)
        finally:
            await policy.close()

    return asyncio.run(open_and_run())


async def first(policy: ChatPolicy) -> Decision:
    return await policy.open(3, key="r").decide(ASKED)


def test_a_conversation_grows_by_what_was_said() -> None:
    later = [{"role": "user", "content": "Go on."}]

    async def two(policy: ChatPolicy) -> list[Decision]:
        conversation = policy.open(3, key="r")
        return [await conversation.decide(ASKED), await conversation.decide(later)]

    with engine_server() as server:
        first, second = played(server.url, two)
    assert (first.action, first.finish_reason, first.model) == ("answer 0 to 2 messages", "stop", "policy")
    assert (first.tokens, first.prompt_tokens, first.completion_tokens) == (None, len(server.calls[0].prompt_ids), 23)
    assert first.extra is None
    assert server.calls[1].body["messages"] == [*ASKED, {"role": "assistant", "content": first.action}, *later]
    assert second.action == "answer 1 to 4 messages"


def test_one_that_is_resumed_asks_as_if_it_had_never_stopped() -> None:
    later = [{"role": "user", "content": "Go on."}]

    async def stopped(policy: ChatPolicy) -> None:
        earlier = await policy.open(3, key="r").decide(ASKED)
        conversation = policy.open(3, key="r")
        conversation.resume([(ASKED, earlier)])
        await conversation.decide(later)

    async def undisturbed(policy: ChatPolicy) -> None:
        conversation = policy.open(3, key="r")
        for messages in (ASKED, later):
            await conversation.decide(messages)

    with engine_server() as first_server, engine_server() as second_server:
        played(first_server.url, stopped)
        played(second_server.url, undisturbed)
    assert [call.body for call in first_server.calls] == [call.body for call in second_server.calls]
    assert first_server.calls[0].body["seed"] != first_server.calls[1].body["seed"]


def test_tools_are_called_and_answered() -> None:
    async def two(policy: ChatPolicy) -> Decision:
        conversation = policy.open(3, key="r", tools=[TOOL])
        decision = await conversation.decide(ASKED)
        assert decision.tool_calls is not None
        tool_message = {"role": "tool", "tool_call_id": decision.tool_calls[0]["id"], "content": "a door"}
        await conversation.decide([tool_message])
        return decision

    with engine_server() as server:
        decision = played(server.url, two)
    assert (decision.action, decision.finish_reason) == ("", "tool_calls")
    assert decision.tool_calls[0]["function"]["name"] == "look"
    assert server.calls[0].body["tools"] == [TOOL]
    message = server.calls[1].body["messages"][2]
    assert message == {"role": "assistant", "content": "", "tool_calls": decision.tool_calls}


def test_reasoning_is_kept_apart_and_not_sent_back() -> None:
    async def two(policy: ChatPolicy) -> Decision:
        conversation = policy.open(3, key="r")
        decision = await conversation.decide(ASKED)
        await conversation.decide([{"role": "user", "content": "Go on."}])
        return decision

    with engine_server() as server:
        decision = played(server.url, two, model="think")
    assert decision.reasoning == "thought 0"
    assert "thought" not in json.dumps(server.calls[1].body["messages"])


def test_what_is_asked_is_what_the_options_say() -> None:
    sampling = Sampling(temperature=0.7, max_tokens=9, top_p=0.9, stop=("x",))
    with engine_server() as server:
        played(server.url, first, sampling=sampling, output_schema=SCHEMA, extra_fields={"reasoning_effort": "low"})
        played(server.url, first, without={"seed", "max_tokens"}, extra_fields={"max_completion_tokens": 5})
    one_body, second = ({key: value for key, value in call.body.items() if key != "messages"} for call in server.calls)
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    settings = {"temperature": 0.7, "max_tokens": 9, "top_p": 0.9, "stop": ["x"], "seed": 3}
    assert one_body == settings | {"model": "policy", "response_format": form, "reasoning_effort": "low"}
    assert second == {"model": "policy", "temperature": 1.0, "max_completion_tokens": 5}


def test_options_that_would_break_the_conversation_are_refused() -> None:
    for wrong in ({"extra_fields": {"stream": True}}, {"without": {"messages"}}):
        with pytest.raises(UsageError, match="messages, stream and n"):
            played("http://127.0.0.1:1", first, **wrong)


def test_a_key_reaches_the_endpoint_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    key = "no-known-form"
    monkeypatch.setenv("ENDPOINT_KEY", key)
    with engine_server() as server:
        decision = played(server.url, first, key=read_key("ENDPOINT_KEY"))
        assert server.calls[0].headers["Authorization"] == f"Bearer {key}"
        assert key not in repr(decision)
        with pytest.raises(EngineRefusedError, match="no access with") as error:
            played(server.url, first, key=read_key("ENDPOINT_KEY"), model="echo-401")
    assert key not in str(error.value)


FAULTS: dict[str, tuple[Fault, type[EngineError]]] = {
    "too long": (Fault(status=400, text='{"error": {"message": "context_length_exceeded"}}'), ContextFullError),
    "no JSON": (Fault(status=200, text="hello"), EngineAnswerError),
    "no object": (Fault(status=200, text="[1]"), EngineAnswerError),
    "no choices": (Fault(status=200, text='{"choices": []}'), EngineAnswerError),
    "no message": (Fault(status=200, text='{"choices": [{"index": 0}]}'), EngineAnswerError),
    "a number for a text": (
        Fault(status=200, text='{"choices": [{"message": {"role": "assistant", "tool_calls": 3}}]}'),
        EngineAnswerError,
    ),
    "an error that says 200": (Fault(status=200, text='{"error": {"message": "overloaded"}}'), EngineAnswerError),
    "a failure": (Fault(status=500), EngineFailedError),
    "cut": (Fault(cut=True), EngineGoneError),
    "silence": (Fault(hang=True), EngineGoneError),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_no_answer_is_an_error_that_names_the_endpoint(name: str) -> None:
    fault, error = FAULTS[name]

    async def once(policy: ChatPolicy) -> None:
        await policy.endpoints.members[0].server.complete(policy.options.request(ASKED, 3, None))

    with token_engine() as server:
        server.always = fault
        with pytest.raises(error) as caught:
            played(server.url, once, timeout=0.3 if fault.hang else 60)
    assert type(caught.value) is error
    assert server.url in str(caught.value)


def test_an_endpoint_that_fails_once_is_asked_again() -> None:
    async def counted(policy: ChatPolicy) -> tuple[str, int]:
        return (await first(policy)).action, policy.endpoints.counts().retries

    with engine_server(Engine()) as server:
        assert played(server.url, counted, model="flaky") == ("answer 0 to 2 messages", 1)
