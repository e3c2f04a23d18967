"""Offline training: start a run over the lake, or resume one that was killed, with the same final weights.

Selection and plan are made again on resumption, from the pinned snapshot, and must come out the same; the newest row of
`checkpoints` says where to go on.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch  # noqa: TID253 - loaded by commands only when they train

from lake import ids
from lake.errors import CheckpointError, ContractError, UsageError
from lake.jobs import Job
from lake.lake import Lake
from lake.pins import Lease
from trainer.backend import SingleDevice
from trainer.checkpoint import changed_environment, load_checkpoint
from trainer.config import TrainConfig
from trainer.digest import tensor_digest
from trainer.lineage import job_status, newest_checkpoint, next_attempt
from trainer.losses import LOSSES
from trainer.model import Policy, load_policy
from trainer.preparation import Prepared, load_tokenizer, prepare, prepare_at
from trainer.refusals import refuse
from trainer.runs import RunFolder, RunRecord
from trainer.schedule import default_learning_rate
from trainer.training_run import Progress, TrainingRun, TrainResult


def make_deterministic(config: TrainConfig) -> None:
    """Let torch use only algorithms that repeat exactly, with a fixed number of threads."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(mode=True)
    # Filling fresh memory would only help code that reads it uninitialised.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if config.threads is not None:
        torch.set_num_threads(config.threads)


def resolve(config: TrainConfig, policy: Policy) -> TrainConfig:
    """The configuration with what it leaves open filled in: learning rate, threads, live_only."""
    return config.model_copy(
        update={
            "learning_rate": config.learning_rate or default_learning_rate(policy.num_parameters),
            "threads": torch.get_num_threads(),
            "live_only": LOSSES[config.loss].needs.advantages if config.live_only is None else config.live_only,
        }
    )


def train(lk: Lake, config: TrainConfig, out: Path, *, run_id: str, on_step: Progress | None = None) -> TrainResult:
    """Start a run.

    Args:
        lk: data, and where lineage goes.
        config: the run.
        out: its folder, in which no run was started before.
        run_id: its name.
        on_step: called after each update.

    Raises:
        UsageError: the folder holds a run.
        DataRefusedError: the data cannot support the loss.
    """
    folder = RunFolder(out)
    with folder.locked():
        if folder.read() is not None:
            msg = f"{out} holds a run already; continue it with --resume, or choose another --out"
            raise UsageError(msg)
        make_deterministic(config)
        policy = load_policy(config.model, config.device)
        config = resolve(config, policy)
        prepared = prepare(lk, config, load_tokenizer(config.model))
        refuse(prepared.refusals)
        backend = SingleDevice(policy, config.optimizer)
        job = lk.job(
            kind="train",
            run_id=run_id,
            parameters=config.model_dump(mode="json"),
            code=_code(config),
            snapshot=prepared.snapshot,
        )
        with _leased(lk, prepared, run_id), _left_open_when_interrupted(job):
            record = RunRecord(
                job_id=job.job_id,
                run_id=run_id,
                config=config.model_dump(mode="json"),
                snapshot=prepared.snapshot.versions,
                source=prepared.selection.source,
                plan_hash=ids.to_text(prepared.plan.plan_hash),
                model_sha256=tensor_digest(backend.get_weights()),
            )
            folder.write(record)
            return TrainingRun(job, folder, record, prepared, backend, config).finish(first=0, on_step=on_step)


def resume(lk: Lake, out: Path, *, on_step: Progress | None = None) -> TrainResult:
    """Continue a run from its newest checkpoint, or state the result of a finished one.

    Args:
        lk: the lake that the run was started on.
        out: its folder.
        on_step: called after each update.

    Raises:
        CheckpointError: no run there, it failed for good, a checkpoint or the model is missing or damaged, or the plan
            came out differently.
    """
    folder = RunFolder(out)
    with folder.locked():
        record = folder.read()
        if record is None:
            msg = f"{out} holds no run to resume; leave out --resume to start one"
            raise CheckpointError(msg)
        newest = newest_checkpoint(lk, record.job_id)
        status = job_status(lk, record.job_id)
        if status == "succeeded" and newest is not None:
            notes = ["this run had finished already"]
            return TrainResult(record.job_id, newest["optimizer_step"], newest["sha256"], folder.final, notes)
        if status != "started":
            msg = f'the run in {out} {status}; `trajlake sql "SELECT error FROM job_runs"` says why; start another'
            raise CheckpointError(msg)
        config = TrainConfig.model_validate(record.config)
        make_deterministic(config)
        backend = SingleDevice(load_policy(config.model, config.device), config.optimizer)
        prepared = _prepare_again(lk, config, record, backend)
        first = 0 if newest is None else _load(folder, newest, backend, prepared)
        job = lk.job(
            kind="train",
            run_id=record.run_id,
            parameters=record.config,
            code=_code(config),
            snapshot=prepared.snapshot,
            job_id=record.job_id,
            attempt=next_attempt(lk, record.job_id),
        )
        with _leased(lk, prepared, record.run_id), _left_open_when_interrupted(job):
            return TrainingRun(job, folder, record, prepared, backend, config).finish(first=first, on_step=on_step)


def _leased(lk: Lake, prepared: Prepared, run_id: str) -> Lease:
    """Keeps the run's data from vacuum while it trains."""
    return lk.lease(prepared.snapshot, f"train {run_id}")


@contextmanager
def _left_open_when_interrupted(job: Job) -> Iterator[None]:
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


def _code(config: TrainConfig) -> list[ModuleType]:
    """The modules whose source decides the result."""
    names = [
        "selection",
        "sequences",
        "plan",
        "packing",
        "collate",
        "attention",
        "model",
        "backend",
        "loop",
        "schedule",
    ]
    return [import_module(f"trainer.{name}") for name in [*names, f"losses.{config.loss}"]]


def _prepare_again(lk: Lake, config: TrainConfig, record: RunRecord, backend: SingleDevice) -> Prepared:
    """The same plan from the same data and the same model.

    Raises:
        CheckpointError: the model or the plan is another.
    """
    if tensor_digest(backend.get_weights()) != record.model_sha256:
        msg = f"the model in {config.model} is not the one that the run started from; put that one back"
        raise CheckpointError(msg)
    prepared = prepare_at(lk.at(record.snapshot), config, load_tokenizer(config.model), record.source)
    found = ids.to_text(prepared.plan.plan_hash)
    if found != record.plan_hash:
        msg = f"the run's plan comes out differently now ({found}, it was {record.plan_hash}): was trajlake updated?"
        raise CheckpointError(msg)
    return prepared


def _load(folder: RunFolder, row: dict[str, Any], backend: SingleDevice, prepared: Prepared) -> int:
    """Load the checkpoint of a row of `checkpoints`; its number of updates."""
    place = folder.path / "checkpoints" / Path(row["uri"]).name
    state = load_checkpoint(place, backend)
    prepared.notes.extend(changed_environment(state))
    if state.weights_sha256 != row["sha256"] or state.plan_hash != ids.to_text(prepared.plan.plan_hash):
        msg = f"checkpoint {place} is not the one that the table `checkpoints` names; restore it, or train again"
        raise CheckpointError(msg)
    return state.optimizer_step
