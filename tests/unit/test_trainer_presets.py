"""Presets are configurations one could have written by hand."""

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from lake.errors import UsageError
from trainer.config import ScheduleConfig, TrainConfig
from trainer.losses.awr import AWR
from trainer.runs import presets
from trainer.train_settings import idle_options


def test_a_preset_is_its_configuration() -> None:
    assert presets.sft("m", epochs=3) == TrainConfig(model="m", loss="sft", epochs=3)
    assert presets.awr("m", beta=0.3).loss == AWR(beta=0.3)
    assert presets.awr("m").loss == AWR()


@pytest.mark.parametrize(
    ("where", "expected"),
    [(None, "env_return >= 0.5"), ("a OR b -- c", "(\na OR b -- c\n) AND env_return >= 0.5")],
)
def test_filtered_cloning_adds_its_threshold(where: str | None, expected: str) -> None:
    assert presets.filtered_bc("m", 0.5, where=where).where == expected


def test_a_condition_cannot_loosen_the_threshold() -> None:
    with pytest.raises(UsageError, match="one SQL expression"):
        presets.filtered_bc("m", where="a) OR (b")


def test_rl_follows_sft() -> None:
    first, second = presets.sft_then_rl("m", presets.awr("unused"), epochs=2)
    assert (first.config.where, first.config.epochs, first.follows) == ("env_return > 0", 2, False)
    assert (second.config.loss.name, second.follows) == ("awr", True)


@pytest.mark.parametrize(
    ("made", "written"),
    [
        (presets.dpo("m"), {"loss": {"name": "dpo", "beta": 0.1}}),
        (presets.dpo("m", 0.3, epochs=2), {"loss": {"name": "dpo", "beta": 0.3}, "epochs": 2}),
        (presets.step_dpo("m"), {"loss": {"name": "dpo", "pairs": {"kind": "step"}}}),
        (
            presets.step_dpo("m", margin=0.5, graft=True, loss={"pairs": {"per_group": 2}}),
            {"loss": {"name": "dpo", "pairs": {"kind": "step", "margin": 0.5, "graft": True, "per_group": 2}}},
        ),
        (presets.dmpo("m", gamma=1), {"loss": {"name": "dmpo", "beta": 0.1, "gamma": 1}}),
        (presets.kto("m"), {"loss": "kto"}),
        (
            presets.kto("m", threshold=1, loss={"desirable_weight": 0.5}),
            {"loss": {"name": "kto", "beta": 0.1, "desirable_weight": 0.5, "threshold": 1}},
        ),
    ],
)
def test_a_preset_for_preferences_is_its_configuration(made: TrainConfig, written: dict[str, Any]) -> None:
    assert made == TrainConfig.model_validate({"model": "m", "learning_rate": 1e-6, **written})
    assert idle_options(made) == {}


@pytest.mark.parametrize("preset", [presets.dpo, presets.step_dpo, presets.dmpo, presets.kto])
def test_every_field_of_a_preset_can_be_set(preset: Callable[..., TrainConfig]) -> None:
    made = preset("m", learning_rate=1e-4, reference="r", schedule=ScheduleConfig(shape="constant"))
    assert (made.learning_rate, made.reference, made.schedule.shape) == (1e-4, "r", "constant")
    with pytest.raises(ValidationError, match="colour"):
        preset("m", colour="red")
