"""The losses by name, one file each, formula in the docstring. None of these modules imports torch."""

from typing import Annotated, Any, TypeAlias, get_args

from pydantic import BeforeValidator, Field

from trainer.data.stream.aggregation import Aggregation, Atom, Unit
from trainer.losses.awr import AWR
from trainer.losses.base import Loss, LossResult, LossRows, Needs, Temperature, TokenLoss
from trainer.losses.bc_exp import BCExp
from trainer.losses.cispo import CISPO
from trainer.losses.dapo import DAPO
from trainer.losses.dmpo import DMPO
from trainer.losses.dpo import DPO
from trainer.losses.dr_grpo import DrGRPO
from trainer.losses.dro import DRO
from trainer.losses.grpo import GRPO
from trainer.losses.gspo import GSPO
from trainer.losses.kto import KTO
from trainer.losses.ppo import PPO
from trainer.losses.reinforce import Reinforce
from trainer.losses.sft import SFT

_Losses: TypeAlias = SFT | AWR | BCExp | Reinforce | PPO | GRPO | DrGRPO | DAPO | GSPO | CISPO | DRO | DPO | DMPO | KTO


def by_name(value: Any) -> Any:
    """The settings of a loss, of which a text is the name."""
    return {"name": value} if isinstance(value, str) else value


AnyLoss: TypeAlias = Annotated[_Losses, Field(discriminator="name"), BeforeValidator(by_name)]
"""A loss with its options, as a configuration holds it; a name alone stands for its defaults."""

LOSSES: dict[str, type[Loss]] = {loss.model_fields["name"].default: loss for loss in get_args(_Losses)}
"""Every loss `--loss` can name."""

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
