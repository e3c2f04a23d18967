"""Estimators of off-policy evaluation, with formulas and sources in their docstrings. NumPy only."""

from trainer.evaluation.estimators.fitted import FQE_RIDGE, DoublyRobust, FittedEvaluation
from trainer.evaluation.estimators.importance import PDIS, WIS, WPDIS, Behaviour, ClippedImportance, OpeEstimator


def all_estimators(*, clip: float = 2.0, ridge: float = FQE_RIDGE) -> list[OpeEstimator]:
    """Return every estimator, the recorded mean first."""
    return [Behaviour(), PDIS(), WIS(), WPDIS(), ClippedImportance(clip), DoublyRobust(), FittedEvaluation(ridge)]
