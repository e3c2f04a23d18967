"""Where indexes are kept: in the user's cache folder, one file a lake; a viewer writes nothing into a lake."""

from pathlib import Path

from lake import ids
from lake.errors import LakeAccessError
from lake.storage import user_cache
from lake.storage.user_cache import ENVIRONMENT

__all__ = ["ENVIRONMENT", "delete", "path"]

_KIND = "search"
_LAYOUT = 1
"""Of the file: another number is another file."""


def path(root: str) -> Path:
    """The file of a lake, in a folder that is there and that nobody else may read."""
    return user_cache.folder(_KIND) / _name(root)


def delete(root: str) -> None:
    """Delete what this machine keeps of a lake's texts. Raises LakeAccessError: it cannot be deleted."""
    for folder in user_cache.folders(_KIND):
        for suffix in ("", "-wal", "-shm"):
            file = Path(folder, _name(root) + suffix)
            try:
                file.unlink(missing_ok=True)
            except OSError as error:
                msg = f"{file} holds texts of {root} and cannot be deleted ({error.strerror}); delete it yourself"
                raise LakeAccessError(msg) from error


def _name(root: str) -> str:
    return f"{ids.to_text(ids.key_hash('lake', root))}-{_LAYOUT}.sqlite"
