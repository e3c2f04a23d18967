"""Tasks of a verifiers taskset, played by its own runner before the recording proxy: `--agent verifiers:TASKSET`.

verifiers 0.4 keeps no token ids of what it plays against an endpoint; the proxy does. So the steps and tokens are the
proxy's, and what the rollout came to (reward, scores, status) is what verifiers' trace of it says, read as files of
traces are. The first agent of an environment plays under the rollout's own address; every other one is a sub-agent, an
episode of its own with the reward of its trace.

It runs in a process of its own (`verifiers_worker.py`), in whatever Python has verifiers installed.
"""

import asyncio
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
from lake.formats.verifiers.annotations import Annotations
from lake.formats.verifiers.traces import to_records
from lake.records import EpisodeRecord
from pipelines.collect.agents import Client, Result
from pipelines.collect.environments import Task

_WORKER = Path(__file__).with_name("verifiers_worker.py")
_KEY_VARIABLE = "TRAJLAKE_AGENT_KEY"
_INSTALL = (
    'verifiers is not installed in {python}: pip install "verifiers==0.4.0" in an environment of its own (it pins '
    "openai < 3), and name its Python by --agent-python"
)
_TAIL, _LINES = 2000, 40
"""Characters and lines of what it said last."""
_log = logging.getLogger("trajlake")


class VerifiersTaskset:
    """An agent: called with one of its tasks, it lets verifiers play it. Its process starts when it is first needed.

    Args:
        name: the taskset's module, or file, with arguments: `TASKSET?level=2&take=50&agent.max_turns=4`. One with dots
            is a place in the environment's config, `take` bounds the tasks, all others are the taskset's own.
        python: that has verifiers; None: this one.

    Raises:
        UsageError: the name has another form.
    """

    def __init__(self, name: str, *, python: str | None = None) -> None:
        place, _, query = name.partition("?")
        if not place:
            raise UsageError("--agent verifiers: names no taskset; valid: verifiers:TASKSET[?key=value]")
        file = Path(place).resolve()
        is_file = file.suffix == ".py"
        if is_file and not file.is_file():
            raise UsageError(f"--agent verifiers:{place}: there is no such file")
        self.name, self._folder = (file.stem, file.parent) if is_file else (place, Path.cwd())
        self._python = python or sys.executable
        self._config: dict[str, Any] = {"taskset": {"id": self.name}}
        self._most: int | None = None
        for key, text in parse_qsl(query, keep_blank_values=True):
            self._set(key, text)
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._said: dict[str, Any] = {}

    def tasks(self) -> list[Task]:
        """The taskset's tasks, in its order.

        Raises:
            MissingExtraError: verifiers is not installed there.
            UsageError: there is no such taskset, or it takes no such arguments.
        """
        self._started(os.environ)
        return [
            Task(
                name=row["key"],
                seed=number,
                messages=[{"role": "user", "content": row["prompt"]}] if isinstance(row["prompt"], str) else [],
                ground_truth=row["answer"] or None,
                data={"idx": row["idx"], "name": row["name"]},
            )
            for number, row in enumerate(self._said["tasks"])
        ]

    async def __call__(self, task: Task, client: Client) -> Result:
        """Play a task, and say what came of it."""
        number, future = next(self._numbers), Future[dict[str, Any]]()
        process = await asyncio.to_thread(self._started, os.environ | {_KEY_VARIABLE: client.api_key})
        seats = self._addresses(task, client)
        asked = {"number": number, "key": task.name, "seats": seats, "model": client.model}
        self._waiting[number] = future
        self._ask(process, asked | {"sampling": client.sampling})
        try:
            told = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._ask(process, {"cancel": number})
            raise
        finally:
            self._waiting.pop(number, None)
        if "error" in told:
            raise RuntimeError(told["error"])
        return await self._result(told["episode"], seats)

    def close(self) -> None:
        """End its process, and what that started."""
        if self._process is not None:
            assert self._process.stdin is not None
            with suppress(OSError):
                self._process.stdin.close()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    # ------------------------------------------------------------ what came of it

    def _addresses(self, task: Task, client: Client) -> dict[str, Any]:
        """Where each agent calls: the first one in the rollout itself, others in groups of their own below it."""
        first, *others = self._said["seats"]
        found: dict[str, Any] = {first: {"base_url": client.base_url, "headers": {}}}
        parent = urlsplit(client.base_url).path.removesuffix("/v1")
        for seat in others:
            own, other = (f"/task/{quote(name, safe='')}/" for name in (str(task.name), f"{task.name} [{seat}]"))
            headers = {"X-Trajlake-Agent": seat, "X-Trajlake-Parent": parent}
            found[seat] = {"base_url": client.base_url.replace(own, other, 1), "headers": headers}
        return found

    async def _result(self, episode: dict[str, Any], seats: dict[str, Any]) -> Result:
        """What verifiers' record says; sub-agents' episodes are ended with what their traces say."""
        root, *others = read_episode(episode)
        for seat, at in list(seats.items())[1:]:
            for record in [one for one in others if one.agent_id == seat][:1]:
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
        for place in places:
            config = config.setdefault(place, {})
        config[last] = value

    def _started(self, environment: "os._Environ[str] | dict[str, str]") -> "subprocess.Popen[str]":
        """The process, once it has said what the taskset holds."""
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
        self._said = json.loads(line) if line else {}
        if "tasks" not in self._said:
            listening.join()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()
            said = "".join([*errors, self._said.get("error", "")])
            if "No module named 'verifiers'" in said:
                raise MissingExtraError(_INSTALL.format(python=self._python))
            why = self._said.get("error") or said[-_TAIL:].strip()
            raise UsageError(f"--agent verifiers:{self.name} cannot be loaded: {why}")
        self._process = process
        threading.Thread(target=self._hear, args=(process,), daemon=True).start()

    def _ask(self, process: "subprocess.Popen[str]", asked: dict[str, Any]) -> None:
        assert process.stdin is not None
        with self._lock, suppress(OSError):  # a process that has ended is heard of by its output
            process.stdin.write(json.dumps(asked) + "\n")
            process.stdin.flush()

    def _hear(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        with process.stdout as pipe:
            for line in pipe:
                told = json.loads(line)
                if (future := self._waiting.get(told["number"])) is not None and not future.done():
                    future.set_result(told)
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
    """Verifiers' record of an episode as ours: the root first, then its branches and sub-agents, without tokens.

    Raises:
        ShapeError: it is none.
    """
    file = Input(path=Path("verifiers"), run_id="verifiers")
    with Annotations(file) as later:
        return to_records(episode, file, later)


async def _end(at: dict[str, Any], record: EpisodeRecord) -> None:
    """End the episode of a sub-agent at its address, as its trace says."""
    import aiohttp

    said = {
        "reward": record.env_return,
        "scores": [{"scorer": score.scorer, "value": score.value} for score in record.scores],
        "status": record.status,
        "stop_reason": record.stop_reason,
        "error": record.error,
        "closes": True,
    }
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{at['base_url']}/end", data=msgspec.json.encode(said), headers=at["headers"]) as answer,
    ):
        if answer.status != 200:
            _log.warning("the end of sub-agent %s was not taken: %s", record.agent_id, await answer.text())
