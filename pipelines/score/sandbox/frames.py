"""Wire format of parent and worker: length-prefixed frames over two pipes, within limits that both sides know.

The worker answers a request in one or more replies, each with the next outcomes in order. When REPORT_SECONDS have
passed since the last reply, it sends its outcomes before the next call starts. So the parent knows within that time
when the running call started. The worker imports this module, so it imports almost nothing.
"""

import os
from struct import Struct

REQUEST = Struct("=QII")
"""Header of a request: sequence, number of calls, bytes of all calls. Then the length of each call, then the calls:
keyword arguments as JSON or MessagePack."""
LENGTH = Struct("=I")
REPLY = Struct("=QIII")
"""Header of a reply: sequence, index of its first outcome, number of outcomes, bytes that follow (MessagePack: an array
of [kind, value, error, seconds]). A worker replies to its orders twice, with index and number 0: without bytes when it
is locked in, before any user code runs, and with JSON that describes the function."""
WORN = 1 << 31
"""Flag in the number of outcomes: a call left something behind that requires a new worker. The worker answers no more
calls, not even the others of this request."""
REPORT_SECONDS = 0.05
RESULT_BYTES = 4 << 20
"""Maximum size of the result of one call."""
FLUSH_BYTES = 1 << 18
"""Size of gathered outcomes at which a worker replies."""
REPLY_BYTES = RESULT_BYTES + FLUSH_BYTES + (1 << 16)
"""Maximum size of an honest reply; the parent reads no more."""
TEXT = 2_000
"""Maximum characters of an error text."""


def pack_request(sequence: int, calls: list[bytes]) -> bytes:
    """Return the bytes of one request."""
    lengths = [len(call) for call in calls]
    head = REQUEST.pack(sequence, len(calls), sum(lengths))
    return b"".join((head, *map(LENGTH.pack, lengths), *calls))


def read_request(handle: int) -> tuple[int, list[memoryview]]:
    """Return sequence and calls of the next request; EOFError if the other side has closed the pipe."""
    sequence, count, length = REQUEST.unpack(read_exactly(handle, REQUEST.size))
    body = read_exactly(handle, count * LENGTH.size + length)
    end = count * LENGTH.size
    calls = []
    for (size,) in LENGTH.iter_unpack(body[:end]):
        calls.append(body[end : end + size])
        end += size
    return sequence, calls


def read_exactly(handle: int, length: int) -> memoryview:
    """Read exactly `length` bytes; EOFError if the other side has closed the pipe."""
    buffer = memoryview(bytearray(length))
    filled = 0
    while filled < length:
        count = os.readv(handle, [buffer[filled:]])
        if not count:
            raise EOFError
        filled += count
    return buffer


def write_all(handle: int, frame: bytes) -> None:
    """Write all bytes, also where the pipe is full several times."""
    unsent = memoryview(frame)
    while unsent:
        unsent = unsent[os.write(handle, unsent) :]
