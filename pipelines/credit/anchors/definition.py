"""What every anchor definition is: a small frozen configuration, stored with the job, that gives each step a key.

A definition is also a stage: `apply` takes the states so far and returns them changed, so that a chain of definitions
is a definition. Three sorts: text stages (a text becomes another), filters (some states become unknown) and key stages
(the key is decided, the texts are gone).
"""

from abc import ABC, abstractmethod
from typing import ClassVar, Literal, Self, TypeAlias

import polars as pl
from pydantic import BaseModel, ConfigDict

from pipelines.credit.anchors.states import States
from pipelines.credit.inputs.batch import Bools, StepBatch

Reads: TypeAlias = Literal["nothing", "state", "text"]


class Definition(BaseModel, ABC):
    """Base of all anchor definitions. JSON: an object with its `kind` and its options."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str
    """Name of the definition."""
    makes_key: ClassVar[bool] = False
    """A key stage: nothing after it can read texts."""
    reads: ClassVar[Reads] = "nothing"
    """What the stage looks at, unless its options decide that."""

    @property
    def reads_text(self) -> bool:
        """Whether the stage looks at the texts of states."""
        return self.reads == "text"

    @property
    def reads_state(self) -> bool:
        """Whether the stage's result depends on the state at all."""
        return self.reads_text or self.reads == "state"

    @property
    def _needs_state(self) -> bool:
        """Whether the definition alone does: without a key stage the state is the key."""
        return self.reads_state or not self.makes_key

    @abstractmethod
    def apply(self, states: States) -> States:
        """The states after this stage."""

    def inputs(self) -> tuple[str, ...]:
        """Columns read beside the state."""
        return ()

    def columns(self, present: list[str]) -> tuple[str, ...]:
        """Input columns, of `steps` or `episodes`, out of those present; a stored hash spares reading the text."""
        state: tuple[str, ...] = ()
        if self._needs_state:
            hashed = "state_hash" in present
            state = ("state_hash",) * hashed + ("state",) * (self.reads_text or not hashed)
        return tuple(dict.fromkeys((*state, *self.inputs())))

    def keys(self, batch: StepBatch, included_N: Bools) -> pl.Series:
        """Key of each row (Int64, 63 bits, the same on every machine); NULL where the state is unknown or left out.

        Rows are in canonical order and hold `columns()`. `included_N` marks rows whose episode takes part.
        """
        states = States.of(batch, included_N, reads_state=self._needs_state, reads_text=self.reads_text)
        return self.apply(states).keys()

    def pinned(self) -> Self:
        """The definition with everything that decides its keys written down: what a job stores."""
        return self
