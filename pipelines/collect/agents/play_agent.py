"""Play rollouts of an agent: a function that calls a recording proxy at an address that names its rollout.

The proxy records each call with its exact tokens. The return value of the function ends the episode. The agent is user
code and runs in this process: functions in threads, coroutines in the event loop. Once the function has returned,
failed or been cancelled, its address accepts no more calls. So a thread that keeps running cannot change the recorded
episode.

The proxy is a child process: `trajlake record` on a free port of 127.0.0.1, in front of one engine. If it dies, its
unfinished rollouts are dropped and the manager plays them again under the same names. Finished rollouts stay in its
spool, and the next proxy delivers them.
"""

import asyncio
import inspect
import logging
import math
import numbers
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec

from lake.errors import LakeAccessError, MissingExtraError, UsageError
from lake.formats.base.fields import make_prompt_task_id
from lake.live.delivery import Delivery
from lake.live.owners import LOCK, open_owners_lake, proxy_spool_root, resolve_owner
from lake.live.sink import format_exception
from lake.live.spool import Spool
from lake.retries import compute_pause
from lake.secrets import redact
from lake.storage.locks import hold_file_lock
from lake.storage.objects import Objects
from lake.tables.definitions import STATUSES
from pipelines.collect.agents import Agent, Client, Result
from pipelines.collect.children import guard_command
from pipelines.collect.engines import EngineError, EngineGoneError, EngineRefusedError
from pipelines.collect.engines.http import parse_address
from pipelines.collect.environments import Task
from pipelines.collect.players import EPISODE_TIMEOUT, SURPLUS, Ending, Rollout, RolloutLog
from pipelines.collect.user_code import CallThread

if TYPE_CHECKING:
    import aiohttp

_MAIN = "from lake.cli import main; main()"
_PORT = 0
_UPSTREAM = "TRAJLAKE_RECORD_UPSTREAM"
"""Environment variable for `--upstream` of `trajlake record`: it hides a password from process lists."""
_NEVER = 1e9
"""Idle timeout of an episode in seconds. The manager limits how long an agent may think."""
_STARTING_SECONDS, _ENDING_SECONDS = 120.0, 90.0
_DYING_SECONDS = 30.0
_TAIL = 20
"""Last lines of the proxy's stderr that messages quote."""


class Endpoint:
    """A recording proxy in front of one engine.

    Args:
        upstream: base URL of the engine.
        lake_uri: lake to record into.
        spool: folder for episodes that are not yet in the lake; shared by the proxies of a run.
        call_seconds: timeout of the engine in seconds.
        logprobs_mode: mode the engine was started with, if it does not report one.
    """

    def __init__(
        self, upstream: str, *, lake_uri: str, spool: Path, call_seconds: float, logprobs_mode: str | None = None
    ) -> None:
        self.upstream = upstream
        self.name, _ = parse_address(upstream)
        self.in_flight = 0
        self._base: str | None = None
        self._has_address = threading.Event()
        self._last_lines: deque[str] = deque(maxlen=_TAIL)
        settings = {"unfinished": "drop", "idle": _NEVER, "timeout": call_seconds}
        if logprobs_mode is not None:
            settings["logprobs_mode"] = logprobs_mode
        words = ["--lake", lake_uri, "--port", str(_PORT), "--spool", str(spool)]
        words += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        # A new session keeps Ctrl-C away: the parent ends the proxy after its rollouts.
        self._process = subprocess.Popen(
            guard_command([sys.executable, "-c", _MAIN, "record", *words], leaving=_ENDING_SECONDS),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="backslashreplace",
            start_new_session=True,
            env=os.environ | {_UPSTREAM: upstream},
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._listeners = [
            threading.Thread(target=self._hear, args=(self._process.stdout,), daemon=True),
            threading.Thread(target=self._warn, args=(self._process.stderr,), daemon=True),
        ]
        for listener in self._listeners:
            listener.start()

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    @property
    def last_words(self) -> str:
        """How the process ended: exit status (128 + signal number for a signal) and last stderr lines."""
        return f"with exit status {self._process.poll()}: {' '.join(self._last_lines) or 'no output'}"

    def await_address(self) -> str:
        """Wait until the proxy listens, and return its address without /v1.

        Raises:
            EngineError: it ended or did not start to listen. The message quotes its last stderr lines.
        """
        self._has_address.wait(_STARTING_SECONDS)
        if self._base is None:
            self.close()
            last_output = " ".join(self._last_lines) or f"no output for {_STARTING_SECONDS:.0f} s"
            raise EngineError(f"the recording proxy before {self.name} does not run: {last_output}")
        return self._base

    def close(self) -> None:
        """End the proxy. Finished rollouts are in the lake afterwards, or else in its spool."""
        self._process.terminate()
        try:
            self._process.wait(2 * _ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for listener in self._listeners:
            listener.join()

    def _hear(self, pipe: IO[str]) -> None:
        """Read the address from the first line of stdout; log the other lines."""
        with pipe:
            for line in pipe:
                words = line.split()
                if self._base is None and words[:1] == ["recording"]:
                    self._base = words[1].removesuffix("/v1")
                    self._has_address.set()
                else:
                    _log.info("%s: %s", self.name, line.strip())
        self._has_address.set()

    def _warn(self, pipe: IO[str]) -> None:
        with pipe:
            for line in pipe:
                self._last_lines.append(line.strip())
                _log.warning("%s: %s", self.name, line.strip())


def deliver_leftovers(lake_uri: str, spool: Path) -> None:
    """Deliver finished episodes of dead proxies to the lake.

    Raises:
        UsageError: a proxy is alive, so another process collects into the same spool.
        LakeAccessError: the lake or the spool cannot be reached.
    """
    root = proxy_spool_root(lake_uri, _PORT, spool)
    if not root.is_dir():
        return
    _wait_for_the_dying(root)
    owner = resolve_owner(lake_uri)
    new_spool = Spool.create(root, owner=owner)
    delivery = Delivery(lambda: open_owners_lake(owner, lake_uri), new_spool, root=root, unfinished="drop")
    delivery.start()
    is_all = delivery.flush()
    delivery.close()
    new_spool.close(remove=True)
    if not is_all:
        raise LakeAccessError(f"earlier recordings are still in {root}: {delivery.counts.problem}")


def _wait_for_the_dying(root: Path) -> None:
    """Wait until no proxy locks a spool. A proxy can outlive its killed parent by some milliseconds."""
    deadline = time.monotonic() + _DYING_SECONDS
    for folder in (path for path in root.iterdir() if path.is_dir()):
        while True:
            with hold_file_lock(folder / LOCK, wait=False) as lock:
                if lock is not None:
                    break
            if time.monotonic() > deadline:
                raise UsageError(
                    f"another process records agents into {root} (process {os.getpid()} waited for it); let it end, or "
                    "name another run"
                )
            time.sleep(0.02)


_SCORER_NAME_LIMIT, _SHOWN = 256, 80
"""Maximum characters of a scorer's name, and of a value in a message."""
_VALID = "valid: None, a list of messages, a number (its reward), or a Result"


def convert_result(value: Any) -> Result:
    """Convert an agent's return value to a `Result`.

    Raises:
        ValueError: the type is not allowed, or a field does not fit into the lake.
    """
    if isinstance(value, Result):
        result = value
    elif value is None or (isinstance(value, list) and all(isinstance(message, dict) for message in value)):
        result = Result()
    elif isinstance(value, numbers.Real):
        result = Result(reward=float(value))
    else:
        raise ValueError(f"the agent returned {type(value).__name__}; {_VALID}")
    if wrong := _describe_wrong_result(result):
        raise ValueError(f"the agent returned {wrong}")
    return result


def _describe_wrong_result(result: Result) -> str | None:
    """Return what is wrong with a result and what is valid, or None if a row of the lake can hold it."""
    if result.status not in STATUSES:
        return f"status = {_excerpt(result.status)}; valid: {', '.join(STATUSES)}"
    for field, text in {"stop_reason": result.stop_reason, "error": result.error}.items():
        if not isinstance(text, str | None):
            return f"{field} = {_excerpt(text)}; valid: a text, or None"
    if not isinstance(result.scores, dict):
        return f"scores = {_excerpt(result.scores)}; valid: numbers by scorer"
    for name in result.scores:
        if not isinstance(name, str) or not name.strip() or "@" in name or len(name) > _SCORER_NAME_LIMIT:
            valid = f"as the scorer's name a text of 1 to {_SCORER_NAME_LIMIT} characters without @"
            return f"a score of {_excerpt(name)}; valid: {valid}"
    for name, number in {"reward": result.reward, **result.scores}.items():
        if not isinstance(number, numbers.Real | None) or (number is not None and not math.isfinite(number)):
            return f"{name} = {_excerpt(number)}; valid: a finite number"
    return None


def _excerpt(value: Any) -> str:
    """Return a value's repr, shortened; a repr that raises is replaced by the type's name."""
    try:
        text = repr(value)
    except Exception:
        text = f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def encode_end(result: Result, rollout: Rollout, environment: str | None) -> bytes:
    """Encode the body of the proxy's `/end`.

    Raises:
        TypeError: the ground truth cannot be written as JSON.
    """
    task = rollout.task
    body = {
        "closes": True,
        "reward": None if result.reward is None else float(result.reward),
        "scores": [{"scorer": name, "value": float(value)} for name, value in result.scores.items()],
        "status": result.status,
        "stop_reason": result.stop_reason,
        "error": result.error and redact(result.error),
        "ground_truth": task.ground_truth if result.ground_truth is None else result.ground_truth,
        "environment": environment,
        "expected_group_size": rollout.expected_group_size,
        "initial_messages": task.messages or None,
    }
    return msgspec.json.encode(body)


_NAME_LIMIT = 256
"""Maximum characters of a name in the proxy's addresses."""
_PATIENCE_SECONDS = 600.0
"""How long a proxy may lack disk space for an end."""
_LONGEST_PAUSE = 5.0
_LONGEST_END = 64 << 20
"""Maximum bytes of a body (`max_body` of `trajlake record`)."""
_MOST_DEATHS = 3
"""Deaths of a proxy without a finished rollout in between, after which the run stops."""
_log = logging.getLogger("trajlake")


class AgentPlayer:
    """Plays rollouts of an agent, many at once, with one recording proxy for each engine.

    Args:
        agent: the function.
        engines: base URLs of engines that serve the same model; a rollout stays with one.
        lake_uri: lake to record into.
        spool: the run's folder for episodes that are not yet in the lake.
        environment: stored as `episodes.environment`; names the agent.
        model: model name for requests. None: the first model that an engine lists.
        api_key: key for the engines.
        sampling: arguments for each call: temperature, max_tokens, ...
        call_seconds: timeout of a call in seconds.
        logprobs_mode: processed or raw, if the engines do not report it.

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
            raise MissingExtraError('agents need the recording proxy: pip install "trajlake[record]"')
        self._agent, self._engines = agent, list(dict.fromkeys(engines))
        self._lake_uri, self._spool, self._environment = lake_uri, spool, environment
        self._model, self._api_key, self._sampling = model, api_key, dict(sampling or {})
        self._call_seconds, self._logprobs_mode = call_seconds, logprobs_mode
        self._endpoints: list[Endpoint] = []
        self._starting = asyncio.Lock()
        self._deaths = 0
        """Deaths of proxies since a rollout last ended."""
        self._session: aiohttp.ClientSession | None = None
        self._endings: set[asyncio.Task[Ending]] = set()
        """Ends that are being sent."""
        self._counts = dict.fromkeys(("rollouts", "calls", "tokens", "without_calls"), 0)

    @property
    def is_recorder(self) -> bool:
        """True: the proxy records the rollouts."""
        return True

    @property
    def problem(self) -> str | None:
        """None: agents call their engines directly."""
        return None

    def count_work(self) -> dict[str, float]:
        """Return counts of finished rollouts, their calls and sampled tokens, and rollouts in flight."""
        return {**self._counts, "in_flight": sum(endpoint.in_flight for endpoint in self._endpoints)}

    plays_together = False

    def gather(self, is_filling: Callable[[int], bool]) -> None:
        """Do nothing: agents do not wait for each other."""

    def store_tokenizer(self, objects: Objects) -> None:
        """Do nothing: the engine encodes the text."""

    async def settle(self) -> None:
        """Deliver all finished rollouts to the lake, including those of the run's earlier proxies.

        Raises:
            UsageError: another process collects the same run.
            LakeAccessError: the lake or the spool cannot be reached.
            EngineError: a proxy cannot deliver.
            EngineGoneError: proxies die repeatedly.
        """
        if not self._endpoints:  # otherwise the first proxy has taken it over
            await asyncio.to_thread(deliver_leftovers, self._lake_uri, self._spool)
            return
        while True:
            endpoints = await self._ensure_running()  # a restarted proxy delivers what its predecessor left
            try:
                for endpoint in endpoints:
                    await self._post(endpoint, f"{endpoint.await_address()}/v1/flush", b"{}")
            except EngineError:
                if all(endpoint.is_alive for endpoint in endpoints):
                    raise
            else:
                return

    async def play(self, rollout: Rollout, log: RolloutLog) -> Ending:
        """Play one rollout. The log stays empty, since the proxy records.

        Raises:
            UsageError: the task's name cannot be part of an address.
            EngineError: its proxy died or does not run. After `settle` the lake shows whether the rollout was recorded.
            EngineGoneError: proxies die repeatedly.
        """
        path = _build_path(rollout)
        endpoint = min(await self._ensure_running(), key=lambda running: running.in_flight)
        endpoint.in_flight += 1
        base = f"{endpoint.await_address()}{path}/v1"
        try:
            return await self._play_with_client(rollout, endpoint, base, log)
        finally:
            endpoint.in_flight -= 1

    async def close(self) -> None:
        """End the proxies. All finished rollouts are in the lake afterwards."""
        await asyncio.gather(*self._endings, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
        await asyncio.gather(*(asyncio.to_thread(endpoint.close) for endpoint in self._endpoints))
        if callable(close := getattr(self._agent, "close", None)):
            await asyncio.to_thread(close)

    # ------------------------------------------------------------ one rollout

    async def _play_with_client(self, rollout: Rollout, endpoint: Endpoint, base: str, log: RolloutLog) -> Ending:
        client = Client(
            base_url=base,
            model=await self._ask_model_name(endpoint),
            api_key=self._api_key,
            sampling=self._sampling | {"seed": rollout.seed},
        )
        error: BaseException | None = None
        try:
            result = convert_result(await self._run(rollout, client))
            body = encode_end(result, rollout, self._environment)
        except asyncio.CancelledError as cancelled:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                await self._abort(rollout, endpoint, base, str(cancelled) or "cancelled", log)
                raise
            error = cancelled  # raised by the agent
        except BaseException as raised:  # any fault of the agent; the manager handles Ctrl-C
            error = raised
        if error is not None:
            result = Result(status="failed", stop_reason=type(error).__name__, error=format_exception(error))
            body = encode_end(result, rollout, self._environment)
        if not log.takes(result.status):
            result = replace(result, status="aborted", stop_reason=SURPLUS)
            body = encode_end(result, rollout, self._environment)
        return await self._end_shielded(rollout, endpoint, base, result, body)

    async def _run(self, rollout: Rollout, client: Client) -> Any:
        agent = self._agent
        if inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(getattr(agent, "__call__", None)):  # noqa: B004
            return await agent(rollout.task, client)
        thread = CallThread()
        try:
            value = await thread.run(agent, rollout.task, client)
        finally:
            thread.end()
        return await value if inspect.isawaitable(value) else value

    async def _abort(self, rollout: Rollout, endpoint: Endpoint, base: str, reason: str, log: RolloutLog) -> None:
        is_cut_off = reason == EPISODE_TIMEOUT and log.takes("truncated")
        result = Result(status="truncated" if is_cut_off else "aborted", stop_reason=reason)
        body = encode_end(result, rollout, self._environment)
        try:
            await self._end_shielded(rollout, endpoint, base, result, body)
        except EngineError as error:
            _log.warning("a cancelled rollout was not recorded: %s", error)

    async def _end_shielded(self, *arguments: Any) -> Ending:
        """Run `_end` to its end, even if the rollout is cancelled during it."""
        ending = asyncio.create_task(self._end(*arguments))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)
        return await asyncio.shield(ending)

    async def _end(self, rollout: Rollout, endpoint: Endpoint, base: str, result: Result, body: bytes) -> Ending:
        try:
            reply = await self._post(endpoint, f"{base}/end", body)
        except EngineRefusedError as error:
            result = Result(status="failed", stop_reason="end_refused", error=redact(str(error)))
            # The proxy cannot refuse a body with only the status and error.
            short = {"closes": True, "status": result.status, "stop_reason": result.stop_reason, "error": result.error}
            reply = await self._post(endpoint, f"{base}/end", msgspec.json.encode(short))
        self._deaths = 0
        calls = reply.get("calls", 0)
        self._counts["rollouts"] += 1
        self._counts["calls"] += calls
        self._counts["tokens"] += reply.get("completion_tokens", 0)
        if not calls:
            self._counts["without_calls"] += 1
            # Warn at powers of two: the fault may affect all of thousands of rollouts.
            if (without := self._counts["without_calls"]).bit_count() == 1 and result.status == "completed":
                _log.warning(
                    "the agent made no call of the model in rollout %d of task %s (%d so far); it is recorded as one "
                    "untrained step. Does it use the client's base_url?",
                    rollout.rollout_index,
                    rollout.task.name or f"with seed {rollout.task.seed}",
                    without,
                )
        return Ending(
            status=result.status,
            stop_reason=result.stop_reason,
            error=result.error,
            env_return=result.reward,
            num_steps=reply.get("steps", 0),
            completion_tokens=reply.get("completion_tokens"),
        )

    # ------------------------------------------------------------ proxies

    async def _ensure_running(self) -> list[Endpoint]:
        """Restart dead proxies and return all of them.

        Raises:
            EngineError: one does not start.
            EngineGoneError: they die repeatedly.
        """
        async with self._starting:
            dead = [endpoint for endpoint in self._endpoints if not endpoint.is_alive]
            self._deaths += len(dead)
            if dead and self._deaths >= _MOST_DEATHS * len(self._engines):
                deaths, self._deaths = self._deaths, 0  # `settle` may restart them to deliver leftovers
                raise EngineGoneError(
                    f"the recording proxy before {dead[0].name} died {deaths} times without a finished rollout "
                    f"in between; the last time {dead[0].last_words}"
                )
            for endpoint in dead:
                _log.warning("the recording proxy before %s died and is restarted", endpoint.name)
            running = {endpoint.upstream: endpoint for endpoint in self._endpoints if endpoint.is_alive}
            if len(running) < len(self._engines):
                start = partial(
                    Endpoint,
                    lake_uri=self._lake_uri,
                    spool=self._spool,
                    call_seconds=self._call_seconds,
                    logprobs_mode=self._logprobs_mode,
                )
                self._endpoints = [running.get(url) or start(url) for url in self._engines]
                await asyncio.gather(*(asyncio.to_thread(endpoint.await_address) for endpoint in self._endpoints))
            return self._endpoints

    async def _ask_model_name(self, endpoint: Endpoint) -> str:
        """Return the model name for requests. Raises EngineError: the engine lists no model."""
        if self._model is None:
            try:
                async with self._open_session().get(f"{endpoint.await_address()}/v1/models") as answer:
                    self._model = str((await answer.json(content_type=None))["data"][0]["id"])
            except (OSError, ValueError, LookupError, TypeError) as error:
                msg = f"{endpoint.name} does not report its model ({type(error).__name__}); pass --model"
                raise EngineError(msg) from error
        return self._model

    async def _post(self, endpoint: Endpoint, url: str, body: bytes) -> dict[str, Any]:
        """Post a body to the proxy and return its answer; retry while it lacks disk space.

        Raises:
            EngineRefusedError: it refuses the body.
            EngineError: it died, or lacked disk space for too long.
        """
        import aiohttp
        from yarl import URL

        if len(body) > _LONGEST_END:  # checked before sending: a refusing proxy may close the connection
            raise EngineRefusedError(
                f"the end of a rollout has {len(body):,} bytes; valid: at most {_LONGEST_END:,}. "
                "Is its ground truth too long?",
                413,
            )
        failed = f"the recording proxy before {endpoint.name} did not accept the end of a rollout"
        deadline = time.monotonic() + _PATIENCE_SECONDS
        for failures in count(1):
            try:
                async with self._open_session().post(URL(url, encoded=True), data=body) as answer:
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
            await asyncio.sleep(compute_pause(failures, first=0.1, longest=_LONGEST_PAUSE))
        raise AssertionError

    def _open_session(self) -> "aiohttp.ClientSession":
        import aiohttp

        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            # Ends carry the key too, so that the proxy can redact it in quoted exceptions.
            self._session = aiohttp.ClientSession(
                connector=connector,
                timeout=aiohttp.ClientTimeout(total=None),
                headers={"Authorization": f"Bearer {self._api_key}"},
            )
        return self._session


def describe_unaddressable(task: Task) -> str | None:
    """Return why no agent can play a task (its name cannot be part of an address), or None."""
    try:
        _encode_segment("task", _task_name(task))
    except UsageError as error:
        return f"seed {task.seed}: {error}"
    return None


def _task_name(task: Task) -> str:
    return task.name or (make_prompt_task_id(task.messages) if task.messages else f"seed-{task.seed}")


def _build_path(rollout: Rollout) -> str:
    """Build the proxy's path for a rollout from the keys of its episode. Raises UsageError."""
    task = rollout.task
    named = {
        "run": rollout.run_id,
        "round": rollout.collection_round,
        "task": _task_name(task),
        "seed": task.seed,
        "rollout": rollout.rollout_index,
        "attempt": rollout.attempt,
    }
    segments = {field: str(segment) for field, segment in named.items() if segment is not None}
    return "".join(f"/{field}/{_encode_segment(field, segment)}" for field, segment in segments.items())


def _encode_segment(field: str, name: str) -> str:
    """Encode a name as one segment of a path. Raises UsageError: clients and the proxy could read it differently."""
    is_whole = name == name.strip() and 0 < len(name) <= _NAME_LIMIT and name.isprintable()
    if not is_whole or name in (".", ".."):
        excerpt = name if len(name) <= _NAME_LIMIT else f"{name[:_NAME_LIMIT]}..."
        raise UsageError(
            f"the {field} {excerpt!r} cannot be part of an agent's address; valid: 1 to {_NAME_LIMIT} printable "
            "characters without blanks around them, other than . and .."
        )
    return quote(name, safe="")
