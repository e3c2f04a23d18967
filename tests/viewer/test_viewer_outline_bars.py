"""The ledger's bars and words: sizes and sides tell signs; unknown has no bar."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.credit import Flag
from viewer.transcript import outline
from viewer.transcript.outline import Scale

VALUES = st.floats(-1e6, 1e6)


@given(VALUES, VALUES.map(abs))
def test_a_bar_stays_in_its_track_and_starts_at_the_centre(value: float, largest: float) -> None:
    bar = outline.compute_bar(value, largest)
    assert bar is not None
    start, width = bar
    assert 0 <= start <= 50
    assert 0 <= width <= 50
    assert start == pytest.approx(50 if value >= 0 else 50 - width, abs=0.011)


@pytest.mark.parametrize(
    ("value", "largest", "bar"),
    [
        (1.0, 1.0, (50.0, 50.0)),
        (-1.0, 1.0, (0.0, 50.0)),
        (0.5, 2.0, (50.0, 12.5)),
        (0.0, 1.0, (50.0, 0.0)),
        (0.0, 0.0, (50.0, 0.0)),
        (None, 1.0, None),
    ],
)
def test_bars(value: float | None, largest: float, bar: tuple[float, float] | None) -> None:
    assert outline.compute_bar(value, largest) == bar


def test_unknown_and_0_are_written_differently() -> None:
    scale = Scale(advantage=1.0, reward=1.0, rewarded=True)
    (unknown,), (zero,) = (outline.build_ledger(reward, None, scale, None) for reward in (None, 0.0))
    assert unknown == {"label": "reward", "number": "unknown", "bar": None}
    assert zero == {"label": "reward", "number": "0", "bar": (50.0, 0.0)}


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
    assert outline.terms_disagree(row) is opposite


def test_every_flag_of_the_credit_jobs_is_explained() -> None:
    """The viewer knows no estimator; this keeps its words in step with theirs."""
    assert set(outline.FLAGS) == set(Flag)
    assert all(explanation for _, _, explanation in outline.FLAGS.values())
