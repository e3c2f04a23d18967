"""Starting and resuming an online run: its jobs, the settings that it must keep, and the parts that it is made of."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from lake import ids
from lake.errors import CheckpointError, UsageError
from lake.judgements.selections import select_where
from lake.lake import Lake
from lake.progress import track
from lake.read.text_table import count_noun
from lake.read.training import LOOP
from lake.settings import validate
from lake.write.jobs import Job
from pipelines.collect.factory import describe_options, redact_keys
from pipelines.collect.manager.run import StoppedError
from trainer.backends.base import SingleDevice
from trainer.config import MACHINE, TrainConfig
from trainer.loggers import open_loggers
from trainer.online.engines import find_engines, run_engines
from trainer.online.learner import Learner, Versions
from trainer.online.loop import LoopResult, OnlineRun, read_evaluations, read_round_metrics
from trainer.online.rollouts import Rollouts
from trainer.online.settings import WHERE, OnlineConfig, Say
from trainer.policy.model import build_policy
from trainer.runs.folder import RunFolder, find_differences, find_next_attempt, keep_open_on_interrupt
from trainer.runs.offline import fill_config, fit_machine, list_training_code, make_deterministic, resume, train
from trainer.runs.report import ProgressReporter

_RUN_FILES = ("versions", "checkpoints", "final", "best", "run.json")
"""Names in a run's folder, without that of the stage [loop.sft], which may be older than the job `loop`."""
_MAY_CHANGE = (
    *("loop.tokens", "loop.hours", "loop.collect.parallel", "loop.engine", "loop.sync"),
    *("loop.collect.player.engines", "loop.collect.player.api", "loop.collect.player.parallel_calls"),
    *(f"loop.sft.{name}" for name in MACHINE),
)
"""Settings that may differ when a run is resumed: they change no result."""


@dataclass(frozen=True, slots=True)
class _RunJobs:
    """The jobs of a run that the lake knows."""

    loop_job: int
    train_job: int
    parameters: dict[str, Any]
    status: str


def run_loop(
    lake: Lake, collecting: Lake, config: OnlineConfig, out: Path, run_id: str, *, resumes: bool, say: Say
) -> LoopResult:
    """Run the loop in a folder, or resume it.

    Args:
        lake: the trainer's connection to the lake.
        collecting: a connection to the same lake for the rollouts, which may be collected while the trainer reads.
        config: configuration of the loop.
        out: folder of the run: checkpoints, versions, `final`, `best`.
        run_id: the run's name.
        resumes: resume the run of that name, if it exists; without it an existing run is refused.
        say: takes a line for each round and evaluation.

    Raises:
        UsageError: the run exists already, or was started with another configuration, or no engine answers.
        CheckpointError: files of a resumed run are missing or damaged.
        StoppedError: Ctrl-C, or an engine that is gone; the run can be resumed.
    """
    folder = RunFolder(out)
    with folder.lock(), _advise_resuming():
        parameters, started = build_job_parameters(config), _find_jobs(lake, run_id)
        if started is not None:
            _check_started(started, parameters, run_id, resumes=resumes)
        elif names := [name for name in _RUN_FILES if (folder.path / name).exists()]:
            # Their weights would be played as this run's.
            raise UsageError(
                f"{folder.path} holds {', '.join(names)} of another run, which this lake does not know by this name; "
                f"choose another --out, or remove that folder"
            )
        if config.trainer.where is not None:
            select_where(lake.snapshot(), ("episode_id",), config.trainer.where, WHERE, may_be_empty=True)
        if started is not None and started.status == "succeeded":
            say("this run had finished already")
            return _read_result(lake, started, folder)
        rollouts = Rollouts(collecting, run_id, config, config.trainer.model, say=say)
        apis = find_engines(config.loop)  # before a job says that the run has started
        model = _train_first_stage(lake, config, folder, run_id, say)
        trainer, note = fit_machine(config.trainer.model_copy(update={"model": model}))
        if note is not None:
            say(note)
        make_deterministic(trainer)
        with track("load the model"):
            backend = SingleDevice(build_policy(trainer), trainer.optimizer)
        trainer = fill_config(trainer, backend.policy)
        job, train_job = _open_jobs(lake, run_id, parameters, trainer, started)
        with (
            keep_open_on_interrupt(job),
            keep_open_on_interrupt(train_job),
            open_loggers(
                trainer.loggers,
                folder.path,
                run_id=run_id,
                key=ids.to_text(train_job.job_id),
                attempt=train_job.attempt,
                config=parameters,
            ) as loggers,
        ):
            versions = Versions(folder.path / "versions", trainer)
            rounds = config.loop.rounds
            learner = Learner(lake, run_id, rounds, trainer, backend, folder, train_job, say, loggers)
            run = OnlineRun(lake, run_id, config, folder, learner, rollouts, versions, job, say, loggers=loggers)
            if started is None:
                versions.write(backend, 0)
            else:
                run.restore(started.train_job)
            with run_engines(config.loop, apis, versions.read_weights(learner.version).folder, say) as engines:
                return run.finish(run.run_rounds(engines))


@contextmanager
def _advise_resuming() -> Iterator[None]:
    """Replace the advice of a StoppedError, which is about a single collection, by that for a loop."""
    try:
        yield
    except StoppedError as error:
        raise StoppedError(error.reason, "; the same command with --resume continues") from error


def _open_jobs(
    lake: Lake, run_id: str, parameters: dict[str, Any], trainer: TrainConfig, started: _RunJobs | None
) -> tuple[Job, Job]:
    """Return the run's jobs `loop` and `train`: new ones, or another attempt at those that were started."""
    train_job = lake.job(
        kind="train",
        run_id=run_id,
        parameters=trainer.model_dump(mode="json"),
        code=list_training_code(),
        job_id=None if started is None else started.train_job,
        attempt=0 if started is None else find_next_attempt(lake, started.train_job),
    )
    job = lake.job(
        kind=LOOP,
        run_id=run_id,
        parameters=parameters | {"train_job": ids.to_text(train_job.job_id)},
        job_id=None if started is None else started.loop_job,
        attempt=0 if started is None else find_next_attempt(lake, started.loop_job),
    )
    return job, train_job


def _train_first_stage(lake: Lake, config: OnlineConfig, folder: RunFolder, run_id: str, say: Say) -> str:
    """Return the model that the rounds start from: the configured one, or the result of the stage [loop.sft]."""
    sft = config.loop.sft
    if sft is None:
        return config.trainer.model
    out, name = folder.path / "sft", f"{run_id}/sft"
    is_new = RunFolder(out).read() is None
    reporter = ProgressReporter(lambda line: say(f"sft: {line}"))
    with track("sft"):
        if is_new:
            result = train(lake, sft, out, run_id=name, on_step=reporter.on_step, on_plan=reporter.on_plan)
        else:
            result = resume(lake, out, on_step=reporter.on_step, on_plan=reporter.on_plan)
    reporter.summarise()
    for note in result.notes:
        say(f"sft: {note}")
    say(f"sft: {count_noun(result.optimizer_steps, 'update')}, {result.model}")
    return str(result.model.resolve())


def _read_result(lake: Lake, started: _RunJobs, folder: RunFolder) -> LoopResult:
    """Read the result of a run that has ended. Raises CheckpointError: its model is not in this folder."""
    if not folder.final.is_dir():
        raise CheckpointError(
            f"the run has finished, and {folder.final} is missing: give the --out it was started with"
        )
    counts = msgspec.json.decode(lake.sql("SELECT counts FROM job_runs WHERE job_id = ?", [started.loop_job]).item())
    updates = msgspec.json.decode(lake.sql("SELECT counts FROM job_runs WHERE job_id = ?", [started.train_job]).item())
    return LoopResult(
        rounds=counts["rounds"],
        optimizer_steps=updates["optimizer_steps"],
        stopped_by=counts["stopped_by"],
        evaluations=read_evaluations(read_round_metrics(lake, started.loop_job)),
        best_version=counts.get("best_version"),
        weights_sha256=counts["weights_sha256"],
        model=folder.final,
    )


def build_job_parameters(config: OnlineConfig) -> dict[str, Any]:
    """Return the configuration as the job's parameters store it, without keys."""
    parameters: dict[str, Any] = redact_keys(config.model_dump(mode="json"))
    parameters["loop"]["collect"]["player"] = describe_options(config.loop.collect.player)
    return parameters


def _find_jobs(lake: Lake, run_id: str) -> _RunJobs | None:
    """Return the jobs of the run of a name; None if this lake has none."""
    rows = lake.sql(
        "SELECT job_id, parameters::JSON AS parameters, status FROM job_runs WHERE kind = ? AND run_id = ?",
        [LOOP, run_id],
    )
    if rows.is_empty():
        return None
    job_id, text, status = rows.row(0)
    parameters = msgspec.json.decode(text)
    return _RunJobs(job_id, ids.from_text(parameters.pop("train_job")), parameters, status)


def _check_started(started: _RunJobs, parameters: dict[str, Any], run_id: str, *, resumes: bool) -> None:
    """Check that a run may be resumed with these parameters.

    Raises:
        UsageError: --resume is missing, or settings differ.
        CheckpointError: the run failed.
    """
    if not resumes:
        raise UsageError(f"the lake holds a run {run_id!r} already; continue it (--resume), or choose another --run")
    if started.status not in ("started", "succeeded"):
        query = f"SELECT error FROM job_runs WHERE job_id = id('{ids.to_text(started.loop_job)}')"
        raise CheckpointError(
            f'run {run_id!r} {started.status}; `trajlake sql "{query}"` says why; choose another --run'
        )
    # Read as a configuration, so that settings which are newer than the run have their defaults.
    former = build_job_parameters(validate(OnlineConfig, started.parameters, f"run {run_id!r} was started with: "))
    changed = [name for name in find_differences(parameters, former) if not name.startswith(_MAY_CHANGE)]
    if changed:
        raise UsageError(f"a resumed run keeps its configuration, and these differ: {', '.join(changed)}")
