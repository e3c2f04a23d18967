"""Several servers behind one client: who gets a call, how often it is tried, and what becomes of servers that are gone.

A rollout's calls go to the server that its first one went to, whose cache holds their prefix; the first goes to the one
with the fewest calls. A server that cannot be reached gets no calls, is asked after with growing pauses, and is used
again once it is ready. Nobody is asked more often than the limits allow, and who asks for a pause gets it.

Calls of a server that is gone, or asks for a long pause, go to another one, and their rollouts stay there: each call
brings its whole prompt, so nothing but the computing of its prefix is lost.
"""

import asyncio
import random
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Self, TypeVar

from pydantic import BaseModel, Field

from lake.errors import TrajlakeError, UsageError
from pipelines.collect.engines import (
    EngineAnswerError,
    EngineBusyError,
    EngineError,
    EngineFailedError,
    EngineGoneError,
)
from pipelines.collect.engines.members import Member, MemberCounts, Served
from pipelines.collect.engines.rates import RateLimit

Result = TypeVar("Result")
_TRIED_AGAIN = (EngineBusyError, EngineGoneError, EngineFailedError, EngineAnswerError)
_MOST_KEYS = 1 << 16
"""Rollouts whose server is remembered; the one that was idle for longest is forgotten."""


class SharingConfig(BaseModel, frozen=True, extra="forbid"):
    """How servers are shared."""

    most_calls: int = Field(default=64, ge=1)
    """Calls that one server gets at once; more wait."""
    requests_per_second: float | None = Field(default=None, gt=0)
    """Limit over all servers."""
    tokens_per_second: float | None = Field(default=None, gt=0)
    """Limit over all servers, of prompts and answers."""
    tries: int = Field(default=6, ge=1)
    """How often a call is sent before its failure counts."""
    first_pause: float = Field(default=0.5, gt=0)
    """Seconds before a second try; each further pause is twice as long. A random part of up to half is taken off."""
    longest_pause: float = Field(default=30.0, gt=0)
    """Seconds that no pause exceeds, unless the server asks for more."""
    patience: float = Field(default=900.0, gt=0)
    """Seconds that a call waits for a server that may be called: as long as restarting one may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How all servers together are doing."""

    calls: int
    tokens: int
    retries: int
    running: int
    waiting: int
    members: tuple[MemberCounts, ...]


class Shared(Generic[Served]):
    """Servers behind one client; `async with` it, or close it.

    It belongs to the event loop in which it is first used.

    Raises:
        UsageError: there are no servers, or two with one address.
    """

    def __init__(self, servers: Sequence[Served], config: SharingConfig | None = None) -> None:
        self.config = config or SharingConfig()
        if not servers:
            raise UsageError("there is no engine; valid: the URL of one, or of several")
        if len({server.url for server in servers}) != len(servers):
            raise UsageError(f"an engine is named twice: {', '.join(server.url for server in servers)}")
        self.members = [Member(server=server, most=self.config.most_calls) for server in servers]
        self._homes: OrderedDict[str, Member[Served]] = OrderedDict()
        self._requests = RateLimit(self.config.requests_per_second)
        self._tokens = RateLimit(self.config.tokens_per_second)
        self._changed = asyncio.Event()
        self._is_closed = False
        self._random = random.Random()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def counts(self) -> Counts:
        """How the servers are doing, for people who watch."""
        members = tuple(member.counts() for member in self.members)
        return Counts(
            calls=sum(each.calls for each in members),
            tokens=sum(each.tokens for each in members),
            retries=sum(each.retries for each in members),
            running=sum(each.running for each in members),
            waiting=sum(each.waiting for each in members),
            members=members,
        )

    @property
    def problem(self) -> str | None:
        """Why no server may be called at the moment; None: one may."""
        problems = [member.waits_for for member in self.members]
        return None if None in problems else "; ".join(dict.fromkeys(map(str, problems)))

    async def close(self) -> None:
        """Stop asking after servers, and let go of connections."""
        self._is_closed = True
        self._changed.set()
        probes = [member.probe for member in self.members if member.probe is not None]
        for probe in probes:
            probe.cancel()
        await asyncio.gather(*probes, return_exceptions=True)
        for member in self.members:
            await member.server.close()

    async def call(
        self,
        do: Callable[[Served], Awaitable[Result]],
        *,
        key: str = "",
        prompt_tokens: int = 0,
        sampled: Callable[[Result], int] = lambda _: 0,
    ) -> Result:
        """Call a server, as often as it takes.

        Args:
            do: one try.
            key: names the rollout.
            prompt_tokens: of the call, for the limit.
            sampled: tokens of an answer, for the limit and the counts.

        Raises:
            EngineError: the last try's; or what no further try would mend.
            EngineGoneError: no server could be called for as long as patience has it.
        """
        tried = 0
        while True:
            member = await self._member(key)
            try:
                async with member.place(partial(self._goes_elsewhere, member)):
                    if member.problem is not None or self._goes_elsewhere(member):
                        continue  # since it waited for a place
                    await self._requests.take(1)
                    await self._tokens.take(prompt_tokens)
                    result = await do(member.server)
            except _TRIED_AGAIN as error:
                tried += 1
                member.retries += 1
                pause = await self._failed(member, error, tried)
                if tried >= self.config.tries or pause > self.config.patience:
                    raise
                await asyncio.sleep(pause)
            else:
                member.calls += 1
                member.tokens += (tokens := sampled(result))
                self._tokens.charge(tokens)
                return result

    async def ready(self, server: Served) -> None:
        """Make sure that a server that was gone may be called. Raises EngineError: not yet, and why."""
        if not await server.is_healthy():
            raise EngineGoneError(f"{server.url} does not answer")

    def out(self, member: Member[Served], problem: str) -> None:
        """Give a server no calls until it is ready."""
        member.problem = problem
        member.outs += 1
        if not self._is_closed and (member.probe is None or member.probe.done()):
            member.probe = asyncio.create_task(self._probe(member))

    async def _failed(self, member: Member[Served], error: EngineError, tried: int) -> float:
        """Note a failure. Gives the seconds after which the next try may follow."""
        if isinstance(error, EngineBusyError) and error.seconds is not None:
            member.rest(min(error.seconds, self.config.patience))
            if self._goes_elsewhere(member):
                return 0.0
            if error.seconds > self.config.patience and None not in [one.waits_for for one in self.members]:
                raise EngineGoneError(
                    f"{member.server.url} asks to be left alone for {error.seconds:.0f} s, which is more than calls "
                    f"wait for ({self.config.patience:g} s): {error}"
                ) from error
            return max(self._pause(tried), error.seconds)
        is_sick = isinstance(error, EngineBusyError | EngineFailedError) and not await member.server.is_healthy()
        if isinstance(error, EngineGoneError) or is_sick:
            self.out(member, str(error))
            return 0.0 if self._usable() else self._pause(tried)
        return self._pause(tried)

    def _pause(self, tried: int) -> float:
        whole = min(self.config.first_pause * 2.0 ** (tried - 1), self.config.longest_pause)
        return whole * (1 - self._random.random() / 2)

    async def _member(self, key: str) -> Member[Served]:
        """The server of a rollout, or another once that is gone."""
        try:
            async with asyncio.timeout(self.config.patience):
                while not (usable := self._usable()):
                    if self._is_closed:
                        raise EngineGoneError(f"{self.members[0].server.url} was let go of while it was called")
                    self._raise_faults()
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            problems = "; ".join(member.problem or "it is back" for member in self.members)
            raise EngineGoneError(
                f"no engine could be called for {self.config.patience:g} s: {problems}. Start one of them again"
            ) from None
        home = self._homes.get(key) if key else None
        if home is None or home.problem is not None or self._goes_elsewhere(home):
            home = min(usable, key=lambda member: (member.waits_for is not None, member.load))
        if key:
            self._homes[key] = home
            self._homes.move_to_end(key)
            if len(self._homes) > _MOST_KEYS:
                self._homes.popitem(last=False)
        return home

    def _goes_elsewhere(self, member: Member[Served]) -> bool:
        """Whether a server's calls had better go to another: it may not be called, and some other may."""
        return member.waits_for is not None and any(other.waits_for is None for other in self.members)

    def _usable(self) -> list[Member[Served]]:
        return [member for member in self.members if member.problem is None]

    async def _probe(self, member: Member[Served]) -> None:
        """Ask after a server until it is ready."""
        tried = 0
        try:
            while member.problem is not None:
                try:
                    await self.ready(member.server)
                    member.problem = None
                except TrajlakeError as error:
                    if not isinstance(error, EngineGoneError):  # what it was found out by says more
                        member.problem = str(error)
                    await asyncio.sleep(self._pause(tried := tried + 1))
        finally:
            self._changed.set()

    def _raise_faults(self) -> None:
        """Raise what ended a probe that should not have ended: a fault of the code that makes a server ready."""
        for member in self.members:
            if member.probe is not None and member.probe.done() and (error := member.probe.exception()):
                raise error
