"""A training run at work: updates, checkpoints, lineage, and the exported model.

Order of writes at a checkpoint: its folder (complete or absent), then the rows of `batches` and `metrics` since the one
before, then its row in `checkpoints`. A run resumes from the newest row, so a kill between any two of them only repeats
work. The rows of the new attempt supersede what the killed attempt wrote for those steps (views `trained_batches` and
`run_metrics`), and the weights come out the same.

The trained model is exported as an ordinary Hugging Face folder. With LoRA the folder holds the merged model, and
`adapter/` the adapters alone, for engines that load them.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import polars as pl
import torch  # noqa: TID253 - a script that does nothing without it

from lake import ids
from lake.errors import UsageError
from lake.progress import track
from lake.read.text_table import format_count
from lake.storage.atomic import atomic_folder
from trainer.backends.base import PolicyBackend
from trainer.config import TrainConfig
from trainer.data.preparation import PreparedRun
from trainer.data.render import compute_engine_encoding, compute_rendered_encoding
from trainer.loggers import Logger, log_metrics, open_loggers
from trainer.monitor import (
    Alarms,
    Measurement,
    UpdateMonitor,
    find_best_step,
    negative_log_likelihood,
    should_stop,
)
from trainer.policy.memory import BUDGETS
from trainer.policy.model import PackedPolicy, merge_adapters, save_adapters
from trainer.policy.model_files import add_tied, load_tokenizer
from trainer.runs.checkpoint import State, load_checkpoint, save_checkpoint
from trainer.runs.folder import SPEED, RunFolder, RunJob, RunRecord, prune, select_retained
from trainer.runs.loop import StepReport, build_batch_rows, build_metric_rows, describe_update, run_steps

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def export_model(backend: PolicyBackend, config: TrainConfig, folder: Path, *, tied: bool = False) -> None:
    """Write the model and its tokenizer, replacing an earlier export; across ranks all call it, and rank 0 writes.

    `tied` also writes tied weights by every name: see `add_tied`.
    """
    weights = backend.get_all_weights()
    adapters = {} if config.lora is None else backend.get_weights()
    if backend.rank == 0:
        model = backend.policy.model
        first_names = backend.policy.map_tied_names()
        by_name = {name: weights[first] for name, first in first_names.items() if first in weights}
        with atomic_folder(folder) as partial:
            written = merge_adapters(by_name, model) if adapters else by_name
            model.save_pretrained(partial, state_dict=dict(written))  # it removes tied names from the mapping
            if tied:
                add_tied(partial, written)
            load_tokenizer(config.model).save_pretrained(partial)
            if config.lora is not None:
                save_adapters(partial / "adapter", adapters, config.lora, base=config.model)
    backend.ranks.wait()


def store_tokenizer(job: RunJob, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Store the tokenizer of a run's model in the lake, so that the text of its tokens can be shown."""
    encoding_ids = [compute_rendered_encoding(tokenizer), compute_engine_encoding(tokenizer)]
    job.store_tokenizer(tokenizer.backend_tokenizer.to_str(), encoding_ids)


Progress = Callable[[StepReport, int], None]
"""Called after each update with its report and the run's number of optimizer steps."""
Evaluation = Callable[[PackedPolicy, int], Mapping[str, float]]
"""Called after each update with the policy and the number of updates done; returns additional metrics by name."""


@dataclass(frozen=True, slots=True)
class TrainResult:
    """The weights of a finished run."""

    job_id: int
    """The training job."""
    optimizer_steps: int
    """Updates of all attempts together."""
    weights_sha256: str
    """Digest of the final weights."""
    model: Path
    """The trained model in Hugging Face layout."""
    notes: list[str] = field(default_factory=list)
    """Sentences for the user."""


@dataclass(frozen=True, slots=True)
class ResolvedRun:
    """A run with everything decided that its configuration leaves open; see `trainer.runs.offline.resolve_run`."""

    run_id: str
    """Name of the run."""
    config: TrainConfig
    """The configuration with threads, longest sequence, dead groups and learning rate filled in."""
    parameters: dict[str, Any]
    """The configuration as the job and every checkpoint store it."""
    prepared: PreparedRun
    """Pinned snapshot, credit, encoding, selection, plan, and held-out episodes."""
    backend: PolicyBackend
    """Policy and optimizer, with the weights of the model or of the checkpoint to continue from."""
    model_sha256: str
    """Digest of the weights that the run starts from."""
    state: State | None
    """State of the checkpoint to continue from; None starts at the first optimizer step."""


@contextmanager
def explain_out_of_memory(config: TrainConfig) -> Iterator[None]:
    """Turn a GPU's lack of memory into a UsageError that says what would fit."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        budget = config.micro_batch_tokens
        fitting = [tokens for tokens in BUDGETS if tokens < budget] or [budget]
        changes = [f"token_budget {fitting[0]}, or auto"]
        if config.gradient_checkpointing is not True:
            changes.append("gradient_checkpointing true")
        if config.lora is None:
            changes += ["optimizer.moments bfloat16"] * (config.optimizer.moments == "float32")
            changes.append("adapters ([trainer.lora])")
        raise UsageError(
            f"the GPU's memory does not hold an update with {format_count(budget, 'token')} a micro-batch "
            f"({str(error).partition('.')[0]}); start another run with one of: {'; '.join(changes)}"
        ) from error


@dataclass(slots=True)
class TrainingRun:
    """A run from some optimizer step to its end."""

    job: RunJob
    """The training job, started; on ranks other than 0 it writes nothing."""
    folder: RunFolder
    """Folder of checkpoints and of the model."""
    record: RunRecord
    """The run as its folder stores it."""
    run: ResolvedRun
    """Configuration, data, plan and policy."""
    written: list[tuple[int, Path]]
    """Checkpoints on disk that have a row: updates done and folder, oldest first."""
    history: list[Measurement] = field(default_factory=list)
    """Measurements on held-out episodes so far."""
    alarms: Alarms = field(init=False)
    """Active alarms, and the figures that they compare with."""
    pending: list[StepReport] = field(default_factory=list)
    """Updates that no checkpoint holds yet."""
    tokens: int = 0
    """Tokens of the updates of this attempt."""
    seconds: float = 0.0
    """Wall time of these updates."""

    def __post_init__(self) -> None:
        config, state = self.run.config, self.run.state
        self.alarms = Alarms(config.alarms)
        if state is not None:
            self.history = list(state.validations)
            self.alarms = Alarms(config.alarms, dict(state.alarm_figures), set(state.standing_alarms))

    def finish(self, *, on_step: Progress | None, evaluate: Evaluation | None = None) -> TrainResult:
        """Do the remaining optimizer steps, or stop early where validation says so; then export the model."""
        config, prepared, backend, state = self.run.config, self.run.prepared, self.run.backend, self.run.state
        first = 0 if state is None else state.optimizer_step
        notes, data = prepared.notes, prepared.selection
        if backend.ranks.leads:
            store_tokenizer(self.job, load_tokenizer(config.model))
        if first == 0:
            notes += self.alarms.check_data(prepared.snapshot, data.source, data.dead_groups, data.groups)
        with explain_out_of_memory(config):
            done = first if self._stopped else self._update(first, on_step, evaluate)
        skips = None if backend.scaler is None else backend.scaler.skips
        if skips:
            notes.append(
                f"{skips} of {format_count(done, 'update')} skipped: gradients were not finite in float16 (metric "
                "`skipped_updates`); a lower optimizer.loss_scale.initial skips fewer at the start"
            )
        if self._stopped and config.validation is not None:
            patience = config.validation.patience
            notes.append(f"stopped after {format_count(done, 'update')}: no improvement in {patience} measurements")
        if config.validation is not None and config.validation.export:
            best = find_best_step(self.history, config.validation)
            folder = dict(self.written).get(-1 if best is None else best)
            if folder is not None:
                load_checkpoint(folder, backend)
                notes.append(f"exported: the weights after {best} updates, the best in validation")
        with track("write the model"):
            export_model(backend, config, self.folder.final)
        digest = backend.digest()
        self.job.counts |= self._counts(done) | {"weights_sha256": digest}
        if skips is not None:
            self.job.counts["skipped_updates"] = skips
        return TrainResult(self.job.job_id, done, digest, self.folder.final, notes)

    def _update(self, first: int, on_step: Progress | None, evaluate: Evaluation | None) -> int:
        """Do updates from `first` on: measure, report and save each where it is due; return how many are done."""
        config, prepared, backend, done = self.run.config, self.run.prepared, self.run.backend, first
        total = len(prepared.plan.steps)
        assert config.learning_rate is not None
        steps = run_steps(backend, prepared.snapshot, prepared.plan, config, peak=config.learning_rate, first=first)
        watch = UpdateMonitor(config, backend.policy, backend.world_size, self.alarms)
        loggers_open: AbstractContextManager[list[Logger]] = nullcontext([])
        if backend.ranks.leads:
            loggers_open = open_loggers(
                config.loggers,
                self.folder.path,
                run_id=self.run.run_id,
                key=ids.to_text(self.job.job_id),
                attempt=self.job.attempt,
                config=self.run.parameters,
            )
        counted = track("train", total, "updates", done=first)
        with closing(steps), loggers_open as loggers, counted as stage:
            for report in steps:
                done = report.step.index + 1
                improved = self._validate(done, total, report)
                if evaluate is not None:
                    report.metrics.update(evaluate(backend.policy, done))
                watch.observe(report)
                self.pending.append(report)
                self.tokens += report.step.tokens
                self.seconds += report.metrics["seconds"]
                log_metrics(loggers, report.step.index, report.metrics)
                if done % config.checkpoint_every == 0 or done == total or improved or self._stopped:
                    self._save(done)
                stage.update(done, note=describe_update(report))
                if on_step is not None and backend.ranks.leads:
                    on_step(report, total)
                if self._stopped:
                    break
        return done

    def _validate(self, done: int, total: int, report: StepReport) -> bool:
        """Measure the held-out episodes if it is due; return whether these weights are the best, and to be exported."""
        options, plan = self.run.config.validation, self.run.prepared.validation
        if options is None or plan is None or (done % options.every and done != total):
            return False
        nats = negative_log_likelihood(self.run.backend, self.run.prepared.snapshot, plan, self.run.config)
        report.metrics["validation_nll"] = nats
        self.history.append((done, nats))
        return options.export and find_best_step(self.history, options) == done

    @property
    def _stopped(self) -> bool:
        options = self.run.config.validation
        return options is not None and should_stop(self.history, options.patience, options.min_improvement)

    def _save(self, done: int) -> None:
        """Write a checkpoint: its folder, then the rows of its updates, then its own row."""
        folder = self.folder.checkpoint(done, self.job.attempt)
        epoch, record, prepared = self.pending[-1].step.epoch, self.record, self.run.prepared
        state = State(
            optimizer_step=done,
            epoch=epoch,
            plan_hash=record.plan_hash,
            snapshot=record.snapshot,
            config=self.run.parameters,
            validations=self.history,
            alarm_figures=dict(self.alarms.figures),
            standing_alarms=sorted(self.alarms.active),
        )
        state = save_checkpoint(folder, self.run.backend, state)
        self.job.write("batches", build_batch_rows(prepared.plan, [report.step for report in self.pending]))
        self.job.write("metrics", build_metric_rows([(r.step.index, r.metrics) for r in self.pending]))
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
            "uri": str(folder.resolve()),
            "sha256": state.weights_sha256,
            "at": datetime.now(UTC),
            "data_snapshot": msgspec.json.encode(record.snapshot).decode(),
            "cursor": msgspec.json.encode(cursor).decode(),
        }
        self.job.write("checkpoints", pl.DataFrame([row]))
        self.pending.clear()
        config, written = self.run.config, [*self.written, (done, folder)]
        self.written = select_retained(written, config.keep_last, find_best_step(self.history, config.validation))
        if config.keep_last is not None and self.run.backend.ranks.leads:
            prune(self.folder.checkpoints, [path for _, path in self.written])

    def _counts(self, done: int) -> dict[str, int | float | str]:
        """Return figures for the job's terminal row."""
        plan, selection = self.run.prepared.plan, self.run.prepared.selection
        drops = {f"dropped_{row['reason']}": row["steps"] for row in selection.drops.iter_rows(named=True)}
        return {
            "episodes_in_lake": self.run.prepared.snapshot.scan("episodes").select(pl.len()).collect().item(),
            "rows_in": selection.episodes,
            "rows_dropped": selection.episodes - plan.episodes,
            "optimizer_steps": done,
            "sequences": plan.sequences,
            "tokens": plan.tokens,
            "action_tokens": plan.loss_tokens,
            "parameters": self.run.backend.policy.num_parameters,
            "attention": self.run.backend.policy.attention,
            "kernels": self.run.backend.policy.kernels,
            **({SPEED: self.tokens / self.seconds} if self.seconds > 0 else {}),
            **drops,
        }
