"""Options without effect are told with what would have effect; those with effect are left alone."""

from typing import Any

import pytest

from lake.errors import UsageError
from testkit.training import config
from trainer.config import TrainConfig
from trainer.effect import check_effect, has, idle_options, in_words, says, without
from trainer.losses import LOSSES

LABELLED = {"pairs": {"threshold": 1.0}}


@pytest.mark.parametrize(
    ("loss", "fields", "option", "why"),
    [
        ("awr", {"ppo": {"clip_low": 0.1}}, "ppo", "the loss is awr; it reads `awr` (beta, max_weight)"),
        ("awr", {"ppo": {"clip_low": 0.2}}, "ppo", "the loss is awr"),
        ("sft", {"awr": {"beta": 0.5}}, "awr", "the loss is sft, which has no options of its own"),
        ("dmpo", {"dpo": {"beta": 0.5}}, "dpo", "it reads `dmpo`"),
        ("sft", {"pairs": {"margin": 1.0}}, "pairs", "sft compares nothing; dpo, dmpo, kto do"),
        (
            "dpo",
            {"pairs": {"threshold": 1.0}},
            "pairs.threshold",
            "dpo compares pairs (kind, margin, per_group, graft)",
        ),
        ("kto", {"pairs": {"kind": "step"}}, "pairs.kind", "kto looks at episodes one by one (threshold, score)"),
        ("kto", {"pairs": {"per_group": 3}}, "pairs.per_group", "kto looks at episodes one by one"),
        ("ppo", {"reference": "r"}, "reference", "ppo compares with none; set ppo.kl.coefficient, or choose"),
        ("awr", {"reference": "r"}, "reference", "awr compares with none; choose one of dpo, dmpo, kto"),
        ("ppo", {"ppo": {"kl": {"max_ratio": 2.0}}}, "ppo.kl.max_ratio", "ppo.kl.coefficient is 0"),
        (
            "ppo",
            {"ppo": {"kl": {"coefficient": 0.1, "ratio_weighted": False, "max_ratio": 2.0}}},
            "ppo.kl.max_ratio",
            "it limits the weight that ppo.kl.ratio_weighted = true adds",
        ),
        ("sft", {"advantages": "x"}, "advantages", "sft reads no credit; live_only = true would"),
        ("kto", {"advantages": "x", **LABELLED}, "advantages", "kto reads no credit"),
        ("sft", {"unknown_staleness": "drop"}, "unknown_staleness", "set max_staleness"),
        ("sft", {"minibatches": 2, "episodes_per_step": 4}, "episodes_per_step", "minibatches says how many"),
        ("dpo", {"aggregation": "token_mean"}, "aggregation", "dpo is a mean over pairs, not over tokens"),
        ("kto", {"aggregation": "token_mean"}, "aggregation", "kto is a mean over episodes"),
        ("ppo", {"aggregation_constant": 5.0}, "aggregation_constant", "aggregation is token_mean"),
        ("ppo", {"unit": "episode"}, "unit", "aggregation token_mean averages over tokens whatever the unit"),
        ("sft", {"schedule": {"shape": "constant", "final_fraction": 0.5}}, "schedule.final_fraction", "is constant"),
        ("sft", {"validation": {"where": "a", "min_improvement": 0.1}}, "validation.min_improvement", "set validation"),
    ],
)
def test_an_option_without_effect_is_told(loss: str, fields: dict[str, Any], option: str, why: str) -> None:
    with pytest.raises(UsageError) as error:
        check_effect(config(loss, **fields), "stage a: ")
    assert str(error.value).startswith(f"stage a: `{option}` has no effect: ")
    assert why in str(error.value)


@pytest.mark.parametrize(
    ("loss", "fields"),
    [
        ("awr", {"awr": {"beta": 0.5}}),
        ("dpo", {"pairs": {"kind": "step", "graft": True, "margin": 0.5, "per_group": 2}, "reference": "r"}),
        ("kto", {"pairs": {"threshold": 1.0, "score": "judge"}, "reference": "r"}),
        ("kto", {"advantages": "x"}),
        ("dpo", {"advantages": "x", "unit": "episode"}),
        ("ppo", {"ppo": {"kl": {"coefficient": 0.1, "max_ratio": 2.0}}, "reference": "r"}),
        ("sft", {"advantages": "x", "live_only": True}),
        ("sft", {"max_staleness": 2, "unknown_staleness": "drop"}),
        ("sft", {"minibatches": 2}),
        ("sft", {"episodes_per_step": 4}),
        ("ppo", {"aggregation": "unit_mean_token_mean", "unit": "turn"}),
        ("ppo", {"aggregation": "unit_mean_token_sum_norm", "unit": "turn", "aggregation_constant": 5.0}),
        ("dr_grpo", {"aggregation_constant": 5.0}),
        ("grpo", {"aggregation": "token_mean"}),
        ("gspo", {"unit": "turn", "aggregation": "token_mean"}),
        ("ppo", {"unit": "turn", "ppo": {"correction": {"method": "geometric_mask"}}}),
        ("ppo", {"unit": "token"}),
        ("sft", {"schedule": {"shape": "linear", "final_fraction": 0.5}}),
        ("sft", {"validation": {"where": "a", "min_improvement": 0.1}, "keep_last": 1}),
    ],
)
def test_an_option_with_effect_passes(loss: str, fields: dict[str, Any]) -> None:
    check_effect(config(loss, **fields))


@pytest.mark.parametrize("loss", LOSSES)
def test_defaults_are_never_told_not_even_when_a_stored_configuration_is_read(loss: str) -> None:
    plain = config(loss)
    check_effect(plain)
    assert idle_options(TrainConfig.model_validate(plain.model_dump(mode="json"))) == {}


def test_several_are_told_at_once_and_the_way_of_python_is_by_value() -> None:
    given = config("awr", ppo={"clip_low": 0.1}, pairs={"margin": 1.0}, dpo={})
    assert list(idle_options(given)) == ["ppo", "pairs"], "an empty section changes nothing"
    with pytest.raises(UsageError, match=r"`ppo` has no effect: .*; `dpo` has no effect: .*; `pairs` has no effect: "):
        check_effect(given)


def test_settings_are_taken_apart_by_dotted_names() -> None:
    settings = {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    assert (has(settings, "a.c.d"), has(settings, "a.x"), has(settings, "e.x")) == (True, False, False)
    assert without(settings, "a.c.d") == {"a": {"b": 1, "c": {}}, "e": 3}
    assert without(settings, "e") == {"a": {"b": 1, "c": {"d": 2}}}
    assert without(settings, "x.y") == settings
    assert says("a.b", {"a": ""})
    assert not says("ab", {"a": ""})
    assert in_words({"a": "b", "c": "d"}) == "`a` has no effect: b; `c` has no effect: d"
