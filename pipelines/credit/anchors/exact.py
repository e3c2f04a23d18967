"""Exact text: the definition of the GiGPO paper."""

from typing import Literal

from pipelines.credit.anchors.definition import Definition
from pipelines.credit.anchors.states import States


class ExactText(Definition):
    """Two steps share an anchor if their state texts are equal, character for character.

    The key is the stored `state_hash` where there is one, so that no text is read.
    """

    kind: Literal["exact"] = "exact"
    """Name of the definition."""

    @property
    def reads_state(self) -> bool:
        """The state is all there is."""
        return True

    def apply(self, states: States) -> States:
        """The states as they are."""
        return states
