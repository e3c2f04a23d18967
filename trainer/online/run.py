"""An online run: collect, score, credit, train, sync, round after round, and going on after a kill.

    round k    collect    rollouts of round k, by version k (by version k - 1 where it collects ahead)
               score      their scorers, if there are any
               credit     their advantages
               train      version k becomes version k + 1: checkpoint, `batches`, `metrics`
               sync       a folder of the new weights, pushed to engines

Nothing is remembered outside the tables and the checkpoints: a resumed run starts at the round after its newest
checkpoint and asks for each of these again, and what is there is not done again. The job `loop` covers the run; its
metrics, a step a round, are what was decided by: success, tokens, seconds, evaluations.

An evaluation of version k comes before round k is trained on, and after the last round.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from lake import ids
from lake.errors import CheckpointError, TrajlakeError, UsageError
from lake.lake import Lake
from lake.read.text_table import counted
from pipelines.collect.wiring import told_options
from trainer.backends.base import SingleDevice
from trainer.monitor.validation import best
from trainer.online.learner import Learned, Learner
from trainer.online.rollouts import Evaluated, Rollouts, of_round
from trainer.online.settings import OnlineConfig
from trainer.online.versions import Versions, push, reference_of
from trainer.policy.model import policy_of
from trainer.runs.metrics import metrics_frame
from trainer.runs.offline import make_deterministic, resolve, resume, train, training_code
from trainer.runs.runs import (
    RunFolder,
    differences,
    left_open_when_interrupted,
    newest_checkpoint,
    next_attempt,
    sweep,
)
from trainer.runs.training_run import export_model

KIND = "loop"
_MAY_CHANGE = ("loop.tokens", "loop.hours", "loop.collect.player.engines", "loop.collect.parallel")
"""Settings that a resumed run may have others of: they change no result."""
_ROUND = """
SELECT
    count(*) AS episodes,
    avg(env_return) AS mean_return,
    count(env_return) AS scored,
    (SELECT sum(len(context_ids) + len(action_ids)) FROM tokens SEMI JOIN ({rows}) USING (episode_id)) AS tokens
FROM episodes
WHERE {where}
"""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class LoopResult:
    """What a run came to."""

    rounds: int
    """Trained on."""
    optimizer_steps: int
    stopped_by: str
    """rounds, patience, tokens or hours."""
    evaluations: dict[int, Evaluated]
    """By version."""
    best_version: int | None
    """Of the highest mean score of an evaluation; None without evaluations."""
    weights_sha256: str
    """Digest of the final weights."""
    model: Path
    """The final model in Hugging Face layout; `best` lies beside it where evaluations chose another."""


@dataclass(frozen=True, slots=True)
class _Started:
    """The jobs of a run that the lake knows."""

    loop_job: int
    train_job: int
    parameters: dict[str, Any]
    status: str


@dataclass
class OnlineRun:
    """A run that is set up."""

    lake: Lake
    run_id: str
    config: OnlineConfig
    folder: RunFolder
    learner: Learner
    rollouts: Rollouts
    versions: Versions
    job: Any
    """The `loop` job."""
    say: Say
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    """Of the rounds so far."""
    evaluations: dict[int, Evaluated] = field(default_factory=dict)

    def play(self) -> str:
        """Round after round until the end; why it ended."""
        config, learner = self.config.loop, self.learner
        while True:
            number = learner.version
            began = time.monotonic()
            self._sync(number)
            row = self._evaluated(number)
            stopped_by = self._stopped_by(number)
            if stopped_by is not None:
                if row:
                    self._note(number, row)
                return stopped_by
            self.rollouts.collect(number, self.versions.played(max(0, number - config.ahead)))
            learned = self._learned(number)
            row |= self._figures(number) | learned.metrics() | {"loop/seconds": time.monotonic() - began}
            self._note(number, row)
            learner.save()
            self.versions.prune(min(learner.saved_version, self._best_version(), number) - 1)
            self.say(self._line(number, learned))

    def _learned(self, number: int) -> Learned:
        """Learn from a round; meanwhile the next one is collected, where that is wanted."""
        following = number + 1
        if not self.config.loop.ahead or following >= self.config.loop.trained_rounds:
            return self.learner.learn(number)
        with ThreadPoolExecutor(1) as pool:
            learning = pool.submit(self.learner.learn, number)
            try:
                self.rollouts.collect(following, self.versions.played(number))
            except TrajlakeError:
                with suppress(TrajlakeError):
                    learning.result()  # it is not saved, and comes out the same when the run is resumed
                raise
            return learning.result()

    def _sync(self, version: int) -> None:
        """Give the engines this version; without engines whoever plays reads its folder."""
        player = self.config.loop.collect.player
        if not player.engines:
            return
        done = push(
            self.lake,
            self.run_id,
            player.engines,
            self.versions.played(version),
            self.config.loop.sync,
            lambda: reference_of(self.lake, self.learner.backend),
        )
        for delivery in done.failed:
            self.say(f"{delivery.error}")
        if len(done.failed) == len(done.deliveries):
            raise UsageError(f"no engine took version {version}; the same command with --resume goes on")

    def _evaluated(self, version: int) -> dict[str, float]:
        """Evaluate a version if it is time; its figures."""
        config, rounds = self.config.loop.evaluation, self.config.loop.trained_rounds
        if config is None or (version % config.every and version != rounds):
            return {}
        index = -(-version // config.every)
        self.rollouts.evaluate(index, self.versions.played(version), config)
        self.learner.score(of_round(self.rollouts.evaluation_run, index))
        found = self.rollouts.evaluated(index, config)
        self.evaluations[version] = found
        self.say(
            f"version {version}: success {found.success:.2f}, mean score {found.score:.3g} in "
            f"{counted(found.attempts, 'held-out attempt')}"
        )
        if self._best_version() == version:
            self.versions.copy(version, self.folder.path / "best")
        return {
            "eval/success": found.success,
            "eval/score": found.score,
            "eval/attempts": float(found.attempts),
            "eval/unscored": float(found.unscored),
            "loop/best_version": float(self._best_version()),
        }

    def _history(self) -> list[tuple[int, float]]:
        """Evaluations as `trainer.monitor.validation` has measurements: lower is better."""
        return [(version, -found.score) for version, found in sorted(self.evaluations.items())]

    def _best_version(self) -> int:
        """The version of the best evaluation; the newest there is without any."""
        winner = best(self._history())
        return self.learner.version if winner is None else winner[0]

    def _stopped_by(self, number: int) -> str | None:
        config, evaluation = self.config.loop, self.config.loop.evaluation
        if number >= config.trained_rounds:
            return "rounds"
        if evaluation is not None and evaluation.patience is not None:
            history = self._history()
            winner = best(history, evaluation.min_improvement)
            if winner is not None and sum(version > winner[0] for version, _ in history) >= evaluation.patience:
                return "patience"
        sums = {
            name: sum(row.get(f"loop/{name}", 0.0) for row in self.metrics.values()) for name in ("tokens", "seconds")
        }
        if config.tokens is not None and sums["tokens"] >= config.tokens:
            return "tokens"
        if config.hours is not None and sums["seconds"] >= 3600 * config.hours:
            return "hours"
        return None

    def _figures(self, number: int) -> dict[str, float]:
        """What a round's rollouts are, from the tables; a figure that is not known is left out."""
        where = of_round(self.run_id, number)
        rows = f"SELECT episode_id FROM episodes WHERE {where}"
        found = self.lake.sql(_ROUND.format(where=where, rows=rows)).row(0, named=True)
        named = {"episodes": found["episodes"], "return": found["mean_return"], "tokens": found["tokens"]}
        return {f"loop/{name}": float(value) for name, value in named.items() if value is not None}

    def _note(self, number: int, row: dict[str, float]) -> None:
        """Write the metrics of a round, in one piece."""
        self.metrics[number] = row
        self.job.write("metrics", metrics_frame([(number, row)]))

    def _line(self, number: int, learned: Learned) -> str:
        row = self.metrics[number]
        mean = f", mean return {row['loop/return']:.3g}" if "loop/return" in row else ""
        groups = "" if learned.live_groups is None else f", {counted(learned.live_groups, 'live group')}"
        if learned.done is None:
            what = "nothing to train on"
        else:
            entropies = [report.metrics["entropy"] for report in learned.done.reports if "entropy" in report.metrics]
            entropy = f", entropy {sum(entropies) / len(entropies):.2f}" if entropies else ""
            what = f"{counted(len(learned.done.reports), 'update')}{entropy}"
        return f"round {number + 1}/{self.config.loop.rounds}{mean}{groups}: {what}"


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
        progress: called with how far collecting is.

    Raises:
        UsageError: the run exists already, or was started with another document, or no engine takes the weights.
        CheckpointError: what a resumed run needs is gone or damaged.
        StoppedError: Ctrl-C, or an engine that is gone; the run goes on when it is resumed.
    """
    folder = RunFolder(out)
    with folder.locked():
        parameters = _parameters(config)
        started = _find(lake, run_id)
        _check_started(started, parameters, run_id, resumes=resumes)
        rollouts = Rollouts(collecting, run_id, config, config.trainer.model, say=say, progress=progress)
        model = _start(lake, config, folder, run_id, say)
        trainer = config.trainer.model_copy(update={"model": model})
        make_deterministic(trainer)
        backend = SingleDevice(policy_of(trainer), trainer.optimizer)
        trainer = resolve(trainer, backend.policy)
        train_job = lake.job(
            kind="train",
            run_id=run_id,
            parameters=trainer.model_dump(mode="json"),
            code=training_code(),
            job_id=None if started is None else started.train_job,
            attempt=0 if started is None else next_attempt(lake, started.train_job),
        )
        job = lake.job(
            kind=KIND,
            run_id=run_id,
            parameters=parameters | {"train_job": ids.to_text(train_job.job_id)},
            job_id=None if started is None else started.loop_job,
            attempt=0 if started is None else next_attempt(lake, started.loop_job),
        )
        with left_open_when_interrupted(job), left_open_when_interrupted(train_job):
            versions = Versions(folder.path / "versions", trainer)
            learner = Learner(lake, run_id, config, trainer, backend, folder, versions, train_job, say)
            run = OnlineRun(lake, run_id, config, folder, learner, rollouts, versions, job, say)
            if started is None:
                versions.write(backend, 0)
            else:
                _go_on(run, started)
            return _finish(run, trainer, run.play(), train_job)


def _start(lake: Lake, config: OnlineConfig, folder: RunFolder, run_id: str, say: Say) -> str:
    """The model that the rounds start from: the configured one, or what the stage [loop.sft] makes of it."""
    sft = config.loop.sft
    if sft is None:
        return config.trainer.model
    place, name = folder.path / "sft", f"{run_id}/sft"
    is_new = RunFolder(place).read() is None
    result = train(lake, sft, place, run_id=name) if is_new else resume(lake, place)
    say(f"sft: {counted(result.optimizer_steps, 'update')}, {result.model}")
    return str(result.model.resolve())


def _go_on(run: OnlineRun, started: _Started) -> None:
    """Put a run back where its newest checkpoint is."""
    sweep(run.folder.checkpoints)
    row = newest_checkpoint(run.lake, started.train_job)
    if row is None:
        run.versions.write(run.learner.backend, 0)
    else:
        run.learner.restore(row)
    known = run.lake.sql(
        "SELECT step, name, value FROM run_metrics WHERE job_id = ? AND step < ? ORDER BY step",
        [started.loop_job, run.learner.version],
    )
    for step, name, value in known.iter_rows():
        run.metrics.setdefault(step, {})[name] = value
    for version, figures in run.metrics.items():
        if "eval/score" in figures:
            run.evaluations[version] = Evaluated(
                success=figures["eval/success"],
                score=figures["eval/score"],
                attempts=int(figures["eval/attempts"]),
                unscored=int(figures["eval/unscored"]),
            )


def _finish(run: OnlineRun, trainer: Any, stopped_by: str, train_job: Any) -> LoopResult:
    """Write the final model, and what the run came to."""
    learner = run.learner
    export_model(learner.backend, trainer, run.folder.final)
    digest = learner.backend.digest()
    winner = run._best_version() if run.evaluations else None
    train_job.counts |= {"optimizer_steps": learner.optimizer_steps, "weights_sha256": digest}
    run.job.counts |= {"rounds": learner.version, "stopped_by": stopped_by, "weights_sha256": digest}
    if winner is not None:
        run.job.counts |= {"best_version": winner}
    return LoopResult(
        rounds=learner.version,
        optimizer_steps=learner.optimizer_steps,
        stopped_by=stopped_by,
        evaluations=dict(run.evaluations),
        best_version=winner,
        weights_sha256=digest,
        model=run.folder.final,
    )


def _parameters(config: OnlineConfig) -> dict[str, Any]:
    """The document as the job's parameters say it, without keys."""
    said = config.model_dump(mode="json")
    said["loop"]["collect"]["player"] = told_options(config.loop.collect.player)
    return said


def _find(lake: Lake, run_id: str) -> _Started | None:
    """The run of a name, of this lake."""
    rows = lake.sql(
        "SELECT job_id, parameters::JSON AS parameters, status FROM job_runs WHERE kind = ? AND run_id = ?",
        [KIND, run_id],
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
    if started.status != "started":
        raise CheckpointError(f"run {run_id!r} has {started.status} already; choose another --run")
    changed = [
        difference
        for difference in differences(parameters, started.parameters)
        if not difference.startswith(_MAY_CHANGE)
    ]
    if changed:
        raise UsageError(f"a resumed run keeps its configuration, and these differ: {', '.join(changed)}")
