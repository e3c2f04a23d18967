"""A locked-in process: attacks that work in an open process, and fail in a locked one."""

import ctypes
import json
import os
import platform
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lake.locked import isolation
from lake.locked.isolation import LockPolicy

pytestmark = pytest.mark.skipif(
    bool(isolation.find_missing_layers()), reason=f"no strong isolation here: {isolation.find_missing_layers()}"
)

PROBE = r'''
"""Runs the attacks that its input names, and prints what came of each as JSON."""
import ctypes, json, mmap, os, resource, signal, socket, subprocess, sys, threading

told = json.loads(sys.stdin.buffer.read())
folder, port, parent, shared = told["folder"], told["port"], told["parent"], told["shared"]
inside = folder + "/given.txt"

def connect(kind, address, family=socket.AF_INET):
    with socket.socket(family, kind) as s:
        s.connect(address)
        s.send(b"x")
        return "sent"

def run_fork():
    pid = os.fork()
    if pid == 0:
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def raise_limits():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(1, soft - 1), hard))
    return "set"

def write(path, flags=os.O_WRONLY | os.O_CREAT):
    handle = os.open(path, flags, 0o600)
    return os.write(handle, b"x")

def set_flags():
    import fcntl
    handle = os.open(inside, os.O_RDONLY)
    return len(fcntl.ioctl(handle, 0x40086602, fcntl.ioctl(handle, 0x80086601, bytes(8))))

def own_pipe():
    import fcntl
    reader, writer = os.pipe()
    return fcntl.fcntl(reader, fcntl.F_SETOWN, parent) or fcntl.fcntl(reader, 10, signal.SIGUSR1) or "owned"

libc = ctypes.CDLL(None, use_errno=True)

def checked(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result

ATTACKS = {
    "tcp": lambda: connect(socket.SOCK_STREAM, ("127.0.0.1", port)),
    "udp": lambda: connect(socket.SOCK_DGRAM, ("127.0.0.1", port)),
    "unix socket": lambda: connect(socket.SOCK_STREAM, folder + "/unix", socket.AF_UNIX),
    "socket pair": lambda: len(socket.socketpair()),
    "a new file": lambda: write(folder + "/new.txt"),
    "a given file": lambda: write(inside, os.O_WRONLY),
    "an append": lambda: write(inside, os.O_WRONLY | os.O_APPEND),
    "truncation": lambda: os.truncate(inside, 0),
    "removal": lambda: os.unlink(inside),
    "renaming": lambda: os.rename(inside, folder + "/renamed.txt"),
    "a folder": lambda: os.mkdir(folder + "/made"),
    "a link": lambda: os.symlink("/etc", folder + "/link"),
    "a mode": lambda: os.chmod(inside, 0o777),
    "a time": lambda: os.utime(inside, (1, 1)),
    "an attribute": lambda: os.setxattr(inside, "user.evil", b"1"),
    "flags of a file": set_flags,
    "memory as a file": lambda: os.memfd_create("evil"),
    "a file outside": lambda: len(open(folder + "/secret.txt").read()),
    "a listing": lambda: len(os.listdir(folder)),
    "passwords": lambda: len(open("/etc/passwd").read()),
    "the parent's environment": lambda: len(open(f"/proc/{parent}/environ").read()),
    "the parent's memory": lambda: len(open(f"/proc/{parent}/maps").read()),
    "a fork": run_fork,
    "a program": lambda: subprocess.run(["/bin/true"]).returncode,
    "another program": lambda: os.posix_spawn("/bin/true", ["true"], {}),
    "a signal": lambda: os.kill(parent, signal.SIGUSR1),
    "a signal by a pipe": own_pipe,
    "the parent's priority": lambda: os.setpriority(os.PRIO_PROCESS, parent, 5) or "set",
    "the parent's processors": lambda: os.sched_setaffinity(parent, os.sched_getaffinity(parent)) or "set",
    "the parent's scheduling": lambda: os.sched_setscheduler(parent, os.SCHED_BATCH, os.sched_param(0)) or "set",
    "shared memory of others": lambda: checked(libc.shmctl(shared, 0, None)),
    "limits": raise_limits,
    "much memory": lambda: len(mmap.mmap(-1, 3 << 30)),
    "a namespace": lambda: checked(libc.unshare(0x20000)),
    "io_uring": lambda: checked(libc.syscall(425, 4, ctypes.create_string_buffer(256))),
    "a user": lambda: os.setuid(os.getuid()),
}
HARMLESS = {
    "the given file": lambda: open(inside).read(),
    "a thread": lambda: [t.start() or t.join() for t in [threading.Thread(target=sum, args=([],))]] and "ran",
    "own limits": lambda: len(resource.getrlimit(resource.RLIMIT_NOFILE)),
    "numpy": lambda: int(__import__("numpy").arange(4).sum()),
    "pyarrow": lambda: __import__("pyarrow").array([1, 2]).to_pylist(),
    "polars": lambda: __import__("polars").DataFrame({"a": [1, 2]})["a"].sum(),
    "duckdb": lambda: __import__("duckdb").execute("SELECT 6 * 7").fetchone()[0],
}
def outcome(name):
    try:
        return {"result": (ATTACKS | HARMLESS)[name]()}
    except BaseException as error:
        return {"error": type(error).__name__, "number": getattr(error, "errno", None)}

def outcome_in_a_fork(name):
    """What one attack does the next one does not see, but for files."""
    with open(inside, "w") as file:
        file.write("given")
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, json.dumps(outcome(name)).encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answer:
        text = answer.read()
    os.wait()
    return json.loads(text)

run = outcome_in_a_fork if told["forked"] else outcome
print(json.dumps({name: run(name) for name in told["attacks"]}))
'''
NAMES = re.findall(r'^    "([^"]+)":', PROBE, re.M)
ATTACKS, HARMLESS = NAMES[: NAMES.index("the given file")], NAMES[NAMES.index("the given file") :]
NEEDS_PRIVILEGE = {"a namespace"}
"""Works in an open process of root only."""


LIBC = ctypes.CDLL(None)


class Room:
    """A folder with a file to read, one to keep secret, and someone listening."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "jail").mkdir()
        (folder / "jail" / "__init__.py").touch()
        (folder / "jail" / "probe.py").write_text(PROBE)
        (folder / "given.txt").write_text("given")
        (folder / "secret.txt").write_text("secret")
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.unix = socket.socket(socket.AF_UNIX)
        self.unix.bind(str(folder / "unix"))
        self.unix.listen()

    def told(self, *attacks: str, forked: bool = False) -> bytes:
        port = self.listener.getsockname()[1]
        # The target of signals is its own process, which a test can do without.
        settings = {"attacks": attacks, "folder": str(self.folder), "port": port, "parent": self.victim.pid}
        return json.dumps(settings | {"shared": self.shared, "forked": forked}).encode()

    def open_process(self, *attacks: str, forked: bool = False) -> dict[str, dict[str, object]]:
        """What comes of attacks without a lock."""
        return self._result(
            [sys.executable, str(self.folder / "jail" / "probe.py")], self.told(*attacks, forked=forked)
        )

    def locked_process(self, *attacks: str, policy: LockPolicy | None = None) -> dict[str, dict[str, object]]:
        """What comes of them behind the lock, in one process."""
        read = (*isolation.list_runtime_folders(), str(self.folder / "jail"), str(self.folder / "given.txt"))
        policy = policy or LockPolicy(read=read, memory_bytes=2 << 30)
        orders = isolation.encode_orders("jail.probe", policy, {"jail": str(self.folder)})
        return self._result(isolation.build_command(), orders + self.told(*attacks))

    @staticmethod
    def _result(command: list[str], settings: bytes) -> dict[str, dict[str, object]]:
        # As the product starts them: each arena of malloc takes 64 MB of the address space, which is limited.
        clean = {"LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
        done = subprocess.run(command, input=settings, capture_output=True, check=False, env=clean, cwd="/")
        assert done.returncode == 0, done.stderr.decode()
        reports = json.loads(done.stdout)
        assert isinstance(reports, dict)
        return reports

    def __enter__(self) -> "Room":
        self.shared = LIBC.shmget(0, 4096, 0o600)
        self.victim = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
        return self

    def __exit__(self, *_: object) -> None:
        self.victim.kill()
        self.victim.communicate()
        self.listener.close()
        self.unix.close()
        LIBC.shmctl(self.shared, 0, None)


def test_attacks_work_in_an_open_process_and_not_in_a_locked_one(tmp_path: Path) -> None:
    with Room(tmp_path) as room:
        locked = room.locked_process(*ATTACKS)
        assert list(locked) == ATTACKS
        assert [attack for attack in ATTACKS if "error" not in locked[attack]] == []
        assert (tmp_path / "given.txt").read_text() == "given"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["given.txt", "jail", "secret.txt", "unix"]
        assert room.victim.poll() is None
        possible = [attack for attack in ATTACKS if os.getuid() == 0 or attack not in NEEDS_PRIVILEGE]
        opened = room.open_process(*possible, forked=True)
        assert {attack: opened[attack] for attack in possible if "result" not in opened[attack]} == {}


def test_what_a_process_needs_still_works(tmp_path: Path) -> None:
    with Room(tmp_path) as room:
        locked = room.locked_process(*HARMLESS)
        assert locked == room.open_process(*HARMLESS)
        assert list(locked) == HARMLESS
        assert all("result" in outcome for outcome in locked.values())


def test_a_missing_layer_leaves_its_hole(tmp_path: Path) -> None:
    """So that the layers are known to be what holds."""
    read = (*isolation.list_runtime_folders(), str(tmp_path / "jail"), str(tmp_path / "given.txt"))
    with Room(tmp_path) as room:
        without = {
            layer: tuple(other_layer for other_layer in isolation.LAYERS if other_layer != layer)
            for layer in isolation.LAYERS
        }
        policy = LockPolicy(read=read, memory_bytes=2 << 30, layers=without["landlock"])
        assert "result" in room.locked_process("passwords", policy=policy)["passwords"]
        policy = LockPolicy(read=read, memory_bytes=2 << 30, layers=without["seccomp"])
        assert "result" in room.locked_process("udp", policy=policy)["udp"]
        policy = LockPolicy(read=read, memory_bytes=2 << 30, layers=without["rlimits"])
        assert "result" in room.locked_process("much memory", policy=policy)["much memory"]


def test_a_folder_that_is_listed_is_not_read(tmp_path: Path) -> None:
    """What lies in it may be read if it is named: how a folder is given without what is hidden in it."""
    with Room(tmp_path) as room:
        runtime = (*isolation.list_runtime_folders(), str(tmp_path / "jail"))
        listed = LockPolicy(read=runtime, listed=(str(tmp_path),))
        refused = {"error": "PermissionError", "number": 13}
        assert room.locked_process("a listing", "a file outside", "the given file", policy=listed) == {
            "a listing": {"result": 4},
            "a file outside": refused,
            "the given file": refused,
        }
        policy = LockPolicy(read=(*runtime, str(tmp_path / "given.txt")), listed=(str(tmp_path),))
        assert room.locked_process("the given file", policy=policy) == {"the given file": {"result": "given"}}


@pytest.mark.skipif(os.getuid() == 0, reason="the kernel does not count root's processes and threads")
def test_processes_and_threads_are_counted_for_an_ordinary_user(tmp_path: Path) -> None:
    with Room(tmp_path) as room:
        policy = LockPolicy(read=(*isolation.list_runtime_folders(), str(tmp_path / "jail")), tasks=1)
        refused = {"error": "RuntimeError", "number": None}
        assert room.locked_process("a thread", policy=policy) == {"a thread": refused}


def test_a_lock_that_fails_names_its_layer() -> None:
    """In its own process: what a lock has done before it fails stays done."""
    code = "from lake.locked import isolation; isolation.lock(isolation.LockPolicy(read=('/no/such/place',)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "NotLockedError: landlock: [Errno 2] No such file or directory: '/no/such/place'" in done.stderr


def test_what_cannot_be_locked_does_not_run(tmp_path: Path) -> None:
    with Room(tmp_path) as room:
        orders = isolation.encode_orders("jail.probe", LockPolicy(read=("/no/such/place",)), {"jail": str(tmp_path)})
        done = subprocess.run(
            isolation.build_command(), input=orders + room.told("a fork"), capture_output=True, check=False
        )
        assert done.returncode == isolation.EXIT_NOT_LOCKED
        assert b"cannot lock this process in" in done.stderr
        assert not done.stdout


def test_where_layers_are_missing_they_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isolation.name_level(isolation.LAYERS) == "strong"
    assert isolation.name_level(("rlimits", "seccomp", "no_new_privs")) == "basic"
    assert isolation.name_level(("rlimits",)) == "none"
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert set(isolation.find_missing_layers()) == set(isolation.LAYERS) - {"rlimits"}
    with pytest.raises(isolation.NotLockedError, match=r"landlock: .*Linux.*Darwin"):
        isolation.lock(LockPolicy())


def test_another_machine_has_no_filter_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert set(isolation.find_missing_layers()) == {"seccomp"}
    assert "riscv64" in isolation.find_missing_layers()["seccomp"]


def test_a_locked_process_reads_the_packages_that_an_environment_shares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another one, by --system-site-packages or a .pth file; and no other folder of the path."""
    shared, project = tmp_path / "shared" / "site-packages", tmp_path / "project"
    for folder in (shared, project):
        folder.mkdir(parents=True)
        monkeypatch.syspath_prepend(folder)
    folders = isolation.list_runtime_folders()
    assert str(shared.resolve()) in folders
    assert str(project.resolve()) not in folders
