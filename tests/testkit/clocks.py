"""A clock that several processes share and a test moves: hours stand in a file next to the lake."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import lake
from lake import Lake
from lake.storage.commits import utc_now


def _file(uri: str | Path) -> Path:
    return Path(f"{uri}.clock")


def set_clock(uri: str | Path, hours: float) -> None:
    """Let every process that opened the lake with `clock_of` read a time that many hours from now."""
    file = _file(uri)
    # Replaced in one step: another process may be reading it.
    new = file.with_suffix(".new")
    new.write_text(str(hours))
    new.replace(file)


def open_with_clock(uri: str | Path, hours: float = 0) -> Lake:
    """A new or old lake whose clock the test moves with `set_clock`."""
    set_clock(uri, hours)
    return lake.open(uri, create=True, clock=clock_of(uri))


def clock_of(uri: str | Path) -> Callable[[], datetime]:
    """The clock of a lake: the one `set_clock` moves if there is one, else the usual."""
    file = _file(uri)
    if not file.exists():
        return utc_now
    return lambda: datetime.now(UTC) + timedelta(hours=float(file.read_text()))
