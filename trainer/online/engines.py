"""The engines of an online run: who they are, and what they are given.

They are either those that `player.engines` names or one of the loop's own (`own_engine.py`). A push waits for engines
that are away as collecting does, so that one may be restarted at any time; what it came to is a `push` job.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lake.errors import UsageError
from lake.lake import Lake
from pipelines.collect.engines import Engine, EngineGoneError
from pipelines.collect.engines.find import Api, api_of, engine_at
from pipelines.collect.engines.vllm import VllmEngine
from pipelines.collect.manager.run import StoppedError
from pipelines.collect.wiring import PlayedWeights
from trainer.backends.base import SingleDevice
from trainer.online.own_engine import OwnEngine
from trainer.online.settings import NEEDS_ENGINE, LoopConfig, SyncConfig
from trainer.runs.metrics import metrics_frame
from trainer.sync import Push, Weights
from trainer.sync.fleet import Fleet
from trainer.sync.probe import ProbeConfig, Reference, newest_sequences, random_sequences, score

_LOOK_SECONDS = 1.0
Say = Callable[[str], None]


class Engines:
    """Engines that play what a run trains; none where the model plays in this process.

    Args:
        apis: their base URLs, and what each of them is.
        config: how weights reach them.
        own: the one among them that the loop keeps running, if there is one.
    """

    def __init__(self, apis: dict[str, Api], config: SyncConfig, own: OwnEngine | None = None) -> None:
        self._apis, self._config, self._own = apis, config, own
        self._pushed: int | None = None

    @property
    def urls(self) -> tuple[str, ...]:
        """Where they are."""
        return tuple(self._apis)

    def lost(self) -> str | None:
        """Why rollouts need not wait for engines any more; None: there are some, or they may come back."""
        return None if self._own is None else self._own.given_up

    def push(self, lake: Lake, run_id: str, weights: PlayedWeights, backend: SingleDevice, say: Say) -> None:
        """Give them a version, unless this process has; those that do not take it are told, and left to the pool.

        Raises:
            StoppedError: none took it; the run goes on when it is resumed.
        """
        if not self._apis or self._pushed == weights.version:
            return
        if self._own is not None:
            self._own.weights = weights
        reference = _reference_of(lake, backend) if self._config.probe else None
        done = asyncio.run(self._deliver(weights, reference, say))
        parameters = {"model": str(weights.folder), "version": weights.version}
        with lake.job(kind="push", run_id=run_id, parameters=parameters) as job:
            job.write("metrics", metrics_frame([(done.version, done.metrics())]))
            job.counts |= {"engines": len(done.deliveries), "failed": len(done.failed)}
        for delivery in done.failed:
            say(f"version {weights.version}: {delivery.error}")
        if len(done.failed) == len(done.deliveries):
            raise StoppedError(f"no engine took version {weights.version}")
        self._pushed = weights.version

    def _refuse_lost(self) -> None:
        if (why := self.lost()) is not None:
            raise StoppedError(f"{why}: mend that; the same command with --resume goes on")

    def sleep(self) -> None:
        """Have them free their device, if that is wanted; the next push wakes them."""
        if self._config.sleep:
            asyncio.run(self._sleep())

    async def _deliver(self, weights: PlayedWeights, reference: Reference | None, say: Say) -> Push:
        engines = self._clients()
        try:
            deadline = time.monotonic() + self._config.patience
            while True:
                await _until_one_answers(engines, deadline, self._refuse_lost, say)
                if self._config.sleep:
                    await _each(engines, VllmEngine.wake_up)
                fleet = Fleet(engines, ProbeConfig(limit=self._config.limit))
                done = await fleet.deliver(Weights(version=weights.version, folder=weights.folder), reference)
                is_taken = len(done.failed) < len(done.deliveries)
                if is_taken or time.monotonic() > deadline or any(await _health(engines)):
                    return done
        finally:
            await asyncio.gather(*(engine.close() for engine in engines))

    async def _sleep(self) -> None:
        engines = self._clients()
        try:
            await _each(engines, VllmEngine.sleep)
        finally:
            await asyncio.gather(*(engine.close() for engine in engines))

    def _clients(self) -> list[Engine]:
        return [engine_at(url, api) for url, api in self._apis.items()]


@contextmanager
def engines_of(config: LoopConfig, apis: dict[str, Api], model: Path, say: Say) -> Iterator[Engines]:
    """The engines of a run while the block runs: those that were asked what they are, or one of its own.

    Args:
        config: of the loop.
        apis: what `known_engines` found.
        model: folder that an engine of the loop's own is started with.
        say: called with a line now and then.

    Raises:
        UsageError: an engine of its own cannot be started so.
        MissingExtraError: there is no vLLM to start.
        EngineError: the engine of its own ended before it answered.
    """
    if not config.engine.serve:
        yield Engines(apis, config.sync)
        return
    with OwnEngine(config.engine, model, say, sleeps=config.sync.sleep) as own:
        yield Engines({own.url: "vllm"}, config.sync, own)


def known_engines(config: LoopConfig) -> dict[str, Api]:
    """The engines that a run's options name, and what each of them is. Raises UsageError: nothing answers at one."""
    player = config.collect.player
    apis = {url: api_of(url) if player.api == "auto" else player.api for url in player.engines}
    for url, api in apis.items():
        if api == "chat":
            raise UsageError(f"{url} is neither vLLM nor SGLang, and {NEEDS_ENGINE}")
        if config.sync.sleep and api != "vllm":
            raise UsageError(f"{url} is no vLLM, and `sync.sleep` is for vLLM")
    return apis


async def _each(engines: list[Engine], do: Callable[[VllmEngine], Awaitable[None]]) -> None:
    """Do something with every engine that is there; one that is away neither sleeps nor holds its device."""

    async def one(engine: Engine) -> None:
        if isinstance(engine, VllmEngine):
            with suppress(EngineGoneError):
                await do(engine)

    await asyncio.gather(*map(one, engines))


async def _health(engines: list[Engine]) -> list[bool]:
    return await asyncio.gather(*(engine.is_healthy() for engine in engines))


async def _until_one_answers(engines: list[Engine], deadline: float, refuse_lost: Callable[[], None], say: Say) -> None:
    """Until an engine may be given weights. Raises StoppedError: none answered in time, or it is given up."""
    is_told = False
    while not any(await _health(engines)):
        refuse_lost()
        away = ", ".join(engine.url for engine in engines)
        if time.monotonic() > deadline:
            raise StoppedError(f"no engine answers at {away}: start it again")
        if not is_told:
            say(f"no engine answers at {away}; waiting for it")
            is_told = True
        await asyncio.sleep(_LOOK_SECONDS)


def _reference_of(lake: Lake, backend: SingleDevice) -> Reference:
    """What the trainer says of the lake's newest sequences, or of random ones."""
    vocabulary, probe = backend.policy.vocabulary, ProbeConfig()
    newest = newest_sequences(lake.snapshot(), vocabulary, probe)
    return score(backend.policy, newest or random_sequences(vocabulary, probe))
