"""The losses against their formulas, written out slowly, and the identities between them."""

import math
from collections.abc import Callable

import pytest
import torch  # noqa: TID253
from torch import Tensor  # noqa: TID253

from testkit.training import config
from trainer.losses import LOSSES, LossRows, Temperature
from trainer.losses.awr import weights
from trainer.losses.ppo import surrogate

GENERATOR = torch.Generator().manual_seed(3)
ADVANTAGES_N = torch.randn(60, generator=GENERATOR)
BEHAVIOUR_N = -3 * torch.rand(60, generator=GENERATOR)
DRIFT_N = 1.5 * torch.randn(60, generator=GENERATOR)


def rows_of(logprobs_N: Tensor, *others_N: Tensor) -> LossRows:
    """Rows that weigh 1 each."""
    return LossRows(logprobs_N, torch.ones_like(logprobs_N), *others_N)


def gradient(function: Callable[[Tensor], Tensor], at_N: Tensor) -> Tensor:
    logprobs_N = at_N.clone().requires_grad_()
    (grad_N,) = torch.autograd.grad(function(logprobs_N), logprobs_N)
    return grad_N


def ppo_gradient(at_N: Tensor, **options: float | None) -> Tensor:
    settings = config("ppo", ppo=options)
    entropy_N = torch.zeros_like(at_N)
    return gradient(
        lambda lp_N: LOSSES["ppo"].function(rows_of(lp_N, ADVANTAGES_N, BEHAVIOUR_N, entropy_N), settings).total, at_N
    )


def test_sft_is_the_negative_log_likelihood() -> None:
    result = LOSSES["sft"].function(rows_of(BEHAVIOUR_N), config())
    assert result.total == pytest.approx(-sum(BEHAVIOUR_N.tolist()), rel=1e-6)


def test_awr_weights_follow_the_formula_and_stay_below_the_limit() -> None:
    weights_N = weights(ADVANTAGES_N, beta=0.5, max_weight=3.0)
    expected = [min(math.exp(a / 0.5), 3.0) for a in ADVANTAGES_N.tolist()]
    assert weights_N.tolist() == pytest.approx(expected, rel=1e-6)


def test_awr_weights_do_not_overflow() -> None:
    weights_N = weights(torch.tensor([1e6, -1e6]), beta=1e-3, max_weight=20.0)
    assert weights_N.tolist() == [20.0, 0.0]


def test_awr_loss_is_the_weighted_likelihood_and_no_gradient_goes_through_the_weights() -> None:
    settings = config("awr", awr={"beta": 2.0, "max_weight": 5.0})
    advantages_N = ADVANTAGES_N.clone().requires_grad_()
    logprobs_N = BEHAVIOUR_N.clone().requires_grad_()
    LOSSES["awr"].function(rows_of(logprobs_N, advantages_N), settings).total.backward()
    assert advantages_N.grad is None
    expected_N = [-min(math.exp(a / 2.0), 5.0) for a in ADVANTAGES_N.tolist()]
    assert logprobs_N.grad is not None
    assert logprobs_N.grad.tolist() == pytest.approx(expected_N, rel=1e-6)


def test_awr_without_signal_is_sft() -> None:
    rows = rows_of(BEHAVIOUR_N, torch.zeros(60))
    assert LOSSES["awr"].function(rows, config("awr")).total == LOSSES["sft"].function(rows, config()).total


def test_awr_counts_its_limited_weights() -> None:
    rows = rows_of(BEHAVIOUR_N[:4], torch.tensor([9.0, 9.0, 0.0, -1.0]))
    sums = LOSSES["awr"].function(rows, config("awr")).sums
    assert sums["weight_clipped"] == 2
    assert sums["advantage"] == 17


def slow_ppo(logprob: float, behaviour: float, advantage: float, low: float, high: float, dual: float | None) -> float:
    """One token's loss, from the definition."""
    ratio = math.exp(max(-20.0, min(20.0, logprob - behaviour)))
    objective = min(ratio * advantage, max(1 - low, min(1 + high, ratio)) * advantage)
    if dual is not None and advantage < 0:
        objective = max(objective, dual * advantage)
    return -objective


@pytest.mark.parametrize("dual", [None, 3.0, 1.5])
def test_ppo_follows_the_formula(dual: float | None) -> None:
    settings = config("ppo", ppo={"clip_low": 0.2, "clip_high": 0.28, "dual_clip": dual})
    logprobs_N = BEHAVIOUR_N + DRIFT_N
    rows = rows_of(logprobs_N, ADVANTAGES_N, BEHAVIOUR_N)
    expected = sum(
        slow_ppo(lp, b, a, 0.2, 0.28, dual)
        for lp, b, a in zip(logprobs_N.tolist(), BEHAVIOUR_N.tolist(), ADVANTAGES_N.tolist(), strict=True)
    )
    assert LOSSES["ppo"].function(rows, settings).total.item() == pytest.approx(expected, rel=1e-5)


def test_at_ratio_one_the_gradient_is_that_of_reinforce() -> None:
    reinforce_N = gradient(lambda lp_N: -(ADVANTAGES_N * lp_N).sum(), BEHAVIOUR_N)
    torch.testing.assert_close(ppo_gradient(BEHAVIOUR_N), reinforce_N)


def test_without_clipping_the_gradient_is_that_of_importance_weighted_reinforce() -> None:
    logprobs_N = BEHAVIOUR_N + DRIFT_N
    importance_N = (logprobs_N - BEHAVIOUR_N).exp()
    weighted_N = gradient(lambda lp_N: -(importance_N * ADVANTAGES_N * lp_N).sum(), logprobs_N)
    open_N = ppo_gradient(logprobs_N, clip_low=1 - 1e-9, clip_high=1e9, dual_clip=None)
    torch.testing.assert_close(open_N, weighted_N)


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


def test_ppo_entropy_bonus_is_subtracted() -> None:
    entropy_N = torch.full((60,), 1.5)
    rows = rows_of(BEHAVIOUR_N, ADVANTAGES_N, BEHAVIOUR_N, entropy_N)
    plain = LOSSES["ppo"].function(rows, config("ppo")).total
    bonus = LOSSES["ppo"].function(rows, config("ppo", ppo={"entropy_coefficient": 0.1})).total
    assert (plain - bonus).item() == pytest.approx(0.1 * 1.5 * 60, rel=1e-5)


def test_ppo_diagnostics_are_taken_before_clipping() -> None:
    log_ratio_N = torch.tensor([math.log(4.0), math.log(0.25), 0.0, math.log(4.0)])
    advantages_N = torch.tensor([1.0, -1.0, 1.0, -1.0])
    rows = rows_of(log_ratio_N, advantages_N, torch.zeros(4), torch.zeros(4))
    sums = {name: value.item() for name, value in LOSSES["ppo"].function(rows, config("ppo")).sums.items()}
    assert sums["ratio"] == pytest.approx(9.25)
    assert sums["outside_half_two"] == 3
    assert (sums["clipped_high"], sums["clipped_low"], sums["clipped_dual"]) == (1, 1, 1)
    assert sums["kl_k3"] == pytest.approx(9.25 - 4 - math.log(4.0))


def test_a_loss_without_its_inputs_says_what_it_needs() -> None:
    with pytest.raises(ValueError, match="advantages_N"):
        LOSSES["awr"].function(rows_of(BEHAVIOUR_N), config("awr"))
    with pytest.raises(ValueError, match="behaviour_logprobs_N"):
        LOSSES["ppo"].function(rows_of(BEHAVIOUR_N, ADVANTAGES_N), config("ppo"))


def test_likelihood_losses_use_temperature_one_and_ratio_losses_the_sampled_one() -> None:
    assert {name: loss.needs.temperature for name, loss in LOSSES.items()} == {
        "sft": Temperature.ONE,
        "awr": Temperature.ONE,
        "ppo": Temperature.AS_SAMPLED,
    }
