"""Presets are configurations one could have written by hand."""

import pytest

from trainer.config import TrainConfig
from trainer.runs import presets


def test_a_preset_is_its_configuration() -> None:
    assert presets.sft("m", epochs=3) == TrainConfig(model="m", loss="sft", epochs=3)
    assert presets.awr("m", beta=0.3).awr.beta == 0.3
    assert presets.awr("m").loss == "awr"


@pytest.mark.parametrize(
    ("where", "expected"),
    [(None, "env_return >= 0.5"), ("a OR b", "(a OR b) AND env_return >= 0.5")],
)
def test_filtered_cloning_adds_its_threshold(where: str | None, expected: str) -> None:
    assert presets.filtered_bc("m", 0.5, where=where).where == expected


def test_rl_follows_sft() -> None:
    first, second = presets.sft_then_rl("m", presets.awr("unused"), epochs=2)
    assert (first.config.where, first.config.epochs, first.follows) == ("env_return > 0", 2, False)
    assert (second.config.loss, second.follows) == ("awr", True)
