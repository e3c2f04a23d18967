"""Where an export goes, and what a killed one left there.

A file or a folder is begun with `_export.json`, which says what is asked for and which shards are whole, and ends with
`manifest.json`, which takes its place. Whoever writes holds a lock that goes with the process, however it ends.
"""

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import msgspec

from lake.errors import LakeAccessError, UsageError
from lake.export.files import STAGING, SUFFIXES, TreeLog, replace, write_table, write_tree, writing
from lake.export.request import SHARD_EPISODES, Manifest, Request, Shard, State
from lake.export.target import Row

STATE = "_export.json"
MANIFEST = "manifest.json"
LOCK = "_export.lock"
_TREE = "_export.files"


class Place:
    """One file, or a folder of shards or of a tree.

    Args:
        request: names it.

    Raises:
        UsageError: a file where a folder has to be, or shards where one file has to be.
    """

    def __init__(self, request: Request) -> None:
        self._target = request.target
        self._out = request.out
        suffix = SUFFIXES.get(self._target.container)
        self._is_file = request.is_one_file
        if self._is_file and request.shard_episodes != SHARD_EPISODES:
            raise UsageError(f"{request.out} is one file; shards need a folder: --out FOLDER")
        if not self._is_file and (request.out.is_file() or request.out.suffix in SUFFIXES.values()):
            what = "is a file" if request.out.is_file() else "is the name of a file"
            valid = f"a folder, or a file that ends in {suffix}" if suffix else "a folder"
            raise UsageError(f"{request.out} {what}; {request.target.name} is written to {valid}")
        self._folder = request.out.parent if self._is_file else request.out
        before = f"{request.out.name}." if self._is_file else ""
        self._state_path, self._manifest_path, self._lock_path = (
            self._folder / f"{before}{name}" for name in (STATE, MANIFEST, LOCK)
        )
        self._is_tree = self._target.container == "tree"
        self._log = TreeLog(self._folder, _TREE)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes out. Raises UsageError: one is at work here."""
        descriptor = self._locked()
        try:
            yield
        finally:
            with suppress(OSError):
                self._lock_path.unlink()
            os.close(descriptor)
            if not self._is_file:
                with suppress(OSError):
                    self._folder.rmdir()  # if nothing was written

    def _locked(self) -> int:
        while True:
            with writing(self._folder):
                descriptor = os.open(self._lock_path, os.O_CREAT | os.O_RDWR, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(descriptor)
                message = f"another process exports to {self._out}: wait for it, or name another place"
                raise UsageError(message) from error
            except OSError:
                return descriptor  # a file system without locks
            # Whoever held it may have deleted it meanwhile; then another file is the lock now.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), self._lock_path.stat()):
                    return descriptor
            os.close(descriptor)

    def state(self) -> State | None:
        """What a killed export left here; None if there was none. Raises UsageError: something else is here."""
        try:
            return msgspec.json.decode(self._state_path.read_bytes(), type=State)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OSError) as error:
            raise LakeAccessError(f"{self._state_path}: {error}; delete it to begin again") from error
        if self._is_taken():
            what = "file" if self._is_file else "or an empty folder"
            raise UsageError(f"{self._out} is there already; name a new {what}")
        return None

    def _is_taken(self) -> bool:
        if self._is_file:
            return self._out.exists()
        try:
            return any(path.name != LOCK for path in self._out.iterdir())
        except FileNotFoundError:
            return False
        except OSError as error:
            raise LakeAccessError(f"{self._out}: {error.strerror}") from error

    def begin(self, state: State, former: State | None) -> None:
        """Begin an export, on what another one left."""
        with writing(self._folder):
            if former is not None:
                self._log.undo()
                unfinished = self._name(len(former.shards))
                for name in () if self._is_tree else (*(shard.name for shard in former.shards), unfinished):
                    (self._folder / name).unlink(missing_ok=True)
                    (self._folder / f"{name}{STAGING}").unlink(missing_ok=True)
        self.save(state)

    def save(self, state: State) -> None:
        """Note what is done."""
        with writing(self._folder):
            replace(self._state_path, msgspec.json.format(msgspec.json.encode(state)))

    def finish(self, manifest: Manifest) -> None:
        """The export is whole."""
        with writing(self._folder):
            if self._target.finish is not None:
                self._target.finish(self._folder)
            replace(self._manifest_path, msgspec.json.format(msgspec.json.encode(manifest)))
            self._log.path.unlink(missing_ok=True)
            self._state_path.unlink(missing_ok=True)

    def write(self, number: int, rows: Iterable[Row], episodes: int) -> Shard:
        """Write one shard under its name, once it is whole."""
        name = self._name(number)
        with writing(self._folder):
            if self._is_tree:
                count, size, digest = write_tree(self._folder, rows, self._log, number)
            else:
                count, size, digest = write_table(self._folder / name, rows, self._target)
        return Shard(name, episodes, count, size, digest)

    def require_shards(self) -> None:
        """Raise UsageError where shards cannot be written apart: a tree's files are noted in one log."""
        if self._is_tree:
            raise UsageError(f"{self._target.name} is a tree of files, which one process writes: --executor local")

    def require(self, shard: Shard) -> None:
        """Raise UsageError if a shard that was written is not here: another node has another folder of that name."""
        file = self._folder / shard.name
        if not self._is_tree and not (file.is_file() and file.stat().st_size == shard.bytes):
            raise UsageError(f"{file} was written by a node, and is not here: every node must mount the folder")

    def _name(self, number: int) -> str:
        return self._out.name if self._is_file else f"{number:05d}{SUFFIXES.get(self._target.container, '')}"
