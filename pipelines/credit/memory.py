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


def bytes_per_step(snapshot: Snapshot, columns: Sequence[str]) -> float:
    """What a step takes at the peak of its range.

    Args:
        snapshot: where the steps are.
        columns: columns of `steps` that are held; texts that are hashed while they are read are not.
    """
    texts = [name for name in columns if TABLES["steps"].polars()[name] == pl.String]
    sample = collected(snapshot.scan("steps").select(texts or "episode_id").head(_SAMPLE))
    wide = sum(int(sample[name].str.len_bytes().sum()) for name in texts) / max(1, sample.height)
    return _BYTES_PER_STEP + _COPIES_OF_TEXT * wide


def budget_rows(step_bytes: float, memory_gb: float, workers: int) -> int:
    """Steps of a range, so that as many ranges as run at once stay within a budget.

    Args:
        step_bytes: of `bytes_per_step`.
        memory_gb: the budget in GB (10^9 bytes), beyond what the process takes anyway.
        workers: ranges at once.

    Raises:
        UsageError: a budget of nothing.
    """
    if not memory_gb > 0:
        msg = f"a memory budget of {memory_gb} GB holds nothing; the default is {MEMORY_GB}"
        raise UsageError(msg)
    return max(1, int(memory_gb * 1e9 / workers / step_bytes))


def beyond_budget(steps: int, step_bytes: float, memory_gb: float, *, what: str) -> str:
    """What to say, before it runs, of a part that is larger than the budget and cannot be split.

    Args:
        steps: of the part.
        step_bytes: of `bytes_per_step`.
        memory_gb: the budget.
        what: the part: a group, a batch.
    """
    return (
        f"the largest {what} has {steps:,} steps and is computed whole: about {steps * step_bytes / 1e9:.1f} GB, "
        f"more than the {memory_gb:g} GB of --memory leave it. If the machine has less, take a smaller {what}"
    )
