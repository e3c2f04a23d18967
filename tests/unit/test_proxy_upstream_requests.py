"""What an engine is asked for next to the request, and that the client gets what vLLM answers where it was not asked.

The pairs are vLLM 0.32.0's answers to one request, with and without the proxy's additions; ids and times left out.
`tests/integration/test_proxy_vllm.py` compares whole answers with a running one.
"""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lake.live.calls.apis import CHAT, COMPLETIONS
from lake.live.proxy.upstream import add_fields, strip_added, token_fields
from testkit.model_answers import Answer, answers, events, whole_answer

BOTH = frozenset(("return_token_ids", "logprobs"))
CONTENT = {"content": [{"token": "Good", "logprob": -0.0058, "bytes": [71, 111, 111, 100], "top_logprobs": []}]}


def chunk(delta: dict[str, Any], **choice: Any) -> dict[str, Any]:
    return {
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": delta, "finish_reason": None} | choice],
    }


PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "role": (
        chunk({"role": "assistant", "content": ""}, logprobs=None) | {"prompt_token_ids": [1, 85], "prompt_text": None},
        chunk({"role": "assistant", "content": ""}, logprobs=None) | {"prompt_token_ids": None, "prompt_text": None},
    ),
    "text": (
        chunk({"content": "Good"}, logprobs=CONTENT, token_ids=[371]),
        chunk({"content": "Good"}, logprobs=None, token_ids=None),
    ),
    "half a character, or a tool call that is being parsed": (
        chunk({}, logprobs=CONTENT, token_ids=[371]),
        None,
    ),
    "end": (
        chunk({}, logprobs=CONTENT, token_ids=[2], finish_reason="stop", stop_reason=None),
        chunk({}, logprobs=None, token_ids=None, finish_reason="stop", stop_reason=None),
    ),
    "usage": (
        {"object": "chat.completion.chunk", "choices": [], "usage": {"prompt_tokens": 18}},
        {"object": "chat.completion.chunk", "choices": [], "usage": {"prompt_tokens": 18}},
    ),
    "completion": (
        {"choices": [{"text": "", "logprobs": {"token_logprobs": [-0.1]}, "token_ids": [2], "prompt_token_ids": [5]}]},
        {"choices": [{"text": "", "logprobs": None, "token_ids": None, "prompt_token_ids": None}]},
    ),
    "chat": (
        {"choices": [{"message": {}, "logprobs": CONTENT, "token_ids": [2]}], "prompt_token_ids": [1], "usage": {}},
        {"choices": [{"message": {}, "logprobs": None, "token_ids": None}], "prompt_token_ids": None, "usage": {}},
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_what_was_added_is_taken_out_again(name: str) -> None:
    asked_more, bare = PAIRS[name]
    assert strip_added(asked_more, BOTH) == bare


def test_what_the_client_asked_for_stays() -> None:
    empty = chunk({}, logprobs=CONTENT, token_ids=[371])
    assert strip_added(empty, frozenset()) == empty
    assert strip_added(empty, frozenset(("logprobs",))) == chunk({}, logprobs=None, token_ids=[371])
    assert strip_added(empty, frozenset(("return_token_ids",))) == chunk({}, logprobs=CONTENT, token_ids=None)


@pytest.mark.parametrize("answer", [None, "[DONE]", 3, [], {"error": {"message": "no"}}, {"choices": None}])
def test_what_is_no_answer_passes_as_it_is(answer: Any) -> None:
    assert strip_added(answer, BOTH) == answer


@pytest.mark.parametrize(
    ("api", "body", "added"),
    [
        ("chat/completions", {}, BOTH),
        ("chat/completions", {"logprobs": False, "stream": True}, BOTH),
        ("chat/completions", {"logprobs": True, "top_logprobs": 2}, {"return_token_ids"}),
        ("chat/completions", {"return_token_ids": True}, {"logprobs"}),
        ("completions", {"logprobs": 0}, {"return_token_ids"}),
        ("completions", {"prompt": [1, 2]}, BOTH),
        ("chat/completions", {"top_logprobs": 5}, {"return_token_ids"}),
        ("completions", {"echo": True}, set()),
        ("chat/completions", {"use_beam_search": True}, set()),
        ("responses", {}, set()),
        ("messages", {}, set()),
    ],
)
def test_only_what_is_missing_is_asked_for(api: str, body: dict[str, Any], added: set[str]) -> None:
    token_options = token_fields(api, body)
    assert token_options.keys() == added
    if "logprobs" in added:
        assert token_options["logprobs"] == (True if api == CHAT else 0), "of the sampled tokens alone"


@pytest.mark.parametrize("raw", ["{}", ' { "a" : 1e999, "b":123456789012345678901234567890 }\r\n', '{"a":1,"a":2}'])
def test_what_the_client_wrote_goes_on_as_it_wrote_it(raw: str) -> None:
    """Numbers that no decoder keeps, and keys that are there twice, are the engine's affair."""
    sent = add_fields(raw.encode(), json.loads(raw), {"logprobs": True}).decode()
    assert json.loads(sent) == json.loads(raw) | {"logprobs": True}
    assert sent.startswith(raw.rstrip()[:-1])


def test_a_field_that_the_client_set_is_replaced_and_not_there_twice() -> None:
    sent = add_fields(b'{"logprobs": false, "a": 1}', {"logprobs": False, "a": 1}, {"logprobs": True})
    assert sent == b'{"logprobs":true,"a":1}'


REQUESTS = st.fixed_dictionaries(
    {},
    optional={
        "return_token_ids": st.sampled_from([True, False, None]),
        "logprobs": st.sampled_from([True, False, None]),
        "stream_options": st.sampled_from([None, {"include_usage": True}, {"include_usage": False}]),
    },
)


@given(REQUESTS, st.lists(answers(), min_size=1, max_size=2), st.lists(st.integers(0, 9), min_size=1, max_size=3))
def test_a_client_gets_what_it_would_have_got_without_us(
    request: dict[str, Any], samples: list[Answer], prompt_ids: list[int]
) -> None:
    for api in (CHAT, COMPLETIONS):
        body = request | ({"logprobs": 0 if request["logprobs"] else None} if "logprobs" in request else {})
        body = request if api == CHAT else body
        token_options = token_fields(api, body)
        sent, added = body | token_options, frozenset(token_options)
        assert strip_added(whole_answer(api, sent, samples, prompt_ids), added) == whole_answer(
            api, body, samples, prompt_ids
        )
        stripped = [strip_added(event, added) for event in events(api, sent, samples, prompt_ids)]
        assert [event for event in stripped if event is not None] == list(events(api, body, samples, prompt_ids))
        events_whole = whole_answer(api, sent, samples, prompt_ids)
        choice = events_whole["choices"][0]
        assert choice["token_ids"]
        assert choice["logprobs"]
        assert (events_whole | choice)["prompt_token_ids"] == prompt_ids
