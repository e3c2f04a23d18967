"""A run's folder: what was started there, who is at work in it, and where its checkpoints are.

run.json               the run's record: job, configuration, pinned data
metrics.jsonl          metrics, a line per optimizer step
checkpoints/           one folder each
final/                 the trained model in Hugging Face layout

Rank 0 reads and writes the lake and the run folder; the others get its results and follow. Every rank goes through the
same code; what only rank 0 may do stands here, or asks `Ranks.leads`.

A checkpoint is removed only after a newer one is complete and in the table. A kill in between leaves all of it or
nothing under its name. Rows of `checkpoints` stay: they tell what was.
"""

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec
import polars as pl

from lake import ids
from lake.documents import json_object
from lake.errors import CheckpointError, ContractError, UsageError
from lake.judgements.credit import Credit
from lake.lake import Lake
from lake.read.parquet import collected
from lake.settings import validated
from lake.storage.atomic import atomic_text, recover, remove_folder
from lake.write.jobs import Job
from trainer.backends.ranks import Ranks
from trainer.config import TrainConfig
from trainer.data.plan.preparation import Prepared, prepare_at
from trainer.former_layout import renewed_record
from trainer.train_settings import layered


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What was started: enough to make the same plan again."""

    job_id: int
    """The training job."""
    run_id: str
    """Name of the run."""
    config: dict[str, Any]
    """The resolved TrainConfig."""
    snapshot: dict[str, int]
    """Table versions that the run reads."""
    source: Credit | None
    """Where advantages come from."""
    plan_hash: str
    """Of `Plan.plan_hash`, as 13 characters."""
    model_sha256: str
    """Digest of the weights that the run starts from."""


class RunFolder:
    """The folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def final(self) -> Path:
        """The trained model."""
        return self.path / "final"

    @property
    def checkpoints(self) -> Path:
        """The folder of all checkpoints."""
        return self.path / "checkpoints"

    def checkpoint(self, step: int, attempt: int) -> Path:
        """The checkpoint that an attempt wrote after a number of updates."""
        return self.checkpoints / f"step-{step:08d}-attempt-{attempt}"

    def read(self) -> RunRecord | None:
        """The run's record; None if none was started here, a CheckpointError where it is damaged."""
        path = self.path / "run.json"
        if not path.exists():
            return None
        try:
            record = msgspec.json.decode(path.read_bytes(), type=RunRecord)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged: {error}; train again into another --out") from error
        return msgspec.structs.replace(record, config=renewed_record(record.config))

    def write(self, record: RunRecord) -> None:
        """Store the run's record, in one piece."""
        atomic_text(self.path / "run.json", msgspec.json.encode(record).decode() + "\n")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out (UsageError there); the lock goes with the process, however it ends.

        Folders that killed processes left half written, replaced or removed are put in order first.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path / ".lock", os.O_CREAT | os.O_RDWR, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = os.pread(descriptor, 20, 0).decode(errors="replace").strip()
                raise UsageError(
                    f"process {holder or 'unknown'} trains into {self.path}: wait for it, end it (kill {holder}), or "
                    f"choose another --out"
                ) from error
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
            recover(self.path)
            recover(self.checkpoints)
            yield
        finally:
            os.close(descriptor)


def check_unchanged(settings: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    """A resumed run keeps its configuration: options given again must say the same.

    Args:
        settings: what is given now: any fields, as they stand in a file.
        stored: the resolved configuration of the run, as JSON data.

    Raises:
        UsageError: names the options that differ, or those that are wrong.
    """
    wanted, had = (validated(TrainConfig, one) for one in (layered(stored, settings), stored))
    changed = list(differences(wanted.model_dump(mode="json"), had.model_dump(mode="json")))
    if changed:
        msg = f"a resumed run keeps its configuration, and these differ: {', '.join(changed)}; leave them out"
        raise UsageError(msg)


def differences(settings: Mapping[str, Any], stored: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """What nested settings say otherwise than those that were stored, as `name new (the run has old)`."""
    for name, value in settings.items():
        was = stored.get(name)
        if isinstance(value, Mapping) and isinstance(was, Mapping):
            # Another loss has other options as well, of which nobody said anything.
            is_other = value.get("name") != was.get("name")
            yield from differences({"name": value["name"]} if is_other else value, was, f"{prefix}{name}.")
        elif was != value:
            yield f"{prefix}{name} {value!r} (the run has {was!r})"


@dataclass(slots=True)
class FollowerJob:
    """Rank 0's job as another rank sees it: it writes nothing."""

    job_id: int
    """The training job."""
    attempt: int
    """Number of this attempt."""
    counts: dict[str, Any] = field(default_factory=dict)
    """Figures that nobody reads."""

    def write(self, name: str, frame: pl.DataFrame) -> None:
        """Rank 0 writes the rows."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *fault: object) -> None:
        """Rank 0 ends the job."""


RunJob = Job | FollowerJob
"""The training job on any rank."""


@contextmanager
def locked(folder: RunFolder, ranks: Ranks) -> Iterator[None]:
    """Keep other runs out of the folder; a UsageError where another run trains there."""
    with ExitStack() as stack:

        def take() -> None:
            stack.enter_context(folder.locked())

        ranks.on_rank_zero(take)
        yield


def run_job(make: Callable[[], Job], ranks: Ranks) -> RunJob:
    """The run's job: rank 0 makes it, the others follow."""
    made: list[Job] = []

    def told() -> tuple[int, int]:
        made.append(make())
        return made[0].job_id, made[0].attempt

    job_id, attempt = ranks.on_rank_zero(told)
    return made[0] if made else FollowerJob(job_id, attempt)


@contextmanager
def left_open_when_interrupted(job: RunJob) -> Iterator[None]:
    """A job's block whose terminal row says succeeded, or failed for faults that a second try would meet again.

    Anything else (Ctrl-C, a full disk, no memory) leaves the job as a kill would: open, to be resumed.
    """
    job.__enter__()
    try:
        yield
    except ContractError as error:
        job.__exit__(type(error), error, error.__traceback__)
        raise
    job.__exit__(None, None, None)


def leased(lk: Lake, prepared: Prepared, run_id: str, job_id: int, ranks: Ranks) -> AbstractContextManager[object]:
    """Keeps the run's data from vacuum while it trains; a resumed run takes over the lease that a killed one left."""
    return lk.lease(prepared.snapshot, f"train {run_id}", job_id=job_id) if ranks.leads else nullcontext()


def prepare_on_ranks(lk: Lake, config: TrainConfig, make: Callable[[], Prepared], ranks: Ranks) -> Prepared:
    """The run's data and plan: rank 0 finds them, renders what is only text, and says where; the others do the same."""
    made: list[Prepared] = []

    def told() -> tuple[dict[str, int], Credit | None]:
        made.append(make())
        return made[0].snapshot.versions, made[0].selection.source

    versions, source = ranks.on_rank_zero(told)
    return made[0] if made else prepare_at(lk.at(versions), config, source)


def retained(written: Sequence[tuple[int, Path]], keep_last: int | None, best: int | None) -> list[tuple[int, Path]]:
    """The (updates done, folder) of `written` that stay: the newest `keep_last` (None: all), and the best.

    `written` is in the order of updates, and `best` the updates done at the best validation.
    """
    if keep_last is None:
        return list(written)
    newest = len(written) - keep_last
    return [one for position, one in enumerate(written) if position >= newest or one[0] == best]


def prune(checkpoints: Path, keep: Sequence[Path]) -> list[Path]:
    """Remove every other checkpoint, those included that a killed attempt left without a row; what was removed."""
    recover(checkpoints)
    names = {path.name for path in keep}
    removed = sorted(path for path in checkpoints.glob("step-*") if path.name not in names)
    for path in removed:
        remove_folder(path)
    return removed


SPEED = "tokens_per_second"
"""Name under which a training job's counts hold its speed."""


def newest_checkpoint(lk: Lake, job_id: int) -> dict[str, Any] | None:
    """The row of `checkpoints` with the most updates; None if there is none yet."""
    mine = lk.scan("checkpoints").filter(pl.col("job_id") == job_id)
    newest = collected(mine.sort("optimizer_step", "attempt").tail(1))
    return newest.row(0, named=True) if newest.height else None


def checkpoints_of(lk: Lake, job_id: int, folder: RunFolder) -> list[tuple[int, Path]]:
    """Updates done and place of each checkpoint of a job, oldest first; of repeated steps the newest attempt's."""
    mine = lk.scan("checkpoints").filter(pl.col("job_id") == job_id).sort("optimizer_step", "attempt")
    rows = collected(mine).iter_rows(named=True)
    places = {row["optimizer_step"]: folder.checkpoints / Path(row["uri"]).name for row in rows}
    return sorted(places.items())


def job_row(lk: Lake, job_id: int) -> dict[str, Any]:
    """Its status in `job_runs` (started means running or interrupted) and what it counted.

    A CheckpointError where the lake does not know the job.
    """
    found = lk.sql("SELECT status, counts FROM job_runs WHERE job_id = ?", [job_id])
    if found.is_empty():
        msg = f"the lake {lk.uri} does not know job {ids.to_text(job_id)}; name the lake that the run was started on"
        raise CheckpointError(msg)
    return found.row(0, named=True)


def final_digest(counts: str | None) -> str | None:
    """Digest of the final weights in a job's counts (JSON; None unless it has ended).

    These are not the weights of its newest checkpoint where it exported the best.
    """
    digest = json_object(counts).get("weights_sha256")
    return None if digest is None else str(digest)


def next_attempt(lk: Lake, job_id: int) -> int:
    """One more than any attempt that left rows; at least 1, since the first attempt is 0."""
    snapshot = lk.snapshot()
    mine = pl.col("job_id") == job_id
    parts = [snapshot.scan(name).filter(mine).select("attempt") for name in ("batches", "metrics", "checkpoints")]
    return 1 + int(collected(pl.concat(parts).select(pl.col("attempt").max().fill_null(0)))["attempt"][0])
