"""A dry run: what an ingest would take and reject, without a lake. A few episodes are shown as they would be."""

import tempfile
from collections import Counter
from pathlib import Path

import msgspec

from lake.formats.base.secrets import redacted
from lake.opening import open as open_lake
from lake.read.show import gather, lines
from lake.records import EpisodeRecord, Reject, identify
from lake.write.batches import items, run_shown
from lake.write.plan import Plan, Taken
from lake.write.recording import refusal

EXAMPLES = 3
Seen = dict[int, tuple[int, int]]
"""Episode -> hash of its content, and its steps."""


class Preview(msgspec.Struct):
    """What the files of a plan hold: each record is an episode, present, or a reject."""

    records: int = 0
    episodes: int = 0
    present: int = 0
    """Records that repeat an earlier one."""
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
    by_file: dict[str, Taken] = msgspec.field(default_factory=dict)
    """Each file -> what would become of it."""
    formats: set[str] = msgspec.field(default_factory=set)
    """Those that episodes were of."""
    candidates: tuple[list[EpisodeRecord], list[EpisodeRecord], list[EpisodeRecord]] = msgspec.field(
        default_factory=lambda: ([], [], [])
    )
    """The first episodes of a format, of a file, and others: a few of each, to choose examples from."""

    @property
    def examples(self) -> list[EpisodeRecord]:
        """A few episodes, as unlike one another as their formats and files are."""
        return [record for records in self.candidates for record in records][:EXAMPLES]

    def keep(self, record: EpisodeRecord, file: Taken) -> None:
        """Keep an episode that may become an example, before its file counts it."""
        is_of_new_format = file.format not in self.formats
        self.formats.add(file.format)
        kept = self.candidates[2 if file.episodes else 0 if is_of_new_format else 1]
        if len(kept) < EXAMPLES:
            kept.append(record)

    def take(self, record: EpisodeRecord) -> None:
        """Count an episode."""
        self.episodes += 1
        self.steps += len(record.steps)
        self.tool_calls += sum(len(step.tool_calls or ()) for step in record.steps)
        self.scores += len(record.scores)
        self.with_tokens += sum(step.tokens is not None for step in record.steps)
        self.related += record.relation is not None
        self.runs.add(run_shown(record.run_id or ""))


def preview(plan: Plan, seen: Seen | None = None) -> Preview:
    """Read all that an ingest would read. Keys are compared with those that were seen before, not with a lake's."""
    found = Preview(by_file=plan.report.by_file)
    seen = {} if seen is None else seen
    for reading, item in items(plan.readings):
        found.records += 1
        file = found.by_file[reading.file.name]
        if isinstance(item, Reject):
            reason, position, message = item.reason, item.position, item.message
        else:
            position, record = item
            identity = identify(record, record.run_id or "")
            before = seen.get(identity.episode_id)
            goes_on = before is not None and reading.format.is_whole
            if before is None or (goes_on and before[0] != identity.content_hash and len(record.steps) >= before[1]):
                seen[identity.episode_id] = identity.content_hash, len(record.steps)
                found.take(record)
                if before is None:
                    found.keep(record, file)
                file.take(run_shown(record.run_id or ""))
                continue
            if goes_on or before[0] == identity.content_hash:
                found.present += 1
                file.take(run_shown(record.run_id or ""))
                continue
            reason, message = "conflict", refusal(record, "conflict")
        file.rejected += 1
        found.reasons[reason] += 1
        found.faults.setdefault(reason, (reading.file.name, position, redacted(message)))
    return found


def shown(record: EpisodeRecord) -> str:
    """An episode as `trajlake show` would print it, from a lake of its own that is thrown away."""
    with tempfile.TemporaryDirectory(prefix="trajlake-") as folder:
        lake = open_lake(Path(folder, "lake"), create=True)
        lake.append([record])
        episode_id = identify(record, record.run_id or "").episode_id
        return "\n".join(line for _, line in lines(gather(lake.snapshot(), episode_id)))
