"""Find a checkpoint by name, and load its policy.

A checkpoint is named by a folder (a model in Hugging Face layout, a run of `trajlake train`, one of its checkpoints), a
.gguf file, or a row of the table `checkpoints` as RUN, RUN@STEP, JOB or JOB@STEP. The default step is the newest.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from lake import ids
from lake.errors import CheckpointError, UsageError
from lake.read.parquet import collect_rows
from lake.read.snapshot import Snapshot
from lake.settings import validate
from lake.storage.atomic import find_settled
from trainer.runs.folder import RunFolder

if TYPE_CHECKING:
    from trainer.config import TrainConfig
    from trainer.policy.model import PackedPolicy

STATE_FILE = "state.json"
"""File that a checkpoint's folder has and a model's folder lacks."""
_EXPECTED = "a model folder, a run's folder, a checkpoint's folder, a .gguf file, or RUN[@STEP] or JOB[@STEP]"


@dataclass(frozen=True, slots=True)
class CheckpointLocation:
    """Path and name of a checkpoint or model."""

    path: Path
    """A model folder, a .gguf file, or a checkpoint's folder."""
    name: str
    """Default name in tables and messages."""
    policy_version: int | None = None
    """Number of updates that made it, if known."""

    @property
    def is_checkpoint(self) -> bool:
        """Return whether this is a training run's saved state and not an ordinary model."""
        return (self.path / STATE_FILE).is_file()


def find_checkpoint(snapshot: Snapshot, text: str) -> CheckpointLocation:
    """Locate a checkpoint.

    Raises:
        UsageError: no checkpoint or several checkpoints have that name.
        CheckpointError: its folder was deleted.
    """
    path = Path(text)
    if find_settled(path).exists():
        return locate_on_disk(path.resolve())
    rows = select_checkpoint_rows(snapshot, text)
    if rows.is_empty():
        newest = snapshot.scan("checkpoints").sort("at", descending=True).select("run_id", "optimizer_step").head(5)
        names = ", ".join(f"{run}@{step}" for run, step in collect_rows(newest).rows())
        advice = f"The newest in the lake: {names}" if names else "The table `checkpoints` is empty"
        raise UsageError(f"there is no checkpoint {text!r}; give {_EXPECTED}. {advice}")
    if rows["job_id"].n_unique() > 1:
        jobs = ", ".join(ids.to_text(job) for job in rows["job_id"].unique(maintain_order=True))
        raise UsageError(f"{text!r} names checkpoints of several jobs: {jobs}; give one of these, as JOB[@STEP]")
    row = rows.sort("optimizer_step", "attempt").row(-1, named=True)
    folder = Path(row["uri"])
    if not (folder / STATE_FILE).is_file():
        msg = f"checkpoint {text!r} was in {folder}, which no longer exists; name another checkpoint, or its folder"
        raise CheckpointError(msg)
    return CheckpointLocation(folder, f"{row['run_id']}@{row['optimizer_step']}", row["policy_version"])


def open_policy(location: CheckpointLocation, device: str) -> tuple["PackedPolicy", str]:
    """Load the policy of a checkpoint with float32 weights; return it with the path of its tokenizer.

    Raises:
        UsageError: no such model.
        CheckpointError: the checkpoint is missing, damaged, or of another model.
    """
    from trainer.policy.model import load_policy

    if not location.is_checkpoint:
        return load_policy(location.path, device), str(location.path)

    from trainer.backends.base import SingleDevice
    from trainer.config import OptimizerConfig
    from trainer.policy.model import build_policy
    from trainer.runs.checkpoint import load_weights

    config = read_training_config(location).model_copy(update={"dtype": "float32"})
    policy = build_policy(config, device)
    load_weights(location.path, SingleDevice(policy, OptimizerConfig()))
    return policy, config.model


def read_training_config(location: CheckpointLocation) -> "TrainConfig":
    """Return the configuration of the run that saved a checkpoint. Raises CheckpointError: it is damaged."""
    from trainer.config import TrainConfig
    from trainer.runs.checkpoint import read_state

    try:
        return validate(TrainConfig, read_state(location.path).config)
    except UsageError as error:
        msg = f"checkpoint {location.path}: its configuration is damaged, or of another version of trajlake: {error}"
        raise CheckpointError(msg) from error


def locate_on_disk(path: Path) -> CheckpointLocation:
    """Locate the model, run, checkpoint or .gguf file at a path."""
    if (path / STATE_FILE).is_file():
        return locate_saved_state(path, RunFolder(path.parent.parent))
    run = RunFolder(path)
    if not is_run_folder(run):
        parent = RunFolder(path.parent)
        if path.name == parent.final.name and is_run_folder(parent):
            return locate_final_model(parent)
        return CheckpointLocation(find_settled(path), path.stem if path.suffix == ".gguf" else path.name)
    if find_settled(run.final).is_dir():
        return locate_final_model(run)
    newest = find_newest_state(run)
    if newest is None:
        raise CheckpointError(f"the run in {path} has no checkpoint yet; continue it with `trajlake train --resume`")
    return locate_saved_state(newest, run)


def is_run_folder(run: RunFolder) -> bool:
    """Return whether a folder is that of a run. A loop's folder has no record, because the lake holds it."""
    if run.read() is not None:
        return True
    is_model = (find_settled(run.path) / "config.json").exists()
    return not is_model and (find_settled(run.final).is_dir() or find_newest_state(run) is not None)


def locate_saved_state(path: Path, run: RunFolder) -> CheckpointLocation:
    """Locate a saved state; its name is that of its run with the number of updates."""
    from trainer.runs.checkpoint import read_state

    step = read_state(path).optimizer_step
    record = run.read()
    name = path.name if record is None else record.run_id
    return CheckpointLocation(path, f"{name}@{step}", step)


def locate_final_model(run: RunFolder) -> CheckpointLocation:
    """Locate a run's final model: its last weights, or its best ones if it exports those."""
    from trainer.config import ValidationConfig
    from trainer.monitor import find_best_step
    from trainer.runs.checkpoint import read_state

    newest, record = find_newest_state(run), run.read()
    name = run.path.name if record is None else record.run_id
    if newest is None:
        return CheckpointLocation(find_settled(run.final), f"{name}@final")
    state = read_state(newest)
    options = state.config.get("validation")
    options = None if options is None else validate(ValidationConfig, options, f"{newest / STATE_FILE}: ")
    best = find_best_step(state.validations, options) if options is not None and options.export else None
    return CheckpointLocation(find_settled(run.final), f"{name}@final", best or state.optimizer_step)


def find_newest_state(run: RunFolder) -> Path | None:
    """Return the folder of the newest checkpoint, by the updates and the attempt in its name."""
    folders = [file.parent for file in run.checkpoints.glob(f"step-*/{STATE_FILE}")]
    return max(
        folders, default=None, key=lambda folder: [int(part) for part in folder.name.split("-") if part.isdecimal()]
    )


def select_checkpoint_rows(snapshot: Snapshot, text: str) -> pl.DataFrame:
    """Return the rows of `checkpoints` that match RUN[@STEP] or JOB[@STEP]; a prefix of a job's id matches."""
    name, _, step = text.rpartition("@") if "@" in text else (text, "", "")
    rows = collect_rows(snapshot.scan("checkpoints"))
    job_texts = pl.Series([ids.to_text(job) for job in rows["job_id"]], dtype=pl.String)
    prefix = name.strip().lower()
    named = rows.filter(pl.col("run_id") == name)
    rows = rows.filter(job_texts.str.starts_with(prefix)) if named.is_empty() and prefix else named
    if not step:
        return rows
    return rows.filter(pl.col("optimizer_step") == int(step)) if step.isdecimal() else rows.clear()
