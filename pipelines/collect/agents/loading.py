"""Load the agent that `--agent` names.

FILE.py:name                   a function in a file (`trajlake template agent FILE.py`)
package.module:name            a function in a package
verifiers:TASKSET[?key=value]  the tasks of a verifiers taskset, played by its own runner

verifiers 0.4 keeps no token ids of calls to an endpoint, so steps and tokens come from the recording proxy. Reward,
scores and status come from the trace that verifiers records. The first agent of a verifiers environment plays under the
address of the rollout. Every other agent is a sub-agent: a separate episode with the reward of its trace.

verifiers runs in a separate process (`verifiers_worker.py`), with any Python that has it installed.
"""

import asyncio
import inspect
import itertools
import json
import logging
import os
import subprocess
import sys
import threading
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit

import msgspec

from lake.errors import MissingExtraError, UsageError
from lake.formats.base.source import Input
from lake.formats.verifiers_traces import Annotations, build_records
from lake.records import EpisodeRecord
from pipelines.collect import user_code
from pipelines.collect.agents import Agent, Client, Result
from pipelines.collect.environments import Task

_VERIFIERS = "verifiers"


def load_agent_tasks(name: str, *, python: str | None = None) -> list[Task] | None:
    """Return the tasks that come with `--agent`, or None if the agent plays any task.

    Raises:
        UsageError, MissingExtraError: see `VerifiersTaskset.tasks`.
    """
    kind, _, taskset_name = name.partition(":")
    if kind != _VERIFIERS:
        return None
    taskset = VerifiersTaskset(taskset_name, python=python)
    try:
        return taskset.tasks()
    finally:
        taskset.close()


def load_agent(name: str, *, python: str | None = None) -> Agent:
    """Return the function that `--agent` names; see the module docstring for `name`.

    Args:
        name: value of `--agent`.
        python: Python of the environment that has verifiers. None: this Python.

    Raises:
        UsageError: the function does not exist, its module cannot be imported, or it does not accept a task and a
            client.
    """
    kind, _, taskset_name = name.partition(":")
    if kind == _VERIFIERS:
        return VerifiersTaskset(taskset_name, python=python)
    target = user_code.load_target(name, "--agent")
    agent: Agent = target.value
    if inspect.isclass(agent) or not callable(agent):
        kind_text = "a class" if inspect.isclass(agent) else f"of type {type(agent).__name__}"
        raise UsageError(f"--agent {name} is {kind_text}; valid: a function or callable object: agent(task, client)")
    try:
        signature = inspect.signature(agent)
    except (TypeError, ValueError):  # a C function, for example, has no signature
        return agent
    try:
        signature.bind(object(), object())
    except TypeError as error:
        function = name.rpartition(":")[2]
        raise UsageError(
            f"--agent {name}: {function}{signature} cannot be called with a task and a client: {error}"
        ) from error
    return agent


_WORKER = Path(__file__).with_name("verifiers_worker.py")
_KEY_VARIABLE = "TRAJLAKE_AGENT_KEY"
_INSTALL = (
    'verifiers is not installed in {python}: pip install "verifiers==0.4.0" in a separate environment (it pins '
    "openai < 3), and pass its Python with --set player.agent_python=FILE"
)
_TAIL, _LINES = 2000, 40
"""Characters and lines of stderr that an error message quotes."""
_log = logging.getLogger("trajlake")


class VerifiersTaskset:
    """An agent that lets verifiers play its tasks. Its process starts with the first call.

    Args:
        name: module or file of the taskset, with arguments: `TASKSET?level=2&take=50&agent.max_turns=4`. A key with
            dots is a path in the environment's config, `take` limits the number of tasks, and other keys are arguments
            of the taskset.
        python: Python that has verifiers. None: this Python.

    Raises:
        UsageError: the name is malformed.
    """

    def __init__(self, name: str, *, python: str | None = None) -> None:
        module, _, query = name.partition("?")
        if not module:
            raise UsageError("--agent verifiers: has no taskset; valid: verifiers:TASKSET[?key=value]")
        file = Path(module).resolve()
        is_file = file.suffix == ".py"
        if is_file and not file.is_file():
            raise UsageError(f"--agent verifiers:{module}: file not found")
        self.name, self._folder = (file.stem, file.parent) if is_file else (module, Path.cwd())
        self._python = python or sys.executable
        self._config: dict[str, Any] = {"taskset": {"id": self.name}}
        self._most: int | None = None
        for key, text in parse_qsl(query, keep_blank_values=True):
            self._set(key, text)
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._description: dict[str, Any] = {}

    def tasks(self) -> list[Task]:
        """Return the taskset's tasks in its order.

        Raises:
            MissingExtraError: verifiers is not installed there.
            UsageError: the taskset does not exist or rejects the arguments.
        """
        self._ensure_started(os.environ)
        return [
            Task(
                name=row["key"],
                seed=number,
                messages=[{"role": "user", "content": row["prompt"]}] if isinstance(row["prompt"], str) else [],
                ground_truth=row["answer"] or None,
                data={"idx": row["idx"], "name": row["name"]},
            )
            for number, row in enumerate(self._description["tasks"])
        ]

    async def __call__(self, task: Task, client: Client) -> Result:
        """Play a task and return its reward, scores and status."""
        number, future = next(self._numbers), Future[dict[str, Any]]()
        process = await asyncio.to_thread(self._ensure_started, os.environ | {_KEY_VARIABLE: client.api_key})
        seats = self._addresses(task, client)
        request = {"number": number, "key": task.name, "seats": seats, "model": client.model}
        self._waiting[number] = future
        self._ask(process, request | {"sampling": client.sampling})
        try:
            reply = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._ask(process, {"cancel": number})
            raise
        finally:
            self._waiting.pop(number, None)
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return await self._result(reply["episode"], seats)

    def close(self) -> None:
        """End the process and its children."""
        if self._process is not None:
            assert self._process.stdin is not None
            with suppress(OSError):
                self._process.stdin.close()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    # ------------------------------------------------------------ results

    def _addresses(self, task: Task, client: Client) -> dict[str, Any]:
        """Return the address of each agent: the rollout for the first, groups below it for the sub-agents."""
        first, *sub_agents = self._description["seats"]
        addresses: dict[str, Any] = {first: {"base_url": client.base_url, "headers": {}}}
        parent = urlsplit(client.base_url).path.removesuffix("/v1")
        for seat in sub_agents:
            root_path, seat_path = (
                f"/task/{quote(name, safe='')}/" for name in (str(task.name), f"{task.name} [{seat}]")
            )
            headers = {"X-Trajlake-Agent": seat, "X-Trajlake-Parent": parent}
            addresses[seat] = {"base_url": client.base_url.replace(root_path, seat_path, 1), "headers": headers}
        return addresses

    async def _result(self, episode: dict[str, Any], seats: dict[str, Any]) -> Result:
        """Convert verifiers' record to a result, and end the episodes of sub-agents by their traces."""
        root, *branches = read_episode(episode)
        for seat, at in list(seats.items())[1:]:
            for record in [record_of_agent for record_of_agent in branches if record_of_agent.agent_id == seat][:1]:
                await _end(at, record)
        return Result(
            reward=root.env_return,
            scores={score.scorer: score.value for score in root.scores if score.value is not None},
            status=root.status,
            stop_reason=root.stop_reason,
            error=root.error,
            ground_truth=root.ground_truth,
        )

    # ------------------------------------------------------------ its process

    def _set(self, key: str, text: str) -> None:
        value: Any = text
        with suppress(ValueError):
            value = json.loads(text)
        if key == "take":
            if not isinstance(value, int) or value < 1:
                raise UsageError(f"--agent verifiers:{self.name}: `take` is {text!r}; valid: a number of tasks")
            self._most = value
            return
        *places, last = key.split(".") if "." in key else ("taskset", key)
        config = self._config
        for section in places:
            config = config.setdefault(section, {})
        config[last] = value

    def _ensure_started(self, environment: "os._Environ[str] | dict[str, str]") -> "subprocess.Popen[str]":
        """Return the process after it has listed the tasks; start it if needed."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start(dict(environment))
            assert self._process is not None
            return self._process

    def _start(self, environment: dict[str, str]) -> None:
        config = json.dumps({"config": self._config, "most": self._most})
        folder = os.pathsep.join(part for part in (str(self._folder), environment.get("PYTHONPATH")) if part)
        process = subprocess.Popen(
            [self._python, "-P", str(_WORKER), config],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={_KEY_VARIABLE: "none"} | environment | {"PYTHONPATH": folder},
            start_new_session=True,
        )
        errors: list[str] = []
        listening = threading.Thread(target=self._gather, args=(process, errors), daemon=True)
        listening.start()
        assert process.stdout is not None
        line = process.stdout.readline()
        self._description = json.loads(line) if line else {}
        if "tasks" not in self._description:
            listening.join()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()
            stderr_text = "".join([*errors, self._description.get("error", "")])
            if "No module named 'verifiers'" in stderr_text:
                raise MissingExtraError(_INSTALL.format(python=self._python))
            why = self._description.get("error") or stderr_text[-_TAIL:].strip()
            raise UsageError(f"--agent verifiers:{self.name} cannot be loaded: {why}")
        self._process = process
        threading.Thread(target=self._hear, args=(process,), daemon=True).start()

    def _ask(self, process: "subprocess.Popen[str]", request: dict[str, Any]) -> None:
        assert process.stdin is not None
        with self._lock, suppress(OSError):  # the end of its output reports a dead process
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()

    def _hear(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        with process.stdout as pipe:
            for line in pipe:
                reply = json.loads(line)
                if (future := self._waiting.get(reply["number"])) is not None and not future.done():
                    future.set_result(reply)
        for future in list(self._waiting.values()):
            if not future.done():
                future.set_result({"error": f"the process that runs verifiers ended ({process.wait()})"})

    def _gather(self, process: "subprocess.Popen[str]", errors: list[str]) -> None:
        assert process.stderr is not None
        with process.stderr as pipe:
            for line in pipe:
                errors[:] = [*errors, line][-_LINES:]
                _log.info("verifiers: %s", line.rstrip())


def read_episode(episode: dict[str, Any]) -> list[EpisodeRecord]:
    """Convert verifiers' record of an episode: the root first, then branches and sub-agents, without tokens.

    Raises:
        ShapeError: the record is malformed.
    """
    file = Input(path=Path("verifiers"), run_id="verifiers")
    with Annotations(file) as later:
        return build_records(episode, file, later)


async def _end(at: dict[str, Any], record: EpisodeRecord) -> None:
    """End a sub-agent's episode at its address with the reward and status of its trace."""
    import aiohttp

    body = {
        "reward": record.env_return,
        "scores": [{"scorer": score.scorer, "value": score.value} for score in record.scores],
        "status": record.status,
        "stop_reason": record.stop_reason,
        "error": record.error,
        "closes": True,
    }
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{at['base_url']}/end", data=msgspec.json.encode(body), headers=at["headers"]) as answer,
    ):
        if answer.status != 200:
            _log.warning("the proxy refused the end of sub-agent %s: %s", record.agent_id, await answer.text())
