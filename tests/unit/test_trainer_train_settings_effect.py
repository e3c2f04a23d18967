"""Options without effect are reported with what would have effect; those with effect are left alone."""

from typing import Any

import pytest

from lake.errors import UsageError
from testkit.training import config
from trainer.config import TrainConfig
from trainer.losses import LOSSES
from trainer.train_settings import check_effect, describe_idle, find_idle_options, is_idle, is_set, without_option

LABELLED = {"options": {"threshold": 1.0}}


@pytest.mark.parametrize(
    ("loss", "fields", "option", "why"),
    [
        ("ppo", {"reference": "r"}, "reference", "ppo compares with none; set loss.kl.coefficient, or choose"),
        ("awr", {"reference": "r"}, "reference", "awr compares with none; choose one of dpo, dmpo, kto"),
        ("ppo", {"options": {"kl": {"max_ratio": 2.0}}}, "loss.kl.max_ratio", "loss.kl.coefficient is 0"),
        (
            "ppo",
            {"options": {"kl": {"coefficient": 0.1, "ratio_weighted": False, "max_ratio": 2.0}}},
            "loss.kl.max_ratio",
            "it limits the weight that loss.kl.ratio_weighted = true adds",
        ),
        ("sft", {"advantages": "x"}, "advantages", "sft reads no credit; live_only = true would"),
        ("kto", {"advantages": "x", **LABELLED}, "advantages", "kto reads no credit"),
        ("sft", {"unknown_staleness": "drop"}, "unknown_staleness", "set max_staleness"),
        ("sft", {"minibatches": 2, "episodes_per_step": 4}, "episodes_per_step", "minibatches says how many"),
        ("ppo", {"options": {"aggregation_constant": 5.0}}, "loss.aggregation_constant", "aggregation is token_mean"),
        ("ppo", {"options": {"unit": "episode"}}, "loss.unit", "token_mean averages over tokens for every unit"),
        ("sft", {"schedule": {"shape": "constant", "final_fraction": 0.5}}, "schedule.final_fraction", "is constant"),
        ("sft", {"validation": {"where": "a", "min_improvement": 0.1}}, "validation.min_improvement", "set validation"),
        ("sft", {"optimizer": {"loss_scale": {"initial": 8.0}}}, "optimizer.loss_scale", "dtype is float32"),
    ],
)
def test_an_option_without_effect_is_told(loss: str, fields: dict[str, Any], option: str, why: str) -> None:
    with pytest.raises(UsageError) as error:
        check_effect(config(loss, **fields))
    assert str(error.value).startswith(f"`{option}` has no effect: ")
    assert why in str(error.value)


@pytest.mark.parametrize(
    ("loss", "fields"),
    [
        ("awr", {"options": {"beta": 0.5}}),
        ("dpo", {"options": {"pairs": {"kind": "step", "graft": True, "margin": 0.5}}, "reference": "r"}),
        ("kto", {"options": {"threshold": 1.0, "score": "judge"}, "reference": "r"}),
        ("kto", {"advantages": "x", "options": {"unit": "turn"}}),
        ("dpo", {"advantages": "x"}),
        ("ppo", {"options": {"kl": {"coefficient": 0.1, "max_ratio": 2.0}}, "reference": "r"}),
        ("sft", {"advantages": "x", "live_only": True}),
        ("sft", {"max_staleness": 2, "unknown_staleness": "drop"}),
        ("sft", {"minibatches": 2}),
        ("sft", {"episodes_per_step": 4}),
        ("ppo", {"options": {"aggregation": "unit_mean_token_mean", "unit": "turn"}}),
        ("ppo", {"options": {"aggregation": "unit_mean_token_sum_norm", "unit": "turn", "aggregation_constant": 5.0}}),
        ("dr_grpo", {"options": {"aggregation_constant": 5.0}}),
        ("grpo", {"options": {"aggregation": "token_mean"}}),
        ("gspo", {"options": {"unit": "turn", "aggregation": "token_mean"}}),
        ("ppo", {"options": {"unit": "turn", "correction": {"method": "geometric_mask"}}}),
        ("ppo", {"options": {"unit": "token"}}),
        ("sft", {"schedule": {"shape": "linear", "final_fraction": 0.5}}),
        ("sft", {"validation": {"where": "a", "min_improvement": 0.1}, "keep_last": 1}),
        ("sft", {"dtype": "float16", "optimizer": {"loss_scale": {"initial": 8.0}}}),
    ],
)
def test_an_option_with_effect_passes(loss: str, fields: dict[str, Any]) -> None:
    check_effect(config(loss, **fields))


@pytest.mark.parametrize("loss", LOSSES)
def test_defaults_are_never_told_not_even_when_a_stored_configuration_is_read(loss: str) -> None:
    plain = config(loss)
    check_effect(plain)
    assert find_idle_options(TrainConfig.model_validate(plain.model_dump(mode="json"))) == {}


def test_several_are_told_at_once_and_the_way_of_python_is_by_value() -> None:
    config_given = config("ppo", {"kl": {"max_ratio": 2.0, "estimator": "k3_straight"}}, reference="r")
    assert list(find_idle_options(config_given)) == ["reference", "loss.kl.max_ratio"], (
        "what is said as it is changes nothing"
    )
    with pytest.raises(UsageError, match=r"`reference` has no effect: .*; `loss.kl.estimator` has .*; `loss.kl.max_"):
        check_effect(config_given)


def test_settings_are_taken_apart_by_dotted_names() -> None:
    settings = {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    assert (is_set(settings, "a.c.d"), is_set(settings, "a.x"), is_set(settings, "e.x")) == (True, False, False)
    assert without_option(settings, "a.c.d") == {"a": {"b": 1, "c": {}}, "e": 3}
    assert without_option(settings, "e") == {"a": {"b": 1, "c": {"d": 2}}}
    assert without_option(settings, "x.y") == settings
    assert is_idle("a.b", {"a": ""})
    assert not is_idle("ab", {"a": ""})
    assert describe_idle({"a": "b", "c": "d"}) == "`a` has no effect: b; `c` has no effect: d"
