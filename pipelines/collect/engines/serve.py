"""A vLLM of our own: started right, warmed up, and ended with the process that started it.

It listens on 127.0.0.1 alone, because the routes that load weights (VLLM_SERVER_DEV_MODE) ask nobody for a key. It
gives token ids and processed log-probabilities, names its model `policy` and as its folder is called, and takes no
sampling defaults from there. `children.py` sees to its end.
"""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lake.errors import UsageError
from lake.read.text_table import cell
from pipelines.collect.children import guarded
from pipelines.collect.engines import EngineError
from pipelines.collect.engines.serve_checks import (
    Device,
    Installation,
    check_model,
    check_options,
    find_installation,
)
from pipelines.collect.model_folder import policy_name

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
MODEL = "policy"
"""What requests call the model."""
_HOST = "127.0.0.1"
_CPU_LENGTH = 4096
"""Longest sequence on a CPU, unless told: its cache is small."""
_LOOK_SECONDS = 0.3
_TELLING_SECONDS = 15.0
_FIRST_CALL_SECONDS = 1800.0
"""The first log-probabilities are compiled, which takes a minute on a busy machine."""
_LEAVING_SECONDS = 60.0
_ERROR = re.compile(r"\b[A-Z]\w*(?:Error|Exception)\b:? *\S|^(?:Value error|Assertion failed), ")
_GENERIC = ("Engine core initialization failed", "See root cause above", "EngineDeadError", "validation error for")
"""Lines that point at another one."""
_http = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """How an engine is started."""

    port: int = 0
    """0: any that is free."""
    device: Device = "auto"
    """auto: what the installed vLLM was built for."""
    python: Path | None = None
    """Of the environment that has vLLM; None: the one that is found."""
    max_len: int | None = None
    """Longest sequence, prompt and answer; None: the model's on a GPU, at most 4096 on a CPU."""
    dtype: Dtype = "auto"
    """Number type that it computes in; auto: the weights' own."""
    lora: bool = False
    """Adapters can be loaded."""
    further: tuple[str, ...] = ()
    """Further options of vLLM, as it takes them."""


@dataclass(frozen=True, slots=True)
class Served:
    """An engine that runs."""

    url: str
    """Without /v1."""
    log: Path
    """What it writes; removed at its end, unless it failed."""
    guard: "subprocess.Popen[bytes]"

    async def death(self) -> EngineError:
        """Wait until it ends by itself; what became of it."""
        while self.guard.poll() is None:
            await asyncio.sleep(_LOOK_SECONDS)
        return _died(self)


@asynccontextmanager
async def served(
    model: Path, options: ServeOptions | None = None, *, say: Callable[[str], None] = lambda _: None
) -> AsyncIterator[Served]:
    """Serve a model folder while the block runs, which begins once the engine has answered a first request.

    Args:
        model: the folder.
        options: how.
        say: is told what is being done.

    Raises:
        UsageError: the folder, the port or an option is wrong; nothing was started.
        MissingExtraError: there is no vLLM.
        EngineError: it ended before it answered; with the line of its log that says why, and where the log is.
    """
    options = options or ServeOptions()
    check_options(options.further)
    installation = await asyncio.to_thread(find_installation, options.python, options.device)
    config = check_model(model, installation.device)
    port = _free_port(options.port)
    descriptor, name = tempfile.mkstemp(prefix="trajlake-engine-", suffix=".log")
    log = Path(name)
    say(f"starting vLLM {installation.version} ({installation.device}) for {cell(str(model))}; its log is {log}")
    with os.fdopen(descriptor, "wb") as output:
        guard = subprocess.Popen(
            guarded(_command(model, config, port, installation, options)),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=_environment(installation, options),
            start_new_session=True,  # Ctrl-C is for us, who then end it
        )
    engine = Served(f"http://{_HOST}:{port}", log, guard)
    try:
        async with _telling(say):
            await _until_it_answers(engine)
            await _warm_up(engine)
        yield engine
    except asyncio.CancelledError:
        say("stopping")
        raise
    finally:
        has_failed = guard.poll() is not None or isinstance(sys.exception(), EngineError)
        await asyncio.shield(asyncio.to_thread(_end, guard))
        if not has_failed:
            log.unlink(missing_ok=True)


@asynccontextmanager
async def serving(model: Path, options: ServeOptions | None = None) -> AsyncIterator[str]:
    """The URL of an engine that serves a model folder while the block runs; see `served`."""
    async with served(model, options) as engine:
        yield engine.url


def _command(
    model: Path, config: dict[str, Any], port: int, installation: Installation, options: ServeOptions
) -> list[str]:
    is_cpu = installation.device == "cpu"
    words = [str(installation.python), "-m", "vllm.entrypoints.openai.api_server", *options.further]
    folder = model.resolve()
    # The first is the one that answers bear, and so what `trajlake record` calls the policy.
    names = dict.fromkeys((policy_name(model), MODEL, folder.name))
    words += ["--model", str(folder), "--served-model-name", *names, "--host", _HOST, "--port", str(port)]
    words += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--enable-scale-out"]
    words += ["--dtype", _dtype(config, is_cpu=is_cpu) if options.dtype == "auto" else options.dtype]
    length = options.max_len
    if is_cpu:
        length = length or min(_CPU_LENGTH, int(config.get("max_position_embeddings") or _CPU_LENGTH))
        # A prompt that is read in parts and has a seed ends vLLM 0.32.0 on a CPU: "CPU Generator does not use offset".
        words += ["--enforce-eager", "--no-enable-chunked-prefill"]
        words += ["--max-num-batched-tokens", str(max(_CPU_LENGTH, length))]
    words += [] if length is None else ["--max-model-len", str(length)]
    return [*words, "--enable-lora"] if options.lora else words


def _dtype(config: dict[str, Any], *, is_cpu: bool) -> str:
    """The weights' own number type: left to itself, vLLM would halve float32, and no trainer would compute the same."""
    own = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    return "float32" if is_cpu and own == "float16" else own


def _environment(installation: Installation, options: ServeOptions) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TRAJLAKE_"))}
    settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if installation.device == "cpu":
        kept.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    if options.lora:
        settings["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
    return kept | settings


def _free_port(wanted: int) -> int:
    """The port, if nobody listens on it: another engine there would be taken for ours. Raises UsageError."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, wanted))
        except OSError as error:
            raise UsageError(f"port {wanted}: {error.strerror or error}; choose another --port") from error
        return int(probe.getsockname()[1])


@asynccontextmanager
async def _telling(say: Callable[[str], None]) -> AsyncIterator[None]:
    """Say every so often, while the block runs, for how long it has."""

    async def tell() -> None:
        began = time.monotonic()
        while True:
            await asyncio.sleep(_TELLING_SECONDS)
            say(f"still starting, after {time.monotonic() - began:.0f} s")

    telling = asyncio.create_task(tell())
    try:
        yield
    finally:
        telling.cancel()


async def _until_it_answers(engine: Served) -> None:
    while True:
        try:
            await asyncio.to_thread(_called, f"{engine.url}/health", None, 10.0)
        except OSError:
            if engine.guard.poll() is not None:
                raise _died(engine) from None
            await asyncio.sleep(_LOOK_SECONDS)
        else:
            return


async def _warm_up(engine: Served) -> None:
    """One token with its log-probability, by the route that policies use."""
    sampling = {"max_tokens": 1, "temperature": 1.0, "logprobs": 0}
    body = {"model": MODEL, "token_ids": [1], "sampling_params": sampling, "output_mode": "tokens"}
    try:
        await asyncio.to_thread(_called, f"{engine.url}/inference/v1/generate", body, _FIRST_CALL_SECONDS)
    except OSError as error:
        if await asyncio.to_thread(_ends_soon, engine.guard):
            raise _died(engine) from error
        raise EngineError(f"{engine.url} does not sample: {error}; its log is {engine.log}") from error


def _ends_soon(guard: "subprocess.Popen[bytes]") -> bool:
    """Whether an engine that broke off is on its way out: its first process outlives the one that computes."""
    try:
        guard.wait(10.0)
    except subprocess.TimeoutExpired:
        return False
    return True


def _called(url: str, body: dict[str, Any] | None, seconds: float) -> None:
    """Ask, and read the answer; OSError if there is none, or it is a refusal."""
    data = None if body is None else json.dumps(body).encode()
    with _http.open(urllib.request.Request(url, data, {"Content-Type": "application/json"}), timeout=seconds) as answer:
        answer.read()


def _died(engine: Served) -> EngineError:
    log = engine.log
    if engine.guard.returncode == 128 + signal.SIGKILL:  # the last line of its log is of something else
        return EngineError(f"vLLM has ended: it was killed, as it is where memory runs out; its log is {log}")
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.search(line) and not any(sign in line for sign in _GENERIC)]
    last = next(reversed(errors or lines), "it said nothing")
    return EngineError(f"vLLM has ended: {cell(last[-500:])}; its log is {log}")


def _end(guard: "subprocess.Popen[bytes]") -> None:
    """Have the guard end the engine, and wait for both."""
    guard.terminate()
    try:
        guard.wait(_LEAVING_SECONDS)
    except subprocess.TimeoutExpired:
        guard.kill()
        guard.wait()
