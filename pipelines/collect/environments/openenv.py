"""Environments behind an OpenEnv server, by its generic client over a websocket; one session per episode.

An OpenEnv environment exchanges objects with its own fields. The text of an answer becomes one field of the action: the
only field of its schema, or the configured one. With several fields, the answer is parsed as a JSON object. The policy
sees the only field of the observation, or the configured one, else the observation as JSON. OpenEnv reports `done` but
no limits, so only `max_steps` here truncates.

A client that lost its connection opens a new session at the next call, without a started episode. The adapter detects
this and fails the episode.

Facts: https://github.com/huggingface/OpenEnv, version 0.10.0 (`core/env_client.py`, `core/env_server/http_server.py`).
"""

import json
from collections.abc import Callable, Mapping
from typing import Any
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

from pydantic import BaseModel, Field

from lake.errors import MissingExtraError, UsageError
from lake.settings import validate
from pipelines.collect.environments import Outcome, Task
from pipelines.collect.policies import Message

_SECONDS = 30.0


class OpenEnvSettings(BaseModel, frozen=True, extra="allow"):
    """Settings of `--env openenv:URL`; any other `--env-arg` is an argument of the environment's reset."""

    action: str | None = None
    """Field of the action for the text of an answer."""
    observation: str | None = None
    """Field of the observation to show."""
    max_steps: int = Field(default=100, ge=1)
    """Maximum answers of an episode, invalid ones included."""
    prompt: str | None = None
    """Text before the first observation. Default: none, or the JSON schema of an action."""


def build_maker(address: str, arguments: Mapping[str, Any]) -> Callable[[], "OpenEnv"]:
    """Return a function that makes environments of a server.

    Raises:
        MissingExtraError: openenv is not installed.
        UsageError: nothing answers at the URL, or a field does not exist.
    """
    settings = validate(OpenEnvSettings, arguments, "--env-arg of openenv: ")
    try:
        from openenv.core.generic_client import GenericEnvClient
    except ImportError as error:
        raise MissingExtraError('the package openenv is not installed: pip install "trajlake[openenv]"') from error
    url = address.rstrip("/")
    schema = _read_page(url, "/schema")
    fields = [name for name in schema["action"].get("properties", {}) if name != "metadata"]
    observation_fields = [
        name for name in schema["observation"].get("properties", {}) if name not in ("done", "reward", "metadata")
    ]
    for option, name, valid in (
        ("action", settings.action, fields),
        ("observation", settings.observation, observation_fields),
    ):
        if name is not None and valid and name not in valid:
            raise UsageError(f"--env-arg {option}={name}: {address} has no such field; valid: {', '.join(valid)}")
    field = settings.action or (fields[0] if len(fields) == 1 else None)
    name = f"openenv:{_read_page(url, '/metadata').get('name') or url}"
    request = "" if field else f"Answer with a JSON object of the schema {json.dumps(schema['action'], sort_keys=True)}"
    prompt = settings.prompt if settings.prompt is not None else request
    return lambda: OpenEnv(GenericEnvClient(base_url=url), name, settings, field, prompt)


def _read_page(url: str, path: str) -> dict[str, Any]:
    try:
        # Environments run locally, so ignore the shell's proxy settings.
        with build_opener(ProxyHandler({})).open(url + path, timeout=_SECONDS) as answer:
            page: dict[str, Any] = json.load(answer)
    except (URLError, OSError, ValueError) as error:
        msg = f"--env openenv:{url}: no OpenEnv server answers there ({error}); start it, and pass its http:// address"
        raise UsageError(msg) from error
    return page


class OpenEnv:
    """One session of a server."""

    def __init__(self, client: Any, name: str, settings: OpenEnvSettings, field: str | None, prompt: str) -> None:
        self.name = name
        arguments = settings.model_extra or {}
        self.split = arguments["split"] if isinstance(arguments.get("split"), str) else None
        self._arguments = arguments
        self._client = client
        self._settings = settings
        self._field = field
        self._prompt = prompt
        self._connection: Any = None
        self._step_count = 0

    async def reset(self, task: Task) -> Outcome:
        """Start with the task's seed, in a new session."""
        self._step_count = 0
        result = await self._client.reset(seed=task.seed, **self._arguments)
        self._connection = self._client._ws
        opening = "\n\n".join(part for part in (self._prompt, self._format_observation(result.observation)) if part)
        return Outcome(
            messages=[{"role": "user", "content": opening}],
            task_id=f"{self.name}/{task.seed}",
            terminated=bool(result.done),
        )

    async def step(self, action: Message) -> Outcome:
        """Take an answer; explain one that the server's schema refuses.

        Raises:
            ConnectionError: the session is lost.
        """
        self._step_count += 1
        is_late = self._step_count >= self._settings.max_steps
        action_fields = self._read(str(action.get("content") or ""))
        fault = "it is not a JSON object"
        if action_fields is not None:
            try:
                result = await self._client.step(action_fields)
            except RuntimeError as error:  # the client raises it for every server error
                self._require_session()
                if "VALIDATION_ERROR" not in str(error):
                    raise
                action_fields, fault = None, "it does not fit the schema of an action"
            self._require_session()
        if action_fields is None:
            refused = f"That is not an action: {fault}."
            return Outcome(
                messages=[{"role": "user", "content": refused}], is_action_valid=False, is_error=True, truncated=is_late
            )
        return Outcome(
            messages=[{"role": "user", "content": self._format_observation(result.observation)}],
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
            action = json.loads(answer)
        except ValueError:
            return None
        return action if isinstance(action, dict) else None

    def _format_observation(self, observation: dict[str, Any]) -> str:
        if self._settings.observation is not None:
            observation = {self._settings.observation: observation.get(self._settings.observation)}
        values = {name: value for name, value in observation.items() if name not in ("done", "reward", "metadata")}
        only = next(iter(values.values())) if len(values) == 1 else values
        return only if isinstance(only, str) else json.dumps(only, sort_keys=True)
