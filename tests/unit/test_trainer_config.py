"""The configuration is closed, frozen, validated, and survives JSON."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from lake.errors import UsageError
from lake.settings import read_section, validate
from testkit.training import config
from trainer.config import TrainConfig


def test_it_survives_json() -> None:
    full = config("ppo", where="split = 'train'", options={"dual_clip": None}, minibatches=4)
    assert TrainConfig.model_validate(full.model_dump(mode="json")) == full


def test_a_mixture_and_an_average_come_from_a_file_and_survive_json(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        """
[trainer]
model = "m"
max_staleness = 4
loss = { name = "sft", unit = "episode", aggregation = "unit_mean_token_mean" }

[[trainer.mixture]]
weight = 3
where = "env_return > 0"

[[trainer.mixture]]
weight = 1
run = "older"
"""
    )
    full = TrainConfig.model_validate(read_section(str(file), ["trainer"]))
    assert [source.describe() for source in full.mixture] == ["where env_return > 0", "run older"]
    assert (full.loss.unit, full.loss.aggregation, full.max_staleness) == ("episode", "unit_mean_token_mean", 4)
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
        ("loss", {"name": "ppo", "clip_low": 1.5}),
        ("loss", {"name": "sft", "unit": "word"}),
        ("loss", {"name": "sft", "aggregation": "sum"}),
        ("loss", {"clip_low": 0.1}),
        ("ppo", {"clip_low": 0.1}),
        ("max_staleness", -1),
        ("mixture", [{"weight": 0}]),
        ("mixture", [{"where": "env_return > 0"}]),
    ],
)
def test_values_that_cannot_be_meant_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValidationError, match=field):
        config(**{"loss": "sft", field: value})


@pytest.mark.parametrize(
    ("field", "value", "fault"),
    [
        ("epochs", True, "`epochs` is True; valid: a whole number"),
        ("max_staleness", False, "`max_staleness` is False; valid: a whole number"),
        ("loss", {"name": "ppo", "clip_low": True}, "`loss.clip_low` is True; valid: a number"),
        ("loss", {"name": "ppo", "kl": {"coefficient": True}}, "`loss.kl.coefficient` is True; valid: a number"),
        ("loss", {"name": "awr", "bta": 1}, "there is no option `loss.bta` of awr; valid: beta"),
        ("loss", {"name": "awr", "kl": {}}, "there is no option `loss.kl` of awr; valid: name, aggregation, unit, "),
        ("loss", {"name": "gspo", "unit": "token"}, "`loss`: gspo uses whole units under these options: set loss.unit"),
        ("loss", {}, "`loss` is {}; valid: keys with values, 'name' among them"),
        ("learning_rate", float("inf"), "`learning_rate` is inf; valid: a finite number"),
        ("loss", {"name": "awr", "max_weight": float("nan")}, "`loss.max_weight` is nan; valid: a finite number"),
        ("loss", "dqn", "`loss` has the name 'dqn'; valid: 'sft', 'awr', 'bc_exp'"),
        ("lora", {"targets": 3}, "`lora.targets` is 3; valid: a list or 'all-linear'"),
        ("mixture", [{"where": "a"}], "`mixture.0.weight` is missing"),
    ],
)
def test_a_wrong_value_is_told_with_what_is_valid(field: str, value: object, fault: str) -> None:
    with pytest.raises(UsageError) as error:
        validate(TrainConfig, {"model": "m", "loss": "sft", field: value})
    assert str(error.value).startswith(fault)


def test_true_and_false_are_what_they_are_where_they_are_meant() -> None:
    config_made = config("ppo", {"kl": {"ratio_weighted": False}}, live_only=False, gradient_checkpointing=True)
    assert (config_made.live_only, config_made.gradient_checkpointing, config_made.loss.kl.ratio_weighted) == (
        False,
        True,
        False,
    )
