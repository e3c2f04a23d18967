"""GRPO: each trajectory against its siblings, centred and scaled."""

from typing import ClassVar

from pipelines.credit.estimators.normalise import Scaling
from pipelines.credit.estimators.siblings import PenalisedSiblings


class GRPO(PenalisedSiblings):
    r"""Group relative policy optimisation (arXiv 2402.03300, outcome supervision; verl `grpo`).

    .. code-block:: text

        A = (R(tau) - mean_g R) / (std_g R + 1e-6)        for every step of tau, over its task group g

    with the sample deviation. A group of equal scores gives exactly 0. It is GiGPO with `omega=0` and the same options,
    bit for bit, but for the default of the penalty. TRL adds 1e-4 to the deviation, verl 1e-6.
    """

    name: ClassVar[str] = "grpo"
    scaling: ClassVar[Scaling] = "mean_std_norm"
