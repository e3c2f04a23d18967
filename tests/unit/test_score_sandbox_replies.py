"""What a worker sends is not believed: garbage is refused with a reason, and what is accepted is plain and finite."""

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.score.sandbox import frames, worker_process
from pipelines.score.sandbox.worker_process import ForgedReplyError

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip
ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
    | st.sampled_from(["ok", "exception", "memory", "invalid", "timeout", "killed"]),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner, max_size=3),
    max_leaves=30,
)  # fmt: skip


def is_plain(value: Any) -> bool:
    """The obvious oracle."""
    if isinstance(value, dict):
        return all(type(key) is str and is_plain(inner) for key, inner in value.items())
    if isinstance(value, list):
        return all(map(is_plain, value))
    return value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value))


def packed(*outcomes: tuple[Any, ...]) -> bytes:
    return msgspec.msgpack.encode(list(outcomes))


def assert_sound(outcome: Any) -> None:
    assert outcome.kind in {"ok", "exception", "memory", "invalid"}
    assert (outcome.error is None) == (outcome.kind == "ok")
    assert outcome.value is None or outcome.kind == "ok"
    assert is_plain(outcome.value)
    assert math.isfinite(outcome.seconds)
    assert outcome.seconds >= 0


@given(st.binary(max_size=200), st.integers(1, 5))
def test_random_bytes_are_refused_or_sound(body: bytes, count: int) -> None:
    try:
        outcomes_read = worker_process.read_outcomes(body, count, "pointwise")
    except ForgedReplyError:
        return
    assert len(outcomes_read) == count
    for outcome in outcomes_read:
        assert_sound(outcome)


@given(st.lists(st.tuples(ANY, ANY, ANY, ANY), max_size=4), st.sampled_from(["pointwise", "batch", "group"]))
def test_well_packed_nonsense_is_refused_or_sound(outcomes: list[tuple[Any, ...]], mode: Any) -> None:
    try:
        read = worker_process.read_outcomes(packed(*outcomes), len(outcomes), mode)
    except ForgedReplyError:
        return
    assert len(read) == len(outcomes)
    for outcome in read:
        assert_sound(outcome)


@given(st.lists(PLAIN, min_size=1, max_size=5))
def test_plain_values_arrive_as_they_were_sent(values: list[Any]) -> None:
    body = packed(*(("ok", value, None, 0.5) for value in values))
    outcomes_read = worker_process.read_outcomes(body, len(values), "pointwise")
    assert [outcome.value for outcome in outcomes_read] == values
    assert {(outcome.kind, outcome.error, outcome.seconds) for outcome in outcomes_read} == {("ok", None, 0.5)}


@given(ANY)
def test_a_value_is_accepted_if_and_only_if_it_is_plain(value: Any) -> None:
    try:
        (outcome,) = worker_process.read_outcomes(packed(("ok", value, None, 0.0)), 1, "pointwise")
    except ForgedReplyError:
        pytest.fail("a value that is no score is the call's fault, not a forgery")
    assert (outcome.kind == "ok") == is_plain(value)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (math.nan, "it returned nan; valid: a finite number"),
        ({"score": math.inf}, "it returned inf as 'score'; valid: a finite number"),
        ({"score": 1.0, "steps": [0.0, -math.inf]}, "it returned -inf as 1; valid: a finite number"),
        ({"score": b"1"}, "it returned bytes, which is not JSON data"),
        ({1: 2}, "it returned a dict with keys that are not text"),
    ],
)
def test_a_value_that_is_no_score_is_named(value: Any, words: str) -> None:
    (outcome,) = worker_process.read_outcomes(packed(("ok", value, None, 0.0)), 1, "pointwise")
    assert (outcome.kind, outcome.value, outcome.error) == ("invalid", None, words)


def nested(depth: int) -> list[Any]:
    nested: list[Any] = []
    for _ in range(depth - 1):
        nested = [nested]
    return nested


def test_depth_and_number_are_bounded_exactly() -> None:
    def kind(value: Any) -> str:
        return worker_process.read_outcomes(packed(("ok", value, None, 0.0)), 1, "pointwise")[0].kind

    assert kind(nested(worker_process.DEPTH)) == "ok"
    assert kind(nested(worker_process.DEPTH + 1)) == "invalid"
    assert kind([1] * worker_process.ITEMS) == "ok"
    assert kind([1] * (worker_process.ITEMS + 1)) == "invalid"


def test_depth_that_would_overflow_the_stack_is_a_forgery() -> None:
    body = b"\x91\x94\xa2ok" + b"\x91" * 1_000_000 + b"\xc0" * 3
    with pytest.raises(ForgedReplyError, match="list of outcomes"):
        worker_process.read_outcomes(body, 1, "pointwise")


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (("timeout", None, "late", 0.0), "contradicts itself"),
        (("killed", None, "dead", 0.0), "contradicts itself"),
        (("ok", 1.0, "and yet", 0.0), "contradicts itself"),
        (("exception", 1.0, "and yet", 0.0), "contradicts itself"),
        (("exception", None, None, 0.0), "contradicts itself"),
        (("exception", None, "x" * 5000, 0.0), "contradicts itself"),
        (("ok", 1.0, None), "not send a list of outcomes"),
        (("ok", 1.0, None, "soon"), "not send a list of outcomes"),
    ],
)
def test_an_outcome_a_worker_may_not_report_is_a_forgery(outcome: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ForgedReplyError, match=words):
        worker_process.read_outcomes(packed(outcome), 1, "pointwise")


@given(st.text())
def test_texts_cannot_command_a_terminal(text: str) -> None:
    (outcome,) = worker_process.read_outcomes(packed(("exception", None, text, 0.0)), 1, "pointwise")
    assert outcome.error is not None
    assert not {"\x1b", "\x00", "\r", "\x9b", "\x7f", "\u202e"} & set(outcome.error)
    spelled = "".join(c if c.isprintable() or c in "\t\n" else "" for c in text)
    assert all(c in outcome.error for c in spelled)


def test_escapes_are_spelled_out_and_letters_are_not() -> None:
    assert worker_process.spell_controls("\x1b[2Jna\u00efve\n\t\u202etxt") == "\\x1b[2Jna\u00efve\n\t\\u202etxt"


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0])
def test_seconds_are_corrected(seconds: float) -> None:
    (outcome,) = worker_process.read_outcomes(packed(("ok", 1.0, None, seconds)), 1, "pointwise")
    assert outcome.seconds == 0.0


def test_a_batch_function_answers_with_lists() -> None:
    for mode in ("batch", "group"):
        (outcome,) = worker_process.read_outcomes(packed(("ok", [1.0, {"score": 0.5}], None, 0.0)), 1, mode)  # type: ignore[arg-type]
        assert outcome.value == [1.0, {"score": 0.5}]
        with pytest.raises(ForgedReplyError):
            worker_process.read_outcomes(packed(("ok", 1.0, None, 0.0)), 1, mode)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_number_of_outcomes_is_the_one_announced(count: int) -> None:
    body = packed(*[("ok", 1.0, None, 0.0)] * 2)
    with pytest.raises(ForgedReplyError, match=f"2 outcomes where it said {count}"):
        worker_process.read_outcomes(body, count, "pointwise")


@given(st.binary(min_size=frames.REPLY.size, max_size=frames.REPLY.size), st.integers(0, 2**64 - 1))
def test_a_random_header_is_refused(header: bytes, sequence: int) -> None:
    if frames.REPLY.unpack(header)[0] == sequence:
        return
    with pytest.raises(ForgedReplyError, match="do not answer"):
        worker_process.read_reply_header(header, sequence, 0, 64)
    with pytest.raises(ForgedReplyError, match="do not say"):
        worker_process.read_hello_header(header, sequence)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ((7, 3, 2, 10), None),
        ((7, 3, 2, frames.REPLY_BYTES), None),
        ((7, 3, 2, frames.REPLY_BYTES + 1), "announced a reply of"),
        ((7, 3, 2, 2**31), "announced a reply of 2,147,483,648 bytes"),
        ((8, 3, 2, 10), "do not answer"),
        ((7, 2, 2, 10), "do not answer"),
        ((7, 3, 0, 10), "do not answer"),
        ((7, 3, frames.WORN, 10), "do not answer"),
        ((7, 3, 6, 10), "do not answer"),
    ],
)
def test_a_header_must_fit_the_request(header: tuple[int, int, int, int], words: str | None) -> None:
    """Sequence 7, three calls answered, five open."""
    if words is None:
        sequence, position, count, length = header
        for worn in (False, True):
            sent = frames.REPLY.pack(sequence, position, count | worn * frames.WORN, length)
            assert worker_process.read_reply_header(sent, 7, 3, 5) == (count, length, worn)
        return
    with pytest.raises(ForgedReplyError, match=words):
        worker_process.read_reply_header(frames.REPLY.pack(*header), 7, 3, 5)


@given(st.binary(max_size=100) | ANY.map(lambda value: msgspec.json.encode({"mode": value, "declared": {"a": value}})))
def test_facts_are_refused_or_sound(body: bytes) -> None:
    try:
        signature = worker_process.read_signature(body)
    except ForgedReplyError:
        return
    assert signature.mode in {"pointwise", "batch", "group"}
    assert is_plain(signature.declared)
    assert all(type(name) is str for name in signature.parameters)
