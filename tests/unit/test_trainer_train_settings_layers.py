"""Settings over settings: sections are merged, and another loss begins with its own defaults."""

from typing import Any

import pytest

from trainer.losses.awr import AWR
from trainer.train_settings import layer_settings


@pytest.mark.parametrize(
    ("below", "above", "merged"),
    [
        ("awr", "sft", {"name": "sft"}),
        ("awr", {"beta": 0.5}, {"name": "awr", "beta": 0.5}),
        ({"beta": 0.5}, "awr", {"name": "awr", "beta": 0.5}),
        ({"name": "awr", "beta": 0.5}, "awr", {"name": "awr", "beta": 0.5}),
        ({"name": "awr", "beta": 0.5}, {"name": "awr", "beta": 1}, {"name": "awr", "beta": 1}),
        ({"name": "awr", "beta": 0.5}, "dpo", {"name": "dpo"}),
        ({"name": "awr", "beta": 0.5}, {"name": "dpo", "pairs": {}}, {"name": "dpo", "pairs": {}}),
        (
            {"name": "dpo", "pairs": {"margin": 1}},
            {"pairs": {"kind": "step"}},
            {"name": "dpo", "pairs": {"margin": 1, "kind": "step"}},
        ),
    ],
)
def test_options_follow_their_loss(below: Any, above: Any, merged: dict[str, Any]) -> None:
    assert layer_settings({"loss": below, "seed": 1}, {"loss": above}) == {"loss": merged, "seed": 1}


def test_what_one_says_alone_stays() -> None:
    assert layer_settings({"loss": "awr"}, {"seed": 1}) == {"loss": {"name": "awr"}, "seed": 1}
    assert layer_settings({"loss": "awr"}, {"loss": AWR(beta=2)})["loss"] == AWR(beta=2)
