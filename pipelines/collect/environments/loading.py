"""Load, check and wrap the environments that `--env` names.

    house                          the text house of the demo
    FILE.py:make                   a function in a file (`trajlake template environment FILE.py`)
    package.module:make            a function in a package
    gymnasium:FrozenLake-v1        adapters of packages, each an extra of this one
    textworld-express:coin
    reasoning-gym:DATASET
    openenv:http://127.0.0.1:8000

`--env-arg key=value` sets arguments of the function, or the adapter's settings.

User code is checked where it fails: the object that `make()` returns, and each call. Without checks, a wrong type would
surface later as an obscure fault in the recorder or in a reward. Messages name the line of the user's file.

A system prompt can precede the first messages of any environment. It is part of the episode, so the lake shows it. It
is merged with the environment's own system message, because many chat templates accept only one.
"""

import inspect
import json
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from lake.errors import TrajlakeError, UsageError
from lake.formats.base.rows import ShapeError
from lake.formats.chat.messages import check_message
from lake.records import format_record
from lake.settings import validate
from pipelines.collect import user_code
from pipelines.collect.environments import Environment, Outcome, Task
from pipelines.collect.environments.games import GameEnvironment, TextGame
from pipelines.collect.policies import Message
from pipelines.collect.user_code import (
    FAULTS,
    InlineEnvironment,
    ThreadEnvironment,
    close_environment,
    describe_fault,
    is_cancellation,
)

_STRICT_JSON = json.JSONEncoder(allow_nan=False, ensure_ascii=False)


class EnvironmentFaultError(TrajlakeError, RuntimeError):
    """An environment raised, or returned an invalid outcome. The episode fails with this text."""


def build_factory(make: Callable[[], Any], source: str, file: Path | None) -> Callable[[], Environment]:
    """Build a factory of environments from the user's `make`.

    The first environment is made now, to detect its kind and to report faults before anything is played.

    Args:
        make: returns an Environment, a synchronous one, or a TextGame.
        source: name in messages: `FILE.py:make`.
        file: the user's file, for line numbers in messages.

    Raises:
        UsageError: make() fails, or returns something else.
    """
    first = _call_factory(make, source, file)
    kind = _kind(first, source)
    name = _text(first, "name", source) or source
    split = _text(first, "split", source)
    unused = [first]

    def next_object() -> Any:
        return unused.pop() if unused else _call_factory(make, source, file)

    def environment() -> Environment:
        inner: Any
        if kind == "game":
            inner = GameEnvironment(next_object())
        elif kind == "async":
            inner = next_object()
        elif kind == "inline":
            inner = InlineEnvironment(next_object(), name=name, split=split)
        else:
            inner = ThreadEnvironment(lambda: _call_factory(make, source, file), name=name, split=split)
        return _CheckedEnvironment(inner, name=name, split=split, source=source, file=file)

    if kind == "thread":
        try:
            close_environment(first)  # it was created in this thread and would run in another
        except FAULTS as error:
            raise UsageError(f"{source}: close failed: {describe_fault(error, file)}") from error
    return environment


def _call_factory(make: Callable[[], Any], source: str, file: Path | None) -> Any:
    try:
        return make()
    except TrajlakeError:
        raise
    except FAULTS as error:
        raise UsageError(f"{source} failed: {describe_fault(error, file)}") from error


def _kind(environment: Any, source: str) -> str:
    """Detect the kind of an environment: game, async, inline or thread."""
    subject = f"{source} gave {_a(environment)}"
    if inspect.iscoroutine(environment):
        environment.close()
        raise UsageError(f"{source} is a coroutine function; write `def`, and move slow work into `reset`")
    missing = [method for method in ("reset", "step") if not callable(getattr(environment, method, None))]
    if missing:
        valid = "valid: an object with reset(task) and step(action), or a text game with reset(seed) and step(action)"
        raise UsageError(f"{subject}, which has no {' and no '.join(missing)}; {valid}")
    are_async = {method: inspect.iscoroutinefunction(getattr(environment, method)) for method in ("reset", "step")}
    for method, is_async in are_async.items():
        count = len(_parameters(environment, method))
        if count != 1:
            raise UsageError(f"{subject}, whose {method} takes {count} arguments; valid: one, and others with defaults")
        if is_async != are_async["step"]:
            raise UsageError(f"{subject}, of whose reset and step one is `async def`; valid: both, or neither")
    if _parameters(environment, "reset") == ["seed"]:
        if are_async["step"]:
            raise UsageError(f"{subject}, a text game with `async def`; write `def`, or reset(task)")
        return "game"
    if are_async["step"]:
        return "async"
    return "inline" if getattr(environment, "runs_inline", False) else "thread"


def _parameters(environment: Any, method: str) -> list[str]:
    """Return the names of required positional arguments."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(getattr(environment, method)).parameters.values()
    return [
        parameter.name
        for parameter in parameters
        if parameter.kind in positional and parameter.default is inspect.Parameter.empty
    ]


def _text(environment: Any, attribute: str, source: str) -> str | None:
    value = getattr(environment, attribute, None)
    if value is not None and not isinstance(value, str):
        raise UsageError(f"{source}: its environment's `{attribute}` is {_a(value)}; valid: a text, or None")
    return value


class _CheckedEnvironment:
    """Wraps an environment, reports its faults with line numbers, and checks its outcomes."""

    def __init__(self, inner: Any, *, name: str, split: str | None, source: str, file: Path | None) -> None:
        self.name = name
        self.split = split
        self._inner = inner
        self._source = source
        self._file = file

    async def reset(self, task: Task) -> Outcome:
        """Start the task. Raises EnvironmentFaultError."""
        return self._check_outcome("reset", await self._guard("reset", self._inner.reset(task)))

    async def step(self, action: Message) -> Outcome:
        """Take the assistant's message. Raises EnvironmentFaultError."""
        return self._check_outcome("step", await self._guard("step", self._inner.step(action)))

    async def close(self) -> None:
        """Close the environment, if it has anything to close. Raises EnvironmentFaultError."""
        close = getattr(self._inner, "close", None)
        if close is not None:
            closing = close()
            if inspect.isawaitable(closing):
                await self._guard("close", closing)

    async def _guard(self, method: str, call: Awaitable[Any]) -> Any:
        try:
            return await call
        except TrajlakeError:
            raise
        except FAULTS as error:
            if is_cancellation(error):
                raise
            raise EnvironmentFaultError(
                f"{self._source}: {method} failed: {describe_fault(error, self._file)}"
            ) from error

    def _check_outcome(self, method: str, outcome: Any) -> Outcome:
        if wrong := describe_outcome_fault(outcome, is_opening=method == "reset"):
            raise EnvironmentFaultError(f"{self._source}: {method} gave {wrong}")
        return cast("Outcome", outcome)


def describe_outcome_fault(outcome: object, *, is_opening: bool = False) -> str | None:
    """Return what is wrong with an outcome and what is valid, or None.

    The lake would refuse the complete episode for such a fault.
    """
    if not isinstance(outcome, Outcome):
        return f"{_a(outcome)}; valid: Outcome(messages=[...], reward=..., terminated=...)"
    if outcome.reward is not None and not _is_finite(outcome.reward):
        return f"the reward {format_record(outcome.reward)}; valid: a finite number, or None if not rewarded"
    if is_opening and outcome.reward:
        return f"the reward {outcome.reward:g}, before any action; valid: rewards from step"
    return (
        _wrong_flags(outcome) or _wrong_documents(outcome) or _wrong_messages(outcome.messages, is_opening=is_opening)
    )


def _wrong_flags(outcome: Outcome) -> str | None:
    for flag, value in {"terminated": outcome.terminated, "truncated": outcome.truncated}.items():
        if not isinstance(value, bool):
            return f"{flag} {format_record(value)}; valid: True or False"
    if outcome.terminated and outcome.truncated:
        return "both terminated and truncated; valid: terminated if the task is over, else truncated"
    for flag, flag_value in {"is_action_valid": outcome.is_action_valid, "is_error": outcome.is_error}.items():
        if not isinstance(flag_value, bool | None):
            return f"{flag} {format_record(flag_value)}; valid: True, False, or None if unknown"
    return None


def _wrong_documents(outcome: Outcome) -> str | None:
    for name in ("tools", "ground_truth", "extra", "task_id"):
        part = getattr(outcome, name)
        if part is not None and (problem := _not_json(part)):
            return f"`{name}` that is not JSON ({problem}); valid: JSON values with finite numbers and Unicode text"
    if outcome.extra is not None and not isinstance(outcome.extra, dict):
        return f"`extra` that is {_a(outcome.extra)}; valid: a dict"
    if outcome.tools is not None and not (
        isinstance(outcome.tools, list) and all(isinstance(t, dict) for t in outcome.tools)
    ):
        return f"`tools` that are {_a(outcome.tools)}; valid: a list of schemas, as in an OpenAI request"
    if not isinstance(outcome.task_id, str | None):
        return f"`task_id` that is {_a(outcome.task_id)}; valid: a text, or None"
    return None


def _wrong_messages(messages: Any, *, is_opening: bool) -> str | None:
    valid = 'valid: a list of chat messages, as [{"role": "user", "content": "..."}]'
    if not isinstance(messages, list):
        return f"messages that are {_a(messages)}; {valid}"
    if is_opening and not messages:
        return "no messages; valid: at least one, as the policy's input"
    for index, message in enumerate(messages):
        try:
            check_message(message, f"messages[{index}]")
        except (ShapeError, TypeError) as error:
            return f"{error}; {valid}"
        if problem := _not_json(message):
            return f"`messages[{index}]` that is not JSON ({problem}); valid: JSON values with Unicode text"
    return None


def _is_finite(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer too large for float
        return False


def _not_json(value: Any) -> str | None:
    """Return why a value cannot be written as JSON in UTF-8 (no lone surrogates), or None."""
    try:
        _STRICT_JSON.encode(value).encode()
    except (TypeError, ValueError, RecursionError) as error:
        return str(error)
    return None


def _a(value: Any) -> str:
    """Describe a value by its type."""
    return "None" if value is None else f"an object of type {type(value).__name__}"


ADAPTERS = {
    "gymnasium": ("pipelines.collect.environments.gymnasium_text", "FrozenLake-v1"),
    "openenv": ("pipelines.collect.environments.openenv", "http://127.0.0.1:8000"),
    "reasoning-gym": ("pipelines.collect.environments.reasoning_gym", "leg_counting"),
    "textworld-express": ("pipelines.collect.environments.textworld_express", "coin"),
}
"""Prefix of `--env` -> module with `build_maker(name, arguments)`, and an example of a name."""


def load_environment(name: str, arguments: Mapping[str, Any]) -> Callable[[], Environment]:
    """Return a function that makes an environment of `--env` for each rollout; see the module docstring for `name`.

    Packages are imported, options checked and one environment made now, so that faults are reported before the first
    rollout. This takes tens of seconds for some packages.

    Raises:
        UsageError: the environment does not exist, or rejects the options.
        MissingExtraError: a package or its runtime is not installed.
    """
    kind, _, argument = name.partition(":")
    if name == "house":
        return build_factory(load_house(arguments), name, None)
    if kind in ADAPTERS:
        module, example = ADAPTERS[kind]
        if not argument:
            raise UsageError(f"--env {name}: the name is missing; for example {kind}:{example}")
        return build_factory(import_module(module).build_maker(argument, arguments), name, None)
    if ":" not in name:
        adapters = ", ".join(f"{kind}:{example}" for kind, (_, example) in ADAPTERS.items())
        raise UsageError(f"--env {name}: valid: house, FILE.py:make, package.module:make, {adapters}")
    factory = user_code.load_target(name, "--env")
    return build_factory(_bind_arguments(factory, arguments), name, factory.file)


def load_house(arguments: Mapping[str, Any]) -> Callable[[], TextGame]:
    """Return a function that makes games of the text house. Raises UsageError: an argument is wrong."""
    from pipelines.collect.environments.house import House, HouseConfig

    return partial(House, validate(HouseConfig, arguments, "--env-arg of house: "))


def _bind_arguments(factory: user_code.UserObject, arguments: Mapping[str, Any]) -> Callable[[], Any]:
    """Return the user's function with its arguments bound."""
    if not callable(factory.value):
        msg = (
            f"--env {factory.target} is a {type(factory.value).__name__}; valid: a function or class without arguments"
        )
        raise UsageError(msg)
    signature = inspect.signature(factory.value)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        takes = ", ".join(str(parameter) for parameter in signature.parameters.values()) or "none"
        raise UsageError(f"--env-arg of {factory.target}: {error}; it takes: {takes}") from error
    return partial(factory.value, **arguments)


class Prompt:
    """The environment of a task that is a single prompt with one answer.

    It gives no reward. Reward functions score the answer later, in the sandbox (`trajlake score`).
    """

    name = "prompts"
    split = None

    async def reset(self, task: Task) -> Outcome:
        """Show the task's messages. Raises UsageError: it has none."""
        if not task.messages:
            raise UsageError(f"the task {task.name or task.seed} has no messages to show; valid: at least one")
        return Outcome(messages=task.messages, task_id=task.name)

    async def step(self, action: Message) -> Outcome:
        """End the episode after any answer."""
        return Outcome(messages=[], terminated=True)

    async def close(self) -> None:
        """Do nothing: a prompt holds no resources."""


class SystemPrompted:
    """Wraps an environment and puts a system prompt before its first messages."""

    def __init__(self, inner: Environment, text: str) -> None:
        self._inner, self._text = inner, text

    @property
    def name(self) -> str:
        """The inner environment's name: its rewards are comparable across prompts."""
        return self._inner.name

    @property
    def split(self) -> str | None:
        """The inner environment's split."""
        return self._inner.split

    async def reset(self, task: Task) -> Outcome:
        """Start the task, with the prompt first."""
        first = await self._inner.reset(task)
        return replace(first, messages=with_system_prompt(first.messages, self._text))

    async def step(self, action: Message) -> Outcome:
        """Pass the action on."""
        return await self._inner.step(action)

    async def close(self) -> None:
        """Close the environment."""
        await self._inner.close()


def with_system_prompt(messages: list[Message], text: str) -> list[Message]:
    """Put a system prompt before messages; merge it with a leading system message."""
    if not messages or messages[0].get("role") != "system":
        return [{"role": "system", "content": text}, *messages]
    first, *following = messages
    content = first.get("content")
    if isinstance(content, list):
        return [{**first, "content": [{"type": "text", "text": text}, *content]}, *following]
    return [{**first, "content": f"{text}\n\n{content}" if content else text}, *following]


def add_system_prompt(make: Callable[[], Environment], text: str | None) -> Callable[[], Environment]:
    """Wrap a factory of environments with a system prompt, if there is one."""
    return make if text is None else lambda: SystemPrompted(make(), text)


def read_system_prompt(path: str | Path) -> str:
    """Read a system prompt from a file. Raises UsageError: unreadable or empty."""
    try:
        text = Path(path).read_text("utf-8").strip()
    except (OSError, ValueError) as error:
        raise UsageError(f"the system prompt {path} cannot be read: {error}") from error
    if not text:
        raise UsageError(f"the system prompt {path} is empty; write the policy's instructions into it")
    return text
