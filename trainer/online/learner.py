"""The training side of an online run: score, credit and update of a round, and the checkpoint after it.

One `train` job covers all rounds, its optimizer steps counted through; a resumed run goes on from the newest row of
`checkpoints` under another attempt. A round is trained on in one piece: a kill before its checkpoint repeats it, on the
same rollouts, in the same order, with the same weights at its end.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from lake import ids
from lake.errors import CheckpointError, DataRefusedError, NoPairsError
from lake.judgements.credit import Credit, find_credit
from lake.judgements.selections import read_kept
from lake.lake import Lake
from pipelines.credit.job import run_credit, with_step_source
from pipelines.score.scoring import score_rollouts
from trainer.backends.base import FrozenPolicy, SingleDevice
from trainer.config import ScheduleConfig, TrainConfig
from trainer.data.render.render import engine_encoding
from trainer.data.select.refusals import Drop
from trainer.data.select.selection import select_episodes
from trainer.monitor.loggers import Logger, log
from trainer.monitor.watch import Alarms, Watch
from trainer.online.intake import Intake, choose, intake_of, keep_best
from trainer.online.rollouts import refuse_failed
from trainer.online.settings import OnlineConfig
from trainer.online.versions import Versions
from trainer.policy.model_files import load_tokenizer
from trainer.runs.checkpoint import State, load_checkpoint, save_checkpoint
from trainer.runs.factories import learning_rate, make_reference
from trainer.runs.loop import StepReport, Update, update
from trainer.runs.progress import Reminder, outcome
from trainer.runs.runs import RunFolder, RunJob, prune, retained
from trainer.runs.training_run import export_model


@dataclass(frozen=True, slots=True)
class Learned:
    """What became of a round."""

    taken: Intake
    """Its rollouts."""
    live_groups: int | None
    """Groups with signal; None for losses without advantages."""
    dead_groups: int | None
    left_out: dict[str, int]
    """Rollouts that a filter dropped, by the filter; `status` are those that were not played to their end."""
    done: Update | None
    """None if there was nothing to train on."""

    def metrics(self) -> dict[str, float]:
        """Figures of the round."""
        figures: dict[str, int | None] = {
            "live_groups": self.live_groups,
            "dead_groups": self.dead_groups,
            "carried": self.taken.carried,
            "left_out": sum(self.left_out.values()),
            "trained": 0 if self.done is None else self.done.batches["episode_id"].n_unique(),
            "stale_steps": self.stale_steps,
        }
        return {f"loop/{name}": float(value) for name, value in figures.items() if value is not None}

    @property
    def stale_steps(self) -> int:
        """Steps that `max_staleness` left out."""
        drops = None if self.done is None else self.done.selection.drops
        return 0 if drops is None else int(drops.filter(reason=str(Drop.STALE))["steps"].sum())


def round_config(trainer: TrainConfig, where: str, number: int, selection: str | None = None) -> TrainConfig:
    """The update of a round.

    Args:
        trainer: what all rounds have in common.
        where: the episodes.
        number: of the round: each has an order of its own, and one learning rate from its first update to its last.
        selection: the job that chose among these episodes; None takes all of them.
    """
    return trainer.model_copy(
        update={
            "where": where,
            "selection": selection,
            "schedule": ScheduleConfig(shape="constant", warmup_fraction=0.0),
            "seed": trainer.seed * 1_000_000 + number,
        }
    )


class Learner:
    """Trains on one round after the other.

    Args:
        lake: where rounds are read.
        run: the run's name.
        config: the document.
        trainer: its training part, resolved.
        backend: the policy as it starts.
        folder: of the run.
        versions: where each round's weights go for those who play.
        job: the training job, started.
        say: told alarms.
        reminder: told what is being done.
        loggers: given the metrics of each update.
    """

    def __init__(
        self,
        lake: Lake,
        run: str,
        config: OnlineConfig,
        trainer: TrainConfig,
        backend: SingleDevice,
        folder: RunFolder,
        versions: Versions,
        job: RunJob,
        say: Callable[[str], None],
        reminder: Reminder,
        loggers: Sequence[Logger] = (),
    ) -> None:
        self._lake, self._run, self._config, self._trainer = lake, run, config, trainer
        self.backend = backend
        self._folder, self._versions, self._job, self._say = folder, versions, job, say
        self._reminder, self._loggers = reminder, loggers
        self._alarms = Alarms(trainer.alarms)
        self._watch = Watch(trainer, backend.policy, 1, self._alarms)
        self._encoding = engine_encoding(load_tokenizer(trainer.model))
        self._reference: FrozenPolicy | None = None
        if trainer.loss.needs.reference_logprobs:
            self._reference = make_reference(trainer)  # once, and not in every round
        self._pending: Update | None = None
        self._snapshot: dict[str, int] = {}
        """Table versions that the round was read at."""
        self._written: list[tuple[int, Path]] = []
        self.version = 0
        """Rounds that were trained on: the version of the weights as they are now."""
        self.saved_version = 0
        """The newest version that a checkpoint holds."""
        self.optimizer_steps = 0

    def restore(self, row: dict[str, Any]) -> None:
        """Go on from a row of `checkpoints`. Raises CheckpointError: its folder is gone or damaged."""
        place = self._folder.checkpoints / Path(row["uri"]).name
        state = load_checkpoint(place, self.backend)
        if state.weights_sha256 != row["sha256"]:
            raise CheckpointError(f"checkpoint {place} is not the one that the table `checkpoints` names; restore it")
        self.version = self.saved_version = row["policy_version"]
        self.optimizer_steps = row["optimizer_step"]
        self._alarms = Alarms(self._trainer.alarms, state.first_entropy, set(state.standing_alarms))
        self._watch = Watch(self._trainer, self.backend.policy, 1, self._alarms)
        self._written = [(self.optimizer_steps, place)]

    def score(self, where: str) -> None:
        """Score some episodes, and compute their rewards; what was scored is left alone."""
        score_rollouts(self._lake, self._config.loop.score, where, self._remember)

    def learn(self, number: int) -> Learned:
        """Score, credit and train on a round, and write the weights for those who play; nothing is saved yet."""
        loop = self._config.loop
        taken = intake_of(self._lake, self._run, number, loop)
        where = taken.where
        refuse_failed(self._lake, where)
        self.score(where)
        keep_best(self._lake, self._run, number, where, loop)
        self._remember("computing the advantages")
        credit, live, dead = self._credit(where)
        self._remember("choosing the episodes")
        chosen = choose(self._lake, self._run, number, where, loop)
        left_out = {str(name): int(count) for name, count in chosen.report.select("filter", "dropped_episodes").rows()}
        self._remember("preparing the updates")
        done = None if live == 0 or not chosen.kept else self._update(number, where, credit, ids.to_text(chosen.job_id))
        self._pending = done
        self.version = number + 1
        self.optimizer_steps += 0 if done is None else len(done.reports)
        self._remember("writing the weights")
        self._versions.write(self.backend, self.version)
        return Learned(taken, live, dead, left_out, done)

    def export(self, folder: Path) -> None:
        """Write the model as it is now in Hugging Face layout; the job says how far it came."""
        export_model(self.backend, self._trainer, folder)
        self._job.counts |= {"optimizer_steps": self.optimizer_steps, "weights_sha256": self.backend.digest()}

    def save(self) -> None:
        """Write the checkpoint of the round that was learned from: its folder, what led to it, then its row.

        A round that trained nothing has none; resuming finds once more that there is nothing to train on.
        """
        done, self._pending = self._pending, None
        if done is None:
            return
        place = self._folder.checkpoint(self.optimizer_steps, self._job.attempt)
        snapshot = self._snapshot
        state = State(
            optimizer_step=self.optimizer_steps,
            epoch=0,
            plan_hash="",
            snapshot=snapshot,
            config=self._trainer.model_dump(mode="json"),
            first_entropy=self._alarms.first_entropy,
            standing_alarms=sorted(self._alarms.active),
        )
        state = save_checkpoint(place, self.backend, state)
        self._job.write("batches", done.batches)
        self._job.write("metrics", done.metrics)
        row = {
            "optimizer_step": self.optimizer_steps,
            "run_id": self._run,
            "policy_version": self.version,
            "uri": str(place.resolve()),
            "sha256": state.weights_sha256,
            "at": datetime.now(UTC),
            "data_snapshot": msgspec.json.encode(snapshot).decode(),
            "cursor": msgspec.json.encode({"round": self.version}).decode(),
        }
        self._job.write("checkpoints", pl.DataFrame([row]))
        self.saved_version = self.version
        self._written = retained([*self._written, (self.optimizer_steps, place)], self._trainer.keep_last, None)
        if self._trainer.keep_last is not None:
            prune(self._folder.checkpoints, [path for _, path in self._written])

    def _credit(self, where: str) -> tuple[Credit | None, int | None, int | None]:
        """The advantages of a round, and how many of its groups are live and dead."""
        if not self._trainer.loss.needs.credit:
            return None, None, None
        config = self._config.loop.credit
        estimator = config.build()
        said = estimator.model_fields_set
        if "step_source" not in said and config.options.get("episode_source", "score") == "score":
            estimator = with_step_source(self._lake, estimator, where, config.score, config.rewards)
        report = run_credit(self._lake, estimator, only=where, score=config.score, rewards=config.rewards)
        found = find_credit(self._lake, ids.to_text(report.job_id))
        return found, report.summary.live_groups, report.summary.dead_groups

    def _update(self, number: int, where: str, credit: Credit | None, selection: str) -> Update | None:
        trainer = self._trainer
        chosen = where if trainer.where is None else f"({where}) AND (\n{trainer.where}\n)"
        snapshot = self._lake.snapshot()
        self._snapshot = dict(snapshot.versions)
        try:
            select_episodes(snapshot, chosen, read_kept(snapshot, selection))
        except DataRefusedError:
            return None  # none of the round's episodes is wanted
        config = round_config(trainer, chosen, number, selection)
        assert trainer.learning_rate is not None
        try:
            return update(
                self.backend,
                snapshot,
                credit,
                config,
                learning_rate=learning_rate(number, self._config.loop.rounds, trainer.learning_rate, trainer.schedule),
                first_step=self.optimizer_steps,
                own_encoding=self._encoding,
                reference=self._reference,
                on_step=self._observe,
            )
        except NoPairsError as error:
            self._say(str(error))  # the next round may have some
            return None

    def _remember(self, doing: str) -> None:
        self._reminder.doing = doing

    def _observe(self, report: StepReport, total: int) -> None:
        self._watch.observe(report)
        log(self._loggers, self.optimizer_steps + report.step.index, report.metrics)
        self._remember(f"{report.step.index + 1} of {total} updates: {outcome(report)}")
        for alarm in report.alarms:
            self._say(alarm)
