"""Environments behind an OpenEnv server, by its generic client over a websocket; one session per episode.

An OpenEnv environment takes and gives objects with fields of its own. The text of an answer becomes one field of the
action: the only one that its schema has, or the one named; with several, the answer is read as a JSON object. What is
shown is the observation's only field, or the one named, else the observation as JSON. OpenEnv says `done` and never
that a limit was reached, so only `max_steps`, which is kept here, truncates.

A client that has lost its connection opens a new session at the next call, in which nothing was begun: that is found
and fails the episode.

Facts: https://github.com/huggingface/OpenEnv, version 0.10.0 (`core/env_client.py`, `core/env_server/http_server.py`).
"""

import json
from collections.abc import Callable, Mapping
from typing import Any
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

from pydantic import BaseModel, Field

from lake.errors import MissingExtraError, UsageError
from lake.settings import validated
from pipelines.collect.environments import Outcome, Task
from pipelines.collect.policies import Message

_SECONDS = 30.0


class OpenEnvSettings(BaseModel, frozen=True, extra="allow"):
    """Settings of `--env openenv:URL`; any other `--env-arg` is an argument of the environment's reset."""

    action: str | None = None
    """Field of the action that takes the text of an answer."""
    observation: str | None = None
    """Field of the observation that is shown."""
    max_steps: int = Field(default=100, ge=1)
    """Answers after which an episode is cut off, invalid ones included."""
    prompt: str | None = None
    """Opens the conversation, before the first observation. Left out: nothing, or what an action looks like as JSON."""


def maker(what: str, arguments: Mapping[str, Any]) -> Callable[[], "OpenEnv"]:
    """Makes environments of a server.

    Raises:
        MissingExtraError: openenv is not installed.
        UsageError: nothing answers at the URL, or there are no such fields.
    """
    settings = validated(OpenEnvSettings, arguments, "--env-arg of openenv: ")
    try:
        from openenv.core.generic_client import GenericEnvClient
    except ImportError as error:
        raise MissingExtraError('the package openenv is not installed: pip install "trajlake[openenv]"') from error
    url = what.rstrip("/")
    schema = _asked(url, "/schema")
    fields = [name for name in schema["action"].get("properties", {}) if name != "metadata"]
    shown = [name for name in schema["observation"].get("properties", {}) if name not in ("done", "reward", "metadata")]
    for option, name, valid in (("action", settings.action, fields), ("observation", settings.observation, shown)):
        if name is not None and valid and name not in valid:
            raise UsageError(f"--env-arg {option}={name}: {what} has no such field; valid: {', '.join(valid)}")
    field = settings.action or (fields[0] if len(fields) == 1 else None)
    name = f"openenv:{_asked(url, '/metadata').get('name') or url}"
    request = "" if field else f"Answer with a JSON object of the schema {json.dumps(schema['action'], sort_keys=True)}"
    prompt = settings.prompt if settings.prompt is not None else request
    return lambda: OpenEnv(GenericEnvClient(base_url=url), name, settings, field, prompt)


def _asked(url: str, path: str) -> dict[str, Any]:
    try:
        # Environments are near: what the shell says of proxies is for the world outside.
        with build_opener(ProxyHandler({})).open(url + path, timeout=_SECONDS) as answer:
            found: dict[str, Any] = json.load(answer)
    except (URLError, OSError, ValueError) as error:
        msg = f"--env openenv:{url}: no OpenEnv server answers there ({error}); start it, and give its http:// address"
        raise UsageError(msg) from error
    return found


class OpenEnv:
    """One session of a server."""

    def __init__(self, client: Any, name: str, settings: OpenEnvSettings, field: str | None, prompt: str) -> None:
        self.name = name
        given = settings.model_extra or {}
        self.split = given["split"] if isinstance(given.get("split"), str) else None
        self._arguments = given
        self._client = client
        self._settings = settings
        self._field = field
        self._prompt = prompt
        self._connection: Any = None
        self._taken = 0

    async def reset(self, task: Task) -> Outcome:
        """Begin with the task's seed, in a session of its own."""
        self._taken = 0
        result = await self._client.reset(seed=task.seed, **self._arguments)
        self._connection = self._client._ws
        opening = "\n\n".join(part for part in (self._prompt, self._shown(result.observation)) if part)
        return Outcome(
            messages=[{"role": "user", "content": opening}],
            task_id=f"{self.name}/{task.seed}",
            terminated=bool(result.done),
        )

    async def step(self, action: Message) -> Outcome:
        """Take an answer; one that the server's schema refuses is told.

        Raises:
            ConnectionError: the session is lost.
        """
        self._taken += 1
        is_late = self._taken >= self._settings.max_steps
        given = self._read(str(action.get("content") or ""))
        fault = "it is not a JSON object"
        if given is not None:
            try:
                result = await self._client.step(given)
            except RuntimeError as error:  # what the client makes of any error that the server tells
                self._require_session()
                if "VALIDATION_ERROR" not in str(error):
                    raise
                given, fault = None, "it does not fit the schema of an action"
            self._require_session()
        if given is None:
            refused = f"That is not an action: {fault}."
            return Outcome(
                messages=[{"role": "user", "content": refused}], is_action_valid=False, is_error=True, truncated=is_late
            )
        return Outcome(
            messages=[{"role": "user", "content": self._shown(result.observation)}],
            reward=None if result.reward is None else float(result.reward),
            terminated=bool(result.done),
            truncated=is_late and not result.done,
            is_action_valid=True,
            extra={"metadata": result.metadata} if result.metadata else None,
        )

    async def close(self) -> None:
        """End the session."""
        await self._client.close()

    def _require_session(self) -> None:
        if self._client._ws is not self._connection:
            raise ConnectionError("the connection to the server was lost, and with it the session")

    def _read(self, answer: str) -> dict[str, Any] | None:
        if self._field is not None:
            return {self._field: answer.strip()}
        try:
            given = json.loads(answer)
        except ValueError:
            return None
        return given if isinstance(given, dict) else None

    def _shown(self, observation: dict[str, Any]) -> str:
        if self._settings.observation is not None:
            observation = {self._settings.observation: observation.get(self._settings.observation)}
        values = {name: value for name, value in observation.items() if name not in ("done", "reward", "metadata")}
        only = next(iter(values.values())) if len(values) == 1 else values
        return only if isinstance(only, str) else json.dumps(only, sort_keys=True)
