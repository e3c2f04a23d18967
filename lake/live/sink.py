"""What episodes are recorded into: the spool, and what is done when something is wrong.

Nothing here raises into an agent. What goes wrong is counted, and told in the log once, with what to do.
"""

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

from lake.errors import UsageError
from lake.formats.base.secrets import redacted
from lake.live.frames import Frame, Lost, encode
from lake.live.spool import Spool, SpoolFullError
from lake.records import as_str

if TYPE_CHECKING:
    from lake.live.episode import Episode

_F = TypeVar("_F", bound=Callable[..., Any])
SYNC_SECONDS = 1.0
"""How long the end of an episode waits for the disk."""
CLOSED = "Close a recorder when its agents are done, or make another one"
"""What to do about episodes that come too late."""
_TOLD_AT_MOST = 100
_ERROR_LENGTH = 4000
"""Characters of an exception that are kept."""
_log = logging.getLogger("trajlake")


class Counts(msgspec.Struct):
    """What a recorder was given."""

    begun: int = 0
    finished: int = 0
    lost: int = 0
    """Episodes that are left out because there was no room for a frame of theirs."""
    undecided: int = 0
    """Steps that were left without an action and without tool calls: they are not recorded."""
    troubles: int = 0
    """Calls that could not be taken as they were meant; the log says what to do."""


class Sink:
    """The spool of one process, and its counts. Thread-safe.

    Args:
        wait: seconds that a frame waits for room in a full spool.
        is_durable: whether the end of an episode waits until it is on the disk.
    """

    def __init__(self, spool: Spool, *, wait: float, is_durable: bool) -> None:
        self.spool = spool
        self.counts = Counts()
        self.is_left = False
        """This process was forked from the one that the spool belongs to."""
        self.is_closed = False
        """Its recorder is closed."""
        self.open: dict[bytes, Episode] = {}
        """Episodes that have not ended, by their keys."""
        self.on_finished: Callable[[], None] = lambda: None
        self.wait, self._is_durable = wait, is_durable
        self._lock = threading.RLock()  # a signal's handler may record in the middle of a record
        self._told: set[str] = set()

    @property
    def must_wait(self) -> bool:
        """Whether the next frame may have to wait for room: not to be done in an event loop."""
        return self.spool.is_busy or (self.wait > 0 and not self.spool.is_roomy)

    def count(self, name: str) -> None:
        """Count something; see `Counts`."""
        with self._lock:
            setattr(self.counts, name, getattr(self.counts, name) + 1)

    def take(self, key: bytes, number: int | Iterator[int], frame: Frame) -> bool:
        """Append a frame; False if there is no room and its episode is lost. Raises FrameError."""
        payload = encode(key, number, frame)
        if self.is_left:
            self.trouble(
                "an episode that was begun before a fork goes on in the child; begin it in the process it is of"
            )
            return True
        try:
            self.spool.append(payload, wait=self.wait)
        except SpoolFullError as error:
            self.count("lost")
            room = 'Give a larger `max_bytes`, or on_full="block"'
            self.tell(f"an episode is left out: {error}. {CLOSED if self.is_closed else room}")
            # A spool that is closed takes nothing: whoever adopts it sees that the episode was not finished.
            with contextlib.suppress(SpoolFullError):
                self.spool.append(encode(key, number, Lost(reason="full")), is_reserved=True)
            return False
        return True

    def sync(self) -> None:
        """Wait until what was taken is on the disk, if that is wanted and the disk takes it."""
        if self._is_durable and not self.is_left:
            self.spool.sync(SYNC_SECONDS, unless_refused=True)

    def trouble(self, message: str) -> None:
        """Count something that could not be taken as it was meant, and tell it once."""
        self.count("troubles")
        self.tell(message)

    def tell(self, message: str) -> None:
        """Say something in the log, once."""
        with self._lock:
            is_new = message not in self._told and len(self._told) < _TOLD_AT_MOST
            self._told.add(message)
        if is_new:
            _log.warning("%s", message)


def guarded(otherwise: Any = None) -> Callable[[_F], _F]:
    """Make a method of whatever has a `_sink` one that never raises into the agent: faults are counted and told.

    Args:
        otherwise: what it returns then.
    """

    def decorate(method: _F) -> _F:
        owner, _, own = method.__qualname__.rpartition(".")
        name = owner if own.startswith("_") else method.__qualname__

        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                self._sink.trouble(f"{name}: {error if isinstance(error, UsageError) else told(error)}")
                return otherwise

        return cast("_F", call)

    return decorate


def told(error: BaseException) -> str:
    """An exception as the text of a table or a log, without secrets."""
    text = as_str(error)[: 4 * _ERROR_LENGTH]
    return redacted(f"{type(error).__name__}: {text}")[:_ERROR_LENGTH]
