"""Rollouts of an agent: a function before the recording proxy, at an address that names its rollout.

Each call that the agent makes there is recorded by the proxy, with its exact tokens; what the function returns is the
end of the episode. The agent is the user's own code and runs in this process: functions in threads, coroutines in the
event loop. When its function has returned, failed or was cancelled, its address takes nothing more, so that a thread
that goes on cannot change what was recorded.
"""

import asyncio
import inspect
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from lake.errors import MissingExtraError, UsageError
from lake.formats.base.fields import prompt_task
from lake.formats.base.secrets import redacted
from pipelines.collect.agents import Agent, Client, Result
from pipelines.collect.agents.endpoint import Endpoint, deliver_left
from pipelines.collect.agents.results import end_body, ending_of, failure_of, least_body, result_of
from pipelines.collect.engines import EngineError, EngineGoneError, EngineRefusedError
from pipelines.collect.environments import Task
from pipelines.collect.environments.threads import Worker
from pipelines.collect.players import EPISODE_TIMEOUT, SURPLUS, Ending, Rollout, RolloutLog

if TYPE_CHECKING:
    import aiohttp

_NAME_LIMIT = 256
"""Characters of a name that the proxy takes."""
_PATIENCE_SECONDS = 600.0
"""How long a proxy may have no room on its disk for an end."""
_LONGEST_PAUSE = 5.0
_LONGEST_END = 64 << 20
"""Bytes of a body that the proxy takes (`trajlake record --max-body`)."""
_MOST_DEATHS = 3
"""Times that a proxy may die with no rollout ending in between; then something kills it, and would again."""
_log = logging.getLogger("trajlake")


class AgentPlayer:
    """Plays rollouts of an agent, many at once, before one recording proxy for each engine.

    Args:
        agent: the function.
        engines: base URLs of engines that serve the same model; a rollout stays with one.
        lake_uri: the lake that is recorded into.
        spool: folder of the run for what is not yet in the lake.
        environment: `episodes.environment`: which agent it is.
        model: to ask for; None: the first one that an engine lists.
        api_key: that the engines want, if they want any.
        sampling: arguments that each call should have: temperature, max_tokens, ...
        call_seconds: how long an engine may be silent in a call.
        logprobs_mode: as the engines were started with (processed, raw), where they do not say.

    Raises:
        MissingExtraError: a package of the proxy is not installed.
    """

    def __init__(
        self,
        agent: Agent,
        engines: Sequence[str],
        *,
        lake_uri: str,
        spool: Path,
        environment: str | None = None,
        model: str | None = None,
        api_key: str = "none",
        sampling: Mapping[str, Any] | None = None,
        call_seconds: float = 600.0,
        logprobs_mode: str | None = None,
    ) -> None:
        if find_spec("aiohttp") is None:
            raise MissingExtraError('agents are recorded by a proxy: pip install "trajlake[record]"')
        self._agent, self._engines = agent, list(dict.fromkeys(engines))
        self._lake_uri, self._spool, self._environment = lake_uri, spool, environment
        self._model, self._api_key, self._sampling = model, api_key, dict(sampling or {})
        self._call_seconds, self._logprobs_mode = call_seconds, logprobs_mode
        self._endpoints: list[Endpoint] = []
        self._starting = asyncio.Lock()
        self._deaths = 0
        """Of proxies, since a rollout ended."""
        self._session: aiohttp.ClientSession | None = None
        self._endings: set[asyncio.Task[Ending]] = set()
        """That are under way."""
        self._counts = dict.fromkeys(("rollouts", "calls", "tokens", "without_calls"), 0)

    @property
    def is_recorder(self) -> bool:
        """The proxy records."""
        return True

    @property
    def problem(self) -> str | None:
        """Agents ask their engines themselves."""
        return None

    def figures(self) -> dict[str, float]:
        """Counts of rollouts that have ended, of their calls and sampled tokens; and how many are in flight."""
        return {**self._counts, "in_flight": sum(endpoint.in_flight for endpoint in self._endpoints)}

    plays_together = False

    def gather(self, is_filling: Callable[[int], bool]) -> None:
        """Agents do not wait for one another."""

    async def settle(self) -> None:
        """Have all that ended in the lake, also what earlier proxies of the run left.

        Raises:
            UsageError: another process collects the same run.
            LakeAccessError: the lake or the spool cannot be reached.
            EngineError: a proxy cannot deliver.
            EngineGoneError: proxies die again and again.
        """
        if not self._endpoints:  # else the first of them has taken it over
            await asyncio.to_thread(deliver_left, self._lake_uri, self._spool)
            return
        while True:
            endpoints = await self._alive()  # one that follows a dead one delivers what that has left
            try:
                for endpoint in endpoints:
                    await self._post(endpoint, f"{endpoint.base()}/v1/flush", b"{}")
            except EngineError:
                if all(endpoint.is_alive for endpoint in endpoints):
                    raise
            else:
                return

    async def play(self, rollout: Rollout, log: RolloutLog) -> Ending:
        """Play one rollout; nothing is written to the log, since the proxy records.

        Raises:
            UsageError: the task has a name that no address can hold.
            EngineError: its proxy died, or does not run; whether it was recorded, the lake knows after `settle`.
            EngineGoneError: proxies die again and again.
        """
        path = _path(rollout)
        endpoint = await self._reach()
        endpoint.in_flight += 1
        base = f"{endpoint.base()}{path}/v1"
        try:
            return await self._played(rollout, endpoint, base, log)
        finally:
            endpoint.in_flight -= 1

    async def close(self) -> None:
        """End the proxies, with all that has ended in the lake."""
        await asyncio.gather(*self._endings, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
        await asyncio.gather(*(asyncio.to_thread(endpoint.close) for endpoint in self._endpoints))
        if callable(close := getattr(self._agent, "close", None)):
            await asyncio.to_thread(close)

    # ------------------------------------------------------------ one rollout

    async def _played(self, rollout: Rollout, endpoint: Endpoint, base: str, log: RolloutLog) -> Ending:
        client = Client(
            base_url=base,
            model=await self._served(endpoint),
            api_key=self._api_key,
            sampling=self._sampling | {"seed": rollout.seed},
        )
        error: BaseException | None = None
        try:
            result = result_of(await self._run(rollout, client))
            body = end_body(result, rollout, self._environment)
        except asyncio.CancelledError as cancelled:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                await self._abort(rollout, endpoint, base, str(cancelled) or "cancelled", log)
                raise
            error = cancelled  # the agent's own
        except BaseException as raised:  # of the agent, whatever it is: Ctrl-C is the manager's affair
            error = raised
        if error is not None:
            result = failure_of(error)
            body = end_body(result, rollout, self._environment)
        if not log.takes(result.status):
            result = replace(result, status="aborted", stop_reason=SURPLUS)
            body = end_body(result, rollout, self._environment)
        return await self._ended(rollout, endpoint, base, result, body)

    async def _run(self, rollout: Rollout, client: Client) -> Any:
        agent = self._agent
        if inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(getattr(agent, "__call__", None)):  # noqa: B004
            return await agent(rollout.task, client)
        thread = Worker()
        try:
            value = await thread.run(agent, rollout.task, client)
        finally:
            thread.end()
        return await value if inspect.isawaitable(value) else value

    async def _abort(self, rollout: Rollout, endpoint: Endpoint, base: str, reason: str, log: RolloutLog) -> None:
        is_cut_off = reason == EPISODE_TIMEOUT and log.takes("truncated")
        result = Result(status="truncated" if is_cut_off else "aborted", stop_reason=reason)
        body = end_body(result, rollout, self._environment)
        try:
            await self._ended(rollout, endpoint, base, result, body)
        except EngineError as error:
            _log.warning("a rollout that was cancelled is not recorded: %s", error)

    async def _ended(self, *said: Any) -> Ending:
        """See `_end`, which goes on if the rollout is cancelled meanwhile."""
        ending = asyncio.create_task(self._end(*said))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)
        return await asyncio.shield(ending)

    async def _end(self, rollout: Rollout, endpoint: Endpoint, base: str, result: Result, body: bytes) -> Ending:
        try:
            reply = await self._post(endpoint, f"{base}/end", body)
        except EngineRefusedError as error:
            result = Result(status="failed", stop_reason="end_refused", error=redacted(str(error)))
            reply = await self._post(endpoint, f"{base}/end", least_body(result))
        self._deaths = 0
        calls = reply.get("calls", 0)
        self._counts["rollouts"] += 1
        self._counts["calls"] += calls
        self._counts["tokens"] += reply.get("completion_tokens", 0)
        if not calls:
            self._counts["without_calls"] += 1
            # The first, and then ever more rarely: it may be so in all of thousands.
            if (without := self._counts["without_calls"]).bit_count() == 1 and result.status == "completed":
                _log.warning(
                    "the agent made no call of the model in rollout %d of task %s (%d so far); it is recorded as one "
                    "step that is not trained on. Does it use the client's base_url?",
                    rollout.rollout_index,
                    rollout.task.name or f"with seed {rollout.task.seed}",
                    without,
                )
        return ending_of(result, reply)

    # ------------------------------------------------------------ proxies

    async def _reach(self) -> Endpoint:
        """The proxy with the fewest rollouts in flight. Raises EngineError, EngineGoneError: see `_alive`."""
        return min(await self._alive(), key=lambda endpoint: endpoint.in_flight)

    async def _alive(self) -> list[Endpoint]:
        """The proxies; those that died are started again.

        Raises:
            EngineError: one does not begin to run.
            EngineGoneError: they die again and again.
        """
        async with self._starting:
            dead = [endpoint for endpoint in self._endpoints if not endpoint.is_alive]
            self._deaths += len(dead)
            if dead and self._deaths >= _MOST_DEATHS * len(self._engines):
                deaths, self._deaths = self._deaths, 0  # `settle` may start them, to deliver what they left
                raise EngineGoneError(
                    f"the recording proxy before {dead[0].name} died {deaths} times and no rollout ended in "
                    f"between; the last time {dead[0].last_words}"
                )
            for endpoint in dead:
                _log.warning("the recording proxy before %s died and is started again", endpoint.name)
            kept = {endpoint.upstream: endpoint for endpoint in self._endpoints if endpoint.is_alive}
            if len(kept) < len(self._engines):
                self._endpoints = [kept.get(url) or self._started(url) for url in self._engines]
                await asyncio.gather(*(asyncio.to_thread(endpoint.base) for endpoint in self._endpoints))
            return self._endpoints

    def _started(self, url: str) -> Endpoint:
        return Endpoint(
            url,
            lake_uri=self._lake_uri,
            spool=self._spool,
            call_seconds=self._call_seconds,
            logprobs_mode=self._logprobs_mode,
        )

    async def _served(self, endpoint: Endpoint) -> str:
        """The model to ask for. Raises EngineError: none is served."""
        if self._model is None:
            try:
                async with self._http().get(f"{endpoint.base()}/v1/models") as answer:
                    self._model = str((await answer.json(content_type=None))["data"][0]["id"])
            except (OSError, ValueError, LookupError, TypeError) as error:
                msg = f"{endpoint.name} does not say which model it serves ({type(error).__name__}); name it"
                raise EngineError(msg) from error
        return self._model

    async def _post(self, endpoint: Endpoint, url: str, body: bytes) -> dict[str, Any]:
        """What the proxy answers, which is asked again while it has no room.

        Raises:
            EngineRefusedError: it refuses what it was told.
            EngineError: it died, or has had no room for too long.
        """
        import aiohttp
        from yarl import URL

        if len(body) > _LONGEST_END:  # before it is sent: a proxy that refuses it may break the connection off
            raise EngineRefusedError(
                f"the end of a rollout has {len(body):,} bytes; valid: {_LONGEST_END:,}. Is its ground truth so long?",
                413,
            )
        failed = f"the recording proxy before {endpoint.name} did not take an end"
        deadline, pause = time.monotonic() + _PATIENCE_SECONDS, 0.1
        while True:
            try:
                async with self._http().post(URL(url, encoded=True), data=body) as answer:
                    text = await answer.text()
                    if answer.status == 200:
                        return dict(await answer.json())
                    if answer.status != 503:
                        raise EngineRefusedError(f"{failed}: {text}", answer.status)
                    is_final = False
            except (aiohttp.ClientError, OSError) as error:
                text, is_final = f"{type(error).__name__}: {error}", not endpoint.is_alive
            if is_final or time.monotonic() > deadline:
                raise EngineError(f"{failed}: {text}")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _http(self) -> "aiohttp.ClientSession":
        import aiohttp

        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            # The key goes along with ends as well: the proxy takes it out of what exceptions quote.
            self._session = aiohttp.ClientSession(
                connector=connector,
                timeout=aiohttp.ClientTimeout(total=None),
                headers={"Authorization": f"Bearer {self._api_key}"},
            )
        return self._session


def unaddressable(task: Task) -> str | None:
    """Why no agent can play a task, if so: its name cannot be part of an address."""
    try:
        _segment("task", _task_name(task))
    except UsageError as error:
        return f"seed {task.seed}: {error}"
    return None


def _task_name(task: Task) -> str:
    return task.name or (prompt_task(task.messages) if task.messages else f"seed-{task.seed}")


def _path(rollout: Rollout) -> str:
    """Where the proxy knows a rollout: the names of its row in the lake. Raises UsageError."""
    task = rollout.task
    named = {
        "run": rollout.run_id,
        "round": rollout.collection_round,
        "task": _task_name(task),
        "seed": task.seed,
        "rollout": rollout.rollout_index,
        "attempt": rollout.attempt,
    }
    given = {place: str(value) for place, value in named.items() if value is not None}
    return "".join(f"/{place}/{_segment(place, value)}" for place, value in given.items())


def _segment(place: str, name: str) -> str:
    """A name as a part of a path. Raises UsageError: clients and the proxy would not agree on it."""
    is_whole = name == name.strip() and 0 < len(name) <= _NAME_LIMIT and name.isprintable()
    if not is_whole or name in (".", ".."):
        shown = name if len(name) <= _NAME_LIMIT else f"{name[:_NAME_LIMIT]}..."
        raise UsageError(
            f"the {place} {shown!r} cannot be part of an agent's address; valid: 1 to {_NAME_LIMIT} printable "
            "characters without blanks around them, other than . and .."
        )
    return quote(name, safe="")
