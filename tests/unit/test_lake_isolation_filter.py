"""The seccomp filter of both machines, interpreted: what it answers to each call, no matter where the tests run.

The numbers are held against the kernel's headers; the interpreter itself against the kernel, on the machine that is
here, in tests/integration/test_lake_isolation.py.
"""

import re
from pathlib import Path

import pytest

from lake.locked import isolation
from lake.locked.isolation import build_filter
from testkit.bpf import ALLOW, KILL, answer, refused

MACHINES = ("x86_64", "aarch64")
X86_64, I386, ARM, AARCH64 = 0xC000003E, 0x40000003, 0x40000028, 0xC00000B7
ARCHITECTURE = {"x86_64": X86_64, "aarch64": AARCH64}
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
"""x86_64 numbers its calls alone; aarch64 has the numbers that all newer machines share."""
NEEDED = {
    "read": (0, 63),
    "write": (1, 64),
    "openat": (257, 56),
    "close": (3, 57),
    "mmap": (9, 222),
    "munmap": (11, 215),
    "mprotect": (10, 226),
    "brk": (12, 214),
    "futex": (202, 98),
    "exit_group": (231, 94),
    "clock_gettime": (228, 113),
    "getrandom": (318, 278),
    "rt_sigaction": (13, 134),
    "sched_yield": (24, 124),
    "getpid": (39, 172),
}
"""What every process does: x86_64 and aarch64."""
EPERM, ENOSYS = refused(1), refused(38)
PID = 4711


def says(machine: str, number: int, *arguments: int) -> int:
    return answer(build_filter(machine, PID), ARCHITECTURE[machine], number, arguments)


def header_of(machine: str) -> dict[str, int]:
    header = HEADERS[machine]
    if not header.exists():
        pytest.skip(f"{header} is not installed (Debian: linux-libc-dev)")
    definitions = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text())
    return {name: int(number) for name, number in definitions if name not in {"syscalls", "arch_specific_syscall"}}


@pytest.mark.parametrize("machine", MACHINES)
def test_the_numbers_of_system_calls_are_those_of_the_kernel_headers(machine: str) -> None:
    header_numbers = header_of(machine)
    ours = isolation._SYSCALLS[machine] | isolation._SPECIAL[machine]
    assert len(set(ours.values())) == len(ours)
    newest = max(header_numbers.values())
    for name, number in ours.items():
        # A name that an old header does not know must be newer than it, else it is a slip of the pen.
        assert header_numbers.get(name, number if number > newest else None) == number, name
    assert len(ours.keys() & header_numbers.keys()) > 80


@pytest.mark.parametrize("machine_index", [0, 1])
def test_the_numbers_of_what_is_needed_are_too(machine_index: int) -> None:
    header_numbers = header_of(MACHINES[machine_index])
    assert {name: header_numbers[name] for name in NEEDED} == {
        name: numbers[machine_index] for name, numbers in NEEDED.items()
    }


def test_the_machines_refuse_the_same_calls_as_far_as_they_have_them() -> None:
    x86_64, aarch64 = (isolation._SYSCALLS[machine] for machine in MACHINES)
    assert aarch64.keys() <= x86_64.keys()
    # Calls of x86_64 that newer machines never got, or under their newer names only (chmod -> fchmodat).
    assert x86_64.keys() - aarch64.keys() == {
        "chmod", "chown", "fork", "futimesat", "inotify_init", "ioperm", "iopl", "lchown", "mknod", "utime", "utimes",
        "vfork",
    }  # fmt: skip
    newer = {name for name, number in aarch64.items() if number >= 424}
    assert {name: x86_64[name] for name in newer} == {name: aarch64[name] for name in newer}


@pytest.mark.parametrize("machine", MACHINES)
def test_every_listed_call_fails_and_every_other_passes(machine: str) -> None:
    listed = set(isolation._SYSCALLS[machine].values())
    special = isolation._SPECIAL[machine]
    program = build_filter(machine, PID)
    for number in set(range(600)) - set(special.values()):
        assert answer(program, ARCHITECTURE[machine], number) == (EPERM if number in listed else ALLOW), number
    assert len(listed) > 80


@pytest.mark.parametrize("machine_index", [0, 1])
@pytest.mark.parametrize("name", NEEDED)
def test_what_every_process_does_passes(machine_index: int, name: str) -> None:
    assert says(MACHINES[machine_index], NEEDED[name][machine_index]) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("architecture", [X86_64, I386, ARM, AARCH64, 0, 0xFFFFFFFF])
def test_the_door_of_another_architecture_kills(machine: str, architecture: int) -> None:
    program = build_filter(machine, PID)
    foreign = architecture != ARCHITECTURE[machine]
    for number in (0, 63, 221, 59, 0x40000000, 0xFFFFFFFF):
        assert (answer(program, architecture, number) == KILL) == foreign


def test_the_x32_numbers_are_refused() -> None:
    for number in (0x40000000, 0x40000000 | 59, 0x7FFFFFFF, 0xFFFFFFFF):
        assert says("x86_64", number) == EPERM
    assert says("x86_64", 0x3FFFFFFF) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
def test_threads_are_made_and_processes_are_not(machine: str) -> None:
    special = isolation._SPECIAL[machine]
    assert says(machine, special["clone3"]) == ENOSYS, "glibc then takes clone"
    assert says(machine, special["clone"], 0x3D0F00) == ALLOW, "what pthread_create asks for"
    for flags in (0, 17, 0x4111, 0x100, 0x10000 << 32):
        assert says(machine, special["clone"], flags) == EPERM, hex(flags)


@pytest.mark.parametrize("machine", MACHINES)
def test_signals_go_to_own_threads_only(machine: str) -> None:
    number = isolation._SPECIAL[machine]["tgkill"]
    assert says(machine, number, PID, 99, 6) == ALLOW
    for argument in (0, 1, PID + 1, 99):
        assert says(machine, number, argument, PID, 6) == EPERM


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("name", "refused_commands", "passing_commands"),
    [
        ("fcntl", [8, 10, 15], [0, 1, 3, 4, 7, 9, 11, 14, 16, 1030]),
        ("ioctl", [0x40086602, 0x401C5820], [0, 0x5401, 0x541B, 0x80086601, 0x801C581F]),
    ],
)
def test_a_command_is_refused_by_its_number(
    machine: str, name: str, refused_commands: list[int], passing_commands: list[int]
) -> None:
    number = isolation._SPECIAL[machine][name]
    for command in refused_commands:
        assert says(machine, number, 5, command, 1) == EPERM, command
        # The kernel takes the lower half of the argument, so the upper one is no way around.
        assert says(machine, number, 5, command | 1 << 32, 1) == EPERM, command
    for command in passing_commands:
        assert says(machine, number, 8, command, 8) == ALLOW, command


@pytest.mark.parametrize("machine", MACHINES)
def test_a_process_names_its_threads_and_undoes_no_wall(machine: str) -> None:
    """Options of prctl by linux/prctl.h: those that are not known to be harmless fail, also those yet to come."""
    number = isolation._SPECIAL[machine]["prctl"]
    harmless = {
        "PR_SET_NAME": 15,
        "PR_GET_NAME": 16,
        "PR_SET_VMA": 0x53564D41,
        "PR_GET_SECCOMP": 21,
        "PR_GET_DUMPABLE": 3,
    }
    walls = {"PR_SET_PDEATHSIG": 1, "PR_SET_DUMPABLE": 4, "PR_SET_KEEPCAPS": 8, "PR_SET_SECCOMP": 22, "PR_SET_MM": 35}
    walls |= {"PR_SET_CHILD_SUBREAPER": 36, "PR_CAP_AMBIENT": 47, "PR_SET_PTRACER": 0x59616D61, "PR_SET_SECUREBITS": 28}
    assert {name: says(machine, number, option) for name, option in harmless.items()} == dict.fromkeys(harmless, ALLOW)
    assert {name: says(machine, number, option, 0) for name, option in walls.items()} == dict.fromkeys(walls, EPERM)
    # The kernel takes the lower half of the option.
    assert says(machine, number, 1 | 1 << 32, 0) == EPERM
    assert sum(says(machine, number, option) == ALLOW for option in range(1000)) == 16


@pytest.mark.parametrize("machine", MACHINES)
def test_limits_are_read_and_not_set(machine: str) -> None:
    number = isolation._SPECIAL[machine]["prlimit64"]
    assert says(machine, number, 0, 7, 0, 0x7FFF0000) == ALLOW
    for address in (1, 0x7F0000000000, 1 << 32, 0xFFFFFFFF):
        assert says(machine, number, 0, 7, address, 0) == EPERM


def test_the_interpreter_takes_no_program_that_the_kernel_would_not() -> None:
    for program, words in (
        ([], "0 instructions"),
        ([(0x06, 0, 0, 0)] * 4097, "4097 instructions"),
        ([(0x99, 0, 0, 0)], "unknown code 0x99"),
        ([(0x20, 0, 0, 0)], "ends without an answer"),
        ([(0x15, 5, 5, 0), (0x06, 0, 0, 0)], "ends without an answer"),
        ([(0x15, 256, 0, 0)], "does not fit"),
    ):
        with pytest.raises(ValueError, match=words):
            answer(program, X86_64, 0)
