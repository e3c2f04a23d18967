"""The episodes of a spool: which are open, which are finished, and where their frames stand.

Positions are kept in memory, the frames stay on the disk: an episode takes some bytes a frame until it is delivered.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from lake.live.frames import (
    DELIVERED,
    LAST,
    LOST,
    NO_KEY,
    Delivered,
    Frame,
    decode,
    encode,
    head,
)
from lake.live.segments import START, Position
from lake.live.spool import Spool

_SYNC_SECONDS = 5.0
"""How long a thread waits for a disk that may be full."""


class _Episode(msgspec.Struct):
    """Where the frames of an episode stand, by their numbers."""

    places: dict[int, Position] = {}
    is_finished: bool = False

    @property
    def first(self) -> Position:
        return min(self.places.values())


class EpisodeLog:
    """The episodes of one spool. Not thread-safe: one thread reads a log."""

    def __init__(self, spool: Spool) -> None:
        self.spool = spool
        self.lost = 0
        """Episodes that were left out because a frame of theirs could not be taken."""
        self._at = START
        self._episodes: dict[bytes, _Episode] = {}

    @property
    def finished(self) -> list[bytes]:
        """Keys of the episodes that are whole and not delivered, in the order in which they began."""
        return [key for key, episode in self._episodes.items() if episode.is_finished]

    @property
    def open(self) -> list[bytes]:
        """Keys of the episodes that are not finished."""
        return [key for key, episode in self._episodes.items() if not episode.is_finished]

    def refresh(self) -> None:
        """Read what is new on the disk. Raises OSError."""
        for position, payload in self.spool.frames(self._at):
            self._at = position
            kind, key, number = head(payload)
            if kind == DELIVERED:
                delivered = decode(payload)
                for gone in delivered.keys if isinstance(delivered, Delivered) else ():
                    self._episodes.pop(gone, None)
            elif kind == LOST:
                self.lost += self._episodes.pop(key, None) is not None
            else:
                episode = self._episodes.setdefault(key, _Episode())
                episode.places[number] = position
                episode.is_finished |= kind in LAST

    def size(self, key: bytes) -> int:
        """Bytes of an episode's frames."""
        return sum(position.length for position in self._episodes[key].places.values())

    def payloads(self, key: bytes) -> list[bytes]:
        """An episode's frames as they are in the spool, in the order of their numbers. Raises OSError."""
        return [self.spool.payload(position) for _, position in sorted(self._episodes[key].places.items())]

    def frames(self, key: bytes) -> list[Frame]:
        """An episode's frames. Raises FrameError, OSError."""
        return [decode(payload) for payload in self.payloads(key)]

    def is_begun(self, key: bytes) -> bool:
        """Whether an episode's first frame is there."""
        return 0 in self._episodes[key].places

    def missing(self, key: bytes) -> int:
        """How many frames before an episode's last one are not there: the disk damaged what held them."""
        places = self._episodes[key].places
        return max(places) + 1 - len(places)

    def append_last(self, frames: Mapping[bytes, Frame]) -> bool:
        """Give episodes their last frame; whether it is on the disk. Raises SpoolFullError."""
        for key, frame in frames.items():
            number = max(self._episodes[key].places) + 1
            self.spool.append(encode(key, number, frame), is_reserved=True)
        return self.spool.sync(_SYNC_SECONDS)

    def let_go(self, keys: Sequence[bytes]) -> None:
        """Say in the spool that nobody needs the frames of these episodes, and delete the segments that became free.

        Nobody waits until the disk has taken note: a full one must not keep what is delivered, and the lake knows
        episodes that come again. If the note is lost, what is left of episodes behind the segments that went has no
        first frame.

        Raises:
            SpoolFullError: the spool is closed.
            OSError: a segment cannot be deleted.
        """
        self.spool.append(encode(NO_KEY, 0, Delivered(keys=list(keys))), is_reserved=True)
        for key in keys:
            self._episodes.pop(key, None)
        self.trim()

    def trim(self) -> None:
        """Delete the segments before the first frame that is needed. Raises OSError."""
        read = Position(self._at.segment, self._at.offset + self._at.length, 0)
        self.spool.trim(min((episode.first for episode in self._episodes.values()), default=read))

    def carry(self) -> None:
        """Append the frames of episodes that have been open for long once more, so that a log can be trimmed.

        An episode that stays open would keep all segments since it began, of others too. Raises OSError.
        """
        held = sum(map(self.size, self._episodes))
        oldest = min((episode.first.segment for episode in self._episodes.values()), default=0)
        old = [key for key in self.open if self._episodes[key].first.segment == oldest]
        if self.spool.is_roomy or 2 * held > self.spool.size or not old:
            return
        if self.copy(old, self.spool):
            self.refresh()
            self.trim()

    def copy(self, keys: Iterable[bytes], spool: Spool) -> bool:
        """Append the frames of episodes to a spool, that of their new owner, say; whether they are on the disk.

        Raises:
            SpoolFullError: the spool is closed.
            OSError: frames cannot be read.
        """
        for key in keys:
            for payload in self.payloads(key):
                spool.append(payload, is_reserved=True)
        return spool.sync(_SYNC_SECONDS)
