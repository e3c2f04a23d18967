"""Offline training: start a run over the lake, resume one, repeat one, or train several stages in a row.

All of them take one path. A `RunStart` says what the run begins with. `resolve_run` decides everything that its
configuration leaves open, and `TrainingRun` trains the result. Faults are looked for first, the cheapest first:
folder, model folder, data. torch and the weights are loaded only when none is found.

A resumed or repeated run makes selection and plan again from the pinned snapshot, and they must come out the same. A
resumed run continues after the newest row of `checkpoints`, and ends with the weights of an uninterrupted one. A
repeated run ends with the same weights on the same machine, number of threads and versions; its first note says
whether it did.

A stage is an ordinary run in a folder below --out, with its job and its checkpoints. A stage without `model` starts
from the weights of the stage before it.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec
import polars as pl

from lake import ids
from lake.errors import CheckpointError, UsageError
from lake.execution.local import choose_threads
from lake.judgements.credit import Credit
from lake.lake import Lake
from lake.progress import track
from lake.read.text_table import format_count
from lake.settings import validate
from lake.storage.atomic import find_settled
from trainer.backends.ranks import Ranks, join_ranks
from trainer.config import TrainConfig
from trainer.data.preparation import PreparedRun, find_source, fit_token_budget, prepare, prepare_at
from trainer.data.refusals import refuse
from trainer.data.selection import select_episodes
from trainer.loggers import check_installed
from trainer.policy.model_files import check_model_folder, count_parameters
from trainer.runs.folder import (
    RunFolder,
    RunRecord,
    check_unchanged,
    find_next_attempt,
    keep_open_on_interrupt,
    read_checkpoints,
    read_final_digest,
    read_job,
    read_newest_checkpoint,
    run_job,
)
from trainer.train_settings import Stage, check_stored_layout, describe_idle, find_idle_options

if TYPE_CHECKING:
    from trainer.policy.model import PackedPolicy
    from trainer.runs.training_run import Evaluation, Progress, ResolvedRun, TrainResult

OnPlan = Callable[[PreparedRun], None]
"""Called once the plan is made, before the model is loaded. Notes that it removes from `notes` are not repeated."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What the lake holds of an earlier start that this run must match."""

    snapshot: Mapping[str, int]
    """Table versions that the run read."""
    plan_hash: str
    """Hash of its plan, 13 characters."""
    model_sha256: str
    """Digest of the weights that it started from."""


@dataclass(frozen=True, slots=True)
class RunStart:
    """What a run begins with, before anything that its configuration leaves open is decided."""

    run_id: str
    config: TrainConfig
    origin: Origin | None = None
    """The start to match, of a repeated or resumed run; None starts on the newest data."""
    record: RunRecord | None = None
    """What the folder holds of a resumed run; None starts a run."""
    newest: dict[str, Any] | None = None
    """Row of its newest checkpoint."""
    checkpoints: list[tuple[int, Path]] = field(default_factory=list)
    """Updates done and folder of each of its checkpoints."""
    final_sha256: str | None = None
    """Digest of its final weights; None unless it has ended."""


def make_deterministic(config: TrainConfig) -> None:
    """Let torch use only algorithms that repeat exactly, with a fixed number of threads.

    Some attention kernels of a GPU have no such form: torch warns, and the run is only nearly repeatable.
    """
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(mode=True, warn_only=config.device != "cpu")
    # Filling fresh memory would only help code that reads it uninitialised.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if config.threads is not None:
        torch.set_num_threads(config.threads)


def fit_machine(config: TrainConfig) -> tuple[TrainConfig, str | None]:
    """Return the configuration with token budget and number of torch threads for this machine, and a note on threads.

    A number of threads that the configuration sets stays. A large model, a GGUF file and a GPU keep torch's default.

    Raises:
        UsageError: a GPU's memory holds no update of the model.
    """
    config = fit_token_budget(config)
    if config.threads is not None or config.device != "cpu":
        return config, None
    size = None if config.model.endswith(".gguf") else count_parameters(find_settled(Path(config.model)))
    number = None if size is None else choose_threads(size)
    if size is None or number is None:
        return config, "threads: torch's default; `threads` sets another number"
    note = f"threads: {number}, for a model of {size:,} parameters; `threads` sets another number"
    return config.model_copy(update={"threads": number}), note


def fill_config(config: TrainConfig, policy: "PackedPolicy", max_length: int | None = None) -> TrainConfig:
    """Return the configuration with learning rate, threads, dead groups and longest sequence filled in.

    `max_length` is the longest sequence of the selected data.
    """
    import torch

    from trainer.runs.factories import peak_learning_rate

    return config.model_copy(
        update={
            "learning_rate": peak_learning_rate(config, policy.num_trained),
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
    """Start a run in a folder without one, on the newest data, or on those of `origin`, which it repeats.

    Raises:
        UsageError: the folder holds a run, or the model or the device cannot be used.
        DataRefusedError: the data cannot support the loss.
        CheckpointError: the run to repeat was trained from another model or another plan.
    """

    def find_start() -> RunStart:
        if RunFolder(out).read() is not None:
            raise UsageError(f"{out} holds a run already; continue it with --resume, or choose another --out")
        return RunStart(run_id, config, origin)

    return _run(lk, out, config.device, find_start, on_step, on_plan, evaluate)


def resume(
    lk: Lake,
    out: Path,
    *,
    on_step: "Progress | None" = None,
    on_plan: OnPlan | None = None,
    evaluate: "Evaluation | None" = None,
) -> "TrainResult":
    """Continue a run from its newest checkpoint, on the lake it was started on; or return how a finished one ended.

    Raises:
        CheckpointError: the folder has no run, the run failed, a checkpoint or the model is missing or damaged, or the
            plan came out differently.
    """
    record = RunFolder(out).read()
    # The device decides how ranks are connected.
    device = "cpu" if record is None else str(record.config["device"])
    return _run(lk, out, device, lambda: _read_start(lk, RunFolder(out)), on_step, on_plan, evaluate)


def _run(
    lk: Lake,
    out: Path,
    device: str,
    find_start: Callable[[], RunStart],
    on_step: "Progress | None",
    on_plan: OnPlan | None,
    evaluate: "Evaluation | None",
) -> "TrainResult":
    """Train a run from its start to its end; every start, resumption and repetition comes here."""
    ranks, folder = join_ranks(device), RunFolder(out)
    with ExitStack() as stack:
        ranks.on_rank_zero(lambda: stack.enter_context(folder.lock()))
        start = ranks.on_rank_zero(find_start)
        if start.record is not None and start.newest is not None and start.final_sha256 is not None:
            from trainer.runs.training_run import TrainResult

            notes = ["this run had finished already"]
            steps = start.newest["optimizer_step"]
            return TrainResult(start.record.job_id, steps, start.final_sha256, folder.final, notes)
        run = resolve_run(lk, start, folder, ranks, on_plan)
        from trainer.runs.training_run import TrainingRun

        job_id = None if start.record is None else start.record.job_id
        job = run_job(
            lambda: lk.job(
                kind="train",
                run_id=run.run_id,
                parameters=run.parameters,
                code=list_training_code(),
                snapshot=run.prepared.snapshot,
                job_id=job_id,
                attempt=0 if job_id is None else find_next_attempt(lk, job_id),
            ),
            ranks,
        )
        if ranks.leads:
            # Vacuum keeps leased data. A resumed run takes over the lease that a killed one left.
            stack.enter_context(lk.lease(run.prepared.snapshot, f"train {run.run_id}", job_id=job.job_id))
        with keep_open_on_interrupt(job):
            record = start.record or RunRecord(
                job_id=job.job_id,
                run_id=run.run_id,
                config=run.parameters,
                snapshot=run.prepared.snapshot.versions,
                source=run.prepared.selection.source,
                plan_hash=ids.to_text(run.prepared.plan.plan_hash),
                model_sha256=run.model_sha256,
            )
            if ranks.leads and start.record is None:
                folder.write(record)
            return TrainingRun(job, folder, record, run, start.checkpoints).finish(on_step=on_step, evaluate=evaluate)


def resolve_run(
    lk: Lake, start: RunStart, folder: RunFolder, ranks: Ranks, on_plan: OnPlan | None = None
) -> "ResolvedRun":
    """Decide everything that the configuration of a run leaves open, and load its policy.

    That is: snapshot, credit, token encoding, longest sequence, plan, threads, learning rate and weights. Every rank
    calls it and gets the same. torch is loaded here, after all checks of the data.

    Raises:
        UsageError, DataRefusedError, CheckpointError: as for `train` and `resume`.
    """
    ranks.on_rank_zero(lambda: check_model(start.config))
    config, note = ranks.on_rank_zero(lambda: fit_machine(start.config))
    with track("prepare the data"):
        prepared = _prepare(lk, config, start, ranks)
    if start.record is None:
        if idle := find_idle_options(config):
            prepared.notes.append(describe_idle(idle))
        prepared.notes.extend([] if note is None else [note])
    if on_plan is not None and ranks.leads:
        on_plan(prepared)

    from trainer.runs.factories import make_backend
    from trainer.runs.training_run import ResolvedRun

    make_deterministic(config)
    with track("load the model"):
        backend = make_backend(config, ranks)
    if start.record is None:
        config = fill_config(config, backend.policy, prepared.selection.max_length)
    digest, state = backend.model_digest(), None
    if start.origin is not None:
        _check_same(start.origin, config, digest, prepared)
    if start.newest is not None:
        from trainer.runs.checkpoint import changed_environment, load_checkpoint

        checkpoint = folder.checkpoints / Path(start.newest["uri"]).name
        state = load_checkpoint(checkpoint, backend)
        prepared.notes.extend(changed_environment(state, backend.world_size))
        plan_hash = ids.to_text(prepared.plan.plan_hash)
        if state.weights_sha256 != start.newest["sha256"] or state.plan_hash != plan_hash:
            raise CheckpointError(
                f"checkpoint {checkpoint} is not the one that the table `checkpoints` names; restore it, or train again"
            )
    parameters = config.model_dump(mode="json") if start.record is None else start.record.config
    return ResolvedRun(start.run_id, config, parameters, prepared, backend, digest, state)


def _read_start(lk: Lake, folder: RunFolder) -> RunStart:
    """Read what a run left in its folder and in the lake.

    Raises:
        CheckpointError: the folder has no run, or the run failed.
    """
    record = folder.read()
    if record is None:
        raise CheckpointError(f"{folder.path} holds no run to resume; leave out --resume to start one")
    newest = read_newest_checkpoint(lk, record.job_id)
    job = read_job(lk, record.job_id)
    finished = job["status"] == "succeeded" and newest is not None
    if job["status"] != "started" and not finished:
        query = f"SELECT error FROM job_runs WHERE job_id = id('{ids.to_text(record.job_id)}')"
        msg = f'the run in {folder.path} {job["status"]}; `trajlake sql "{query}"` says why; start another'
        raise CheckpointError(msg)
    return RunStart(
        record.run_id,
        validate(TrainConfig, record.config, f"{folder.path / 'run.json'}: "),
        Origin(record.snapshot, record.plan_hash, record.model_sha256),
        record,
        newest,
        read_checkpoints(lk, record.job_id, folder),
        (read_final_digest(job["counts"]) or newest["sha256"]) if finished and newest is not None else None,
    )


def check_model(config: TrainConfig) -> None:
    """Check that model, device and loggers can be used, as far as that shows without torch on a CPU.

    Raises:
        UsageError: a model folder or a device is unusable.
        MissingExtraError: a logger is not installed.
    """
    for model in filter(None, (config.model, config.reference)):
        if not model.endswith(".gguf"):
            check_model_folder(find_settled(Path(model)))
    check_installed(config.loggers)
    if config.device != "cpu":
        from trainer.policy.model import check_device

        check_device(config.device)


_CODE_PACKAGES = ("backends", "data", "losses", "policy")
_CODE_MODULES = ("runs.loop", "runs.factories")


def list_training_code() -> list[ModuleType]:
    """Return the modules whose source decides the result."""
    packages = [import_module(f"trainer.{name}") for name in _CODE_PACKAGES]
    inside = [module.name for package in packages for module in walk_packages(package.__path__, f"{package.__name__}.")]
    return [*packages, *map(import_module, [*(f"trainer.{name}" for name in _CODE_MODULES), *inside])]


def _prepare(lk: Lake, config: TrainConfig, start: RunStart, ranks: Ranks) -> PreparedRun:
    """Select and plan: rank 0 on the newest snapshot or on that of the start to match, the others on rank 0's.

    Raises:
        DataRefusedError: the data cannot support the loss of a run that starts.
    """
    plans: list[PreparedRun] = []

    def prepare_first() -> tuple[dict[str, int], Credit | None]:
        if start.origin is None:
            prepared = prepare(lk, config)
        else:
            snapshot = lk.at(dict(start.origin.snapshot))
            source = find_source(snapshot, config) if start.record is None else start.record.source
            prepared = prepare_at(snapshot, config, source)
        if start.record is None:
            refuse(prepared.refusals)
        plans.append(prepared)
        return prepared.snapshot.versions, prepared.selection.source

    versions, source = ranks.on_rank_zero(prepare_first)
    return plans[0] if plans else prepare_at(lk.at(versions), config, source)


def _check_same(origin: Origin, config: TrainConfig, model_sha256: str, prepared: PreparedRun) -> None:
    """Refuse (CheckpointError) a run that starts from other weights, or makes another plan, than its origin."""
    if model_sha256 != origin.model_sha256:
        msg = f"the model in {config.model} is not the one that the run started from; put that one back"
        raise CheckpointError(msg)
    plan_hash = ids.to_text(prepared.plan.plan_hash)
    if plan_hash != origin.plan_hash and prepared.snapshot.forgotten:
        raise CheckpointError(
            f"{prepared.snapshot.forgotten} episodes of what the run read were erased with `trajlake forget`, so it "
            "cannot be continued or repeated exactly; start another run"
        )
    if plan_hash != origin.plan_hash:
        raise CheckpointError(
            f"the run's plan comes out differently now ({plan_hash}, it was {origin.plan_hash}): was trajlake updated?"
        )


_RUNS = """
SELECT j.job_id, j.run_id, j.status, j.counts, j.parameters, c.data_snapshot, c.cursor, c.sha256, c.optimizer_step
FROM job_runs AS j JOIN checkpoints AS c USING (job_id)
WHERE j.kind = 'train'
QUALIFY row_number() OVER (PARTITION BY j.job_id ORDER BY c.optimizer_step DESC, c.attempt DESC) = 1
ORDER BY c.at DESC
"""


def repeat_run(
    lk: Lake,
    name: str,
    out: Path,
    *,
    run_id: str,
    on_step: "Progress | None" = None,
    on_plan: OnPlan | None = None,
) -> "TrainResult":
    """Train a run again on the data that it read; the first note says whether the weights are the same.

    Args:
        name: name of the run to repeat, or the id of its job (13 characters or their beginning).

    Raises:
        UsageError: no such run.
        CheckpointError: its data are gone, its model is another, its plan comes out differently, or it was stored by
            a version whose configurations are not read any more.
    """
    row = _find_run(lk, name)
    parameters = msgspec.json.decode(row["parameters"])
    check_stored_layout(parameters, f"run {row['run_id']}")
    config = validate(TrainConfig, parameters, f"run {row['run_id']}: ")
    versions = msgspec.json.decode(row["data_snapshot"], type=dict[str, int])
    cursor = msgspec.json.decode(row["cursor"], type=dict[str, Any])
    origin = Origin(versions, cursor["plan_hash"], cursor["model_sha256"])
    result = train(lk, config, out, run_id=run_id, on_step=on_step, on_plan=on_plan, origin=origin)
    title = f"run {row['run_id']} (job {row['text']})"
    digest = read_final_digest(row["counts"]) or str(row["sha256"])
    if row["status"] != "succeeded":
        verdict = f"{title} did not end, so there are no final weights to compare with"
    elif digest == result.weights_sha256:
        verdict = f"the weights are those of {title}, bit for bit"
    else:
        verdict = f"the weights are not those of {title}: it came to {digest[:16]}..."
    result.notes.insert(0, verdict)
    return result


def _find_run(lk: Lake, name: str) -> dict[str, Any]:
    """Return the row of `_RUNS` of a run's name or of its job's id; a UsageError where none or several match."""
    runs = lk.sql(_RUNS).with_columns(text=pl.col("job_id").map_elements(ids.to_text, return_dtype=pl.String))
    matches = runs.filter(pl.col("run_id") == name)
    if matches.is_empty():
        matches = runs.filter(pl.col("text").str.starts_with(name))
    if matches.is_empty():
        newest = ", ".join(runs["run_id"].unique(maintain_order=True).head(5)) or "none"
        msg = f"--repeat {name}: no training run of that name or job id has a checkpoint; the newest runs: {newest}"
        raise UsageError(msg)
    if matches["job_id"].n_unique() > 1:
        jobs = ", ".join(matches["text"].head(5))
        raise UsageError(f"--repeat {name} means {matches.height} runs; name one by its job: {jobs}")
    return matches.row(0, named=True)


def train_stages(
    lk: Lake,
    stages: list[Stage],
    out: Path,
    *,
    run_id: str,
    on_step: "Progress | None" = None,
    on_plan: OnPlan | None = None,
) -> "TrainResult":
    """Train the stages in their order, and resume those that were started; return the last result, with all notes.

    The run of a stage is called run_id/name, and has the folder `name` in `out`.

    Raises:
        UsageError, DataRefusedError, CheckpointError: faults of a stage; the results of the stages before it stay.
    """
    notes: list[str] = []
    result: TrainResult | None = None
    join_ranks(stages[0].config.device).on_rank_zero(lambda: _check_episodes(lk, stages, out))
    for stage in stages:
        folder, config = out / stage.name, stage.config
        if stage.follows and result is not None:
            config = config.model_copy(update={"model": str(result.model.resolve())})
        ranks = join_ranks(config.device)
        record = ranks.on_rank_zero(RunFolder(folder).read)
        if record is None:
            name = f"{run_id}/{stage.name}"
            result = train(lk, config, folder, run_id=name, on_step=on_step, on_plan=on_plan)
        else:
            check_unchanged(config.model_dump(mode="json", exclude_unset=True), record.config)
            result = resume(lk, folder, on_step=on_step, on_plan=on_plan)
        notes += [f"stage {stage.name}: {note}" for note in result.notes]
        digest = result.weights_sha256[:16]
        notes.append(f"stage {stage.name}: {format_count(result.optimizer_steps, 'optimizer step')}, weights {digest}")
    assert result is not None
    return replace(result, notes=notes)


def _check_episodes(lk: Lake, stages: list[Stage], out: Path) -> None:
    """Check that every stage finds episodes, before hours of training the stages ahead of it.

    Raises:
        UsageError, DataRefusedError: a predicate of a stage that has not been started.
    """
    snapshot = lk.snapshot()
    for stage in stages:
        if RunFolder(out / stage.name).read() is None:
            select_episodes(snapshot, stage.config.where, option=f"stage {stage.name}: where")
            if stage.config.validation is not None:
                select_episodes(snapshot, stage.config.validation.where, option=f"stage {stage.name}: validation.where")
