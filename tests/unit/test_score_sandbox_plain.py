"""What user code may return, and the outcome of it."""

import dataclasses
import datetime
import decimal
import fractions
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.score.sandbox.worker import NoResultError, convert_result


class Metric(msgspec.Struct):
    score: float
    reason: str | None = None


class Result(msgspec.Struct):
    score: float | None
    metrics: dict[str, Metric] = {}


class Model(pydantic.BaseModel):
    score: float
    steps: list[int] = []


@dataclasses.dataclass
class Data:
    score: float
    at: tuple[int, ...] = ()


class Pair(NamedTuple):
    a: int
    b: int


class Odd:
    def to_dict(self) -> dict[str, Any]:
        return {"odd": True}


def sent(value: Any) -> Any:
    """As it arrives: sequences of all kinds are lists."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.5, 0.5),
        (1, 1.0),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.bool_(True), 1.0),
        (np.array(2.5), 2.5),
        (decimal.Decimal("0.25"), 0.25),
        (fractions.Fraction(1, 4), 0.25),
        ("text", "text"),
        (None, None),
        ({"score": 1}, {"score": 1}),
        ({"score": np.float64(0.5), "list": np.array([1, 2])}, {"score": 0.5, "list": [1, 2]}),
        ({1: "one"}, {"1": "one"}),
        (Result(0.5, {"m": Metric(1.0, "why")}), {"score": 0.5, "metrics": {"m": {"score": 1.0, "reason": "why"}}}),
        (Model(score=0.5, steps=[1]), {"score": 0.5, "steps": [1]}),
        (Data(0.5, (1, 2)), {"score": 0.5, "at": [1, 2]}),
        ({"inner": Model(score=1.0)}, {"inner": {"score": 1.0, "steps": []}}),
        (Odd(), {"odd": True}),
        (Pair(1, 2), [1, 2]),
        ({"when": datetime.date(2026, 11, 20)}, {"when": "2026-11-20"}),
    ],
)
def test_a_result_becomes_json_data(value: Any, expected: Any) -> None:
    outcome = sent(convert_result(value, "pointwise"))
    assert outcome == expected
    assert type(outcome) is type(expected)


@pytest.mark.parametrize("mode", ["batch", "group"])
def test_a_batch_function_returns_a_list(mode: str) -> None:
    outcomes = sent(convert_result([1, 0.5, np.float32(0.25), Result(1.0), {"score": None}], mode))
    assert outcomes == [1, 0.5, 0.25, {"score": 1.0, "metrics": {}}, {"score": None}]
    assert sent(convert_result((1.0, 2.0), mode)) == [1.0, 2.0]
    assert sent(convert_result(np.array([1.0, 0.0]), mode)) == [1.0, 0.0]
    for wrong in (1.0, {"score": 1.0}, "text", None, Result(1.0)):
        with pytest.raises(NoResultError, match=f"a {mode} function .*one result per rollout"):
            convert_result(wrong, mode)


def cyclic() -> list[Any]:
    nested: list[Any] = []
    nested.append(nested)
    return nested


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (object(), "an object of type object"),
        (print, "builtin_function_or_method"),
        ((n for n in [1]), "generator"),
        ({"score": object()}, "an object of type object inside it"),
        (np.array([1.0, 2.0]), "not a single number"),
        (10**400, "not a single number"),
        (1j, "complex"),
        (cyclic(), "contains itself"),
        ({(1, 2): 3}, "not JSON data"),
    ],
)
def test_what_is_no_result_is_named(value: Any, words: str) -> None:
    with pytest.raises(NoResultError, match=words):
        convert_result(value, "pointwise")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=15,
)


@given(st.dictionaries(st.text(max_size=3), JSON, max_size=4))
def test_json_data_stays_as_it_is(value: dict[str, Any]) -> None:
    assert convert_result(value, "pointwise") == value
    assert convert_result([value, value], "batch") == [value, value]
