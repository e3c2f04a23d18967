"""The configuration is closed, frozen, validated, and survives JSON."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from lake.settings import from_file
from testkit.training import config
from trainer.config import TrainConfig


def test_it_survives_json() -> None:
    full = config("ppo", where="split = 'train'", ppo={"dual_clip": None}, minibatches=4)
    assert TrainConfig.model_validate(full.model_dump(mode="json")) == full


def test_a_mixture_and_an_average_come_from_a_file_and_survive_json(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        """
[trainer]
model = "m"
loss = "sft"
unit = "episode"
aggregation = "unit_mean_token_mean"
max_staleness = 4

[[trainer.mixture]]
weight = 3
where = "env_return > 0"

[[trainer.mixture]]
weight = 1
run = "older"
"""
    )
    full = TrainConfig.model_validate(from_file(str(file), ["trainer"]))
    assert [source.describe() for source in full.mixture] == ["where env_return > 0", "run older"]
    assert (full.unit, full.aggregation, full.max_staleness) == ("episode", "unit_mean_token_mean", 4)
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
        ("loss", "dqn"),
        ("seed", -1),
        ("ppo", {"clip_low": 1.5}),
        ("max_staleness", -1),
        ("unit", "word"),
        ("aggregation", "sum"),
        ("mixture", [{"weight": 0}]),
        ("mixture", [{"where": "env_return > 0"}]),
    ],
)
def test_values_that_cannot_be_meant_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValidationError, match=field):
        config(**{"loss": "sft", field: value})
