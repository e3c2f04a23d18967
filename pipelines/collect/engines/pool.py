"""Several engines as one, which never samples under weights that nobody wants.

Beside what `sharing.py` does for any server, a pool knows which version of the weights is wanted. An engine that was
restarted has the weights that it was started with: it is found out by the version of what it samples, its answer is
thrown away, and it gets the current weights before it is called again.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path

from pipelines.collect.engines import (
    Engine,
    EngineCard,
    EngineError,
    EngineGoneError,
    Generation,
    Request,
)
from pipelines.collect.engines.members import Member
from pipelines.collect.engines.once import Once
from pipelines.collect.engines.sharing import Shared, SharingConfig

_WHY = "; it was restarted with others, or somebody loaded them"
_log = logging.getLogger("trajlake")
Refresh = Callable[[Engine], Awaitable[object]]


class Pool(Shared[Engine]):
    """Engines of one model behind one client; an `Engine` itself.

    Args:
        engines: that serve the same model.
        config: how they are shared.
        wanted_version: the version of the weights that answers must at least have. It rises by itself with the newest
            one that an engine sampled under, as others push weights meanwhile (`trajlake push`); None: any, until then.
        refresh: gives an engine the weights that are wanted, before it is called again after a restart; unless given,
            those that `load_weights` loaded last.
        folder: of the wanted version, where the engines have it already: `load_weights` need not be called for it.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        config: SharingConfig | None = None,
        *,
        wanted_version: int | None = None,
        refresh: Refresh | None = None,
        folder: Path | None = None,
    ) -> None:
        super().__init__(engines, config)
        self.url = ", ".join(engine.url for engine in engines)
        self.wanted_version = wanted_version
        self._refresh = refresh or self._reload
        self._loaded = None if folder is None or wanted_version is None else (folder, wanted_version)
        self._known = Once(self._asked_what_they_are)
        self._cards: dict[str, EngineCard] = {}
        """What each said of itself at first, by its address."""
        self._is_told = False
        """That nobody knows the version of the weights."""

    async def describe(self) -> EngineCard:
        """See `Engine.describe`; of the shortest context. Raises EngineError too if the engines are not alike."""
        return await self._known()

    async def generate(self, request: Request) -> list[Generation]:
        """See `Engine.generate`; with retries, and under no older weights than those wanted when it is sent."""

        async def sampled(engine: Engine) -> list[Generation]:
            wanted, outs = self.wanted_version, self._outs(engine)
            found = await engine.generate(request)
            if wanted is not None:
                await self._check(engine, found, wanted, outs)
            self._adopt(version for one in found for version, _, _ in one.versions)
            if self.wanted_version is None:
                self._tell_unknown()
            return found

        return await self.call(
            sampled,
            key=request.key,
            prompt_tokens=len(request.prompt_ids),
            sampled=lambda found: sum(len(one.ids) for one in found),
        )

    async def logprobs(self, ids: Sequence[int], *, adapter: str | None = None) -> list[float]:
        """See `Engine.logprobs`; of one of the engines."""
        return await self.call(lambda engine: engine.logprobs(ids, adapter=adapter), prompt_tokens=len(ids))

    async def version(self) -> int | None:
        """See `Engine.version`; None also if the engines differ."""
        versions = {await member.server.version() for member in self.members if member.problem is None}
        return versions.pop() if len(versions) == 1 else None

    async def newest_version(self) -> int | None:
        """See `Engine.newest_version`; of all engines that are not gone."""
        versions = [await member.server.newest_version() for member in self.members if member.problem is None]
        return max((version for version in versions if version is not None), default=None)

    async def load_weights(self, folder: Path, version: int) -> None:
        """See `Engine.load_weights`: of all engines at once. One that is gone gets them when it is back."""
        self._loaded = (folder, version)
        await self._each(lambda engine: engine.load_weights(folder, version))
        self.wanted_version = version

    async def load_adapter(self, name: str, folder: Path) -> None:
        """See `Engine.load_adapter`: of all engines at once."""
        await self._each(lambda engine: engine.load_adapter(name, folder))

    async def is_healthy(self) -> bool:
        """Whether one of them answers."""
        return any(await asyncio.gather(*(member.server.is_healthy() for member in self.members)))

    async def ready(self, server: Engine) -> None:
        """See `Shared.ready`: it answers, serves the same model as before, and has the weights that are wanted."""
        await super().ready(server)
        await self._check_model(server)
        wanted = self.wanted_version
        if wanted is not None and not _is_new(await server.version(), wanted):
            await self._refresh(server)
            if not _is_new(has := await server.version(), wanted):
                raise EngineError(f"{server.url} has weights of version {has} after it was given version {wanted}")

    async def _asked_what_they_are(self) -> EngineCard:
        cards = await asyncio.gather(*(member.server.describe() for member in self.members))
        self._cards = {member.server.url: card for member, card in zip(self.members, cards, strict=True)}
        for name in ("model", "logprobs_mode", "dtype"):
            said = {str(getattr(card, name)) for card in cards}
            if len(said) > 1:
                raise EngineError(f"the engines {self.url} differ in {name}: {', '.join(sorted(said))}")
        self._adopt(await asyncio.gather(*(member.server.version() for member in self.members)))
        return min(cards, key=lambda card: card.max_tokens or 1 << 62)

    async def _check_model(self, server: Engine) -> None:
        """Raise EngineError if another model is served where one was before."""
        before = self._cards.get(server.url)
        if before is None:
            return
        now = await server.describe()
        # Weights that were loaded have folders of their own, and versions, by which they are told apart.
        names = ("model",) if self.wanted_version is not None else ("model", "folder")
        was, has = (" from ".join(str(getattr(card, name)) for name in names) for card in (before, now))
        if was != has:
            raise EngineError(f"{server.url} serves {has} now, and served {was} before; start it with that again")

    def _tell_unknown(self) -> None:
        """Say once that tokens are recorded without a version."""
        if not self._is_told:
            self._is_told = True
            _log.warning(
                "nobody told %s which version of the weights it has: policy_version is going to be NULL, and a restart "
                "with other weights goes unnoticed. `trajlake push MODEL --version N` gives it one",
                self.url,
            )

    async def _each(self, do: Callable[[Engine], Awaitable[None]]) -> None:
        """Do something with every engine that is not gone; each that fails is asked after until it is ready.

        Raises:
            EngineError: one failed, and not because it is gone; the others are done.
        """

        async def one(member: Member[Engine]) -> EngineError | None:
            try:
                await do(member.server)
            except EngineError as error:
                self.out(member, str(error))
                return None if isinstance(error, EngineGoneError) else error
            return None

        usable = [member for member in self.members if member.problem is None]
        for failed in await asyncio.gather(*map(one, usable)):
            if failed is not None:
                raise failed

    async def _check(self, engine: Engine, found: Sequence[Generation], wanted: int, outs: int) -> None:
        """Raise EngineGoneError if an engine sampled under older weights: it is another one than before.

        Versions that it does not tell are no proof of that: weights may have been pushed while it sampled. They are
        one if it does not have the wanted version now either, or was found to be gone meanwhile.
        """
        versions = [version for one in found for version, _, _ in one.versions]
        if any(version is not None and version < wanted for version in versions):
            raise EngineGoneError(f"{engine.url} sampled under version {min(versions, key=_old)}, not {wanted}{_WHY}")
        if None in versions:
            has = await engine.version()
            if not _is_new(has, wanted) or self._outs(engine) != outs:
                raise EngineGoneError(f"{engine.url} sampled under weights of unknown version, not {wanted}{_WHY}")

    def _adopt(self, versions: Iterable[int | None]) -> None:
        """Want no older weights from now on than some that were seen."""
        newest = max((version for version in versions if version is not None), default=None)
        if newest is not None and not _is_new(self.wanted_version, newest):
            self.wanted_version = newest

    def _outs(self, engine: Engine) -> int:
        return next(member.outs for member in self.members if member.server is engine)

    async def _reload(self, engine: Engine) -> None:
        if self._loaded is None:
            raise EngineError(
                f"{engine.url} has other weights than version {self.wanted_version}, and nobody said where those are; "
                f"push them: trajlake push MODEL --engine {engine.url} --version {self.wanted_version} --again"
            )
        await engine.load_weights(*self._loaded)


def _is_new(version: int | None, wanted: int) -> bool:
    return version is not None and version >= wanted


def _old(version: int | None) -> int:
    return -1 if version is None else version
