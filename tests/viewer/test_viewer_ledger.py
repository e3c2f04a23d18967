"""The ledger's bars and words: sizes and sides tell signs, a dashed line tells unknown."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.credit import Flag
from viewer import transcript
from viewer.theme import NEGATIVE, POSITIVE

VALUES = st.floats(-1e6, 1e6)


def drawn(bar: str) -> tuple[float, float, str] | None:
    """(left, width, colour) of a bar in percent; None of a dashed line."""
    found = re.search(r"left:([\d.]+)%;width:([\d.]+)%;.*?background:(#\w+)", bar)
    return (float(found[1]), float(found[2]), found[3]) if found else None


@given(VALUES, VALUES.map(abs))
def test_a_bar_stays_in_its_track_and_starts_at_the_centre(value: float, largest: float) -> None:
    found = drawn(transcript._bar(value, largest))
    assert found is not None
    left, width, colour = found
    assert 0 <= left <= 50
    assert 0 <= width <= 50
    assert colour == (POSITIVE if value >= 0 else NEGATIVE)
    assert left == pytest.approx(50 if value >= 0 else 50 - width, abs=0.011)


@pytest.mark.parametrize(
    ("value", "largest", "bar"),
    [
        (1.0, 1.0, (50.0, 50.0, POSITIVE)),
        (-1.0, 1.0, (0.0, 50.0, NEGATIVE)),
        (0.5, 2.0, (50.0, 12.5, POSITIVE)),
        (0.0, 1.0, (50.0, 0.0, POSITIVE)),
        (0.0, 0.0, (50.0, 0.0, POSITIVE)),
        (None, 1.0, None),
    ],
)
def test_bars(value: float | None, largest: float, bar: tuple[float, float, str] | None) -> None:
    assert drawn(transcript._bar(value, largest)) == bar


def test_unknown_and_0_are_drawn_differently() -> None:
    unknown, zero = transcript._line("A", "0", None, 1.0), transcript._line("A", "0", 0.0, 1.0)
    assert "unknown" in unknown
    assert "dashed" in unknown
    assert "unknown" not in zero
    assert "dashed" not in zero
    assert ">0</span>" in zero


@pytest.mark.parametrize(
    ("a_episode", "a_step", "opposite"),
    [
        (1.0, -0.1, True),
        (-1.0, 0.1, True),
        (1.0, 0.1, False),
        (1.0, 0.0, False),
        (None, 1.0, False),
        (1.0, None, False),
    ],
)
def test_terms_disagree_only_if_both_are_known_and_signed(
    a_episode: float | None, a_step: float | None, opposite: bool
) -> None:
    row: dict[str, Any] = {"a_episode": a_episode, "a_step": a_step}
    assert transcript.disagree(row) is opposite


def test_every_flag_of_the_credit_jobs_is_explained() -> None:
    """The viewer knows no estimator; this keeps its words in step with theirs."""
    assert set(transcript._FLAGS) == set(Flag)
    assert all(explanation for _, _, explanation in transcript._FLAGS.values())
