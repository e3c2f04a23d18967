"""How many steps fit into a budget of memory.

What a step takes is known from measurement, texts aside, whose length is looked up in a sample of the lake.
"""

from collections.abc import Sequence

import polars as pl

from lake.errors import UsageError
from lake.reading import collected
from lake.snapshot import Snapshot
from lake.tables import TABLES

MEMORY_GB = 2.0
"""Default budget."""
_BYTES_PER_STEP = 400
"""Peak of a range in bytes per step, without texts: inputs, intermediate arrays, rows, and the encoded file."""
_COPIES_OF_TEXT = 3
"""A text is held as it was read, in canonical order, and normalised."""
_SAMPLE = 2_000


def budget_rows(snapshot: Snapshot, columns: Sequence[str], memory_gb: float, workers: int) -> int:
    """Steps of a range, so that as many ranges as run at once stay within a budget.

    Args:
        snapshot: where the steps are.
        columns: columns of `steps` that are read.
        memory_gb: the budget in GB (10^9 bytes), beyond what the process takes anyway.
        workers: ranges at once.

    Raises:
        UsageError: a budget of nothing.
    """
    if not memory_gb > 0:
        msg = f"a memory budget of {memory_gb} GB holds nothing; the default is {MEMORY_GB}"
        raise UsageError(msg)
    texts = [name for name in columns if TABLES["steps"].polars()[name] == pl.String]
    sample = collected(snapshot.scan("steps").select(texts or "episode_id").head(_SAMPLE))
    wide = sum(int(sample[name].str.len_bytes().sum()) for name in texts) / max(1, sample.height)
    return max(1, int(memory_gb * 1e9 / workers / (_BYTES_PER_STEP + _COPIES_OF_TEXT * wide)))
