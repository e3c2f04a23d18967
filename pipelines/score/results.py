"""What a reward function returns, and the messages it is given.

Results are msgspec structs: they are created in a few hundred nanoseconds inside the sandbox, and only msgspec is
imported for them. The names and fields are those of reward-kit and eval-protocol, so that functions written for these
run unchanged but for the import line; results answer to `result.score` and to `result["score"]`, messages to
`message.content` and to `message["content"]`.
"""

import math
from collections.abc import Iterator
from typing import Any

import msgspec


class _Result(msgspec.Struct):
    """Fields that are read as keys too."""

    def __getitem__(self, key: str) -> Any:
        if key in self.__struct_fields__:
            return getattr(self, key)
        raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        return key in self.__struct_fields__

    def __iter__(self) -> Iterator[str]:
        return iter(self.__struct_fields__)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a field, or the default where there is no such field."""
        return getattr(self, key) if key in self.__struct_fields__ else default

    def keys(self) -> tuple[str, ...]:
        """Names of the fields."""
        return self.__struct_fields__

    def values(self) -> list[Any]:
        """Values of the fields."""
        return [getattr(self, key) for key in self.__struct_fields__]

    def items(self) -> list[tuple[str, Any]]:
        """Fields as pairs."""
        return [(key, getattr(self, key)) for key in self.__struct_fields__]

    def model_dump(self) -> dict[str, Any]:
        """The result as plain data."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain


class MetricResult(_Result):
    """One component of a score."""

    score: float | None = None
    """Its value."""
    is_score_valid: bool = True
    """Whether it counts as good (reward-kit) or as known: kept as it is said."""
    reason: str | None = None
    """Why, for a person."""
    data: dict[str, Any] = {}
    """Whatever else is worth keeping."""
    success: bool | None = None
    """Older spelling of `is_score_valid`."""


class StepOutput(_Result):
    """The reward of one step."""

    step_index: int | str
    """The step's number (0, 1, 2, ...), or the index of its assistant message in `messages`; see docs."""
    base_reward: float | None
    """Its reward; None where none is known."""
    metrics: dict[str, MetricResult | Any] = {}
    """Components."""
    reason: str | None = None
    """Why, for a person."""
    terminated: bool = False
    """The environment ended here."""
    control_plane_info: dict[str, Any] | None = None
    """What the environment said of the step."""


class EvaluateResult(_Result):
    """What a reward function says about one rollout."""

    score: float | None = None
    """The final score; None where there is none (a function that rewards steps only, or could not judge)."""
    is_score_valid: bool = True
    """False: the score is not to be used; NULL is stored, and the reason."""
    reason: str | None = None
    """Why, for a person."""
    metrics: dict[str, MetricResult | Any] = {}
    """Components: `MetricResult`s, numbers, or any JSON."""
    step_outputs: list[StepOutput] | None = None
    """Rewards of steps."""
    error: str | None = None
    """Why there is no score: NULL is stored, whatever `score` says."""
    trajectory_info: dict[str, Any] | None = None
    """More about the rollout; kept with the metrics."""
    final_control_plane_info: dict[str, Any] | None = None
    """The environment's last word; kept with the metrics."""
    agg_score: float | None = None
    """Kept with the metrics."""
    standard_error: float | None = None
    """Kept with the metrics."""


class Record(dict[str, Any]):
    """A JSON object whose keys are attributes too."""

    _may_be_absent: frozenset[str] = frozenset()

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return _wrapped(self[name])
        if name in self._may_be_absent:
            return None
        msg = f"a {type(self).__name__} with {', '.join(self) or 'no keys'} has no `{name}`"
        raise AttributeError(msg)

    def model_dump(self, *, exclude_none: bool = False, **_: Any) -> dict[str, Any]:
        """The object as a plain dictionary."""
        return {key: value for key, value in self.items() if not (exclude_none and value is None)}

    @classmethod
    def model_validate(cls, value: dict[str, Any]) -> "Record":
        """A record of a dictionary."""
        return cls(value)


class Message(Record):
    """A chat message in OpenAI's form; of the usual attributes, those that are absent are None."""

    _may_be_absent = frozenset(
        ("content", "name", "tool_calls", "tool_call_id", "function_call", "reasoning_content", "weight")
    )


def _wrapped(value: Any) -> Any:
    """Objects as records, also inside a list; made when they are asked for, as most never are."""
    if type(value) is dict:
        return Record(value)
    if type(value) is list:
        return [Record(item) if type(item) is dict else item for item in value]
    return value


def plain(value: Any) -> Any:
    """What a function returned, or a list of it, as JSON data: results of our own, pydantic models, numpy's numbers."""
    if isinstance(value, msgspec.Struct):
        return msgspec.to_builtins(value, enc_hook=_encoded)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return plain(_encoded(value))


def _encoded(value: Any) -> Any:
    for method in ("model_dump", "tolist"):
        if callable(found := getattr(value, method, None)):
            return plain(found())
    msg = f"a {type(value).__name__} is no JSON data; return numbers, texts, lists and dictionaries"
    raise TypeError(msg)


def checked(value: Any) -> EvaluateResult:
    """A result from what a function returned for one rollout: a result, a number (the score), or a result's fields.

    TypeError for something else; ValueError for a score or a step reward that is NaN or infinite, or fields of a wrong
    type.
    """
    if isinstance(value, bool | int | float):
        result = EvaluateResult(score=_number(value))
    elif isinstance(value, EvaluateResult):
        result = value
    else:
        data = plain(value)
        if isinstance(data, bool | int | float):
            return checked(data)
        if not isinstance(data, dict) or data.keys().isdisjoint(_DECISIVE):
            named = f"a dictionary with keys {sorted(data)[:8]}" if isinstance(data, dict) else type(value).__name__
            msg = (
                'returned None; where there is no score, return EvaluateResult(score=None, reason="...")'
                if data is None
                else f"returned {named}; valid: a number, an EvaluateResult, or a dictionary with "
                "`score` or `step_outputs`"
            )
            raise TypeError(msg)
        try:
            result = msgspec.convert(data, EvaluateResult)
        except msgspec.ValidationError as error:
            msg = f"returned no EvaluateResult: {error}"
            raise ValueError(msg) from error
    _require_finite(result)
    return result


def _number(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        msg = "returned an integer that no float64 holds; valid: a finite number"
        raise ValueError(msg) from None


_DECISIVE = {"score", "step_outputs", "error"}
"""A dictionary without any of these says nothing."""


def _require_finite(result: EvaluateResult) -> None:
    outputs = result.step_outputs or []
    try:
        if result.score is not None and not math.isfinite(result.score):
            msg = f"returned the score {result.score}; valid: a finite number, or None where there is none"
            raise ValueError(msg)
        for output in outputs:
            if output.base_reward is not None and not math.isfinite(output.base_reward):
                msg = f"returned the reward {output.base_reward} for step {output.step_index}; valid: a finite number"
                raise ValueError(msg)
    except (TypeError, AttributeError) as error:
        # Structs do not check what they are made of.
        msg = f"returned an EvaluateResult with fields of a wrong type: {error}"
        raise ValueError(msg) from error
