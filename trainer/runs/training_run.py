"""A training run at work: updates, checkpoints, lineage, and the exported model.

Order of writes at a checkpoint: its folder (complete or absent), then the rows of `batches` and `metrics` since the one
before, then its row in `checkpoints`. A run resumes from the newest row, so a kill between any two of them only repeats
work: what the dead attempt had written for those steps is superseded by the new attempt's rows (views `trained_batches`
and `run_metrics`), and the weights come out the same.

The trained model is exported as an ordinary Hugging Face folder, whatever it was trained on. With LoRA the folder holds
the merged model, and `adapter/` the adapters alone, for engines that load them.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import polars as pl

from lake import ids
from lake.storage.atomic import atomic_folder
from trainer.backends.base import PolicyBackend
from trainer.config import TrainConfig
from trainer.data.plan.preparation import Prepared
from trainer.monitor.loggers import Logger, log, open_loggers
from trainer.monitor.validation import Measurement, best, negative_log_likelihood, should_stop
from trainer.monitor.watch import Alarms, Watch, data_alarms
from trainer.policy.lora import merged, save_adapters
from trainer.policy.model import Policy
from trainer.policy.model_files import add_tied, load_tokenizer
from trainer.runs.batches import batches_frame
from trainer.runs.checkpoint import State, load_checkpoint, save_checkpoint
from trainer.runs.loop import StepReport, run_steps
from trainer.runs.metrics import metrics_frame
from trainer.runs.progress import counted
from trainer.runs.runs import SPEED, RunFolder, RunJob, RunRecord, prune, retained


def export_model(backend: PolicyBackend, config: TrainConfig, folder: Path, *, tied: bool = False) -> None:
    """Write the model and its tokenizer, in place of what is there; across ranks all call it, and rank 0 writes.

    `tied` also writes tied weights by every name: see `add_tied`.
    """
    weights = backend.get_all_weights()
    adapters = {} if config.lora is None else backend.get_weights()
    if backend.rank == 0:
        model = backend.policy.model
        everything = {name: weights[first] for name, first in backend.policy.tied_names().items()}
        with atomic_folder(folder) as partial:
            written = merged(everything, model) if adapters else everything
            model.save_pretrained(partial, state_dict=dict(written))  # it takes tied names out of what it is given
            if tied:
                add_tied(partial, written)
            load_tokenizer(config.model).save_pretrained(partial)
            if config.lora is not None:
                save_adapters(partial / "adapter", adapters, config.lora, base=config.model)
    backend.ranks.wait()


Progress = Callable[[StepReport, int], None]
"""Called after each update with its report and the run's number of optimizer steps."""
Evaluation = Callable[[Policy, int], Mapping[str, float]]
"""Called after each update with the policy and the number of updates done; returns metrics under names of its own."""


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

    job: RunJob
    """The training job, started; on ranks other than 0 it writes nothing."""
    folder: RunFolder
    """Where checkpoints and the model go."""
    record: RunRecord
    """What was started."""
    prepared: Prepared
    """Data and plan."""
    backend: PolicyBackend
    """Weights and optimizer as they are after the steps done so far."""
    config: TrainConfig
    """Resolved."""
    history: list[Measurement] = field(default_factory=list)
    """Measurements on held-out episodes so far."""
    alarms: Alarms = field(init=False)
    """Which are active."""
    written: list[tuple[int, Path]] = field(default_factory=list)
    """Checkpoints on disk that have a row: updates done and place, oldest first."""
    pending: list[StepReport] = field(default_factory=list)
    """Updates done that no checkpoint holds yet."""
    tokens: int = 0
    """Tokens of the updates this attempt did."""
    seconds: float = 0.0
    """Wall time of these updates."""

    def __post_init__(self) -> None:
        self.alarms = Alarms(self.config.alarms)

    def finish(self, *, first: int, on_step: Progress | None, evaluate: Evaluation | None = None) -> TrainResult:
        """Do all optimizer steps from `first` on, or until validation says stop; then export the model."""
        config, notes = self.config, self.prepared.notes
        if first == 0:
            notes += data_alarms(config.alarms, self.prepared.snapshot, self.prepared.selection)
        done = first if self._stopped else self._update(first, on_step, evaluate)
        if self._stopped and config.validation is not None:
            notes.append(
                f"stopped after {counted(done, 'update')}: no improvement in {config.validation.patience} measurements"
            )
        if config.validation is not None and config.validation.export:
            self._load_best()
        export_model(self.backend, config, self.folder.final)
        digest = self.backend.digest()
        self.job.counts |= self._counts(done) | {"weights_sha256": digest}
        return TrainResult(self.job.job_id, done, digest, self.folder.final, notes)

    def _update(self, first: int, on_step: Progress | None, evaluate: Evaluation | None) -> int:
        """Updates, each measured, told and, where it is time, saved; how many are done at the end."""
        plan, config, done = self.prepared.plan, self.config, first
        total = len(plan.steps)
        assert config.learning_rate is not None
        steps = run_steps(self.backend, self.prepared.snapshot, plan, config, peak=config.learning_rate, first=first)
        watch = Watch(config, self.backend.policy, self.backend.world_size, self.alarms)
        with closing(steps), self._loggers() as loggers:
            for report in steps:
                done = report.step.index + 1
                improved = self._validate(done, total, report)
                if evaluate is not None:
                    report.metrics.update(evaluate(self.backend.policy, done))
                watch.observe(report)
                self.pending.append(report)
                self.tokens += report.step.tokens
                self.seconds += report.metrics["seconds"]
                log(loggers, report.step.index, report.metrics)
                if done % config.checkpoint_every == 0 or done == total or improved or self._stopped:
                    self._checkpoint(done)
                if on_step is not None and self.backend.ranks.leads:
                    on_step(report, total)
                if self._stopped:
                    break
        return done

    def _validate(self, done: int, total: int, report: StepReport) -> bool:
        """Measure the held-out episodes if it is time; whether these weights are the best so far and to be exported."""
        options, plan = self.config.validation, self.prepared.validation
        if options is None or plan is None or (done % options.every and done != total):
            return False
        value = negative_log_likelihood(self.backend, self.prepared.snapshot, plan, self.config)
        report.metrics["validation_nll"] = value
        self.history.append((done, value))
        winner = best(self.history, options.min_improvement)
        return options.export and winner is not None and winner[0] == done

    @property
    def _stopped(self) -> bool:
        options = self.config.validation
        return options is not None and should_stop(self.history, options)

    @property
    def _best_step(self) -> int | None:
        options = self.config.validation
        winner = None if options is None else best(self.history, options.min_improvement)
        return None if winner is None else winner[0]

    def _load_best(self) -> None:
        """Put the best weights in place of the last ones."""
        place = dict(self.written).get(-1 if self._best_step is None else self._best_step)
        if place is not None:
            load_checkpoint(place, self.backend)
            self.prepared.notes.append(f"exported: the weights after {self._best_step} updates, the best in validation")

    def _loggers(self) -> AbstractContextManager[list[Logger]]:
        if not self.backend.ranks.leads:
            return nullcontext([])
        return open_loggers(
            self.config.loggers,
            self.folder.path,
            run_id=self.record.run_id,
            key=ids.to_text(self.job.job_id),
            attempt=self.job.attempt,
            config=self.record.config,
        )

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
            validations=self.history,
            first_entropy=self.alarms.first_entropy,
            standing_alarms=sorted(self.alarms.active),
        )
        state = save_checkpoint(place, self.backend, state)
        self.job.write("batches", batches_frame(self.prepared.plan, [report.step for report in self.pending]))
        self.job.write("metrics", metrics_frame([(r.step.index, r.metrics) for r in self.pending]))
        cursor = {
            "epoch": epoch,
            "next_step": done,
            "plan_hash": record.plan_hash,
            "model_sha256": record.model_sha256,
        }
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
        self.written = retained([*self.written, (done, place)], self.config.keep_last, self._best_step)
        if self.config.keep_last is not None and self.backend.ranks.leads:
            prune(self.folder.checkpoints, [path for _, path in self.written])

    def _counts(self, done: int) -> dict[str, int | float | str]:
        """Figures for the job's terminal row."""
        plan, selection = self.prepared.plan, self.prepared.selection
        drops = {f"dropped_{row['reason']}": row["steps"] for row in selection.drops.iter_rows(named=True)}
        return {
            "episodes_in_lake": self.prepared.snapshot.scan("episodes").select(pl.len()).collect().item(),
            "rows_in": selection.episodes,
            "rows_dropped": selection.episodes - plan.episodes,
            "optimizer_steps": done,
            "sequences": plan.sequences,
            "tokens": plan.tokens,
            "action_tokens": plan.loss_tokens,
            "parameters": self.backend.policy.num_parameters,
            **({SPEED: self.tokens / self.seconds} if self.seconds > 0 else {}),
            **drops,
        }
