"""Questions and scores of reasoning-gym, in a process of its own.

Its scorers read answers with `eval`, directly (n_queens, spiral_matrix, ...) or through SymPy (integration, countdown,
...): a model's text would run as code. So nothing of the package is imported elsewhere. The import takes half a minute,
once per process.
"""

import json
import sys
from functools import lru_cache
from types import ModuleType
from typing import Any


class _Undrawn(ModuleType):
    """A module of matplotlib: cellpylib would draw with it, and it wants a folder to write in, which there is not."""

    def __getattr__(self, name: str) -> None:
        """Whatever is imported from it."""


for _name in ("animation", "collections", "pyplot"):
    sys.modules[f"matplotlib.{_name}"] = _Undrawn(_name)
for _name in ("matplotlib", "mpl_toolkits", "mpl_toolkits.mplot3d"):
    sys.modules[_name] = _Undrawn(_name)

import reasoning_gym  # noqa: E402


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
    items = reasoning_gym.create_dataset(dataset, seed=seed, size=1, **json.loads(settings))
    return items, items[0]
