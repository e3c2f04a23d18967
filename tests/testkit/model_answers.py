"""One answer of a model as the four APIs write it, whole or as the events of a stream; and answers to try.

Chat completions and completions are written as vLLM 0.32 does, which has null where it was not asked for something, and
sends no chunk that holds nothing but ids and log-probabilities no one asked for. The Responses API and Anthropic's
messages are written by their documentation.
"""

import json
from collections.abc import Iterator
from typing import Any

import msgspec
from hypothesis import strategies as st

from lake.live.calls.apis import CHAT, COMPLETIONS, MESSAGES, RESPONSES


class Piece(msgspec.Struct, frozen=True):
    """What one chunk brings; of half a character, or the mark of a call, the text is empty."""

    text: str
    ids: list[int]
    logprobs: list[float]


class Answer(msgspec.Struct, frozen=True):
    """What a model sampled."""

    pieces: list[Piece]
    """The last one ends it."""
    reasoning: str = ""
    calls: list[tuple[str, dict[str, Any]]] = []
    """Names and arguments of tools."""

    @property
    def text(self) -> str:
        """All it says."""
        return "".join(piece.text for piece in self.pieces)


TEXTS = st.text(st.characters(codec="utf-8"), max_size=6)
_IDS = st.integers(0, 50_000)
_ARGUMENTS = st.dictionaries(TEXTS, st.integers() | TEXTS | st.none(), max_size=2)


@st.composite
def answers(draw: st.DrawFn, *, has_calls: bool = True) -> Answer:
    """Answers, the empty one among them."""
    pieces = []
    for text in [*draw(st.lists(TEXTS, max_size=4)), ""]:
        ids = draw(st.lists(_IDS, min_size=1, max_size=3))
        values = draw(st.lists(st.floats(-20, 0), min_size=len(ids), max_size=len(ids)))
        pieces.append(Piece(text, ids, values))
    names = st.tuples(st.sampled_from(["look", "take"]), _ARGUMENTS)
    calls = draw(st.lists(names, max_size=2)) if has_calls else []
    return Answer(pieces, draw(TEXTS) if has_calls else "", calls)


def whole_answer(api: str, body: dict[str, Any], samples: list[Answer], prompt_ids: list[int]) -> dict[str, Any]:
    """The answer to a request, at once; only chats and completions have several samples."""
    if api == CHAT:
        has_ids = bool(body.get("return_token_ids"))
        choices = [
            {
                "index": index,
                "message": _message(answer),
                "logprobs": {"content": _items(_all(answer))} if body.get("logprobs") else None,
                "finish_reason": _reason(answer),
                "token_ids": _all(answer).ids if has_ids else None,
            }
            for index, answer in enumerate(samples)
        ]
        return _about("chat.completion") | {"choices": choices, "prompt_token_ids": prompt_ids if has_ids else None}
    if api == COMPLETIONS:
        choices = [
            {"index": index, "text": answer.text, "finish_reason": "stop"}
            | _token_fields(body, _all(answer), prompt_ids)
            for index, answer in enumerate(samples)
        ]
        return _about("text_completion") | {"choices": choices}
    (answer,) = samples
    if api == RESPONSES:
        usage = {"input_tokens": len(prompt_ids), "output_tokens": len(_all(answer).ids)}
        return _about("response") | {"status": "completed", "output": _output(answer), "usage": usage}
    usage = {"input_tokens": len(prompt_ids), "output_tokens": len(_all(answer).ids)}
    about = {"id": "a1", "type": "message", "role": "assistant", "model": "policy", "stop_sequence": None}
    return about | {"content": _blocks(answer), "stop_reason": "end_turn", "usage": usage}


def events(api: str, body: dict[str, Any], samples: list[Answer], prompt_ids: list[int]) -> Iterator[Any]:
    """The answer to a request, event by event; `[DONE]` is the last one of OpenAI's older APIs."""
    if api == CHAT:
        yield from _chat_chunks(body, samples, prompt_ids)
        yield "[DONE]"
    elif api == COMPLETIONS:
        for index, answer in enumerate(samples):
            for piece_index, piece in enumerate(answer.pieces):
                is_last = piece_index == len(answer.pieces) - 1
                choice = {"index": index, "text": piece.text, "finish_reason": "stop" if is_last else None}
                yield _about("text_completion") | {
                    "choices": [choice | _token_fields(body, piece, None if piece_index else prompt_ids)]
                }
        yield "[DONE]"
    elif api == RESPONSES:
        yield from _response_events(whole_answer(api, body, samples, prompt_ids))
    else:
        assert api == MESSAGES
        yield from _block_events(whole_answer(api, body, samples, prompt_ids))


def _chat_chunks(body: dict[str, Any], samples: list[Answer], prompt_ids: list[int]) -> Iterator[dict[str, Any]]:
    about, has_ids = _about("chat.completion.chunk"), bool(body.get("return_token_ids"))
    for index in range(len(samples)):
        role = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        yield about | {"choices": [role], "prompt_token_ids": prompt_ids if has_ids else None}
    for index, answer in enumerate(samples):
        deltas: list[dict[str, Any]] = [{"content": piece.text} if piece.text else {} for piece in answer.pieces]
        if answer.reasoning:
            deltas[0] |= {"reasoning": answer.reasoning}
        pieces = list(answer.pieces)
        if answer.calls:  # the arguments come in two halves, the first one before its tokens are named
            halves = [_halves(index, call) for index, call in enumerate(_calls(answer))]
            deltas[-1:] = [{"tool_calls": [first for first, _ in halves]}, deltas[-1]]
            deltas[-1] |= {"tool_calls": [second for _, second in halves]}
            pieces[-1:] = [Piece("", [], []), pieces[-1]]
        for piece_index, (delta, piece) in enumerate(zip(deltas, pieces, strict=True)):
            is_last = piece_index == len(deltas) - 1
            if not delta and not is_last and not has_ids and not body.get("logprobs"):
                continue
            choice = {
                "index": index,
                "delta": delta,
                "logprobs": {"content": _items(piece)} if body.get("logprobs") else None,
                "finish_reason": _reason(answer) if is_last else None,
                "token_ids": piece.ids if has_ids else None,
            }
            yield about | {"choices": [choice]}
    if (body.get("stream_options") or {}).get("include_usage"):
        yield about | {"choices": [], "usage": {"prompt_tokens": len(prompt_ids), "completion_tokens": 3}}


def _halves(index: int, call: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A tool call as two pieces of a stream."""
    arguments = call["function"]["arguments"]
    first = call | {"function": call["function"] | {"arguments": arguments[:2]}}
    return {"index": index} | first, {"index": index, "function": {"arguments": arguments[2:]}}


def _token_fields(body: dict[str, Any], piece: Piece, prompt_ids: list[int] | None) -> dict[str, Any]:
    """What a completion says of its tokens."""
    has_ids = bool(body.get("return_token_ids"))
    listed = {"tokens": [""] * len(piece.ids), "token_logprobs": piece.logprobs}
    return {
        "logprobs": listed if body.get("logprobs") is not None else None,
        "token_ids": piece.ids if has_ids else None,
        "prompt_token_ids": prompt_ids if has_ids else None,
    }


def _response_events(response: dict[str, Any]) -> Iterator[dict[str, Any]]:
    opening = response | {"status": "in_progress", "output": []}
    yield {"type": "response.created", "response": opening}
    for index, item in enumerate(response["output"]):
        at = {"output_index": index}
        kind = item["type"]
        empty = item | ({"content": []} if kind == "message" else {"arguments": ""} if "arguments" in item else {})
        yield {"type": "response.output_item.added", "item": empty} | at
        if kind == "message":
            for letter in item["content"][0]["text"]:
                yield {"type": "response.output_text.delta", "delta": letter} | at
        elif kind == "function_call":
            yield {"type": "response.function_call_arguments.delta", "delta": item["arguments"]} | at
        yield {"type": "response.output_item.done", "item": item} | at
    yield {"type": "response.completed", "response": response}


def _block_events(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    start = message | {"content": [], "stop_reason": None, "usage": message["usage"] | {"output_tokens": 1}}
    yield {"type": "message_start", "message": start}
    yield {"type": "ping"}
    for index, block in enumerate(message["content"]):
        at = {"index": index}
        if block["type"] == "tool_use":
            yield {"type": "content_block_start", "content_block": block | {"input": {}}} | at
            text = json.dumps(block["input"])
            for half in (text[:3], text[3:]):
                yield {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": half}} | at
        else:
            key = "text" if block["type"] == "text" else "thinking"
            yield {"type": "content_block_start", "content_block": block | {key: ""}} | at
            for letter in block[key]:
                yield {"type": "content_block_delta", "delta": {"type": f"{key}_delta", key: letter}} | at
        yield {"type": "content_block_stop"} | at
    usage = {"output_tokens": message["usage"]["output_tokens"]}
    yield {"type": "message_delta", "delta": {"stop_reason": message["stop_reason"]}, "usage": usage}
    yield {"type": "message_stop"}


def _about(kind: str) -> dict[str, Any]:
    return {"id": "a1", "object": kind, "created": 1, "model": "policy"}


def _all(answer: Answer) -> Piece:
    """An answer's pieces as one."""
    ids = [token for piece in answer.pieces for token in piece.ids]
    return Piece(answer.text, ids, [value for piece in answer.pieces for value in piece.logprobs])


def _items(piece: Piece) -> list[dict[str, Any]]:
    return [{"token": "", "logprob": value, "bytes": None, "top_logprobs": []} for value in piece.logprobs]


def _message(answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or None}
    message |= {"tool_calls": _calls(answer)} if answer.calls else {}
    return message | {"reasoning": answer.reasoning or None}


def _calls(answer: Answer) -> list[dict[str, Any]]:
    return [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for i, (name, arguments) in enumerate(answer.calls)
    ]


def _reason(answer: Answer) -> str:
    return "tool_calls" if answer.calls else "stop"


def _output(answer: Answer) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if answer.reasoning:
        part = {"type": "summary_text", "text": answer.reasoning}
        items.append({"type": "reasoning", "id": "rs_1", "summary": [part]})
    if answer.text:
        part = {"type": "output_text", "text": answer.text, "annotations": []}
        items.append({"type": "message", "id": "msg_1", "role": "assistant", "content": [part]})
    for call in _calls(answer):
        items.append({"type": "function_call", "id": f"fc_{call['id']}", "call_id": call["id"]} | call["function"])
    return items


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if answer.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": "s"})
    if answer.text:
        blocks.append({"type": "text", "text": answer.text})
    for call, (name, arguments) in zip(_calls(answer), answer.calls, strict=True):
        blocks.append({"type": "tool_use", "id": call["id"], "name": name, "input": arguments})
    return blocks
