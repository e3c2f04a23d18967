"""GDPO: sum of several rewards, each normalised within the group."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal, Self

import numpy as np
from pydantic import Field, field_validator, model_validator

from pipelines.credit.estimators.normalise import Moments
from pipelines.credit.estimators.protocol import STATE_COLUMNS, CreditRows
from pipelines.credit.estimators.siblings import FlaggedCredit, WhitenedSiblings, spread_credit
from pipelines.credit.steps import COMPONENT, Bools, Floats, InputNeeds, StepBatch


class GDPO(WhitenedSiblings):
    r"""Group reward-decoupled normalisation (arXiv 2601.05242; TRL `normalize_then_sum`).

    .. code-block:: text

        Z  = sum_k w_k (R_k(tau) - mean_g R_k) / (std_g R_k + 1e-6)        over the rewards k and the task group g
        A  = (Z - mean_b Z) / (std_b Z + 1e-6)                             over the batch b, for every step of tau

    with one value per trajectory and sample deviations. Adding the rewards first (GRPO on their sum) makes different
    combinations look the same, and the reward with the widest spread dominates. A reward that is constant in a group
    gives 0 there. An episode that lacks one of the rewards is unscored (TRL omits the term, as if it were average). A
    group in which every reward is constant is dead. TRL adds 1e-4 to the deviations.
    """

    name: ClassVar[str] = "gdpo"

    episode_source: Literal["score"] = "score"
    """Source of the rewards: scores of episodes."""
    components: dict[str, float] = Field(default_factory=dict)
    """Weight of each reward (not 0), by the name of its scorer. The input has them as columns `score_<name>`.
    Required."""

    @field_validator("components")
    @classmethod
    def _sort_components(cls, components: dict[str, float]) -> dict[str, float]:
        """Sort by name: the order of the options must not change the bits of the sum."""
        return dict(sorted(components.items()))

    @model_validator(mode="after")
    def _check_components(self) -> Self:
        if not self.components or 0.0 in self.components.values():
            fault = "one has the weight 0" if self.components else "none is named"
            msg = (
                f"gdpo adds several rewards, but {fault}. Give a weight for each scorer, for example "
                'components={"success": 1.0, "format": 0.2}'
            )
            raise ValueError(msg)
        return self

    def input_needs(self, present: Sequence[str] = STATE_COLUMNS) -> InputNeeds:
        """Return the required columns; see `Estimator.input_needs`."""
        return replace(super().input_needs(present), components=tuple(self.components), episode_score=False)

    def credit(self, batch: StepBatch) -> CreditRows:
        """Compute advantages; see `Estimator.credit`."""
        # The sum of an episode's rewards is NaN if one of them is.
        known_E = np.sum([self._component_E(batch, name) for name in self.components], axis=0)
        return self._make_rows(batch, known_E, known_E)

    def _compare(self, batch: StepBatch, score_E: Floats, excluded_E: Bools) -> FlaggedCredit:
        member_E = ~excluded_E & ~np.isnan(score_E)
        sum_E = np.where(member_E, 0.0, np.nan)
        tied_P = np.ones(len(batch.siblings.starts_K), np.bool_)
        siblings = Moments.of(score_E, member_E, batch.siblings)
        for name, weight in self.components.items():
            component_E = self._component_E(batch, name)
            moments = Moments.of(component_E, member_E, batch.siblings)
            sum_E += weight * moments.normalise(component_E, member_E, batch.siblings, "mean_std_norm", "zero")
            tied_P &= moments.tied_K
        a_episode_E, flags = self._whiten(batch, sum_E, member_E, silent_P=tied_P | (siblings.count_K == 1))
        return spread_credit(batch, a_episode_E, replace(siblings, tied_K=tied_P)), flags

    def _component_E(self, batch: StepBatch, name: str) -> Floats:
        return batch.episode_numbers(COMPONENT + name)
