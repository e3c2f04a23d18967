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
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lake.errors import TrajlakeError
from lake.judgements.scores import ENV_RETURN, episode_scores
from lake.lake import Lake
from lake.read.online_runs import of_round
from lake.read.text_table import counted
from pipelines.select import Status
from trainer.monitor.loggers import Logger, log
from trainer.monitor.validation import best
from trainer.online.engines import Engines
from trainer.online.learner import Learned, Learner
from trainer.online.rollouts import Evaluated, Rollouts, Say
from trainer.online.settings import OnlineConfig
from trainer.online.versions import Versions
from trainer.runs.metrics import metrics_frame
from trainer.runs.progress import Reminder
from trainer.runs.runs import RunFolder, newest_checkpoint

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
"""The filter that drops what was not played to its end."""


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
    reminder: Reminder
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    """Of the rounds so far."""
    evaluations: dict[int, Evaluated] = field(default_factory=dict)
    loggers: Sequence[Logger] = ()
    """Given the metrics of each round, at the step of its last update."""

    def go_on(self, train_job: int) -> None:
        """Put the run back where the newest checkpoint of its training job is, with what was decided until then."""
        row = newest_checkpoint(self.lake, train_job)
        if row is not None:
            self.learner.restore(row)
        self.versions.write(self.learner.backend, self.learner.version)
        self.metrics = noted(self.lake, self.job.job_id, self.learner.version)
        self.evaluations = evaluations_in(self.metrics)

    def play(self, engines: Engines) -> str:
        """Round after round until the end, with these engines; why it ended."""
        config, learner = self.config.loop, self.learner
        while True:
            number = learner.version
            began = time.monotonic()
            round_name = f"round {min(number + 1, config.rounds)}/{config.rounds}"
            self.reminder.begin(round_name, "giving engines the weights")
            used_up = self._used_up(number)
            given = self._synced(number) if used_up is None else number
            engines.push(self.lake, self.run_id, self.versions.played(given), learner.backend, self.say)
            row = self._evaluated(number, engines, is_last=used_up is not None)
            stopped_by = used_up or self._patience_lost()
            if stopped_by is not None:
                if row:
                    self._note(number, row)
                return stopped_by
            self.reminder.begin(round_name, "collecting")
            self.rollouts.collect(number, self.versions.played(self._playing(number)), engines)
            self.reminder.begin(round_name, "learning")
            learned = self._learned(number, engines)
            self.reminder.begin(round_name, "writing the checkpoint")
            row |= self._figures(learned) | learned.metrics() | {"loop/seconds": time.monotonic() - began}
            self._note(number, row)
            learner.save()
            # One more than is played again: an engine that dies now starts from the folder that it was given last.
            self.versions.prune(self._playing(min(learner.saved_version, number)) - (not config.ahead))
            self.say(self._line(number, learned))

    def finish(self, stopped_by: str) -> LoopResult:
        """Write the final model, and what the run came to."""
        learner, digest = self.learner, self.learner.backend.digest()
        self.reminder.begin("", "writing the final model")
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
        """The newest version up to this one that whoever plays is given."""
        return version - version % self.config.loop.sync_every

    def _playing(self, number: int) -> int:
        """The version that plays a round."""
        return self._synced(max(0, number - self.config.loop.ahead))

    def _learned(self, number: int, engines: Engines) -> Learned:
        """Learn from a round; meanwhile the next one is collected, where that is wanted."""
        following = number + 1
        if not self.config.loop.ahead or following >= self.config.loop.trained_rounds:
            engines.sleep()
            return self.learner.learn(number)
        with ThreadPoolExecutor(1) as pool:
            learning = pool.submit(self.learner.learn, number)
            try:
                self.rollouts.collect(following, self.versions.played(self._playing(following)), engines)
            except TrajlakeError:
                with suppress(TrajlakeError):
                    learning.result()  # it is not saved, and comes out the same when the run is resumed
                raise
            return learning.result()

    def _evaluated(self, version: int, engines: Engines, *, is_last: bool) -> dict[str, float]:
        """Evaluate a version if it is time, and the last one in any case; its figures."""
        config = self.config.loop.evaluation
        if config is None or (version % config.every and not is_last):
            return {}
        index = -(-version // config.every)
        self.reminder.begin(f"version {version}", "evaluating")
        self.rollouts.evaluate(index, self.versions.played(version), config, engines)
        self.learner.score(of_round(self.rollouts.evaluation_run, index))
        found = self.rollouts.evaluated(index, config)
        self.evaluations[version] = found
        self.say(
            f"version {version}: success {found.success:.2f}, mean score {found.score:.3g} in "
            f"{counted(found.attempts, 'held-out attempt')}"
            + (f", and {found.unscored:,} have no score" if found.unscored else "")
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

    def _used_up(self, number: int) -> str | None:
        """What there is no more of, rounds or a budget, before round `number`; None if there is."""
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
        """Whether the evaluations so far end the run."""
        evaluation = self.config.loop.evaluation
        if evaluation is None or evaluation.patience is None:
            return None
        history = self._history()
        winner = best(history, evaluation.min_improvement)
        is_lost = winner is not None and sum(version > winner[0] for version, _ in history) >= evaluation.patience
        return "patience" if is_lost else None

    def _figures(self, learned: Learned) -> dict[str, float]:
        """What a round's rollouts are, from the tables; a figure that is not known is left out."""
        where, score = learned.taken.where, self.config.loop.credit.score
        rows = f"SELECT episode_id FROM episodes WHERE {where}"
        found = self.lake.sql(_ROUND.format(where=where, rows=rows)).row(0, named=True)
        named = {
            "episodes": found["episodes"],
            "failed": found["failed"],
            "return": found["mean_return"],
            "tokens": found["tokens"],
        }
        if score != ENV_RETURN:
            snapshot = self.lake.snapshot()
            scores = episode_scores(snapshot, score).join(snapshot.sql(rows), on="episode_id", how="semi")
            named["score"] = scores["score"].mean()
        return {f"loop/{name}": float(value) for name, value in named.items() if value is not None}

    def _note(self, number: int, row: dict[str, float]) -> None:
        """Write the metrics of a round, in one piece."""
        self.metrics[number] = row
        self.job.write("metrics", metrics_frame([(number, row)]))
        log(self.loggers, max(0, self.learner.optimizer_steps - 1), {"loop/round": float(number)} | row)

    def _line(self, number: int, learned: Learned) -> str:
        row = self.metrics[number]
        parts = [f"{row['loop/failed']:.0f} failed"] if row["loop/failed"] else []
        if learned.taken.carried:
            parts.append(f"{learned.taken.carried} carried over")
        if "loop/score" in row:
            parts.append(f"mean {self.config.loop.credit.score.partition('@')[0]} {row['loop/score']:.3g}")
        if "loop/return" in row:
            parts.append(f"mean return {row['loop/return']:.3g}")
        # Those that failed are told already.
        others = learned.left_out | {STATUS: learned.left_out.get(STATUS, 0) - int(row["loop/failed"])}
        if left_out := {name: count for name, count in others.items() if count > 0}:
            reasons = (f"{count:,} {'aborted' if name == STATUS else f'by {name}'}" for name, count in left_out.items())
            parts.append(f"left out: {', '.join(reasons)}")
        if learned.stale_steps:
            parts.append(f"{counted(learned.stale_steps, 'stale step')}")
        told = "".join(f", {part}" for part in parts)
        groups = "" if learned.live_groups is None else f", {counted(learned.live_groups, 'live group')}"
        if learned.done is None:
            what = "nothing to train on"
        else:
            entropies = [report.metrics["entropy"] for report in learned.done.reports if "entropy" in report.metrics]
            entropy = f", entropy {sum(entropies) / len(entropies):.2f}" if entropies else ""
            what = f"{counted(len(learned.done.reports), 'update')}{entropy}"
        return f"round {number + 1}/{self.config.loop.rounds}{told}{groups}: {what}"


def noted(lake: Lake, job_id: int, before: int | None = None) -> dict[int, dict[str, float]]:
    """The metrics that a run wrote, by round; those of rounds from `before` on are left out, as they come again."""
    rows = lake.sql("SELECT step, name, value FROM run_metrics WHERE job_id = ? ORDER BY step", [job_id])
    found: dict[int, dict[str, float]] = {}
    for step, name, value in rows.iter_rows():
        if before is None or step < before:
            found.setdefault(step, {})[name] = value
    return found


def evaluations_in(metrics: Mapping[int, Mapping[str, float]]) -> dict[int, Evaluated]:
    """The evaluations among metrics, by version."""
    return {
        version: Evaluated(
            success=row["eval/success"],
            score=row["eval/score"],
            attempts=int(row["eval/attempts"]),
            unscored=int(row["eval/unscored"]),
        )
        for version, row in metrics.items()
        if "eval/score" in row
    }
