"""Rivals: other installed packages that claim the import names `lake`, `pipelines`, `trainer` and `viewer`.

The names are plain words, and PyPI has packages that use them; one of them installs into `trainer/` and overwrites
files without a word. Two questions find every such case: does another distribution own one of the names, and does
each name resolve to the folder beside this package? `trajlake doctor` and the layout test both ask here.
"""

from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from importlib.metadata import packages_distributions
from pathlib import Path

DISTRIBUTION = "trajlake"
LAYERS = ("lake", "pipelines", "trainer", "viewer")


def find_rivals() -> list[str]:
    """One line per problem of this installation, empty if there is none."""
    return [*rival_owners(packages_distributions()), *misplaced_layers(Path(__file__).resolve().parents[1])]


def rival_owners(owners: Mapping[str, Sequence[str]]) -> list[str]:
    """Distributions other than ours that own a layer's name.

    Args:
        owners: import name -> distributions, as `importlib.metadata.packages_distributions` gives it.
    """
    return [
        f"`{layer}` is also installed by `{owner}`, which may have overwritten ours; run "
        f"`pip uninstall {owner}`, then install {DISTRIBUTION} again"
        for layer in LAYERS
        for owner in sorted(set(owners.get(layer, ())))
        if owner.lower() != DISTRIBUTION
    ]


def misplaced_layers(root: Path) -> list[str]:
    """Layers that do not resolve to their folder under `root`, whoever put something else in front."""
    problems = []
    for layer in LAYERS:
        expected = root / layer / "__init__.py"
        # The finder, not `find_spec`: what is already imported must not hide what a fresh process would import.
        spec = PathFinder.find_spec(layer)
        found = None if spec is None or spec.origin is None else Path(spec.origin).resolve()
        if found != expected:
            place = "nothing" if found is None else str(found)
            problems.append(
                f"`import {layer}` finds {place} instead of {expected}; remove it, or take its folder off PYTHONPATH"
            )
    return problems
