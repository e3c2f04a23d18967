"""Row groups of the `tokens` table as flat arrays, read from a folder or a bucket by our own threads.

pyarrow's dataset scanners abort at interpreter exit when torch is loaded (apache/arrow #45214);
`ParquetFile.read_row_group` does not, releases the GIL while it decodes, and lets the plan decide what is read. One
decoded row group is a handful of flat arrays, so that an episode's tokens are slices.

Arrow's memory is taken over through DLPack: `to_numpy` imports pandas on first use, which takes longer than decoding
ten row groups.

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

from lake.read.parquet import damaged
from lake.read.visibility import DataFile
from lake.storage.local_cache import through_disk
from lake.storage.objects import Objects
from trainer.data.stream.batch import Ints, starts


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
    """True where the policy sampled the token; None unless asked for."""
    logprobs_A: npt.NDArray[np.float32] | None
    """Behaviour log-probabilities, NaN where the row has none; None unless asked for."""

    def lengths(self, rows: Ints) -> tuple[Ints, Ints]:
        """Numbers of context and of action tokens of some rows."""
        context = self.context_starts[rows + 1] - self.context_starts[rows]
        return context, self.action_starts[rows + 1] - self.action_starts[rows]


class RowGroupReader:
    """Reads row groups of a list of files; safe to use from several threads.

    Args:
        disk_bytes: what this machine may keep on its disk of files in a bucket; 0 keeps nothing.
    """

    def __init__(
        self, files: Sequence[DataFile], objects: Objects, *, masks: bool, logprobs: bool, disk_bytes: int = 0
    ) -> None:
        self._paths = [file.path for file in files]
        self._bucket = objects.filesystem({file.path: file.bytes for file in files})
        if self._bucket is not None and disk_bytes:
            self._bucket.read = through_disk(self._bucket.read, disk_bytes, self._paths)
        self._columns = ["context_ids", "action_ids"] + ["action_mask"] * masks + ["action_logprobs"] * logprobs
        self.masks, self.logprobs = masks, logprobs
        self.bytes_per_action = 4 + masks + 4 * logprobs
        """Memory of an action token."""
        self._lock = threading.Lock()
        self._metadata: dict[int, pq.FileMetaData] = {}

    def group_starts(self, file: int) -> Ints:
        """First row of each row group of a file, and the end of the last, int64."""
        metadata = self.metadata(file)
        return starts([metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)])

    def read(self, file: int, group: int) -> RowGroup:
        """Decode a row group; a LakeAccessError where the file is missing or damaged."""
        with self._opened(file, self.metadata(file)) as parquet:
            return decode(parquet.read_row_group(group, columns=self._columns, use_threads=False))

    def metadata(self, file: int) -> pq.FileMetaData:
        """A file's footer, read once."""
        with self._lock:
            known = self._metadata.get(file)
        if known is None:
            with self._opened(file, None) as parquet:
                known = parquet.metadata
            with self._lock:
                self._metadata[file] = known
        return known

    @contextmanager
    def _opened(self, file: int, metadata: pq.FileMetaData | None) -> Iterator[pq.ParquetFile]:
        """A file to read from; what goes wrong is told with its table and its name."""
        try:
            with self._open(file, metadata) as parquet:
                yield parquet
        except (OSError, pa.ArrowException) as error:
            raise damaged(self._paths[file], error) from error

    def _open(self, file: int, metadata: pq.FileMetaData | None) -> pq.ParquetFile:
        path = self._paths[file]
        if self._bucket is None:
            return pq.ParquetFile(path, metadata=metadata, page_checksum_verification=True)
        # Buffering asks for a row group's columns, which lie side by side, in one request.
        opened = self._bucket.open(path)
        return pq.ParquetFile(opened, metadata=metadata, pre_buffer=True, page_checksum_verification=True)


def decode(table: pa.Table) -> RowGroup:
    """Flat arrays of a row group's context_ids and action_ids and, if there, action_mask and action_logprobs.

    There are no copies where Arrow's memory will do.
    """
    context, action = _combined(table, "context_ids"), _combined(table, "action_ids")
    action_starts = _offsets(action)
    mask_A = logprobs_A = None
    if "action_mask" in table.column_names:
        mask_A = _unpacked(_combined(table, "action_mask").values)
    if "action_logprobs" in table.column_names:
        logprobs_A = _aligned(_combined(table, "action_logprobs"), action_starts)
    return RowGroup(
        context_starts=_offsets(context),
        context_C=_numbers(context.values),
        action_starts=action_starts,
        action_A=_numbers(action.values),
        mask_A=mask_A,
        logprobs_A=logprobs_A,
    )


def _combined(table: pa.Table, name: str) -> pa.ListArray:
    column = table.column(name)
    if column.num_chunks == 1:
        return column.chunk(0)  # as it is: combining would copy it
    array = column.combine_chunks()
    return array.chunk(0) if isinstance(array, pa.ChunkedArray) else array


def _offsets(array: pa.ListArray) -> Ints:
    return _numbers(array.offsets).astype(np.int64)


def _unpacked(flags: pa.BooleanArray) -> npt.NDArray[np.bool_]:
    return _numbers(flags.cast(pa.uint8())).view(np.bool_)


def _numbers(array: pa.Array) -> npt.NDArray[Any]:
    """The memory of an array without NULLs; no copy."""
    return np.from_dlpack(array)


def _aligned(logprobs: pa.ListArray, action_starts: Ints) -> npt.NDArray[np.float32]:
    """Log-probabilities at the positions of their actions, NaN for rows without."""
    values = _numbers(logprobs.values)
    if logprobs.null_count == 0:
        return values
    present_R = _unpacked(logprobs.is_valid())
    aligned_T = np.full(action_starts[-1], np.nan, np.float32)
    aligned_T[np.repeat(present_R, np.diff(action_starts))] = values
    return aligned_T
