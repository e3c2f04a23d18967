"""Policies: who decides, independent of any environment. Two protocols cover two ways to run a model.

`Policy` is batched, for a model in this process. It starts a session over many rollouts. Each turn, the session decides
for all rollouts that still run.

`PolicyClient` is for thousands of rollouts in flight, each at its own pace, with engines that batch internally. A
rollout opens a conversation and awaits its decisions.

With both, a policy receives only the messages since its last decision, so one with a cache reads no token twice.
Randomness is per rollout: decisions depend on the rollout's seed, not on concurrent rollouts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lake.records import TokensRecord

Message = dict[str, Any]
"""A chat message: `role`, `content`, and other fields of the format."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One running rollout's input to its policy."""

    rollout: int
    """Index of the rollout in its session."""
    messages: list[Message]
    """Messages added since the rollout's last decision."""
    is_first: bool = False
    """Whether they start the conversation."""
    admissible: tuple[str, ...] = ()
    """Actions that have an effect, for scripted policies; a model never sees them."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A policy's decision."""

    action: str
    finish_reason: str | None = None
    """stop: the policy ended its action. length: the limit cut it off."""
    tokens: TokensRecord | None = None
    """Exact tokens and behaviour log-probabilities, if the policy has any."""
    reasoning: str | None = None
    """Reasoning text, if it is separate from the action."""
    tool_calls: list[dict[str, Any]] | None = None
    """Function calls of the action, as in an OpenAI message."""
    model: str | None = None
    """Model that answered, if it differs from the policy's name."""
    policy_version: int | None = None
    """Version of the weights of the first token, if it differs from the card's."""
    is_action_valid: bool | None = None
    """False: a tool call cannot be parsed. Otherwise the environment decides."""
    prompt_tokens: int | None = None
    """Tokens of the complete prompt by the endpoint's count, if it reports no token ids."""
    completion_tokens: int | None = None
    """Tokens of the answer, likewise."""
    extra: dict[str, Any] | None = None
    """Further data, stored in `steps.extra`."""

    @property
    def message(self) -> Message:
        """The action as the assistant's message."""
        calls = {"tool_calls": self.tool_calls} if self.tool_calls else {}
        return {"role": "assistant", "content": self.action, **calls}


@dataclass(frozen=True, slots=True)
class PolicyCard:
    """Description of a policy, stored with every episode it plays."""

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
    """Rollouts that one policy plays in lock-step."""

    def act(self, turns: Sequence[Turn]) -> list[Decision]:
        """Decide for the running rollouts in the order of `turns`; a missing rollout has ended."""


class Policy(Protocol):
    """A batched policy: a script, or a model in this process."""

    @property
    def card(self) -> PolicyCard:
        """Description to store with the episodes."""

    def start(self, seeds_E: Sequence[int]) -> Session:
        """Open a session of one rollout per seed. Equal seeds give equal decisions."""


class Conversation(Protocol):
    """One rollout's side of a policy."""

    async def decide(self, messages: Sequence[Message], *, admissible: Sequence[str] = ()) -> Decision:
        """Decide, given the messages since the last decision.

        Args:
            messages: the new messages.
            admissible: actions that have an effect, for scripted policies; a model never sees them.

        Raises:
            EngineError: the engine failed after all retries.
            ContextFullError: the conversation exceeds the model's context.
        """

    def resume(self, turns: Sequence[tuple[Sequence[Message], Decision]]) -> None:
        """Continue after these turns, which another process or other weights played.

        A policy that keeps tokens continues exactly the sampled `tokens` of the decisions.
        """

    def close(self) -> None:
        """End the conversation; a batching policy stops waiting for it."""


class PolicyClient(Protocol):
    """A policy that converses with many rollouts concurrently, each at its own pace."""

    @property
    def card(self) -> PolicyCard:
        """Description to store with the episodes. Without a `version`, each decision carries it."""

    @property
    def counts(self) -> dict[str, int]:
        """Counts over all conversations, by name, for the summary of a collection."""

    def open(self, seed: int, *, key: str, tools: Sequence[dict[str, Any]] | None = None) -> Conversation:
        """Open a conversation.

        Args:
            seed: seed of its randomness. Equal seeds give equal decisions if the engine is deterministic.
            key: name of the rollout; its calls go to the same engine, whose cache holds its prefix.
            tools: schemas of the functions that the policy may call.
        """

    async def close(self) -> None:
        """Close connections."""
