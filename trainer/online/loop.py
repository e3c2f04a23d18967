"""The online loop: collect, score, credit, train, sync, round after round.

    round k    collect    rollouts of round k, by version k (by version k - 1 where it collects ahead)
               score      scores and rewards of the rollouts; with a value head the values of their states
               credit     advantages
               train      version k becomes version k + 1: checkpoint, `batches`, `metrics`
               sync       a folder of the new weights, which is pushed to engines

`OnlineRun.run_rounds` is the loop. Its parts do not know each other: `Rollouts` collects, `Learner` trains, `Versions`
keeps the weights of each round, `Engines` get them. `trainer.online.start` makes the parts.

All state is in the tables and the checkpoints. A resumed run starts at the round after its newest checkpoint and asks
for each of these steps again; a step that is in the lake is not repeated. The job `loop` covers the run. Its metrics,
one step a round, are what decisions were made by: success, tokens, seconds, evaluations.

An evaluation of version k comes before round k is trained on, and after the last round.
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lake import ids
from lake.errors import TrajlakeError
from lake.judgements.scores import ENV_RETURN, read_episode_scores
from lake.lake import Lake
from lake.progress import track
from lake.read.text_table import count_noun
from lake.read.training import round_predicate
from pipelines.score.scoring import score_rollouts
from pipelines.select import Status
from trainer.data.refusals import Drop
from trainer.loggers import Logger, log_metrics
from trainer.monitor import find_best, should_stop
from trainer.online.engines import Engines
from trainer.online.learner import Learner, Versions
from trainer.online.rollouts import (
    EvaluationScores,
    Intake,
    Rollouts,
    RoundCredit,
    compute_credit,
    read_intake,
    refuse_failed,
    select_best,
    select_rollouts,
)
from trainer.online.settings import VALUE_OPTIONS, OnlineConfig, Say
from trainer.runs.folder import RunFolder, read_newest_checkpoint
from trainer.runs.loop import Update, build_metric_rows

_ROUND = """
SELECT
    count(*) AS episodes,
    count(*) FILTER (status = 'failed') AS failed,
    avg(env_return) AS mean_return,
    (SELECT sum(len(context_ids) + len(action_ids)) FROM tokens SEMI JOIN ({rows}) USING (episode_id)) AS tokens
FROM episodes
WHERE {where}
"""

STATUS = Status.model_fields["kind"].default
"""The filter that drops rollouts which were not played to their end."""


@dataclass(frozen=True, slots=True)
class LoopResult:
    """The end of a run."""

    rounds: int
    """Number of rounds that were trained on."""
    optimizer_steps: int
    stopped_by: str
    """rounds, patience, tokens or hours."""
    evaluations: dict[int, EvaluationScores]
    """Evaluations by version."""
    best_version: int | None
    """Version with the highest mean score; None without evaluations."""
    weights_sha256: str
    """Digest of the final weights."""
    model: Path
    """Final model in Hugging Face layout; next to it is `best` where evaluations chose another version."""


@dataclass(frozen=True, slots=True)
class TrainedRound:
    """A round after its update."""

    intake: Intake
    """Its rollouts."""
    credit: RoundCredit
    """Its advantages."""
    left_out: dict[str, int]
    """Number of rollouts that each filter dropped; `status` are those that were not played to their end."""
    update: Update | None
    """None if there was nothing to train on."""

    def metrics(self) -> dict[str, float]:
        """Return the figures of the round."""
        figures: dict[str, int | None] = {
            "live_groups": self.credit.live_groups,
            "dead_groups": self.credit.dead_groups,
            "carried": self.intake.carried,
            "left_out": sum(self.left_out.values()),
            "trained": 0 if self.update is None else self.update.batches["episode_id"].n_unique(),
            "stale_steps": self.stale_steps,
        }
        return {f"loop/{name}": float(figure) for name, figure in figures.items() if figure is not None}

    @property
    def stale_steps(self) -> int:
        """Number of steps that `max_staleness` left out."""
        drops = None if self.update is None else self.update.selection.drops
        return 0 if drops is None else int(drops.filter(reason=str(Drop.STALE))["steps"].sum())


@dataclass
class OnlineRun:
    """A run with all its parts."""

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
    """Metrics of the rounds so far."""
    evaluations: dict[int, EvaluationScores] = field(default_factory=dict)
    loggers: Sequence[Logger] = ()
    """Take the metrics of each round, at the step of its last update."""

    def restore(self, train_job: int) -> None:
        """Restore the run from the newest checkpoint of its training job and the metrics until then."""
        row = read_newest_checkpoint(self.lake, train_job)
        if row is not None:
            self.learner.restore(row)
        self.versions.write(self.learner.backend, self.learner.version)
        self.metrics = read_round_metrics(self.lake, self.job.job_id, self.learner.version)
        self.evaluations = read_evaluations(self.metrics)

    def run_rounds(self, engines: Engines) -> str:
        """Run round after round until the end, with these engines; return why the run ended."""
        stopped_by, rounds = None, self.config.loop.rounds
        while stopped_by is None:
            number = self.learner.version
            with track(f"round {min(number + 1, rounds)}/{rounds}", rounds, "rounds", done=number) as stage:
                stopped_by = self._run_round(number, engines)
                stage.update(self.learner.version)
        return stopped_by

    def _run_round(self, number: int, engines: Engines) -> str | None:
        """Evaluate where it is due, and play and train a round; return why the run ends, None if it continues."""
        began = time.monotonic()
        used_up = self._used_up(number)
        with track("give engines the weights"):
            weights = self.versions.read_weights(number if used_up else self._synced(number))
            engines.push(self.lake, self.run_id, weights, self.learner.backend, self.say)
        row = self._evaluate(number, engines, is_last=used_up is not None)
        stopped_by = used_up or self._patience_lost()
        if stopped_by is not None:
            if row:
                self._note(number, row)
            return stopped_by
        weights = self.versions.read_weights(self._playing(number))
        self.rollouts.collect(number, weights, engines.urls, engines.report_lost)
        trained = self._train_and_collect_ahead(number, engines)
        row |= self._figures(trained) | trained.metrics() | {"loop/seconds": time.monotonic() - began}
        self._note(number, row)
        with track("write the checkpoint"):
            self.learner.save()
        # One more than is played again: an engine that dies now restarts from the folder that it was pushed last.
        first = self._playing(min(self.learner.saved_version, number)) - (not self.config.loop.ahead)
        self.versions.prune(first)
        self.say(self._line(number, trained))
        return None

    def _train_and_collect_ahead(self, number: int, engines: Engines) -> TrainedRound:
        """Train on a round; with `ahead`, collect the next one at the same time."""
        following = number + 1
        if not self.config.loop.ahead or following >= self.config.loop.trained_rounds:
            engines.sleep()
            return self._train(number)
        weights = self.versions.read_weights(self._playing(following))
        with ThreadPoolExecutor(1) as pool:
            training = pool.submit(copy_context().run, self._train, number)
            try:
                self.rollouts.collect(following, weights, engines.urls, engines.report_lost)
            except TrajlakeError:
                with suppress(TrajlakeError):
                    training.result()  # it is not saved, and comes out the same when the run is resumed
                raise
            return training.result()

    def _train(self, number: int) -> TrainedRound:
        """Score, credit, select and train on a round, and write the new weights; save nothing yet."""
        lake, loop = self.lake, self.config.loop
        intake = read_intake(lake, self.run_id, number, loop)
        where = intake.where
        refuse_failed(lake, where)
        score_rollouts(lake, loop.score, where)
        select_best(lake, self.run_id, number, where, loop)
        credit = RoundCredit(None, None, None, None)
        if self.config.trainer.value is not None:
            with track("estimate the values"):
                self.learner.score_states(number, where)
        if self.learner.needs_credit:
            with track("compute the advantages"):
                seed = self.config.trainer.seed * 1_000_000 + number
                defaults = None if self.config.trainer.value is None else VALUE_OPTIONS
                credit = compute_credit(lake, loop.credit, where, seed, defaults)
            alarms = self.learner.alarms
            for line in alarms.check_data(lake.snapshot(), credit.credit, credit.dead_groups, credit.groups):
                self.say(line)
        with track("choose the episodes"):
            selection = select_rollouts(lake, self.run_id, number, where, loop)
        left_out = selection.report.select("filter", "dropped_episodes").rows()
        is_empty = credit.live_groups == 0 or not selection.kept_episodes
        job_id = None if is_empty else ids.to_text(selection.job_id)
        update = self.learner.train(number, where, credit.credit, job_id)
        with track("write the weights"):
            self.versions.write(self.learner.backend, self.learner.version)
        return TrainedRound(intake, credit, {str(name): int(count) for name, count in left_out}, update)

    def finish(self, stopped_by: str) -> LoopResult:
        """Write the final model, and the run's figures into its job."""
        learner, digest = self.learner, self.learner.backend.digest()
        with track("write the final model"):
            learner.export(self.folder.final)
        winner = self._best_version() if self.evaluations else None
        self.job.counts |= {"rounds": learner.version, "stopped_by": stopped_by, "weights_sha256": digest}
        if winner is not None:
            self.job.counts |= {"best_version": winner}
        return LoopResult(
            rounds=learner.version,
            optimizer_steps=learner.optimizer_steps,
            stopped_by=stopped_by,
            evaluations=dict(self.evaluations),
            best_version=winner,
            weights_sha256=digest,
            model=self.folder.final,
        )

    def _synced(self, version: int) -> int:
        """Return the newest version up to this one that players get."""
        return version - version % self.config.loop.sync_every

    def _playing(self, number: int) -> int:
        """Return the version that plays a round."""
        return self._synced(max(0, number - self.config.loop.ahead))

    def _evaluate(self, version: int, engines: Engines, *, is_last: bool) -> dict[str, float]:
        """Evaluate a version where it is due, and the last one in any case; return its figures."""
        config = self.config.loop.evaluation
        if config is None or (version % config.every and not is_last):
            return {}
        index = -(-version // config.every)
        weights = self.versions.read_weights(version)
        with track("evaluate"):
            self.rollouts.evaluate(index, weights, config, engines.urls, engines.report_lost)
            score_rollouts(self.lake, self.config.loop.score, round_predicate(self.rollouts.evaluation_run, index))
        scores = self.rollouts.read_scores(index, config)
        self.evaluations[version] = scores
        self.say(
            f"version {version}: success {scores.success:.2f}, mean score {scores.score:.3g} in "
            f"{count_noun(scores.attempts, 'held-out attempt')}"
            + (f", and {scores.unscored:,} have no score" if scores.unscored else "")
        )
        if self._best_version() == version:
            self.versions.copy(version, self.folder.path / "best")
        return {
            "eval/success": scores.success,
            "eval/score": scores.score,
            "eval/attempts": float(scores.attempts),
            "eval/unscored": float(scores.unscored),
            "loop/best_version": float(self._best_version()),
        }

    def _history(self) -> list[tuple[int, float]]:
        """Return evaluations as measurements of `trainer.monitor`, where lower is better."""
        return [(version, -scores.score) for version, scores in sorted(self.evaluations.items())]

    def _best_version(self) -> int:
        """Return the version of the best evaluation; without evaluations the newest version."""
        winner = find_best(self._history())
        return self.learner.version if winner is None else winner[0]

    def _used_up(self, number: int) -> str | None:
        """Return what ends the run before round `number`: rounds, tokens or hours; None if it continues."""
        config = self.config.loop
        if number >= config.trained_rounds:
            return "rounds"
        sums = {
            name: sum(row.get(f"loop/{name}", 0.0) for row in self.metrics.values()) for name in ("tokens", "seconds")
        }
        if config.tokens is not None and sums["tokens"] >= config.tokens:
            return "tokens"
        if config.hours is not None and sums["seconds"] >= 3600 * config.hours:
            return "hours"
        return None

    def _patience_lost(self) -> str | None:
        """Return "patience" if the evaluations so far end the run."""
        config = self.config.loop.evaluation
        is_lost = config and should_stop(self._history(), config.patience, config.min_improvement)
        return "patience" if is_lost else None

    def _figures(self, trained: TrainedRound) -> dict[str, float]:
        """Return the figures of a round's rollouts from the tables, without the unknown ones."""
        where, score = trained.intake.where, self.config.loop.credit.score
        rows = f"SELECT episode_id FROM episodes WHERE {where}"
        sums = self.lake.sql(_ROUND.format(where=where, rows=rows)).row(0, named=True)
        named = {
            "episodes": sums["episodes"],
            "failed": sums["failed"],
            "return": sums["mean_return"],
            "tokens": sums["tokens"],
        }
        if score != ENV_RETURN:
            snapshot = self.lake.snapshot()
            scores = read_episode_scores(snapshot, score).join(snapshot.sql(rows), on="episode_id", how="semi")
            named["score"] = scores["score"].mean()
        return {f"loop/{name}": float(figure) for name, figure in named.items() if figure is not None}

    def _note(self, number: int, row: dict[str, float]) -> None:
        """Write the metrics of a round in one transaction."""
        self.metrics[number] = row
        self.job.write("metrics", build_metric_rows([(number, row)]))
        log_metrics(self.loggers, max(0, self.learner.optimizer_steps - 1), {"loop/round": float(number)} | row)

    def _line(self, number: int, trained: TrainedRound) -> str:
        """Return the line of a round for the user."""
        row = self.metrics[number]
        clauses = [f"{row['loop/failed']:.0f} failed"] if row["loop/failed"] else []
        if trained.intake.carried:
            clauses.append(f"{trained.intake.carried} carried over")
        if "loop/score" in row:
            clauses.append(f"mean {self.config.loop.credit.score.partition('@')[0]} {row['loop/score']:.3g}")
        if "loop/return" in row:
            clauses.append(f"mean return {row['loop/return']:.3g}")
        # The failed ones have a clause already.
        drops = trained.left_out | {STATUS: trained.left_out.get(STATUS, 0) - int(row["loop/failed"])}
        if drops := {name: count for name, count in drops.items() if count > 0}:
            reasons = (f"{count:,} {'aborted' if name == STATUS else f'by {name}'}" for name, count in drops.items())
            clauses.append(f"left out: {', '.join(reasons)}")
        if trained.stale_steps:
            clauses.append(f"{count_noun(trained.stale_steps, 'stale step')}")
        live = trained.credit.live_groups
        clauses += [] if live is None else [count_noun(live, "live group")]
        if trained.update is None:
            outcome = "nothing to train on"
        else:
            reports = trained.update.reports
            entropies = [report.metrics["entropy"] for report in reports if "entropy" in report.metrics]
            entropy = f", entropy {sum(entropies) / len(entropies):.2f}" if entropies else ""
            outcome = f"{count_noun(len(reports), 'update')}{entropy}"
        details = "".join(f", {clause}" for clause in clauses)
        return f"round {number + 1}/{self.config.loop.rounds}{details}: {outcome}"


def read_round_metrics(lake: Lake, job_id: int, before: int | None = None) -> dict[int, dict[str, float]]:
    """Read the metrics that a run wrote, by round; rounds from `before` on are left out, as they are run again."""
    rows = lake.sql("SELECT step, name, value FROM run_metrics WHERE job_id = ? ORDER BY step", [job_id])
    metrics: dict[int, dict[str, float]] = {}
    for step, name, number in rows.iter_rows():
        if before is None or step < before:
            metrics.setdefault(step, {})[name] = number
    return metrics


def read_evaluations(metrics: Mapping[int, Mapping[str, float]]) -> dict[int, EvaluationScores]:
    """Return the evaluations among metrics, by version."""
    return {
        version: EvaluationScores(
            success=row["eval/success"],
            score=row["eval/score"],
            attempts=int(row["eval/attempts"]),
            unscored=int(row["eval/unscored"]),
        )
        for version, row in metrics.items()
        if "eval/score" in row
    }
