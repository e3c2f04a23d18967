"""A dry run: what an ingest would take and reject, without a lake. A few episodes are shown as they would be."""

import tempfile
from collections import Counter
from pathlib import Path

import msgspec

from lake.lake import open as open_lake
from lake.read.show import gather, lines
from lake.records import EpisodeRecord, Reject
from lake.write.ingest import Plan, items

EXAMPLES = 3


class Preview(msgspec.Struct):
    """What the files of a plan hold."""

    records: int = 0
    episodes: int = 0
    steps: int = 0
    tool_calls: int = 0
    scores: int = 0
    with_tokens: int = 0
    """Steps with exact tokens."""
    related: int = 0
    """Episodes that came out of another: sub-agents, forks, continuations."""
    runs: set[str] = msgspec.field(default_factory=set)
    reasons: Counter[str] = msgspec.field(default_factory=Counter)
    """Reason of rejects -> how many."""
    faults: dict[str, tuple[str, int, str]] = msgspec.field(default_factory=dict)
    """Reason -> file, position and message of the first of them."""
    examples: list[EpisodeRecord] = msgspec.field(default_factory=list)


def preview(plan: Plan) -> Preview:
    """Read all that an ingest would read. Keys are not compared with those of a lake."""
    found = Preview()
    for reading, item in items(plan):
        found.records += 1
        if isinstance(item, Reject):
            found.reasons[item.reason] += 1
            found.faults.setdefault(item.reason, (reading.file.name, item.position, item.message))
            continue
        record = item[1]
        found.episodes += 1
        found.steps += len(record.steps)
        found.tool_calls += sum(len(step.tool_calls or ()) for step in record.steps)
        found.scores += len(record.scores)
        found.with_tokens += sum(step.tokens is not None for step in record.steps)
        found.related += record.relation is not None
        found.runs.add(record.run_id or "")
        if len(found.examples) < EXAMPLES:
            found.examples.append(record)
    return found


def shown(record: EpisodeRecord) -> str:
    """An episode as `trajlake show` would print it, from a lake of its own that is thrown away."""
    with tempfile.TemporaryDirectory(prefix="trajlake-") as folder:
        lake = open_lake(Path(folder, "lake"), create=True)
        lake.append([record])
        snapshot = lake.snapshot()
        episode_id = snapshot.sql("SELECT episode_id FROM episodes").item()
        return "\n".join(line for _, line in lines(gather(snapshot, episode_id)))
