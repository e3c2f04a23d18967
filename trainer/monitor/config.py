"""Options of a run's monitoring."""

from pydantic import Field

from trainer.frozen import FrozenModel


class ValidationConfig(FrozenModel):
    """Held-out episodes, and what their measurements decide."""

    where: str
    """SQL predicate over `episodes`: these are held out, also where --where takes them."""
    every: int = Field(10, ge=1)
    """Optimizer steps between measurements; 1 measures after each update."""
    patience: int | None = Field(None, ge=1)
    """Stop after so many measurements in a row without improvement. None never stops early."""
    min_improvement: float = Field(0.0, ge=0)
    """What counts as an improvement, in nats per token."""
    export: bool = False
    """Export the best weights instead of the last: every improvement then writes a checkpoint."""


class AlarmConfig(FrozenModel):
    """Thresholds. None switches an alarm off."""

    entropy: float | None = Field(0.02, ge=0)
    """Mean entropy, in nats, below which the policy has collapsed."""
    entropy_share: float | None = Field(0.2, gt=0, lt=1)
    """The same, as a share of the entropy at the run's first update."""
    effective_sample_size: float | None = Field(0.1, gt=0, lt=1)
    """Lowest effective sample size of weights or ratios, as a share of the tokens."""
    dead_groups: float | None = Field(0.8, gt=0, le=1)
    """Share of groups without signal above which training says little."""
    shared_anchors: float | None = Field(0.05, gt=0, lt=1)
    """Share of steps that share their anchor state with a sibling, below which A_S is zero nearly everywhere."""
