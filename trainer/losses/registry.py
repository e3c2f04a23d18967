"""The losses by name, and the loss of a configuration with its needs resolved. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from lake.errors import UsageError
from trainer.data.aggregation import Unit
from trainer.losses.awr import AWR
from trainer.losses.base import Loss, LossConfig
from trainer.losses.bc_exp import BC_EXP
from trainer.losses.cispo import CISPO
from trainer.losses.dapo import DAPO
from trainer.losses.dmpo import DMPO
from trainer.losses.dpo import DPO
from trainer.losses.dr_grpo import DR_GRPO
from trainer.losses.dro import DRO
from trainer.losses.grpo import GRPO
from trainer.losses.gspo import GSPO
from trainer.losses.kto import KTO
from trainer.losses.ppo import PPO
from trainer.losses.reinforce import REINFORCE
from trainer.losses.sft import SFT

if TYPE_CHECKING:
    from trainer.config import TrainConfig

LOSSES: dict[str, Loss] = {
    loss.name: loss
    for loss in (
        SFT,
        AWR,
        BC_EXP,
        REINFORCE,
        PPO,
        GRPO,
        DR_GRPO,
        DAPO,
        GSPO,
        CISPO,
        DRO,
        DPO,
        DMPO,
        KTO,
    )
}
"""Every loss `--loss` can name."""


def find_loss(config: TrainConfig) -> Loss:
    """The loss of a configuration, with what it needs under these settings.

    Raises:
        UsageError: the loss is a function of whole units, and the configuration says that the unit is the token.
    """
    loss = LOSSES[config.loss]
    options: LossConfig | None = getattr(config, loss.name, None)
    needs = loss.needs if options is None else options.resolve(loss.needs)
    if config.unit is not None:
        # Whoever names the unit means it, also where advantages differ inside.
        needs = replace(needs, unit=config.unit, unit_advantages=False)
    if config.aggregation is not None:
        needs = replace(needs, aggregation=config.aggregation)
    if needs.unit is Unit.TOKEN and needs.unit_above_token:
        msg = f"{loss.name} as configured looks at whole units: set unit to turn, sequence or episode, not token"
        raise UsageError(msg)
    return replace(loss, needs=needs, prepare=loss.prepare if needs.statistics else None)
