"""The losses by name, one file each, formula in the docstring. None of these modules imports torch."""

from trainer.data.aggregation import Aggregation, Atom, Unit
from trainer.losses.base import Loss, LossConfig, LossResult, LossRows, Needs, Temperature
from trainer.losses.registry import LOSSES, find_loss

__all__ = [
    "LOSSES",
    "Aggregation",
    "Atom",
    "Loss",
    "LossConfig",
    "LossResult",
    "LossRows",
    "Needs",
    "Temperature",
    "Unit",
    "find_loss",
]
