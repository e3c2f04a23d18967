"""Writes tests/golden/formats/codex with the real tool, which talks to a server of this script; needs npm:

python tests/golden/formats/make_codex.py /tmp/codex

Packages: @openai/codex 0.25.0, 0.36.0, 0.89.0, 0.125.0-linux-x64, 0.169.0-linux-x64. Long texts (prompts of the tool)
are left out of the files, the folder becomes /home/user/shop and the day 2026-01-02.
"""

import itertools
import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

FOLDER = Path(__file__).parent / "codex"
WORK = Path(sys.argv[1]).absolute()
SHOP = WORK / "shop"
LINUX = "vendor/x86_64-unknown-linux-musl"
TOOLS = {
    "0.25.0": ("0.25.0", "bin/codex-x86_64-unknown-linux-musl"),
    "0.36.0": ("0.36.0", "bin/codex-x86_64-unknown-linux-musl"),
    "0.89.0": ("0.89.0", f"{LINUX}/codex/codex"),
    "0.125.0": ("0.125.0-linux-x64", f"{LINUX}/codex/codex"),
    "0.169.0": ("0.169.0-linux-x64", f"{LINUX}/bin/codex"),
}
"""Version -> package and program."""
SHELLS = {"0.25.0": "shell", "0.36.0": "shell", "0.89.0": "shell_command"}
NUMBERS = itertools.count(1)
answers: list[list[dict]] = []
"""What the model is going to say."""


def message_item(text: str) -> dict:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "id": f"msg_{next(NUMBERS)}", "role": "assistant", "content": content}


def thought(summary: str | None) -> dict:
    texts = [{"type": "summary_text", "text": summary}] if summary else []
    return {"type": "reasoning", "id": f"rs_{next(NUMBERS)}", "summary": texts, "encrypted_content": "Y2lwaGVy"}


def called(version: str, command: str) -> dict:
    name, number = SHELLS.get(version, "exec_command"), next(NUMBERS)
    given = {"shell": {"command": command.split()}, "shell_command": {"command": command}}.get(name, {"cmd": command})
    call = {"type": "function_call", "id": f"fc_{number}", "call_id": f"call_{number}", "name": name}
    return call | {"arguments": json.dumps(given)}


def searched(query: str) -> dict:
    action = {"type": "search", "query": query}
    return {"type": "web_search_call", "id": f"ws_{next(NUMBERS)}", "status": "completed", "action": action}


class Handler(BaseHTTPRequestHandler):
    """The Responses API."""

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def send(self, body: str, kind: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def do_GET(self) -> None:
        self.send('{"data": [], "models": []}', "application/json")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        number, items = next(NUMBERS), answers.pop(0) if answers else [message_item("Nothing.")]
        usage = {"input_tokens": 1000 + number, "output_tokens": 20, "total_tokens": 1020 + number}
        usage |= {"input_tokens_details": {"cached_tokens": 900}, "output_tokens_details": {"reasoning_tokens": 5}}
        whole = {"id": f"resp_{number}", "output": items, "usage": usage}
        events = [{"type": "response.created", "response": {"id": whole["id"]}}]
        for place, item in enumerate(items):
            events += [
                {"type": f"response.output_item.{when}", "output_index": place, "item": item}
                for when in ("added", "done")
            ]
        events.append({"type": "response.completed", "response": whole})
        self.send("".join(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in events), "text/event-stream")


def tool(version: str, settings: str = "") -> tuple[str, dict[str, str]]:
    """The program of a version, and the environment that it runs in."""
    package, program = TOOLS[version]
    folder = WORK / version
    if not folder.exists():
        folder.mkdir(parents=True)
        subprocess.run(["npm", "pack", "--silent", f"@openai/codex@{package}"], cwd=folder, check=True)
        (packed,) = folder.glob("*.tgz")
        subprocess.run(["tar", "xzf", packed.name], cwd=folder, check=True)
    home = WORK / f"home-{version}"
    (home / ".codex").mkdir(parents=True, exist_ok=True)
    address = f"http://127.0.0.1:{server.server_port}/v1"
    provider = f'name = "none"\nbase_url = "{address}"\nenv_key = "NONE"\nwire_api = "responses"\n'
    (home / ".codex/config.toml").write_text(
        'model = "gpt-5"\nmodel_provider = "none"\napproval_policy = "never"\nsandbox_mode = "danger-full-access"\n'
        f"{settings}\n[model_providers.none]\n{provider}request_max_retries = 0\nstream_max_retries = 0\n"
    )
    return str(folder / "package" / program), {"PATH": os.environ["PATH"], "HOME": str(home), "NONE": "none"}


def run(version: str, *arguments: str, settings: str = "") -> None:
    """Call the tool once."""
    program, environment = tool(version, settings)
    done = subprocess.run(
        [program, "exec", "--skip-git-repo-check", *arguments],
        cwd=SHOP, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    print(version, arguments, done.stdout[-100:].strip())


class App:
    """The tool as a server, which can take turns back and fork."""

    def __init__(self, version: str, settings: str = "") -> None:
        program, environment = tool(version, settings)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen([program, "app-server"], cwd=SHOP, env=environment, text=True, **pipes)
        self.heard: queue.Queue[dict] = queue.Queue()
        threading.Thread(target=self.listen, daemon=True).start()
        who = {"clientInfo": {"name": "demo", "version": "1"}, "capabilities": {"experimentalApi": True}}
        self.call("initialize", who)
        self.write({"method": "initialized"})

    def listen(self) -> None:
        for line in self.process.stdout:
            self.heard.put(json.loads(line))

    def write(self, message: dict) -> None:
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def call(self, method: str, params: dict) -> dict:
        number = next(NUMBERS)
        self.write({"id": number, "method": method, "params": params})
        while (message := self.heard.get(timeout=30)).get("id") != number or "method" in message:
            pass
        return message["result"]

    def turn(self, thread: str, text: str) -> None:
        self.call("turn/start", {"threadId": thread, "input": [{"type": "text", "text": text}]})
        while (message := self.heard.get(timeout=30)).get("method") != "turn/completed" or (
            message["params"]["threadId"] != thread
        ):
            pass

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=30)


def rollouts(version: str) -> list[Path]:
    """Files of a version, by the session's id, which grows with time."""
    return sorted((WORK / f"home-{version}").rglob("rollout-*.jsonl"), key=lambda path: path.stem[-36:])


def shortened(value: object) -> object:
    """A value without long texts."""
    if isinstance(value, str):
        return value if len(value) <= 250 else f"{value[:40]} (left out)"
    if isinstance(value, dict):
        return {key: shortened(item) for key, item in value.items()}
    return [shortened(item) for item in value] if isinstance(value, list) else value


def keep(path: Path, name: str) -> None:
    """Write a file of the tool into the folder of fixtures."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    lines = [shortened(json.loads(line)) for line in path.read_text().splitlines()]
    text = "".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in lines)
    text = text.replace(str(SHOP), "/home/user/shop").replace(str(WORK), "/home/user")
    (FOLDER / name).write_text(re.sub(r"202\d-\d\d-\d\d(?!\d|-)", "2026-01-02", text))
    print(name, (FOLDER / name).stat().st_size)


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
SHOP.mkdir(parents=True, exist_ok=True)

for old in ("0.25.0", "0.36.0"):
    answers[:] = [[thought("**Look**"), message_item("I look."), called(old, "echo one")], [called(old, "false")]]
    answers += [[thought(None), message_item("Both done.")]]
    run(old, "run two commands")
answers[:] = [[message_item("Again.")]]
run("0.36.0", "resume", rollouts("0.36.0")[0].stem[-36:], "once more")
keep(rollouts("0.25.0")[0], "0.25.0.jsonl")
keep(rollouts("0.36.0")[0], "0.36.0.jsonl")

parallel = [thought("**Look**"), message_item("I look."), called("0.89.0", "echo one"), called("0.89.0", "false")]
answers[:] = [parallel, [message_item("The summary.")], [searched("weather"), message_item("Both done.")]]
run("0.89.0", "run two commands", settings="model_auto_compact_token_limit = 1015")
keep(rollouts("0.89.0")[0], "0.89.0.jsonl")

answers[:] = [
    [message_item("One.")],
    [called("0.125.0", "echo two")],
    [message_item("Two.")],
    [message_item("Another two.")],
]
answers += [[message_item("In the fork.")], [message_item("Three.")]]
app = App("0.125.0")
thread = app.call("thread/start", {})["thread"]["id"]
app.turn(thread, "first")
app.turn(thread, "second")
app.call("thread/rollback", {"threadId": thread, "numTurns": 1})
app.turn(thread, "second again")
fork = app.call("thread/fork", {"threadId": thread})["thread"]["id"]
app.turn(fork, "in the fork")
app.turn(thread, "third")
app.close()
keep(rollouts("0.125.0")[0], "0.125.0.jsonl")
keep(rollouts("0.125.0")[1], "0.125.0_fork.jsonl")

asked = {"type": "function_call", "id": "fc_s", "call_id": "call_s", "name": "spawn_agent"}
asked |= {"arguments": json.dumps({"message": "Greet.", "fork_context": True})}
answers[:] = [[message_item("I ask."), asked], [message_item("Hello.")], [message_item("Hello.")]]
app = App("0.125.0", "[features]\nmulti_agent = true\n")
app.turn(app.call("thread/start", {})["thread"]["id"], "ask a helper")
time.sleep(3)  # the helper answers
app.close()
keep(rollouts("0.125.0")[-1], "0.125.0_subagent.jsonl")

parallel = [thought("**Look**"), message_item("I look."), called("0.169.0", "echo one"), called("0.169.0", "false")]
answers[:] = [parallel, [searched("weather"), message_item("Both done.")]]
run("0.169.0", "run two commands")
keep(rollouts("0.169.0")[0], "0.169.0.jsonl")
