"""A small conforming engine on 127.0.0.1: chat, completions, responses and messages, whole or streamed, with tools.

It answers as vLLM does, with `prompt_token_ids`, `token_ids` and log-probabilities where a request asks for them, and
null where it does not. Its tokens are the bytes of a plain rendering of the chat, so that a prompt that continues from
an answer begins with that call's tokens. What it sampled is in `Engine.calls`, for tests to compare a lake with.

The model's name says how it behaves: `policy` answers, `error-500` refuses, `cut-3` breaks off after three chunks,
`ends-3` ends there as if that were all, `half` breaks off in the middle of a whole answer, `slow-20` waits 20 ms before
every chunk, `hang` never answers, `endless` streams without end, `think` reasons aloud first, `flaky` fails every first
try of a prompt. `echo` repeats the request's headers and body in its answer and a header of it, `echo-401` in an error,
`echo-event` in an error that a stream ends with.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

EOS = 2
_FIRST = 3
"""Id of byte 0."""


def encoded(text: str) -> list[int]:
    """Token ids of a text: its bytes."""
    return [byte + _FIRST for byte in text.encode()]


def rendered(messages: list[dict[str, Any]]) -> list[int]:
    """Token ids of a chat up to where the assistant begins."""
    ids: list[int] = []
    for message in messages:
        if message["role"] == "assistant":
            ids += [*encoded("<assistant>"), *said_ids(_text(message.get("content")), message.get("tool_calls") or [])]
        else:
            ids += [*encoded(f"<{message['role']}>" + _text(message.get("content"))), EOS]
    return [*ids, *encoded("<assistant>")]


def said_ids(text: str, calls: list[dict[str, Any]]) -> list[int]:
    """Token ids of an answer, its end included."""
    functions = [[call["function"]["name"], call["function"]["arguments"], call["id"]] for call in calls]
    return [*encoded(text + (json.dumps(functions) if calls else "")), EOS]


def logprob(token: int, index: int) -> float:
    """What the engine says of a token: any number that differs between them."""
    return -((token * 31 + index * 7) % 97) / 64


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content or ())


class Sampled:
    """One call that the engine answered."""

    def __init__(self, body: dict[str, Any], headers: Any, prompt_ids: list[int], number: int) -> None:
        self.body, self.headers, self.prompt_ids = body, dict(headers), prompt_ids
        self.text, self.calls = _answer(body, number)
        self.reasoning = f"thought {number}" if body.get("model") == "think" else ""
        self.action_ids = said_ids(self.text, self.calls)
        self.logprobs = [logprob(token, index) for index, token in enumerate(self.action_ids)]
        self.number = number
        self.is_whole = False
        """Whether all of it was sent."""

    def say(self, text: str) -> None:
        """Answer this and nothing else."""
        self.text, self.calls, self.action_ids = text, [], said_ids(text, [])
        self.logprobs = [logprob(token, index) for index, token in enumerate(self.action_ids)]

    @property
    def ids_asked_for(self) -> tuple[list[int] | None, list[int] | None]:
        """Ids of the prompt and of the answer, if the request wants them."""
        return (self.prompt_ids, self.action_ids) if self.body.get("return_token_ids") else (None, None)

    @property
    def all_words(self) -> str:
        """All of the answer's words."""
        return self.text + json.dumps(self.calls)

    def chunks(self, count: int = 3) -> list[tuple[str, list[int], list[float]]]:
        """The answer in pieces: text, ids and log-probabilities; the end token, and calls, come with the last."""
        n = max(1, -(-len(self.text.encode()) // count)) if self.text else 0
        ids = self.action_ids
        pieces = []
        for start in range(0, len(self.text.encode()), n or 1):
            part = slice(start, min(start + n, len(self.text.encode())))
            pieces.append((self.text.encode()[part].decode(), ids[part], self.logprobs[part]))
        done = sum(len(piece[1]) for piece in pieces)
        return [*pieces, ("", ids[done:], self.logprobs[done:])]


def _answer(body: dict[str, Any], number: int) -> tuple[str, list[dict[str, Any]]]:
    """Calls the first tool until two results are there, then says how many messages it saw.

    Who has a tool `final_answer` answers by calling it, after two answers, in any form results come.
    """
    messages = body.get("messages") or body.get("input") or []
    messages = messages if isinstance(messages, list) else []
    results = sum(
        message.get("role") == "tool" or message.get("type") == "function_call_output" or _has_result(message)
        for message in messages
        if isinstance(message, dict)
    )
    text = f"answer {number} to {len(messages)} messages"
    functions = [tool.get("function", tool) for tool in body.get("tools") or ()]
    tools = {function["name"]: function for function in functions if "name" in function}
    if "final_answer" in tools and sum(message["role"] == "assistant" for message in messages) >= 2:
        return "", [_call(number, tools["final_answer"], text)]
    if tools and results < 2:
        return "", [_call(number, next(iter(tools.values())), f"thing {results} of {number}")]
    return text, []


def _call(number: int, function: dict[str, Any], text: str) -> dict[str, Any]:
    """A call of a function, with the same text for each of its parameters."""
    parameters = function.get("parameters") or function.get("input_schema") or {}
    arguments = json.dumps(dict.fromkeys(parameters.get("properties", ()), text))
    return {
        "id": f"call_{number}",
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _has_result(message: dict[str, Any]) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(part.get("type") == "tool_result" for part in content)


class Engine:
    """The engine's state: what it answered, and how it is doing."""

    def __init__(self) -> None:
        self.calls: list[Sampled] = []
        self.gone: list[str] = []
        """Models of the calls whose clients left before their answer was whole."""
        self.port = 0
        self.weight_version = "7"
        self.says_sampling = True
        """How it samples where a request does not say, as in vLLM's developer mode."""
        self.asked: list[str] = []
        """Models of all calls that arrived."""
        self.tried: set[str] = set()

    @property
    def left(self) -> int:
        """How many clients left before their answer was whole."""
        return len(self.gone)

    @property
    def url(self) -> str:
        """As `--upstream`."""
        return f"http://127.0.0.1:{self.port}/v1"

    def app(self) -> web.Application:
        """The routes."""
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/version", self._version)
        app.router.add_get("/weight_info", self._weights)
        app.router.add_get("/server_info", self._info)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/responses", self._responses)
        app.router.add_post("/v1/messages", self._messages)
        app.router.add_post("/v1/unknown/stream", self._chat)
        return app

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def _info(self, _: web.Request) -> web.Response:
        if not self.says_sampling:
            return _error(404)
        model = {"logprobs_mode": "processed_logprobs", "generation_config": "vllm", "override_generation_config": {}}
        return web.json_response({"vllm_config": {"model_config": model}})

    async def _weights(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.weight_version})

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "vllm"}]})

    async def _begin(
        self, request: web.Request, prompt_ids: list[int], body: dict[str, Any]
    ) -> Sampled | web.StreamResponse:
        model = str(body.get("model"))
        self.asked.append(model)
        if model.startswith("hang"):
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                self.gone.append(model)
                raise
        if model == "half":
            return await _half(request)
        if model == "echo-401":
            return _error(401, f"no access with {_describe_request(request, body)}")
        if model == "flaky" and (key := json.dumps([body.get("messages")])) not in self.tried:
            self.tried.add(key)
            return _error(503)
        if model.startswith("error-"):
            return _error(int(model.removeprefix("error-")))
        sampled = Sampled(body, request.headers, prompt_ids, len(self.calls))
        if model == "echo":
            sampled.say(_describe_request(request, body))
        self.calls.append(sampled)
        return sampled

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        sampled = await self._begin(request, rendered(body["messages"]), body)
        if not isinstance(sampled, Sampled):
            return sampled
        if body.get("stream"):
            return await self._stream(request, sampled, _chat_events(sampled))
        message: dict[str, Any] = {"role": "assistant", "content": sampled.text or None}
        message |= {"tool_calls": sampled.calls} if sampled.calls else {}
        message |= {"reasoning_content": sampled.reasoning} if sampled.reasoning else {}
        content = [{"token": "", "logprob": value, "bytes": None, "top_logprobs": []} for value in sampled.logprobs]
        choice = {
            "index": 0,
            "message": message,
            "logprobs": {"content": content} if body.get("logprobs") else None,
            "finish_reason": "tool_calls" if sampled.calls else "stop",
        }
        answer = _about("chat.completion", sampled) | {"choices": [choice], "usage": _usage(sampled)}
        answer["prompt_token_ids"], choice["token_ids"] = sampled.ids_asked_for
        sampled.is_whole = True
        return web.json_response(answer)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = body["prompt"]
        sampled = await self._begin(request, encoded(prompt) if isinstance(prompt, str) else prompt, body)
        if not isinstance(sampled, Sampled):
            return sampled
        if body.get("stream"):
            return await self._stream(request, sampled, _completion_events(sampled))
        listed = {"token_logprobs": sampled.logprobs, "tokens": [""] * len(sampled.logprobs)}
        choice = {"index": 0, "text": sampled.text, "finish_reason": "stop"}
        choice["logprobs"] = listed if body.get("logprobs") is not None else None
        choice["prompt_token_ids"], choice["token_ids"] = sampled.ids_asked_for
        sampled.is_whole = True
        return web.json_response(_about("text_completion", sampled) | {"choices": [choice], "usage": _usage(sampled)})

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        sampled = await self._begin(request, encoded(json.dumps(body["input"])), body)
        if not isinstance(sampled, Sampled):
            return sampled
        if body.get("stream"):
            return await self._stream(request, sampled, _response_events(sampled), is_named=True)
        sampled.is_whole = True
        return web.json_response(_response(sampled, "completed"))

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        sampled = await self._begin(request, encoded(json.dumps(body["messages"])), body)
        if not isinstance(sampled, Sampled):
            return sampled
        if body.get("stream"):
            return await self._stream(request, sampled, _message_events(sampled), is_named=True)
        sampled.is_whole = True
        return web.json_response(_message(sampled))

    async def _stream(
        self, request: web.Request, sampled: Sampled, events: Iterator[dict[str, Any] | str], *, is_named: bool = False
    ) -> web.StreamResponse:
        model = str(sampled.body.get("model"))
        most = int(model.removeprefix("cut-")) if model.startswith("cut-") else None
        n_events = int(model.removeprefix("ends-")) if model.startswith("ends-") else None
        pause = int(model.removeprefix("slow-")) / 1000 if model.startswith("slow-") else 0.0
        headers = {"Content-Type": "text/event-stream"} | (
            {"X-Seen": _describe_request(request, {})} if model == "echo" else {}
        )
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        try:
            async for number, event in _numbered(events, forever=model == "endless"):
                if number == n_events:
                    return response
                if number and model == "echo-event":
                    body = json.dumps(
                        {"error": {"message": _describe_request(request, sampled.body), "type": "server_error"}}
                    )
                    await response.write(f"data: {body}\n\n".encode())
                    return response
                if number == most:
                    assert request.transport is not None
                    request.transport.abort()
                    return response
                await asyncio.sleep(pause)
                text = event if isinstance(event, str) else json.dumps(event)
                name = f"event: {event['type']}\n" if is_named and isinstance(event, dict) else ""
                await response.write(f"{name}data: {text}\n\n".encode())
        except (ConnectionResetError, asyncio.CancelledError):
            self.gone.append(model)
            raise
        sampled.is_whole = True
        return response


async def _numbered(events: Iterator[Any], *, forever: bool) -> AsyncIterator[tuple[int, Any]]:
    listed = list(events)
    number = 0
    while True:
        for event in listed[1:2] if forever and number else listed[:2] if forever else listed:
            yield number, event
            number += 1
        if not forever:
            return


def _error(status: int, message: str | None = None) -> web.Response:
    error = {"message": message or f"refused with {status}", "type": "server_error"}
    return web.json_response({"error": error}, status=status)


def _describe_request(request: web.Request, body: dict[str, Any]) -> str:
    """A request as an engine that is careless with keys might show it."""
    return json.dumps([request.raw_path, [*request.headers.values()], body])


async def _half(request: web.Request) -> web.StreamResponse:
    """The first bytes of a longer answer, and the end of the connection."""
    response = web.StreamResponse(headers={"Content-Length": "1000", "Content-Type": "application/json"})
    await response.prepare(request)
    await response.write(b'{"choices": [{"message": {"content": "half')
    assert request.transport is not None
    request.transport.abort()
    return response


def _about(kind: str, sampled: Sampled) -> dict[str, Any]:
    return {"id": f"cmpl-{sampled.number}", "object": kind, "created": 1_790_000_000, "model": "policy"}


def _usage(sampled: Sampled) -> dict[str, Any]:
    prompt, action = len(sampled.prompt_ids), len(sampled.action_ids)
    return {"prompt_tokens": prompt, "completion_tokens": action, "total_tokens": prompt + action}


def _chat_events(sampled: Sampled) -> Iterator[dict[str, Any] | str]:
    body = sampled.body
    about = _about("chat.completion.chunk", sampled)
    first = about | {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
    yield first | {"prompt_token_ids": sampled.ids_asked_for[0]}
    if sampled.reasoning:
        yield about | {"choices": [{"index": 0, "delta": {"reasoning_content": sampled.reasoning}}]}
    pieces = sampled.chunks()
    for index, (text, ids, values) in enumerate(pieces):
        is_last = index == len(pieces) - 1
        delta: dict[str, Any] = {"content": text}
        if is_last and sampled.calls:
            delta = {"tool_calls": [{"index": i} | call for i, call in enumerate(sampled.calls)]}
        choice: dict[str, Any] = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        if body.get("logprobs"):
            choice["logprobs"] = {"content": [{"token": "", "logprob": value} for value in values]}
        choice["token_ids"] = ids if body.get("return_token_ids") else None
        if is_last:
            choice["finish_reason"] = "tool_calls" if sampled.calls else "stop"
        yield about | {"choices": [choice]}
    if (body.get("stream_options") or {}).get("include_usage"):
        yield about | {"choices": [], "usage": _usage(sampled)}
    yield "[DONE]"


def _completion_events(sampled: Sampled) -> Iterator[dict[str, Any] | str]:
    about = _about("text_completion", sampled)
    pieces = sampled.chunks()
    for index, (text, ids, values) in enumerate(pieces):
        choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": None, "logprobs": None}
        if sampled.body.get("logprobs") is not None:
            choice["logprobs"] = {"token_logprobs": values, "tokens": [""] * len(values)}
        choice["token_ids"] = ids if sampled.body.get("return_token_ids") else None
        choice["prompt_token_ids"] = None if index else sampled.ids_asked_for[0]
        choice["finish_reason"] = "stop" if index == len(pieces) - 1 else None
        yield about | {"choices": [choice]}
    yield "[DONE]"


def _response(sampled: Sampled, status: str) -> dict[str, Any]:
    output: list[dict[str, Any]] = [
        {"type": "function_call", "id": f"fc_{call['id']}", "call_id": call["id"], "status": "completed"}
        | call["function"]
        for call in sampled.calls
    ]
    if sampled.text:
        part = {"type": "output_text", "text": sampled.text, "annotations": []}
        output.append({"type": "message", "id": "msg_1", "role": "assistant", "content": [part]})
    usage = {"input_tokens": len(sampled.prompt_ids), "output_tokens": len(sampled.action_ids)}
    named = {"id": f"resp_{sampled.number}", "object": "response", "model": "policy", "status": status}
    return named | {"created_at": 1_790_000_000, "output": output, "usage": usage}


def _response_events(sampled: Sampled) -> Iterator[dict[str, Any] | str]:
    response = _response(sampled, "completed")
    yield {"type": "response.created", "response": response | {"status": "in_progress", "output": [], "usage": None}}
    for index, item in enumerate(response["output"]):
        yield {"type": "response.output_item.added", "output_index": index, "item": item | {"status": "in_progress"}}
        for text, _, _ in sampled.chunks() if item["type"] == "message" else ():
            yield {"type": "response.output_text.delta", "output_index": index, "content_index": 0, "delta": text}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": "response.completed", "response": response}


def _message(sampled: Sampled) -> dict[str, Any]:
    content: list[dict[str, Any]] = [{"type": "text", "text": sampled.text}] if sampled.text else []
    content += [
        {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments}
        for call in sampled.calls
        for arguments in [json.loads(call["function"]["arguments"])]
    ]
    usage = {"input_tokens": len(sampled.prompt_ids), "output_tokens": len(sampled.action_ids)}
    about = {"id": f"msg_{sampled.number}", "type": "message", "role": "assistant", "model": "policy"}
    reason = "tool_use" if sampled.calls else "end_turn"
    return about | {"content": content, "stop_reason": reason, "stop_sequence": None, "usage": usage}


def _message_events(sampled: Sampled) -> Iterator[dict[str, Any] | str]:
    message = _message(sampled)
    usage = message["usage"] | {"output_tokens": 1}
    yield {"type": "message_start", "message": message | {"content": [], "stop_reason": None, "usage": usage}}
    for index, block in enumerate(message["content"]):
        is_text = block["type"] == "text"
        empty = {"type": "text", "text": ""} if is_text else block | {"input": {}}
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        for piece in [piece for piece, _, _ in sampled.chunks()] if is_text else [json.dumps(block["input"])]:
            kind = {"type": "text_delta", "text": piece} if is_text else {"type": "input_json_delta"}
            delta = kind if is_text else kind | {"partial_json": piece}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    output = {"output_tokens": message["usage"]["output_tokens"]}
    yield {"type": "message_delta", "delta": {"stop_reason": message["stop_reason"]}, "usage": output}
    yield {"type": "message_stop"}


@contextmanager
def engine_server(engine: Engine | None = None) -> Iterator[Engine]:
    """A running engine, on its own port, in a thread."""
    engine = engine or Engine()
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(engine.app(), handler_cancellation=True, access_log=None, shutdown_timeout=0.1)

    async def start() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", engine.port, backlog=2048, reuse_address=True)
        await site.start()
        engine.port = runner.addresses[0][1]

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield engine
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
