"""Which checkpoints of a run stay on disk: the newest few, and the best.

A checkpoint is removed only after a newer one is complete and stands in the table. Its folder is renamed first, so
that a kill in between leaves either all of it or none under its name. Rows of `checkpoints` stay: they tell what was.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

from trainer.atomic import PARTIAL

_DOOMED = ".removed-"


def kept(written: Sequence[tuple[int, Path]], keep_last: int | None, best: int | None) -> list[tuple[int, Path]]:
    """The checkpoints that stay.

    Args:
        written: (updates done, folder) of every checkpoint with a row, oldest first.
        keep_last: how many of the newest stay; None keeps all.
        best: updates done at the best validation, if there is one; its checkpoint stays.
    """
    if keep_last is None:
        return list(written)
    newest = len(written) - keep_last
    return [one for position, one in enumerate(written) if position >= newest or one[0] == best]


def sweep(checkpoints: Path) -> None:
    """Remove what killed attempts left half written or half removed; nobody else may be writing there."""
    for left in [*checkpoints.glob(f".*{PARTIAL}"), *checkpoints.glob(f"{_DOOMED}*")]:
        shutil.rmtree(left)


def prune(checkpoints: Path, keep: Sequence[Path]) -> list[Path]:
    """Remove every other checkpoint, those included that a killed attempt left without a row.

    Args:
        checkpoints: the folder that holds them.
        keep: those that stay.

    Returns:
        What was removed.
    """
    sweep(checkpoints)
    names = {path.name for path in keep}
    removed = sorted(path for path in checkpoints.glob("step-*") if path.name not in names)
    for path in removed:
        shutil.rmtree(path.rename(checkpoints / f"{_DOOMED}{path.name}"))
    return removed
