"""The decorator `@reward_function`, and the types of a reward function's messages and results.

    @reward_function
    def polite(messages, ground_truth=None, **kwargs): ...

    @reward_function(mode="group", requires_network=True)
    async def best_of(rollouts_messages, **kwargs): ...

One call of a pointwise function judges one rollout, of a batch-wise function several, and of a group-wise function all
siblings of one task group. A function receives its parameters by name, in any order. You can call a decorated function
directly, with dictionaries or `Message`s; it returns `EvaluateResult`s.

Results are msgspec structs: the sandbox creates one in a few hundred nanoseconds and imports only msgspec for it. Names
and fields are those of reward-kit and eval-protocol, so functions written for these run unchanged except for the import
line. Results support `result.score` and `result["score"]`, messages support `message.content` and `message["content"]`.

A function that requires the network runs in a worker process without a lake. A call carries the judges' stored answers
for its episodes, and its result carries the new ones back; the user's function sees neither.
"""

import inspect
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from typing import Any, Literal, cast, overload

import msgspec


class _ResultFields(msgspec.Struct):
    """Fields that support access by key too."""

    def __getitem__(self, key: str) -> Any:
        if key in self.__struct_fields__:
            return getattr(self, key)
        raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        return key in self.__struct_fields__

    def __iter__(self) -> Iterator[str]:
        return iter(self.__struct_fields__)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a field, or the default if there is no such field."""
        return getattr(self, key) if key in self.__struct_fields__ else default

    def keys(self) -> tuple[str, ...]:
        """Return the names of the fields."""
        return self.__struct_fields__

    def values(self) -> list[Any]:
        """Return the values of the fields."""
        return [getattr(self, key) for key in self.__struct_fields__]

    def items(self) -> list[tuple[str, Any]]:
        """Return the fields as pairs."""
        return [(key, getattr(self, key)) for key in self.__struct_fields__]

    def model_dump(self) -> dict[str, Any]:
        """Return the result as plain data."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields


class MetricResult(_ResultFields):
    """One component of a score."""

    score: float | None = None
    """Value of the component."""
    is_score_valid: bool = True
    """Whether it counts as good (reward-kit) or as known; stored unchanged."""
    reason: str | None = None
    """Explanation for readers."""
    data: dict[str, Any] = {}
    """Further data to store."""
    success: bool | None = None
    """Older spelling of `is_score_valid`."""


class StepOutput(_ResultFields):
    """The reward of one step."""

    step_index: int | str
    """The step's number (0, 1, 2, ...), or the index of its assistant message in `messages`; see docs."""
    base_reward: float | None
    """Reward of the step; None for unknown."""
    metrics: dict[str, MetricResult | Any] = {}
    """Components of the reward."""
    reason: str | None = None
    """Explanation for readers."""
    terminated: bool = False
    """Whether the environment ended here."""
    control_plane_info: dict[str, Any] | None = None
    """Information of the environment about the step."""


class EvaluateResult(_ResultFields):
    """A reward function's result for one rollout."""

    score: float | None = None
    """The final score; None for none (a function that only rewards steps, or could not judge)."""
    is_score_valid: bool = True
    """False: the score must not be used; the lake stores NULL and the reason."""
    reason: str | None = None
    """Explanation for readers."""
    metrics: dict[str, MetricResult | Any] = {}
    """Components: `MetricResult`s, numbers, or any JSON."""
    step_outputs: list[StepOutput] | None = None
    """Rewards of steps."""
    error: str | None = None
    """Why there is no score: the lake stores NULL even if `score` is set."""
    trajectory_info: dict[str, Any] | None = None
    """Information about the rollout; stored with the metrics."""
    final_control_plane_info: dict[str, Any] | None = None
    """Final information of the environment; stored with the metrics."""
    agg_score: float | None = None
    """Aggregated score; stored with the metrics."""
    standard_error: float | None = None
    """Standard error of the score; stored with the metrics."""


class Record(dict[str, Any]):
    """A JSON object whose keys are attributes too."""

    _may_be_absent: frozenset[str] = frozenset()

    def __getattr__(self, name: str) -> Any:
        if name in self:
            field = self[name]
            # Objects become records on access, because most are never read.
            if type(field) is dict:
                return Record(field)
            if type(field) is list:
                return [Record(element) if type(element) is dict else element for element in field]
            return field
        if name in self._may_be_absent:
            return None
        msg = f"a {type(self).__name__} with {', '.join(self) or 'no keys'} has no `{name}`"
        raise AttributeError(msg)

    def model_dump(self, *, exclude_none: bool = False, **_: Any) -> dict[str, Any]:
        """Return the object as a plain dictionary."""
        return {key: field for key, field in self.items() if not (exclude_none and field is None)}

    @classmethod
    def model_validate(cls, fields: dict[str, Any]) -> "Record":
        """Return a dictionary as a record."""
        return cls(fields)


class Message(Record):
    """A chat message in OpenAI's form; absent usual attributes read as None."""

    _may_be_absent = frozenset(
        ("content", "name", "tool_calls", "tool_call_id", "function_call", "reasoning_content", "weight")
    )


def to_plain(returned: Any) -> Any:
    """Convert a function's result, or a list of results, to JSON data: our structs, pydantic models, numpy numbers."""
    if isinstance(returned, msgspec.Struct):
        return msgspec.to_builtins(returned, enc_hook=_convert)
    if isinstance(returned, list | tuple):
        return [to_plain(element) for element in returned]
    if isinstance(returned, dict):
        return {str(key): to_plain(field) for key, field in returned.items()}
    if returned is None or isinstance(returned, bool | int | float | str):
        return returned
    return to_plain(_convert(returned))


def _convert(returned: Any) -> Any:
    for method in ("model_dump", "tolist"):
        if callable(convert := getattr(returned, method, None)):
            return to_plain(convert())
    msg = f"a {type(returned).__name__} is not JSON data; return numbers, texts, lists and dictionaries"
    raise TypeError(msg)


_DECISIVE = {"score", "step_outputs", "error"}
"""A dictionary without any of these keys is not a result."""


def read_result(returned: Any) -> EvaluateResult:
    """Convert what a function returned for one rollout: a result, a number (the score), or a result's fields.

    TypeError for any other type. ValueError for a score or a step reward that is NaN or infinite, or fields of a wrong
    type.
    """
    if isinstance(returned, bool | int | float):
        try:
            result = EvaluateResult(score=float(returned))
        except OverflowError:
            msg = "returned an integer that no float64 holds; valid: a finite number"
            raise ValueError(msg) from None
    elif isinstance(returned, EvaluateResult):
        result = returned
    else:
        document = to_plain(returned)
        if isinstance(document, bool | int | float):
            return read_result(document)
        if document is None:
            msg = 'returned None; where there is no score, return EvaluateResult(score=None, reason="...")'
            raise TypeError(msg)
        if not isinstance(document, dict) or document.keys().isdisjoint(_DECISIVE):
            is_dict = isinstance(document, dict)
            kind = f"a dictionary with keys {sorted(document)[:8]}" if is_dict else type(returned).__name__
            msg = f"returned {kind}; valid: a number, an EvaluateResult, or a dictionary with `score` or `step_outputs`"
            raise TypeError(msg)
        try:
            result = msgspec.convert(document, EvaluateResult)
        except msgspec.ValidationError as error:
            msg = f"returned an invalid EvaluateResult: {error}"
            raise ValueError(msg) from error
    _require_finite(result)
    return result


def _require_finite(result: EvaluateResult) -> None:
    outputs = result.step_outputs or []
    try:
        if result.score is not None and not math.isfinite(result.score):
            msg = f"returned the score {result.score}; valid: a finite number, or None for no score"
            raise ValueError(msg)
        for output in outputs:
            if output.base_reward is not None and not math.isfinite(output.base_reward):
                msg = f"returned the reward {output.base_reward} for step {output.step_index}; valid: a finite number"
                raise ValueError(msg)
    except (TypeError, AttributeError) as error:
        # Structs do not check the types of their fields.
        msg = f"returned an EvaluateResult with fields of a wrong type: {error}"
        raise ValueError(msg) from error


KNOWN_ANSWERS = "judge_known"
"""Keyword argument with stored answers: request id (text) -> answer. `RewardFunction` removes it from the call."""
NEW_ANSWERS = "judge_answers"
"""Key of the result with the new answers."""


@dataclass
class JudgeRun:
    """Judges' answers of one call: stored before it, and received during it."""

    answers: dict[str, str] = field(default_factory=dict)
    """request id -> answer."""
    fresh: list[dict[str, Any]] = field(default_factory=list)
    """New answers: request_id, model, answer, about, prompt_tokens, completion_tokens."""


_CURRENT: ContextVar[JudgeRun | None] = ContextVar("trajlake_judging", default=None)


def get_judge_run() -> JudgeRun | None:
    """Return the run of the current call; None where the user called the function directly."""
    return _CURRENT.get()


@contextmanager
def open_judge_run(answers: dict[str, str]) -> Iterator[JudgeRun]:
    """Open a run around one call."""
    run = JudgeRun(answers=dict(answers))
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
"""Names of a joint call's list of ground truths: eval-protocol's, reward-kit's, and the column's."""


class RewardFunction:
    """A user's function with its declarations.

    Args:
        mode: what one call judges; by default inferred from the parameters (batch-wise with `rollouts_messages`).
        requires_network: it asks a model over the network, and runs outside the sandbox if the user allows it.
        step_index: meaning of its `StepOutput.step_index`: steps, messages, or whichever fits.
        concurrency: concurrent calls, for functions that require the network.
        timeout: timeout of one call in seconds, for functions that require the network.
        requirements: packages to install on the machine that runs it.

    TypeError for an object that is not callable, ValueError for an unknown mode or meaning of `step_index`.
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
        # An argument of a partial stays fixed, even if a row has a value of that name.
        self.fixed = frozenset(function.keywords if isinstance(function, partial) else ())
        """Names of parameters that a partial fills."""
        named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in self.fixed]
        self.takes = frozenset(p.name for p in named)
        """Names of its parameters."""
        self.takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        """Whether it has `**kwargs`."""
        many = _OF_MANY in self.takes and _OF_ONE not in self.takes
        self.mode: Mode = mode or ("batch" if many else "pointwise")
        if self.mode not in MODES:
            msg = f"reward function `{name}`: mode is {mode!r}; valid: {', '.join(MODES)}"
            raise ValueError(msg)
        if step_index not in STEP_INDICES:
            msg = f"reward function `{name}`: step_index is {step_index!r}; valid: {', '.join(STEP_INDICES)}"
            raise ValueError(msg)
        self.argument = _OF_ONE if self.mode == "pointwise" else _OF_MANY
        # A positional-only parameter may have any name: the first one gets the messages.
        nameless = [p.name for p in named[:1] if p.kind is p.POSITIONAL_ONLY and self.argument not in self.takes]
        self._alias = nameless[0] if nameless else self.argument
        self.required = [p.name for p in named if p.default is p.empty and p.name not in (self.argument, self._alias)]
        """Names of the required parameters, the messages excluded."""
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
        """Call the function; return an `EvaluateResult` or a list of them (awaitable if the function is async).

        Arguments that the function does not take are dropped. TypeError for a result of another type, or a list of a
        wrong length; ValueError for a number that is not finite.
        """
        positional = self._positional or [self.argument]
        kwargs |= zip(positional, args, strict=False)
        answers = kwargs.pop(KNOWN_ANSWERS, None)
        if answers is None:
            return self._call(kwargs, args[len(positional) :])
        return self._judge_async(answers, kwargs) if self.is_async else self._judge(answers, kwargs)

    def _call(self, kwargs: dict[str, Any], extra: tuple[Any, ...] = ()) -> Any:
        if self._alias not in kwargs and self.argument in kwargs:
            kwargs[self._alias] = kwargs.pop(self.argument)
        rollouts: Any = kwargs.get(self._alias)
        if rollouts is None and (self.mode != "pointwise" or self._alias in self.takes):
            msg = f"reward function `{self.name}` is called with `{self.argument}`"
            raise TypeError(msg)
        if self.mode != "pointwise" and (truths := [name for name in TRUTHS if name in kwargs]):
            kwargs |= {name: kwargs[truths[0]] for name in TRUTHS if name in self.takes and name not in kwargs}
        if not self.takes_all:
            kwargs = {key: argument for key, argument in kwargs.items() if key in self.takes}
        elif self.fixed:
            kwargs = {key: argument for key, argument in kwargs.items() if key not in self.fixed}
        if self._alias in kwargs:
            kwargs[self._alias] = (
                _wrap_messages(rollouts) if self.mode == "pointwise" else list(map(_wrap_messages, rollouts))
            )
        truth = kwargs.get("ground_truth")
        if isinstance(truth, list) and truth and isinstance(truth[0], dict) and "role" in truth[0]:
            kwargs["ground_truth"] = _wrap_messages(truth)
        if extra:
            positional = [kwargs.pop(name) for name in self._positional]
        else:
            positional = [kwargs.pop(name, default) for name, default in self._positional_only]
        returned = self.function(*positional, *extra, **kwargs)
        count = 1 if self.mode == "pointwise" else len(rollouts)
        if self.is_async or inspect.isawaitable(returned):
            return self._await_results(returned, count)
        return self._read_results(returned, count)

    @property
    def name(self) -> str:
        """The function's name."""
        return str(getattr(self, "__name__", "reward"))

    def describe(self) -> dict[str, Any]:
        """Return its declarations as JSON data."""
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

    def _judge(self, answers: dict[str, str], kwargs: dict[str, Any]) -> Any:
        """Call with the judges' stored answers; return the result with the new ones."""
        count = len(kwargs.get(self.argument) or ())
        with open_judge_run(answers) as run:
            try:
                document = to_plain(self._call(kwargs))
            except Exception as error:
                document = self._describe_failure(error, count)
        return _attach_answers(document, run.fresh)

    async def _judge_async(self, answers: dict[str, str], kwargs: dict[str, Any]) -> Any:
        count = len(kwargs.get(self.argument) or ())
        with open_judge_run(answers) as run:
            try:
                document = to_plain(await self._call(kwargs))
            except Exception as error:
                document = self._describe_failure(error, count)
        return _attach_answers(document, run.fresh)

    def _describe_failure(self, error: Exception, count: int) -> Any:
        failure = {"error": f"{type(error).__name__}: {error}"}
        return failure if self.mode == "pointwise" else [failure] * count

    async def _await_results(self, returned: Awaitable[Any], count: int) -> Any:
        return self._read_results(await returned, count)

    def _read_results(self, returned: Any, count: int) -> EvaluateResult | list[EvaluateResult]:
        if self.mode == "pointwise":
            return self._read_result(returned)
        if not isinstance(returned, list | tuple):
            kind = type(returned).__name__
            msg = f"`{self.name}` returned a {kind}; valid: a list with one result per rollout ({count})"
            raise TypeError(msg)
        if len(returned) != count:
            msg = f"`{self.name}` returned {len(returned)} results for {count} rollouts; valid: one for each, in order"
            raise TypeError(msg)
        return [self._read_result(element) for element in returned]

    def _read_result(self, returned: Any) -> EvaluateResult:
        try:
            return read_result(returned)
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
    """Declare a function as a reward function; with or without the arguments of `RewardFunction`.

    `id` exists for compatibility and has no effect: the function's name is the scorer's name.
    """
    if function is not None:
        return RewardFunction(function, **declared)
    return lambda decorated: RewardFunction(decorated, **declared)


def as_reward_function(attribute: Any) -> RewardFunction:
    """Return a module's attribute as a reward function, decorated or not; TypeError if it is not callable."""
    if isinstance(attribute, RewardFunction):
        return attribute
    return RewardFunction(cast("Callable[..., Any]", attribute))


def _attach_answers(document: Any, fresh: list[dict[str, Any]]) -> Any:
    if isinstance(document, list):
        return [*document, {NEW_ANSWERS: fresh}]
    return document | {NEW_ANSWERS: fresh}


def _wrap_messages(messages: Any) -> Any:
    """Return messages with attributes. Anything but a list of objects is returned unchanged."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return messages
    return [message if isinstance(message, Message) else Message(message) for message in messages]
