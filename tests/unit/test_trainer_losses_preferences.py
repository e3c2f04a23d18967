"""The losses on preferences: against autograd of the formula as the papers print it, and what they report."""

import math
from dataclasses import replace

import pytest
import torch  # noqa: TID253 - a script that does nothing without it
from torch.nn.functional import logsigmoid  # noqa: TID253

from testkit.loss_rows import evaluate, random_rows, required_, value_and_gradient
from testkit.training import config
from trainer.losses import LossRows
from trainer.losses.dmpo import turn_factors

ROWS = random_rows(4, seed=11, drift=0.5)


def pair(better: list[float], rejected: list[float], reference: float = -1.0) -> LossRows:
    """One pair of single-turn units with these log-probabilities."""
    logprobs_N = torch.tensor(better + rejected, dtype=torch.float64)
    return LossRows(
        logprobs_N=logprobs_N,
        weight_N=torch.ones_like(logprobs_N),
        reference_logprobs_N=torch.full_like(logprobs_N, reference),
        unit_N=torch.tensor([0] * len(better) + [1] * len(rejected)),
        weight_U=torch.tensor([0.5, 0.5], dtype=torch.float64),
        step_index_N=torch.zeros(len(logprobs_N), dtype=torch.int32),
        pair_U=torch.tensor([0, 0]),
        sign_U=torch.tensor([1.0, -1.0]),
    )


def test_dpo_has_the_gradient_of_autograd_on_the_printed_formula() -> None:
    unit_N, sign_U = required_(ROWS.unit_N), required_(ROWS.sign_U)
    logprobs_N = ROWS.logprobs_N.clone().requires_grad_()
    losses = []
    for first in (0, 2):
        better, rejected = (first, first + 1) if sign_U[first] > 0 else (first + 1, first)
        log_pi, log_ref = [
            [values[unit_N == unit].sum() for unit in (better, rejected)]
            for values in (logprobs_N, required_(ROWS.reference_logprobs_N))
        ]
        losses.append(-logsigmoid(0.3 * ((log_pi[0] - log_ref[0]) - (log_pi[1] - log_ref[1]))))
    naive = torch.stack(losses).mean()
    (naive_N,) = torch.autograd.grad(naive, logprobs_N)
    value, found_N = value_and_gradient("dpo", ROWS, {"beta": 0.3})
    assert value == pytest.approx(naive.item(), rel=1e-12)
    torch.testing.assert_close(found_N, naive_N)


def test_the_order_of_units_and_pairs_does_not_matter() -> None:
    turned = replace(
        ROWS, pair_U=torch.tensor([1, 1, 0, 0]), sign_U=required_(ROWS.sign_U), weight_U=required_(ROWS.weight_U)
    )
    assert evaluate("dpo", turned).total.item() == pytest.approx(evaluate("dpo", ROWS).total.item(), rel=1e-12)


def test_a_policy_equal_to_its_reference_has_loss_log_two() -> None:
    level = replace(ROWS, reference_logprobs_N=ROWS.logprobs_N)
    for name in ("dpo", "dmpo"):
        assert evaluate(name, level).total.item() == pytest.approx(math.log(2))


def test_preferences_push_the_chosen_up_and_the_rejected_down() -> None:
    _, gradient_N = value_and_gradient("dpo", pair([-1.0, -2.0], [-1.5]))
    assert (gradient_N[:2] < 0).all()
    assert gradient_N[2] > 0


def test_length_normalisation_keeps_a_long_side_from_dominating() -> None:
    long = pair([-0.9] * 30, [-0.8] * 2)
    sums = {name: evaluate("dpo", long, {"length_normalised": flag}).sums for name, flag in (("sum", 0), ("mean", 1))}
    assert sums["sum"]["accuracy/pairs"] == 1, "3.0 against 0.4"
    assert sums["mean"]["accuracy/pairs"] == 0, "0.1 against 0.2 per token"


def test_the_likelihood_term_is_the_chosen_ones_mean() -> None:
    rows = pair([-1.0, -3.0], [-7.0])
    plain, added = (evaluate("dpo", rows, {"nll_coefficient": c}).total.item() for c in (0.0, 0.5))
    assert added - plain == pytest.approx(0.5 * 2.0)


def test_extreme_margins_neither_overflow_nor_vanish_on_the_wrong_side() -> None:
    value, gradient_N = value_and_gradient("dpo", pair([-900.0], [-1.0]), {"beta": 5.0})
    assert value == pytest.approx(5 * 899)
    assert gradient_N.tolist() == pytest.approx([-5.0, 5.0])


def test_what_pairs_report() -> None:
    sums = {name: value.item() for name, value in evaluate("dpo", pair([0.0], [-3.0]), {"beta": 0.5}).sums.items()}
    assert sums == {
        "pairs": 1,
        "margin/pairs": 1.5,
        "accuracy/pairs": 1,
        "reward_chosen/pairs": 0.5,
        "reward_rejected/pairs": -1.0,
        "log_ratio_reference": -1.0,
    }


def authors_factor(gamma: float, turn: int, turns: int) -> float:
    """As the authors of DMPO compute it."""
    if gamma == 1:
        return (turns - turn) / turns
    return gamma**turn * (1 - gamma ** (turns - turn)) / (1 - gamma**turns)


@pytest.mark.parametrize("gamma", [0.1, 0.7, 0.999, 1.0])
@pytest.mark.parametrize("turns", [1, 2, 5, 40])
def test_the_factors_of_dmpo_are_those_of_its_authors(gamma: float, turns: int) -> None:
    steps_N = torch.arange(3, 3 + turns, dtype=torch.int32)
    factor_N = turn_factors(steps_N, torch.zeros(turns, dtype=torch.int64), 1, gamma)
    assert factor_N.tolist() == pytest.approx([authors_factor(gamma, t, turns) for t in range(turns)], rel=1e-9)
    assert factor_N[0] == 1
    assert (factor_N.diff() < 0).all()


def test_the_turns_of_each_unit_are_counted_from_its_own_first() -> None:
    step_N, unit_N = torch.tensor([4, 4, 6, 0, 1]), torch.tensor([0, 0, 0, 1, 1])
    factor_N = turn_factors(step_N, unit_N, 2, 0.5)
    expected = [authors_factor(0.5, t, k) for t, k in ((0, 3), (0, 3), (2, 3), (0, 2), (1, 2))]
    assert factor_N.tolist() == pytest.approx(expected)


def test_the_point_of_reference_is_never_negative() -> None:
    """A policy that left the reference behind everywhere is compared with 0, not with its own shortfall."""
    rows = replace(ROWS, reference_logprobs_N=ROWS.logprobs_N + 1)
    sums = config("kto").loss.prepare([rows])
    assert sums["kto_score"] < 0
    total = evaluate("kto", rows, {"beta": 1.0}).total.item()
    counts = torch.bincount(required_(ROWS.unit_N)).tolist()
    signs = required_(ROWS.sign_U).tolist()
    expected = [1 / (1 + math.exp(sign * -count)) for sign, count in zip(signs, counts, strict=True)]
    assert total == pytest.approx(sum(expected) / 4)


def test_what_kto_reports() -> None:
    sums = {name: value.item() for name, value in evaluate("kto", pair([0.0], [-3.0]), {"beta": 0.5}).sums.items()}
    assert sums == {
        "desirable": 1,
        "undesirable": 1,
        "reward_chosen/desirable": 0.5,
        "reward_rejected/undesirable": -1.0,
        "log_ratio_reference": -1.0,
    }
