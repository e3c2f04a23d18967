"""GDPO: several rewards, each normalised within the group before they are added."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal, Self

import numpy as np
from pydantic import Field, field_validator, model_validator

from pipelines.credit.estimators.normalise import Moments
from pipelines.credit.estimators.protocol import STATE_COLUMNS, CreditRows
from pipelines.credit.estimators.siblings import Compared, WhitenedSiblings, credit_of_episodes
from pipelines.credit.inputs.batch import Bools, Floats, StepBatch
from pipelines.credit.inputs.columns import COMPONENT, InputNeeds


class GDPO(WhitenedSiblings):
    r"""Group reward-decoupled normalisation (arXiv 2601.05242; TRL `normalize_then_sum`).

    .. code-block:: text

        Z  = sum_k w_k (R_k(tau) - mean_g R_k) / (std_g R_k + 1e-6)        over the rewards k and the task group g
        A  = (Z - mean_b Z) / (std_b Z + 1e-6)                             over the batch b, for every step of tau

    one value per trajectory, sample deviations. Adding the rewards first (GRPO on their sum) makes different
    combinations look the same and lets the reward with the widest spread drown the others. A reward that is constant in
    a group gives 0 there. An episode that lacks one of the rewards is unscored (TRL leaves the term out, as if it were
    average); dead is a group in which every reward is constant. TRL adds 1e-4 to the deviations.
    """

    name: ClassVar[str] = "gdpo"

    episode_source: Literal["score"] = "score"
    """The rewards are scores of episodes."""
    components: dict[str, float] = Field(default_factory=dict)
    """Weight of each reward (not 0), by the name of its scorer; the input has them as columns `score_<name>`.
    Required."""

    @field_validator("components")
    @classmethod
    def _in_order(cls, components: dict[str, float]) -> dict[str, float]:
        """By name, so that the order in which they were given does not change a bit of the sum."""
        return dict(sorted(components.items()))

    @model_validator(mode="after")
    def _some_components(self) -> Self:
        if not self.components or 0.0 in self.components.values():
            given = "one has the weight 0" if self.components else "none is named"
            msg = (
                f"gdpo adds several rewards and {given}. Give a weight for each scorer, for example "
                'components={"success": 1.0, "format": 0.2}'
            )
            raise ValueError(msg)
        return self

    def needed(self, present: Sequence[str] = STATE_COLUMNS) -> InputNeeds:
        """Columns that must be there; see `Estimator.needed`."""
        return replace(super().needed(present), components=tuple(self.components), episode_score=False)

    def credit(self, batch: StepBatch) -> CreditRows:
        """Advantages of checked, sorted, active steps; see `Estimator.credit`."""
        # What is known of an episode is the sum of all its rewards: NaN where one is.
        known_E = np.sum([self._component_E(batch, name) for name in self.components], axis=0)
        return self._rows_of(batch, known_E, known_E)

    def _compare(self, batch: StepBatch, score_E: Floats, excluded_E: Bools) -> Compared:
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
        return credit_of_episodes(batch, a_episode_E, replace(siblings, tied_K=tied_P)), flags

    def _component_E(self, batch: StepBatch, name: str) -> Floats:
        return batch.episode_numbers(COMPONENT + name)
