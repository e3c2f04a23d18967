"""Dr. GRPO: each trajectory against the mean of its siblings, unscaled."""

from typing import ClassVar

from pipelines.credit.estimators.normalise import Scaling
from pipelines.credit.estimators.siblings import PenalisedSiblings


class DrGRPO(PenalisedSiblings):
    r"""GRPO done right (arXiv 2503.20783; verl `grpo` with `norm_adv_by_std_in_grpo=False`).

    .. code-block:: text

        A = R(tau) - mean_g R        for every step of tau, over its task group g

    Dividing by the deviation makes very easy and very hard tasks count more; this does not. The other half of the
    method, a constant instead of the length in the loss's mean, belongs to the trainer's loss.
    """

    name: ClassVar[str] = "dr_grpo"
    scaling: ClassVar[Scaling] = "mean_norm"
