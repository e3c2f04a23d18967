"""The size of a lake in few numbers, as somebody expects it or as another lake has it."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lake.errors import UsageError

if TYPE_CHECKING:
    from lake.read.snapshot import Snapshot

ACTION_SHARE = 0.25
"""Share of a step's tokens that the policy writes, in the lakes that the fits were measured on."""
TOKEN_CHARACTERS = 4
"""Characters of text of a token, likewise; also how tokens are counted where a lake has only texts."""


@dataclass(frozen=True, slots=True)
class Workload:
    """How much is collected, and what a step is like."""

    episodes: float
    episode_steps: float
    """Decisions of an episode, on average."""
    step_tokens: float
    """Tokens that a step adds: those of its action, and those that are new in its context."""
    group_size: int = 8
    """Episodes of a group."""

    @property
    def steps(self) -> float:
        """Decisions in all."""
        return self.episodes * self.episode_steps

    def times(self, factor: float) -> "Workload":
        """The same episodes, so many times as many."""
        return replace(self, episodes=self.episodes * factor)


def workload_of(snapshot: "Snapshot") -> Workload:
    """What the episodes of a lake are like, counted over all of them; retracted ones are left out.

    Raises:
        UsageError: the lake has no steps.
    """
    episodes, steps, groups = snapshot.sql(
        "SELECT count(*) AS episodes, sum(num_steps) AS steps, count(DISTINCT group_id) AS groups FROM episodes"
    ).row(0)
    if not steps:
        raise UsageError("the lake has no steps to go by; give --steps, --episode-steps and --step-tokens instead")
    rows, tokens = snapshot.sql(
        "SELECT count(*) AS n, sum(n_context + n_action) AS tokens FROM "
        "(SELECT DISTINCT ON (episode_id, step_index) n_context, n_action FROM tokens)"
    ).row(0)
    if not rows:
        # No token rows: what `train` would make of the texts.
        rows, characters = snapshot.sql(
            "SELECT count(*) AS n, sum(coalesce(length(state), 0) + length(action)) AS characters FROM steps"
        ).row(0)
        tokens = characters / TOKEN_CHARACTERS
    return Workload(episodes, steps / episodes, tokens / rows, max(1, round(episodes / groups)))
