"""Which conversation of an episode a step goes on with.

The decisions of an episode are one conversation, each with the messages since the one before, unless its agent rewrote
its history or went back: recorders and readers of traces note that in `steps.extra` (`lake.live.calls.steps`,
`lake.formats.tracing.episodes`).

    history: rewritten   the step's context is its whole prompt
    follows: 3           it goes on from step 3, where that is not the agent's last one
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Origin(NamedTuple):
    """What a step's notes say of where its prompt comes from."""

    opens: bool = False
    """A conversation of its own begins."""
    follows: int | None = None
    """Step that it goes on from, where that is not the agent's last one."""

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> "Origin":
        """Of `steps.extra`."""
        follows = extra.get("follows")
        return cls(extra.get("history") == "rewritten", follows if type(follows) is int else None)


CONTINUES = Origin()
"""It goes on from its agent's last step."""


def predecessors(steps: Iterable[tuple[int, str | None, Origin]]) -> list[int | None]:
    """The step that each goes on from; None where a conversation begins.

    Agents that take turns in one episode have a conversation each. A step that is not there is not followed.

    Args:
        steps: step_index, agent_id and origin of each, in order.
    """
    last: dict[str | None, int] = {}
    seen: set[int] = set()
    found: list[int | None] = []
    for step, agent, origin in steps:
        before = None if origin.opens else last.get(agent)
        found.append(origin.follows if origin.follows in seen else before)
        last[agent] = step
        seen.add(step)
    return found
