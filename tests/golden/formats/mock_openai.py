"""A server that answers like the chat and the responses API of OpenAI, by rules instead of a model: for fixtures only.

Rules: asked for the weather it calls get_weather, or ask_expert if that is offered instead; a first request that says
`flaky` fails; after the results of tools it answers with the last of them.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

USAGE = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}


class Handler(BaseHTTPRequestHandler):
    """Counts its answers, so that ids are the same whenever the script runs."""

    count = 0
    failed = False

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_POST(self) -> None:
        """Answer one request."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        kind = type(self)
        kind.count += 1
        is_chat = self.path.endswith("/chat/completions")
        said = json.dumps(body.get("messages") if is_chat else body.get("input"))
        if "flaky" in said and not kind.failed:
            kind.failed = True
            self.send(500, {"error": {"message": "overloaded", "type": "server_error"}})
        else:
            self.send(200, (_chat if is_chat else _response)(body, kind.count))

    def send(self, status: int, answer: Any) -> None:
        """Write JSON."""
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def serve() -> str:
    """Start it on a free port of this machine; its base URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/v1"


def _choice(tools: list[Any], last: Any) -> tuple[str | None, tuple[str, str] | None]:
    """Text, or the name and arguments of a tool."""
    offered = {tool["name"]: tool.get("parameters") or {} for tool in tools if "name" in tool}
    role = last.get("role") or last.get("type")
    if role in ("tool", "function_call_output"):
        return f"So it is: {last.get('content', last.get('output'))}", None
    for name, value in (("get_weather", "Paris"), ("ask_expert", "Weather in Paris?"), ("transfer_to_expert", "")):
        if name in offered:
            return None, (name, json.dumps(dict.fromkeys(offered[name].get("properties", {}), value)))
    return "I am the expert: sunny.", None


def _chat(body: Any, count: int) -> Any:
    text, call = _choice([tool["function"] for tool in body.get("tools") or ()], body["messages"][-1])
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if call:
        function = {"name": call[0], "arguments": call[1]}
        message["tool_calls"] = [{"id": f"call_{count}", "type": "function", "function": function}]
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if call else "stop"}
    head = {"id": f"chatcmpl-{count}", "object": "chat.completion", "created": 1767225600, "model": body["model"]}
    return {**head, "choices": [choice], "usage": USAGE}


def _response(body: Any, count: int) -> Any:
    given = body["input"]
    text, call = _choice(
        body.get("tools") or [], given[-1] if isinstance(given, list) else {"role": "user", "content": given}
    )
    output: list[dict[str, Any]] = [
        {"type": "reasoning", "id": f"rs_{count}", "summary": [{"type": "summary_text", "text": "Let me see."}]}
    ]
    if call:
        output.append(
            {
                "type": "function_call",
                "id": f"fc_{count}",
                "call_id": f"call_{count}",
                "name": call[0],
                "arguments": call[1],
                "status": "completed",
            }
        )
    else:
        part = {"type": "output_text", "text": text, "annotations": []}
        output.append(
            {"type": "message", "id": f"msg_{count}", "role": "assistant", "status": "completed", "content": [part]}
        )
    usage = {
        "input_tokens": 11,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 18,
    }
    return {
        "id": f"resp_{count}",
        "object": "response",
        "created_at": 1767225600,
        "model": body["model"],
        "status": "completed",
        "output": output,
        "usage": usage,
        "tools": body.get("tools") or [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "metadata": {},
        "temperature": 1.0,
        "top_p": 1.0,
    }
