"""The training side of an online run: the update of a round, the checkpoint after it, and the weights for its players.

One `train` job covers all rounds, and its optimizer steps are counted through. A resumed run continues after the newest
row of `checkpoints` under another attempt. A round is trained on in one piece: a kill before its checkpoint repeats it,
on the same rollouts, in the same order, with the same weights at its end.

A version of the weights is the number of rounds that were trained on. Each has a folder, which engines and the policy
in this process read.
"""

import shutil
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from lake.errors import CheckpointError, DataRefusedError, NoPairsError, UsageError
from lake.judgements.credit import Credit
from lake.judgements.selections import read_selection
from lake.lake import Lake
from lake.storage.atomic import atomic_folder, check_complete, recover, remove_folder
from lake.write.rows import SCORE_COLUMNS
from lake.write.scores import add_scores
from pipelines.collect.factory import PlayedWeights
from trainer.backends.base import FrozenPolicy, SingleDevice
from trainer.config import ScheduleConfig, TrainConfig
from trainer.data.render import Renderer, compute_engine_encoding, render_final_prompts
from trainer.data.selection import select, select_episodes
from trainer.evaluation.scoring import score_prompts, score_states
from trainer.loggers import Logger, log_metrics
from trainer.losses import Needs
from trainer.monitor import Alarms, UpdateMonitor
from trainer.online.settings import VALUE_SCORER, Say
from trainer.policy.model_files import load_tokenizer
from trainer.runs.checkpoint import State, load_checkpoint, save_checkpoint
from trainer.runs.factories import learning_rate, make_reference
from trainer.runs.folder import RunFolder, RunJob, prune, select_retained
from trainer.runs.loop import StepReport, Update, train_round
from trainer.runs.training_run import export_model, store_tokenizer

_VALUE_VERSION = "learned"
"""Version of the value head's scores: episodes of all runs have it, each from the weights of its round."""
_EPISODES_A_PASS = 256
"""Episodes whose states are read and scored together."""


class Versions:
    """The folders `v0`, `v1`, ... of a run's weights.

    Args:
        folder: folder of these folders, in which only this process writes.
        config: configuration of the training run.
    """

    def __init__(self, folder: Path, config: TrainConfig) -> None:
        recover(folder)
        self._folder = folder
        self._config = config

    def folder_of(self, version: int) -> Path:
        """Return the folder of a version."""
        return (self._folder / f"v{version}").absolute()

    def read_weights(self, version: int) -> PlayedWeights:
        """Return a version for players. Raises CheckpointError: its folder is missing or incomplete."""
        folder = self.folder_of(version)
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder} is gone, with the weights that the next rollouts are to be played by; restore it, or start "
                "another run into another --out"
            )
        try:
            check_complete(folder)
        except UsageError as error:
            raise CheckpointError(f"{error}; or start another run into another --out") from error
        return PlayedWeights(folder, version)

    def write(self, backend: SingleDevice, version: int) -> None:
        """Write the policy's present weights as a version, replacing an earlier folder.

        A resumed run writes the weights of its checkpoint, which are verified; those of a folder are not.
        """
        # vLLM on a CPU keeps its old head unless the files have tied weights by every name.
        export_model(backend, self._config, self.folder_of(version), tied=True)

    def copy(self, version: int, target: Path) -> None:
        """Copy a version to another folder, replacing an earlier one."""
        with atomic_folder(target) as partial:
            shutil.copytree(self.read_weights(version).folder, partial, dirs_exist_ok=True)

    def prune(self, first: int) -> None:
        """Remove the versions before `first`, which are not played again."""
        for folder in self._folder.glob("v*"):
            number = folder.name.removeprefix("v")
            if number.isdecimal() and int(number) < first:  # a user's copy, such as `v3.old`, stays
                remove_folder(folder)


def build_round_config(trainer: TrainConfig, where: str, number: int, selection: str | None = None) -> TrainConfig:
    """Return the configuration of the update of round `number`.

    Each round has an order of its episodes, and one learning rate from its first update to its last.

    Args:
        trainer: the configuration that all rounds share.
        where: predicate over the episodes.
        number: 0, 1, ...
        selection: the job that selected among these episodes; None takes all of them.
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
        lake: the lake of the rounds.
        run: the run's name.
        rounds: number of rounds, over which the learning rate falls.
        trainer: the resolved configuration of [trainer].
        backend: the policy with its starting weights.
        folder: folder of the run.
        job: the training job, started.
        say: takes alarms.
        loggers: take the metrics of each update.
    """

    def __init__(
        self,
        lake: Lake,
        run: str,
        rounds: int,
        trainer: TrainConfig,
        backend: SingleDevice,
        folder: RunFolder,
        job: RunJob,
        say: Say,
        loggers: Sequence[Logger] = (),
    ) -> None:
        self._lake, self._run, self._rounds, self._trainer = lake, run, rounds, trainer
        self.backend = backend
        self._folder, self._job, self._say = folder, job, say
        self._loggers = loggers
        self.alarms = Alarms(trainer.alarms)
        self._watch = UpdateMonitor(trainer, backend.policy, 1, self.alarms)
        tokenizer = load_tokenizer(trainer.model)
        store_tokenizer(job, tokenizer)
        self._encoding = compute_engine_encoding(tokenizer)
        self._reference: FrozenPolicy | None = None
        if trainer.loss.needs.reference_logprobs:
            self._reference = make_reference(trainer)  # once, and not in every round
        self._pending: Update | None = None
        self._snapshot: dict[str, int] = {}
        """Table versions at which the round was read."""
        self._written: list[tuple[int, Path]] = []
        self.version = 0
        """Number of rounds that were trained on: the version of the present weights."""
        self.saved_version = 0
        """The newest version that a checkpoint holds."""
        self.optimizer_steps = 0

    @property
    def needs_credit(self) -> bool:
        """Whether the loss reads advantages."""
        return self._trainer.loss.needs.credit

    def restore(self, row: dict[str, Any]) -> None:
        """Restore the state of a row of `checkpoints`. Raises CheckpointError: its folder is missing or damaged."""
        folder = self._folder.checkpoints / Path(row["uri"]).name
        state = load_checkpoint(folder, self.backend)
        if state.weights_sha256 != row["sha256"]:
            raise CheckpointError(f"checkpoint {folder} is not the one that the table `checkpoints` names; restore it")
        self.version = self.saved_version = row["policy_version"]
        self.optimizer_steps = row["optimizer_step"]
        self.alarms = Alarms(self._trainer.alarms, dict(state.alarm_figures), set(state.standing_alarms))
        self._watch = UpdateMonitor(self._trainer, self.backend.policy, 1, self.alarms)
        self._written = [(self.optimizer_steps, folder)]

    def score_states(self, number: int, where: str) -> None:
        """Score the states of round `number` by the present value head, each once, as the scorer `VALUE_SCORER`.

        A truncated episode also gets a score as a whole: the value of its final observation.

        Args:
            number: 0, 1, ...
            where: predicate over the round's rollouts.

        Raises:
            DataRefusedError: no rollout has tokens.
        """
        snapshot, trainer = self._lake.snapshot(), self._trainer
        scored = (
            f"SELECT episode_id FROM scores WHERE scorer = '{VALUE_SCORER}' AND scorer_version = '{_VALUE_VERSION}'"
        )
        where = f"({where}) AND episode_id NOT IN ({scored})"
        pending = snapshot.sql(f"SELECT episode_id, status FROM episodes WHERE {where} ORDER BY episode_id")
        if pending.is_empty():
            return
        config = build_round_config(trainer, f"episode_id IN ({', '.join(map(str, pending['episode_id']))})", number)
        everything = {"value": None, "live_only": False, "max_staleness": None, "minibatches": None, "epochs": 1}
        config = config.model_copy(update=everything | {"episodes_per_step": _EPISODES_A_PASS})
        selection = select(snapshot, config, Needs(), own_encoding=lambda: self._encoding)
        values = score_states(self.backend.policy, snapshot, selection, config)
        cut = pending.filter(status="truncated")["episode_id"]
        if len(cut):
            prompts = render_final_prompts(snapshot, Renderer(load_tokenizer(trainer.model)), cut)
            finals = score_prompts(self.backend.policy, list(prompts.values()), trainer.micro_batch_tokens)
            types = {"episode_id": pl.Int64, "value": pl.Float64}
            ends = pl.DataFrame({"episode_id": list(prompts), "value": finals}, schema=types)
            values = pl.concat([values, ends], how="diagonal")
        empty = pl.DataFrame(schema=SCORE_COLUMNS)
        rows = pl.concat([empty, values.with_columns(scorer=pl.lit(VALUE_SCORER))], how="diagonal_relaxed")
        add_scores(self._lake, rows, version=_VALUE_VERSION, source=f"loop {self._run}, round {number}")

    def train(self, number: int, where: str, credit: Credit | None, selection: str | None) -> Update | None:
        """Train on round `number`, without saving it; None where nothing of it is to be trained on.

        Args:
            number: 0, 1, ...
            where: predicate over the round's rollouts.
            credit: its advantages.
            selection: the job that selected its rollouts; None where all groups are dead, or none was selected.
        """
        update = None if selection is None else self._update(number, where, credit, selection)
        self._pending = update
        self.version = number + 1
        self.optimizer_steps += 0 if update is None else len(update.reports)
        return update

    def export(self, folder: Path) -> None:
        """Write the present model in Hugging Face layout, and its digest into the job's counts."""
        export_model(self.backend, self._trainer, folder)
        self._job.counts |= {"optimizer_steps": self.optimizer_steps, "weights_sha256": self.backend.digest()}

    def save(self) -> None:
        """Write the checkpoint of the newest round: its folder, the rows of its updates, then its own row.

        A round that trained nothing has no checkpoint; resuming finds again that there is nothing to train on.
        """
        update, self._pending = self._pending, None
        if update is None:
            return
        folder = self._folder.checkpoint(self.optimizer_steps, self._job.attempt)
        snapshot = self._snapshot
        state = State(
            optimizer_step=self.optimizer_steps,
            epoch=0,
            plan_hash="",
            snapshot=snapshot,
            config=self._trainer.model_dump(mode="json"),
            alarm_figures=dict(self.alarms.figures),
            standing_alarms=sorted(self.alarms.active),
        )
        state = save_checkpoint(folder, self.backend, state)
        self._job.write("batches", update.batches)
        self._job.write("metrics", update.metrics)
        row = {
            "optimizer_step": self.optimizer_steps,
            "run_id": self._run,
            "policy_version": self.version,
            "uri": str(folder.resolve()),
            "sha256": state.weights_sha256,
            "at": datetime.now(UTC),
            "data_snapshot": msgspec.json.encode(snapshot).decode(),
            "cursor": msgspec.json.encode({"round": self.version}).decode(),
        }
        self._job.write("checkpoints", pl.DataFrame([row]))
        self.saved_version = self.version
        written = [*self._written, (self.optimizer_steps, folder)]
        self._written = select_retained(written, self._trainer.keep_last, None)
        if self._trainer.keep_last is not None:
            prune(self._folder.checkpoints, [path for _, path in self._written])

    def _update(self, number: int, where: str, credit: Credit | None, selection: str) -> Update | None:
        trainer = self._trainer
        predicate = where if trainer.where is None else f"({where}) AND (\n{trainer.where}\n)"
        snapshot = self._lake.snapshot()
        self._snapshot = dict(snapshot.versions)
        if trainer.where is not None:
            try:
                select_episodes(snapshot, predicate, read_selection(snapshot, selection))
            except DataRefusedError:
                return None  # `trainer.where` leaves out every episode of the round
        config = build_round_config(trainer, predicate, number, selection)
        assert trainer.learning_rate is not None
        try:
            return train_round(
                self.backend,
                snapshot,
                credit,
                config,
                learning_rate=learning_rate(number, self._rounds, trainer.learning_rate, trainer.schedule),
                first_step=self.optimizer_steps,
                own_encoding=self._encoding,
                reference=self._reference,
                on_step=self._observe,
            )
        except NoPairsError as error:
            self._say(str(error))  # the next round may have some
            return None

    def _observe(self, report: StepReport, _: int) -> None:
        self._watch.observe(report)
        log_metrics(self._loggers, self.optimizer_steps + report.step.index, report.metrics)
        for alarm in report.alarms:
            self._say(alarm)
