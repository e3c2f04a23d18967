"""A small conforming vLLM, or SGLang, on 127.0.0.1: tokens in and out, weights that can be loaded, every fault.

What it answers depends on the prompt, the seed and the number of the sample alone, so that a run that was interrupted
can be compared with one that was not; a call without a seed is answered by chance. Log-probabilities also depend on the
weights: two engines agree on them exactly if they have loaded the same folder.

    with token_engine() as engine:                  # vLLM's routes; TokenEngine(speaks="sglang") those of SGLang
        engine.fail(Fault(status=429, retry_after="0.1"), Fault(cut=True))   # what the next two calls meet
        ...
        engine.stop(); engine.start()                   # on the same port, without the weights that were loaded
        assert engine.calls[0].prompt_ids == [5, 6, 7]

SGLang itself cannot run here; this stands in for it.
"""

import asyncio
import hashlib
import json
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

END = 2
"""Id of the token that ends an answer."""
WRONG: web.RequestKey[str | None] = web.RequestKey("wrong", str | None)
"""In which way the answer to a request is wrong."""
Answer = Callable[[Sequence[int], int, int], list[int]]
"""Prompt, seed, most tokens -> ids of the answer, its end included unless it was cut off."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to a call instead of an answer."""

    status: int | None = None
    """It is refused with this HTTP status."""
    retry_after: str | None = None
    """And this header."""
    text: str | None = None
    """And this body, instead of JSON."""
    cut: bool = False
    """The connection breaks in the middle of the answer."""
    ends: bool = False
    """The answer stops in the middle as if that were all."""
    hang: bool = False
    """It is never answered."""
    wrong: str | None = None
    """The answer is whole, and wrong: ids, logprobs, samples, spans, prompt, number (not finite), shape (no object)."""
    path: str = ""
    """Part of the path of the calls that meet it; empty: of those that generate."""


@dataclass(kw_only=True)
class Call:
    """A call that generates, as it came."""

    path: str
    body: dict[str, Any]
    prompt_ids: list[int]
    seed: int | None
    samples: list["Sample"] = field(default_factory=list)
    is_answered: bool = False
    """Whether the answer was made; not so if the client left before."""


@dataclass(kw_only=True)
class Sample:
    """One answer."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    """Of the weights, per token."""
    finish_reason: str = "stop"

    def spans(self) -> list[tuple[str, int, int]]:
        """Version, first index, index behind the last."""
        spans: list[tuple[str, int, int]] = []
        for index, version in enumerate(self.versions):
            if spans and spans[-1][0] == version:
                spans[-1] = (version, spans[-1][1], index + 1)
            else:
                spans.append((version, index, index + 1))
        return spans


def logprob(ids: Sequence[int], index: int, weights: str, temperature: float = 1.0) -> float:
    """What weights say of the token at a place, given those before it: any number that differs between them."""
    key = f"{weights} {ids[index]} {index} {sum(ids[:index])}"
    return -int.from_bytes(hashlib.blake2b(key.encode(), digest_size=2).digest()) / 8192 / (temperature or 1.0)


def any_answer(prompt_ids: Sequence[int], seed: int, most: int, *, vocabulary: int = 64, end: int = END) -> list[int]:
    """Ids drawn from the prompt and the seed: up to 16, then the end."""
    drawn = random.Random(f"{list(prompt_ids)} {seed}")
    ids = [drawn.randrange(end + 1, vocabulary) for _ in range(drawn.randrange(1, 16))] + [end]
    return ids[:most]


class TokenEngine:
    """The engine's state, and how it behaves; all of it may be changed while it runs.

    Args:
        answer: what it says; `any_answer` of small ids unless given.
        speaks: vllm or sglang.
        seconds: that a call takes before its first token.
        seconds_per_token: that every token takes.
        scale_out: whether it has `/inference/v1/generate`.
        dev_mode: whether it has the routes of `VLLM_SERVER_DEV_MODE=1`.
        max_model_len: most tokens of a prompt with its answer.
    """

    def __init__(
        self,
        answer: Answer = any_answer,
        *,
        speaks: str = "vllm",
        seconds: float = 0.0,
        seconds_per_token: float = 0.0,
        scale_out: bool = True,
        dev_mode: bool = True,
        max_model_len: int = 4096,
    ) -> None:
        self.speaks = speaks
        self.answer, self.seconds, self.seconds_per_token = answer, seconds, seconds_per_token
        self.scale_out, self.dev_mode, self.max_model_len = scale_out, dev_mode, max_model_len
        self.port = 0
        self.folder = "/first/weights"
        """Where the weights came from that it starts with."""
        self.weights = self.folder
        """Where those came from that it has."""
        self.version = "default"
        self.transfer = ""
        """State of the weight transfer: opened, started, received."""
        self.received: list[str] = []
        """Names of the weights that were transferred."""
        self.adapters: dict[str, str] = {}
        self.end = END
        self.calls: list[Call] = []
        """Calls that generate, in the order of their arrival."""
        self.asked: list[str] = []
        """Method and path of every request, with its query."""
        self.authorised: list[str] = []
        """Who asked: the header `Authorization` of every request."""
        self.running = self.most_running = 0
        """Calls that generate, now and at most at once."""
        self.sampled = 0
        """Tokens, of all calls."""
        self.left = 0
        """Clients that left before they were answered."""
        self.starts = 0
        self.faults: deque[Fault] = deque()
        self.always: Fault | None = None
        """What every call meets that meets nothing else."""
        self.is_sick = False
        """`/health` says no."""
        self.is_asleep = False
        """It has given its device back, and can sample nothing."""
        self.keeps_prefixes = False
        """Its cache cannot be reset."""
        self._runner: web.AppRunner | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._goes_on = asyncio.Event()
        self._aborting = 0

    @property
    def url(self) -> str:
        """Base URL, without /v1."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def is_paused(self) -> bool:
        """Whether no token is sampled."""
        return not self._goes_on.is_set()

    def fail(self, *faults: Fault) -> None:
        """What the next calls meet, one each."""
        self.faults.extend(faults)

    def start(self) -> None:
        """Listen, on the port that it had; with the weights that it started with first."""
        self._call(self._start())

    def stop(self) -> None:
        """Break off every call and be gone."""
        self._call(self._stop())

    def restart(self) -> None:
        """Both."""
        self.stop()
        self.start()

    # ------------------------------------------------------------ sampling

    async def sample(
        self, path: str, body: dict[str, Any], prompt_ids: list[int], seed: int | None, count: int, **sampling: Any
    ) -> Call:
        """Answer a call: as many samples as it wants, at the pace of the engine."""
        call = Call(path=path, body=body, prompt_ids=prompt_ids, seed=seed)
        self.calls.append(call)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self.seconds)
            drawn = random.randrange(1 << 30) if seed is None else seed
            call.samples = list(
                await asyncio.gather(
                    *(self._sample_answer(prompt_ids, drawn * 1000 + index, **sampling) for index in range(count))
                )
            )
        except asyncio.CancelledError:
            self.left += 1
            raise
        finally:
            self.running -= 1
        call.is_answered = True
        return call

    async def _sample_answer(
        self, prompt_ids: list[int], seed: int, *, max_tokens: int, temperature: float = 1.0
    ) -> Sample:
        ids = self.answer(prompt_ids, 0 if temperature == 0 else seed, max_tokens)
        sample = Sample(finish_reason="stop" if ids and ids[-1] == self.end else "length")
        aborting = self._aborting
        for token in ids:
            if self.seconds_per_token:
                await asyncio.sleep(self.seconds_per_token)
            if not self._goes_on.is_set():
                await self._goes_on.wait()
            if self._aborting != aborting:
                sample.finish_reason = "abort"
                break
            self.sampled += 1
            sample.ids.append(token)
            context = [*prompt_ids, *sample.ids]
            sample.logprobs.append(logprob(context, len(context) - 1, self.weights, temperature))
            sample.versions.append(self.version)
        return sample

    def pause(self, *, abort: bool) -> None:
        """Sample no further token."""
        self._goes_on.clear()
        if abort:
            self._aborting += 1

    def go_on(self) -> None:
        """Sample again."""
        self._goes_on.set()

    # ------------------------------------------------------------ serving

    def app(self) -> web.Application:
        """The routes."""
        from testkit import sglang_routes, vllm_routes

        app = web.Application(client_max_size=1 << 30, middlewares=[self._guard])
        (vllm_routes if self.speaks == "vllm" else sglang_routes).add_routes(self, app)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Note the request, and let a fault happen that is meant for it."""
        self.asked.append(f"{request.method} {request.raw_path}")
        self.authorised.append(request.headers.get("Authorization", ""))
        fault = self._fault_of(request)
        if fault is None or fault.wrong:
            request[WRONG] = fault.wrong if fault else None
            return await handler(request)
        if fault.hang:
            try:
                await asyncio.Event().wait()
            finally:
                self.left += 1
        if fault.cut or fault.ends:
            return await _broken(request, is_cut=fault.cut)
        headers = {} if fault.retry_after is None else {"Retry-After": fault.retry_after}
        error = {"error": {"message": f"refused with {fault.status}", "type": "ServerError", "code": fault.status}}
        text = json.dumps(error) if fault.text is None else fault.text
        return web.Response(status=fault.status or 500, text=text, headers=headers, content_type="application/json")

    def _fault_of(self, request: web.Request) -> Fault | None:
        for index, fault in enumerate(self.faults):
            if _meets(fault, request):
                del self.faults[index]
                return fault
        return self.always if self.always is not None and _meets(self.always, request) else None

    async def _start(self) -> None:
        self.weights, self.version, self.adapters = self.folder, "default", {}
        self.is_asleep = False
        self._goes_on.set()
        self.starts += 1
        self._runner = web.AppRunner(self.app(), handler_cancellation=True, access_log=None, shutdown_timeout=0.05)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, backlog=4096, reuse_address=True).start()
        self.port = self._runner.addresses[0][1]

    async def _stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def _call(self, coroutine: Any) -> None:
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)


def _meets(fault: Fault, request: web.Request) -> bool:
    if fault.path:
        return fault.path in request.path
    return request.method == "POST" and request.path.endswith(("/generate", "/completions"))


async def _broken(request: web.Request, *, is_cut: bool) -> web.StreamResponse:
    """The first bytes of an answer; then the connection breaks, or the answer ends."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    if is_cut:
        response.headers["Content-Length"] = "1000"
    await response.prepare(request)
    await response.write(b'{"choices": [{"index": 0, "token_ids": [7, 8')
    if is_cut:
        assert request.transport is not None
        request.transport.abort()
    return response


@contextmanager
def token_engine(engine: TokenEngine | None = None) -> Iterator[TokenEngine]:
    """A running engine, on its own port, in a thread."""
    engine = engine or TokenEngine()
    loop = engine._loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        engine.start()
        yield engine
    finally:
        engine.stop()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
