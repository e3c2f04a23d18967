"""Off-policy estimators, one file each, formula and source in the docstring. NumPy only."""

from trainer.evaluation.estimators.base import Behaviour, Estimator
from trainer.evaluation.estimators.clipped import Clipped
from trainer.evaluation.estimators.doubly_robust import DoublyRobust
from trainer.evaluation.estimators.fitted import FQE_RIDGE, Fitted
from trainer.evaluation.estimators.pdis import PDIS
from trainer.evaluation.estimators.wis import WIS
from trainer.evaluation.estimators.wpdis import WPDIS


def all_estimators(*, clip: float = 2.0, ridge: float = FQE_RIDGE) -> list[Estimator]:
    """Every estimator, the recorded mean first."""
    return [Behaviour(), PDIS(), WIS(), WPDIS(), Clipped(clip), DoublyRobust(), Fitted(ridge)]
