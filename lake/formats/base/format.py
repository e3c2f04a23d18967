"""What a format is: how it is recognised and read."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lake.formats.base.look import Look
from lake.formats.base.rows import Item
from lake.formats.base.source import Input, Meter, stem


class Reader(Protocol):
    """From a file to its records and rejects, in order."""

    def __call__(self, file: Input) -> Iterator[Item]:
        """Read a file; its meter is moved on as it is read."""


def _holds_none(look: Look) -> str | None:
    """Every file of the format holds trajectories."""


@dataclass(frozen=True, slots=True)
class Format:
    """One format."""

    name: str
    description: str
    recognise: Callable[[Look], bool]
    """Whether a file looks like this format."""
    reader: Reader
    no_trajectory: Callable[[Look], str | None] = _holds_none
    """What a file of the same tool is that holds no trajectory, as a sentence; None if it may hold some."""
    by_line: bool = False
    """Each line of a file is complete by itself: a file that grows is read on from where its last line ended."""
    is_whole: bool = False
    """A file is one episode, or few whose records stand anywhere in it: if it grows, it is read again from its start,
    and what has grown replaces what it was."""

    def read(self, path: Path, meter: Meter | None = None, run_id: str | None = None) -> Iterator[Item]:
        """Records and rejects of a file."""
        return self.reader(Input(path, stem(path) if run_id is None else run_id, meter or Meter()))
