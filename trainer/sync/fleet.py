"""Engines that are kept at one version: all get the weights at once, and one that comes back gets them again.

An engine that fails is told and does not hold up the others. It is not current, and is given the weights again before
it is used: the pool of `pipelines.collect.engines.pool` asks `refresh` before an engine that was away gets calls.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from pipelines.collect.engines import Engine, EngineError, EngineGoneError
from trainer.sync import Delivery, Push, Weights
from trainer.sync.probe import Parity, ProbeConfig, Reference, parity

Load = Callable[[Engine], Awaitable[None]]


class ParityError(EngineError):
    """An engine's log-probabilities are too far from the trainer's.

    Attributes:
        parity: how far.
    """

    def __init__(self, url: str, parity: Parity) -> None:
        super().__init__(
            f"{url}: {parity}; push again, compare its model and number type with the trainer's, or raise the limit"
        )
        self.parity = parity


class Fleet:
    """Engines of one policy.

    Args:
        engines: of which each loads from the folders that are pushed.
        probe: how parity is measured, where a push brings a reference.
    """

    def __init__(self, engines: Sequence[Engine], probe: ProbeConfig | None = None) -> None:
        self.engines = list(engines)
        self.probe = probe or ProbeConfig()
        self.current: Weights | None = None
        """What every engine should have."""
        self._reference: Reference | None = None
        self._holders: set[str] = set()
        """URLs of engines that took over `current`, as far as is known."""
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def deliver(self, weights: Weights, reference: Reference | None = None, load: Load | None = None) -> Push:
        """Give all engines the weights, and compare them with the reference if there is one.

        `load` brings them to one engine, or raises EngineError; None: it reads their folder.
        """
        self.current, self._reference = weights, reference
        self._holders.clear()
        deliveries = await asyncio.gather(*(self._delivery(engine, load or self._read) for engine in self.engines))
        return Push(version=weights.version, deliveries=tuple(deliveries))

    async def refresh(self, engine: Engine) -> bool:
        """Bring an engine up to date that was away, or failed to take the weights; whether there was anything to do.

        Raises:
            EngineError: it cannot be brought up to date, so it must not be used.
        """
        async with self._locks[engine.url]:
            if self.current is None or await self._has_current(engine):
                return False
            await self._give(engine, self._read)
            return True

    async def watch(self, say: Callable[[str], None], seconds: float = 2.0) -> None:
        """Look at every engine again and again, and bring those up to date that were restarted; until cancelled."""
        while True:
            for engine in self.engines:
                await self._look_after(engine, say)
            await asyncio.sleep(seconds)

    async def _look_after(self, engine: Engine, say: Callable[[str], None]) -> None:
        try:
            if self.current is not None and await self.refresh(engine):
                say(f"{engine.url}: came back, version {self.current.version} again")
        except EngineGoneError:
            return  # until it answers
        except EngineError as error:
            say(str(error))

    async def measure(self, engine: Engine, reference: Reference) -> Parity:
        """How far an engine is from the reference.

        Raises:
            EngineError: it does not answer, or is too far away and the probe refuses that.
        """
        adapter = None if self.current is None else self.current.adapter
        said = [await engine.logprobs(ids, adapter=adapter) for ids in reference.ids]
        found = parity(reference, said, (await engine.describe()).dtype, self.probe)
        if not found.is_met and self.probe.refuse:
            raise ParityError(engine.url, found)
        return found

    async def _delivery(self, engine: Engine, load: Load) -> Delivery:
        began, result = time.monotonic(), Delivery(url=engine.url, before=None, after=None, seconds=0.0)
        try:
            async with self._locks[engine.url]:
                result = replace(result, before=await engine.version())
                began = time.monotonic()
                found, seconds = await self._give(engine, load)
                return replace(result, after=await engine.version(), seconds=seconds, parity=found)
        except EngineError as error:
            seconds, found = time.monotonic() - began, error.parity if isinstance(error, ParityError) else None
            with suppress(EngineError):
                result = replace(result, after=await engine.version())
            return replace(result, seconds=seconds, parity=found, error=str(error))

    async def _has_current(self, engine: Engine) -> bool:
        """Whether it took the current weights over and has them still, or others that somebody pushed since.

        Which adapters it has no engine says.
        """
        assert self.current is not None
        if engine.url not in self._holders or self.current.adapter is not None:
            return False
        version = await engine.version()
        return version is not None and version >= self.current.version

    async def _give(self, engine: Engine, load: Load) -> tuple[Parity | None, float]:
        """Bring the current weights to an engine and measure it; parity, and seconds of loading."""
        self._holders.discard(engine.url)
        began = time.monotonic()
        await load(engine)
        seconds = time.monotonic() - began
        found = None if self._reference is None else await self.measure(engine, self._reference)
        self._holders.add(engine.url)
        return found, seconds

    async def _read(self, engine: Engine) -> None:
        """Let an engine read the current weights from their folder."""
        weights = self.current
        assert weights is not None
        if weights.folder is None:
            raise EngineError(
                f"{engine.url} does not have version {weights.version}, and gets weights with the next push"
            )
        if weights.adapter is None:
            _refuse_other_shape(engine.url, (await engine.describe()).folder, weights.folder)
            await engine.load_weights(weights.folder, weights.version)
        else:
            await engine.load_adapter(weights.adapter, weights.folder)


_SHAPE = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def _refuse_other_shape(url: str, served: str | None, folder: Path) -> None:
    """Raise EngineError: the weights are of another model than the one that is served, where both folders are here.

    vLLM 0.32 finds out in the middle of loading, and has no whole weights then.
    """
    theirs, ours = (_shape(place) for place in (served, folder))
    if theirs is None or ours is None:
        return
    others = [f"{name} {ours[name]} (it serves {theirs[name]})" for name in _SHAPE if ours[name] != theirs[name]]
    if others:
        raise EngineError(
            f"{url} serves another model than that in {folder}: {', '.join(others)}; it keeps what it has"
        )


def _shape(folder: str | Path | None) -> dict[str, object] | None:
    """What a model's folder says of its shape; None where that is not to be read here."""
    try:
        found = msgspec.json.decode(Path(folder or "", "config.json").read_bytes())
        return {name: found.get(name) for name in _SHAPE}
    except (OSError, msgspec.MsgspecError, AttributeError):
        return None
