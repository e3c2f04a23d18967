"""Settings from before losses owned their options are read as they were meant."""

from typing import Any

import pytest

from lake.errors import UsageError
from lake.settings import validated
from trainer.config import TrainConfig
from trainer.former_layout import renewed, renewed_record
from trainer.losses import LOSSES
from trainer.losses.awr import AWR
from trainer.losses.base import Loss
from trainer.losses.dpo import DPO
from trainer.losses.dro import DRO
from trainer.losses.gspo import GSPO
from trainer.losses.kto import KTO
from trainer.losses.ppo import PPO
from trainer.losses.sft import SFT
from trainer.runs.runs import check_unchanged

KL = {"coefficient": 0.0, "estimator": "k3_straight", "ratio_weighted": True, "max_ratio": 10.0}
CORRECTION = {"low": None, "high": None, "decoupled": False, "proximal_every": None, "normalise": False}
POLICY = {"entropy_coefficient": 0.0, "kl": KL, "correction": {"method": "none", **CORRECTION}}
CLIPPED = {**POLICY, "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
PAIRED = {"beta": 0.1, "label_smoothing": 0.0, "nll_coefficient": 0.0}
RECORD: dict[str, Any] = {
    "model": "m",
    "seed": 3,
    "max_length": 77,
    "aggregation": None,
    "unit": None,
    "aggregation_constant": None,
    "awr": {"beta": 1.0, "max_weight": 20.0},
    "bc_exp": {"beta": 1.0, "max_weight": 20.0},
    "reinforce": {**POLICY, "correction": {"method": "token_truncate", **CORRECTION}},
    "ppo": {**CLIPPED, "clip_high": 0.28, "dual_clip": 3.0},
    "grpo": CLIPPED,
    "dr_grpo": CLIPPED,
    "dapo": {**CLIPPED, "clip_high": 0.28},
    "gspo": {**POLICY, "clip_low": 0.0003, "clip_high": 0.0004},
    "cispo": {**POLICY, "min_ratio": 0.0, "max_ratio": 5.0},
    "dro": {"entropy_coefficient": 0.0, "kl": KL, "beta": 0.1},
    "dpo": {**PAIRED, "length_normalised": False},
    "dmpo": {**PAIRED, "gamma": 0.7},
    "kto": {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0},
    "pairs": {
        "kind": "episode",
        "margin": 0.0,
        "per_group": None,
        "graft": False,
        "threshold": None,
        "score": "env_return",
    },
}
"""What a run stored with every option at its default, but for `loss`."""


@pytest.mark.parametrize("name", LOSSES)
def test_a_stored_configuration_has_the_defaults_of_its_loss(name: str) -> None:
    config = TrainConfig.model_validate(renewed_record(RECORD | {"loss": name}))
    assert config == TrainConfig(model="m", seed=3, max_length=77, loss=name)


@pytest.mark.parametrize(
    ("stored", "loss"),
    [
        ({"loss": "awr", "awr": {"beta": 0.5, "max_weight": 20.0}}, AWR(beta=0.5)),
        ({"loss": "gspo", "unit": "turn"}, GSPO(unit="turn")),
        ({"loss": "ppo", "ppo": {**CLIPPED, "clip_high": 0.28}}, PPO(dual_clip=None)),
        (
            {"loss": "sft", "aggregation": "unit_mean_token_sum_norm", "unit": "turn", "aggregation_constant": 5.0},
            SFT(aggregation="unit_mean_token_sum_norm", unit="turn", aggregation_constant=5.0),
        ),
        (
            {"loss": "dpo", "pairs": {**RECORD["pairs"], "kind": "step", "margin": 0.5}},
            DPO(pairs={"kind": "step", "margin": 0.5}),
        ),
        ({"loss": "dpo", "unit": "episode"}, DPO()),
        (
            {"loss": "kto", "unit": "turn", "pairs": {**RECORD["pairs"], "threshold": 1.0}},
            KTO(unit="turn", threshold=1.0),
        ),
        ({"loss": "dro", "awr": {"beta": 9.0, "max_weight": 1.0}}, DRO()),
    ],
)
def test_a_stored_configuration_keeps_its_options(stored: dict[str, Any], loss: Loss) -> None:
    assert TrainConfig.model_validate(renewed_record(RECORD | stored)).loss == loss


@pytest.mark.parametrize("name", LOSSES)
def test_a_run_of_before_is_unchanged_where_the_same_is_said_now(name: str) -> None:
    stored = renewed_record(RECORD | {"loss": name})
    check_unchanged({"loss": name, "seed": 3}, stored)
    check_unchanged(TrainConfig(model="m", loss=name).model_dump(mode="json", exclude_unset=True), stored)
    with pytest.raises(UsageError, match=r"these differ: loss\.name '\w+' \(the run has '\w+'\); leave them out"):
        check_unchanged({"loss": "sft" if name != "sft" else "awr"}, stored)


def test_what_is_stored_now_is_left_as_it_is() -> None:
    stored = TrainConfig(model="m", loss={"name": "awr", "beta": 0.5}).model_dump(mode="json")
    assert renewed_record(stored) == stored
    online = {"rounds": 3, "ppo": {"clip_low": 0.1}}
    assert renewed_record(online) == online


def test_a_file_is_read_as_it_was_meant() -> None:
    file = {"model": "m", "loss": "kto", "kto": {"beta": 0.5}, "pairs": {"threshold": 1.0}, "unit": "turn"}
    assert renewed(file) == {"model": "m", "loss": {"name": "kto", "beta": 0.5, "threshold": 1.0, "unit": "turn"}}
    now = {"model": "m", "loss": {"name": "kto", "beta": 0.5}, "stages": [{"name": "a"}]}
    assert renewed(now) == now


def test_what_is_said_in_both_ways_holds_as_it_is_said_now() -> None:
    mixed = {"loss": {"name": "awr", "beta": 2}, "awr": {"beta": 1, "max_weight": 3}}
    assert renewed(mixed) == {"loss": {"name": "awr", "beta": 2, "max_weight": 3}}


@pytest.mark.parametrize(
    ("file", "fault"),
    [
        ({"loss": "sft", "awr": {"beta": 0.5}}, "there is no option `awr`"),
        ({"loss": "dpo", "pairs": {"threshold": 1.0}}, "there is no option `pairs`"),
        ({"loss": "dpo", "aggregation": "token_mean"}, "there is no option `aggregation`"),
        ({"loss": {"name": ["awr"]}, "awr": {"beta": 0.5}}, "`loss` has the name"),
        ({"loss": "awr", "awr": {"bta": 0.5}}, "there is no option `loss.bta` of awr; valid: beta"),
    ],
)
def test_what_the_loss_of_a_file_never_read_is_refused(file: dict[str, Any], fault: str) -> None:
    with pytest.raises(UsageError, match=fault):
        validated(TrainConfig, renewed({"model": "m"} | file))


def test_stages_take_the_options_of_their_loss_from_above() -> None:
    file = {
        "model": "m",
        "awr": {"beta": 0.5},
        "unit": "turn",
        "aggregation": "unit_mean_token_mean",
        "stages": [
            {"name": "a", "loss": "sft"},
            {"name": "b", "loss": "awr", "awr": {"max_weight": 5.0}},
            {"name": "c", "loss": "dpo", "pairs": {"kind": "step"}},
        ],
    }
    average = {"unit": "turn", "aggregation": "unit_mean_token_mean"}
    assert renewed(file) == {
        "model": "m",
        "stages": [
            {"name": "a", "loss": {"name": "sft", **average}},
            {"name": "b", "loss": {"name": "awr", "beta": 0.5, "max_weight": 5.0, **average}},
            {"name": "c", "loss": {"name": "dpo", "pairs": {"kind": "step"}}},
        ],
    }
    above = {"loss": "awr", "stages": [{"name": "a", "awr": {"beta": 2}}, {"name": "b"}]}
    assert renewed(above) == {
        "loss": "awr",
        "stages": [{"name": "a", "loss": {"name": "awr", "beta": 2}}, {"name": "b"}],
    }
    idle = {"model": "m", "loss": "sft", "ppo": {"clip_low": 0.1}, "stages": [{"name": "a"}]}
    assert renewed(idle)["ppo"] == {"clip_low": 0.1}, "for validation to refuse"
