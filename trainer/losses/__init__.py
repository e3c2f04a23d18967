"""The losses by name: one file each, with the formula in its docstring. None of these modules imports torch."""

from typing import Annotated, Any, TypeAlias, get_args

from pydantic import BeforeValidator, Field

from trainer.losses.awr import AWR
from trainer.losses.base import Aggregation, Atom, Loss, LossResult, LossRows, Needs, Temperature, TokenLoss, Unit
from trainer.losses.bc_exp import BCExp
from trainer.losses.cispo import CISPO
from trainer.losses.dapo import DAPO
from trainer.losses.dmpo import DMPO
from trainer.losses.dpo import DPO
from trainer.losses.dr_grpo import DrGRPOLoss
from trainer.losses.dro import DRO
from trainer.losses.grpo import GRPOLoss
from trainer.losses.gspo import GSPO
from trainer.losses.kto import KTO
from trainer.losses.ppo import PPO
from trainer.losses.reinforce import Reinforce
from trainer.losses.sft import SFT

_Losses: TypeAlias = (
    SFT | AWR | BCExp | Reinforce | PPO | GRPOLoss | DrGRPOLoss | DAPO | GSPO | CISPO | DRO | DPO | DMPO | KTO
)


def read_loss_settings(value: Any) -> Any:
    """Return the settings of a loss; a string is its name."""
    return {"name": value} if isinstance(value, str) else value


AnyLoss: TypeAlias = Annotated[_Losses, Field(discriminator="name"), BeforeValidator(read_loss_settings)]
"""A loss with its options, as a configuration holds it; a name alone means the defaults."""

LOSSES: dict[str, type[Loss]] = {loss.model_fields["name"].default: loss for loss in get_args(_Losses)}
"""Losses that `--loss` accepts, by name."""

__all__ = [
    "LOSSES",
    "Aggregation",
    "AnyLoss",
    "Atom",
    "Loss",
    "LossResult",
    "LossRows",
    "Needs",
    "Temperature",
    "TokenLoss",
    "Unit",
]
