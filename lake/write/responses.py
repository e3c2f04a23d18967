"""Which episode owns a response that several files of a run hold: the first one that brought it to the lake.

`lake.formats.chat.sessions` states the rule and applies it inside a file. Here the records of a batch are compared with
each other and with the lake, before they are written. The lake is asked only for steps at the times of the batch's
steps, because copies keep their times. It is asked for their ids only if a step of another file has the same time. So
sessions without copies cost one narrow query per batch.

A file is known by its task and its name. All of its episodes count as one owner, because a branch of a session may
become another episode when the file grows.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePosixPath

import msgspec
import polars as pl

from lake import ids
from lake.formats.base.fields import as_object
from lake.formats.chat.sessions import ResponseKey, list_response_keys, mark_copied_steps
from lake.read.parquet import collect_rows
from lake.read.snapshot import Snapshot
from lake.records import EpisodeRecord, StepRecord

_Step = tuple[EpisodeRecord, int, list[ResponseKey]]


def mark_copies_of_others(records: Sequence[EpisodeRecord], open_snapshot: Callable[[], Snapshot]) -> None:
    """Mark the steps of a batch as copied context whose responses the lake, or earlier records, have from other files.

    Args:
        records: the records of sessions; their runs and files are set.
    """
    steps = list(_list_own_steps(records))
    if not steps:
        return
    owners = _find_owners(steps, open_snapshot())
    copied: dict[int, list[int]] = {}
    for record, index, keys in steps:
        file = _hash_file(record.task_id, record.source_uri)
        hashes = [_hash_key(record.run_id, key) for key in keys]
        if next((owners[key] for key in hashes if key in owners), file) == file:
            owners |= dict.fromkeys(hashes, file)
        else:
            copied.setdefault(id(record), []).append(index)
    for record in records:
        mark_copied_steps(record, copied.get(id(record), ()))


def list_owners(records: Iterable[EpisodeRecord]) -> dict[int, int]:
    """Return the responses that records own, as hashes, and the file of each."""
    return {
        _hash_key(record.run_id, key): _hash_file(record.task_id, record.source_uri)
        for record, _, keys in _list_own_steps(records)
        for key in keys
    }


def _list_own_steps(records: Iterable[EpisodeRecord]) -> Iterable[_Step]:
    for record in records:
        for index, step in enumerate(record.steps):
            if not step.is_copied_context and (keys := list_response_keys(step)):
                yield record, index, keys


def _find_owners(steps: Sequence[_Step], snapshot: Snapshot) -> dict[int, int]:
    """Return the responses at the times of some steps that the lake has from other files too, and the owner of each."""
    files_by_time: dict[object, set[int]] = {}
    for record, index, _ in steps:
        time = record.steps[index].started_at
        if time is not None:
            files_by_time.setdefault((record.run_id, time), set()).add(_hash_file(record.task_id, record.source_uri))
    times = [time for _, time in files_by_time]
    own = snapshot.scan("steps").filter(
        pl.col("run_id").is_in({record.run_id for record, _, _ in steps})
        & pl.col("started_at").is_between(min(times), max(times))
        & pl.col("started_at").is_in(times)
        & ~pl.col("is_copied_context")
    )
    rows = collect_rows(own.select("run_id", "episode_id", "started_at"))
    if rows.is_empty():
        return {}
    episodes = snapshot.scan("episodes").filter(pl.col("episode_id").is_in(rows["episode_id"].unique().to_list()))
    names = collect_rows(episodes.select("episode_id", "task_id", "source_uri"))
    files = {episode: _hash_file(task, uri) for episode, task, uri in names.iter_rows()}
    for run, episode, time in rows.iter_rows():
        files_by_time[run, time].add(files[episode])
    shared = [time for (_, time), present in files_by_time.items() if len(present) > 1]
    owners: dict[int, int] = {}
    if shared:
        found = own.filter(pl.col("episode_id").is_in(list(files)) & pl.col("started_at").is_in(shared))
        for run, episode, time, extra in collect_rows(
            found.select("run_id", "episode_id", "started_at", "extra")
        ).iter_rows():
            step = StepRecord(state=None, action="", started_at=time, extra=as_object(msgspec.json.decode(extra or "{}")))
            for key in list_response_keys(step)[:1]:
                key_hash = _hash_key(run, key)
                owners[key_hash] = min(owners.get(key_hash, files[episode]), files[episode])
    return owners


def _hash_file(task_id: str, source_uri: str | None) -> int:
    return ids.key_hash(task_id, PurePosixPath(source_uri or "").name)


def _hash_key(run_id: str | None, key: ResponseKey) -> int:
    return ids.bytes_hash(msgspec.json.encode((run_id, *key)))
