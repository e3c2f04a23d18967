"""Exact tokens of calls, as deltas: which earlier call each extends, and what was added since.

Engines report the whole prompt of every call. Stored as it is, an episode grows with the square of its turns; as deltas
it stays linear, and shows where a history was cut: a prompt that extends no earlier call opens a new sequence.
"""

from collections.abc import Sequence
from typing import Any

from lake.records import TokensRecord


class Lineage:
    """The sequences of an episode so far."""

    def __init__(self) -> None:
        self._ends: list[tuple[int, list[int]]] = []
        """step index and its whole sequence, prompt and action."""

    def add(
        self,
        step_index: int,
        prompt_ids: Sequence[int],
        action_ids: Sequence[int],
        action_logprobs: Sequence[float] | None = None,
        **fields: Any,
    ) -> TokensRecord:
        """The tokens of one call; `fields` are further ones of the record."""
        prompt = list(prompt_ids)
        prefix: int | None = None
        length = 0
        # The longest match counts, of equals the newest; asked first, because a chat's last call mostly is the match.
        for index, sequence in sorted(self._ends, key=lambda end: (len(end[1]), end[0]), reverse=True):
            if len(sequence) <= len(prompt) and prompt[: len(sequence)] == sequence:
                prefix, length = index, len(sequence)
                break
        self._ends.append((step_index, [*prompt, *action_ids]))
        return TokensRecord(
            context_ids=prompt[length:],
            action_ids=list(action_ids),
            action_logprobs=None if action_logprobs is None else list(action_logprobs),
            prefix_step_index=prefix,
            **fields,
        )
