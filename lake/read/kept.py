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
}
"""What is held, by table."""
SUMMED = {"episode_steps": "steps"}
"""Views with a row for each episode of a table that are held whole, and that table."""
_MOST_ROWS = 4_000_000
"""Rows of a table, beyond which none of it is held: a row takes 20 to 40 bytes."""
_MOST_SUMMED = 25_000_000
"""Rows of a table, beyond which nothing is held of what they come to."""
_PORTION = 250_000
"""Rows that are added up at a time."""
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
        if name not in COLUMNS or not _may_hold(files, _MOST_ROWS):
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
        return self._parts(view, files, lambda missing: _coded(_in_portions(missing, add_up)))

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


def _in_portions(files: Sequence[DataFile], add_up: Callable[[Sequence[DataFile]], pa.Table]) -> pa.Table:
    """A view over files, some after the others, as whole tables would take hundreds of megabytes."""
    portions: list[list[DataFile]] = [[]]
    for file in files:
        if portions[-1] and sum(one.rows for one in portions[-1]) + file.rows > _PORTION:
            portions.append([])
        portions[-1].append(file)
    found = pa.concat_tables([add_up(portion) for portion in portions])
    if len(portions) > 1 and pc.count_distinct(found["episode_id"]).as_py() < found.num_rows:
        return add_up(files)
    return found


def _read(name: str, files: Sequence[DataFile], objects: Objects) -> pa.Table:
    frame = collected(scan_pruned(files, TABLES[name], objects.polars_options).select(COLUMNS[name]))
    return _coded(frame.to_arrow(compat_level=pl.CompatLevel.oldest()))


def _joined(blocks: Sequence[_Block]) -> _Block:
    columns = {}
    for name in blocks[0].rows.column_names:
        chunks = [_plain(chunk) for block in blocks for chunk in block.rows[name].chunks]
        columns[name] = pa.chunked_array(chunks, chunks[0].type)
    keys = frozenset().union(*(block.keys for block in blocks))
    return _Block(keys, _coded(pa.table(columns)))


def _plain(chunk: pa.Array) -> pa.Array:
    return chunk.dictionary_decode() if pa.types.is_dictionary(chunk.type) else chunk


def _coded(table: pa.Table) -> pa.Table:
    """Columns that say the same few things again and again, as codes."""
    return pa.table({name: _codes(table[name].combine_chunks()) for name in table.column_names})


def _codes(whole: pa.Array) -> pa.Array:
    if pa.types.is_list(whole.type) or pa.types.is_large_list(whole.type):
        return _codes_of_lists(whole)
    coded = whole.dictionary_encode() if len(whole.slice(0, 1000).unique()) < 900 else whole
    if coded is whole or len(coded.dictionary) >= _MOST_WORDS:
        return whole
    kind = pa.int8() if len(coded.dictionary) < 1 << 7 else pa.int16()
    return pa.DictionaryArray.from_arrays(coded.indices.cast(kind), coded.dictionary)


def _codes_of_lists(whole: pa.Array) -> pa.Array:
    """A code for each list and none for what is in it: DuckDB fails at empty lists over coded values."""
    rows = pl.DataFrame({"list": pl.Series(whole)}).with_row_index()
    groups = rows.group_by("list", maintain_order=True).agg("index")
    if groups.height >= _MOST_WORDS:
        return whole
    codes = groups.select(pl.int_range(pl.len(), dtype=pl.Int16).alias("code"), "index").explode("index").sort("index")
    lists = groups["list"].to_arrow(compat_level=pl.CompatLevel.oldest()).cast(whole.type)
    return pa.DictionaryArray.from_arrays(codes["code"].to_arrow(), lists)
