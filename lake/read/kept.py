"""Narrow columns of tables in memory, for those who ask many questions of one lake while it grows.

Data files never change, so what was read of one serves every snapshot that has it: a snapshot that is a commit younger
reads one file. A `Session` that is given these takes a table from here where its query needs no other column, and
leaves out dead rows and retracted episodes as it does with files.

What is too wide for that is held as what it comes to (`SUMMED`): a view with a row for each episode.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from lake.read.parquet import collected, scan_pruned
from lake.read.visibility import DataFile
from lake.storage.objects import Objects
from lake.tables import TABLES

COLUMNS = {
    "episodes": (
        *("episode_id", "group_id", "run_id", "task_id", "rollout_index", "attempt", "write_id", "collection_round"),
        *("environment", "agent_id", "policy", "policy_version", "status", "stop_reason", "env_return", "num_steps"),
        *("completion_tokens", "seed", "expected_group_size", "parent_episode_id", "parent_step_index", "relation"),
    ),
    "scores": ("episode_id", "step_index", "run_id", "job_id", "scorer", "scorer_version", "value"),
    "batches": ("job_id", "attempt", "optimizer_step", "episode_id", "first_step", "last_step", "action_tokens"),
    "metrics": ("job_id", "attempt", "step", "name", "value"),
    "jobs": (
        *("job_id", "series_id", "event", "kind", "at", "sequence", "run_id", "input_fingerprint"),
        *("rows_in", "rows_out", "rows_dropped", "seconds", "parameters", "input_snapshot", "counts", "error"),
    ),
}
"""What is held, by table."""
SUMMED = {"episode_steps": "steps"}
"""Views with a row for each episode of a table that are held whole, and that table."""
_MOST_ROWS = 4_000_000
"""Rows of a table, beyond which none of it is held: a row takes 20 to 40 bytes."""
_MOST_JOBS = 20_000
"""The same of `jobs`, where texts make a row one or two kilobytes."""
_MOST_SUMMED = 25_000_000
"""Rows of a table, beyond which nothing is held of what they come to."""
_PORTION = 100_000
"""Rows that are read, or added up, at a time."""
_MOST_BLOCKS = 8
_MOST_WORDS = 1 << 15
"""Distinct values that a column of codes may have: a code takes two bytes."""

Key = tuple[str, frozenset[int]]


@dataclass(frozen=True, slots=True)
class _Block:
    """The visible rows of some files of a table."""

    keys: frozenset[Key]
    rows: pa.Table


class Kept:
    """What is held of one lake; threads may share it, and wait while one of them reads what is missing."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._blocks: dict[str, list[_Block]] = defaultdict(list)
        self._locks: dict[str, threading.Lock] = defaultdict(threading.Lock)

    def columns(self, name: str) -> frozenset[str]:
        """What may be held of a table."""
        return frozenset(COLUMNS.get(name, ()))

    def summed(self, view: str) -> str | None:
        """The table of which a view is held; None of any other view."""
        return SUMMED.get(view)

    def rows(self, name: str, files: Sequence[DataFile]) -> tuple[pa.Table, ...]:
        """The columns `COLUMNS` of the visible rows of files of a table, in a few parts; none if they are not held.

        A column may be coded in one part and plain in another, which DuckDB does not mind.

        Raises:
            LakeAccessError: a file is gone or damaged.
        """
        if name not in COLUMNS or not _may_hold(files, _MOST_JOBS if name == "jobs" else _MOST_ROWS):
            return ()
        return self._parts(name, files, lambda missing: _read(name, missing, self._objects))

    def sums(
        self, view: str, files: Sequence[DataFile], add_up: Callable[[Sequence[DataFile]], pa.Table]
    ) -> tuple[pa.Table, ...]:
        """As `rows`, of a view in `SUMMED`.

        Args:
            files: of its table.
            add_up: the view over some of them alone.
        """
        if not _may_hold(files, _MOST_SUMMED):
            return ()
        return self._parts(view, files, lambda missing: _in_portions(missing, add_up))

    def _parts(
        self, name: str, files: Sequence[DataFile], read: Callable[[Sequence[DataFile]], pa.Table]
    ) -> tuple[pa.Table, ...]:
        with self._locks[name]:
            wanted = {(file.path, file.dead): file for file in files}
            used = []
            for block in sorted(self._blocks[name], key=lambda block: -len(block.keys)):
                if wanted.keys() >= block.keys:
                    used.append(block)
                    for key in block.keys:
                        del wanted[key]
            if wanted:
                new = _Block(frozenset(wanted), read(list(wanted.values())))
                if name in SUMMED and any(_share(new.rows, block.rows) for block in used):
                    everything = {(file.path, file.dead): file for file in files}
                    used, new = [], _Block(frozenset(everything), read(files))
                used.append(new)
            if len(used) > _MOST_BLOCKS:
                first, *others = sorted(used, key=lambda block: -block.rows.num_rows)
                used = [first, _joined(others)]
            # What this state does not have is let go: it may have been forgotten.
            self._blocks[name] = used
            return tuple(block.rows for block in used)


def _may_hold(files: Sequence[DataFile], most: int) -> bool:
    """Whether files are of one lake, and not too many."""
    return all(file.place == 0 for file in files) and 0 < sum(file.rows for file in files) <= most


def _share(one: pa.Table, other: pa.Table) -> bool:
    """Whether there is an episode in both: one whose rows are in several files, and must be added up together."""
    return bool(pc.any(pc.is_in(one["episode_id"], other["episode_id"])).as_py())


def _portions(files: Sequence[DataFile]) -> list[list[DataFile]]:
    """Files, so many at a time as are read at once: whole tables as they are read would take hundreds of megabytes."""
    portions: list[list[DataFile]] = [[]]
    for file in files:
        if portions[-1] and sum(one.rows for one in portions[-1]) + file.rows > _PORTION:
            portions.append([])
        portions[-1].append(file)
    return portions


def _in_portions(files: Sequence[DataFile], add_up: Callable[[Sequence[DataFile]], pa.Table]) -> pa.Table:
    """A view over files, coded."""
    portions = _portions(files)
    found = _together([_coded(add_up(portion)) for portion in portions])
    if len(portions) > 1 and pc.count_distinct(_plain(found["episode_id"].chunk(0))).as_py() < found.num_rows:
        return _coded(add_up(files))
    return found


def _read(name: str, files: Sequence[DataFile], objects: Objects) -> pa.Table:
    def read(portion: Sequence[DataFile]) -> pa.Table:
        frame = collected(scan_pruned(portion, TABLES[name], objects.polars_options).select(COLUMNS[name]))
        return _coded(frame.to_arrow(compat_level=pl.CompatLevel.oldest()))

    return _together([read(portion) for portion in _portions(files)])


def _joined(blocks: Sequence[_Block]) -> _Block:
    keys = frozenset().union(*(block.keys for block in blocks))
    return _Block(keys, _together([block.rows for block in blocks]))


def _together(parts: Sequence[pa.Table]) -> pa.Table:
    """Tables of `_coded` as one."""
    if len(parts) == 1:
        return parts[0]
    columns = {}
    for name in parts[0].column_names:
        chunks = [chunk for part in parts for chunk in part[name].chunks]
        if all(pa.types.is_dictionary(chunk.type) for chunk in chunks):
            columns[name] = _unified(chunks)
        else:
            plain = [_plain(chunk) for chunk in chunks]
            columns[name] = _codes(pa.chunked_array(plain, plain[0].type).combine_chunks())
    return pa.table(columns)


def _unified(chunks: Sequence[pa.DictionaryArray]) -> pa.Array:
    """Codes of several dictionaries as codes of one."""
    words = _encoded(pa.concat_arrays([chunk.dictionary for chunk in chunks]))
    codes, first = [], 0
    for chunk in chunks:
        codes.append(words.indices.take(pc.add(chunk.indices.cast(pa.int32()), first)))
        first += len(chunk.dictionary)
    return _narrow(pa.DictionaryArray.from_arrays(pa.concat_arrays(codes), words.dictionary))


def _plain(chunk: pa.Array) -> pa.Array:
    return chunk.dictionary_decode() if pa.types.is_dictionary(chunk.type) else chunk


def _coded(table: pa.Table) -> pa.Table:
    """Columns that say the same few things again and again, as codes."""
    return pa.table({name: _codes(table[name].combine_chunks()) for name in table.column_names})


def _codes(whole: pa.Array) -> pa.Array:
    return whole if len(_encoded(whole.slice(0, 1000)).dictionary) >= 900 else _narrow(_encoded(whole))


def _encoded(whole: pa.Array) -> pa.DictionaryArray:
    """Values as codes of 32 bits; lists as wholes, as DuckDB fails at empty lists over coded values."""
    if not pa.types.is_nested(whole.type):
        return whole.dictionary_encode()
    rows = pl.DataFrame({"list": pl.Series(whole)}).with_row_index()
    groups = rows.group_by("list", maintain_order=True).agg("index")
    codes = groups.select(pl.int_range(pl.len(), dtype=pl.Int32).alias("code"), "index").explode("index").sort("index")
    lists = groups["list"].to_arrow(compat_level=pl.CompatLevel.oldest()).cast(whole.type)
    return pa.DictionaryArray.from_arrays(codes["code"].to_arrow(), lists)


def _narrow(coded: pa.DictionaryArray) -> pa.Array:
    """Codes in as few bytes as will do; the values themselves if they are too many for codes."""
    if len(coded.dictionary) >= _MOST_WORDS:
        return coded.dictionary_decode()
    kind = pa.int8() if len(coded.dictionary) < 1 << 7 else pa.int16()
    return pa.DictionaryArray.from_arrays(coded.indices.cast(kind), coded.dictionary)
