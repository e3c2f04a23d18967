"""What a format is: how it is recognised and read."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Protocol

from lake.formats.base.look import Look
from lake.formats.base.rows import Item
from lake.formats.base.source import Input, Meter, stem


class Reader(Protocol):
    """From a file to its records and rejects, in order."""

    def __call__(self, file: Input) -> Iterator[Item]:
        """Read a file; its meter is moved on as it is read."""


RunFolder = Callable[[PurePath], PurePath]
"""From a file's place to the folder that its run is called by."""


def its_folder(place: PurePath) -> PurePath:
    """The folder that a file lies in."""
    return place.parent


def above(names: str) -> RunFolder:
    """The nearest folder above a file whose name does not match a pattern."""

    def folder(place: PurePath) -> PurePath:
        return next((one for one in place.parents if not re.fullmatch(names, one.name)), place.parent)

    return folder


def past_its_own(place: PurePath) -> PurePath:
    """The folder that a file lies in, or the one above if that has the file's name: one folder for each rollout."""
    return place.parents[1] if place.name.startswith(f"{place.parent.name}.") else place.parent


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
    any_line: bool = False
    """What a line is does not depend on those before it either: a file can be read from any of them on."""
    is_whole: bool = False
    """A file is one episode, or few whose records stand anywhere in it: if it grows, it is read again as a whole, and
    what has grown replaces what it was. Keys are therefore the rollouts' own, made of ids or of what they begin with:
    two rollouts never have the same one, whatever files they are in."""

    run_folder: RunFolder | None = None
    """The folder that stands for the run, of which a file is a part: an episode, or what came of one training step.
    None: a file is a run."""

    def read(self, path: Path, meter: Meter | None = None, run_id: str | None = None) -> Iterator[Item]:
        """Records and rejects of a file."""
        return self.reader(Input(path, stem(path) if run_id is None else run_id, meter or Meter()))
