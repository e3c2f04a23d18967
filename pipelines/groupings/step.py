"""One step of a grouping's definition: members in, members out.

Members are rows `episode_id`, `group_id` (of this step, at first the collected one), `draw`, and the facts that the
steps of the definition ask for. A step may drop rows, change `group_id`, or repeat rows under another `draw`; it never
looks at anything but its rows.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import polars as pl
from pydantic import BaseModel, ConfigDict

FIRST_CONTEXT = "first_context"
"""Fact: hash of all that the policy saw before its first decision; NULL if the messages were not recorded."""


@dataclass(frozen=True, slots=True)
class Regrouped:
    """What a step made of its members."""

    members: pl.DataFrame
    """The rows that are left, with the columns of the input."""
    notes: dict[str, int] = field(default_factory=dict)
    """What it left out or left alone, in words, with the number of rows (each draw counted)."""


class Step(BaseModel, ABC):
    """Base of the steps: a frozen configuration with one method."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    facts: ClassVar[tuple[str, ...]] = ()
    """Columns of `episodes`, or FIRST_CONTEXT, that the step reads."""

    def needed(self) -> tuple[str, ...]:
        """The facts that this configuration reads."""
        return self.facts

    @abstractmethod
    def apply(self, members: pl.DataFrame) -> Regrouped:
        """Regroup.

        Args:
            members: episode_id, group_id, draw, and the facts.
        """


def without(members: pl.DataFrame, reasons: dict[str, pl.Expr]) -> Regrouped:
    """Members that no test marks, and how many each test left out (the first that applies counts).

    Args:
        members: rows.
        reasons: words -> a boolean expression; NULL counts as false.
    """
    left, notes = members, {}
    for words, test in reasons.items():
        kept = left.filter(~test.fill_null(value=False))
        if kept.height < left.height:
            notes[words] = left.height - kept.height
        left = kept
    return Regrouped(left, notes)
