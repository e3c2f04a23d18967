"""The rollouts of an online run: collecting rounds and evaluations, their advantages, and which are trained on.

Each is a run in `episodes`: RUN, whose rounds are those of the loop, and RUN-eval, whose rounds are the evaluations.
The manager of rollouts finds in the lake what has been played, so asking for a collected round costs one query.

A round trains on the rollouts that were collected in it, and on those that earlier rounds carried over and that have
ended since: a rollout belongs to the round in which it ends. The table `selections` has the rollouts of earlier rounds,
so each is taken once, also after a kill. Its group and its siblings stay those of the round in which it began. Each
rollout that is not trained on has a row in `selections` with the reason.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl
from pydantic import BaseModel

from lake import ids
from lake.errors import DataRefusedError
from lake.judgements.credit import Credit, find_credit
from lake.lake import Lake
from lake.progress import track
from lake.read.text_table import count_noun
from lake.read.training import name_evaluation_run, round_predicate
from pipelines.collect.environments.games import TextGame, play
from pipelines.collect.environments.loading import load_house
from pipelines.collect.factory import PlayedWeights, build_local_policy, build_player, describe_options
from pipelines.collect.manager.rounds import describe_total_failure, find_next_round
from pipelines.collect.manager.run import Collection, build_best_selection, collect, open_job, write_counts
from pipelines.collect.manager.scheduler import RolloutCounts
from pipelines.collect.players import Rollout, derive_rollout_seed
from pipelines.collect.settings import PlayerOptions, RolloutLimits, RunSettings
from pipelines.collect.tasks import TaskSet, load_tasks
from pipelines.credit.compare import shuffle_advantages
from pipelines.credit.estimators import needs_siblings
from pipelines.credit.job import choose_step_source, run_credit
from pipelines.select import Selection, SelectReport, Status, run_select
from trainer.evaluation.success import read_attempts
from trainer.online.settings import CreditConfig, EvaluationConfig, LoopConfig, OnlineConfig, Say


class EvaluationScores(BaseModel, frozen=True):
    """Scores of an evaluation."""

    success: float
    """Share of the scored attempts that reach the threshold."""
    score: float
    """Mean score of the scored attempts."""
    attempts: int
    """Number of scored attempts."""
    unscored: int
    """Number of attempts without a score."""


class Rollouts:
    """Collects rounds and evaluations of a run.

    Args:
        lake: a second connection to the trainer's lake, as both are used at once.
        run: the run's name.
        config: configuration of the loop.
        tokenizer: folder of the tokenizer that engines have.
        say: takes a line for the user.
    """

    def __init__(self, lake: Lake, run: str, config: OnlineConfig, tokenizer: str, *, say: Say) -> None:
        self._lake, self._run, self._config = lake, run, config
        self._tokenizer, self._say = tokenizer, say
        collecting, evaluation = config.loop.collect, config.loop.evaluation
        self._tasks = load_tasks(collecting, are_shown=config.shows_prompts)
        self._held_out = None if evaluation is None else load_tasks(evaluation, are_shown=config.shows_prompts)

    @property
    def evaluation_run(self) -> str:
        """Name of the evaluations' run."""
        return name_evaluation_run(self._run)

    def collect(
        self, number: int, weights: PlayedWeights, urls: tuple[str, ...], lost: Callable[[], str | None]
    ) -> None:
        """Collect round `number`: play with these weights what the lake lacks of it.

        Args:
            number: 0, 1, ...
            weights: the weights that play; the engines have them.
            urls: the engines; empty plays with the model in this process.
            lost: returns why rollouts need not wait for an engine any longer; None while they may.
        """
        collecting, request = self._config.loop.collect, self._config.request_rollouts(self._run)
        self._play(number, weights, collecting.player, request, self._tasks, collecting.limits, urls, lost)

    def evaluate(
        self,
        index: int,
        weights: PlayedWeights,
        config: EvaluationConfig,
        urls: tuple[str, ...],
        lost: Callable[[], str | None],
    ) -> None:
        """Collect the rollouts of evaluation `index`; see `collect`."""
        assert self._held_out is not None
        collecting = self._config.loop.collect
        options = collecting.player
        if config.env_args is not None:
            options = options.model_copy(update={"env_args": config.env_args})
        request = RunSettings(
            run=self.evaluation_run,
            groups=len(self._held_out.tasks),
            group_size=config.attempts,
            seed=self._config.trainer.seed,
        )
        limits = RolloutLimits(
            parallel=collecting.parallel, retries=collecting.retries, episode_seconds=collecting.episode_seconds
        )
        self._play(index, weights, options, request, self._held_out, limits, urls, lost)

    def read_scores(self, index: int, config: EvaluationConfig) -> EvaluationScores:
        """Read the scores of evaluation `index` from the tables. Raises DataRefusedError: none of it is scored."""
        where = round_predicate(self.evaluation_run, index)
        refuse_failed(self._lake, where)
        rows = read_attempts(self._lake.snapshot(), by="run_id", score=config.score, where=where)
        scores = rows["score"].drop_nulls()
        if scores.is_empty():
            raise DataRefusedError(
                f"none of {count_noun(rows.height, 'held-out attempt')} has a score of {config.score!r}: reward them "
                f"in the environment, or name what scores them (`loop.evaluation.score`); start another run (--run)"
            )
        return EvaluationScores(
            success=float((scores >= config.threshold).mean() or 0.0),  # type: ignore[arg-type]
            score=float(scores.mean() or 0.0),  # type: ignore[arg-type]
            attempts=len(scores),
            unscored=rows.height - len(scores),
        )

    def _play(
        self,
        number: int,
        weights: PlayedWeights,
        options: PlayerOptions,
        request: RunSettings,
        tasks: TaskSet,
        limits: RolloutLimits,
        urls: tuple[str, ...],
        lost: Callable[[], str | None],
    ) -> None:
        # The policy has the run's name: versions of another run are other weights.
        options = options.model_copy(update={"engines": urls, "policy": options.policy or self._run})
        settings = describe_options(options)
        if urls and options.agent is None:
            options = options.model_copy(update={"tokenizer": options.tokenizer or self._tokenizer})
        is_last = number + 1 >= self._config.loop.rounds
        collection = Collection(
            run_settings=request,
            limits=limits,
            rounds=number + 1,
            settings=settings,
            chooses_best=False,
            next_step="no round is left to train on them" if is_last else "the next round continues them",
        )

        def say(line: str) -> None:
            self._say(f"{request.run}: {line}")

        make_game = _find_game(options, limits)
        if make_game is not None:
            _collect_in_lock_step(self._lake, make_game, options, weights, tasks, collection, say)
            return
        player = build_player(options, self._lake.uri, request.run, weights)
        collect(self._lake, player, tasks, collection, say=say, lost=lost)


def _find_game(options: PlayerOptions, limits: RolloutLimits) -> Callable[[], TextGame] | None:
    """Return what makes the games of rounds that are played in lock-step; None where the manager plays.

    The package's own game neither fails nor hangs. With the model in this process, plain calls play it to the same rows
    as the manager, in half the time. An option that interrupts or changes rollouts needs the manager.
    """
    plain = PlayerOptions(env="house", env_args=options.env_args, sampling=options.sampling, policy=options.policy)
    is_plain = options == plain and limits == RolloutLimits(parallel=limits.parallel, retries=limits.retries)
    return load_house(options.env_args) if is_plain else None


def _collect_in_lock_step(
    lake: Lake,
    make_game: Callable[[], TextGame],
    options: PlayerOptions,
    weights: PlayedWeights,
    tasks: TaskSet,
    collection: Collection,
    say: Say,
) -> None:
    """Play the missing rounds, each as its job; a round that a kill interrupted is played again as a whole."""
    settings = collection.run_settings
    while (planned := find_next_round(lake, tasks, settings, collection.parameters)).plan.round < collection.rounds:
        plan, began = planned.plan, time.monotonic()
        say(plan.title if planned.job_id is None else f"{plan.title}, unfinished")
        policy = build_local_policy(options, weights)
        rollouts = [
            Rollout(
                task=task,
                rollout_index=index,
                run_id=settings.run,
                collection_round=plan.round,
                expected_group_size=plan.siblings,
                seed=derive_rollout_seed(plan.seed, plan.round, task.seed, index),
            )
            for task in plan.draw_tasks(tasks)
            for index in range(plan.siblings)
        ]
        with open_job(lake, planned, collection) as job, track("collect", len(rollouts), "episodes") as stage:
            records = []
            for first in range(0, len(rollouts), collection.limits.parallel):
                # In the manager's order: the last bits of a sample depend on its row of the batch.
                batch = sorted(rollouts[first : first + collection.limits.parallel], key=lambda rollout: rollout.key)
                records += play([make_game() for _ in batch], batch, policy)
                stage.update(len(records))
            written = job.record(records)
            figures = RolloutCounts(
                planned=len(records),
                present=written.present,
                finished=len(records) - written.present,
                steps=sum(len(record.steps) for record in records),
                tokens=sum(record.completion_tokens or 0 for record in records),
                rewarded=len(records),
                returns=sum(record.env_return or 0.0 for record in records),
                seconds=time.monotonic() - began,
            )
            write_counts(job, plan, figures, {"decisions": figures.steps, "carried": 0})
        if plan.round + 1 == collection.rounds:
            return  # without another query


def refuse_failed(lake: Lake, where: str) -> None:
    """Raise DataRefusedError where a round has no episodes, or all of them failed."""
    if (problem := describe_total_failure(lake, where)) is not None:
        raise DataRefusedError(
            f"{problem}. Mend what plays, and start another run (--run); `trainer.model` may be a folder of this one's "
            f"versions/"
        )
    if not lake.sql(f"SELECT count(*) FROM episodes WHERE {where}").item():
        raise DataRefusedError(
            f"no episode of {where} is in the lake; `trajlake sql 'SELECT message FROM rejects'` says why"
        )


_ENDED = """
SELECT episode_id, collection_round < $round AS is_carried FROM episodes
WHERE run_id = $run AND collection_round <= $round AND episode_id NOT IN (
    SELECT episode_id FROM selections JOIN job_runs USING (job_id)
    WHERE selection = $selection AND step_index IS NULL AND json_extract_string(parameters, '$.run') = $run
        AND try_cast(json_extract_string(parameters, '$.round') AS BIGINT) < $round
)
ORDER BY episode_id
"""


@dataclass(frozen=True, slots=True)
class Intake:
    """The rollouts of a round."""

    where: str
    """Predicate over `episodes`."""
    carried: int
    """Number of them that began in an earlier round."""


def name_round_selection(run: str) -> str:
    """Return the name of the selections that the rounds of a run make, one job a round."""
    return f"loop-{run}"


def read_intake(lake: Lake, run: str, number: int, config: LoopConfig) -> Intake:
    """Return the rollouts that round `number` of a run takes; `config` says whether rollouts are carried over."""
    of_round = round_predicate(run, number)
    if not config.collect.carry_over:
        return Intake(of_round, 0)
    parameters = {"run": run, "round": number, "selection": name_round_selection(run)}
    # By their ids: while a round is collected ahead, more of this one may end.
    ended = lake.sql(_ENDED, parameters)
    carried = ended.filter("is_carried")["episode_id"].to_list()
    collected = ended.filter(~pl.col("is_carried"))["episode_id"].to_list()
    where = f"{of_round} AND episode_id IN ({_list_ids(collected)}) OR episode_id IN ({_list_ids(carried)})"
    return Intake(where, len(carried))


def _list_ids(episode_ids: list[int]) -> str:
    return ", ".join(map(str, episode_ids)) or "NULL"


def select_best(lake: Lake, run: str, number: int, where: str, config: LoopConfig) -> None:
    """With `keep = "best"`, leave out all but the best siblings of each group by `loop.credit.score`, before credit.

    Raises:
        DataRefusedError: no rollout of the round is scored.
    """
    if config.collect.keep == "best":
        best = build_best_selection(run, config.collect.group_size)
        run_select(lake, best, where=where, score=config.credit.score, origin={"run": run, "round": number})


@dataclass(frozen=True, slots=True)
class RoundCredit:
    """The advantages of a round."""

    credit: Credit | None
    """Their credit job; None for losses without advantages."""
    live_groups: int | None
    """Number of groups with signal; None for losses without advantages."""
    dead_groups: int | None
    groups: int | None
    """All groups, also those without a score."""


def compute_credit(
    lake: Lake, config: CreditConfig, where: str, seed: int, defaults: Mapping[str, Any] | None = None
) -> RoundCredit:
    """Compute the advantages of the rollouts of `where` in a credit job.

    Args:
        lake: lake to read and write.
        config: the estimator and its sources.
        where: predicate over the round's rollouts.
        seed: decides a control's shuffle.
        defaults: options of the estimator that the configuration does not set.
    """
    config = config.model_copy(update={"options": {**(defaults or {}), **config.options}})
    estimator = config.build()
    if "step_source" not in estimator.model_fields_set and config.options.get("episode_source", "score") == "score":
        estimator = choose_step_source(lake, estimator, where, config.score, config.rewards)
    report = run_credit(lake, estimator, only=where, score=config.score, rewards=config.rewards)
    job_id = report.job_id
    if config.control == "shuffled":
        job_id, _ = shuffle_advantages(lake, job_id, seed)
    summary, credit = report.summary, find_credit(lake, ids.to_text(job_id))
    # A lone rollout is a signal to an estimator that compares no siblings.
    lone_groups = 0 if needs_siblings(estimator) else summary.singleton_groups
    return RoundCredit(credit, summary.live_groups + lone_groups, summary.dead_groups, summary.groups)


def select_rollouts(lake: Lake, run: str, number: int, where: str, config: LoopConfig) -> SelectReport:
    """Select the rollouts of a round that are trained on, and write each rollout that is left out with its reason.

    Rollouts stay that were played to their end, are among the best where only these are kept, and pass the filters.

    Args:
        lake: lake to read and write.
        run: the run's name.
        number: number of the round.
        where: predicate over the round's rollouts.
        config: settings of the loop, with its filters.
    """
    collect_config = config.collect
    is_best = collect_config.keep == "best"
    first = build_best_selection(run, collect_config.group_size).filters if is_best else (Status(),)
    return run_select(
        lake,
        Selection(name=name_round_selection(run), filters=(*first, *collect_config.filters)),
        where=where,
        score=config.credit.score,
        empty=True,
        origin={"run": run, "round": number},
    )
