"""Decoded row groups of the `tokens` table: read by our own threads, kept in a bounded cache.

pyarrow's dataset scanners abort at interpreter exit when torch is loaded (apache/arrow #45214);
`ParquetFile.read_row_group` does not, releases the GIL while it decodes, and lets the plan decide what is read. One
decoded row group is a handful of flat arrays, so that an episode's tokens are slices.

Axes: `_R` rows of the row group, `_T` its context tokens, `_A` its action tokens.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Flat token arrays of one row group. Row r has the context tokens [context_starts[r], context_starts[r + 1])."""

    context_starts: npt.NDArray[np.int64]
    """int64 [R + 1]."""
    context_T: npt.NDArray[np.int32]
    """Context token ids of all rows, end to end."""
    action_starts: npt.NDArray[np.int64]
    """int64 [R + 1]; shared by the three arrays below."""
    action_A: npt.NDArray[np.int32]
    """Action token ids."""
    mask_A: npt.NDArray[np.bool_] | None
    """True where the policy sampled the token; None unless asked for."""
    logprobs_A: npt.NDArray[np.float32] | None
    """Behaviour log-probabilities, NaN where the row has none; None unless asked for."""

    @property
    def nbytes(self) -> int:
        """Memory held."""
        arrays = (getattr(self, field.name) for field in fields(self))
        return sum(array.nbytes for array in arrays if array is not None)

    def lengths(self, rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Numbers of context and of action tokens of some rows."""
        context = self.context_starts[rows + 1] - self.context_starts[rows]
        return context, self.action_starts[rows + 1] - self.action_starts[rows]


class RowGroupCache:
    """Row groups of a list of files, decoded once and kept while there is room; safe to use from several threads.

    Args:
        paths: Parquet files of `tokens`.
        masks: also decode action masks.
        logprobs: also decode behaviour log-probabilities.
        limit: bytes kept; the row group in use is kept whatever its size.
    """

    def __init__(self, paths: Sequence[str], *, masks: bool, logprobs: bool, limit: int) -> None:
        self._paths = paths
        self._columns = ["context_ids", "action_ids"] + ["action_mask"] * masks + ["action_logprobs"] * logprobs
        self._limit = limit
        self._lock = threading.Lock()
        self._files: dict[int, pq.FileMetaData] = {}
        self._groups: OrderedDict[tuple[int, int], Future[RowGroup]] = OrderedDict()

    def group_starts(self, file: int) -> npt.NDArray[np.int64]:
        """First row of each row group of a file, and the end of the last, int64."""
        metadata = self._metadata(file)
        rows = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        return np.concatenate([[0], np.cumsum(rows)]).astype(np.int64)

    def get(self, file: int, group: int) -> RowGroup:
        """A row group; the first thread to ask decodes it, others wait for that."""
        key = (file, group)
        with self._lock:
            future = self._groups.get(key)
            mine = future is None
            if future is None:
                future = self._groups[key] = Future()
            self._groups.move_to_end(key)
        if mine:
            self._decode_into(future, key)
        return future.result()

    def _decode_into(self, future: "Future[RowGroup]", key: tuple[int, int]) -> None:
        file, group = key
        try:
            with pq.ParquetFile(self._paths[file], metadata=self._metadata(file)) as parquet:
                decoded = decode(parquet.read_row_group(group, columns=self._columns, use_threads=False))
        except (OSError, pa.ArrowException) as error:
            with self._lock:
                self._groups.pop(key, None)
            future.set_exception(error)
            return
        future.set_result(decoded)
        self._evict()

    def _evict(self) -> None:
        """Forget the least recently used row groups above the limit."""
        with self._lock:
            ready = [(key, future.result().nbytes) for key, future in self._groups.items() if future.done()]
            total = sum(size for _, size in ready)
            for key, size in ready[:-1]:
                if total <= self._limit:
                    break
                del self._groups[key]
                total -= size

    def _metadata(self, file: int) -> pq.FileMetaData:
        with self._lock:
            if file not in self._files:
                self._files[file] = pq.read_metadata(self._paths[file])
            return self._files[file]


def decode(table: pa.Table) -> RowGroup:
    """Flat arrays of a row group.

    Args:
        table: context_ids and action_ids of its rows and, if wanted, action_mask and action_logprobs.

    Returns:
        The arrays; no copies where Arrow's memory will do.
    """
    context, action = _combined(table, "context_ids"), _combined(table, "action_ids")
    action_starts = _offsets(action)
    mask_A = logprobs_A = None
    if "action_mask" in table.column_names:
        mask_A = _combined(table, "action_mask").values.to_numpy(zero_copy_only=False)
    if "action_logprobs" in table.column_names:
        logprobs_A = _aligned(_combined(table, "action_logprobs"), action_starts)
    return RowGroup(
        context_starts=_offsets(context),
        context_T=context.values.to_numpy(),
        action_starts=action_starts,
        action_A=action.values.to_numpy(),
        mask_A=mask_A,
        logprobs_A=logprobs_A,
    )


def _combined(table: pa.Table, name: str) -> pa.ListArray:
    column = table.column(name)
    if column.num_chunks == 1:
        return column.chunk(0)  # as it is: combining would copy it
    array = column.combine_chunks()
    return array.chunk(0) if isinstance(array, pa.ChunkedArray) else array


def _offsets(array: pa.ListArray) -> npt.NDArray[np.int64]:
    starts: npt.NDArray[np.int64] = array.offsets.to_numpy().astype(np.int64)
    return starts


def _aligned(logprobs: pa.ListArray, action_starts: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Log-probabilities at the positions of their actions, NaN for rows without."""
    values: npt.NDArray[np.float32] = logprobs.values.to_numpy()
    if logprobs.null_count == 0:
        return values
    present_R = logprobs.is_valid().to_numpy(zero_copy_only=False)
    aligned_T = np.full(action_starts[-1], np.nan, np.float32)
    aligned_T[np.repeat(present_R, np.diff(action_starts))] = values
    return aligned_T
