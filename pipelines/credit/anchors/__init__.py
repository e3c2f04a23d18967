"""Anchor states: definitions of the same state in sibling trajectories.

A definition gives each step a key; steps of a task group with equal keys form an anchor group. Keys are 63-bit hashes,
stable across processes and machines. They do not use Python's equality, where 1 == 1.0 == True. A NULL key is an
unknown state. docs/guides/which-anchor.md helps to choose a definition.
"""

from typing import Annotated, ClassVar, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from pipelines.credit.anchors.definitions import (
    CanonicalJson,
    ChosenColumns,
    Definition,
    ExactText,
    LastStates,
    NoErrors,
    StateFunction,
    States,
    Substitutions,
    ToolResults,
)
from pipelines.credit.anchors.similar import SimilarText

Single: TypeAlias = (
    CanonicalJson
    | ChosenColumns
    | ExactText
    | LastStates
    | NoErrors
    | SimilarText
    | Substitutions
    | ToolResults
    | StateFunction
)
"""All definitions but `Chain`."""
Stage: TypeAlias = Annotated[Single, Field(discriminator="kind")]
"""Stage of a chain: any definition but a chain."""


class Chain(Definition):
    """Definitions applied in order: text stages and filters in any order, then key stages and further filters.

    Text stages: substitutions, json, function, no_errors with a pattern. Filters by mark or role: no_errors,
    tool_results. Key stages: similarity, columns, last_states; without one the key is the resulting text. A filter
    before last_states makes windows with an excluded state unknown; a filter after it only excludes rows.
    """

    kind: Literal["chain"] = "chain"
    steps: tuple[Stage, ...] = Field(min_length=1)
    """Definitions, first to last."""
    makes_key: ClassVar[bool] = True

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        keyed_by, state_read_by = None, None
        for stage in self.steps:
            if stage.reads_text and keyed_by:
                msg = f"{stage.kind} reads texts, and {keyed_by} before it leaves only keys. Put it before {keyed_by}"
                raise ValueError(msg)
            if isinstance(stage, ChosenColumns) and not stage.reads_state and state_read_by:
                msg = f'columns ignores the state, so {state_read_by} before it has no effect. Add "state" to its names'
                raise ValueError(msg)
            keyed_by = stage.kind if stage.makes_key else keyed_by
            state_read_by = stage.kind if stage.reads_state else state_read_by
        return self

    @property
    def reads_text(self) -> bool:
        """Return whether any stage reads texts."""
        return any(stage.reads_text for stage in self.steps)

    @property
    def reads_state(self) -> bool:
        """Return whether any stage depends on the state; without a key stage the key is the state."""
        return any(stage.reads_state for stage in self.steps) or not any(stage.makes_key for stage in self.steps)

    def inputs(self) -> tuple[str, ...]:
        """Return the input columns of all stages."""
        return tuple(dict.fromkeys(name for stage in self.steps for name in stage.inputs()))

    def apply(self, states: States) -> States:
        """Apply all stages in order."""
        for stage in self.steps:
            states = stage.apply(states)
        return states

    def pin_version(self) -> Self:
        """Pin the version of every stage."""
        return self.model_copy(update={"steps": tuple(stage.pin_version() for stage in self.steps)})


Anchors: TypeAlias = Annotated[Chain | Single, Field(discriminator="kind")]
"""An anchor definition; as JSON for example `{"kind": "exact"}` or `{"kind": "similarity", "threshold": 0.9}`."""
