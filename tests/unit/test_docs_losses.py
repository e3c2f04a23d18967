"""docs/guides/losses.md: no loss, option, estimator or method goes unmentioned, and the example runs."""

import contextlib
import io
import re

import pytest

from lake.errors import UsageError
from lake.read.training import CORRECTION_LIMITS
from testkit.shared import CHECKOUT
from trainer.losses import LOSSES, Aggregation, Unit
from trainer.losses.base import PairsConfig
from trainer.losses.policy import CorrectionConfig, CorrectionMethod, KLConfig, KLEstimator
from trainer.train_settings import build_config, parse_settings

PAGE = (CHECKOUT / "docs" / "guides" / "losses.md").read_text("utf-8")
ROWS = {row.split("|")[1].strip().strip("`"): row for row in PAGE.splitlines() if row.startswith("| `")}
AVERAGES = {
    (Unit.TOKEN, Aggregation.TOKEN_MEAN): "tokens",
    (Unit.EPISODE, Aggregation.UNIT_MEAN_TOKEN_MEAN): "means of ",
    (Unit.EPISODE, Aggregation.UNIT_MEAN_TOKEN_SUM): "sums of episodes",
    (Unit.EPISODE, Aggregation.UNIT_MEAN_TOKEN_SUM_NORM): "sums of episodes, over a constant",
}


@pytest.mark.parametrize("name", LOSSES)
def test_each_loss_has_a_row_that_says_what_it_needs_and_how_it_is_averaged(name: str) -> None:
    cells = [cell.strip() for cell in ROWS[name].split("|")]
    needs = LOSSES[name]().needs
    assert ("advantages" in cells[3]) == needs.advantages
    assert ("`lp_b`" in cells[3]) == needs.behaviour_logprobs
    assert ("reference" in cells[3]) == needs.reference_logprobs
    assert ("pairs" in cells[3], "labels" in cells[3]) == (needs.pairs is not None, needs.labels is not None)
    if not needs.reference_logprobs:
        assert cells[4].startswith(AVERAGES[needs.unit, needs.aggregation])


@pytest.mark.parametrize("name", LOSSES)
def test_each_option_is_explained(name: str) -> None:
    for option in [*LOSSES[name].model_fields, *PairsConfig.model_fields]:
        assert re.search(rf"`{option}( = [^`]+)?`", PAGE), f"{name}.{option}"


def test_estimators_and_methods_are_listed_with_their_limits() -> None:
    for estimator in KLEstimator:
        assert estimator in ROWS or f"{estimator}` (default)" in PAGE
    assert KLConfig().estimator is KLEstimator.K3_STRAIGHT
    assert KLConfig().ratio_weighted
    for option in [*KLConfig.model_fields, *CorrectionConfig.model_fields]:
        assert f"`{option}`" in PAGE or option in {"low", "high"}
    for method in CorrectionMethod:
        limits = ", ".join(f"{limit:g}" for limit in CORRECTION_LIMITS[method] if limit is not None)
        assert ROWS[method].split("|")[3].strip() == limits


def test_the_reasons_of_refusals_are_named() -> None:
    for reason in ("advantages_vary", "no_pairs", "one_label"):
        assert f"`{reason}`" in PAGE


EXAMPLES = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL)


def test_there_are_two_examples() -> None:
    assert len(EXAMPLES) == 2


@pytest.mark.parametrize(("code", "output"), EXAMPLES)
def test_an_example_prints_what_the_page_says(code: str, output: str) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    assert printed.getvalue() == output


def test_the_fault_is_the_one_that_the_page_shows() -> None:
    ((command, fault),) = re.findall(r"```sh\n(.*?)```\n\n```text\ntrajlake: (.*?)\n```", PAGE, re.DOTALL)
    with pytest.raises(UsageError) as error:
        build_config(parse_settings(("model=tiny", "loss.name=awr", "loss.clip_low=0.1")))
    assert "--loss awr --set loss.clip_low=0.1" in command
    assert str(error.value) == fault


def test_every_recipe_for_preferences_has_a_row_with_its_defaults() -> None:
    for recipe, name, settings in (
        ("trajectory DPO", "dpo", {"beta": 0.1}),
        ("step DPO", "dpo", {"beta": 0.1}),
        ("DMPO", "dmpo", {"beta": 0.1, "gamma": 0.7}),
        ("KTO", "kto", {"beta": 0.1}),
    ):
        cells = re.search(rf"^\| {recipe} \(`{name}`\) \| (.*?) \|", PAGE, re.MULTILINE)
        assert cells is not None
        for option, value in settings.items():
            assert f"`{option}` {value}" in cells[1]
            assert getattr(LOSSES[name](), option) == value
