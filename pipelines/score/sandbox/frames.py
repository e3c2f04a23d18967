"""How parent and worker talk: length-prefixed frames over two pipes, within limits that both sides know.

The worker answers a request in one or more replies, each with the next outcomes in order: at the latest REPORT_SECONDS
after the last reply it sends what it has before it begins another call, so that the parent knows within that time when
the running call began. Imported by the worker, so it imports almost nothing.
"""

import os
from struct import Struct

REQUEST = Struct("=QII")
"""Header of a request: sequence, number of calls, bytes of all calls. Then the length of each call, then the calls,
each its keyword arguments as JSON or MessagePack."""
LENGTH = Struct("=I")
REPLY = Struct("=QIII")
"""Header of a reply: sequence, place of its first outcome, number of outcomes, bytes that follow (MessagePack: an array
of [kind, value, error, seconds]). To its orders a worker replies twice, with place and number 0: with no bytes when it
is locked in, before any user code runs, and with JSON that says what the function is."""
WORN = 1 << 31
"""Added to the number of outcomes: a call has left something behind that only a fresh worker is without. The worker
answers no more calls, also of this request."""
REPORT_SECONDS = 0.05
RESULT_BYTES = 4 << 20
"""The most that the value of one call may take."""
FLUSH_BYTES = 1 << 18
"""A worker replies as soon as it has gathered so much."""
REPLY_BYTES = RESULT_BYTES + FLUSH_BYTES + (1 << 16)
"""No honest reply is longer; the parent reads no more."""
TEXT = 2_000
"""Characters of an error text."""


def request(sequence: int, calls: list[bytes]) -> bytes:
    """One request with so many calls."""
    lengths = [len(call) for call in calls]
    head = REQUEST.pack(sequence, len(calls), sum(lengths))
    return b"".join((head, *map(LENGTH.pack, lengths), *calls))


def read_request(handle: int) -> tuple[int, list[memoryview]]:
    """Sequence and calls of the next request; EOFError if the other side is gone."""
    sequence, count, length = REQUEST.unpack(read_exactly(handle, REQUEST.size))
    body = read_exactly(handle, count * LENGTH.size + length)
    end = count * LENGTH.size
    calls = []
    for (size,) in LENGTH.iter_unpack(body[:end]):
        calls.append(body[end : end + size])
        end += size
    return sequence, calls


def read_exactly(handle: int, length: int) -> memoryview:
    """So many bytes, and not one more; EOFError if the other side is gone."""
    buffer = memoryview(bytearray(length))
    filled = 0
    while filled < length:
        count = os.readv(handle, [buffer[filled:]])
        if not count:
            raise EOFError
        filled += count
    return buffer


def write_all(handle: int, data: bytes) -> None:
    """All of it, however often the pipe is full."""
    left = memoryview(data)
    while left:
        left = left[os.write(handle, left) :]
