"""Attacks of a reward function on anyone who runs it. Each returns what it got, and is harmless by its scope.

`attack` is a reward function: the tests run it in an open process first, where it works, and in the sandbox then.
"""

import array
import ctypes
import fcntl
import os
import resource
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def _send(kind: int, address: Any, family: int = socket.AF_INET) -> str:
    with socket.socket(family, kind) as out:
        out.connect(address)
        out.send(b"stolen")
    return "sent"


def _write(path: str, data: bytes = b"x") -> int:
    with Path(path).open("ab") as file:
        return file.write(data)


def _fork() -> int:
    """Three processes that end at once."""
    pids = []
    for _ in range(3):
        if (pid := os.fork()) == 0:
            os._exit(0)
        pids.append(pid)
    return sum(os.waitpid(pid, 0)[0] == pid for pid in pids)


def _shared_memory() -> int:
    """Two GiB that RLIMIT_DATA does not count; never touched."""
    address = _libc.mmap(None, 2 << 30, 3, 0x21, -1, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap")
    return 2 << 30


def _threads() -> int:
    """More threads than a worker may have; they wait, and end with the process."""
    threading.stack_size(64 << 10)
    wait = threading.Event()
    for _ in range(300):
        threading.Thread(target=wait.wait, daemon=True).start()
    time.sleep(0.5)
    return threading.active_count()


def _parents_memory(parent: int) -> int:
    with Path(f"/proc/{parent}/maps").open() as maps:
        start = int(next(line for line in maps if "rw-p" in line).split("-")[0], 16)
    with Path(f"/proc/{parent}/mem").open("rb", buffering=0) as memory:
        memory.seek(start)
        return len(memory.read(16))


def _read_by_call(parent: int, address: int) -> str:
    """process_vm_readv needs no file."""
    buffer = ctypes.create_string_buffer(6)
    local = struct.pack("PN", ctypes.addressof(buffer), 6)
    remote = struct.pack("PN", address, 6)
    number = {"x86_64": 310, "aarch64": 270}[os.uname().machine]
    arguments = [ctypes.c_long(number) for number in (1, 1, 0)]
    _checked(_libc.syscall(ctypes.c_long(number), ctypes.c_long(parent), local, arguments[0], remote, *arguments[1:]))
    return buffer.raw.decode()


def _raise_limits() -> str:
    for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_AS, resource.RLIMIT_FSIZE):
        soft, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (hard, hard))
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (max(soft - 1, 0), hard))
    return "set"


def _signal_by_pipe(victim: int) -> str:
    """Let the kernel send a signal: a pipe tells its owner that there is something to read."""
    reader, writer = os.pipe()
    fcntl.fcntl(reader, fcntl.F_SETOWN, victim)
    fcntl.fcntl(reader, 10, signal.SIGTERM)
    fcntl.fcntl(reader, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    os.write(writer, b"x")
    return "sent"


def _ptrace(victim: int) -> str:
    _checked(_libc.ptrace(16, victim, None, None))
    os.waitpid(victim, 0x40000000)
    _checked(_libc.ptrace(17, victim, None, None))
    return "attached"


def _posix_timer() -> str:
    """A timer that sends SIGALRM to this process: none that a worker could stop."""
    number = {"x86_64": 222, "aarch64": 107}[os.uname().machine]
    _checked(_libc.syscall(ctypes.c_long(number), ctypes.c_long(1), None, ctypes.create_string_buffer(8)))
    return "made"


def _prctl(option: int, value: int = 0) -> str:
    _checked(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0))
    return "set"


def _attacks(at: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    folder, port, victim, parent = at["folder"], at["port"], at["victim"], at["parent"]
    big = array.array("b", bytes(1 << 20)).tobytes()
    return {
        "network": lambda: _send(socket.SOCK_STREAM, ("127.0.0.1", port)),
        "UDP": lambda: _send(socket.SOCK_DGRAM, ("127.0.0.1", port)),
        "unix socket": lambda: _send(socket.SOCK_STREAM, f"{folder}/unix", socket.AF_UNIX),
        "abstract unix socket": lambda: _send(socket.SOCK_STREAM, f"\0trajlake-{port}", socket.AF_UNIX),
        "socket pair": lambda: _checked(_libc.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM, 0, bytes(8))),
        "file write": lambda: _write(f"{folder}/written"),
        "write beside itself": lambda: _write(f"{Path(__file__).parent}/written"),
        "change of itself": lambda: _write(__file__, b"# changed\n"),
        "file removal": lambda: Path(f"{folder}/doomed").unlink() or "gone",
        "file read": lambda: Path(f"{folder}/secret").read_text(),
        "hidden file read": lambda: Path(f"{Path(__file__).parent}/.env").read_text(),
        "read by a link": lambda: Path(f"{Path(__file__).parent}/link").read_text(),
        "passwd": lambda: len(Path("/etc/passwd").read_text()),
        "shadow": lambda: len(Path("/etc/shadow").read_text()),
        "parent's environment": lambda: Path(f"/proc/{parent}/environ").read_bytes().count(b"TRAJLAKE_SECRET"),
        "inherited environment": lambda: os.environ["TRAJLAKE_SECRET"],
        "fork bomb": _fork,
        "memory bomb": lambda: len(bytearray(2 << 30)),
        "shared memory bomb": _shared_memory,
        "thread bomb": _threads,
        "exec": lambda: subprocess.run(["/bin/true"], check=True).returncode,
        "spawn": lambda: os.posix_spawn("/bin/true", ["true"], {}) > 0,
        "big file": lambda: _write(f"{folder}/big", big),
        "kill parent": lambda: os.kill(victim, signal.SIGTERM) or "sent",
        "signal by a pipe": lambda: _signal_by_pipe(victim),
        "slow the parent": lambda: os.setpriority(os.PRIO_PROCESS, victim, 19) or "slowed",
        "pin the parent": lambda: os.sched_setaffinity(victim, os.sched_getaffinity(victim)) or "pinned",
        "parent's memory": lambda: _parents_memory(parent),
        "parent's memory by a call": lambda: _read_by_call(parent, at["address"]),
        "trace a process": lambda: _ptrace(victim),
        "own limits": _raise_limits,
        "memory as a file": lambda: os.memfd_create("evil"),
        "io_uring": lambda: _checked(_libc.syscall(425, 4, ctypes.create_string_buffer(256))),
        "namespace": lambda: _checked(_libc.unshare(0x10000000)),
        "outlive the parent": lambda: _prctl(1),
        "adopt orphans": lambda: _prctl(36, 1),
        "hide from the parent": lambda: _prctl(4),
        "keep privileges": lambda: _prctl(8, 1),
        "own session": lambda: os.setsid() or "left",
        "own group": lambda: os.setpgid(0, 0) or "left",
        "handle of a process": lambda: os.pidfd_open(victim),
        "list a folder": lambda: sum(1 for _ in Path(folder).iterdir()),
        "list processes": lambda: sum(1 for _ in Path("/proc").iterdir()),
        "parent's folder": lambda: str(Path(f"/proc/{parent}/cwd").readlink()),
        "parent's files": lambda: sum(1 for _ in Path(f"/proc/{parent}/fd").iterdir()),
        "posix timer": _posix_timer,
        "pipe in a folder": lambda: os.mkfifo(f"{folder}/written") or "made",
        "hard link": lambda: os.link(f"{folder}/secret", f"{folder}/written") or "made",
        "renaming": lambda: Path(f"{folder}/doomed").rename(f"{folder}/written") and "gone",
    }


PEACE = "peace"
NAMES = tuple(_attacks(dict.fromkeys(("folder", "port", "victim", "parent", "address"), 0)))


def attack(messages: list[dict[str, str]], ground_truth: dict[str, Any], **_: Any) -> float | dict[str, Any]:
    """A reward function that does what its message says."""
    name = messages[0]["content"]
    return 1.0 if name == PEACE else {"score": 1.0, "got": _attacks(ground_truth)[name]()}
