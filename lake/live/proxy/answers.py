"""The room in memory that answers under way share: when it is full the longest of them is cut off.

What is put together of a stream takes up to twice as many bytes as came. Each answer has a limit of its own; a few that
keep it may still be more than there is memory for. The others go on, and an answer of usual length is never the longest
beside one that does not end.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class AnswerShare:
    """What one answer takes of the room."""

    def __init__(self, room: "AnswerRoom", cut_off: Callable[[], object]) -> None:
        self.room, self.cut_off = room, cut_off
        self.size = 0
        """Bytes."""
        self.is_cut = False
        """It was the longest when the room was full."""

    def take(self, size: int) -> None:
        """So many bytes more have come; some answer, this one perhaps, is cut off if they are too many."""
        if not self.is_cut:
            self.size += size
            self.room.grow(size)


class AnswerRoom:
    """The answers under way, by their sizes.

    Args:
        most: bytes of all of them.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._held = 0
        self._shares: set[AnswerShare] = set()

    @contextmanager
    def share(self, cut_off: Callable[[], object]) -> Iterator[AnswerShare]:
        """While an answer is under way; `cut_off` ends it early."""
        share = AnswerShare(self, cut_off)
        self._shares.add(share)
        try:
            yield share
        finally:
            self._leave(share)

    def grow(self, size: int) -> None:
        """So many bytes more have come."""
        self._held += size
        while self._held > self.most:
            longest = max(self._shares, key=lambda share: share.size)
            longest.is_cut = True
            self._leave(longest)
            longest.cut_off()

    def _leave(self, share: AnswerShare) -> None:
        if share in self._shares:
            self._shares.remove(share)
            self._held -= share.size
