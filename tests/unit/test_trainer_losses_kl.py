"""KL in the loss: what each estimator's value and gradient are on average, by exact enumeration of a small vocabulary.

Axes: `_V` the vocabulary. A token is drawn from the policy (on-policy) or from another one (off-policy), so an
expectation is a finite sum, and nothing here is a matter of luck.
"""

import pytest
import torch  # noqa: TID253 - a script that does nothing without it
from pydantic import ValidationError
from torch import Tensor  # noqa: TID253

from trainer.losses.policy import KLConfig, KLEstimator, estimate_kl, kl_penalty

LOGITS_V = torch.tensor([0.3, -0.8, 1.1, 0.0, -0.4], dtype=torch.float64)
REFERENCE_V = torch.tensor([-0.2, 0.5, 0.4, 0.1, -1.0], dtype=torch.float64).log_softmax(0)
OTHER_V = torch.tensor([1.0, 0.2, -0.9, 0.3, 0.1], dtype=torch.float64).log_softmax(0)
"""Log-probabilities of a policy that sampled the data, not the one that is trained."""
POLICY_V = LOGITS_V.log_softmax(0)


def reverse_kl(logits_V: Tensor) -> Tensor:
    """KL(pi || ref), the thing itself."""
    logprobs_V = logits_V.log_softmax(0)
    return (logprobs_V.exp() * (logprobs_V - REFERENCE_V)).sum()


def gradient_of_reverse_kl() -> Tensor:
    logits_V = LOGITS_V.clone().requires_grad_()
    return torch.autograd.grad(reverse_kl(logits_V), logits_V)[0]


def expected(estimator: KLEstimator, sampled_V: Tensor, *, weighted: bool, **limits: float) -> tuple[float, Tensor]:
    """Mean value and mean gradient by the logits over tokens drawn from `sampled_V` (log-probabilities)."""
    logits_V = LOGITS_V.clone().requires_grad_()
    logprobs_V = logits_V.log_softmax(0)
    config = KLConfig(estimator=estimator, ratio_weighted=weighted, **limits)
    log_ratio_V = logprobs_V - sampled_V if weighted else None
    mean = (sampled_V.exp() * kl_penalty(logprobs_V, REFERENCE_V, log_ratio_V, config)).sum()
    return mean.item(), torch.autograd.grad(mean, logits_V)[0]


@pytest.mark.parametrize("estimator", [KLEstimator.K1, KLEstimator.K3, KLEstimator.K3_STRAIGHT])
def test_on_policy_the_values_of_k1_and_k3_are_unbiased(estimator: KLEstimator) -> None:
    assert expected(estimator, POLICY_V, weighted=False)[0] == pytest.approx(reverse_kl(LOGITS_V).item(), rel=1e-12)


def test_the_value_of_k2_is_biased() -> None:
    estimate, truth = expected(KLEstimator.K2, POLICY_V, weighted=False)[0], reverse_kl(LOGITS_V).item()
    assert abs(estimate / truth - 1) > 0.01


def test_the_gradient_of_k1_is_zero_on_average() -> None:
    _, gradient_V = expected(KLEstimator.K1, POLICY_V, weighted=False)
    torch.testing.assert_close(gradient_V, torch.zeros_like(gradient_V), rtol=0, atol=1e-15)
    assert gradient_of_reverse_kl().abs().max() > 0.1, "while the true gradient is not"


@pytest.mark.parametrize("estimator", [KLEstimator.K2, KLEstimator.K3_STRAIGHT])
def test_on_policy_k2_has_the_right_gradient(estimator: KLEstimator) -> None:
    torch.testing.assert_close(expected(estimator, POLICY_V, weighted=False)[1], gradient_of_reverse_kl())


def test_the_gradient_of_k3_is_that_of_the_forward_kl() -> None:
    """E[(1 - ref / pi) grad log pi] is the gradient of -sum ref log pi: the forward KL's, not the reverse one's."""
    _, gradient_V = expected(KLEstimator.K3, POLICY_V, weighted=False)
    forward_V = POLICY_V.exp() - REFERENCE_V.exp()
    torch.testing.assert_close(gradient_V, forward_V)
    assert (gradient_V - gradient_of_reverse_kl()).abs().max() > 0.05


@pytest.mark.parametrize("estimator", list(KLEstimator))
@pytest.mark.parametrize("sampled_V", [POLICY_V, OTHER_V], ids=["on-policy", "off-policy"])
def test_weighted_by_the_ratio_every_gradient_is_right_on_any_data(estimator: KLEstimator, sampled_V: Tensor) -> None:
    torch.testing.assert_close(expected(estimator, sampled_V, weighted=True)[1], gradient_of_reverse_kl())


@pytest.mark.parametrize("estimator", [KLEstimator.K2, KLEstimator.K3, KLEstimator.K3_STRAIGHT])
def test_off_policy_no_unweighted_gradient_is_right(estimator: KLEstimator) -> None:
    found_V = expected(estimator, OTHER_V, weighted=False)[1]
    assert (found_V - gradient_of_reverse_kl()).abs().max() > 0.02


def test_r_k3_and_r_k2_have_the_same_gradient_token_by_token() -> None:
    logprobs_V = POLICY_V.clone().requires_grad_()
    gradients = []
    for estimator in (KLEstimator.K3, KLEstimator.K2, KLEstimator.K3_STRAIGHT):
        terms_V = kl_penalty(logprobs_V, REFERENCE_V, logprobs_V - OTHER_V, KLConfig(estimator=estimator))
        gradients.append(torch.autograd.grad(terms_V.sum(), logprobs_V)[0])
    expected_V = (POLICY_V - OTHER_V).exp() * (POLICY_V - REFERENCE_V)
    for gradient_V in gradients:
        torch.testing.assert_close(gradient_V, expected_V)


def test_the_straight_through_estimator_has_the_value_of_k3() -> None:
    straight_V = estimate_kl(POLICY_V, REFERENCE_V, KLEstimator.K3_STRAIGHT)
    torch.testing.assert_close(straight_V, estimate_kl(POLICY_V, REFERENCE_V, KLEstimator.K3))
    assert (straight_V >= 0).all()


def test_values_are_limited_and_the_gradient_of_k2_is_bounded_not_cut_off() -> None:
    logprobs_N = torch.tensor([-50.0, -5.0], requires_grad=True)
    reference_N = torch.tensor([-1.0, -45.0])
    k3_N = estimate_kl(logprobs_N, reference_N, KLEstimator.K3_STRAIGHT)
    assert k3_N.tolist() == [10.0, 10.0]
    assert torch.autograd.grad(k3_N.sum(), logprobs_N)[0].tolist() == [-20.0, 20.0]


def test_the_weight_is_limited() -> None:
    kl = KLConfig(estimator=KLEstimator.K3_STRAIGHT, max_ratio=2.0)
    logprobs_N, reference_N = torch.tensor([-1.0]), torch.tensor([-2.0])
    far = kl_penalty(logprobs_N, reference_N, torch.tensor([3.0]), kl)
    assert far.item() == pytest.approx(2.0 * estimate_kl(logprobs_N, reference_N, KLEstimator.K3).item())


def test_k1_alone_is_refused_because_it_does_nothing() -> None:
    with pytest.raises(ValidationError, match=r"k1 .* choose k3_straight"):
        KLConfig(coefficient=0.1, estimator=KLEstimator.K1, ratio_weighted=False)
    assert KLConfig(coefficient=0.1, estimator=KLEstimator.K1).ratio_weighted
