"""Episodes of an ingest that repeat a sibling: counted, so that who ingests hears of them."""

from typing import Any

import msgspec

from lake.records import EpisodeRecord, StepRecord


class Copies:
    """Counts episodes that repeat a sibling, decision by decision: what a group learns from each of them is the same.

    Equal are the states, actions and tool calls (but for the ids of calls) of all active steps. An unknown state
    equals nothing. A retry of a rollout, or the same record again, is no sibling.
    """

    def __init__(self) -> None:
        self._encode = msgspec.json.Encoder().encode
        self._groups: dict[int, tuple[int, int]] = {}
        self._seen: set[int] = set()

    def add(self, record: EpisodeRecord) -> None:
        """Count one more episode."""
        group = hash((record.run_id, record.collection_round, record.task_id, record.seed))
        rollout = hash(("rollout", group, record.rollout_index, record.agent_id))
        if rollout in self._seen:
            return
        decisions = self._decisions(record.steps)
        content = rollout if decisions is None else hash(("content", group, *decisions))
        size, repeated = self._groups.get(group, (0, 0))
        self._groups[group] = (size + 1, repeated + (content in self._seen))
        self._seen |= {rollout, content}

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

    def _decisions(self, steps: list[StepRecord]) -> list[str | bytes] | None:
        """States, actions and tool calls of the active steps; None if a state is unknown."""
        texts: list[str | bytes] = []
        calls: list[Any] = []
        for step in steps:
            if not step.is_active:
                continue
            if step.state is None:
                return None
            texts += (step.state, step.action)
            if step.tool_calls:
                made = [{**call, "id": None} if isinstance(call, dict) else call for call in step.tool_calls]
                calls.append((len(texts), made))
        return [*texts, self._encode(calls)]
