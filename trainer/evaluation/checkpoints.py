"""Which checkpoint is meant, and its policy.

A checkpoint is named by a folder (a model in Hugging Face layout, a run of `trajlake train`, one of its checkpoints), a
.gguf file, or a row of the table `checkpoints`, as RUN, RUN@STEP, JOB or JOB@STEP; without a step, the newest.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from lake import ids
from lake.errors import CheckpointError, UsageError
from lake.read.parquet import collected
from lake.read.snapshot import Snapshot
from lake.settings import validated
from lake.storage.atomic import settled
from trainer.runs.runs import RunFolder

if TYPE_CHECKING:
    from trainer.config import TrainConfig
    from trainer.policy.model import Policy

STATE_FILE = "state.json"
"""What a checkpoint's folder holds, and a model's does not."""
_EXPECTED = "a model folder, a run's folder, a checkpoint's folder, a .gguf file, or RUN[@STEP] or JOB[@STEP]"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a checkpoint lies."""

    path: Path
    """A model folder, a .gguf file, or a checkpoint's folder."""
    name: str
    """What it is called unless the user gives it a name."""
    policy_version: int | None = None
    """Updates that made it, if known."""

    @property
    def is_checkpoint(self) -> bool:
        """It is a training run's saved state, and not an ordinary model."""
        return (self.path / STATE_FILE).is_file()


def find_checkpoint(snapshot: Snapshot, text: str) -> Place:
    """The place of a checkpoint.

    Raises:
        UsageError: nothing is called that, or several things are.
        CheckpointError: its folder is gone.
    """
    path = Path(text)
    if settled(path).exists():
        return found_on_disk(path.resolve())
    rows = _rows(snapshot, text)
    if rows.is_empty():
        raise UsageError(f"there is no checkpoint {text!r}; give {_EXPECTED}. {_known(snapshot)}")
    if rows["job_id"].n_unique() > 1:
        jobs = ", ".join(ids.to_text(job) for job in rows["job_id"].unique(maintain_order=True))
        raise UsageError(f"{text!r} names checkpoints of several jobs: {jobs}; give one of these, as JOB[@STEP]")
    row = rows.sort("optimizer_step", "attempt").row(-1, named=True)
    place = Path(row["uri"])
    if not (place / STATE_FILE).is_file():
        msg = f"checkpoint {text!r} lay in {place}, which is not there any more; name another one, or its folder"
        raise CheckpointError(msg)
    return Place(place, f"{row['run_id']}@{row['optimizer_step']}", row["policy_version"])


def open_policy(place: Place, device: str) -> tuple["Policy", str]:
    """The policy of a checkpoint with float32 weights, and where its tokenizer is.

    Raises:
        UsageError: no such model.
        CheckpointError: missing, damaged, or of another model.
    """
    from trainer.policy.model import load_policy

    if not place.is_checkpoint:
        return load_policy(place.path, device), str(place.path)

    from trainer.backends.base import SingleDevice
    from trainer.config import OptimizerConfig
    from trainer.policy.model import policy_of
    from trainer.runs.checkpoint import load_weights

    config = config_of(place).model_copy(update={"dtype": "float32"})
    policy = policy_of(config, device)
    load_weights(place.path, SingleDevice(policy, OptimizerConfig()))
    return policy, config.model


def config_of(place: Place) -> "TrainConfig":
    """The configuration of the run that saved a checkpoint; a CheckpointError where it is damaged."""
    from trainer.config import TrainConfig
    from trainer.former_layout import renewed_record
    from trainer.runs.checkpoint import read_state

    try:
        return validated(TrainConfig, renewed_record(read_state(place.path).config))
    except UsageError as error:
        msg = f"checkpoint {place.path}: its configuration is damaged, or of another version of trajlake: {error}"
        raise CheckpointError(msg) from error


def found_on_disk(path: Path) -> Place:
    """What lies at a path: a model, a run, a checkpoint or a .gguf file."""
    if (path / STATE_FILE).is_file():
        return _saved(path, RunFolder(path.parent.parent))
    run = RunFolder(path)
    if not _is_run(run):
        of_run = RunFolder(path.parent)
        if path.name == of_run.final.name and _is_run(of_run):
            return _final(of_run)
        return Place(settled(path), path.stem if path.suffix == ".gguf" else path.name)
    if settled(run.final).is_dir():
        return _final(run)
    newest = _newest_saved(run)
    if newest is None:
        raise CheckpointError(f"the run in {path} has no checkpoint yet; go on with `trajlake train --resume`")
    return _saved(newest, run)


def _is_run(run: RunFolder) -> bool:
    """Whether a folder is that of a run: a loop's has no record of its own, which the lake holds."""
    if run.read() is not None:
        return True
    is_model = (settled(run.path) / "config.json").exists()
    return not is_model and (settled(run.final).is_dir() or _newest_saved(run) is not None)


def _saved(path: Path, run: RunFolder) -> Place:
    """A saved state, named after its run and the updates that made it."""
    from trainer.runs.checkpoint import read_state

    done = read_state(path).optimizer_step
    record = run.read()
    return Place(path, f"{path.name if record is None else record.run_id}@{done}", done)


def _final(run: RunFolder) -> Place:
    """What a run ended with: its last weights, or its best ones if it exports those."""
    from trainer.config import ValidationConfig
    from trainer.monitor.validation import exported_step
    from trainer.runs.checkpoint import read_state

    newest, record = _newest_saved(run), run.read()
    name = run.path.name if record is None else record.run_id
    if newest is None:
        return Place(settled(run.final), f"{name}@final")
    state = read_state(newest)
    options = state.config.get("validation")
    options = None if options is None else validated(ValidationConfig, options, f"{newest / STATE_FILE}: ")
    return Place(settled(run.final), f"{name}@final", exported_step(state.validations, options) or state.optimizer_step)


def _written(place: Path) -> tuple[int, ...]:
    """Updates done and attempt of a checkpoint, by its name."""
    return tuple(int(part) for part in place.name.split("-") if part.isdecimal())


def _newest_saved(run: RunFolder) -> Path | None:
    """The folder of the newest checkpoint."""
    return max((file.parent for file in run.checkpoints.glob(f"step-*/{STATE_FILE}")), default=None, key=_written)


def _rows(snapshot: Snapshot, text: str) -> pl.DataFrame:
    """Rows of `checkpoints` that RUN[@STEP] or JOB[@STEP] can mean; the first part of a job's id will do."""
    name, _, step = text.rpartition("@") if "@" in text else (text, "", "")
    rows = collected(snapshot.scan("checkpoints"))
    texts = pl.Series([ids.to_text(job) for job in rows["job_id"]], dtype=pl.String)
    short = name.strip().lower()
    named = rows.filter(pl.col("run_id") == name)
    rows = rows.filter(texts.str.starts_with(short)) if named.is_empty() and short else named
    if not step:
        return rows
    return rows.filter(pl.col("optimizer_step") == int(step)) if step.isdecimal() else rows.clear()


def _known(snapshot: Snapshot) -> str:
    rows = collected(
        snapshot.scan("checkpoints").sort("at", descending=True).select("run_id", "optimizer_step").head(5)
    )
    listed = ", ".join(f"{run}@{step}" for run, step in rows.rows())
    return f"The newest in the lake: {listed}" if listed else "The table `checkpoints` is empty"
