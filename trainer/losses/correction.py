"""Off-policy correction: stored tokens come from an older policy, and from an engine that computes differently.

rho is the probability of a stored token under the policy that is corrected to, divided by that under the policy that
sampled it. Each method gives every token a weight, 0 where it is masked:

    token_truncate      min(rho, high)                          (TIS; bias grows with the distance)
    token_mask          rho where rho <= high, else 0
    icepop              rho where low <= rho <= high, else 0    (arXiv 2510.18855)
    sequence_truncate   min(prod rho, high), product over the unit
    sequence_mask       prod rho where it is <= high, else 0    (TRL's default)
    geometric_mask      1 where low <= (prod rho)^(1/T) <= high, else 0; does not depend on the length T

Masks act on the loss alone: the denominators come from the plan (`trainer.data.stream.aggregation`) and stay as they
are. To what it is corrected: with `decoupled`, to the proximal policy, while the loss's own ratio is taken against that
(Hilton et al. 2021, arXiv 2110.00641; AReaL, arXiv 2505.24298):

    L_t = rho_t max(-r A, -clip(r) A)        rho = pi_prox / pi_b (limited),   r = pi_theta / pi_prox

The proximal policy is the one at the start of every `proximal_every` optimizer steps, kept as a copy of the trained
weights: the clip holds the policy near where it lately was, however old the data is. In the first step of a period the
two are the same policy, and r is 1. Without `decoupled` a ratio loss compares with the behaviour policy itself, and a
weight on top would count the distance twice: there only masks act, as 0 or 1.

Staleness is limited where data is chosen, not here: what is too old is dropped by the plan and counts in no
denominator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Self

from pydantic import Field, model_validator

from lake.read.ratio_limits import CORRECTION_LIMITS, correction_bounds, outside
from trainer.frozen import FrozenModel
from trainer.losses.base import unit_mean, unit_sum
from trainer.losses.kl import MAX_LOG_RATIO

if TYPE_CHECKING:
    from torch import Tensor


class CorrectionMethod(StrEnum):
    """What is done about rho."""

    NONE = "none"
    """Nothing."""
    TOKEN_TRUNCATE = "token_truncate"
    """Weight by rho, at most `high`."""
    TOKEN_MASK = "token_mask"
    """Weight by rho; leave tokens above `high` out."""
    ICEPOP = "icepop"
    """Weight by rho; leave tokens outside [low, high] out."""
    SEQUENCE_TRUNCATE = "sequence_truncate"
    """Weight by the product over the unit, at most `high`."""
    SEQUENCE_MASK = "sequence_mask"
    """Weight by the product over the unit; leave units above `high` out."""
    GEOMETRIC_MASK = "geometric_mask"
    """Leave units out whose geometric mean is outside [low, high]."""


TRUNCATIONS = frozenset({CorrectionMethod.TOKEN_TRUNCATE, CorrectionMethod.SEQUENCE_TRUNCATE})
"""Methods that mask nothing."""
OVER_UNITS = frozenset(
    {CorrectionMethod.SEQUENCE_TRUNCATE, CorrectionMethod.SEQUENCE_MASK, CorrectionMethod.GEOMETRIC_MASK}
)
"""Methods that look at a whole unit."""
NORMALISER_SUMS = ("correction_mass", "correction_kept")
"""Names of what `normaliser` divides."""


class CorrectionConfig(FrozenModel):
    """Off-policy correction."""

    method: CorrectionMethod = CorrectionMethod.NONE
    """What is done about rho = corrected policy / behaviour policy; see `trainer.losses.correction`."""
    low: float | None = Field(None, ge=0, allow_inf_nan=False)
    """Lower limit, for icepop and geometric_mask; None takes the method's own (0.5, 0.999)."""
    high: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Upper limit; None takes the method's own (token 2, icepop 5, sequence_truncate 5, sequence_mask 3, geometric
    1.001)."""
    decoupled: bool = False
    """Correct from behaviour to the proximal policy, the one at the start of every `proximal_every` optimizer steps,
    and take the loss's ratio against that one: the clip then limits what these steps change, not the data's age."""
    proximal_every: int | None = Field(None, ge=1)
    """With decoupled: optimizer steps for which the proximal policy stays the same. Above 1 it costs a copy of the
    trained weights and, except in the first of them, a forward pass. With 1 the ratio is 1 and nothing is clipped.
    None: those of an epoch where `minibatches` cuts it, else 4."""
    normalise: bool = False
    """Divide the weights by their mean over what is kept of the optimizer step. Costs a forward pass."""

    @model_validator(mode="after")
    def _limits_have_an_effect(self) -> Self:
        defaults = CORRECTION_LIMITS[self.method]
        for name, value, default in zip(("low", "high"), (self.low, self.high), defaults, strict=True):
            if value is not None and default is None:
                raise ValueError(f"method {self.method} has no limit `{name}`: leave it out")
        if (self.normalise or self.decoupled) and self.method is CorrectionMethod.NONE:
            raise ValueError("normalise and decoupled need a method, for example token_truncate")
        if self.proximal_every is not None and not self.decoupled:
            msg = "proximal_every has no effect unless decoupled is set: set it, or leave proximal_every out"
            raise ValueError(msg)
        if self.normalise and self.method is CorrectionMethod.GEOMETRIC_MASK:
            raise ValueError("geometric_mask weights by 0 or 1, so there is nothing to normalise")
        return self

    @property
    def limits(self) -> tuple[float, float]:
        """Low and high: those given, or the method's own (0 and infinity where it has none)."""
        return correction_bounds(self.method, self.low, self.high)


@dataclass(frozen=True, slots=True)
class Correction:
    """What a method makes of each token; all [N], without gradient."""

    weight_N: Tensor
    """Weight, floats; 0 where masked."""
    keep_N: Tensor
    """It is not masked, bool."""
    limited_N: Tensor
    """Its weight was truncated, bool."""


def correct(log_rho_N: Tensor, unit_N: Tensor | None, units: int, config: CorrectionConfig) -> Correction:
    """Weights of stored tokens, from log(corrected / behaviour), [N].

    Args:
        unit_N: unit of each token, int64 [N]; needed by the methods that look at whole units.

    Raises:
        ValueError: the method needs units and there are none.
    """
    log_rho_N = log_rho_N.detach()
    method, (low, high) = config.method, config.limits
    if method in OVER_UNITS:
        if unit_N is None:
            raise ValueError(f"correction {method} needs a unit: turn, sequence or episode")
        over = unit_mean if method is CorrectionMethod.GEOMETRIC_MASK else unit_sum
        log_rho_N = over(log_rho_N, unit_N, units)[unit_N]
    rho_N = log_rho_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if method is CorrectionMethod.NONE:
        rho_N = rho_N.new_ones(len(rho_N))
    if method in TRUNCATIONS:
        limited_N = rho_N > high
        return Correction(rho_N.clamp(max=high), limited_N.new_ones(len(limited_N)), limited_N)
    keep_N = ~outside(rho_N, low, high)
    weight_N = rho_N.new_ones(len(rho_N)) if method is CorrectionMethod.GEOMETRIC_MASK else rho_N
    return Correction(weight_N * keep_N, keep_N, keep_N.new_zeros(len(keep_N)))


def normaliser_sums(correction: Correction, plan_weight_N: Tensor) -> dict[str, Tensor]:
    """The two sums over an optimizer step that `normaliser` divides, weighted as the loss is."""
    kept_N = plan_weight_N * correction.keep_N
    return {"correction_mass": (kept_N * correction.weight_N).sum(), "correction_kept": kept_N.sum()}


def normaliser(statistics: Mapping[str, float]) -> float:
    """Mean weight over what is kept of the optimizer step; 1 where nothing is kept."""
    mass, kept = statistics["correction_mass"], statistics["correction_kept"]
    return mass / kept if mass > 0 and kept > 0 else 1.0
