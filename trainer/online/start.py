"""Starting an online run, and going on with one: which jobs it is, what it must not differ in, and where it starts."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from lake import ids
from lake.errors import CheckpointError, UsageError
from lake.judgements.predicates import select_where
from lake.lake import Lake
from lake.read.online_runs import LOOP
from lake.read.text_table import counted
from lake.settings import validated
from lake.write.jobs import Job
from pipelines.collect.manager.run import StoppedError
from pipelines.collect.wiring import told_options, without_keys
from trainer.backends.base import SingleDevice
from trainer.config import MACHINE, TrainConfig
from trainer.monitor.loggers import open_loggers
from trainer.online.checks import WHERE
from trainer.online.engines import engines_of, known_engines
from trainer.online.learner import Learner
from trainer.online.rollouts import Rollouts, Say
from trainer.online.run import LoopResult, OnlineRun, evaluations_in, noted
from trainer.online.settings import OnlineConfig
from trainer.online.versions import Versions
from trainer.policy.model import policy_of
from trainer.runs.offline import make_deterministic, resolve, resume, train, training_code, with_threads
from trainer.runs.progress import LINE_SECONDS, ProgressReporter, Reminder
from trainer.runs.runs import RunFolder, differences, left_open_when_interrupted, next_attempt

_OWN = ("versions", "checkpoints", "final", "best", "run.json")
"""What a run makes in its folder, but for the stage before, which may be older than the job `loop`."""
_MAY_CHANGE = (
    *("loop.tokens", "loop.hours", "loop.collect.parallel", "loop.engine", "loop.sync"),
    *("loop.collect.player.engines", "loop.collect.player.api", "loop.collect.player.parallel_calls"),
    *(f"loop.sft.{name}" for name in MACHINE),
)
"""Settings that a resumed run may have others of: they change no result."""


@dataclass(frozen=True, slots=True)
class _Started:
    """The jobs of a run that the lake knows."""

    loop_job: int
    train_job: int
    parameters: dict[str, Any]
    status: str


def run_loop(
    lake: Lake,
    collecting: Lake,
    config: OnlineConfig,
    out: Path,
    run_id: str,
    *,
    resumes: bool,
    say: Say,
    progress: Say,
    quiet_seconds: float = LINE_SECONDS,
) -> LoopResult:
    """Run the loop in a folder, or go on with it.

    Args:
        lake: of the trainer.
        collecting: the same lake, for the rollouts, which may be collected while the trainer reads.
        config: the document.
        out: folder of the run: checkpoints, versions, `final`, `best`.
        run_id: the run's name.
        resumes: go on with the run of that name, if there is one; else another of that name is refused.
        say: called with a line for each round and evaluation.
        progress: called with how far collecting is, and with what is being done.
        quiet_seconds: without a line, until one says what is being done.

    Raises:
        UsageError: the run exists already, or was started with another document, or no engine answers.
        CheckpointError: what a resumed run needs is gone or damaged.
        StoppedError: Ctrl-C, or an engine that is gone; the run goes on when it is resumed.
    """
    folder, reminder = RunFolder(out), Reminder(progress, quiet_seconds)
    say, progress = _heard(say, reminder), _heard(progress, reminder)
    reminder.begin(f"run {run_id}", "looking at what is there")
    advice = "; the same command with --resume goes on"
    with folder.locked(), _going_on_by(advice), reminder.running():
        parameters = job_parameters(config)
        started = _find(lake, run_id)
        _check_started(started, parameters, run_id, resumes=resumes)
        if started is None:
            _check_new(folder)
        if config.trainer.where is not None:
            select_where(lake.snapshot(), ("episode_id",), config.trainer.where, WHERE, empty=True)
        if started is not None and started.status == "succeeded":
            say("this run had finished already")
            return _finished(lake, started, folder)
        rollouts = Rollouts(collecting, run_id, config, config.trainer.model, say=say, progress=progress)
        apis = known_engines(config.loop)  # before a job says that the run has begun
        model = _start(lake, config, folder, run_id, say, reminder)
        reminder.begin(f"run {run_id}", "loading the model")
        trainer, note = with_threads(config.trainer.model_copy(update={"model": model}))
        if note is not None:
            say(note)
        make_deterministic(trainer)
        backend = SingleDevice(policy_of(trainer), trainer.optimizer)
        trainer = resolve(trainer, backend.policy)
        job, train_job = _jobs(lake, run_id, parameters, trainer, started)
        with (
            left_open_when_interrupted(job),
            left_open_when_interrupted(train_job),
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
            learner = Learner(
                lake, run_id, config, trainer, backend, folder, versions, train_job, say, reminder, loggers
            )
            run = OnlineRun(
                lake, run_id, config, folder, learner, rollouts, versions, job, say, reminder, loggers=loggers
            )
            if started is None:
                versions.write(backend, 0)
            else:
                run.go_on(started.train_job)
            reminder.begin(f"run {run_id}", "starting")
            with engines_of(config.loop, apis, versions.played(learner.version).folder, say) as engines:
                return run.finish(run.play(engines))


@contextmanager
def _going_on_by(advice: str) -> Iterator[None]:
    """What stops the block is told with how a run goes on, and not a collection of its own."""
    try:
        yield
    except StoppedError as error:
        raise StoppedError(error.what, advice) from error


def _jobs(
    lake: Lake, run_id: str, parameters: dict[str, Any], trainer: TrainConfig, started: _Started | None
) -> tuple[Job, Job]:
    """The run's jobs `loop` and `train`: new ones, or another attempt at those that were started."""
    train_job = lake.job(
        kind="train",
        run_id=run_id,
        parameters=trainer.model_dump(mode="json"),
        code=training_code(),
        job_id=None if started is None else started.train_job,
        attempt=0 if started is None else next_attempt(lake, started.train_job),
    )
    job = lake.job(
        kind=LOOP,
        run_id=run_id,
        parameters=parameters | {"train_job": ids.to_text(train_job.job_id)},
        job_id=None if started is None else started.loop_job,
        attempt=0 if started is None else next_attempt(lake, started.loop_job),
    )
    return job, train_job


def _heard(say: Say, reminder: Reminder) -> Say:
    """The same, and the reminder hears of it."""

    def speak(line: str) -> None:
        reminder.hear()
        say(line)

    return speak


def _start(lake: Lake, config: OnlineConfig, folder: RunFolder, run_id: str, say: Say, reminder: Reminder) -> str:
    """The model that the rounds start from: the configured one, or what the stage [loop.sft] makes of it."""
    sft = config.loop.sft
    if sft is None:
        return config.trainer.model
    place, name = folder.path / "sft", f"{run_id}/sft"
    is_new = RunFolder(place).read() is None
    reminder.begin("sft", "")
    reporter = ProgressReporter(lambda line: say(f"sft: {line}"), reminder=reminder)
    if is_new:
        result = train(lake, sft, place, run_id=name, on_step=reporter.on_step, on_plan=reporter.on_plan)
    else:
        result = resume(lake, place, on_step=reporter.on_step, on_plan=reporter.on_plan)
    reporter.summarise()
    for note in result.notes:
        say(f"sft: {note}")
    say(f"sft: {counted(result.optimizer_steps, 'update')}, {result.model}")
    return str(result.model.resolve())


def _check_new(folder: RunFolder) -> None:
    """Raise UsageError where another run's weights lie, which would be played as this one's."""
    found = [name for name in _OWN if (folder.path / name).exists()]
    if found:
        raise UsageError(
            f"{folder.path} holds {', '.join(found)} of another run, which this lake does not know by this name; "
            f"choose another --out, or remove that folder"
        )


def _finished(lake: Lake, started: _Started, folder: RunFolder) -> LoopResult:
    """What a run that has ended came to. Raises CheckpointError: its model is not in this folder."""
    if not folder.final.is_dir():
        raise CheckpointError(
            f"the run has finished, and {folder.final} is not there: give the --out it was started with"
        )
    counts = msgspec.json.decode(lake.sql("SELECT counts FROM job_runs WHERE job_id = ?", [started.loop_job]).item())
    updates = msgspec.json.decode(lake.sql("SELECT counts FROM job_runs WHERE job_id = ?", [started.train_job]).item())
    return LoopResult(
        rounds=counts["rounds"],
        optimizer_steps=updates["optimizer_steps"],
        stopped_by=counts["stopped_by"],
        evaluations=evaluations_in(noted(lake, started.loop_job)),
        best_version=counts.get("best_version"),
        weights_sha256=counts["weights_sha256"],
        model=folder.final,
    )


def job_parameters(config: OnlineConfig) -> dict[str, Any]:
    """The document as the job's parameters say it, without keys."""
    said: dict[str, Any] = without_keys(config.model_dump(mode="json"))
    said["loop"]["collect"]["player"] = told_options(config.loop.collect.player)
    return said


def _find(lake: Lake, run_id: str) -> _Started | None:
    """The run of a name, of this lake."""
    rows = lake.sql(
        "SELECT job_id, parameters::JSON AS parameters, status FROM job_runs WHERE kind = ? AND run_id = ?",
        [LOOP, run_id],
    )
    if rows.is_empty():
        return None
    job_id, text, status = rows.row(0)
    parameters = msgspec.json.decode(text)
    return _Started(job_id, ids.from_text(parameters.pop("train_job")), parameters, status)


def _check_started(started: _Started | None, parameters: dict[str, Any], run_id: str, *, resumes: bool) -> None:
    if started is None:
        return
    if not resumes:
        raise UsageError(f"the lake holds a run {run_id!r} already; go on with it (--resume), or choose another --run")
    if started.status not in ("started", "succeeded"):
        query = f"SELECT error FROM job_runs WHERE job_id = id('{ids.to_text(started.loop_job)}')"
        raise CheckpointError(
            f'run {run_id!r} {started.status}; `trajlake sql "{query}"` says why; choose another --run'
        )
    # By way of the document, so that what it has gained since is at its default.
    had = job_parameters(validated(OnlineConfig, started.parameters, f"run {run_id!r} was started with: "))
    changed = [difference for difference in differences(parameters, had) if not difference.startswith(_MAY_CHANGE)]
    if changed:
        raise UsageError(f"a resumed run keeps its configuration, and these differ: {', '.join(changed)}")
