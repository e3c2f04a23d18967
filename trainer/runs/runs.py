"""A run's folder: what was started there, who is at work in it, and where its checkpoints are.

run.json               the run's record: job, configuration, pinned data
metrics.jsonl          metrics, a line per optimizer step
checkpoints/           one folder each
final/                 the trained model in Hugging Face layout
"""

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from lake.errors import CheckpointError, UsageError
from lake.faults import validated
from lake.judgements.credit import Credit
from trainer.atomic import atomic_text
from trainer.config import TrainConfig
from trainer.former_layout import renewed_record
from trainer.layers import layered


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
    """The folder of one run.

    Args:
        path: its place; made when something is written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def final(self) -> Path:
        """The trained model."""
        return self.path / "final"

    @property
    def metrics(self) -> Path:
        """Metrics as JSON lines."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The folder of all checkpoints."""
        return self.path / "checkpoints"

    def checkpoint(self, step: int, attempt: int) -> Path:
        """The checkpoint that an attempt wrote after a number of updates."""
        return self.checkpoints / f"step-{step:08d}-attempt-{attempt}"

    def read(self) -> RunRecord | None:
        """The run's record; None if none was started here.

        Raises:
            CheckpointError: damaged.
        """
        path = self.path / "run.json"
        if not path.exists():
            return None
        try:
            record = msgspec.json.decode(path.read_bytes(), type=RunRecord)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            msg = f"{path} is damaged: {error}; train again into another --out"
            raise CheckpointError(msg) from error
        return msgspec.structs.replace(record, config=renewed_record(record.config))

    def write(self, record: RunRecord) -> None:
        """Store the run's record, in one piece."""
        atomic_text(self.path / "run.json", msgspec.json.encode(record).decode() + "\n")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out; the lock goes with the process, however it ends.

        Raises:
            UsageError: another process trains here.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path / ".lock", os.O_CREAT | os.O_RDWR, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = os.pread(descriptor, 20, 0).decode(errors="replace").strip()
                msg = (
                    f"process {holder or 'unknown'} trains into {self.path}: wait for it, end it (kill {holder}), or "
                    f"choose another --out"
                )
                raise UsageError(msg) from error
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
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
    changed = list(_differences(wanted.model_dump(mode="json"), had.model_dump(mode="json")))
    if changed:
        msg = f"a resumed run keeps its configuration, and these differ: {', '.join(changed)}; leave them out"
        raise UsageError(msg)


def _differences(settings: Mapping[str, Any], stored: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in settings.items():
        was = stored.get(name)
        if isinstance(value, Mapping) and isinstance(was, Mapping):
            # Another loss has other options as well, of which nobody said anything.
            is_other = value.get("name") != was.get("name")
            yield from _differences({"name": value["name"]} if is_other else value, was, f"{prefix}{name}.")
        elif was != value:
            yield f"{prefix}{name} {value!r} (the run has {was!r})"
