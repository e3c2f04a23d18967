"""Narrow columns of tables in memory, for those who ask many questions of one lake while it grows.

Data files never change, so what was read of one serves every snapshot that has it: a snapshot that is a commit younger
reads one file. A `Session` that is given these takes a table from here where its query needs no other column, and
leaves out dead rows and retracted episodes as it does with files.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl
import pyarrow as pa

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
}
"""What is held, by table."""
_MOST_ROWS = 4_000_000
"""Rows of a table, beyond which none of it is held: a row takes 20 to 40 bytes."""
_MOST_BLOCKS = 8
_MOST_WORDS = 1 << 15
"""Distinct values that a column of codes may have: a code takes two bytes."""

Key = tuple[str, frozenset[int]]


@dataclass(frozen=True, slots=True)
class _Block:
    """The visible rows of some files of a table."""

    name: str
    keys: frozenset[Key]
    rows: pa.Table


class Kept:
    """What is held of one lake; threads may share it, and wait while one of them reads what is missing."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._blocks: list[_Block] = []
        self._lock = threading.Lock()

    def columns(self, name: str) -> frozenset[str]:
        """What may be held of a table."""
        return frozenset(COLUMNS.get(name, ()))

    def rows(self, name: str, files: Sequence[DataFile]) -> tuple[pa.Table, ...]:
        """The columns `COLUMNS` of the visible rows of files of a table, in a few parts; none if they are not held.

        A column may be coded in one part and plain in another, which DuckDB does not mind.

        Raises:
            LakeAccessError: a file is gone or damaged.
        """
        is_of_one_lake = all(file.place == 0 for file in files)
        if name not in COLUMNS or not is_of_one_lake or not 0 < sum(file.rows for file in files) <= _MOST_ROWS:
            return ()
        with self._lock:
            wanted = {(file.path, file.dead): file for file in files}
            used = []
            for block in sorted(self._blocks, key=lambda block: -len(block.keys)):
                if block.name == name and wanted.keys() >= block.keys:
                    used.append(block)
                    for key in block.keys:
                        del wanted[key]
            if wanted:
                used.append(_Block(name, frozenset(wanted), _read(name, list(wanted.values()), self._objects)))
            if len(used) > _MOST_BLOCKS:
                first, *others = sorted(used, key=lambda block: -block.rows.num_rows)
                used = [first, _joined(others)]
            # What this state does not have is let go: it may have been forgotten.
            self._blocks = [*used, *(block for block in self._blocks if block.name != name)]
            return tuple(block.rows for block in used)


def _read(name: str, files: Sequence[DataFile], objects: Objects) -> pa.Table:
    frame = collected(scan_pruned(files, TABLES[name], objects.polars_options).select(COLUMNS[name]))
    return _coded(frame.to_arrow(compat_level=pl.CompatLevel.oldest()))


def _joined(blocks: Sequence[_Block]) -> _Block:
    columns = {}
    for name in blocks[0].rows.column_names:
        parts = [block.rows[name] for block in blocks]
        plain = [part.cast(part.type.value_type) if pa.types.is_dictionary(part.type) else part for part in parts]
        columns[name] = pa.chunked_array([chunk for part in plain for chunk in part.chunks], plain[0].type)
    keys = frozenset().union(*(block.keys for block in blocks))
    return _Block(blocks[0].name, keys, _coded(pa.table(columns)))


def _coded(table: pa.Table) -> pa.Table:
    """Columns that say the same few things again and again, as codes."""
    columns = {}
    for name in table.column_names:
        whole = table[name].combine_chunks()
        coded = whole.dictionary_encode() if len(whole.slice(0, 1000).unique()) < 900 else whole
        if coded is not whole and len(coded.dictionary) < _MOST_WORDS:
            kind = pa.int8() if len(coded.dictionary) < 1 << 7 else pa.int16()
            whole = pa.DictionaryArray.from_arrays(coded.indices.cast(kind), coded.dictionary)
        columns[name] = whole
    return pa.table(columns)
