"""The rollouts of an online run: the round that is trained on, and the evaluations, both by the rollout manager.

Each is a run of its own in `episodes`: RUN, whose rounds are those of the loop, and RUN-eval, whose rounds are the
evaluations. The manager finds in the lake what has been played, so asking for a round that is there costs a query.
"""

from collections.abc import Callable
from functools import partial

from pydantic import BaseModel

from lake.errors import DataRefusedError
from lake.lake import Lake
from lake.read.online_runs import evaluation_run, of_round
from lake.read.text_table import counted
from pipelines.collect.manager.rounds import Wanted, all_failed
from pipelines.collect.manager.run import Collection, collect
from pipelines.collect.manager.scheduler import Limits
from pipelines.collect.tasks import TaskSet
from pipelines.collect.wiring import PlayedWeights, PlayerOptions, player_of, told_options
from trainer.evaluation.success import read_attempts
from trainer.online.engines import Engines
from trainer.online.settings import EvaluationConfig, OnlineConfig

Say = Callable[[str], None]


class Evaluated(BaseModel, frozen=True):
    """What an evaluation came to."""

    success: float
    """Share of the scored attempts that reach the threshold."""
    score: float
    """Their mean score."""
    attempts: int
    """Scored ones."""
    unscored: int


class Rollouts:
    """Plays rounds and evaluations of a run.

    Args:
        lake: where to; another connection than the trainer's, for both are used at once.
        run: the run's name.
        config: the document.
        tokenizer: folder of the tokenizer that engines have.
        say: called with a line now and then.
        progress: called with how far it is.
    """

    def __init__(self, lake: Lake, run: str, config: OnlineConfig, tokenizer: str, *, say: Say, progress: Say) -> None:
        self._lake, self._run, self._config = lake, run, config
        self._tokenizer, self._say, self._progress = tokenizer, say, progress
        collecting, evaluation = config.loop.collect, config.loop.evaluation
        self._tasks = collecting.task_set(are_shown=config.shows_prompts)
        self._held_out = None if evaluation is None else evaluation.task_set(are_shown=config.shows_prompts)

    @property
    def evaluation_run(self) -> str:
        """Name of the evaluations' run."""
        return evaluation_run(self._run)

    def collect(self, number: int, weights: PlayedWeights, engines: Engines) -> None:
        """Make sure that a round is in the lake; what is missing of it is played by these weights.

        Args:
            number: of the round.
            weights: which play; engines have been given them.
            engines: who plays; none: the model in this process.
        """
        wanted = self._config.wanted(self._run)
        player = self._config.loop.collect.player
        self._play(number, weights, player, wanted, self._tasks, self._config.loop.collect.limits, engines)

    def evaluate(self, index: int, weights: PlayedWeights, config: EvaluationConfig, engines: Engines) -> None:
        """Make sure that an evaluation, the index-th, is in the lake; see `collect`."""
        assert self._held_out is not None
        options = self._config.loop.collect.player
        if config.env_args is not None:
            options = options.model_copy(update={"env_args": config.env_args})
        wanted = Wanted(
            run=self.evaluation_run,
            groups=len(self._held_out.tasks),
            group_size=config.attempts,
            seed=self._config.trainer.seed,
        )
        collecting = self._config.loop.collect
        limits = Limits(
            parallel=collecting.parallel, retries=collecting.retries, episode_seconds=collecting.episode_seconds
        )
        self._play(index, weights, options, wanted, self._held_out, limits, engines)

    def evaluated(self, index: int, config: EvaluationConfig) -> Evaluated:
        """What the index-th evaluation came to, from the tables. Raises DataRefusedError: nothing of it is scored."""
        where = of_round(self.evaluation_run, index)
        refuse_failed(self._lake, where)
        rows = read_attempts(self._lake.snapshot(), by="run_id", score=config.score, where=where)
        scores = rows["score"].drop_nulls()
        if scores.is_empty():
            raise DataRefusedError(
                f"none of {counted(rows.height, 'held-out attempt')} has a score of {config.score!r}: reward them in "
                f"the environment, or name what scores them (`loop.evaluation.score`); then start another run (--run)"
            )
        return Evaluated(
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
        wanted: Wanted,
        tasks: TaskSet,
        limits: Limits,
        engines: Engines,
    ) -> None:
        # The policy is the run's: its versions are other weights than those of any other run.
        named = options.model_copy(update={"engines": engines.urls, "policy": options.policy or self._run})
        settings = told_options(named)
        if named.engines and named.agent is None:
            named = named.model_copy(update={"tokenizer": named.tokenizer or self._tokenizer})
        is_last = number + 1 >= self._config.loop.rounds
        what = Collection(
            wanted=wanted,
            limits=limits,
            rounds=number + 1,
            settings=settings,
            chooses_best=False,
            next_step="no round is left to train on them" if is_last else "the next round goes on with them",
        )
        player = player_of(named, self._lake.uri, wanted.run, weights)
        say = partial(self._say_of, wanted.run)
        collect(self._lake, player, tasks, what, say=say, progress=self._progress, lost=engines.lost)

    def _say_of(self, run: str, line: str) -> None:
        self._say(f"{run}: {line}")


def refuse_failed(lake: Lake, where: str) -> None:
    """Raise DataRefusedError where a round has no episodes, or they failed one and all."""
    if (problem := all_failed(lake, where)) is not None:
        raise DataRefusedError(
            f"{problem}. Mend what plays, and start another run (--run); `trainer.model` may be a folder of this one's "
            f"versions/"
        )
    if not lake.sql(f"SELECT count(*) FROM episodes WHERE {where}").item():
        raise DataRefusedError(
            f"no episode of {where} is in the lake; `trajlake sql 'SELECT message FROM rejects'` says why"
        )
