"""Recording records as rows of a job: in the job's own process, or in that of a part which hands on what it wrote."""

from collections.abc import Collection, Sequence
from typing import Literal

import msgspec
import polars as pl

from lake import ids
from lake.records import EpisodeRecord, Reject, excerpt, identify, printable
from lake.write.index import EpisodeIndex
from lake.write.parts import JobPart, Written
from lake.write.rows import ScoreRows
from lake.write.writer import EpisodeWriter

OF_EPISODES = ("episodes", "steps", "tokens")
"""Tables that new episodes are written to, of those that are compacted."""


class Counts(msgspec.Struct):
    """What became of recorded episodes."""

    new: int = 0
    steps: int = 0
    """Steps of the new episodes."""
    present: int = 0
    replaced: int = 0
    """New episodes that replace an earlier reading of themselves."""
    rejected: int = 0
    refused: Sequence[int] = ()
    """Places of episodes that were fit to be recorded and are rejects all the same: conflicts, say."""
    first_reject: Reject | None = None


class JobRecorder:
    """What a `Job` records with, in its own process or in that of a part: episodes exactly once, rejects, other rows.

    Args:
        run_id: the run of records that name none.
    """

    def __init__(self, part: JobPart, writer: EpisodeWriter, run_id: str | None) -> None:
        self._part = part
        self._writer = writer
        self._touched: set[str] = set()
        self.run_id = run_id
        self.written: list[Written] = []
        """Rows beside the episodes, which become visible when the job that accepts them succeeds."""
        self.scores = ScoreRows()
        """Those that came with recorded episodes, for whoever runs the job to write: `lake.write.scores`."""

    def index(self) -> EpisodeIndex:
        """The episodes that the lake has now, retracted ones among them; it stays as it is."""
        return self._writer.index()

    def record_checked(
        self, records: Sequence[EpisodeRecord], positions: Sequence[int], *, growing: Collection[int] = ()
    ) -> Counts:
        """Record episodes that passed `lake.records.check`; positions tell where each stands in its source.

        `growing`: places of records that may have grown since they were read last; see `EpisodeWriter.write`.
        """
        for record in records:
            if record.run_id is None:
                record.run_id = self.run_id
        outcome = self._writer.write(records, job_id=self._part.job_id, growing=growing)
        if outcome.new:
            self._touched.update(OF_EPISODES)
        rejects = {i: _reject(records[i], positions[i], "conflict") for i in outcome.conflicts}
        rejects |= {i: _reject(records[i], positions[i], "forgotten") for i in outcome.forgotten}
        if rejects:
            first = records[min(rejects)]
            self.reject(list(rejects.values()), first.source_uri or "recorder", first.source_format)
        for place, record in enumerate(records):
            if record.scores and place not in rejects:
                self.scores.add(record)
        first_reject = rejects[min(rejects)] if rejects else None
        return Counts(
            *(outcome.new, outcome.new_steps, outcome.present, outcome.replaced),
            *(len(rejects), tuple(rejects), first_reject),
        )

    def reject(self, rejects: Sequence[Reject], source_uri: str, source_format: str) -> None:
        """Record input that could not be taken. The same reject twice is one row for readers."""
        now = self._part.now()
        rows = [
            {
                "reject_id": ids.key_hash("reject", r.run_id or self.run_id, uri, r.position, r.reason, r.raw),
                "run_id": r.run_id or self.run_id,
                "episode_id": r.episode_id,
                "source_uri": uri,
                "source_format": r.source_format or source_format,
                "position": r.position,
                "reason": r.reason,
                "message": printable(r.message),
                "raw": printable(r.raw),
                "at": now,
            }
            for r in rejects
            for uri in [r.source_uri or source_uri]
        ]
        self.write("rejects", pl.DataFrame(rows, schema_overrides={"run_id": pl.String, "episode_id": pl.Int64}))

    def write(self, name: str, frame: pl.DataFrame) -> None:
        """Append rows to a table under a fresh write_id, stamped with the job; see `JobPart.write`."""
        if (written := self._part.write(name, frame)) is not None:
            self.take(written)

    def take(self, written: Written) -> None:
        """Accept rows that a part of this job wrote: they become visible when the job succeeds."""
        self._touched.add(written.table)
        self.written.append(written)


def refusal(record: EpisodeRecord, reason: Literal["conflict", "forgotten"]) -> str:
    """Say why a record that is well-formed is not taken, and what to do; of an erased one only the id is repeated."""
    if reason == "forgotten":
        name = ids.to_text(identify(record, record.run_id or "").episode_id)
        return f"episode {name} was erased with `trajlake forget` and is not taken again"
    key = f"run {record.run_id!r}, task {record.task_id!r}, rollout {record.rollout_index}, attempt {record.attempt}"
    return f"{key} is present with other content; give it another --run or a higher attempt"


def _reject(record: EpisodeRecord, position: int, reason: Literal["conflict", "forgotten"]) -> Reject:
    # What was forgotten is kept without its text: it was erased for a reason.
    raw = excerpt(msgspec.json.encode(record).decode()) if reason == "conflict" else ""
    episode_id = identify(record, record.run_id or "").episode_id
    return Reject(
        position=position,
        reason=reason,
        message=refusal(record, reason),
        raw=raw,
        run_id=record.run_id,
        episode_id=episode_id,
        source_uri=record.source_uri,
        source_format=record.source_format,
    )
