"""Identities between the losses: different formulas that must agree where their papers say that they are the same."""

from dataclasses import replace

import pytest
import torch  # noqa: TID253 - a script that does nothing without it
from torch import Tensor  # noqa: TID253

from testkit.loss_rows import evaluate, random_rows, required_, value_and_gradient
from trainer.losses import LossRows

ROWS = random_rows(6, seed=5, drift=0.5)
ADVANTAGES_N = required_(ROWS.advantages_N)
ON_POLICY = replace(ROWS, behaviour_logprobs_N=ROWS.logprobs_N, proximal_logprobs_N=ROWS.logprobs_N)
REINFORCE_N = -ROWS.weight_N * ADVANTAGES_N
"""Gradient of REINFORCE by the log-probabilities: -A grad lp."""
UNLIMITED = {"clip_low": 1 - 1e-12, "clip_high": 1e12, "dual_clip": None}


def gradient(name: str, rows: LossRows, **options: object) -> Tensor:
    return value_and_gradient(name, rows, options)[1]


def assert_same(found_N: Tensor, expected_N: Tensor) -> None:
    torch.testing.assert_close(found_N, expected_N, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["ppo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "reinforce", "dro"])
def test_at_ratio_one_every_policy_gradient_is_that_of_reinforce(name: str) -> None:
    assert_same(gradient(name, ON_POLICY), REINFORCE_N)


@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo"])
def test_at_ratio_one_a_correction_changes_nothing(name: str) -> None:
    for method in ("token_truncate", "icepop", "sequence_truncate", "sequence_mask", "geometric_mask"):
        assert_same(gradient(name, ON_POLICY, correction={"method": method, "decoupled": True}), REINFORCE_N)


def test_ppo_without_clip_is_importance_weighted_reinforce() -> None:
    ratio_N = (ROWS.logprobs_N - required_(ROWS.behaviour_logprobs_N)).exp()
    assert_same(gradient("ppo", ROWS, **UNLIMITED), ratio_N * REINFORCE_N)


def test_truncated_importance_sampling_without_limit_is_importance_sampling() -> None:
    endless = {"method": "token_truncate", "high": 1e30}
    assert_same(gradient("reinforce", ROWS, correction=endless), gradient("ppo", ROWS, **UNLIMITED))


def test_cispo_without_limit_is_importance_sampling_too() -> None:
    assert_same(gradient("cispo", ROWS, max_ratio=1e12), gradient("ppo", ROWS, **UNLIMITED))


def test_gspo_with_units_of_one_token_is_ppo_without_dual_clip() -> None:
    size = len(ROWS.logprobs_N)
    alone = replace(ROWS, unit_N=torch.arange(size), weight_U=torch.full((size,), 1 / size))
    clips = {"clip_low": 0.2, "clip_high": 0.28}
    assert_same(gradient("gspo", alone, **clips), gradient("ppo", alone, dual_clip=None, **clips))


def test_gspo_has_the_gradient_of_the_naive_sequence_form() -> None:
    """The paper's GSPO: mean over units of min(s A, clip(s) A), s differentiated as a whole."""
    unit_N, weight_U = required_(ROWS.unit_N), required_(ROWS.weight_U)
    stored_N = required_(ROWS.behaviour_logprobs_N)
    counts = [int((unit_N == u).sum()) for u in range(len(weight_U))]
    weight_N = torch.tensor([1 / (len(counts) * counts[u]) for u in unit_N.tolist()], dtype=torch.float64)
    logprobs_N = ROWS.logprobs_N.clone().requires_grad_()
    objectives = []
    for u in range(len(counts)):
        mine_N = unit_N == u
        s = (logprobs_N[mine_N] - stored_N[mine_N]).mean().exp()
        a = ADVANTAGES_N[mine_N][0]
        objectives.append(torch.minimum(s * a, s.clamp(0.7, 1.3) * a))
    naive = -torch.stack(objectives).mean()
    (naive_N,) = torch.autograd.grad(naive, logprobs_N)
    total, found_N = value_and_gradient("gspo", replace(ROWS, weight_N=weight_N), {"clip_low": 0.3, "clip_high": 0.3})
    assert total == pytest.approx(naive.item(), rel=1e-12)
    assert_same(found_N, naive_N)
    assert 0 < int((naive_N == 0).sum()) < len(naive_N), "some units are clipped, some are not"


def test_leave_one_out_is_the_centred_return_times_g_over_g_minus_one() -> None:
    """RLOO, from its definition, through the loss: the same direction as the centred return, longer by G / (G - 1)."""
    returns_G = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 0.5], dtype=torch.float64)
    size = len(returns_G)
    unit_N = required_(ON_POLICY.unit_N)
    loo_G = torch.stack([returns_G[i] - (returns_G.sum() - returns_G[i]) / (size - 1) for i in range(size)])
    centred_G = returns_G - returns_G.mean()
    loo_N = gradient("reinforce", replace(ON_POLICY, advantages_N=loo_G[unit_N]))
    centred_N = gradient("reinforce", replace(ON_POLICY, advantages_N=centred_G[unit_N]))
    assert_same(loo_N, size / (size - 1) * centred_N)


def test_episode_level_rloo_is_the_sum_over_turns_times_the_advantage() -> None:
    """With weights 1 / U: mean over episodes of A times the sum of log-probabilities over all turns."""
    unit_N, weight_U = required_(ROWS.unit_N), required_(ROWS.weight_U)
    episodes = len(weight_U)
    rows = replace(ON_POLICY, weight_N=torch.full_like(ROWS.weight_N, 1 / episodes))
    total = evaluate("reinforce", rows).total
    slow = 0.0
    for u in range(episodes):
        mine_N = unit_N == u
        slow -= ADVANTAGES_N[mine_N][0].item() * ROWS.logprobs_N[mine_N].sum().item() / episodes
    assert total.item() == pytest.approx(slow, rel=1e-12)


def test_filtered_cloning_is_reinforce_with_an_indicator_advantage() -> None:
    """A = 1[R >= c] on all episodes, and sft on those that are kept: the same gradient, so there is no loss bc."""
    unit_N = required_(ROWS.unit_N)
    good_N = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, 1.0], dtype=torch.float64)[unit_N]
    indicator_N = gradient("reinforce", replace(ROWS, advantages_N=good_N), correction={"method": "none"})
    has_tokens = good_N > 0
    filtered = LossRows(ROWS.logprobs_N[has_tokens], ROWS.weight_N[has_tokens])
    assert_same(indicator_N[has_tokens], gradient("sft", filtered))
    assert indicator_N[~has_tokens].abs().max() == 0


def test_awr_becomes_sft_as_beta_grows_and_where_all_advantages_are_equal() -> None:
    sft_N = gradient("sft", ROWS)
    torch.testing.assert_close(gradient("awr", ROWS, beta=1e9), sft_N, rtol=1e-8, atol=0)
    assert_same(gradient("awr", replace(ROWS, advantages_N=torch.zeros_like(ADVANTAGES_N))), sft_N)


def test_dro_without_pull_is_reinforce_on_any_data_and_pulls_back_to_behaviour() -> None:
    torch.testing.assert_close(gradient("dro", ROWS, beta=1e-12), REINFORCE_N, rtol=1e-8, atol=1e-8)
    quiet = replace(ROWS, advantages_N=torch.zeros_like(ADVANTAGES_N))
    stored_N = required_(ROWS.behaviour_logprobs_N)
    assert_same(gradient("dro", quiet, beta=0.5), ROWS.weight_N * 0.5 * (ROWS.logprobs_N - stored_N))


def test_the_variants_of_the_surrogate_differ_in_their_settings_alone() -> None:
    settings = {"clip_low": 0.1, "clip_high": 0.4, "dual_clip": 2.0}
    expected_N = gradient("ppo", ROWS, **settings)
    for name in ("grpo", "dr_grpo", "dapo"):
        assert_same(gradient(name, ROWS, **settings), expected_N)


def test_dmpo_over_single_turns_is_dpo() -> None:
    single = random_rows(4, seed=8, most_turns=1)
    assert_same(gradient("dmpo", single, gamma=0.4), gradient("dpo", single))


def test_a_kto_unit_at_the_point_of_reference_has_half_a_loss() -> None:
    level = replace(ROWS, reference_logprobs_N=ROWS.logprobs_N)
    assert evaluate("kto", level).total.item() == pytest.approx(0.5)
