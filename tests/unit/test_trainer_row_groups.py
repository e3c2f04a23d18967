"""Decoded row groups: flat arrays, aligned log-probabilities, footers read once."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lake.errors import LakeAccessError
from lake.read.parquet import DataFile
from lake.storage.objects import Objects
from lake.tables import TOKENS
from testkit.training import token_episodes, token_lake
from trainer.data.batch import compute_starts, expand_ranges
from trainer.data.row_groups import RowGroupReader, decode_row_group

NAMES = ["context_ids", "action_ids", "action_mask", "action_logprobs"]
SCHEMA = pa.schema([TOKENS.arrow().field(name) for name in NAMES])
ROWS: list[dict[str, Any]] = [
    {"context_ids": [1, 2], "action_ids": [3], "action_mask": [True], "action_logprobs": [-1.0]},
    {"context_ids": [], "action_ids": [4, 5], "action_mask": [True, False], "action_logprobs": None},
    {"context_ids": [6], "action_ids": [], "action_mask": [], "action_logprobs": []},
    {"context_ids": [7, 8, 9], "action_ids": [1, 2], "action_mask": [False, True], "action_logprobs": [-2.0, -3.0]},
]


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "tokens.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS, schema=SCHEMA), file, row_group_size=3)
    return str(file)


def test_lists_become_flat_arrays_with_starts() -> None:
    group = decode_row_group(pa.Table.from_pylist(ROWS, schema=SCHEMA))
    assert group.context_starts.tolist() == [0, 2, 2, 3, 6]
    assert group.context_C.tolist() == [1, 2, 6, 7, 8, 9]
    assert group.action_starts.tolist() == [0, 1, 3, 3, 5]
    assert group.action_A.tolist() == [3, 4, 5, 1, 2]
    assert group.mask_A is not None
    assert group.mask_A.tolist() == [True, True, False, False, True]


def test_lengths_of_some_rows() -> None:
    context, action = decode_row_group(pa.Table.from_pylist(ROWS, schema=SCHEMA)).count_tokens(np.array([3, 0, 1]))
    assert (context.tolist(), action.tolist()) == ([3, 2, 0], [2, 1, 2])


def test_unknown_logprobs_are_nan_at_their_own_tokens() -> None:
    group = decode_row_group(pa.Table.from_pylist(ROWS, schema=SCHEMA))
    np.testing.assert_array_equal(group.logprobs_A, np.array([-1, np.nan, np.nan, -2, -3], np.float32))


def reader(*paths: str, masks: bool = True, logprobs: bool = True) -> RowGroupReader:
    files = [DataFile(path, rows=4, bytes=Path(path).stat().st_size, dead=frozenset()) for path in paths]
    return RowGroupReader(files, Objects(Path(paths[0]).parent), masks=masks, logprobs=logprobs)


def test_masks_and_logprobs_are_left_out_unless_asked_for(path: str) -> None:
    plain = reader(path, masks=False, logprobs=False)
    group = plain.read(0, 0)
    assert group.logprobs_A is None
    assert group.mask_A is None
    assert group.action_A.tolist() == [3, 4, 5]
    assert (plain.bytes_per_action, reader(path).bytes_per_action) == (4, 9)


def test_a_file_is_read_by_row_group(path: str) -> None:
    row_groups = reader(path)
    assert row_groups.read_group_starts(0).tolist() == [0, 3, 4]
    assert row_groups.read(0, 1).action_A.tolist() == [1, 2]


def test_a_footer_is_read_once_by_however_many_threads(path: str) -> None:
    shared = reader(path)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: shared.read(0, 0), range(32)))
    first = shared.read_metadata(0)
    Path(path).unlink()
    assert shared.read_metadata(0) is first


def test_a_file_that_went_away_is_an_error(path: str) -> None:
    missing_file = reader(path)
    Path(path).unlink()
    with pytest.raises(LakeAccessError, match="no such file"):
        missing_file.read_group_starts(0)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5)), max_size=8))
def test_ranges_are_the_numbers_of_each_range(spans: list[tuple[int, int]]) -> None:
    firsts, counts = (np.array([span[i] for span in spans], np.int64) for i in (0, 1))
    assert expand_ranges(firsts, counts).tolist() == [n for first, count in spans for n in range(first, first + count)]
    assert compute_starts(counts).tolist() == [sum(counts[:n]) for n in range(len(spans) + 1)]


def test_decoding_imports_no_pandas(path: str) -> None:
    """It takes longer to import than ten row groups to decode."""
    code = f"""
import sys
from trainer.data.row_groups import decode_row_group
import pyarrow.parquet as pq
with pq.ParquetFile({path!r}) as parquet:
    decode_row_group(parquet.read_row_group(0, columns={NAMES!r}))
sys.exit("pandas" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_bit_that_flipped_in_a_page_is_refused_and_never_trained_on(tmp_path: Path) -> None:
    lk = token_lake(tmp_path / "lake", token_episodes())
    path = Path(lk.snapshot().files("tokens")[0].path)
    content, expected = path.read_bytes(), reader(str(path)).read(0, 0)
    group = pq.ParquetFile(path).metadata.row_group(0)
    chunks = [group.column(n) for n in range(group.num_columns)]
    n_checked = 0
    for chunk in (column for column in chunks if column.path_in_schema.partition(".")[0] in NAMES):
        end = chunk.data_page_offset + chunk.total_compressed_size
        for position in range(end - chunk.total_compressed_size // 2, end, 3):
            data = bytearray(content)
            data[position] ^= 1 << position % 8
            path.write_bytes(data)
            try:
                actual = reader(str(path)).read(0, 0)
            except LakeAccessError:
                n_checked += 1
                continue
            for name in actual.__slots__:
                np.testing.assert_array_equal(getattr(actual, name), getattr(expected, name))
    assert n_checked > 20
