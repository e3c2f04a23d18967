"""What a writer and the committer of its machine say to each other, over a socket that only their user can open.

A writer connects for a batch, looks at what the lake holds of it, writes its files, hands the write attempt over and
waits; now and then the committer tells those who wait that it is at work. The connection is the only state: where it
ends without an answer, nobody knows what became of the attempt.
"""

import socket
import struct

import msgspec

from lake.records import Int64
from lake.storage.data_files import Staged, Told, Written
from lake.write.index import Known
from lake.write.ledger import CHILDREN, Attempt, Claim

_LENGTH = struct.Struct(">I")
LARGEST = 256 << 20
"""Bytes of a message. A batch of 4,096 episodes takes less than one megabyte."""


class Look(msgspec.Struct, frozen=True, tag="look"):
    """What is there of these? Answered by `Known`."""

    episode_ids: list[Int64]
    group_ids: list[Int64]


class Bring(msgspec.Struct, frozen=True, tag="bring"):
    """A write attempt, complete but for its commits. Answered by `Done`."""

    write_id: Int64
    claims: list[Claim]
    superseded: dict[Int64, Int64]
    files: dict[str, Told]
    """By table; those of `CHILDREN` that have rows, and `episodes`."""
    job_id: Int64 | None

    def __post_init__(self) -> None:
        """Raise ValueError, MsgspecError: files of other tables, none of `episodes`, or one that no log can name."""
        if "episodes" not in self.files or not self.files.keys() <= {*CHILDREN, "episodes"}:
            raise ValueError(f"`files` names {sorted(self.files)}; valid: episodes, with any of {', '.join(CHILDREN)}")
        for file in self.files.values():
            file.check()

    @classmethod
    def of(cls, attempt: Attempt) -> "Bring":
        """An attempt of this process."""
        files = {name: staged.written.told() for name, staged in attempt.staged.items()}
        return cls(attempt.write_id, attempt.claims, attempt.superseded, files, attempt.episodes.job_id)

    def attempt(self) -> Attempt:
        """The attempt as the committer has it: by its files, without their rows."""
        staged = {name: Staged(None, Written.of(told), self.job_id) for name, told in self.files.items()}
        return Attempt(self.write_id, self.claims, self.superseded, staged, staged.pop("episodes"))


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Whether an attempt was accepted; if not it never will be."""

    is_accepted: bool


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """What was asked for could not be done; of an attempt it is not known whether it was."""

    message: str


class Found(msgspec.Struct, frozen=True, tag="found"):
    """The answer to `Look`."""

    known: Known


class Working(msgspec.Struct, frozen=True, tag="working"):
    """No answer yet: the committer is alive, and at a round."""


Request = Look | Bring
Answer = Found | Done | Failed
requests = msgspec.msgpack.Decoder(Request)
answers = msgspec.msgpack.Decoder(Answer | Working)


def packed(message: Request | Answer | Working) -> bytes:
    """A message with its length before it."""
    data = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(data)) + data


def unpacked(buffer: bytearray) -> bytes | None:
    """Take the first message out of what came; None if it is not whole. Raises ValueError: it is no message."""
    if len(buffer) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(buffer)
    if length > LARGEST:
        msg = f"a message of {length:,} bytes"
        raise ValueError(msg)
    end = _LENGTH.size + length
    if len(buffer) < end:
        return None
    data = bytes(buffer[_LENGTH.size : end])
    del buffer[:end]
    return data


def receive(connection: socket.socket, buffer: bytearray) -> bytes | None:
    """The next message; None if the other side has gone. Raises OSError: nothing came in time.

    Args:
        buffer: what came before and was not taken; what comes with the message stays there.
    """
    while (data := unpacked(buffer)) is None:
        piece = connection.recv(1 << 20)
        if not piece:
            return None
        buffer += piece
    return data
