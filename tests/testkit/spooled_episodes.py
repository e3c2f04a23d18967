"""Episodes that are recorded into a spool alone, without a lake: what their frames say is their record."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lake.live.delivery import EpisodeLog
from lake.live.episode import Episode
from lake.live.frames import SOURCE_FORMAT, assemble_frames
from lake.live.sink import Sink
from lake.live.spool import Spool
from lake.records import EpisodeRecord, check


class Spooled:
    """A sink, and the episodes that were recorded into it."""

    def __init__(self, folder: Path, **options: int) -> None:
        self.sink = Sink(Spool.create(folder, **options), wait=0.0, is_durable=False)
        self._log = EpisodeLog(self.sink.spool)

    @property
    def troubles(self) -> int:
        return self.sink.counts.troubles

    def episode(self, **fields: Any) -> Episode:
        """An episode begins."""
        begin_fields: dict[str, Any] = {"task_id": "t", "steps": [], "run_id": "r", "source_format": SOURCE_FORMAT}
        return Episode(self.sink, EpisodeRecord(**(begin_fields | fields)))

    def records(self) -> list[EpisodeRecord]:
        """The episodes that were finished since; each as the lake would take it."""
        self.sink.spool.sync(30)
        self._log.refresh()
        keys = self._log.finished
        assembled = [record for key in keys for record in assemble_frames(self._log.frames(key))]
        self._log.release(keys)
        records = [record for record in assembled if isinstance(record, EpisodeRecord)]
        assert len(records) == len(assembled)
        for record in records:
            assert not record.steps or check(record) is None
        return records


@contextmanager
def spooled(folder: Path, **options: int) -> Iterator[Spooled]:
    """A spool below a folder; `options` are those of `Spool.create`."""
    episodes = Spooled(folder, **options)
    try:
        yield episodes
    finally:
        episodes.sink.spool.close(remove=True)
