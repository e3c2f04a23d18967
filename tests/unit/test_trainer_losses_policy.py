"""The policy gradient losses at their limits, on examples small enough to check by hand, and what they report."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch  # noqa: TID253 - a script that does nothing without it

from testkit.loss_rows import evaluate, random_rows, required_, value_and_gradient
from trainer.losses import LossRows
from trainer.losses.awr import weights
from trainer.losses.gspo import unit_ratio
from trainer.losses.ppo import surrogate


def rows_of(log_ratios: list[float], advantages: list[float], **fields: Any) -> LossRows:
    """Tokens with these log-ratios to the behaviour policy, weighing 1 each."""
    logprobs_N = torch.tensor(log_ratios, dtype=torch.float64)
    return LossRows(
        logprobs_N=logprobs_N,
        weight_N=torch.ones_like(logprobs_N),
        advantages_N=torch.tensor(advantages, dtype=torch.float64),
        behaviour_logprobs_N=torch.zeros_like(logprobs_N),
        entropy_N=torch.zeros_like(logprobs_N),
        **fields,
    )


def sums_of(name: str, rows: LossRows, options: dict[str, Any] | None = None) -> dict[str, float]:
    return {key: value.item() for key, value in evaluate(name, rows, options).sums.items()}


def test_clip_higher_lets_rare_tokens_grow() -> None:
    ratio_N = torch.tensor([1.25], requires_grad=True)
    (open_N,) = torch.autograd.grad(
        surrogate(ratio_N, torch.ones(1), clip_low=0.2, clip_high=0.28, dual_clip=3.0).sum(), ratio_N
    )
    (closed_N,) = torch.autograd.grad(
        surrogate(ratio_N, torch.ones(1), clip_low=0.2, clip_high=0.2, dual_clip=3.0).sum(), ratio_N
    )
    assert (open_N.item(), closed_N.item()) == (-1.0, 0.0)


def test_dual_clip_bounds_negative_advantages_only() -> None:
    ratio_N = torch.tensor([50.0, 50.0])
    loss_N = surrogate(ratio_N, torch.tensor([-2.0, 2.0]), clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    assert loss_N.tolist() == pytest.approx([6.0, -2.56])


def test_grpo_and_dapo_differ_from_ppo_by_their_defaults() -> None:
    high, low = rows_of([math.log(1.25)], [1.0]), rows_of([math.log(50.0)], [-1.0])
    assert {name: evaluate(name, high).total.item() for name in ("ppo", "dapo", "grpo", "dr_grpo")} == {
        "ppo": pytest.approx(-1.25),
        "dapo": pytest.approx(-1.25),
        "grpo": pytest.approx(-1.2),
        "dr_grpo": pytest.approx(-1.2),
    }
    assert {name: evaluate(name, low).total.item() for name in ("ppo", "dapo", "grpo")} == {
        "ppo": pytest.approx(3.0),
        "dapo": pytest.approx(50.0),
        "grpo": pytest.approx(50.0),
    }


@pytest.mark.parametrize("name", ["dapo", "reinforce", "cispo"])
def test_log_ratios_are_clamped_before_exp(name: str) -> None:
    value, gradient_N = value_and_gradient(name, rows_of([500.0, -500.0], [-1.0, -1.0]))
    assert math.isfinite(value)
    assert gradient_N.isfinite().all()
    sums = sums_of(name, rows_of([500.0], [-1.0]))
    assert sums["ratio"] == pytest.approx(math.exp(20))
    assert sums["log_ratio_abs"] == 20


def test_the_log_ratio_of_a_unit_is_at_most_ten() -> None:
    log_ratio_N = torch.tensor([15.0, 25.0, -30.0])
    ratio_N = unit_ratio(log_ratio_N, torch.tensor([0, 0, 1]), 2)
    assert ratio_N.tolist() == pytest.approx([math.exp(10), math.exp(10), math.exp(-20)])


def test_diagnostics_are_taken_before_clipping() -> None:
    rows = rows_of([math.log(4.0), math.log(0.25), 0.0, math.log(4.0)], [1.0, -1.0, 1.0, -1.0])
    for name in ("ppo", "grpo", "cispo", "dro"):
        sums = sums_of(name, rows)
        assert sums["ratio"] == pytest.approx(9.25)
        assert sums["ratio_squared"] == pytest.approx(33.0625)
        assert sums["outside_half_two"] == 3
        assert sums["log_ratio_abs"] == pytest.approx(3 * math.log(4.0))
        assert sums["kl_k3"] == pytest.approx(9.25 - 4 - math.log(4.0))
    sums = sums_of("ppo", rows)
    assert (sums["clipped_high"], sums["clipped_low"], sums["clipped_dual"]) == (1, 1, 1)
    assert "clipped_dual" not in sums_of("dapo", rows)


def test_diagnostics_do_not_change_with_the_correction() -> None:
    rows = rows_of([math.log(4.0), math.log(0.25), 0.0], [1.0, -1.0, 1.0])
    plain = sums_of("reinforce", rows, {"correction": {"method": "token_truncate", "high": 1e30}})
    for method in ("token_truncate", "token_mask", "icepop"):
        sums = sums_of("reinforce", rows, {"correction": {"method": method}})
        for name in ("ratio", "ratio_squared", "log_ratio_abs", "kl_k3", "outside_half_two"):
            assert sums[name] == plain[name], "limits hide nothing"
    sums = sums_of("reinforce", rows, {"correction": {"method": "icepop"}})
    assert (sums["correction_weight"], sums["correction_masked"], sums["correction_limited"]) == (5.0, 1, 0)
    sums = sums_of("reinforce", rows)
    assert (sums["correction_weight"], sums["correction_masked"], sums["correction_limited"]) == (3.25, 0, 1)


def test_cispo_counts_its_limited_weights() -> None:
    rows = rows_of([math.log(8.0), math.log(0.25), 0.0], [1.0, 1.0, 1.0])
    sums = sums_of("cispo", rows, {"min_ratio": 0.5, "max_ratio": 5.0})
    assert (sums["clipped_high"], sums["clipped_low"]) == (1, 1)


def test_log_probabilities_that_are_not_finite_are_ratio_one_and_counted() -> None:
    rows = rows_of([0.5, 0.5, 0.5], [1.0, 1.0, 1.0])
    holes = replace(rows, behaviour_logprobs_N=torch.tensor([float("nan"), float("-inf"), 0.0], dtype=torch.float64))
    sums = sums_of("ppo", holes)
    assert sums["logprobs_missing"] == 2
    assert sums["ratio"] == pytest.approx(2 + math.exp(0.5))


def test_staleness_is_reported_in_buckets_unknown_in_none() -> None:
    staleness_N = torch.tensor([0.0, 1.0, 3.0, 4.0, 17.0, float("nan")])
    sums = sums_of("ppo", rows_of([0.1, 0.2, 0.3, 0.5, 0.7, 9.0], [1.0] * 6, staleness_N=staleness_N))
    shares = {name: value for name, value in sums.items() if name.startswith("staleness")}
    assert shares == {
        "staleness_0": 1,
        "staleness_1": 1,
        "staleness_2_4": 2,
        "staleness_5_16": 0,
        "staleness_17_up": 1,
    }
    assert sums["log_ratio_abs_staleness_2_4/staleness_2_4"] == pytest.approx(0.8)
    assert sums["log_ratio_abs_staleness_17_up/staleness_17_up"] == pytest.approx(0.7)
    assert not any("staleness" in name for name in sums_of("ppo", rows_of([0.1], [1.0])))


def test_masked_tokens_leave_the_denominator_as_it_is() -> None:
    """The weights of the plan: what a mask leaves out is lost from the sum, and nothing else weighs more for it."""
    rows = rows_of([0.0, math.log(9.0)], [1.0, 1.0])
    halves = replace(rows, weight_N=torch.full((2,), 0.5, dtype=torch.float64))
    _, gradient_N = value_and_gradient("reinforce", halves, {"correction": {"method": "token_mask"}})
    assert gradient_N.tolist() == [-0.5, 0.0]


def test_the_kl_is_reported_as_k3_whatever_its_estimator() -> None:
    rows = random_rows(3, seed=2)
    d_N = required_(rows.reference_logprobs_N) - rows.logprobs_N
    expected = (d_N.exp() - d_N - 1).sum().item()
    for estimator in ("k2", "k3", "k3_straight"):
        sums = sums_of("ppo", rows, {"kl": {"coefficient": 0.1, "estimator": estimator}})
        assert sums["kl_reference"] == pytest.approx(expected)
    assert "kl_reference" not in sums_of("ppo", rows)


def test_awr_weights_do_not_overflow() -> None:
    weights_N = weights(torch.tensor([1e6, -1e6]), beta=1e-3, max_weight=20.0)
    assert weights_N.tolist() == [20.0, 0.0]


def test_awr_counts_its_limited_weights_and_no_gradient_goes_through_them() -> None:
    advantages_N = torch.tensor([9.0, 9.0, 0.0, -1.0], requires_grad=True)
    logprobs_N = torch.zeros(4, requires_grad=True)
    result = evaluate("awr", LossRows(logprobs_N, torch.ones(4), advantages_N))
    result.total.backward()  # type: ignore[no-untyped-call]
    assert advantages_N.grad is None
    assert (result.sums["weight_clipped"], result.sums["advantage"]) == (2, 17)
