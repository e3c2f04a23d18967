"""RLOO: each trajectory against the mean of the others."""

from typing import ClassVar

from pipelines.credit.estimators.normalise import Scaling
from pipelines.credit.estimators.siblings import ScaledSiblings


class RLOO(ScaledSiblings):
    r"""REINFORCE leave-one-out (arXiv 2402.14740; verl `rloo`).

    .. code-block:: text

        A = R(tau) - mean of R over the other n - 1 siblings = n / (n - 1) (R(tau) - mean_g R)

    for every step of tau. The baseline does not contain the trajectory's own score, so the gradient is unbiased. verl
    gives a lone trajectory its raw score; here it is 0. Divided by their deviation in the group (`normalize`
    elsewhere), these advantages are those of `grpo`.
    """

    name: ClassVar[str] = "rloo"
    scaling: ClassVar[Scaling] = "leave_one_out"
