"""Policies: who decides, free of any environment. There are two protocols, for two ways to run a model.

`Policy` is batched, for a model in this process: it starts a session over many rollouts at once and is then asked, turn
by turn, for the decisions of those that still run.

`Speaker` is for thousands of rollouts in flight, each at its own pace, before engines that batch by themselves: a
rollout opens a conversation and awaits its decisions.

Either way a policy gets only what was added since its last decision, so one with a cache never reads a token twice, and
randomness is per rollout: its decisions depend on its own seed and not on which others run beside it.
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
    reasoning: str | None = None
    """What it thought aloud, where that is kept apart from the action."""
    tool_calls: list[dict[str, Any]] | None = None
    """Calls of functions that the action makes, as in an OpenAI message."""
    model: str | None = None
    """The model that answered, where that is not the policy's name."""
    policy_version: int | None = None
    """Version of the weights that sampled its first token, where that is not the card's."""
    is_action_valid: bool | None = None
    """False: it holds a tool call that cannot be read. What it is worth otherwise is the environment's to say."""
    prompt_tokens: int | None = None
    """Of the whole prompt, as the endpoint counts them, where it does not tell the tokens."""
    completion_tokens: int | None = None
    """Of the answer, likewise."""
    extra: dict[str, Any] | None = None
    """What else is worth keeping: `steps.extra`."""

    @property
    def message(self) -> Message:
        """The action as the assistant's message."""
        calls = {"tool_calls": self.tool_calls} if self.tool_calls else {}
        return {"role": "assistant", "content": self.action, **calls}


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


class Conversation(Protocol):
    """One rollout's side of a policy."""

    async def decide(self, messages: Sequence[Message], *, admissible: Sequence[str] = ()) -> Decision:
        """Decide, given the messages that were added since the last decision.

        Args:
            messages: what is new.
            admissible: actions that would have an effect: for scripted policies. A model never sees them.

        Raises:
            EngineError: the engine failed, after as many tries as the policy makes.
            ContextFullError: the conversation has grown beyond what the model takes.
        """
        ...

    def resume(self, turns: Sequence[tuple[Sequence[Message], Decision]]) -> None:
        """Go on after these turns, which were taken before: by another process, or under other weights.

        `tokens` of a decision are those that were sampled then; a policy that keeps tokens continues exactly these.
        """
        ...

    def close(self) -> None:
        """The rollout has ended, however it did: nothing more is asked. Policies that batch wait for it no longer."""
        ...


class Speaker(Protocol):
    """A policy that converses with many rollouts at once, each at its own pace."""

    @property
    def card(self) -> PolicyCard:
        """Facts to store with the episodes. `version` is None where each decision says its own."""
        ...

    @property
    def counts(self) -> dict[str, int]:
        """What it noticed so far, over all conversations, by name: for the summary of a collection."""
        ...

    def open(self, seed: int, *, key: str, tools: Sequence[dict[str, Any]] | None = None) -> Conversation:
        """Begin a conversation.

        Args:
            seed: of its randomness. Equal seeds give equal decisions, where the engine is deterministic.
            key: names the rollout: calls of one go to the same engine, whose cache holds its prefix.
            tools: schemas of the functions that may be called.
        """
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...
