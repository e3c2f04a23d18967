"""Offline training: start a run over the lake, or resume one that was killed, with the same final weights.

What speaks against a run is looked for first, the cheapest first: folder, model folder, data. torch and the weights are
loaded when nothing does.

Selection and plan are made again on resumption, from the pinned snapshot, and must come out the same; the newest row of
`checkpoints` says where to go on.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lake import ids
from lake.errors import CheckpointError, UsageError
from lake.execution.cores import threads_for
from lake.lake import Lake
from lake.settings import validated
from lake.storage.atomic import settled
from trainer.backends.ranks import Ranks, join_ranks
from trainer.config import TrainConfig
from trainer.data.plan.preparation import Prepared, find_source, prepare, prepare_at
from trainer.data.select.refusals import refuse
from trainer.monitor.loggers import check_installed
from trainer.policy.model_folder import check_model_folder, stored_parameters
from trainer.runs.runs import (
    RunFolder,
    RunRecord,
    checkpoints_of,
    final_digest,
    job_row,
    leased,
    left_open_when_interrupted,
    locked,
    newest_checkpoint,
    next_attempt,
    prepare_on_ranks,
    run_job,
)
from trainer.train_settings import describe_idle, idle_options

if TYPE_CHECKING:
    from trainer.backends.base import PolicyBackend
    from trainer.policy.model import Policy
    from trainer.runs.checkpoint import State
    from trainer.runs.training_run import Evaluation, Progress, TrainResult


OnPlan = Callable[[Prepared], None]
"""Called when it is known what will be trained on; what it takes off `notes` is not in the result again."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What a repeated run has to start from, as the lake holds it."""

    snapshot: Mapping[str, int]
    """Table versions that the run read."""
    plan_hash: str
    """Of its plan, as 13 characters."""
    model_sha256: str
    """Digest of the weights that it started from."""


def make_deterministic(config: TrainConfig) -> None:
    """Let torch use only algorithms that repeat exactly, with a fixed number of threads.

    Some attention kernels of a GPU have no such form: there it warns, and the run is close to repeatable.
    """
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(mode=True, warn_only=config.device != "cpu")
    # Filling fresh memory would only help code that reads it uninitialised.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if config.threads is not None:
        torch.set_num_threads(config.threads)


def with_threads(config: TrainConfig) -> tuple[TrainConfig, str | None]:
    """The configuration with the number of torch threads that suits its model, and a note that says so.

    A number that is given stays. torch's own number stays for a large model, for a GGUF file, and on a GPU.
    """
    if config.threads is not None or config.device != "cpu":
        return config, None
    size = None if config.model.endswith(".gguf") else stored_parameters(settled(Path(config.model)))
    number = None if size is None else threads_for(size)
    if size is None or number is None:
        return config, "threads: as many as torch takes by itself; `threads` sets another number"
    note = f"threads: {number}, for a model of {size:,} parameters; `threads` sets another number"
    return config.model_copy(update={"threads": number}), note


def resolve(config: TrainConfig, policy: "Policy", max_length: int | None = None) -> TrainConfig:
    """The configuration with what it leaves open filled in; max_length is what fits the data."""
    import torch

    from trainer.runs.factories import default_learning_rate

    return config.model_copy(
        update={
            "learning_rate": config.learning_rate or default_learning_rate(policy.num_trained),
            "threads": torch.get_num_threads(),
            "live_only": config.loss.needs.advantages if config.live_only is None else config.live_only,
            "max_length": config.max_length or max_length,
        }
    )


def train(
    lk: Lake,
    config: TrainConfig,
    out: Path,
    *,
    run_id: str,
    on_step: "Progress | None" = None,
    on_plan: OnPlan | None = None,
    evaluate: "Evaluation | None" = None,
    origin: Origin | None = None,
) -> "TrainResult":
    """Start a run in a folder without one; `origin` is of the run that it repeats, None starts on the newest data.

    Raises:
        UsageError: the folder holds a run, or the model or the device cannot be used.
        DataRefusedError: the data cannot support the loss.
        CheckpointError: what is repeated was trained from another model or another plan.
    """
    ranks, folder = join_ranks(config.device), RunFolder(out)
    with locked(folder, ranks):
        ranks.on_rank_zero(lambda: _check_start(folder, config))
        prepared = prepare_on_ranks(lk, config, lambda: _prepare(lk, config, origin), ranks)
        ranks.on_rank_zero(lambda: refuse(prepared.refusals))
        if idle := idle_options(config):
            prepared.notes.append(describe_idle(idle))
        config, note = with_threads(config)
        if note is not None:
            prepared.notes.append(note)
        if on_plan is not None and ranks.leads:
            on_plan(prepared)
        backend = _backend(config, ranks)
        config = resolve(config, backend.policy, prepared.selection.max_length)
        digest = backend.model_digest()
        if origin is not None:
            _check_same(origin, config, digest, prepared)
        parameters = config.model_dump(mode="json")
        job = run_job(
            lambda: lk.job(
                kind="train", run_id=run_id, parameters=parameters, code=training_code(), snapshot=prepared.snapshot
            ),
            ranks,
        )
        with leased(lk, prepared, run_id, job.job_id, ranks), left_open_when_interrupted(job):
            record = RunRecord(
                job_id=job.job_id,
                run_id=run_id,
                config=parameters,
                snapshot=prepared.snapshot.versions,
                source=prepared.selection.source,
                plan_hash=ids.to_text(prepared.plan.plan_hash),
                model_sha256=digest,
            )
            if ranks.leads:
                folder.write(record)
            from trainer.runs.training_run import TrainingRun

            run = TrainingRun(job, folder, record, prepared, backend, config)
            return run.finish(first=0, on_step=on_step, evaluate=evaluate)


def resume(
    lk: Lake,
    out: Path,
    *,
    on_step: "Progress | None" = None,
    on_plan: OnPlan | None = None,
    evaluate: "Evaluation | None" = None,
) -> "TrainResult":
    """Continue a run from its newest checkpoint, on the lake it was started on; or state how a finished one ended.

    Raises:
        CheckpointError: no run there, it failed for good, a checkpoint or the model is missing or damaged, or the plan
            came out differently.
    """
    folder = RunFolder(out)
    started = folder.read()
    # The device decides how ranks are connected.
    ranks = join_ranks("cpu" if started is None else str(started.config["device"]))
    with locked(folder, ranks):
        previous = ranks.on_rank_zero(lambda: _previous(lk, folder))
        from trainer.monitor.watch import Alarms
        from trainer.runs.training_run import TrainingRun, TrainResult

        record, newest = previous.record, previous.newest
        if previous.final is not None and newest is not None:
            notes = ["this run had finished already"]
            return TrainResult(record.job_id, newest["optimizer_step"], previous.final, folder.final, notes)
        config = validated(TrainConfig, record.config, f"{folder.path / 'run.json'}: ")
        ranks.on_rank_zero(lambda: check_model(config))
        prepared = prepare_at(lk.at(record.snapshot), config, record.source)
        if on_plan is not None and ranks.leads:
            on_plan(prepared)
        backend = _backend(config, ranks)
        origin = Origin(record.snapshot, record.plan_hash, record.model_sha256)
        _check_same(origin, config, backend.model_digest(), prepared)
        state = None if newest is None else _load(folder, newest, backend, prepared)
        job = run_job(
            lambda: lk.job(
                kind="train",
                run_id=record.run_id,
                parameters=record.config,
                code=training_code(),
                snapshot=prepared.snapshot,
                job_id=record.job_id,
                attempt=next_attempt(lk, record.job_id),
            ),
            ranks,
        )
        with leased(lk, prepared, record.run_id, job.job_id, ranks), left_open_when_interrupted(job):
            run = TrainingRun(job, folder, record, prepared, backend, config)
            run.written = previous.written
            if state is not None:
                run.history = list(state.validations)
                run.alarms = Alarms(config.alarms, state.first_entropy, set(state.standing_alarms))
            first = 0 if state is None else state.optimizer_step
            return run.finish(first=first, on_step=on_step, evaluate=evaluate)


@dataclass(frozen=True, slots=True)
class _Previous:
    """What a run left behind, to go on from."""

    record: RunRecord
    newest: dict[str, Any] | None
    """Row of its newest checkpoint."""
    written: list[tuple[int, Path]]
    """Updates done and place of its checkpoints."""
    final: str | None
    """Digest of what it ended with; None if it has not ended."""


def _previous(lk: Lake, folder: RunFolder) -> _Previous:
    """What a run left behind; a CheckpointError where there is none, or it failed for good."""
    record = folder.read()
    if record is None:
        raise CheckpointError(f"{folder.path} holds no run to resume; leave out --resume to start one")
    newest = newest_checkpoint(lk, record.job_id)
    row = job_row(lk, record.job_id)
    finished = row["status"] == "succeeded" and newest is not None
    if row["status"] != "started" and not finished:
        query = f"SELECT error FROM job_runs WHERE job_id = id('{ids.to_text(record.job_id)}')"
        msg = f'the run in {folder.path} {row["status"]}; `trajlake sql "{query}"` says why; start another'
        raise CheckpointError(msg)
    final = (final_digest(row["counts"]) or newest["sha256"]) if finished and newest is not None else None
    return _Previous(record, newest, checkpoints_of(lk, record.job_id, folder), final)


def _check_start(folder: RunFolder, config: TrainConfig) -> None:
    """What a run needs beside its data: a folder without a run (else a UsageError), and what `check_model` asks for."""
    if folder.read() is not None:
        raise UsageError(f"{folder.path} holds a run already; continue it with --resume, or choose another --out")
    check_model(config)


def check_model(config: TrainConfig) -> None:
    """Whether model and device can be used (else a UsageError), as far as that shows without torch on a CPU.

    A MissingExtraError where a logger is not installed.
    """
    for model in filter(None, (config.model, config.reference)):
        if not model.endswith(".gguf"):
            check_model_folder(settled(Path(model)))
    check_installed(config.loggers)
    if config.device != "cpu":
        from trainer.policy.model import check_device

        check_device(config.device)


def _backend(config: TrainConfig, ranks: Ranks) -> "PolicyBackend":
    """The model in training; torch is loaded here, once everything else is known to be in order."""
    from trainer.runs.factories import make_backend

    make_deterministic(config)
    return make_backend(config, ranks)


_ROOMS = ("backends", "data", "losses", "policy")
_ALONE = ("runs.loop", "runs.factories")


def training_code() -> list[ModuleType]:
    """The modules whose source decides the result."""
    rooms = [import_module(f"trainer.{room}") for room in _ROOMS]
    inside = [module.name for room in rooms for module in walk_packages(room.__path__, f"{room.__name__}.")]
    return [*rooms, *map(import_module, [*(f"trainer.{name}" for name in _ALONE), *inside])]


def _prepare(lk: Lake, config: TrainConfig, origin: Origin | None) -> Prepared:
    """Selection and plan on the newest snapshot, or on that of the run that is repeated."""
    if origin is None:
        return prepare(lk, config)
    snapshot = lk.at(dict(origin.snapshot))
    return prepare_at(snapshot, config, find_source(snapshot, config))


def _check_same(origin: Origin, config: TrainConfig, model_sha256: str, prepared: Prepared) -> None:
    """Refuse (CheckpointError) a repetition that starts from other weights or makes another plan."""
    if model_sha256 != origin.model_sha256:
        msg = f"the model in {config.model} is not the one that the run started from; put that one back"
        raise CheckpointError(msg)
    found = ids.to_text(prepared.plan.plan_hash)
    if found != origin.plan_hash and prepared.snapshot.forgotten:
        raise CheckpointError(
            f"{prepared.snapshot.forgotten} episodes of what the run read were erased with `trajlake forget`, so it "
            "cannot be continued or repeated exactly; start another run"
        )
    if found != origin.plan_hash:
        msg = f"the run's plan comes out differently now ({found}, it was {origin.plan_hash}): was trajlake updated?"
        raise CheckpointError(msg)


def _load(folder: RunFolder, row: dict[str, Any], backend: "PolicyBackend", prepared: Prepared) -> "State":
    """Load the checkpoint of a row of `checkpoints`."""
    from trainer.runs.checkpoint import changed_environment, load_checkpoint

    place = folder.checkpoints / Path(row["uri"]).name
    state = load_checkpoint(place, backend)
    prepared.notes.extend(changed_environment(state, backend.world_size))
    if state.weights_sha256 != row["sha256"] or state.plan_hash != ids.to_text(prepared.plan.plan_hash):
        msg = f"checkpoint {place} is not the one that the table `checkpoints` names; restore it, or train again"
        raise CheckpointError(msg)
    return state
