"""Text environments: the protocol. An environment is a small state machine that speaks text.

`reset(seed)` draws a start, the same one for the same seed in every process; `step(action)` answers an action. What a
learner must not see (which actions would be admitted, the hash of the start) travels in `Info`, beside the text. The
conversation a policy sees is one user message per observation.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class Info:
    """Facts beside the observation, for the collector and for scripted policies."""

    admissible: tuple[str, ...]
    """Actions that would have an effect now, sorted; empty once the episode is over."""
    is_well_formed: bool = True
    """The last action was a sentence of the environment's grammar."""
    is_admissible: bool = True
    """The last action had an effect. A well-formed action can be inadmissible: a locked door, a thing out of reach."""
    terminated: bool = False
    """The environment ended the episode (success or failure), as opposed to the horizon."""
    initial_world_hash: int = 0
    """Hash of the whole initial world, hidden parts included: what held-out splits are disjoint by."""


class Outcome(NamedTuple):
    """What an environment answers."""

    observation: str
    """What the policy sees; the anchor state of its next decision."""
    reward: float
    """Reward of the action that led here; 0.0 from `reset`."""
    done: bool
    """No further action is taken: the environment ended the episode or the horizon is reached."""
    info: Info


class Environment(Protocol):
    """A text environment. Instances are cheap: every rollout gets its own."""

    name: str
    """Name and variant, for `episodes.environment`."""
    split: str
    """The split its starts are drawn from, for `episodes.split`."""

    def reset(self, seed: int) -> Outcome:
        """Draw a start. Equal seeds give equal starts, in every process."""
        ...

    def step(self, action: str) -> Outcome:
        """Take an action; malformed and inadmissible ones are answered. RuntimeError if no episode is running."""
        ...
