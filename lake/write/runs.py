"""Which run a file's records belong to, where neither they nor a person say so.

The same file has to end in the same run whether it is named itself, as part of a folder, or from another folder: its
records would be there twice otherwise. So names are made of where a file lies, never of how it was named, and a file
whose first records the lake has under another run goes on in that one.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath

from lake.formats.base.format import Format
from lake.formats.base.source import stem
from lake.read.snapshot import Snapshot
from lake.records import EpisodeRecord, episode_id, identify
from lake.write.index import EpisodeIndex
from lake.write.sources import File

COMPARED = 16
"""Records that have to be those of a run for a file to belong to it."""
_COMMON = re.compile(
    r"((completions?|conversations?|data|datasets?|dev|eval|evals|evaluations?|events?|history|logs?|messages?|metrics"
    r"|of|outputs?|part|predictions?|rank|results?|rollouts?|runs?|samples?|sessions?|shard|step|steps|test|train"
    r"|training|traces?|trajector(y|ies)|val|valid|validation)?[\W_\d]*)*"
)
"""Names that tools and people give to files of any run."""


def run_of(file: File, fmt: Format) -> str:
    """The folder that the file is a part of, or its own name; with its folder's if files of any run are called so."""
    if fmt.run_folder is not None and (folder := fmt.run_folder(file.place).name):
        return folder
    own, folder = stem(PurePath(file.place.name)), file.place.parent.name
    if folder and _COMMON.fullmatch(own.lower()):
        return f"{folder}/{own}"
    return (PurePath(file.name).parent / own).as_posix()


class KnownRuns:
    """The runs that a lake had when an ingest began: which of them a file belongs to depends on nothing that it brings.

    Args:
        index: the episodes that there were.
        snapshot: gives one of that time or later, for the names.
    """

    def __init__(self, index: EpisodeIndex, snapshot: Callable[[], Snapshot]) -> None:
        self.index = index
        self._snapshot = snapshot
        self._names: list[str] | None = None

    def others(self, record: EpisodeRecord, own: str, fmt: Format) -> list[str]:
        """The runs that have a file's first record, unless its own has it."""
        if self._with([record], [own], fmt):
            return []
        if self._names is None:
            names = self._snapshot().scan("episodes").select("run_id").unique().sort("run_id").collect()
            self._names = names["run_id"].to_list()
        return self._with([record], [name for name in self._names if name != own], fmt)

    def has(self, records: Sequence[EpisodeRecord], run: str, fmt: Format) -> bool:
        """Whether a run has all of the records. Where a session may have gone on, their keys are enough."""
        return bool(self._with(records, [run], fmt))

    def _with(self, records: Sequence[EpisodeRecord], runs: Sequence[str], fmt: Format) -> list[str]:
        there = self.index.known((episode_id(record, run) for record in records for run in runs), ()).contents
        return [run for run in runs if all(_is_in(there, record, run, fmt) for record in records)]


def _is_in(there: Mapping[int, tuple[int, int]], record: EpisodeRecord, run: str, fmt: Format) -> bool:
    content, _ = there.get(episode_id(record, run), (None, None))
    return content is not None and (fmt.is_whole or content == identify(record, run).content_hash)
