"""Anchor states: which steps of sibling trajectories count as "the same place".

A definition gives every step a key; steps of one task group with equal keys form an anchor group. Keys are 63-bit
hashes, stable across processes and machines, never Python's equality (where 1 == 1.0 == True). A NULL key is an unknown
state. docs/guides/which-anchor.md says which to choose.
"""

from typing import Annotated, ClassVar, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from pipelines.credit.anchors.definition import Definition, States
from pipelines.credit.anchors.key_stages import ChosenColumns, LastStates
from pipelines.credit.anchors.similar import SimilarText
from pipelines.credit.anchors.texts import CanonicalJson, ExactText, NoErrors, Substitutions, ToolResults
from pipelines.credit.anchors.user_function import UserFunction

Single: TypeAlias = (
    CanonicalJson
    | ChosenColumns
    | ExactText
    | LastStates
    | NoErrors
    | SimilarText
    | Substitutions
    | ToolResults
    | UserFunction
)
"""Every definition that is not made of others."""
Stage: TypeAlias = Annotated[Single, Field(discriminator="kind")]
"""What can stand in a chain: any definition but a chain."""


class Chain(Definition):
    """Definitions applied in order: text stages and filters in any order, then key stages, filters among them.

    Text stages: substitutions, json, function, no_errors with a pattern. Filters by mark or role: no_errors,
    tool_results. Key stages: similarity, columns, last_states; without one the key is the exact text that is left. A
    filter before last_states makes windows with a left-out state unknown; after it, it only takes rows out.
    """

    kind: Literal["chain"] = "chain"
    steps: tuple[Stage, ...] = Field(min_length=1)
    """The definitions, first to last."""
    makes_key: ClassVar[bool] = True

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        keyed_by, state_read_by = None, None
        for stage in self.steps:
            if stage.reads_text and keyed_by:
                msg = f"{stage.kind} reads texts, and {keyed_by} before it leaves only keys. Put it before {keyed_by}"
                raise ValueError(msg)
            if isinstance(stage, ChosenColumns) and not stage.reads_state and state_read_by:
                msg = f'columns leaves the state out, so {state_read_by} before it is in vain. Add "state" to its names'
                raise ValueError(msg)
            keyed_by = stage.kind if stage.makes_key else keyed_by
            state_read_by = stage.kind if stage.reads_state else state_read_by
        return self

    @property
    def reads_text(self) -> bool:
        """Whether any stage does."""
        return any(stage.reads_text for stage in self.steps)

    @property
    def reads_state(self) -> bool:
        """Whether any stage does; with no key stage, the key is the state."""
        return any(stage.reads_state for stage in self.steps) or not any(stage.makes_key for stage in self.steps)

    def inputs(self) -> tuple[str, ...]:
        """Of all stages."""
        return tuple(dict.fromkeys(name for stage in self.steps for name in stage.inputs()))

    def apply(self, states: States) -> States:
        """Every stage, in order."""
        for stage in self.steps:
            states = stage.apply(states)
        return states

    def pinned(self) -> Self:
        """Every stage pinned."""
        return self.model_copy(update={"steps": tuple(stage.pinned() for stage in self.steps)})


Anchors: TypeAlias = Annotated[Chain | Single, Field(discriminator="kind")]
"""An anchor definition; as JSON for example `{"kind": "exact"}` or `{"kind": "similarity", "threshold": 0.9}`."""
