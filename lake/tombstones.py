"""Which episodes were forgotten: erased, and not to be taken again."""

import polars as pl

from lake.reading import collected, scan
from lake.store import Store
from lake.tables import JOBS, RETRACTIONS


class Tombstones:
    """The forgotten episodes of a lake, brought up to date from the files added since the last look.

    A tombstone counts once the job that set it has succeeded, as it does for readers.

    Args:
        store: the lake's tables.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen: set[str] = set()
        self._announced = pl.DataFrame(schema={"episode_id": pl.Int64, "write_id": pl.Int64})
        self._forgotten: set[int] = set()

    def refresh(self) -> set[int]:
        """The episode_ids of all forgotten episodes.

        Raises:
            LakeAccessError: a file is missing or damaged.
        """
        options = self._store.objects.polars_options
        _, entries = self._store.files(RETRACTIONS.name)
        if fresh := [entry.path for entry in entries if entry.path not in self._seen]:
            rows = scan(fresh, RETRACTIONS, options).filter(pl.col("kind") == "forgotten")
            self._announced.extend(collected(rows.select("episode_id", "write_id")))
            self._seen.update(fresh)
        if len(self._announced):
            self._confirm()
        return self._forgotten

    def _confirm(self) -> None:
        """Move announced erasures that a job has accepted to the forgotten ones."""
        _, entries = self._store.files(JOBS.name)
        ended = (pl.col("event") == "succeeded") & (pl.col("kind") == "retract")
        jobs = scan([entry.path for entry in entries], JOBS, self._store.objects.polars_options).filter(ended)
        accepted = collected(jobs.select("accepted_write_ids"))["accepted_write_ids"].explode()
        real = pl.col("write_id").is_in(accepted.implode())
        self._forgotten.update(self._announced.filter(real)["episode_id"])
        self._announced = self._announced.filter(~real)
