"""What a ladder is: sizes, seeds and limits, fixed before anything is measured."""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

TUNING_SEED = 100
"""First seed of the runs that choose the knobs: none of the seeds that are compared."""


class LadderSettings(BaseModel):
    """The defaults are those of docs/ladder.md."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rooms: int = 3
    """Of a house."""
    horizon: int = 12
    """Actions after which an episode is cut off."""
    least_optimum: int = 6
    """Only worlds whose shortest solution takes at least this many actions are played."""
    noises: tuple[float, ...] = (0.4, 0.5, 0.6)
    """One checkpoint each: how often the script that it is warmed up on takes a random action."""
    traces: int = 800
    """Episodes of the script for each checkpoint."""
    starts: int = 84
    """Groups that each checkpoint plays."""
    siblings: int = 8
    """Episodes of a group."""
    clone_epochs: int = 2
    """Passes over all episodes that the start weights are made by."""
    episodes_per_step: int = 16
    """Of an optimizer step of the advantage-weighted arms; it gives the number of optimizer steps of every arm."""
    seeds: int = Field(10, ge=1, le=20)
    """Paired seeds that are compared."""
    tuning_seeds: int = Field(2, ge=1)
    """Seeds that the knobs are chosen on."""
    held_out: int = 512
    """Starts of the comparison."""
    validation: int = 256
    """Starts that the knobs are chosen on."""
    gamma: float = 0.95
    """Discount of returns, for every estimator that has one."""

    @model_validator(mode="after")
    def _short(self) -> Self:
        if self.horizon > 2 * self.least_optimum:
            msg = f"horizon {self.horizon} is more than twice the least optimum {self.least_optimum}"
            raise ValueError(msg)
        return self

    def compared_seeds(self) -> range:
        """Seeds of the comparison."""
        return range(self.seeds)

    def choosing_seeds(self) -> range:
        """Seeds that the knobs are chosen on."""
        return range(TUNING_SEED, TUNING_SEED + self.tuning_seeds)


SMALL = LadderSettings(
    rooms=2,
    horizon=10,
    least_optimum=5,
    noises=(0.0, 0.1),
    traces=160,
    starts=6,
    siblings=4,
    clone_epochs=1,
    episodes_per_step=8,
    seeds=2,
    tuning_seeds=1,
    held_out=8,
    validation=8,
)
"""Shows that everything works together; its figures mean nothing."""
