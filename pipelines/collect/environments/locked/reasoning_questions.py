"""Questions and scores of reasoning-gym, in a process of its own.

Its scorers read answers with `eval`, directly (n_queens, spiral_matrix, ...) or through SymPy (integration, countdown,
...): a model's text would run as code. So nothing of the package is imported elsewhere. The import takes half a minute,
once per process.
"""

import json
import sys
from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import Any


class _Undrawn(ModuleType):
    """A module of matplotlib: cellpylib would draw with it, and it wants a folder to write in, which there is not."""

    def __getattr__(self, name: str) -> None:
        """Whatever is imported from it."""


_UNDRAWN = (
    *("matplotlib", "matplotlib.animation", "matplotlib.collections", "matplotlib.pyplot"),
    *("mpl_toolkits", "mpl_toolkits.mplot3d"),
)


def imported(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, once the package is there: its import must not count as the time of a first call."""
    sys.modules.update({name: _Undrawn(name) for name in _UNDRAWN})
    import reasoning_gym  # noqa: F401

    return function


def ask(dataset: str, settings: str, seed: int, answer: str | None = None) -> dict[str, Any]:
    """The question of a seed; with an answer, its score.

    Args:
        dataset: name of the data set.
        settings: of the data set, as JSON.
        seed: of its first and only item.
        answer: what was answered, without tags.

    Returns:
        `question` and `answer`, the right one where there is just one; or `score`, 0 to 1.
    """
    items, entry = _item(dataset, settings, seed)
    if answer is None:
        return {"question": entry["question"], "answer": entry["answer"]}
    return {"score": float(items.score_answer(answer, entry))}


@lru_cache(maxsize=256)
def _item(dataset: str, settings: str, seed: int) -> tuple[Any, dict[str, Any]]:
    """A data set of one item, and the item; some take seconds to be made, and siblings ask for the same."""
    import reasoning_gym

    items = reasoning_gym.create_dataset(dataset, seed=seed, size=1, **json.loads(settings))
    return items, items[0]
