"""A vLLM that a loop keeps: started with the run, started again whenever it dies, and ended with it.

It runs in a thread of its own with an event loop of its own, because a run computes and collects in the main thread.
The engine comes back at the same address with the newest weights, and is told their version: agents call it through the
proxy, which writes down the version that it says it has. A guard ends it when the loop is gone, also after kill -9
(`pipelines.collect.children`).
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Self

from pipelines.collect.engines import EngineError
from pipelines.collect.engines.serve import ServeOptions, served
from pipelines.collect.engines.vllm import VllmEngine
from pipelines.collect.wiring import PlayedWeights
from trainer.online.settings import EngineConfig

_TRIES = 3
"""Starts in a row that may fail before it is given up."""


class OwnEngine:
    """Keeps an engine running while the block runs.

    Args:
        config: how it is started.
        model: folder that it serves at first.
        say: told when it starts, dies and comes back; called from another thread.
        sleeps: it is going to be put to sleep.
    """

    def __init__(self, config: EngineConfig, model: Path, say: Callable[[str], None], *, sleeps: bool) -> None:
        self.weights: PlayedWeights | None = None
        """What it is started again with; set this before they are pushed. None: with the model of the first start."""
        self._model = model
        self.url = ""
        """Its base URL, once the block runs."""
        self.given_up: str | None = None
        """Why it is not started again; None: it runs, or will."""
        self._say = say
        self._options = ServeOptions(
            port=config.port,
            device=config.device,
            python=None if config.python is None else Path(config.python),
            max_len=config.max_len,
            dtype=config.dtype,
            further=(*config.options, *(("--enable-sleep-mode",) if sleeps else ())),
        )
        self._first: Future[str] = Future()
        """Its URL at the first start, or what went wrong with that."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="own-engine")

    def __enter__(self) -> Self:
        """Start it, and wait until it answers. Raises what `served` does."""
        self._thread.start()
        try:
            self.url = self._first.result()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        if self._loop is not None and self._keeping is not None:
            with suppress(RuntimeError):  # it has ended by itself
                self._loop.call_soon_threadsafe(self._keeping.cancel)
        self._thread.join()

    def _run(self) -> None:
        with suppress(asyncio.CancelledError):
            asyncio.run(self._keep())

    async def _keep(self) -> None:
        """Start it again and again until cancelled; a first start that fails is told to whoever waits for it."""
        self._loop, self._keeping = asyncio.get_running_loop(), asyncio.current_task()
        failed, problem = 0, ""
        while failed < _TRIES:
            try:
                model = self._model if self.weights is None else self.weights.folder
                async with served(model, self._options, say=self._say) as engine:
                    if not self._first.done():
                        self._options = replace(self._options, port=int(engine.url.rpartition(":")[2]))
                        self._first.set_result(engine.url)
                    else:
                        await self._tell_version()
                        self._say(f"{engine.url} is back")
                    failed = 0
                    self._say(f"{await engine.death()}; it is started again")
            except Exception as error:
                if not self._first.done():
                    self._first.set_exception(error)
                    return
                # Another error than an engine's would be met again: no such folder, say.
                failed = failed + 1 if isinstance(error, EngineError) else _TRIES
                problem = str(error)
                self._say(f"the engine does not start again: {error}")
        self._say("the engine is given up")
        self.given_up = f"the loop's own engine does not start again ({problem})"

    async def _tell_version(self) -> None:
        """Load the weights under their version; once more where newer ones are pushed meanwhile."""
        told: PlayedWeights | None = None
        engine = VllmEngine(self.url)
        try:
            while (weights := self.weights) is not None and weights != told:
                await engine.load_weights(weights.folder, weights.version)
                told = weights
        finally:
            await engine.close()
