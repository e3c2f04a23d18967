"""What losses on preferences compare: pairs of episodes or steps, or good and bad episodes."""

from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, model_validator

from trainer.frozen import FrozenModel


class PairsConfig(FrozenModel):
    """Which episodes or steps are compared by losses on pairs."""

    kind: Literal["episode", "step"] = "episode"
    """Whole sibling episodes, by A_E of the credit job; or single steps that share an anchor, by their
    return-to-go."""
    margin: float = Field(0.0, ge=0)
    """Smallest difference of a pair's A_E or returns. Equal ones are never paired."""
    per_group: int | None = Field(None, ge=1)
    """Pairs of a group (kind step: of an anchor) at most; None: as many as there are."""
    graft: bool = False
    """Kind step: put both actions onto the context of the chosen one. Otherwise the contexts must be identical."""

    @model_validator(mode="after")
    def _graft_has_an_effect(self) -> Self:
        if self.graft and self.kind != "step":
            raise ValueError('graft is for pairs of steps: set kind to "step", or leave graft out')
        return self


@dataclass(frozen=True, slots=True)
class LabelRule:
    """Which episodes are desirable."""

    threshold: float | None
    """Those whose score reaches it. None: those with A_E > 0 in the credit job."""
    score: str
    """Score that the threshold is compared with."""
