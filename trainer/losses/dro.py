"""Direct reward optimisation (Richemond et al. 2024, arXiv 2405.19107), token by token, advantages given.

    L_t = -(A lp - beta/2 (lp - lp_b)^2)

The quadratic term pulls to the policy that sampled the data, so there is no ratio to explode, and a negative advantage
pushes only until beta (lp_b - lp) = -A. beta = 0.1 is our default: verl has the
loss and gives its beta no default.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from trainer.losses.base import Loss, LossResult, LossRows, required
from trainer.losses.policy import PolicyConfig, regularised
from trainer.losses.ppo import CLIPPED_NEEDS
from trainer.losses.ratios import behaviour_log_ratio

if TYPE_CHECKING:
    from trainer.config import TrainConfig


class DROConfig(PolicyConfig):
    """Advantage times log-probability, with a quadratic pull to the behaviour policy."""

    beta: float = Field(0.1, gt=0)
    """Strength of the pull."""


def dro(rows: LossRows, config: TrainConfig) -> LossResult:
    """Quadratic objective."""
    advantages_N = required(rows.advantages_N, "advantages_N")
    pull_N = config.dro.beta / 2 * behaviour_log_ratio(rows).square()
    return regularised(rows, config.dro, pull_N - advantages_N * rows.logprobs_N, {"pull": pull_N.detach().sum()})


DRO = Loss("dro", CLIPPED_NEEDS, dro)
