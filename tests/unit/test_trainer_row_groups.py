"""Decoded row groups: flat arrays, aligned log-probabilities, a bounded cache that several threads share."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lake.tables import TOKENS
from trainer.row_groups import RowGroupCache, decode

NAMES = ["context_ids", "action_ids", "action_mask", "action_logprobs"]
SCHEMA = pa.schema([TOKENS.arrow().field(name) for name in NAMES])
ROWS = [
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
    group = decode(pa.Table.from_pylist(ROWS, schema=SCHEMA))
    assert group.context_starts.tolist() == [0, 2, 2, 3, 6]
    assert group.context_T.tolist() == [1, 2, 6, 7, 8, 9]
    assert group.action_starts.tolist() == [0, 1, 3, 3, 5]
    assert group.action_A.tolist() == [3, 4, 5, 1, 2]
    assert group.mask_A is not None
    assert group.mask_A.tolist() == [True, True, False, False, True]


def test_lengths_of_some_rows() -> None:
    context, action = decode(pa.Table.from_pylist(ROWS, schema=SCHEMA)).lengths(np.array([3, 0, 1]))
    assert (context.tolist(), action.tolist()) == ([3, 2, 0], [2, 1, 2])


def test_unknown_logprobs_are_nan_at_their_own_tokens() -> None:
    group = decode(pa.Table.from_pylist(ROWS, schema=SCHEMA))
    np.testing.assert_array_equal(group.logprobs_A, np.array([-1, np.nan, np.nan, -2, -3], np.float32))


def test_masks_and_logprobs_are_left_out_unless_asked_for(path: str) -> None:
    group = RowGroupCache([path], masks=False, logprobs=False, limit=0).get(0, 0)
    assert group.logprobs_A is None
    assert group.mask_A is None
    assert group.action_A.tolist() == [3, 4, 5]


def test_a_file_is_read_by_row_group(path: str) -> None:
    cache = RowGroupCache([path], masks=True, logprobs=True, limit=1 << 20)
    assert cache.group_starts(0).tolist() == [0, 3, 4]
    assert cache.get(0, 1).action_A.tolist() == [1, 2]


def test_what_is_kept_stays_below_the_limit(path: str) -> None:
    roomy, tight = (RowGroupCache([path], masks=True, logprobs=True, limit=limit) for limit in (1 << 20, 1))
    for cache in (roomy, tight):
        cache.get(0, 0)
        cache.get(0, 1)
    first = roomy.get(0, 0)
    assert roomy.get(0, 0) is first
    assert tight.get(0, 1) is tight.get(0, 1)
    before = tight.get(0, 0)
    tight.get(0, 1)
    assert tight.get(0, 0) is not before


def test_threads_share_one_decoding(path: str) -> None:
    cache = RowGroupCache([path], masks=True, logprobs=True, limit=1 << 20)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: cache.get(0, 0), range(64)))
    assert len({id(group) for group in found}) == 1


def test_a_file_that_went_away_is_an_error_for_everybody_who_waits(path: str) -> None:
    cache = RowGroupCache([path], masks=True, logprobs=True, limit=1 << 20)
    cache.group_starts(0)
    Path(path).unlink()
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            cache.get(0, 0)
