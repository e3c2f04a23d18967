"""What a loss makes of a token because of its ratio: one rule, for the trainer that applies it and for its readers.

r is the policy's probability of a token divided by that under the policy it is compared with; rho is the same ratio as
the off-policy correction sees it. The functions take whatever has operators (tensors, arrays, Polars expressions), all
of one shape. Bounds come from the loss's options, as a training job stores them in its parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

CORRECTION_LIMITS: dict[str, tuple[float | None, float | None]] = {
    "none": (None, None),
    "token_truncate": (None, 2.0),
    "token_mask": (None, 2.0),
    "icepop": (0.5, 5.0),
    "sequence_truncate": (None, 5.0),
    "sequence_mask": (None, 3.0),
    "geometric_mask": (0.999, 1.001),
}
"""Low and high of each correction method where the options leave them open; None where it has no such limit."""


def clipped_above(ratio: Any, advantages: Any, clip_high: float) -> Any:
    """The clip stops the gradient that would make a good token likelier: A > 0 and r > 1 + clip_high."""
    return (advantages > 0) & (ratio > 1 + clip_high)


def clipped_below(ratio: Any, advantages: Any, clip_low: float) -> Any:
    """The clip stops the gradient that would make a bad token rarer: A < 0 and r < 1 - clip_low."""
    return (advantages < 0) & (ratio < 1 - clip_low)


def clipped_dual(ratio: Any, advantages: Any, dual_clip: float) -> Any:
    """The dual clip stops the gradient of a bad token that became much likelier: A < 0 and r > dual_clip."""
    return (advantages < 0) & (ratio > dual_clip)


def outside(ratio: Any, low: float, high: float) -> Any:
    """The ratio is outside [low, high]: a mask leaves the token out."""
    return (ratio < low) | (ratio > high)


def correction_bounds(method: str, low: float | None, high: float | None) -> tuple[float, float]:
    """Low and high of a method: those given, or its own; 0 and infinity where it has none."""
    own_low, own_high = CORRECTION_LIMITS[method]
    low, high = own_low if low is None else low, own_high if high is None else high
    return 0.0 if low is None else low, float("inf") if high is None else high


class Fate(StrEnum):
    """What becomes of a token's policy gradient, the first that applies."""

    MASKED = "masked by the correction"
    ABOVE = "clipped above"
    BELOW = "clipped below"
    DUAL = "stopped by the dual clip"
    LIMITED = "weight limited"
    """It counts, with a weight at its limit."""
    KEPT = "kept"


@dataclass(frozen=True, slots=True)
class RatioLimits:
    """Limits on a token's ratio to the behaviour policy, as a loss has them."""

    clip_low: float | None = None
    clip_high: float | None = None
    """The clip of `clipped_above` and `clipped_below`; None without one."""
    dual_clip: float | None = None
    weight: tuple[float, float] | None = None
    """Between these the token's weight is its ratio, beyond them the limit."""
    mask: tuple[float, float] | None = None
    """Outside of these it carries no loss."""
    unit: str = "token"
    """Whose ratio is clipped: token, turn, sequence or episode; that of a unit is the geometric mean of its tokens'."""

    def fates(self, ratio: Any, unit_ratio: Any, advantages: Any) -> list[tuple[Fate, Any]]:
        """Which tokens each fate applies to, in order of precedence; `KEPT` is what is left.

        Args:
            ratio: of each token.
            unit_ratio: of its unit; the same where the unit is the token.
            advantages: as the loss took them.
        """
        found = []
        if self.mask is not None:
            found.append((Fate.MASKED, outside(ratio, *self.mask)))
        if self.clip_high is not None:
            found.append((Fate.ABOVE, clipped_above(unit_ratio, advantages, self.clip_high)))
        if self.clip_low is not None:
            found.append((Fate.BELOW, clipped_below(unit_ratio, advantages, self.clip_low)))
        if self.dual_clip is not None:
            found.append((Fate.DUAL, clipped_dual(unit_ratio, advantages, self.dual_clip)))
        if self.weight is not None:
            found.append((Fate.LIMITED, outside(ratio, *self.weight)))
        return found


def limits_of(loss: Any) -> RatioLimits | str:
    """The limits of a loss, by its options as a job's parameters hold them; or why they cannot be told by token."""
    if not isinstance(loss, Mapping):
        return "its parameters are of a version in which losses did not own their options"
    correction = loss.get("correction") or {}
    method = correction.get("method", "none")
    if correction.get("decoupled"):
        return "its ratio is to the proximal policy, the weights of some updates before, which scored nothing"
    if method not in CORRECTION_LIMITS or method.startswith(("sequence", "geometric")):
        return f"its correction ({method}) looks at whole units"
    bounds = correction_bounds(method, correction.get("low"), correction.get("high"))
    weight = bounds if method == "token_truncate" else None
    if "max_ratio" in loss:
        weight = (float(loss["min_ratio"]), float(loss["max_ratio"]))
    return RatioLimits(
        clip_low=loss.get("clip_low"),
        clip_high=loss.get("clip_high"),
        dual_clip=loss.get("dual_clip"),
        weight=weight,
        mask=bounds if method in {"token_mask", "icepop"} else None,
        # The one loss whose ratio is that of a unit.
        unit=(loss.get("unit") or "episode") if loss.get("name") == "gspo" else "token",
    )
