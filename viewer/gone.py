"""What readers do not see any more: when episodes, and with them their group, were taken back, and why."""

from collections import Counter
from collections.abc import Sequence

from lake import ids
from lake.read.text_table import counted
from viewer.links import Page
from viewer.navigation import href
from viewer.pinned import read
from viewer.plain import chip
from viewer.queries import Row, lineage


def episodes(episode_ids: Sequence[int]) -> str:
    """Of episodes that are not to be seen: when and why each was taken back, or that it never was there."""
    known = {row["episode_id"]: row for row in read(lineage.taken_back, tuple(episode_ids))}
    return "\n\n".join(_episode(one, known.get(one)) for one in episode_ids)


def _episode(episode_id: int, row: Row | None) -> str:
    name = chip(ids.to_text(episode_id))
    if row is None:
        return f"This lake holds no episode {name}."
    said = f"Episode {name} was {row['kind']} {_when_and_why(row)}"
    if row["superseded_by"] is not None:
        newer = ids.to_text(row["superseded_by"])
        said += f"; [{newer}]({href(Page.EPISODE, episode=newer)}) took its place"
    if row["kind"] == "retracted":
        said += f"; `trajlake restore {ids.to_text(episode_id)}` shows it again"
    return f"{said}. An older snapshot may still have it: `trajlake show {ids.to_text(episode_id)} --as-of NAME`."


def group(group_id: int) -> str:
    """Of a group that is not to be seen: when and why its episodes were taken back, or that it never was there."""
    name, rows = chip(ids.to_text(group_id)), read(lineage.group_taken_back, group_id)
    if not rows:
        return f"This lake holds no group {name}."
    times = Counter((row["kind"], row["reason"]) for row in rows)
    last: dict[tuple[str, str | None], Row] = {}
    for row in rows:
        last.setdefault((row["kind"], row["reason"]), row)
    said = "; ".join(
        f"{counted(times[why], 'episode')} {row['kind']} {_when_and_why(row)}" for why, row in last.items()
    )
    return (
        f"All of group {name} was taken back: {said}. An older snapshot may still have it, as **Data of ...** shows it."
    )


def _when_and_why(row: Row) -> str:
    return f"at {row['at']:%Y-%m-%d %H:%M:%S} UTC" + (f": {chip(row['reason'])}" if row["reason"] else "")
