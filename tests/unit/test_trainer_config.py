"""The configuration is closed, frozen, validated, and survives JSON."""

import pytest
from pydantic import ValidationError

from testkit.training import config
from trainer.config import TrainConfig


def test_it_survives_json() -> None:
    full = config("ppo", where="split = 'train'", ppo={"dual_clip": None}, minibatches=4)
    assert TrainConfig.model_validate(full.model_dump(mode="json")) == full


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(ValidationError, match="lr"):
        config(lr=1e-3)


def test_it_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        config().seed = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epochs", 0),
        ("max_length", 1),
        ("learning_rate", 0.0),
        ("loss", "dpo"),
        ("seed", -1),
        ("ppo", {"clip_low": 1.5}),
    ],
)
def test_values_that_cannot_be_meant_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValidationError, match=field):
        config(**{"loss": "sft", field: value})
