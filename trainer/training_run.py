"""A training run at work: updates, checkpoints, lineage, and the exported model.

Order of writes at a checkpoint: its folder (complete or absent), then the rows of `batches` and `metrics` since the one
before, then its row in `checkpoints`. A run resumes from the newest row, so a kill between any two of them only repeats
work: what the dead attempt had written for those steps is superseded by the new attempt's rows (views `trained_batches`
and `run_metrics`), and the weights come out the same.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import polars as pl

from lake.jobs import Job
from trainer.atomic import atomic_folder
from trainer.backend import SingleDevice
from trainer.checkpoint import State, save_checkpoint
from trainer.config import TrainConfig
from trainer.digest import tensor_digest
from trainer.estimate import SPEED
from trainer.loop import StepReport, batches_frame, run_steps
from trainer.metrics import JsonlLog, metrics_frame
from trainer.preparation import Prepared, load_tokenizer
from trainer.runs import RunFolder, RunRecord

Progress = Callable[[StepReport, int], None]
"""Called after each update with its report and the run's number of optimizer steps."""


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What a run came to."""

    job_id: int
    """The training job."""
    optimizer_steps: int
    """Updates of the whole run."""
    weights_sha256: str
    """Digest of the final weights."""
    model: Path
    """The trained model in Hugging Face layout."""
    notes: list[str] = field(default_factory=list)
    """What a user should know."""


@dataclass(slots=True)
class TrainingRun:
    """A run from some optimizer step to its end."""

    job: Job
    """The training job, started."""
    folder: RunFolder
    """Where checkpoints and the model go."""
    record: RunRecord
    """What was started."""
    prepared: Prepared
    """Data and plan."""
    backend: SingleDevice
    """Weights and optimizer as they are after the steps done so far."""
    config: TrainConfig
    """Resolved."""
    pending: list[StepReport] = field(default_factory=list)
    """Updates done that no checkpoint holds yet."""
    tokens: int = 0
    """Tokens of the updates this attempt did."""
    seconds: float = 0.0
    """Wall time of these updates."""

    def finish(self, *, first: int, on_step: Progress | None) -> TrainResult:
        """Do all optimizer steps from `first` on, then export the model."""
        plan, config = self.prepared.plan, self.config
        total = len(plan.steps)
        assert config.learning_rate is not None
        steps = run_steps(self.backend, self.prepared.snapshot, plan, config, peak=config.learning_rate, first=first)
        with JsonlLog(self.folder.metrics, self.job.attempt) as log:
            for report in steps:
                self.pending.append(report)
                self.tokens += report.step.tokens
                self.seconds += report.metrics["seconds"]
                log.write(report.step.index, report.metrics)
                done = report.step.index + 1
                if done % config.checkpoint_every == 0 or done == total:
                    self._checkpoint(done)
                if on_step is not None:
                    on_step(report, total)
        self._export()
        digest = tensor_digest(self.backend.get_weights())
        self.job.counts |= self._counts() | {"weights_sha256": digest}
        return TrainResult(self.job.job_id, total, digest, self.folder.final, self.prepared.notes)

    def _checkpoint(self, done: int) -> None:
        """Write a checkpoint: its folder, then what led to it, then its row."""
        place = self.folder.checkpoint(done, self.job.attempt)
        epoch = self.pending[-1].step.epoch
        record = self.record
        state = State(
            optimizer_step=done,
            epoch=epoch,
            plan_hash=record.plan_hash,
            snapshot=record.snapshot,
            config=record.config,
        )
        state = save_checkpoint(place, self.backend, state)
        self.job.write("batches", batches_frame(self.prepared.plan, self.pending))
        self.job.write("metrics", metrics_frame([(r.step.index, r.metrics) for r in self.pending]))
        cursor = {"epoch": epoch, "next_step": done, "plan_hash": record.plan_hash}
        row = {
            "optimizer_step": done,
            "run_id": record.run_id,
            "policy_version": done,
            "uri": str(place.resolve()),
            "sha256": state.weights_sha256,
            "at": datetime.now(UTC),
            "data_snapshot": msgspec.json.encode(record.snapshot).decode(),
            "cursor": msgspec.json.encode(cursor).decode(),
        }
        self.job.write("checkpoints", pl.DataFrame([row]))
        self.pending.clear()

    def _export(self) -> None:
        """The model and its tokenizer as an ordinary Hugging Face folder."""
        tokenizer = load_tokenizer(self.config.model)
        with atomic_folder(self.folder.final) as partial:
            self.backend.policy.model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)

    def _counts(self) -> dict[str, int | float | str]:
        """Figures for the job's terminal row."""
        plan, selection = self.prepared.plan, self.prepared.selection
        drops = {f"dropped_{row['reason']}": row["steps"] for row in selection.drops.iter_rows(named=True)}
        return {
            "rows_in": selection.episodes,
            "rows_dropped": selection.episodes - plan.episodes,
            "optimizer_steps": len(plan.steps),
            "sequences": plan.sequences,
            "tokens": plan.tokens,
            "action_tokens": plan.loss_tokens,
            "parameters": self.backend.policy.num_parameters,
            **({SPEED: self.tokens / self.seconds} if self.seconds > 0 else {}),
            **drops,
        }
