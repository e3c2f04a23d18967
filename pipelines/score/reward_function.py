"""The decorator `@reward_function`: how a user's function declares what it judges and what it needs.

    @reward_function
    def polite(messages, ground_truth=None, **kwargs): ...

    @reward_function(mode="group", requires_network=True)
    async def best_of(rollouts_messages, **kwargs): ...

Pointwise functions are called with one rollout, batch-wise ones with some, group-wise ones with all siblings of one
task group. A decorated function can be called by hand, with dictionaries or `Message`s, and returns `EvaluateResult`s.
"""

import inspect
from collections.abc import Awaitable, Callable, Sequence
from functools import update_wrapper
from typing import Any, Literal, cast, overload

from pipelines.score import judging
from pipelines.score.results import EvaluateResult, Message, checked, plain

Mode = Literal["pointwise", "batch", "group"]
MODES: tuple[Mode, ...] = ("pointwise", "batch", "group")
StepIndex = Literal["auto", "step", "message"]
STEP_INDICES: tuple[StepIndex, ...] = ("auto", "step", "message")
_OF_ONE, _OF_MANY = "messages", "rollouts_messages"


class RewardFunction:
    """A user's function with what it declares.

    Args:
        function: the function, or an `async` one.
        mode: what one call judges; by the first parameter's name (`messages`, `rollouts_messages`) unless given.
        requires_network: it asks a model over the network, and runs outside the sandbox, if the user allows it.
        step_index: what its `StepOutput.step_index` counts: steps, messages, or whichever fits.
        concurrency: calls in flight at once, for functions that ask over the network.
        timeout: seconds for one call, for functions that ask over the network.
        requirements: packages that it needs, for whoever sets up the machine.

    Raises:
        TypeError: no function, or one that takes no messages.
        ValueError: an unknown mode or meaning of `step_index`.
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
        parameters = inspect.signature(function).parameters
        positional = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        many = bool(positional) and positional[0] == _OF_MANY
        self.mode: Mode = mode or ("batch" if many else "pointwise")
        if self.mode not in MODES:
            msg = f"reward function `{name}`: mode is {mode!r}; valid: {', '.join(MODES)}"
            raise ValueError(msg)
        if step_index not in STEP_INDICES:
            msg = f"reward function `{name}`: step_index is {step_index!r}; valid: {', '.join(STEP_INDICES)}"
            raise ValueError(msg)
        self.argument = _OF_ONE if self.mode == "pointwise" else _OF_MANY
        self.takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        """It has `**kwargs`."""
        self.takes = frozenset(
            p.name for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        )
        """Names of its parameters."""
        self.required = [
            p.name
            for p in list(parameters.values())[bool(positional) :]
            if p.name != self.argument and p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        """Names of those that a call has to fill beside the messages."""
        if not positional and not self.takes_all and self.argument not in self.takes:
            msg = f"reward function `{name}` takes no messages; its first parameter is `{self.argument}`"
            raise TypeError(msg)
        if stuck := [each for each in self.required if each not in self.takes]:
            msg = f"reward function `{name}`: nothing fills the positional-only {', '.join(stuck)}; give a default"
            raise TypeError(msg)
        # A first parameter that is known by another name, or by none, is given the messages by position.
        self._first = positional[0] if positional and self.argument not in self.takes else None
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

        Arguments that the function does not take are left out.

        Raises:
            TypeError: it returned something else, or a list of another length.
            ValueError: it returned a number that is not finite.
        """
        if args:
            kwargs[self.argument], args = args[0], args[1:]
        known = kwargs.pop(judging.ARGUMENT, None)
        if known is None:
            return self._call(args, kwargs)
        return self._judging_later(known, kwargs) if self.is_async else self._judging(known, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rollouts = kwargs.pop(self.argument, None)
        if rollouts is None:
            msg = f"reward function `{self.name}` is called with `{self.argument}`"
            raise TypeError(msg)
        if self.mode != "pointwise" and "ground_truth" in self.takes and "ground_truth_list" in kwargs:
            kwargs.setdefault("ground_truth", kwargs["ground_truth_list"])
        given = _messages(rollouts) if self.mode == "pointwise" else [_messages(one) for one in rollouts]
        if not self.takes_all:
            kwargs = {key: value for key, value in kwargs.items() if key in self.takes}
        if _is_chat(truth := kwargs.get("ground_truth")):
            kwargs["ground_truth"] = _messages(truth)
        if args or self._first is not None:
            value = self.function(given, *args, **kwargs)
        else:
            value = self.function(**{self.argument: given}, **kwargs)
        if self.is_async or inspect.isawaitable(value):
            return self._awaited(value, len(given))
        return self._checked(value, len(given))

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
            "parameters": sorted(self.takes),
            "required": self.required,
            "takes_all": self.takes_all,
        }

    def _judging(self, known: dict[str, str], kwargs: dict[str, Any]) -> Any:
        """A call whose judges know stored answers, and whose result brings the new ones."""
        count = len(kwargs.get(self.argument) or ())
        with judging.judging(known) as run:
            try:
                value = plain(self._call((), kwargs))
            except Exception as error:
                value = self._failed(error, count)
        return _with_answers(value, run.fresh)

    async def _judging_later(self, known: dict[str, str], kwargs: dict[str, Any]) -> Any:
        count = len(kwargs.get(self.argument) or ())
        with judging.judging(known) as run:
            try:
                value = plain(await self._call((), kwargs))
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

    Args:
        function: what is decorated.
        id: taken for compatibility, and of no effect: a scorer is known by its function's name.
        **declared: see `RewardFunction`.
    """
    if function is not None:
        return RewardFunction(function, **declared)
    return lambda decorated: RewardFunction(decorated, **declared)


def as_reward_function(found: Any) -> RewardFunction:
    """A module's attribute as a reward function, decorated or not.

    Raises:
        TypeError: it is no function, or takes no messages.
    """
    return found if isinstance(found, RewardFunction) else RewardFunction(cast("Callable[..., Any]", found))


def _with_answers(value: Any, fresh: list[dict[str, Any]]) -> Any:
    if isinstance(value, list):
        return [*value, {judging.RESULT: fresh}]
    return value | {judging.RESULT: fresh}


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "role" in value[0]


def _messages(value: Any) -> Any:
    """Messages with attributes; what is no list of objects is left to the function."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        return value
    return [item if isinstance(item, Message) else Message(item) for item in value]
