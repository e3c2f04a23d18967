"""Row groups of the `tokens` table as flat arrays, read from a folder or a bucket by our threads.

pyarrow's dataset scanners abort at interpreter exit when torch is loaded (apache/arrow #45214).
`ParquetFile.read_row_group` does not. It also releases the GIL while it decodes, and lets the plan decide what is read.
One decoded row group is a handful of flat arrays, so an episode's tokens are slices.

DLPack exposes Arrow's memory. `to_numpy` would import pandas on first use, which takes longer than decoding ten row
groups.

Axes: `_R` rows of the row group, `_C` its context tokens, `_A` its action tokens.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from lake.read.parquet import DataFile, damaged_file_error
from lake.storage.local_cache import cache_reads
from lake.storage.objects import Objects
from trainer.data.batch import Ints, compute_starts


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Flat token arrays of some rows. Row r has the context tokens [context_starts[r], context_starts[r + 1])."""

    context_starts: Ints
    """int64 [R + 1]."""
    context_C: npt.NDArray[np.int32]
    """Context token ids of all rows, end to end."""
    action_starts: Ints
    """int64 [R + 1]; shared by the three arrays below."""
    action_A: npt.NDArray[np.int32]
    """Action token ids."""
    mask_A: npt.NDArray[np.bool_] | None
    """True where the policy sampled the token; None if not requested."""
    logprobs_A: npt.NDArray[np.float32] | None
    """Behaviour log-probabilities, NaN where the row has none; None if not requested."""

    def count_tokens(self, rows: Ints) -> tuple[Ints, Ints]:
        """Return the numbers of context and of action tokens of some rows."""
        context = self.context_starts[rows + 1] - self.context_starts[rows]
        return context, self.action_starts[rows + 1] - self.action_starts[rows]


class RowGroupReader:
    """Reads row groups of a list of files; safe to use from several threads.

    Args:
        disk_bytes: size of the disk cache for files in a bucket; 0 caches nothing.
    """

    def __init__(
        self, files: Sequence[DataFile], objects: Objects, *, masks: bool, logprobs: bool, disk_bytes: int = 0
    ) -> None:
        self._paths = [file.path for file in files]
        self._bucket = objects.filesystem({file.path: file.bytes for file in files})
        if self._bucket is not None and disk_bytes:
            self._bucket.read = cache_reads(self._bucket.read, disk_bytes, self._paths)
        self._columns = ["context_ids", "action_ids"] + ["action_mask"] * masks + ["action_logprobs"] * logprobs
        self.masks, self.logprobs = masks, logprobs
        self.bytes_per_action = 4 + masks + 4 * logprobs
        """Memory of an action token."""
        self._lock = threading.Lock()
        self._metadata: dict[int, pq.FileMetaData] = {}

    def read_group_starts(self, file: int) -> Ints:
        """Return the first row of each row group of a file, and the end of the last one, int64."""
        metadata = self.read_metadata(file)
        return compute_starts([metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)])

    def read(self, file: int, group: int) -> RowGroup:
        """Decode a row group; raise LakeAccessError if the file is missing or damaged."""
        with self._open(file, self.read_metadata(file)) as parquet:
            return decode_row_group(parquet.read_row_group(group, columns=self._columns, use_threads=False))

    def read_metadata(self, file: int) -> pq.FileMetaData:
        """Return a file's footer; reads it once."""
        with self._lock:
            metadata = self._metadata.get(file)
        if metadata is None:
            with self._open(file, None) as parquet:
                metadata = parquet.metadata
            with self._lock:
                self._metadata[file] = metadata
        return metadata

    @contextmanager
    def _open(self, file: int, metadata: pq.FileMetaData | None) -> Iterator[pq.ParquetFile]:
        """Open a file; errors name its table and path."""
        path = self._paths[file]
        is_remote = self._bucket is not None
        try:
            stored = path if self._bucket is None else self._bucket.open(path)
            # Buffering requests a row group's columns, which are neighbours in the file, together.
            with pq.ParquetFile(
                stored, metadata=metadata, pre_buffer=is_remote, page_checksum_verification=True
            ) as parquet:
                yield parquet
        except (OSError, pa.ArrowException) as error:
            raise damaged_file_error(path, error) from error


def decode_row_group(table: pa.Table) -> RowGroup:
    """Return flat arrays of a row group's context_ids and action_ids and, if present, action_mask and action_logprobs.

    Arrow's memory is not copied where its layout fits.
    """
    context, action = _combine_chunks(table, "context_ids"), _combine_chunks(table, "action_ids")
    action_starts = _get_memory(action.offsets).astype(np.int64)
    mask_A = logprobs_A = None
    if "action_mask" in table.column_names:
        mask_A = _unpack_bits(_combine_chunks(table, "action_mask").values)
    if "action_logprobs" in table.column_names:
        logprobs_A = _align_logprobs(_combine_chunks(table, "action_logprobs"), action_starts)
    return RowGroup(
        context_starts=_get_memory(context.offsets).astype(np.int64),
        context_C=_get_memory(context.values),
        action_starts=action_starts,
        action_A=_get_memory(action.values),
        mask_A=mask_A,
        logprobs_A=logprobs_A,
    )


def _combine_chunks(table: pa.Table, name: str) -> pa.ListArray:
    column = table.column(name)
    if column.num_chunks == 1:
        return column.chunk(0)  # combining would copy it
    array = column.combine_chunks()
    return array.chunk(0) if isinstance(array, pa.ChunkedArray) else array


def _unpack_bits(flags: pa.BooleanArray) -> npt.NDArray[np.bool_]:
    return _get_memory(flags.cast(pa.uint8())).view(np.bool_)


def _get_memory(array: pa.Array) -> npt.NDArray[Any]:
    """Return the memory of an array without NULLs; no copy."""
    return np.from_dlpack(array)


def _align_logprobs(logprobs: pa.ListArray, action_starts: Ints) -> npt.NDArray[np.float32]:
    """Return log-probabilities at the positions of their actions, NaN for rows without."""
    values = _get_memory(logprobs.values)
    if logprobs.null_count == 0:
        return values
    present_R = _unpack_bits(logprobs.is_valid())
    aligned_T = np.full(action_starts[-1], np.nan, np.float32)
    aligned_T[np.repeat(present_R, np.diff(action_starts))] = values
    return aligned_T
