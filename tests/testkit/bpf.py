"""Classic BPF as seccomp runs it: what a filter answers to a system call, also on machines that are not here."""

import struct
from collections.abc import Sequence

ALLOW, KILL = 0x7FFF0000, 0x80000000
_ERRNO = 0x00050000
_LOAD, _ANSWER = 0x20, 0x06
_TESTS = {0x15: int.__eq__, 0x35: int.__ge__, 0x45: lambda accumulator, operand: accumulator & operand != 0}
"""BPF_JEQ, BPF_JGE, BPF_JSET, each with a constant."""


def refused(error: int) -> int:
    """The answer by which a call fails with an error number."""
    return _ERRNO | error


def answer(
    program: Sequence[tuple[int, int, int, int]], architecture: int, number: int, arguments: Sequence[int] = ()
) -> int:
    """What a filter returns for a call (`struct seccomp_data`; Documentation/networking/filter.rst of the kernel).

    Raises:
        ValueError: the program is not one the kernel would take: too long, an unknown instruction, a jump to nowhere.
    """
    if not 0 < len(program) <= 4096:
        msg = f"{len(program)} instructions"
        raise ValueError(msg)
    data = struct.pack("<IIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
    accumulator, at = 0, 0
    while at < len(program):
        code, if_true, if_false, operand = program[at]
        if not (0 <= if_true < 256 and 0 <= if_false < 256 and 0 <= operand < 1 << 32):
            msg = f"instruction {at} does not fit into its 8 bytes"
            raise ValueError(msg)
        at += 1
        if code == _ANSWER:
            return operand
        if code == _LOAD:
            (accumulator,) = struct.unpack_from("<I", data, operand)
        elif code in _TESTS:
            at += if_true if _TESTS[code](accumulator, operand) else if_false
        else:
            msg = f"instruction {at - 1} has the unknown code {code:#x}"
            raise ValueError(msg)
    msg = "the program ends without an answer"
    raise ValueError(msg)
