"""The arms: what is learned from, how, and the one knob of each."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pipelines.credit import GiGPO
from pipelines.credit.estimators import ESTIMATORS
from pipelines.credit.estimators.protocol import Estimator
from trainer.losses.base import PairsConfig

BETAS = (0.3, 1.0, 3.0)
RATES = (3e-4, 1e-3, 3e-3)
RATE_OF = "bc"
"""Arms whose knob is beta, or who have none, train at the learning rate that this arm chose."""


class Data(StrEnum):
    """What an arm trains on."""

    NOTHING = "nothing"
    ALL = "all"
    """Every episode."""
    SUCCESSES = "successes"
    """Episodes that reached the goal."""
    LIVE = "live"
    """Episodes of groups in which some siblings succeeded and some did not."""
    PAIRS = "pairs"
    """Pairs of steps at a shared anchor, of the same groups."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to learn from the data set."""

    name: str
    label: str
    data: Data
    loss: str = ""
    knob: str = ""
    """learning_rate, beta, or nothing."""
    credit: str = ""
    """Key of `CREDITS`."""

    @property
    def values(self) -> tuple[float, ...]:
        """What is tried for the knob."""
        return {"learning_rate": RATES, "beta": BETAS, "": ()}[self.knob]

    def options(self, value: float | None) -> dict[str, Any]:
        """Settings of the training run that follow from the arm and its knob, beside data and sizes."""
        loss: dict[str, Any] = {"name": self.loss}
        if self.knob == "beta":
            loss["beta"] = value
        if self.data is Data.PAIRS:
            loss["pairs"] = PairsConfig(kind="step", graft=True, margin=0.3)
        return {"loss": loss}


CREDITS: dict[str, Callable[[float], Estimator]] = {
    # Without the penalty for malformed actions: it would reach some estimators and not others.
    "omega-0": lambda gamma: GiGPO(omega=0.0, gamma=gamma, invalid_action_penalty=0.0),
    "omega-0.5": lambda gamma: GiGPO(omega=0.5, gamma=gamma, invalid_action_penalty=0.0),
    "omega-1": lambda gamma: GiGPO(omega=1.0, gamma=gamma, invalid_action_penalty=0.0),
    # convex with omega 0 is A_S and nothing else.
    "step": lambda gamma: GiGPO(combination="convex", omega=0.0, gamma=gamma, invalid_action_penalty=0.0),
    "discounted": lambda gamma: ESTIMATORS["discounted_grpo"].model_validate({"gamma": gamma}),
}
"""Credit jobs by name."""

ARMS = (
    Arm("behaviour", "behaviour (start weights)", Data.NOTHING),
    Arm("bc-all", "BC on all episodes", Data.ALL, "sft"),
    Arm("bc", "filtered BC", Data.SUCCESSES, "sft", "learning_rate"),
    Arm("bc-exp", "filtered BC x exp(A_S / beta)", Data.SUCCESSES, "bc_exp", "beta", "omega-1"),
    Arm("awr-0", "AWR, GiGPO omega 0 (GRPO)", Data.LIVE, "awr", "beta", "omega-0"),
    Arm("awr-0.5", "AWR, GiGPO omega 0.5", Data.LIVE, "awr", "beta", "omega-0.5"),
    Arm("awr-1", "AWR, GiGPO omega 1", Data.LIVE, "awr", "beta", "omega-1"),
    Arm("awr-step", "AWR, A_S alone", Data.LIVE, "awr", "beta", "step"),
    Arm("awr-discounted", "AWR, discounted GRPO", Data.LIVE, "awr", "beta", "discounted"),
    Arm("ppo", "PPO-clip, GiGPO omega 1", Data.LIVE, "ppo", "learning_rate", "omega-1"),
    Arm("step-dpo", "grafted step-DPO", Data.PAIRS, "dpo", "learning_rate", "omega-1"),
)
"""In the order of the table."""
BY_NAME = {arm.name: arm for arm in ARMS}
PRIMARY = (("bc-exp", "bc"), ("awr-1", "awr-0"))
"""The comparisons that were declared beforehand: the one against the other."""
