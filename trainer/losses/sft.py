"""Supervised fine-tuning: the likelihood of the recorded actions.

    L_t = -lp

This is behaviour cloning. Filtered behaviour cloning (RFT, arXiv 2308.01825; STaR, ReST-EM) is this loss on selected
episodes, so it is a selection and not a separate loss: `--loss sft --where "env_return >= 1"`, or `selection` for the
best of each task. It equals REINFORCE with A = 1[R >= c] over the selected episodes.
"""

from typing import Literal

from trainer.losses.base import LossResult, LossRows, TokenLoss


class SFT(TokenLoss):
    """Supervised fine-tuning."""

    name: Literal["sft"] = "sft"
    """Name of the loss."""

    def compute(self, rows: LossRows) -> LossResult:
        """Compute the negative log-likelihood."""
        return LossResult(total=-(rows.weight_N * rows.logprobs_N).sum(), sums={})
