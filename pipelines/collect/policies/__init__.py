"""Policies: the batched protocol, conversational and free of any environment.

A policy starts a session over many rollouts at once and is then asked, turn by turn, for the decisions of those that
still run. It gets only what was added since its last decision, so a policy with a cache never reads a token twice.
Randomness is per rollout: a rollout's decisions depend on its own seed and not on which others share the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lake.records import TokensRecord

Message = dict[str, Any]
"""A chat message: `role`, `content`, and what else the format knows."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What one running rollout shows its policy."""

    rollout: int
    """Index of the rollout in its session."""
    messages: list[Message]
    """Messages added since the rollout's last decision."""
    is_first: bool = False
    """They open the conversation."""
    admissible: tuple[str, ...] = ()
    """Actions that would have an effect: for scripted policies. A model never sees them."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What a policy decided."""

    action: str
    finish_reason: str | None = None
    """stop: the policy ended its action. length: it was cut off."""
    tokens: TokensRecord | None = None
    """Exact tokens and behaviour log-probabilities, where the policy has any."""


@dataclass(frozen=True, slots=True)
class PolicyCard:
    """Facts about a policy that are stored with every episode it plays."""

    name: str
    version: int | None = None
    """Number of weight updates so far; None for a policy without weights."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Sampling parameters."""
    tokenizer: str | None = None
    """Identity of the tokenizer: equal for equal encodings."""
    chat_template: str | None = None
    """Identity of the chat template."""


class Session(Protocol):
    """Many rollouts played side by side by one policy."""

    def act(self, turns: Sequence[Turn]) -> list[Decision]:
        """Decide for the rollouts that still run, in the order of `turns`; one that is missing has ended for good."""
        ...


class Policy(Protocol):
    """Whatever can play: a script, a model in this process, an inference server."""

    @property
    def card(self) -> PolicyCard:
        """Facts to store with the episodes."""
        ...

    def start(self, seeds_E: Sequence[int]) -> Session:
        """Open a session of one rollout per seed. Equal seeds give equal decisions."""
        ...
