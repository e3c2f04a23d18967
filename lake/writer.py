"""Recording facts exactly once: the write path of episodes, steps and tokens.

1. Every batch attempt draws a fresh random write_id, stored in every row it writes. The children (tokens, steps)
   commit first, unconditionally.
2. `episodes` commits last, as a compare-and-swap on a version at which none of the batch's episode_ids exists. On a
   conflict: refresh, check again, retry. If some ids exist by now, this write_id is abandoned (its children are dead)
   and the remainder is written under a new one.
3. Readers see a child row only if its write_id stands in `episodes`.

So a kill at any instruction leaves either all of a batch or nothing visible, and a replay of the same records, in any
batching, beside any number of writers, adds nothing twice.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import polars as pl

from lake import ids
from lake.contracts import conform
from lake.errors import LakeAccessError
from lake.frames import episodes_frame, steps_frame, tokens_frame
from lake.records import EpisodeRecord, Identity, identify
from lake.store import CommitLostError, Store
from lake.tables import TABLES

_INDEX_SCHEMA = {"episode_id": pl.Int64, "content_hash": pl.Int64}


@dataclass(slots=True)
class Outcome:
    """What became of a batch of records."""

    new: int = 0
    new_steps: int = 0
    present: int = 0
    conflicts: list[int] = field(default_factory=list)
    """Positions in the batch of records whose key is present with other content."""
    write_ids: list[int] = field(default_factory=list)


class EpisodeWriter:
    """Appends records to a lake's fact tables exactly once.

    Keeps an index of the episodes present, brought up to date from the files added since the last look.

    Args:
        store: the lake's tables.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._index = pl.DataFrame(schema=_INDEX_SCHEMA)
        self._indexed_files: set[str] = set()
        # Threads of one process take turns: a lost update of the index would let a duplicate through.
        self._lock = threading.Lock()

    def write(self, records: Sequence[EpisodeRecord]) -> Outcome:
        """Record a batch; every record needs its run_id.

        Records already present with the same content are skipped, those present with other content reported.
        """
        with self._lock:
            return self._write(records)

    def _write(self, records: Sequence[EpisodeRecord]) -> Outcome:
        identities = [identify(record, record.run_id or "") for record in records]
        while True:
            version = self._refresh_index()
            todo, outcome = self._sort_out(identities)
            if not todo:
                return outcome
            write_id = ids.fresh_id()
            if self._attempt([records[i] for i in todo], [identities[i] for i in todo], write_id, version):
                outcome.new = len(todo)
                outcome.new_steps = sum(len(records[i].steps) for i in todo)
                outcome.write_ids.append(write_id)
                return outcome

    def _attempt(self, records: list[EpisodeRecord], identities: list[Identity], write_id: int, version: int) -> bool:
        """Write a batch under one write_id; False if the write_id had to be abandoned."""
        for name, build in (("tokens", tokens_frame), ("steps", steps_frame)):
            frame = build(records, identities, write_id)
            if frame.height:
                self._store.append(name, conform(frame, TABLES[name]))
        episodes = conform(episodes_frame(records, identities, write_id), TABLES["episodes"])
        while True:
            try:
                self._store.append_episodes(episodes, version)
            except CommitLostError:
                version = self._refresh_index()
                if self._present(episodes["episode_id"]).height:
                    return False
            else:
                return True

    def _sort_out(self, identities: list[Identity]) -> tuple[list[int], Outcome]:
        """Positions of the records that are new, and the others counted.

        A key's second record in the batch counts as if its first were in the lake: batching changes nothing.
        """
        found = self._present(pl.Series("episode_id", [i.episode_id for i in identities], dtype=pl.Int64))
        content = dict(zip(found["episode_id"], found["content_hash"], strict=True))
        todo: list[int] = []
        outcome = Outcome()
        for position, identity in enumerate(identities):
            known = content.get(identity.episode_id)
            if known is None:
                content[identity.episode_id] = identity.content_hash
                todo.append(position)
            elif known == identity.content_hash:
                outcome.present += 1
            else:
                outcome.conflicts.append(position)
        return todo, outcome

    def _present(self, episode_ids: pl.Series) -> pl.DataFrame:
        return self._index.filter(pl.col("episode_id").is_in(episode_ids.implode()))

    def _refresh_index(self) -> int:
        """Bring the index to the newest version of `episodes`, and return that version."""
        version, entries = self._store.files("episodes")
        added = [entry.path for entry in entries if entry.path not in self._indexed_files]
        if added:
            try:
                rows = pl.read_parquet(added, columns=list(_INDEX_SCHEMA), missing_columns="insert")
            except (OSError, pl.exceptions.PolarsError) as error:
                msg = f"table `episodes` cannot be read: {error}. `trajlake doctor` tells what is damaged"
                raise LakeAccessError(msg) from error
            self._index = pl.concat([self._index, rows]).unique("episode_id")
            self._indexed_files.update(added)
        return version
