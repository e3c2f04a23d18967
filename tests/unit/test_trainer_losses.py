"""The registry of losses, and what each of them declares that it needs under its settings."""

import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from testkit.loss_rows import evaluate, random_rows
from testkit.training import config
from trainer.config import TrainConfig
from trainer.losses import LOSSES, Aggregation, Atom, Needs, Temperature, Unit

SAMPLED = {"ppo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "dro"}
"""Losses that need the behaviour policy with any settings."""
PREFERENCES = {"dpo", "dmpo", "kto"}


def needs(name: str, options: dict[str, Any] | None = None) -> Needs:
    return config(name, options).loss.needs


@pytest.mark.parametrize("name", LOSSES)
def test_each_loss_has_a_module_of_its_name_with_its_formula_and_its_options(name: str) -> None:
    module = import_module(f"trainer.losses.{name}")
    assert LOSSES[name].__module__ == module.__name__
    assert "    L" in (module.__doc__ or ""), "the formula stands in the module's docstring"
    train_config = config(name)
    assert (type(train_config.loss), train_config.loss.name) == (LOSSES[name], name)
    assert TrainConfig.model_validate(train_config.model_dump(mode="json")) == train_config
    assert train_config.loss == LOSSES[name](), "its name alone stands for its defaults"


def test_no_loss_imports_torch() -> None:
    code = "import sys, trainer.config, trainer.losses; print('torch' in sys.modules)"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_an_unknown_loss_is_refused_with_the_names_that_there_are() -> None:
    with pytest.raises(ValidationError, match=r"'dqn' found .* does not match any of the expected tags: 'sft', 'awr'"):
        config("dqn")


def test_an_option_of_another_loss_is_refused() -> None:
    with pytest.raises(ValidationError, match="clip_low"):
        config("awr", {"clip_low": 0.1})


def test_which_loss_it_is_counts_as_said_where_nothing_else_is() -> None:
    """So that what was said, dumped, says it."""
    assert TrainConfig(model="m", loss=LOSSES["awr"]()).model_dump(exclude_unset=True)["loss"] == {"name": "awr"}


def test_likelihoods_use_temperature_one_and_ratios_the_sampled_one() -> None:
    for name in LOSSES:
        expected = Temperature.AS_SAMPLED if name in SAMPLED | {"reinforce"} else Temperature.ONE
        assert needs(name).temperature is expected, name


def test_who_needs_the_behaviour_policy_and_who_a_reference() -> None:
    assert {name for name in LOSSES if LOSSES[name].base_needs.behaviour_logprobs} == SAMPLED
    assert {name for name in LOSSES if needs(name).reference_logprobs} == PREFERENCES
    assert {name for name in LOSSES if needs(name).advantages} == SAMPLED | {"reinforce", "awr", "bc_exp"}
    assert {name for name in LOSSES if needs(name).step_advantages} == {"bc_exp"}
    assert {name for name in LOSSES if needs(name).pairs} == {"dpo", "dmpo"}
    assert {name for name in LOSSES if needs(name).labels} == {"kto"}
    assert {name for name in LOSSES if needs(name).atom is Atom.PAIR} == {"dpo", "dmpo"}


def test_units_and_aggregation_by_default() -> None:
    declared = {name: (needs(name).unit, needs(name).aggregation) for name in LOSSES}
    token = (Unit.TOKEN, Aggregation.TOKEN_MEAN)
    assert {name for name, default in declared.items() if default == token} == {
        "sft",
        "awr",
        "bc_exp",
        "ppo",
        "dapo",
        "cispo",
        "dro",
    }
    assert declared["grpo"] == declared["gspo"] == (Unit.EPISODE, Aggregation.UNIT_MEAN_TOKEN_MEAN)
    assert declared["dr_grpo"] == (Unit.EPISODE, Aggregation.UNIT_MEAN_TOKEN_SUM_NORM)
    assert declared["reinforce"] == (Unit.EPISODE, Aggregation.UNIT_MEAN_TOKEN_SUM)
    assert {declared[name][0] for name in PREFERENCES} == {Unit.EPISODE}


def test_reinforce_needs_log_probabilities_for_its_correction_only() -> None:
    plain = needs("reinforce", {"correction": {"method": "none"}})
    assert (plain.behaviour_logprobs, plain.temperature) == (False, Temperature.ONE)
    assert needs("reinforce").behaviour_logprobs


def test_a_pull_needs_a_reference_and_its_weight_the_behaviour_policy() -> None:
    pulled = {"correction": {"method": "none"}, "kl": {"coefficient": 0.01}}
    assert needs("reinforce", pulled).reference_logprobs
    assert needs("reinforce", pulled).behaviour_logprobs
    assert needs("reinforce", pulled).temperature is Temperature.AS_SAMPLED
    unweighted = pulled | {"kl": {"coefficient": 0.01, "ratio_weighted": False}}
    assert not needs("reinforce", unweighted).behaviour_logprobs


def test_a_correction_asks_for_what_it_looks_at() -> None:
    assert not needs("ppo").proximal_logprobs
    decoupled = needs("ppo", {"correction": {"method": "token_truncate", "decoupled": True, "normalise": True}})
    assert decoupled.proximal_logprobs
    assert decoupled.statistics == ("correction_mass", "correction_kept")
    assert decoupled.unit is Unit.TOKEN
    over_units = needs("ppo", {"correction": {"method": "sequence_mask"}})
    assert (over_units.unit, over_units.aggregation) == (Unit.SEQUENCE, Aggregation.TOKEN_MEAN)
    assert needs("grpo", {"correction": {"method": "sequence_mask"}}).unit is Unit.EPISODE


def test_statistics_are_prepared_only_where_they_are_wanted() -> None:
    correction_options = {"correction": {"method": "icepop", "decoupled": True, "normalise": True}}
    for name, options in (("kto", {}), ("ppo", {}), ("ppo", correction_options), ("reinforce", {})):
        loss = config(name, options).loss
        assert tuple(loss.prepare([random_rows(4)])) == loss.needs.statistics


def test_options_override_unit_and_aggregation() -> None:
    declared = needs("gspo", {"unit": "turn", "aggregation": "token_mean"})
    assert (declared.unit, declared.aggregation) == (Unit.TURN, Aggregation.TOKEN_MEAN)


@pytest.mark.parametrize(
    ("name", "options"),
    [("gspo", {}), ("ppo", {"correction": {"method": "sequence_mask"}})],
)
def test_a_function_of_whole_units_refuses_the_token(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=rf"{name} .* set loss.unit to"):
        needs(name, options | {"unit": "token"})
    with pytest.raises(ValidationError, match="unit"):
        needs("kto", {"unit": "token"})


@pytest.mark.parametrize("name", ["ppo", "grpo", "gspo", "cispo"])
@pytest.mark.parametrize("method", ["token_truncate", "sequence_truncate"])
def test_a_ratio_loss_does_not_count_the_distance_twice(name: str, method: str) -> None:
    with pytest.raises(ValidationError, match="a second time"):
        config(name, {"correction": {"method": method}})
    with pytest.raises(ValidationError, match=r"correction\.decoupled is set"):
        config(name, {"correction": {"method": "icepop", "normalise": True}})
    config(name, {"correction": {"method": method, "decoupled": True}})
    config("reinforce", options={"correction": {"method": method}})


def test_reinforce_keeps_its_method_when_only_a_limit_is_given_and_has_nothing_to_decouple() -> None:
    correction = config("reinforce", options={"correction": {"high": 5.0}}).loss.correction
    assert (correction.method, correction.limits) == ("token_truncate", (0.0, 5.0))
    with pytest.raises(ValidationError, match="takes no ratio"):
        config("reinforce", options={"correction": {"decoupled": True}})


INPUTS = {
    "advantages_N": {"awr", "bc_exp", "reinforce", *SAMPLED},
    "behaviour_logprobs_N": {"reinforce", *SAMPLED},
    "reference_logprobs_N": PREFERENCES,
    "unit_N": {"gspo", *PREFERENCES},
    "step_index_N": {"dmpo"},
    "pair_U": {"dpo", "dmpo"},
    "sign_U": PREFERENCES,
}


@pytest.mark.parametrize(
    ("field", "name"), [(field, name) for field, names in INPUTS.items() for name in sorted(names)]
)
def test_a_loss_without_its_inputs_says_what_it_needs(field: str, name: str) -> None:
    with pytest.raises(ValueError, match=f"needs {field}"):
        evaluate(name, replace(random_rows(4), **{field: None}))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_leaves_alone_what_it_does_not_need(name: str) -> None:
    rows = random_rows(4)
    needless = [field for field in INPUTS if name not in INPUTS[field]]
    bare = replace(rows, entropy_N=None, **dict.fromkeys(needless))  # type: ignore[arg-type]
    assert evaluate(name, bare).total.item() == evaluate(name, rows).total.item()
