"""Supervised fine-tuning: the likelihood of the recorded actions.

    L = - sum_N lp

Behaviour cloning; with episodes filtered by reward it is filtered BC (RFT, arXiv 2308.01825).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.losses.base import Loss, LossResult, LossRows, Needs

if TYPE_CHECKING:
    from trainer.config import TrainConfig


def sft(rows: LossRows, config: TrainConfig) -> LossResult:
    """Negative log-likelihood, summed over N."""
    del config
    return LossResult(total=-rows.logprobs_N.sum(), sums={})


SFT = Loss("sft", Needs(), sft)
