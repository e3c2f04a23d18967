"""Writes tests/golden/formats/claude_code with the real tool, which talks to a server of this script; needs npm:

python tests/golden/formats/make_claude_code.py /tmp/claude_code

Packages: @anthropic-ai/claude-code 1.0.21 and 2.0.14, @anthropic-ai/claude-code-linux-x64 2.1.330. Long texts (prompts
and schemas of the tool) and most lines about requests are left out of the files, the folder becomes /home/user/shop and
the day 2026-01-02.
"""

import itertools
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

FOLDER = Path(__file__).parent / "claude_code"
WORK = Path(sys.argv[1]).absolute()
SHOP = WORK / "shop"
PACKAGES = {
    "1.0.21": "@anthropic-ai/claude-code@1.0.21",
    "2.0.14": "@anthropic-ai/claude-code@2.0.14",
    "2.1.330": "@anthropic-ai/claude-code-linux-x64@2.1.330",
}
NUMBERS = itertools.count(1)


def answer(request: dict) -> list[dict]:
    """What the model says, by what it is asked."""
    tools = {tool["name"] for tool in request.get("tools", [])}
    if not tools:
        return [{"type": "text", "text": "A title"}]
    last = next(message for message in reversed(request["messages"]) if message["role"] == "user")
    parts = last["content"] if isinstance(last["content"], list) else [{"type": "text", "text": last["content"]}]
    results = [part for part in parts if part["type"] == "tool_result"]
    if results:
        return [{"type": "text", "text": f"Done with {len(results)}."}]
    asked = " ".join(part.get("text", "") for part in parts)
    if "two commands" in asked:
        return [
            {"type": "thinking", "thinking": "Both at once.", "signature": "c2ln"},
            {"type": "text", "text": "I run two."},
            {"type": "tool_use", "name": "Bash", "input": {"command": "echo one", "description": "Print"}},
            {"type": "tool_use", "name": "Bash", "input": {"command": "false", "description": "Fail"}},
        ]
    if "ask helpers" in asked:
        agent = "Task" if "Task" in tools else "Agent"
        prompts = (("Count", "Please count apples"), ("Greet", "Please greet"))
        calls = [{"description": d, "prompt": p, "subagent_type": "general-purpose"} for d, p in prompts]
        return [{"type": "text", "text": "I ask."}, *({"type": "tool_use", "name": agent, "input": c} for c in calls)]
    if "count apples" in asked:
        return [{"type": "tool_use", "name": "Bash", "input": {"command": "echo 3", "description": "Count"}}]
    return [{"type": "text", "text": "Hello."}]


class Handler(BaseHTTPRequestHandler):
    """The Messages API, with and without a stream."""

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def send(self, body: str, kind: str = "application/json", code: int = 200) -> None:
        self.send_response(code)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def do_GET(self) -> None:
        self.send("{}")

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])) or b"{}")
        if "/v1/messages" not in self.path or "count_tokens" in self.path:
            return self.send('{"input_tokens": 10}')
        if "please fail" in json.dumps(request["messages"][-1:]):
            error = {"type": "invalid_request_error", "message": "no"}
            return self.send(json.dumps({"type": "error", "error": error}), code=400)
        number, blocks = next(NUMBERS), answer(request)
        for place, block in enumerate(blocks):
            if block["type"] == "tool_use":
                block["id"] = f"toolu_{number:03}_{place}"
        stop = "tool_use" if any(block["type"] == "tool_use" for block in blocks) else "end_turn"
        usage = {"input_tokens": 10, "cache_creation_input_tokens": 20, "cache_read_input_tokens": number}
        message = {"id": f"msg_{number:03}", "type": "message", "role": "assistant", "model": request["model"]}
        message |= {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage | {"output_tokens": 1}}
        if not request.get("stream"):
            whole = {"content": blocks, "stop_reason": stop, "usage": usage | {"output_tokens": 40}}
            return self.send(json.dumps(message | whole))
        events = [{"type": "message_start", "message": message}]
        for place, block in enumerate(blocks):
            begun = block | {"text": ""} if "text" in block else block | {"input": {}}
            deltas = [{"type": "text_delta", "text": block.get("text", "")}]
            if block["type"] == "thinking":
                begun = block | {"thinking": "", "signature": ""}
                deltas = [{"type": "thinking_delta", "thinking": block["thinking"]}]
                deltas += [{"type": "signature_delta", "signature": block["signature"]}]
            elif block["type"] == "tool_use":
                deltas = [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
            events.append({"type": "content_block_start", "index": place, "content_block": begun})
            events += [{"type": "content_block_delta", "index": place, "delta": delta} for delta in deltas]
            events.append({"type": "content_block_stop", "index": place})
        end = {"delta": {"stop_reason": stop, "stop_sequence": None}, "usage": {"output_tokens": 40}}
        events += [{"type": "message_delta"} | end, {"type": "message_stop"}]
        stream = "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)
        return self.send(stream, "text/event-stream")


def run(version: str, *arguments: str) -> str:
    """Call the tool."""
    package = WORK / version / "package"
    if not package.exists():
        package.parent.mkdir(parents=True)
        subprocess.run(["npm", "pack", "--silent", PACKAGES[version]], cwd=package.parent, check=True)
        (packed,) = package.parent.glob("*.tgz")
        subprocess.run(["tar", "xzf", packed.name], cwd=package.parent, check=True)
    tool = [str(package / "claude")] if version == "2.1.330" else ["node", str(package / "cli.js")]
    environment = {"PATH": os.environ["PATH"], "HOME": str(WORK / f"home-{version}"), "IS_SANDBOX": "1"}
    environment |= {"ANTHROPIC_API_KEY": "sk-ant-none", "ANTHROPIC_BASE_URL": f"http://127.0.0.1:{server.server_port}"}
    environment |= {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"}
    done = subprocess.run(
        [*tool, "--allowedTools", "Bash,Task,Agent", "-p", *arguments],
        cwd=SHOP, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    print(version, arguments, done.stdout[-200:].strip(), done.stderr[-200:].strip())
    return done.stdout


def sessions(version: str) -> list[Path]:
    """The files of conversations, oldest first."""
    found = (WORK / f"home-{version}").glob(".claude/projects/*/*.jsonl")
    return sorted((path for path in found if '"uuid"' in path.read_text()), key=lambda path: path.stat().st_mtime)


def shortened(value: object) -> object:
    """A value without long texts and lists."""
    if isinstance(value, str):
        return value if len(value) <= 110 else "(left out)"
    if isinstance(value, dict):
        schemas = {key: {"type": "object"} for key in ("input_schema", "schema") if key in value}
        return {key: shortened(item) for key, item in value.items()} | schemas
    return [shortened(item) for item in value[:2]] if isinstance(value, list) else value


def keep(path: Path, name: str) -> None:
    """Write a file of the tool into the folder of fixtures."""
    target = FOLDER / name
    target.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for kind in ("api-request-blob", "api-request", "queue-operation", "cost-state"):
        more = [line for line in lines if line["type"] == kind][1:]
        lines = [line for line in lines if line not in more]
    text = "".join(json.dumps(shortened(line), ensure_ascii=False, separators=(",", ":")) + "\n" for line in lines)
    text = text.replace(str(SHOP), "/home/user/shop").replace(str(WORK), "/home/user")
    text = text.replace(re.sub(r"\W|_", "-", str(SHOP)), "-home-user-shop")
    for found, written in (
        (r"202\d-\d\d-\d\d(?!\d|-)", "2026-01-02"),
        (r"Linux [\w.-]+", "Linux"),
        ("/tmp/claude-0", "/tmp"),
    ):
        text = re.sub(found, written, text)
    target.write_text(text)
    print(target.name, target.stat().st_size)


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
SHOP.mkdir(parents=True, exist_ok=True)

run("1.0.21", "run two commands")
run("1.0.21", "ask helpers", "-c")
keep(sessions("1.0.21")[-1], "1.0.21.jsonl")

run("2.0.14", "run two commands")
run("2.0.14", "ask helpers", "-c")
run("2.0.14", "/compact", "-c")
run("2.0.14", "please fail", "-c")
run("2.0.14", "greet me", "-c")
keep(sessions("2.0.14")[-1], "2.0.14.jsonl")
(WORK / "stream.jsonl").write_text(run("2.0.14", "ask helpers", "--output-format", "stream-json", "--verbose"))
keep(WORK / "stream.jsonl", "stream_2.0.14.jsonl")

run("2.1.330", "run two commands")
run("2.1.330", "ask helpers", "-c")
(session,) = sessions("2.1.330")
lines = [json.loads(line) for line in session.read_text().splitlines()]
spoken = [line for line in lines if line["type"] == "assistant" and line["message"]["stop_reason"] == "end_turn"]
said = [line["uuid"] for line in spoken]
run("2.1.330", "greet me", "-r", session.stem, "--resume-session-at", said[0])
keep(session, f"2.1.330/{session.name}")
for path in sorted(session.with_suffix("").glob("subagents/*")):
    if path.name.endswith(".meta.json"):
        (FOLDER / f"2.1.330/{session.stem}/subagents/{path.name}").write_text(path.read_text())
    else:
        keep(path, f"2.1.330/{session.stem}/subagents/{path.name}")
