"""Which episode owns a response that several files of a run hold: the first one that brought it to the lake.

`lake.formats.chat.sessions` states the rule and applies it inside a file. Here the records of a batch are compared with
each other and with the lake before they are written. The lake is asked only for steps at the times of the batch's
steps, because copies keep their times. It is asked for their ids only if a step of another file has the same time. So
sessions without copies cost one narrow query per batch.

Tools copy a history from its beginning. So a copy is of a file that also has the responses before it; else a careless
server gave two sessions the same ids.
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import PurePosixPath

import msgspec
import polars as pl

from lake import ids
from lake.formats.base.fields import as_object
from lake.formats.chat.sessions import ResponseKey, list_responses, mark_copied_steps
from lake.read.parquet import collect_rows
from lake.read.snapshot import Snapshot
from lake.records import EpisodeRecord, StepRecord

_SHARED = ("run_id", "episode_id", "is_copied_context", "started_at", "prompt_tokens", "completion_tokens", "extra")


def mark_copies_between_files(records: Sequence[EpisodeRecord], open_snapshot: Callable[[], Snapshot]) -> None:
    """Mark the steps as copied context whose responses the lake, or earlier records, have from other files.

    Args:
        records: records of sessions, whose runs and files are set.
    """
    responses = [(record, list_responses(record)) for record in records]
    known = _Responses()
    if any(steps for _, steps in responses):
        known.read_lake(responses, open_snapshot)
    for record, steps in responses:
        file, copied = _hash_file(record.task_id, record.source_uri), []
        origins: set[int] | None = None
        for index, keys in steps:
            hashes = [_hash_key(record.run_id, key) for key in keys]
            owner = next((known.owners[key] for key in hashes if key in known.owners), file)
            is_own = not record.steps[index].is_copied_context
            if is_own and owner != file and (origins is None or owner in origins):
                copied.append(index)
                is_own = False
            files = set[int]().union(*(known.files.get(key, ()) for key in hashes))
            origins = files if origins is None else origins & files
            for key in hashes:
                known.add(key, file, is_own=is_own and owner == file)
        mark_copied_steps(record, copied)


def list_owners(records: Iterable[EpisodeRecord]) -> dict[int, int]:
    """Return the responses that records own, as hashes, and the file of each."""
    return {
        _hash_key(record.run_id, key): _hash_file(record.task_id, record.source_uri)
        for record in records
        for index, keys in list_responses(record)
        for key in keys
        if not record.steps[index].is_copied_context
    }


class _Responses:
    """Responses by their hashes: the files that have each, and the one that owns it."""

    def __init__(self) -> None:
        self.files: dict[int, set[int]] = {}
        self.owners: dict[int, int] = {}

    def add(self, key: int, file: int, *, is_own: bool) -> None:
        """Add a response of a file."""
        self.files.setdefault(key, set()).add(file)
        if is_own:  # of several owners in an old lake, every reading takes the same one
            self.owners[key] = min(self.owners.get(key, file), file)

    def read_lake(
        self,
        responses: Sequence[tuple[EpisodeRecord, list[tuple[int, list[ResponseKey]]]]],
        open_snapshot: Callable[[], Snapshot],
    ) -> None:
        """Add the responses that the lake has at the times of some others, where files share a time."""
        files_by_time: dict[tuple[str | None, datetime], set[int]] = {}
        for record, steps in responses:
            for time in (time for index, _ in steps if (time := record.steps[index].started_at) is not None):
                file = _hash_file(record.task_id, record.source_uri)
                files_by_time.setdefault((record.run_id, time), set()).add(file)
        if not files_by_time:
            return
        times = [time for _, time in files_by_time]
        snapshot = open_snapshot()
        stored = snapshot.scan("steps").filter(
            pl.col("run_id").is_in({run for run, _ in files_by_time})
            & pl.col("started_at").is_between(min(times), max(times))
            & pl.col("started_at").is_in(times)
        )
        rows = collect_rows(stored.select("run_id", "started_at", "episode_id"))
        if rows.is_empty():
            return
        episodes = snapshot.scan("episodes").filter(pl.col("episode_id").is_in(rows["episode_id"].unique().to_list()))
        names = collect_rows(episodes.select("episode_id", "task_id", "source_uri"))
        files = {episode: _hash_file(task, uri) for episode, task, uri in names.iter_rows()}
        for run, time, episode in rows.iter_rows():
            files_by_time[run, time].add(files[episode])
        shared_times = {time for (_, time), sharing_files in files_by_time.items() if len(sharing_files) > 1}
        if not shared_times:
            return
        shared = stored.filter(pl.col("episode_id").is_in(list(files)) & pl.col("started_at").is_in(shared_times))
        for run, episode, is_copied, *fields, extra in collect_rows(shared.select(_SHARED)).iter_rows():
            step = StepRecord(state=None, action="", extra=as_object(msgspec.json.decode(extra or "{}")))
            step.started_at, step.prompt_tokens, step.completion_tokens = fields
            for _, keys in list_responses(EpisodeRecord(task_id="", steps=[step])):
                self.add(_hash_key(run, keys[0]), files[episode], is_own=not is_copied)


def _hash_file(task_id: str, source_uri: str | None) -> int:
    return ids.key_hash(task_id, PurePosixPath(source_uri or "").name)


def _hash_key(run_id: str | None, key: ResponseKey) -> int:
    return ids.bytes_hash(msgspec.json.encode((run_id, *key)))
