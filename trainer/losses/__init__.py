"""The losses by name, one file each, formula in the docstring. None of these modules imports torch."""

from trainer.losses.awr import AWR
from trainer.losses.base import Loss, LossResult, LossRows, Needs, Temperature, Unit
from trainer.losses.ppo import PPO
from trainer.losses.sft import SFT

LOSSES: dict[str, Loss] = {loss.name: loss for loss in (SFT, AWR, PPO)}
"""Every loss `--loss` can name."""

__all__ = ["AWR", "LOSSES", "PPO", "SFT", "Loss", "LossResult", "LossRows", "Needs", "Temperature", "Unit"]
