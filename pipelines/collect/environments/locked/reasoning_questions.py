"""Questions and scores of reasoning-gym, in a sandboxed process.

Its scorers read answers with `eval`, directly (n_queens, spiral_matrix, ...) or through SymPy (integration, countdown,
...): a model's text would run as code. So no other process imports the package. The import takes half a minute, once
per process.
"""

import json
import sys
from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import Any


class _Undrawn(ModuleType):
    """A stand-in for matplotlib, which cellpylib imports and which needs a writable folder."""

    def __getattr__(self, name: str) -> None:
        """Return None for every name."""


_UNDRAWN = (
    *("matplotlib", "matplotlib.animation", "matplotlib.collections", "matplotlib.pyplot"),
    *("mpl_toolkits", "mpl_toolkits.mplot3d"),
)


def imported(function: Callable[..., Any]) -> Callable[..., Any]:
    """Import the package before the first call, so that the import does not count as its time."""
    sys.modules.update({name: _Undrawn(name) for name in _UNDRAWN})
    import reasoning_gym  # noqa: F401

    return function


def ask(dataset: str, settings: str, seed: int, answer: str | None = None) -> dict[str, Any]:
    """Return the question of a seed; with an answer, its score.

    Args:
        dataset: name of the data set.
        settings: settings of the data set, as JSON.
        seed: seed of its only item.
        answer: the answer without tags.

    Returns:
        `question` and `answer` (the right one, if there is only one); or `score`, 0 to 1.
    """
    items, entry = _item(dataset, settings, seed)
    if answer is None:
        return {"question": entry["question"], "answer": entry["answer"]}
    return {"score": float(items.score_answer(answer, entry))}


@lru_cache(maxsize=256)
def _item(dataset: str, settings: str, seed: int) -> tuple[Any, dict[str, Any]]:
    """Return a data set of one item, and the item. Some take seconds to build, and siblings share one."""
    import reasoning_gym

    items = reasoning_gym.create_dataset(dataset, seed=seed, size=1, **json.loads(settings))
    return items, items[0]
