"""The losses by name, one file each, formula in the docstring. None of these modules imports torch."""

from trainer.data.stream.aggregation import Aggregation, Atom, Unit
from trainer.losses.base import Loss, LossResult, LossRows, Needs, Temperature, TokenLoss
from trainer.losses.registry import LOSSES, AnyLoss

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
