"""A dry run of an ingest: count the records it would write and reject, without a lake, and show a few episodes."""

import tempfile
from collections import Counter
from pathlib import Path

import msgspec

from lake.formats.base.secrets import redact
from lake.opening import open as open_lake
from lake.read.episode_text import format_episode, read_episode
from lake.records import EpisodeRecord, Reject, identify
from lake.write.ingest import read_items, redact_run
from lake.write.jobs import explain_refusal
from lake.write.sources import FileCounts, IngestPlan

EXAMPLES = 3
PreviewedEpisodes = dict[int, tuple[int, int]]
"""Episode -> hash of its content, and its number of steps."""


class Preview(msgspec.Struct):
    """Counts of a plan's files: each record is an episode, present, or a reject."""

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
    """Episodes derived from another one: sub-agents, forks, continuations."""
    runs: set[str] = msgspec.field(default_factory=set)
    reasons: Counter[str] = msgspec.field(default_factory=Counter)
    """Reason -> number of rejects."""
    faults: dict[str, tuple[str, int, str]] = msgspec.field(default_factory=dict)
    """Reason -> file, position and message of the first reject."""
    by_file: dict[str, FileCounts] = msgspec.field(default_factory=dict)
    """Each file -> its counts."""
    formats: set[str] = msgspec.field(default_factory=set)
    """The formats of the episodes."""
    candidates: tuple[list[EpisodeRecord], list[EpisodeRecord], list[EpisodeRecord]] = msgspec.field(
        default_factory=lambda: ([], [], [])
    )
    """Candidates for examples: the first episodes of a format, the first of a file, and others; a few of each."""

    @property
    def examples(self) -> list[EpisodeRecord]:
        """A few episodes, of as many formats and files as possible."""
        return [record for records in self.candidates for record in records][:EXAMPLES]

    def add_candidate(self, record: EpisodeRecord, file: FileCounts) -> None:
        """Add a candidate for the examples; call it before the file counts the episode."""
        is_of_new_format = file.format not in self.formats
        self.formats.add(file.format)
        candidates = self.candidates[2 if file.episodes else 0 if is_of_new_format else 1]
        if len(candidates) < EXAMPLES:
            candidates.append(record)

    def add_episode(self, record: EpisodeRecord) -> None:
        """Count an episode."""
        self.episodes += 1
        self.steps += len(record.steps)
        self.tool_calls += sum(len(step.tool_calls or ()) for step in record.steps)
        self.scores += len(record.scores)
        self.with_tokens += sum(step.tokens is not None for step in record.steps)
        self.related += record.relation is not None
        self.runs.add(redact_run(record.run_id or ""))


def preview(plan: IngestPlan, previewed: PreviewedEpisodes | None = None) -> Preview:
    """Read everything that an ingest would read.

    Args:
        previewed: episodes of earlier previews, which count as present; this preview adds its own.
    """
    counts = Preview(by_file=plan.report.by_file)
    previewed = {} if previewed is None else previewed
    for planned, item in read_items(plan.files):
        counts.records += 1
        file = counts.by_file[planned.file.name]
        if isinstance(item, Reject):
            reason, position, message = item.reason, item.position, item.message
        else:
            position, record = item
            identity = identify(record, record.run_id or "")
            earlier = previewed.get(identity.episode_id)
            may_continue = earlier is not None and planned.format.is_whole
            if earlier is None or (
                may_continue and earlier[0] != identity.content_hash and len(record.steps) >= earlier[1]
            ):
                previewed[identity.episode_id] = identity.content_hash, len(record.steps)
                counts.add_episode(record)
                if earlier is None:
                    counts.add_candidate(record, file)
                file.add_episode(redact_run(record.run_id or ""))
                continue
            if may_continue or earlier[0] == identity.content_hash:
                counts.present += 1
                file.add_episode(redact_run(record.run_id or ""))
                continue
            reason, message = "conflict", explain_refusal(record, "conflict")
        file.rejected += 1
        counts.reasons[reason] += 1
        counts.faults.setdefault(reason, (planned.file.name, position, redact(message)))
    return counts


def render_episode(record: EpisodeRecord) -> str:
    """Return the output of `trajlake show` for an episode, from a temporary lake."""
    with tempfile.TemporaryDirectory(prefix="trajlake-") as folder:
        lake = open_lake(Path(folder, "lake"), create=True)
        lake.append([record])
        episode_id = identify(record, record.run_id or "").episode_id
        return "\n".join(line for _, line in format_episode(read_episode(lake.snapshot(), episode_id)))
