"""Off-policy correction: weights and masks worked out by hand, and options that contradict themselves."""

import math

import pytest
import torch  # noqa: TID253 - a script that does nothing without it
from pydantic import ValidationError

from lake.read.training import CORRECTION_LIMITS
from trainer.losses.policy import (
    OVER_UNITS,
    CorrectionConfig,
    CorrectionMethod,
    compute_correction,
    normaliser,
    normaliser_sums,
)

RHO_N = torch.tensor([0.5, 4.0, 1.0, 0.25, 8.0])
UNIT_N = torch.tensor([0, 0, 1, 2, 2])
"""Products 2, 1, 2; geometric means sqrt 2, 1, sqrt 2."""
LOG_RHO_N = RHO_N.log()

WORKED: list[tuple[str, float | None, float, list[float], list[bool]]] = [
    ("token_truncate", None, 2.0, [0.5, 2.0, 1.0, 0.25, 2.0], [True] * 5),
    ("token_mask", None, 2.0, [0.5, 0.0, 1.0, 0.25, 0.0], [True, False, True, True, False]),
    ("icepop", 0.4, 4.5, [0.5, 4.0, 1.0, 0.0, 0.0], [True, True, True, False, False]),
    ("sequence_truncate", None, 1.5, [1.5, 1.5, 1.0, 1.5, 1.5], [True] * 5),
    ("sequence_mask", None, 1.5, [0.0, 0.0, 1.0, 0.0, 0.0], [False, False, True, False, False]),
    ("geometric_mask", 0.9, 1.5, [1.0] * 5, [True] * 5),
    ("geometric_mask", 0.9, 1.1, [0.0, 0.0, 1.0, 0.0, 0.0], [False, False, True, False, False]),
]


@pytest.mark.parametrize(("method", "low", "high", "weights", "is_kept"), WORKED)
def test_weights_by_hand(
    method: str, low: float | None, high: float, weights: list[float], is_kept: list[bool]
) -> None:
    correction = compute_correction(
        LOG_RHO_N, UNIT_N, 3, CorrectionConfig(method=CorrectionMethod(method), low=low, high=high)
    )
    assert correction.weight_N.tolist() == pytest.approx(weights)
    assert correction.keep_N.tolist() == is_kept


def test_no_method_leaves_everything_as_it_is() -> None:
    correction = compute_correction(LOG_RHO_N, None, 0, CorrectionConfig())
    assert correction.weight_N.tolist() == [1.0] * 5
    assert correction.keep_N.all()


def test_truncation_without_a_limit_is_importance_sampling() -> None:
    endless = CorrectionConfig(method=CorrectionMethod.TOKEN_TRUNCATE, high=1e30)
    assert compute_correction(LOG_RHO_N, None, 0, endless).weight_N.tolist() == pytest.approx(RHO_N.tolist())


def test_only_truncated_weights_count_as_limited() -> None:
    truncated = compute_correction(LOG_RHO_N, None, 0, CorrectionConfig(method=CorrectionMethod.TOKEN_TRUNCATE))
    masked = compute_correction(LOG_RHO_N, None, 0, CorrectionConfig(method=CorrectionMethod.TOKEN_MASK))
    assert truncated.limited_N.tolist() == [False, True, False, False, True]
    assert not masked.limited_N.any()


def test_a_product_over_a_long_unit_does_not_overflow() -> None:
    unit_N = torch.zeros(2000, dtype=torch.int64)
    for sign in (1.0, -1.0):
        config = CorrectionConfig(method=CorrectionMethod.SEQUENCE_MASK, high=1e30)
        weight_N = compute_correction(torch.full((2000,), sign), unit_N, 1, config).weight_N
        assert weight_N.unique().tolist() == pytest.approx([math.exp(sign * 20)], rel=1e-5)


def test_the_geometric_mean_does_not_depend_on_the_length_and_the_product_does() -> None:
    """The length trap: a ratio of 1.1 per token is 2.6 over 10 tokens and 13,780 over 100."""
    for length, product in ((10, 2.5937), (100, 13780.6)):
        log_rho_N, unit_N = torch.full((length,), math.log(1.1)).double(), torch.zeros(length, dtype=torch.int64)
        mask = CorrectionConfig(method=CorrectionMethod.GEOMETRIC_MASK, low=0.9, high=1.11)
        endless = CorrectionConfig(method=CorrectionMethod.SEQUENCE_TRUNCATE, high=1e30)
        assert compute_correction(log_rho_N, unit_N, 1, mask).keep_N.all()
        assert compute_correction(log_rho_N, unit_N, 1, endless).weight_N[0].item() == pytest.approx(product, rel=1e-4)


@pytest.mark.parametrize("method", sorted(OVER_UNITS))
def test_methods_over_units_say_that_they_need_one(method: CorrectionMethod) -> None:
    with pytest.raises(ValueError, match="needs a unit"):
        compute_correction(LOG_RHO_N, None, 0, CorrectionConfig(method=method))


@pytest.mark.parametrize("method", [method for method in CorrectionMethod if method is not CorrectionMethod.NONE])
def test_nothing_to_correct_gives_weight_one_everywhere(method: CorrectionMethod) -> None:
    correction = compute_correction(torch.zeros(5), UNIT_N, 3, CorrectionConfig(method=method))
    assert correction.weight_N.tolist() == [1.0] * 5
    assert correction.keep_N.all()


@pytest.mark.parametrize("method", list(CorrectionMethod))
def test_no_tokens_are_no_trouble(method: CorrectionMethod) -> None:
    none = torch.zeros(0)
    correction = compute_correction(none, torch.zeros(0, dtype=torch.int64), 0, CorrectionConfig(method=method))
    assert len(correction.weight_N) == 0


def test_no_gradient_goes_through_a_weight() -> None:
    log_rho_N = LOG_RHO_N.clone().requires_grad_()
    for method in CorrectionMethod:
        assert not compute_correction(log_rho_N, UNIT_N, 3, CorrectionConfig(method=method)).weight_N.requires_grad


def test_the_mean_weight_is_taken_over_what_is_kept_with_the_plans_weights() -> None:
    correction = compute_correction(LOG_RHO_N, None, 0, CorrectionConfig(method=CorrectionMethod.TOKEN_MASK))
    sums = normaliser_sums(correction, torch.tensor([1.0, 1.0, 2.0, 4.0, 1.0]))
    assert {name: value.item() for name, value in sums.items()} == {"correction_mass": 3.5, "correction_kept": 7.0}
    assert normaliser({"correction_mass": 3.5, "correction_kept": 7.0}) == 0.5
    assert normaliser({"correction_mass": 0.0, "correction_kept": 0.0}) == 1.0, "all masked: nothing to divide"


def test_each_method_knows_its_limits() -> None:
    assert {method: CorrectionConfig(method=method).limits for method in CorrectionMethod} == {
        "none": (0.0, math.inf),
        "token_truncate": (0.0, 2.0),
        "token_mask": (0.0, 2.0),
        "icepop": (0.5, 5.0),
        "sequence_truncate": (0.0, 5.0),
        "sequence_mask": (0.0, 3.0),
        "geometric_mask": (0.999, 1.001),
    }
    assert CORRECTION_LIMITS.keys() == set(CorrectionMethod)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"method": "token_mask", "low": 0.5}, "method token_mask has no limit `low`"),
        ({"high": 2.0}, "method none has no limit `high`"),
        ({"method": "token_mask", "high": math.inf}, "finite number"),
        ({"normalise": True}, "need a method"),
        ({"decoupled": True}, "need a method"),
        ({"method": "token_mask", "proximal_every": 4}, "no effect unless decoupled is set"),
        ({"method": "token_mask", "decoupled": True, "proximal_every": 0}, "greater than or equal to 1"),
        ({"method": "geometric_mask", "normalise": True}, "nothing to normalise"),
    ],
)
def test_settings_without_effect_are_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        CorrectionConfig.model_validate(fields)
