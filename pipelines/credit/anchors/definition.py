"""What every anchor definition is: a small frozen configuration, stored with the job, that gives each step a key.

A definition is also a stage: `apply` takes the states as they are so far and returns them changed, so that a chain of
definitions is a definition. Three sorts: text stages (a text becomes another), filters (some states become unknown) and
key stages (the key is decided, the texts are gone).
"""

from abc import ABC, abstractmethod
from typing import ClassVar, Self

import polars as pl
from pydantic import BaseModel, ConfigDict

from pipelines.credit.anchors.states import States
from pipelines.credit.inputs.batch import Bools, StepBatch


class Definition(BaseModel, ABC):
    """Base of all anchor definitions. JSON: an object with its `kind` and its options."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str
    """Name of the definition."""
    makes_key: ClassVar[bool] = False
    """A key stage: nothing after it can read texts."""

    @property
    def reads_text(self) -> bool:
        """Whether the stage looks at the texts of states."""
        return False

    @property
    def reads_state(self) -> bool:
        """Whether the stage's result depends on the state at all."""
        return self.reads_text

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
        """Input columns, of `steps` or `episodes`.

        Args:
            present: names there are. The state's stored hash is preferred, so that no text is read in vain.
        """
        state: tuple[str, ...] = ()
        if self._needs_state:
            hashed = "state_hash" in present
            state = ("state_hash",) * hashed + ("state",) * (self.reads_text or not hashed)
        return tuple(dict.fromkeys((*state, *self.inputs())))

    def keys(self, batch: StepBatch, included_N: Bools) -> pl.Series:
        """Key of each row: 63 bits, the same on every machine.

        Args:
            batch: rows in canonical order; its frame holds `columns()`.
            included_N: rows whose episode takes part. Only similarity looks at it.

        Returns:
            Int64 series `anchor_key` over the rows; NULL where the state is unknown or left out.
        """
        states = States.of(batch, included_N, reads_state=self._needs_state, reads_text=self.reads_text)
        return self.apply(states).keys()

    def pinned(self) -> Self:
        """The definition with everything that decides its keys written down: what a job stores."""
        return self
