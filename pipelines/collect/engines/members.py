"""One of several servers behind a client: how many calls it has, how busy it is, and whether it may be called."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


class Server(Protocol):
    """What is called: an engine, or an endpoint for chats."""

    url: str

    async def is_healthy(self) -> bool:
        """Whether it answers."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...


_SHORT_SECONDS = 5.0
"""A shorter rest is waited for without a word: to compute a prefix again elsewhere may take as long."""
_LOOK_SECONDS = 1.0
"""How often who waits for the end of a rest looks whether it may go elsewhere."""
Served = TypeVar("Served", bound=Server)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberCounts:
    """How one server is doing."""

    url: str
    problem: str | None
    """Why it gets no calls; None: it gets some."""
    calls: int
    """Answered."""
    tokens: int
    """Sampled."""
    retries: int
    """Calls of it that failed and were, or will be, tried again."""
    running: int
    """Calls that it is answering."""
    waiting: int
    """Calls that wait for one of its places."""
    saturation: float
    """Share of its places that was taken, on average since its first call."""


@dataclass(eq=False, kw_only=True)
class Member(Generic[Served]):
    """A server and its state. `most` is the bound of its calls at once."""

    server: Served
    most: int
    problem: str | None = None
    outs: int = 0
    """How often it was found to be gone."""
    probe: "asyncio.Task[None] | None" = None
    calls: int = 0
    tokens: int = 0
    retries: int = 0
    running: int = 0
    waiting: int = 0
    rests_until: float = 0.0
    """On the clock of the event loop: it asked to be left alone until then."""
    _places: asyncio.Semaphore = field(init=False)
    _began: float | None = None
    _counted_at: float = 0.0
    _taken_seconds: float = 0.0

    def __post_init__(self) -> None:
        self._places = asyncio.Semaphore(self.most)

    @property
    def load(self) -> int:
        """Calls that it has, answered or waiting."""
        return self.running + self.waiting

    @asynccontextmanager
    async def place(self, goes_elsewhere: Callable[[], bool]) -> AsyncIterator[None]:
        """One of its places, once there is one and it does not rest, or the call had better go elsewhere."""
        self.waiting += 1
        try:
            await self._places.acquire()
            try:
                await self._rested(goes_elsewhere)
            except BaseException:
                self._places.release()
                raise
        finally:
            self.waiting -= 1
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)
            self._places.release()

    def rest(self, seconds: float) -> None:
        """It gets no call for so long."""
        self.rests_until = max(self.rests_until, asyncio.get_running_loop().time() + seconds)

    @property
    def waits_for(self) -> str | None:
        """Why it may not be called at the moment; None: it may."""
        if self.problem is not None:
            return self.problem
        left = self.rests_until - asyncio.get_running_loop().time()
        return f"{self.server.url} asks to wait {left:.0f} s" if left > _SHORT_SECONDS else None

    def counts(self) -> MemberCounts:
        """How it is doing."""
        self._count(0)
        elapsed = self._counted_at - self._began if self._began is not None else 0.0
        return MemberCounts(
            url=self.server.url,
            problem=self.problem,
            calls=self.calls,
            tokens=self.tokens,
            retries=self.retries,
            running=self.running,
            waiting=self.waiting,
            saturation=self._taken_seconds / (elapsed * self.most) if elapsed > 0 else 0.0,
        )

    async def _rested(self, goes_elsewhere: Callable[[], bool]) -> None:
        while (left := self.rests_until - asyncio.get_running_loop().time()) > 0 and not goes_elsewhere():
            await asyncio.sleep(min(left, _LOOK_SECONDS))

    def _count(self, change: int) -> None:
        now = asyncio.get_running_loop().time()
        if self._began is None:
            if not change:
                return
            self._began = now
        else:
            self._taken_seconds += self.running * (now - self._counted_at)
        self._counted_at = now
        self.running += change
