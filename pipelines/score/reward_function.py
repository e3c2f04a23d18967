"""The decorator `@reward_function`: how a user's function declares what it judges and what it needs.

    @reward_function
    def polite(messages, ground_truth=None, **kwargs): ...

    @reward_function(mode="group", requires_network=True)
    async def best_of(rollouts_messages, **kwargs): ...

Pointwise functions are called with one rollout, batch-wise ones with some, group-wise ones with all siblings of one
task group. A function takes what it needs by name, in whatever order it has its parameters. A decorated function can be
called by hand, with dictionaries or `Message`s, and returns `EvaluateResult`s.

A function that requires the network runs in a worker process, which has no lake: a call brings the stored answers of
judges to its episodes, and its result takes the new ones back; the user's function sees neither.
"""

import inspect
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from typing import Any, Literal, cast, overload

from pipelines.score.results import EvaluateResult, Message, checked, plain

KNOWN_ANSWERS = "judge_known"
"""Keyword argument that brings stored answers: request id (text) -> answer. `RewardFunction` takes it out."""
NEW_ANSWERS = "judge_answers"
"""Key of the result that takes the new answers back."""


@dataclass
class JudgeRun:
    """Answers known before the call, and got during it."""

    known: dict[str, str] = field(default_factory=dict)
    """request id -> answer."""
    fresh: list[dict[str, Any]] = field(default_factory=list)
    """New answers: request_id, model, answer, about, prompt_tokens, completion_tokens."""


_CURRENT: ContextVar[JudgeRun | None] = ContextVar("trajlake_judging", default=None)


def current_run() -> JudgeRun | None:
    """The run that a judge is asked in; None where the function was called by hand."""
    return _CURRENT.get()


@contextmanager
def judge_run(known: dict[str, str]) -> Iterator[JudgeRun]:
    """A run around one call."""
    run = JudgeRun(known=dict(known))
    token = _CURRENT.set(run)
    try:
        yield run
    finally:
        _CURRENT.reset(token)


Mode = Literal["pointwise", "batch", "group"]
MODES: tuple[Mode, ...] = ("pointwise", "batch", "group")
StepIndex = Literal["auto", "step", "message"]
STEP_INDICES: tuple[StepIndex, ...] = ("auto", "step", "message")
_OF_ONE, _OF_MANY = "messages", "rollouts_messages"
TRUTHS = ("ground_truth_list", "ground_truths", "ground_truth")
"""Names that a joint call's list of ground truths goes by: eval-protocol's, reward-kit's, and the column's."""


class RewardFunction:
    """A user's function with what it declares.

    Args:
        mode: what one call judges; by its parameters' names (batch-wise with `rollouts_messages`) unless given.
        requires_network: it asks a model over the network, and runs outside the sandbox, if the user allows it.
        step_index: what its `StepOutput.step_index` counts: steps, messages, or whichever fits.
        concurrency: calls in flight at once, for functions that ask over the network.
        timeout: seconds for one call, for functions that ask over the network.
        requirements: packages that it needs, for whoever sets up the machine.

    TypeError if it is no function, ValueError for an unknown mode or meaning of `step_index`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        mode: Mode | None = None,
        requires_network: bool = False,
        step_index: StepIndex = "auto",
        concurrency: int | None = None,
        timeout: float | None = None,
        requirements: Sequence[str] | str | None = None,
    ) -> None:
        if not callable(function):
            msg = f"@reward_function decorates functions, not a {type(function).__name__}"
            raise TypeError(msg)
        name = getattr(function, "__name__", type(function).__name__)
        parameters = inspect.signature(function).parameters.values()
        # What a partial has filled stays filled, also where a row has a value of that name.
        self.fixed = frozenset(function.keywords if isinstance(function, partial) else ())
        """Names of parameters that nothing else fills."""
        named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in self.fixed]
        self.takes = frozenset(p.name for p in named)
        """Names of its parameters."""
        self.takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        """It has `**kwargs`."""
        many = _OF_MANY in self.takes and _OF_ONE not in self.takes
        self.mode: Mode = mode or ("batch" if many else "pointwise")
        if self.mode not in MODES:
            msg = f"reward function `{name}`: mode is {mode!r}; valid: {', '.join(MODES)}"
            raise ValueError(msg)
        if step_index not in STEP_INDICES:
            msg = f"reward function `{name}`: step_index is {step_index!r}; valid: {', '.join(STEP_INDICES)}"
            raise ValueError(msg)
        self.argument = _OF_ONE if self.mode == "pointwise" else _OF_MANY
        # The name of a positional-only parameter is its author's own affair: the first one is given the messages.
        nameless = [p.name for p in named[:1] if p.kind is p.POSITIONAL_ONLY and self.argument not in self.takes]
        self._alias = nameless[0] if nameless else self.argument
        self.required = [p.name for p in named if p.default is p.empty and p.name not in (self.argument, self._alias)]
        """Names of those that a call has to fill beside the messages."""
        self._positional_only = [(p.name, p.default) for p in named if p.kind is p.POSITIONAL_ONLY]
        self._positional = [p.name for p in named if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self.function = function
        self.is_async = inspect.iscoroutinefunction(function)
        self.requires_network = requires_network
        self.step_index: StepIndex = step_index
        self.concurrency = concurrency
        self.timeout = timeout
        self.requirements = [requirements] if isinstance(requirements, str) else list(requirements or ())
        update_wrapper(self, function)
        self.__trajlake_reward__ = self.describe()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function: an `EvaluateResult`, or a list of them (awaitable if the function is async).

        Arguments that the function does not take are left out. TypeError if it returned something else, or a list of
        another length; ValueError for a number that is not finite.
        """
        positional = self._positional or [self.argument]
        kwargs |= zip(positional, args, strict=False)
        known = kwargs.pop(KNOWN_ANSWERS, None)
        if known is None:
            return self._call(kwargs, args[len(positional) :])
        return self._judging_later(known, kwargs) if self.is_async else self._judging(known, kwargs)

    def _call(self, kwargs: dict[str, Any], more: tuple[Any, ...] = ()) -> Any:
        if self._alias not in kwargs and self.argument in kwargs:
            kwargs[self._alias] = kwargs.pop(self.argument)
        rollouts: Any = kwargs.get(self._alias)
        if rollouts is None and (self.mode != "pointwise" or self._alias in self.takes):
            msg = f"reward function `{self.name}` is called with `{self.argument}`"
            raise TypeError(msg)
        if self.mode != "pointwise" and (named := [name for name in TRUTHS if name in kwargs]):
            kwargs |= {name: kwargs[named[0]] for name in TRUTHS if name in self.takes and name not in kwargs}
        if not self.takes_all:
            kwargs = {key: value for key, value in kwargs.items() if key in self.takes}
        elif self.fixed:
            kwargs = {key: value for key, value in kwargs.items() if key not in self.fixed}
        if self._alias in kwargs:
            kwargs[self._alias] = _messages(rollouts) if self.mode == "pointwise" else list(map(_messages, rollouts))
        if _is_chat(truth := kwargs.get("ground_truth")):
            kwargs["ground_truth"] = _messages(truth)
        if more:
            given = [kwargs.pop(name) for name in self._positional]
        else:
            given = [kwargs.pop(name, default) for name, default in self._positional_only]
        value = self.function(*given, *more, **kwargs)
        count = 1 if self.mode == "pointwise" else len(rollouts)
        if self.is_async or inspect.isawaitable(value):
            return self._awaited(value, count)
        return self._checked(value, count)

    @property
    def name(self) -> str:
        """The function's name."""
        return str(getattr(self, "__name__", "reward"))

    def describe(self) -> dict[str, Any]:
        """What it declares, as JSON data."""
        return {
            "name": self.name,
            "mode": self.mode,
            "is_async": self.is_async,
            "requires_network": self.requires_network,
            "step_index": self.step_index,
            "concurrency": self.concurrency,
            "timeout": self.timeout,
            "requirements": self.requirements,
            "parameters": sorted(self.argument if name == self._alias else name for name in self.takes),
            "required": self.required,
            "takes_all": self.takes_all,
            "fixed": sorted(self.fixed),
        }

    def _judging(self, known: dict[str, str], kwargs: dict[str, Any]) -> Any:
        """A call whose judges know stored answers, and whose result brings the new ones."""
        count = len(kwargs.get(self.argument) or ())
        with judge_run(known) as run:
            try:
                value = plain(self._call(kwargs))
            except Exception as error:
                value = self._failed(error, count)
        return _with_answers(value, run.fresh)

    async def _judging_later(self, known: dict[str, str], kwargs: dict[str, Any]) -> Any:
        count = len(kwargs.get(self.argument) or ())
        with judge_run(known) as run:
            try:
                value = plain(await self._call(kwargs))
            except Exception as error:
                value = self._failed(error, count)
        return _with_answers(value, run.fresh)

    def _failed(self, error: Exception, count: int) -> Any:
        failed = {"error": f"{type(error).__name__}: {error}"}
        return failed if self.mode == "pointwise" else [failed] * count

    async def _awaited(self, value: Awaitable[Any], count: int) -> Any:
        return self._checked(await value, count)

    def _checked(self, value: Any, count: int) -> EvaluateResult | list[EvaluateResult]:
        if self.mode == "pointwise":
            return self._one(value)
        if not isinstance(value, list | tuple):
            msg = (
                f"`{self.name}` returned a {type(value).__name__}; valid: a list with one result per rollout ({count})"
            )
            raise TypeError(msg)
        if len(value) != count:
            msg = f"`{self.name}` returned {len(value)} results for {count} rollouts; valid: one for each, in order"
            raise TypeError(msg)
        return [self._one(item) for item in value]

    def _one(self, value: Any) -> EvaluateResult:
        try:
            return checked(value)
        except (TypeError, ValueError) as error:
            msg = f"`{self.name}` {error}"
            raise type(error)(msg) from error


@overload
def reward_function(function: Callable[..., Any], /) -> RewardFunction: ...
@overload
def reward_function(
    *,
    mode: Mode | None = ...,
    requires_network: bool = ...,
    step_index: StepIndex = ...,
    concurrency: int | None = ...,
    timeout: float | None = ...,
    requirements: Sequence[str] | str | None = ...,
    id: str | None = ...,
) -> Callable[[Callable[..., Any]], RewardFunction]: ...
def reward_function(
    function: Callable[..., Any] | None = None,
    /,
    *,
    id: str | None = None,  # noqa: A002 - the name that eval-protocol gave it
    **declared: Any,
) -> RewardFunction | Callable[[Callable[..., Any]], RewardFunction]:
    """Declare a function as a reward function; with or without arguments, which are those of `RewardFunction`.

    `id` is taken for compatibility, and of no effect: a scorer is known by its function's name.
    """
    if function is not None:
        return RewardFunction(function, **declared)
    return lambda decorated: RewardFunction(decorated, **declared)


def as_reward_function(found: Any) -> RewardFunction:
    """A module's attribute as a reward function, decorated or not; TypeError if it is no function."""
    return found if isinstance(found, RewardFunction) else RewardFunction(cast("Callable[..., Any]", found))


def _with_answers(value: Any, fresh: list[dict[str, Any]]) -> Any:
    if isinstance(value, list):
        return [*value, {NEW_ANSWERS: fresh}]
    return value | {NEW_ANSWERS: fresh}


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "role" in value[0]


def _messages(value: Any) -> Any:
    """Messages with attributes; what is no list of objects is left to the function."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        return value
    return [item if isinstance(item, Message) else Message(item) for item in value]
