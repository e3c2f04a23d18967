"""Versions of the tables of several lakes in one mapping, as a snapshot of all of them is stored."""

from collections.abc import Mapping, Sequence

_OF = "@"
"""Between a table and the lake that it is of; the tables of the first lake go by their names alone."""


def joined_versions(parts: Sequence[tuple[str, Mapping[str, int]]]) -> dict[str, int]:
    """Versions of the tables of several lakes in one mapping: those of the first by the tables' names alone.

    Args:
        parts: root of each lake, and its own versions.
    """
    (_, first), *others = parts
    return dict(first) | {f"{name}{_OF}{root}": v for root, versions in others for name, v in versions.items()}


def own_versions(versions: Mapping[str, int], root: str | None = None) -> dict[str, int]:
    """Of the versions of a joined snapshot those of one lake: of the first for None; all if there is only one."""
    if root is None:
        return {name: version for name, version in versions.items() if _OF not in name}
    return {name.partition(_OF)[0]: v for name, v in versions.items() if name.partition(_OF)[2] == root}


def other_roots(versions: Mapping[str, int]) -> list[str]:
    """The lakes of a joined snapshot but the first."""
    return list(dict.fromkeys(name.partition(_OF)[2] for name in versions if _OF in name))
