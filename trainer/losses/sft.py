"""Supervised fine-tuning: the likelihood of the recorded actions.

    L_t = -lp

Behaviour cloning. Filtered behaviour cloning (RFT, arXiv 2308.01825; STaR, ReST-EM) is this loss on chosen episodes, so
it is a selection and no loss of its own: `--loss sft --where "env_return >= 1"`, or `--selection` for the best of each
task. It equals REINFORCE with A = 1[R >= c] over the episodes that are kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.losses.base import Loss, LossResult, LossRows, Needs

if TYPE_CHECKING:
    from trainer.config import TrainConfig


def sft(rows: LossRows, config: TrainConfig) -> LossResult:
    """Negative log-likelihood."""
    del config
    return LossResult(total=-(rows.weight_N * rows.logprobs_N).sum(), sums={})


SFT = Loss("sft", Needs(), sft)
