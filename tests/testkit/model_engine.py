"""An engine in this process, as a trainer sees it: it loads model folders, and scores with the weights that it has."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from lake.errors import TrajlakeError
from pipelines.collect.engines import EngineCard, EngineError, EngineGoneError, Generation, Request
from trainer.policy.model import PackedPolicy, load_policy
from trainer.sync.targets import score_reference


class ModelEngine:
    """Starts without weights that were pushed, and again so after `restart`."""

    def __init__(self, url: str, folder: Path, *, dtype: str | None = "float32") -> None:
        self.url, self._first, self._dtype = url, folder, dtype
        self.loaded: list[tuple[Path, int | None]] = []
        """Folders and versions that it had to load, since it was made."""
        self.adapters: dict[str, Path] = {}
        self.error: EngineError | None = None
        """What loading raises."""
        self.error_in_logprobs = 0.0
        """Nats by which its log-probabilities are wrong."""
        self.gate = asyncio.Event()
        """Loading waits for it."""
        self.gate.set()
        self.restart()

    def restart(self) -> None:
        """Come back with the weights of the first start and no version."""
        self.is_gone, self._version = False, None
        self.adapters = {}
        self.policy: PackedPolicy = load_policy(self._first)

    async def describe(self) -> EngineCard:
        self._answer()
        return EngineCard(engine="model", folder=str(self._first), model="policy", dtype=self._dtype)

    async def generate(self, request: Request) -> list[Generation]:
        raise NotImplementedError

    async def logprobs(self, ids: Sequence[int], *, adapter: str | None = None) -> list[float]:
        self._answer()
        assert adapter is None or adapter in self.adapters
        (found_N,) = score_reference(self.policy, [ids]).logprobs
        return [float(value) + self.error_in_logprobs for value in found_N]

    async def version(self) -> int | None:
        self._answer()
        return self._version

    async def newest_version(self) -> int | None:
        return await self.version()

    async def load_weights(self, folder: Path, version: int) -> None:
        self._answer()
        self.loaded.append((folder, version))
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        try:
            self.policy = load_policy(folder)
        except TrajlakeError as error:
            raise EngineError(f"{self.url}: {error}") from error
        self._version = version

    async def load_adapter(self, name: str, folder: Path) -> None:
        self._answer()
        self.loaded.append((folder, None))
        self.adapters[name] = folder

    async def is_healthy(self) -> bool:
        return not self.is_gone

    async def close(self) -> None:
        """Nothing is open."""

    def _answer(self) -> None:
        if self.is_gone:
            raise EngineGoneError(f"{self.url} cannot be reached")
