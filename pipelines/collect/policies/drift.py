"""Drift: where the tokens that an engine saw are not those that the chat template would give for the same conversation.

A conversation goes on from the tokens that were sampled, which is what a policy is trained on. Whoever renders the
stored messages anew may get others. There are three ways:

* `retokenised`: the text is the same, and the tokenizer splits it otherwise than the model did. The sampled tokens
  stay.
* `unrendered`: the template leaves out text that the engine saw (reasoning of earlier turns, white space).
* `rewritten`: the template writes earlier turns otherwise.

In the last two cases the engine is shown what the template writes, as a sequence of its own.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["retokenised", "unrendered", "rewritten"]
KINDS: tuple[Kind, ...] = ("retokenised", "unrendered", "rewritten")


@dataclass(frozen=True, slots=True)
class Drift:
    """One difference."""

    kind: Kind
    first: int
    """Index of the first token that differs, in the sequence that the engine saw."""
    tokens: int
    """How many of the engine's tokens stand between the first and the last difference; 0: the template only adds. All
    from the first one on, where the template does not let new messages be told from those before them."""


@dataclass(slots=True)
class DriftCounts:
    """How much drift there was, over all conversations."""

    decisions: int = 0
    drifted: int = 0
    """Decisions with any."""
    found: Counter[Kind] = field(default_factory=Counter)
    """Decisions by kind."""
    tokens: Counter[Kind] = field(default_factory=Counter)
    """Tokens that differ, by kind."""

    def add(self, drifts: Sequence[Drift]) -> None:
        """Count a decision."""
        self.decisions += 1
        self.drifted += bool(drifts)
        for drift in drifts:
            self.found[drift.kind] += 1
            self.tokens[drift.kind] += drift.tokens

    def record(self) -> dict[str, int]:
        """The counts by name; kinds that were not found are 0."""
        counts = {"decisions": self.decisions, "drifted": self.drifted}
        for kind in KINDS:
            counts |= {kind: self.found[kind], f"{kind}_tokens": self.tokens[kind]}
        return counts


def record_of(drifts: Sequence[Drift]) -> dict[str, Any]:
    """The differences of one decision, by kind: what is stored as `steps.extra.drift`."""
    return {drift.kind: {"first": drift.first, "tokens": drift.tokens} for drift in drifts}


def between(kind: Kind, seen: Sequence[int], rendered: Sequence[int], *, offset: int = 0) -> Drift | None:
    """The difference between what the engine saw and what would be rendered; None if they are equal.

    Args:
        kind: of the difference.
        seen: token ids.
        rendered: token ids.
        offset: index of the first of them in the engine's sequence.
    """
    if list(seen) == list(rendered):
        return None
    shorter = min(len(seen), len(rendered))
    first = next((at for at in range(shorter) if seen[at] != rendered[at]), shorter)
    last = next((at for at in range(shorter - first) if seen[-1 - at] != rendered[-1 - at]), shorter - first)
    return Drift(kind, offset + first, len(seen) - first - last)


def is_left_out(seen: str, rendered: str) -> bool:
    """Whether what is rendered is what was seen with something left out: nothing in it is new."""
    characters = iter(seen)
    return all(character in characters for character in rendered)
