"""Where the writers of a machine and their committer meet: a few files in a folder that only their user can open.

There is a committer for each user, lake and way to reach it (endpoint and credentials). What says that a process is
alive is a lock on a file, which the kernel frees with the process, however it ends: there are no stale ones.

    NAME.lock    held by the committer: whoever gets it starts the next one, which inherits it
    NAME.alive   shared by the writers: a writer that could have it for itself is alone
    NAME.seat-N  held by a writer each; one that finds none free is one of many
    NAME.sock    where the committer listens
    NAME.log     what the last one wrote to stderr
"""

import fcntl
import os
import stat
import tempfile
from pathlib import Path

from lake import ids
from lake.storage.objects import Objects
from lake.tables import FORMAT_VERSION

SEATS = 4
"""Writers for whom a committer is started only once they get in each other's way."""
_LONGEST_SOCKET = 104
"""Bytes of a path that every system takes."""


class Place:
    """Where those of one lake meet. Raises OSError: there is no folder for it."""

    def __init__(self, objects: Objects) -> None:
        ways = objects.reached_by if objects.folder is None else []
        # Another installation may be of another version, and understand neither the lake nor the messages.
        own = (str(Path(__file__).parent), FORMAT_VERSION)
        key = ids.key_hash("committer", objects.root, *own, *(text for pair in sorted(ways) for text in pair))
        self._base = runtime_folder() / ids.to_text(key)
        self.socket = f"{self._base}.sock"
        self.log = f"{self._base}.log"
        if len(os.fsencode(self.socket)) > _LONGEST_SOCKET:
            raise OSError(f"{self.socket} is too long for a socket; set XDG_RUNTIME_DIR to a shorter folder")

    def elected(self) -> int | None:
        """The committer's lock, as an open file; None if there is a committer, or one is being started."""
        return self._locked("lock", fcntl.LOCK_EX | fcntl.LOCK_NB)

    def present(self) -> int:
        """A writer's share of what says that there are writers, as an open file."""
        file = self._locked("alive", fcntl.LOCK_SH)
        assert file is not None
        return file

    def seat(self) -> int | None:
        """A writer's seat, as an open file; None if all are taken."""
        seats = (self._locked(f"seat-{n}", fcntl.LOCK_EX | fcntl.LOCK_NB) for n in range(SEATS))
        return next((file for file in seats if file is not None), None)

    def is_deserted(self) -> bool:
        """Whether there is no writer."""
        if (file := self._locked("alive", fcntl.LOCK_EX | fcntl.LOCK_NB)) is None:
            return False
        os.close(file)
        return True

    def _locked(self, kind: str, how: int) -> int | None:
        file = os.open(f"{self._base}.{kind}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, how)
        except BlockingIOError:
            os.close(file)
            return None
        except OSError:
            os.close(file)
            raise
        return file


def is_alone(present: int) -> bool:
    """Whether nobody else has a share of a writer's."""
    try:
        fcntl.flock(present, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        # A change of a lock gives it back first, also where it fails.
        fcntl.flock(present, fcntl.LOCK_SH)
    return True


def runtime_folder() -> Path:
    """A folder of this user alone: below XDG_RUNTIME_DIR, else below that for temporary files. Raises OSError."""
    given = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(given, "trajlake") if given else Path(tempfile.gettempdir(), f"trajlake-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        msg = f"{folder} cannot be made ({error.strerror}); set XDG_RUNTIME_DIR to a folder of your own"
        raise OSError(msg) from error
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is open to others, or not a folder of this user")
    return folder
