"""What an environment's author may get wrong, told where it is seen: the shape of what `make()` gave, and each call.

An environment is somebody's code, often written a minute ago. A result of the wrong type would otherwise show up as an
obscure fault in the recorder, or worse, in a reward; an exception would name no line of theirs.
"""

import inspect
import json
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

from lake.errors import TrajlakeError, UsageError
from lake.formats.base.rows import ShapeError
from lake.formats.chat.messages import checked
from lake.records import shown
from pipelines.collect.environments import Environment, Outcome, Task
from pipelines.collect.environments.games import GameEnvironment
from pipelines.collect.environments.threads import Inline, InThread, close
from pipelines.collect.policies import Message
from pipelines.collect.user_code import FAULTS, fault, is_cancellation


class EnvironmentFaultError(TrajlakeError, RuntimeError):
    """An environment raised, or answered what is no outcome. The episode fails with this text."""


def environments_of(make: Callable[[], Any], source: str, file: Path | None) -> Callable[[], Environment]:
    """A factory of environments, of whatever kind `make` makes.

    The first one is made now: to see what it is, and so that what is wrong is told before anything is played.

    Args:
        make: gives an Environment, a synchronous one, or a TextGame.
        source: what it is called in messages: `FILE.py:make`.
        file: of the user's code, whose lines are told.

    Raises:
        UsageError: make() fails, or gives none of the three.
    """
    first = _called(make, source, file)
    kind = _kind(first, source)
    name = _text(first, "name", source) or source
    split = _text(first, "split", source)
    unused = [first]

    def made() -> Any:
        return unused.pop() if unused else _called(make, source, file)

    def environment() -> Environment:
        inner: Any
        if kind == "game":
            inner = GameEnvironment(made())
        elif kind == "async":
            inner = made()
        elif kind == "inline":
            inner = Inline(made(), name=name, split=split)
        else:
            inner = InThread(lambda: _called(make, source, file), name=name, split=split)
        return _Checked(inner, name=name, split=split, source=source, file=file)

    if kind == "thread":
        try:
            close(first)  # it was made in this thread, and would be played in another one
        except FAULTS as error:
            raise UsageError(f"{source}: close failed: {fault(error, file)}") from error
    return environment


def _called(make: Callable[[], Any], source: str, file: Path | None) -> Any:
    try:
        return make()
    except TrajlakeError:
        raise
    except FAULTS as error:
        raise UsageError(f"{source} failed: {fault(error, file)}") from error


def _kind(made: Any, source: str) -> str:
    """game, async, inline or thread."""
    what = f"{source} gave {_a(made)}"
    if inspect.iscoroutine(made):
        made.close()
        raise UsageError(f"{source} is a coroutine function; write `def`, and do what takes long in `reset`")
    missing = [method for method in ("reset", "step") if not callable(getattr(made, method, None))]
    if missing:
        valid = "valid: an object with reset(task) and step(action), or a text game with reset(seed) and step(action)"
        raise UsageError(f"{what}, which has no {' and no '.join(missing)}; {valid}")
    are_async = {method: inspect.iscoroutinefunction(getattr(made, method)) for method in ("reset", "step")}
    for method, is_async in are_async.items():
        count = len(_parameters(made, method))
        if count != 1:
            raise UsageError(f"{what}, whose {method} takes {count} arguments; valid: one, and others with defaults")
        if is_async != are_async["step"]:
            raise UsageError(f"{what}, of whose reset and step one is `async def`; valid: both, or neither")
    if _parameters(made, "reset") == ["seed"]:
        if are_async["step"]:
            raise UsageError(f"{what}, a text game with `async def`; write `def`, or reset(task)")
        return "game"
    if are_async["step"]:
        return "async"
    return "inline" if getattr(made, "runs_inline", False) else "thread"


def _parameters(made: Any, method: str) -> list[str]:
    """Names of the arguments that have to be given by position."""
    wanted = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(getattr(made, method)).parameters.values()
    return [one.name for one in parameters if one.kind in wanted and one.default is inspect.Parameter.empty]


def _text(made: Any, attribute: str, source: str) -> str | None:
    value = getattr(made, attribute, None)
    if value is not None and not isinstance(value, str):
        raise UsageError(f"{source}: its environment's `{attribute}` is {_a(value)}; valid: a text, or None")
    return value


class _Checked:
    """An environment whose faults are told by the line, and whose outcomes are outcomes."""

    def __init__(self, inner: Any, *, name: str, split: str | None, source: str, file: Path | None) -> None:
        self.name = name
        self.split = split
        self._inner = inner
        self._source = source
        self._file = file

    async def reset(self, task: Task) -> Outcome:
        """Begin the task. Raises EnvironmentFaultError."""
        return self._outcome("reset", await self._guarded("reset", self._inner.reset(task)))

    async def step(self, action: Message) -> Outcome:
        """Take the assistant's message. Raises EnvironmentFaultError."""
        return self._outcome("step", await self._guarded("step", self._inner.step(action)))

    async def close(self) -> None:
        """Close the environment, if it has anything to close. Raises EnvironmentFaultError."""
        close = getattr(self._inner, "close", None)
        if close is not None:
            closing = close()
            if inspect.isawaitable(closing):
                await self._guarded("close", closing)

    async def _guarded(self, method: str, call: Awaitable[Any]) -> Any:
        try:
            return await call
        except TrajlakeError:
            raise
        except FAULTS as error:
            if is_cancellation(error):
                raise
            raise EnvironmentFaultError(f"{self._source}: {method} failed: {fault(error, self._file)}") from error

    def _outcome(self, method: str, given: Any) -> Outcome:
        if wrong := wrong_outcome(given, is_opening=method == "reset"):
            raise EnvironmentFaultError(f"{self._source}: {method} gave {wrong}")
        return cast("Outcome", given)


def wrong_outcome(given: object, *, is_opening: bool = False) -> str | None:
    """What is wrong with what an environment answered, and what is valid; None if nothing is.

    The lake would refuse the whole episode for it.
    """
    if not isinstance(given, Outcome):
        return f"{_a(given)}; valid: Outcome(messages=[...], reward=..., terminated=...)"
    if given.reward is not None and not _is_finite(given.reward):
        return f"the reward {shown(given.reward)}; valid: a finite number, or None where nothing rewarded it"
    if is_opening and given.reward:
        return f"the reward {given.reward:g}, and no action led there; valid: rewards from step"
    return _wrong_flags(given) or _wrong_documents(given) or _wrong_messages(given.messages, is_opening=is_opening)


def _wrong_flags(given: Outcome) -> str | None:
    for flag, value in {"terminated": given.terminated, "truncated": given.truncated}.items():
        if not isinstance(value, bool):
            return f"{flag} {shown(value)}; valid: True or False"
    if given.terminated and given.truncated:
        return "both terminated and truncated; valid: terminated if the task is over, else truncated"
    for flag, known in {"is_action_valid": given.is_action_valid, "is_error": given.is_error}.items():
        if not isinstance(known, bool | None):
            return f"{flag} {shown(known)}; valid: True, False, or None where it does not say"
    return None


def _wrong_documents(given: Outcome) -> str | None:
    parts = {"tools": given.tools, "ground_truth": given.ground_truth, "extra": given.extra, "task_id": given.task_id}
    for name, part in parts.items():
        if part is not None and (problem := _not_json(part)):
            return f"`{name}` that is no JSON ({problem}); valid: what JSON can say, numbers finite and text Unicode"
    if given.extra is not None and not isinstance(given.extra, dict):
        return f"`extra` that is {_a(given.extra)}; valid: a dict"
    if given.tools is not None and not (
        isinstance(given.tools, list) and all(isinstance(t, dict) for t in given.tools)
    ):
        return f"`tools` that are {_a(given.tools)}; valid: a list of schemas, as in an OpenAI request"
    if not isinstance(given.task_id, str | None):
        return f"`task_id` that is {_a(given.task_id)}; valid: a text, or None"
    return None


def _wrong_messages(messages: Any, *, is_opening: bool) -> str | None:
    valid = 'valid: a list of chat messages, as [{"role": "user", "content": "..."}]'
    if not isinstance(messages, list):
        return f"messages that are {_a(messages)}; {valid}"
    if is_opening and not messages:
        return "no messages; valid: at least one, since a policy has to be shown something"
    for index, message in enumerate(messages):
        try:
            checked(message, f"messages[{index}]")
        except (ShapeError, TypeError) as error:
            return f"{error}; {valid}"
        if problem := _not_json(message):
            return f"`messages[{index}]` that is no JSON ({problem}); valid: what JSON can say, its text Unicode"
    return None


def _is_finite(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float holds
        return False


def _not_json(value: Any) -> str | None:
    """Why a value cannot be written as JSON in UTF-8 (no lone surrogates); None if it can."""
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        return str(error)
    return None


def _a(value: Any) -> str:
    """A value by its type."""
    return "None" if value is None else f"an object of type {type(value).__name__}"
