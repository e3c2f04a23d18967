"""Lock a process in: it reads what it is given, writes nothing, reaches nobody, and cannot undo it.

Layers, each of which alone leaves holes (measured with 15 attacks): resource limits, dropped capabilities,
no_new_privs, Landlock (files and TCP) and a seccomp filter (sockets, programs, processes, and what Landlock does not
mediate, such as chmod). They need no root, no user namespaces and no package: plain system calls of Linux on x86_64
and aarch64. Elsewhere `missing()` names what is not there, and callers refuse unless told otherwise.

Landlock and seccomp bind the calling thread and its later children only, and numpy, pyarrow and polars start threads
on import. So a locked process starts with this file as its program (`command`), which imports nothing but the standard
library, locks itself in, and only then runs the module it was started for.
"""

import ctypes
import json
import os
import platform
import runpy
import select
import struct
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

LAYERS = ("rlimits", "capabilities", "no_new_privs", "landlock", "seccomp")
"""All layers; a process that has them all is isolated at level `strong`."""
EXIT_NOT_LOCKED = 97
"""Exit status of a child that could not be locked in as asked; it has done nothing then."""

# Calls that fail in a locked process: new ways out (sockets, programs, processes, kernel facilities), changes to files
# that Landlock does not mediate (modes, owners, times, attributes), and to other processes of the same user (their
# priority, processors and shared memory). Timers of POSIX can be neither listed nor reset by who did not make them.
_X86_64 = """
accept4=288 accept=43 acct=163 add_key=248 adjtimex=159 bind=49 bpf=321 capset=126 chmod=90 chown=92 chroot=161
clock_adjtime=305 clock_settime=227 connect=42 delete_module=176 execve=59 execveat=322 fanotify_init=300 fchmod=91
fchmodat2=452 fchmodat=268 fchown=93 fchownat=260 file_setattr=469 finit_module=313 fork=57 fremovexattr=199
fsconfig=431 fsetxattr=190 fsmount=432 fsopen=430 fspick=433 futimesat=261 init_module=175 inotify_init1=294
inotify_init=253 io_setup=206 io_submit=209 io_uring_enter=426 io_uring_register=427 io_uring_setup=425 ioperm=173
iopl=172 ioprio_set=251 kexec_file_load=320 kexec_load=246 keyctl=250 kill=62 lchown=94 listen=50 lremovexattr=198
lsetxattr=189 memfd_create=319 memfd_secret=447 migrate_pages=256 mknod=133 mknodat=259 mount=165 mount_setattr=442
move_mount=429 move_pages=279 mq_open=240 mq_unlink=241 msgctl=71 msgget=68 msgrcv=70 msgsnd=69 name_to_handle_at=303
open_by_handle_at=304 open_tree=428 open_tree_attr=467 perf_event_open=298 personality=135 pidfd_getfd=438
pidfd_open=434 pidfd_send_signal=424 pivot_root=155 process_madvise=440 process_mrelease=448 process_vm_readv=310
process_vm_writev=311 ptrace=101 quotactl=179 quotactl_fd=443 reboot=169 removexattr=197 removexattrat=466
request_key=249 rt_sigqueueinfo=129 rt_tgsigqueueinfo=297 sched_setaffinity=203 sched_setattr=314 sched_setparam=142
sched_setscheduler=144 semctl=66 semget=64 semop=65 semtimedop=220 setdomainname=171 setfsgid=123 setfsuid=122
setgid=106 setgroups=116 sethostname=170 setns=308 setpriority=141 setregid=114 setresgid=119 setresuid=117 setreuid=113
setrlimit=160 settimeofday=164 setuid=105 setxattr=188 setxattrat=463 shmat=30 shmctl=31 shmget=29 socket=41
socketpair=53 swapoff=168 swapon=167 syslog=103 timer_create=222 tkill=200 truncate=76 umount2=166
unshare=272 userfaultfd=323 utime=132
utimensat=280 utimes=235 vfork=58
"""
_AARCH64 = """
accept4=242 accept=202 acct=89 add_key=217 adjtimex=171 bind=200 bpf=280 capset=91 chroot=51 clock_adjtime=266
clock_settime=112 connect=203 delete_module=106 execve=221 execveat=281 fanotify_init=262 fchmod=52 fchmodat2=452
fchmodat=53 fchown=55 fchownat=54 file_setattr=469 finit_module=273 fremovexattr=16 fsconfig=431 fsetxattr=7 fsmount=432
fsopen=430 fspick=433 init_module=105 inotify_init1=26 io_setup=0 io_submit=2 io_uring_enter=426 io_uring_register=427
io_uring_setup=425 ioprio_set=30 kexec_file_load=294 kexec_load=104 keyctl=219 kill=129 listen=201 lremovexattr=15
lsetxattr=6 memfd_create=279 memfd_secret=447 migrate_pages=238 mknodat=33 mount=40 mount_setattr=442 move_mount=429
move_pages=239 mq_open=180 mq_unlink=181 msgctl=187 msgget=186 msgrcv=188 msgsnd=189 name_to_handle_at=264
open_by_handle_at=265 open_tree=428 open_tree_attr=467 perf_event_open=241 personality=92 pidfd_getfd=438 pidfd_open=434
pidfd_send_signal=424 pivot_root=41 process_madvise=440 process_mrelease=448 process_vm_readv=270 process_vm_writev=271
ptrace=117 quotactl=60 quotactl_fd=443 reboot=142 removexattr=14 removexattrat=466 request_key=218 rt_sigqueueinfo=138
rt_tgsigqueueinfo=240 sched_setaffinity=122 sched_setattr=274 sched_setparam=118 sched_setscheduler=119 semctl=191
semget=190 semop=193 semtimedop=192 setdomainname=162 setfsgid=152 setfsuid=151 setgid=144 setgroups=159 sethostname=161
setns=268 setpriority=140 setregid=143 setresgid=149 setresuid=147 setreuid=145 setrlimit=164 settimeofday=170
setuid=146 setxattr=5 setxattrat=463 shmat=196 shmctl=195 shmget=194 socket=198 socketpair=199 swapoff=225 swapon=224
syslog=116 timer_create=107 tkill=130 truncate=45 umount2=39 unshare=97 userfaultfd=282 utimensat=88
"""


def _numbers(text: str) -> dict[str, int]:
    return {name: int(number) for name, _, number in (word.partition("=") for word in text.split())}


_SYSCALLS = {"x86_64": _numbers(_X86_64), "aarch64": _numbers(_AARCH64)}
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_SPECIAL = {
    "x86_64": {"clone": 56, "clone3": 435, "fcntl": 72, "ioctl": 16, "prctl": 157, "prlimit64": 302, "tgkill": 234},
    "aarch64": {"clone": 220, "clone3": 435, "fcntl": 25, "ioctl": 29, "prctl": 167, "prlimit64": 261, "tgkill": 131},
}

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 22, 24, 38
_HARMLESS_PRCTL = (2, 3, 15, 16, 21, 23, 30, 38, 39, 40, 41, 42, 51, 56, 64, 66, 0x53564D41)
"""What a locked process may ask of prctl: to read its own settings, to name threads and memory, to have no huge pages.
All else is refused: by PR_SET_PDEATHSIG it would outlive its parent, by others be traced, keep privileges, adopt."""
_SYS_LANDLOCK = {"create_ruleset": 444, "add_rule": 445, "restrict_self": 446}
_LAST_CAPABILITY = 63
_CAP_DAC_READ_SEARCH = 2
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_FS_RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}
"""Landlock ABI -> how many file-system rights it knows: all of them are taken away, then some given back."""
_CLONE_THREAD = 0x10000
_EPERM, _ENOSYS = 1, 38
_OWNER_COMMANDS = (8, 10, 15)
"""F_SETOWN, F_SETSIG, F_SETOWN_EX of fcntl: they make a pipe send any signal to any process of the same user."""
_FLAG_COMMANDS = (0x40086602, 0x401C5820)
"""FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR of ioctl: they change a file's flags, for which it need only be open to read."""


class NotLockedError(RuntimeError):
    """A layer that was asked for is not there."""


@dataclass(frozen=True)
class Policy:
    """What a locked process may still do; None is no limit.

    Attributes:
        read: files, and folders with everything below them, that it may read.
        listed: folders whose names it may list, with all below them, without reading the files.
        memory_bytes: address space.
        cpu_seconds: of all its threads, over its life. It is told by SIGXCPU, and killed a second later.
        tasks: processes and threads that its user may have in all (root is exempt).
        layers: what must hold; a child that cannot have one of them exits.
    """

    read: tuple[str, ...] = ()
    listed: tuple[str, ...] = ()
    memory_bytes: int | None = None
    cpu_seconds: int | None = None
    open_files: int = 1024
    tasks: int | None = None
    layers: tuple[str, ...] = LAYERS


def missing() -> dict[str, str]:
    """Layers that cannot be had here -> why; empty where isolation can be strong."""
    if not sys.platform.startswith("linux"):
        return dict.fromkeys(LAYERS[1:], f"it is a feature of Linux, this is {platform.system()}")
    found = {}
    if (abi := _landlock_abi()) < 3:
        why = "it is off or the kernel is older than 5.13" if abi < 1 else "the kernel is older than 6.2"
        found["landlock"] = f"{why} (ABI {max(abi, 0)}, 3 needed)"
    if platform.machine() not in _SYSCALLS:
        found["seccomp"] = f"the filter is written for {' and '.join(_SYSCALLS)}, this is {platform.machine()}"
    return found


def level(layers: Iterable[str]) -> str:
    """Name of an isolation level: strong (all layers), basic (limits and seccomp), none."""
    held = set(layers)
    if held.issuperset(LAYERS):
        return "strong"
    return "basic" if {"rlimits", "seccomp"} <= held else "none"


def runtime_folders() -> tuple[str, ...]:
    """What a Python process reads to run at all: the standard library, installed packages, shared libraries.

    And how many processors and how much memory it may use: DuckDB 2.0 aborts if it may not know.
    """
    paths = sysconfig.get_paths()
    found = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    # An environment may find the packages of another one, too: --system-site-packages, a .pth file.
    found += [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    found += [f"{sys.base_prefix}/lib", "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache"]
    # Once per place: /lib is often a link to /usr/lib.
    kept = dict.fromkeys(os.path.realpath(path) for path in found if Path(path).exists())
    # Not resolved: /proc/self is another process where the rule is made.
    machine = ("/proc/self/cgroup", "/proc/meminfo", "/proc/stat", "/sys/fs/cgroup", "/sys/devices/system/cpu")
    return (*kept, *(path for path in machine if Path(path).exists()))


def command() -> list[str]:
    """Command line of a process that reads `orders` from stdin, locks itself in and runs the module they name."""
    return [sys.executable, "-s", "-P", "-B", __file__]


def orders(module: str, policy: Policy, preload: Mapping[str, str]) -> bytes:
    """What a process of `command` reads first from stdin; the module reads the rest.

    Args:
        preload: packages to import before the lock, by name, and the folder that holds each; they must start no
            thread. The folders that hold them are not readable afterwards, the packages' own are if the policy says so.
    """
    given = json.dumps({"policy": asdict(policy), "module": module, "preload": dict(preload)}).encode()
    return struct.pack("=Q", len(given)) + given


def lock(policy: Policy) -> None:
    """Apply the policy to this process, for good, before threads start. Raises NotLockedError: a layer is missing."""
    unavailable = missing()
    if lacking := [f"{name}: {unavailable[name]}" for name in policy.layers if name in unavailable]:
        raise NotLockedError("; ".join(lacking))
    if sys.platform.startswith("linux"):
        _prctl(_PR_SET_PDEATHSIG, 9)
    steps: dict[str, Callable[[], None]] = {
        "rlimits": lambda: _limit(policy),
        "no_new_privs": lambda: _prctl(_PR_SET_NO_NEW_PRIVS, 1),
        "capabilities": _drop_capabilities,
        "landlock": lambda: _restrict_files(policy.read, policy.listed),
        "seccomp": _filter_calls,
    }
    for layer, apply in steps.items():
        if layer in policy.layers:
            try:
                apply()
            except (NotLockedError, OSError, ValueError) as error:
                raise NotLockedError(f"{layer}: {error}") from error


def _limit(policy: Policy) -> None:
    import resource

    limits = {resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: policy.open_files}
    if policy.memory_bytes is not None:
        limits[resource.RLIMIT_AS] = policy.memory_bytes
    if policy.cpu_seconds is not None:
        limits[resource.RLIMIT_CPU] = policy.cpu_seconds
    if policy.tasks is not None:
        limits[resource.RLIMIT_NPROC] = policy.tasks
    for kind, value in limits.items():
        # A signal at the soft limit of processor time tells the parent what it died of; the hard one cannot be caught.
        most = value + 1 if kind == resource.RLIMIT_CPU else value
        hard = resource.getrlimit(kind)[1]
        held = [each if hard == resource.RLIM_INFINITY else min(each, hard) for each in (value, most)]
        # Elsewhere than on Linux the limit of memory is often refused; isolation there is `none` anyway.
        with suppress(*(() if sys.platform.startswith("linux") else (OSError, ValueError))):
            resource.setrlimit(kind, (held[0], held[1]))


def _checked(result: int, what: str) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise NotLockedError(f"{what}: {os.strerror(error)}")
    return result


def _prctl(option: int, value: int, pointer: int = 0) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = [ctypes.c_ulong(number) for number in (value, pointer, 0, 0)]
    _checked(libc.prctl(ctypes.c_int(option), *arguments), f"prctl {option}")


def _syscall(number: int, *arguments: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return int(libc.syscall(ctypes.c_long(number), *(ctypes.c_long(argument) for argument in arguments)))


def _drop_capabilities() -> None:
    """Give up all privileges of root but one: to read what it could read. Landlock narrows that to the policy."""
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(_LAST_CAPABILITY + 1):
        # Fails without privilege, where there is nothing to drop, and beyond the last one the kernel knows.
        if capability != _CAP_DAC_READ_SEARCH:
            libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0)
    header = ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0))
    held = ctypes.create_string_buffer(24)
    _checked(libc.capget(header, held), "capget")
    effective, permitted, _, *_ = struct.unpack("=6I", held.raw)
    kept = 1 << _CAP_DAC_READ_SEARCH
    _checked(libc.capset(header, struct.pack("=6I", effective & kept, permitted & kept, 0, 0, 0, 0)), "capset")


def _landlock_abi() -> int:
    return _syscall(_SYS_LANDLOCK["create_ruleset"], 0, 0, 1)


def _restrict_files(read: Iterable[str], listed: Iterable[str]) -> None:
    abi = _landlock_abi()
    rights = (1 << _FS_RIGHTS[max(known for known in _FS_RIGHTS if known <= abi)]) - 1
    attributes = struct.pack("=Q", rights)
    if abi >= 4:  # no TCP
        attributes += struct.pack("=Q", 0b11)
    if abi >= 6:  # no abstract unix sockets, no signals to the outside
        attributes += struct.pack("=Q", 0b11)
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    address = ctypes.addressof(buffer)
    rules = _checked(_syscall(_SYS_LANDLOCK["create_ruleset"], address, len(attributes), 0), "landlock rules")
    allowances = [(path, _READ_FILE | _READ_DIR if Path(path).is_dir() else _READ_FILE) for path in read]
    for path, allowed in (*allowances, *((path, _READ_DIR) for path in listed)):
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = ctypes.create_string_buffer(struct.pack("=Qi", allowed, opened), 12)
        _checked(_syscall(_SYS_LANDLOCK["add_rule"], rules, 1, ctypes.addressof(rule), 0), f"landlock rule for {path}")
        os.close(opened)
    _checked(_syscall(_SYS_LANDLOCK["restrict_self"], rules, 0), "landlock")
    os.close(rules)


def filter_program(machine: str, pid: int) -> list[tuple[int, int, int, int]]:
    """The seccomp filter of a process, in classic BPF (code, jump if true, jump if false, operand).

    Calls of the list fail with EPERM, all others pass; a call by the door of another architecture kills the process.
    """
    table, architecture = _SYSCALLS[machine], _ARCHITECTURES[machine]
    special = _SPECIAL[machine]
    load, equal, above, masked, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill = 0x7FFF0000, 0x80000000
    refuse, unknown = 0x00050000 | _EPERM, 0x00050000 | _ENOSYS
    program = [(load, 0, 0, 4), (equal, 1, 0, architecture), (answer, 0, 0, kill), (load, 0, 0, 0)]
    if machine == "x86_64":
        program += [(above, 0, 1, 0x40000000), (answer, 0, 0, refuse)]  # the x32 numbers are other doors to all calls
    for number in sorted(table.values()):
        program += [(equal, 0, 1, number), (answer, 0, 0, refuse)]
    # glibc falls back from clone3, whose flags a filter cannot see, to clone, which may make threads and nothing else.
    program += [(equal, 0, 1, special["clone3"]), (answer, 0, 0, unknown)]
    program += [(equal, 0, 4, special["clone"]), (load, 0, 0, 16), (masked, 1, 0, _CLONE_THREAD)]
    program += [(answer, 0, 0, refuse), (answer, 0, 0, allow)]
    # A process may signal its own threads (that is how it aborts).
    program += [(equal, 0, 4, special["tgkill"]), (load, 0, 0, 16), (equal, 1, 0, pid)]
    program += [(answer, 0, 0, refuse), (answer, 0, 0, allow)]
    for name, commands in (("fcntl", _OWNER_COMMANDS), ("ioctl", _FLAG_COMMANDS)):
        last = len(commands) - 1
        program += [(equal, 0, last + 4, special[name]), (load, 0, 0, 24)]
        program += [(equal, last - place, int(place == last), command) for place, command in enumerate(commands)]
        program += [(answer, 0, 0, refuse), (answer, 0, 0, allow)]
    last = len(_HARMLESS_PRCTL)
    program += [(equal, 0, last + 3, special["prctl"]), (load, 0, 0, 16)]
    program += [(equal, last - place, 0, option) for place, option in enumerate(_HARMLESS_PRCTL)]
    program += [(answer, 0, 0, refuse), (answer, 0, 0, allow)]
    # Limits may be asked for (new limit NULL), not set.
    program += [(equal, 0, 5, special["prlimit64"]), (load, 0, 0, 32), (equal, 0, 2, 0), (load, 0, 0, 36)]
    program += [(equal, 1, 0, 0), (answer, 0, 0, refuse), (answer, 0, 0, allow)]
    return program


def _filter_calls() -> None:
    program = filter_program(platform.machine(), os.getpid())
    code = b"".join(struct.pack("=HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(buffer)))
    _prctl(_PR_SET_SECCOMP, 2, ctypes.addressof(header))


def _read(length: int) -> bytes:
    """Exactly so many bytes of stdin, and not one more: the rest is for the module."""
    found = b""
    while len(found) < length:
        if not (part := os.read(0, length - len(found))):
            sys.exit(EXIT_NOT_LOCKED)
        found += part
    return found


def main() -> None:
    """Lock this process in as its orders say, and run their module, unless its parent is dead by then."""
    given = json.loads(_read(struct.unpack("=Q", _read(8))[0]))
    for package, folder in given["preload"].items():
        sys.path.insert(0, folder)
        import_module(package)
        sys.path.remove(folder)
    policy: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in given["policy"].items()
    }
    try:
        lock(Policy(**policy))
    except (NotLockedError, OSError, ValueError) as error:
        print(f"cannot lock this process in: {error}", file=sys.stderr)  # noqa: T201 - a program of its own
        sys.exit(EXIT_NOT_LOCKED)
    if hasattr(select, "poll"):
        # Nobody reads what this process says: its parent died before the lock could tell of it.
        heard = select.poll()
        heard.register(1, 0)
        if any(event & select.POLLERR for _, event in heard.poll(0)):
            sys.exit(EXIT_NOT_LOCKED)
    runpy.run_module(given["module"], run_name="__main__")


if __name__ == "__main__":
    main()
