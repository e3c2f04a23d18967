"""Episodes of an ingest that repeat a sibling: counted, so that who ingests hears of them."""

from typing import Any, NamedTuple

import msgspec

from lake import ids
from lake.records import EpisodeRecord, StepRecord

_ENCODE = msgspec.json.Encoder().encode


class Decisions(NamedTuple):
    """What an episode decided, as hashes that are the same in every process."""

    group: int
    rollout: int
    content: int
    """Of all decisions; that of the rollout where a state is unknown, which equals nothing."""


def decisions_of(record: EpisodeRecord) -> Decisions:
    """The decisions of an episode that has its run."""
    group = ids.key_hash("group", record.run_id, record.collection_round, record.task_id, record.seed)
    rollout = ids.key_hash("rollout", group, record.rollout_index, record.agent_id)
    decided = _decided(record.steps)
    return Decisions(group, rollout, rollout if decided is None else ids.bytes_hash(_ENCODE((group, decided))))


def _decided(steps: list[StepRecord]) -> list[Any] | None:
    """States, actions and tool calls of the active steps; None if a state is unknown."""
    found: list[Any] = []
    for step in steps:
        if not step.is_active:
            continue
        if step.state is None:
            return None
        calls = step.tool_calls or None
        made = calls and [{**call, "id": None} if isinstance(call, dict) else call for call in calls]
        found += (step.state, step.action, made)
    return found


class Copies:
    """Counts episodes that repeat a sibling, decision by decision: what a group learns from each of them is the same.

    Equal are the states, actions and tool calls (but for the ids of calls) of all active steps. An unknown state
    equals nothing. A retry of a rollout, or the same record again, is no sibling.
    """

    def __init__(self) -> None:
        self._groups: dict[int, tuple[int, int]] = {}
        self._seen: set[int] = set()

    def add(self, episode: Decisions) -> None:
        """Count one more episode."""
        if episode.rollout in self._seen:
            return
        size, repeated = self._groups.get(episode.group, (0, 0))
        self._groups[episode.group] = (size + 1, repeated + (episode.content in self._seen))
        self._seen |= {episode.rollout, episode.content}

    def in_words(self) -> str:
        """What there is to know of them, as a sentence; empty if there are none."""
        shares = [repeated / size for size, repeated in self._groups.values() if repeated]
        if not shares:
            return ""
        episodes = sum(size for size, _ in self._groups.values())
        return (
            f"{self.count} of {episodes} episodes repeat a sibling step by step, in {len(shares)} of "
            f"{len(self._groups)} groups (on average {sum(shares) / len(shares):.0%} of such a group)"
        )

    @property
    def count(self) -> int:
        """Episodes that repeat an earlier one of their group."""
        return sum(repeated for _, repeated in self._groups.values())
