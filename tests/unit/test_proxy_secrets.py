"""What of a request is a key, and that texts lose keys and nothing else."""

import json
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lake.formats.chat.completions import Completion
from lake.live.calls.address import RolloutAddress
from lake.live.calls.apis import ModelRequest
from lake.live.calls.steps import Call
from lake.live.proxy.relay import remove_call_keys
from lake.secrets import Secrets

KEY = "sk-proj-0123456789abcdefghij"


def call(text: str, **fields: Any) -> Call:
    answer = Completion(message={"role": "assistant", "content": text}, prompt_ids=[1], action_ids=[2], logprobs=[-0.5])
    request = ModelRequest(messages=[{"role": "user", "content": "hello"}])
    began = datetime(2026, 1, 2, tzinfo=UTC)
    address = RolloutAddress(task="t", parent=RolloutAddress(task="p"))
    return Call(address=address, api="chat", request=request, answer=answer, started_at=began, latency=1.5, **fields)


@pytest.mark.parametrize("before", ["", "Incorrect key: "])
@pytest.mark.parametrize("spelled", [KEY, KEY[:20], KEY + "...", f"{KEY}{KEY}"])
def test_a_key_is_found_wherever_it_is_repeated_also_cut(before: str, spelled: str) -> None:
    text = Secrets([("Authorization", f"Bearer {KEY}")]).clean_error(f"{before}{spelled} is not valid")
    assert KEY[:12] not in text
    assert "[redacted]" in text
    assert text.endswith("is not valid")


@given(st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters=",;"), min_size=12))
def test_no_key_survives_in_any_spelling(key: str) -> None:

    secrets = Secrets([("x-api-key", key)])
    for spelled in (key, json.dumps(key)[1:-1], json.dumps(key)[1:-1].replace("/", r"\/"), quote(key, safe="")):
        clean = remove_call_keys(call(f"a {spelled} b"), secrets)
        assert clean.answer is not None
        assert clean.answer.message is not None
        assert spelled not in clean.answer.message["content"]


@pytest.mark.parametrize("header", ["Bearer EMPTY", "Bearer ollama", "Basic bWU6bWU=", "theme=dark; consent=yes", ""])
def test_words_that_stand_in_every_text_are_no_keys(header: str) -> None:
    recorded_call = call("Bearer, EMPTY, ollama, dark, consent, yes, me")
    assert remove_call_keys(recorded_call, Secrets([("Authorization", header), ("Cookie", header)])) is recorded_call


def test_a_remove_call_keys_is_the_same_but_for_what_was_hidden() -> None:
    recorded_call = call(f"the key is {KEY}", error=KEY, partial={"at": [KEY]}, extra={"id": "x", "n": 2**40})
    clean = remove_call_keys(recorded_call, Secrets([("api-key", KEY)]))
    assert clean.address == recorded_call.address
    assert (clean.started_at, clean.latency, clean.request) == (
        recorded_call.started_at,
        recorded_call.latency,
        recorded_call.request,
    )
    assert (clean.error, clean.partial) == ("[redacted]", {"at": ["[redacted]"]})
    assert clean.extra == {"id": "x", "n": 2**40, "keys_redacted": True}
    assert clean.answer is not None
    assert clean.answer.message == {"role": "assistant", "content": "the key is [redacted]"}
    assert (clean.answer.prompt_ids, clean.answer.action_ids, clean.answer.logprobs) == ([], [], None)


def test_a_body_loses_its_keys_and_keeps_schemas_settings_and_what_was_said() -> None:
    schema = {"type": "object", "properties": {"password": {"type": "string"}, "token": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "login", "parameters": schema}}
    mcp = {"type": "mcp", "server_url": "https://a.example/sse", "server_label": "a"}
    sent = {
        "messages": [{"role": "user", "content": "hi", "api_key": "what was said"}],
        "tools": [tool, mcp],
        "temperature": 0.5,
        "max_tokens": 9,
        "prompt_cache_key": "conversation-12",
        "chat_template_kwargs": {"eos_token": "</s>"},
        "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
    }
    secrets = Secrets([])
    keys = {"api_key": KEY, "extra_headers": {"X-A": "header-key-0123"}, "user_token": "not told as one"}
    recorded_call = (
        sent | keys | {"tools": [tool, mcp | {"authorization": "mcp-key-0123", "headers": {"B": "mcp-header-0123"}}]}
    )
    assert secrets.remove_key_fields(recorded_call) == sent | {"user_token": "not told as one"}
    for key in (KEY, "header-key-0123", "mcp-key-0123", "mcp-header-0123"):
        assert secrets.has_key_in(f"it is {key}.")
    assert not secrets.has_key_in("conversation-12 </s> what was said")
