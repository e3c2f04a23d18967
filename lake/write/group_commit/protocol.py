"""How the writers of a machine and their committer find each other, and the messages that they exchange.

They meet at a few files in a folder that only their user can open (`MeetingPoint`). Each combination of user, lake, and
way to reach the lake (endpoint and credentials) has one committer. A process shows that it is alive by a lock on a
file (`lake.storage.locks`).

    NAME.lock    held by the committer; a writer that gets it starts the next committer, which inherits it
    NAME.alive   shared by the writers; a writer that can lock it exclusively is the only one
    NAME.seat-N  held by one writer each; a writer that finds no free seat is one of many
    NAME.sock    the committer listens here
    NAME.log     stderr of the last committer

A writer connects once per batch. It looks up the batch's episodes, writes its files, sends the write attempt and waits.
While it waits, the committer sends a `WorkingReply` from time to time. The connection is the only state: if it ends
without an answer, the outcome of the attempt is unknown.
"""

import os
import socket
import stat
import struct
import tempfile
from pathlib import Path

import msgspec

from lake import ids
from lake.records import Int64
from lake.storage.data_files import DataFileWrite, StagedRows, WriteReport
from lake.storage.locks import hold_file_lock, lock_file, try_lock_file
from lake.storage.objects import Objects
from lake.tables import FORMAT_VERSION
from lake.write.ledger import CHILDREN, Attempt, EpisodeLookup, NewEpisode

_LENGTH = struct.Struct(">I")
LARGEST = 256 << 20
"""Maximum bytes of a message. A batch of 4,096 episodes takes less than one megabyte."""


class LookupRequest(msgspec.Struct, frozen=True, tag="look"):
    """Asks which of these episodes and groups the lake holds; answered by `LookupReply`."""

    episode_ids: list[Int64]
    group_ids: list[Int64]


class AttemptRequest(msgspec.Struct, frozen=True, tag="bring"):
    """Asks for the commits of a write attempt whose files are complete; answered by `AttemptReply`."""

    write_id: Int64
    new_episodes: list[NewEpisode]
    successors: dict[Int64, Int64]
    files: dict[str, WriteReport]
    """By table; those of `CHILDREN` that have rows, and `episodes`."""
    job_id: Int64 | None

    def __post_init__(self) -> None:
        """Check the files.

        Raises:
            ValueError, msgspec.MsgspecError: a file of another table, no file of `episodes`, or an invalid file name.
        """
        if "episodes" not in self.files or not self.files.keys() <= {*CHILDREN, "episodes"}:
            raise ValueError(f"`files` names {sorted(self.files)}; valid: episodes, with any of {', '.join(CHILDREN)}")
        for file in self.files.values():
            file.check()

    @classmethod
    def from_attempt(cls, attempt: Attempt) -> "AttemptRequest":
        """Build the request for an attempt of this process."""
        files = {name: staged.written.report() for name, staged in attempt.staged.items()}
        return cls(attempt.write_id, attempt.new_episodes, attempt.successors, files, attempt.episodes.job_id)

    def to_attempt(self) -> Attempt:
        """Build the attempt as the committer needs it: the files without their rows."""
        staged = {name: StagedRows(None, DataFileWrite.of(report), self.job_id) for name, report in self.files.items()}
        return Attempt(self.write_id, self.new_episodes, self.successors, staged, staged.pop("episodes"))


class AttemptReply(msgspec.Struct, frozen=True, tag="done"):
    """Tells whether an attempt was accepted; a rejected one stays rejected."""

    is_accepted: bool


class FailureReply(msgspec.Struct, frozen=True, tag="failed"):
    """Reports that a request failed; whether an attempt was accepted is then unknown."""

    message: str


class LookupReply(msgspec.Struct, frozen=True, tag="found"):
    """The answer to a `LookupRequest`."""

    lookup: EpisodeLookup


class WorkingReply(msgspec.Struct, frozen=True, tag="working"):
    """Tells a waiting writer that the committer is alive and busy."""


Request = LookupRequest | AttemptRequest
Reply = LookupReply | AttemptReply | FailureReply
REQUEST_DECODER = msgspec.msgpack.Decoder(Request)
REPLY_DECODER = msgspec.msgpack.Decoder(Reply | WorkingReply)


def pack(message: Request | Reply | WorkingReply) -> bytes:
    """Encode a message with its length in front."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


def unpack(buffer: bytearray) -> bytes | None:
    """Remove the first message from a buffer and return it; None if it is incomplete. Raises ValueError: too long."""
    if len(buffer) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(buffer)
    if length > LARGEST:
        msg = f"a message of {length:,} bytes"
        raise ValueError(msg)
    end = _LENGTH.size + length
    if len(buffer) < end:
        return None
    message = bytes(buffer[_LENGTH.size : end])
    del buffer[:end]
    return message


def receive(connection: socket.socket, buffer: bytearray) -> bytes | None:
    """Return the next message; None if the peer closed the connection. Raises OSError: nothing came in time.

    Args:
        buffer: bytes received earlier; bytes after the message stay in it.
    """
    while (message := unpack(buffer)) is None:
        piece = connection.recv(1 << 20)
        if not piece:
            return None
        buffer += piece
    return message


SEATS = 4
"""Up to this many writers start a committer only after a lost race."""
_LONGEST_SOCKET = 104
"""Bytes of a socket path that every system accepts."""


class MeetingPoint:
    """The files at which the writers of one lake and their committer meet. Raises OSError: no usable folder."""

    def __init__(self, objects: Objects) -> None:
        ways = objects.reached_by if objects.folder is None else []
        # Another installation may have another version, which reads neither this lake nor these messages.
        installation = (str(Path(__file__).parent), FORMAT_VERSION)
        key = ids.key_hash("committer", objects.root, *installation, *(text for pair in sorted(ways) for text in pair))
        self._base = make_runtime_folder() / ids.to_text(key)
        self.socket = f"{self._base}.sock"
        self.log = f"{self._base}.log"
        if len(os.fsencode(self.socket)) > _LONGEST_SOCKET:
            raise OSError(f"{self.socket} is too long for a socket; set XDG_RUNTIME_DIR to a shorter folder")

    def lock_committer(self) -> int | None:
        """Return the committer's lock as an open file; None if a committer runs or is starting."""
        return try_lock_file(f"{self._base}.lock")

    def register_writer(self) -> int:
        """Return a shared lock, as an open file, that shows that this writer is alive."""
        return lock_file(f"{self._base}.alive", is_shared=True)

    def take_seat(self) -> int | None:
        """Return a seat's lock as an open file; None if all seats are taken."""
        seats = (try_lock_file(f"{self._base}.seat-{n}") for n in range(SEATS))
        return next((file for file in seats if file is not None), None)

    def has_no_writer(self) -> bool:
        """Return whether no writer is alive."""
        with hold_file_lock(f"{self._base}.alive", wait=False) as lock:
            return lock is not None


def make_runtime_folder() -> Path:
    """Return a folder of this user alone, in XDG_RUNTIME_DIR or else the temporary folder. Raises OSError."""
    runtime_dir = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime_dir, "trajlake") if runtime_dir else Path(tempfile.gettempdir(), f"trajlake-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        msg = f"{folder} cannot be made ({error.strerror}); set XDG_RUNTIME_DIR to a folder of your own"
        raise OSError(msg) from error
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(f"{folder} is open to others, or not a folder of this user")
    return folder
