"""Filters: states that are nobody's anchor, whatever they say. They lose their key, and A_S is exactly 0 there."""

from typing import Literal, Self

import polars as pl
from pydantic import Field, model_validator

from pipelines.credit.anchors.definition import Definition
from pipelines.credit.anchors.states import States
from pipelines.credit.anchors.substitutions import check_pattern


class ToolResults(Definition):
    """Only what a tool answered is a state: messages of users differ in wording, answers of tools do not."""

    kind: Literal["tool_results"] = "tool_results"
    """Name of the definition."""
    roles: tuple[str, ...] = Field(default=("tool",), min_length=1)
    """Values of `state_role` that count. A NULL role does not."""

    def inputs(self) -> tuple[str, ...]:
        """The role."""
        return ("state_role",)

    def apply(self, states: States) -> States:
        """Other roles lose their key."""
        return states.kept(states.batch.frame["state_role"].is_in(self.roles))


class NoErrors(Definition):
    """Error texts are not states: "You can't see any such thing." is said in many places.

    Without a pattern, the mark `state_is_error` decides; a NULL mark is no error.
    """

    kind: Literal["no_errors"] = "no_errors"
    """Name of the definition."""
    pattern: str | None = Field(default=None, min_length=1)
    """Regular expression (syntax as for substitutions); texts with a match are errors. None: the stored mark."""

    @model_validator(mode="after")
    def _compiles(self) -> Self:
        if self.pattern is not None:
            check_pattern(self.pattern)
        return self

    @property
    def reads_text(self) -> bool:
        """Texts are searched, if a pattern is given."""
        return self.pattern is not None

    def inputs(self) -> tuple[str, ...]:
        """The mark, if no pattern is given."""
        return () if self.reads_text else ("state_is_error",)

    def apply(self, states: States) -> States:
        """Errors lose their key."""
        if self.pattern is None:
            is_error_N = states.batch.frame["state_is_error"].cast(pl.Boolean).fill_null(value=False)
            return states.kept(~is_error_N)
        pattern = self.pattern
        return states.rewritten(
            lambda texts_V: pl.select(pl.when(~texts_V.str.contains(pattern)).then(texts_V)).to_series()
        )
