"""Gold paths of a game, played through the project's environment and recorded in a lake."""

from collections.abc import Iterator, Sequence

from benchmarks.learning.settings import Game
from lake.lake import Lake
from lake.records import EpisodeRecord
from pipelines.collect.environments import Task
from pipelines.collect.environments.textworld_express import TextWorldExpress, build_maker
from pipelines.collect.players import Rollout, StepTotals, build_episode, build_step
from pipelines.collect.policies import Decision, PolicyCard

RUN = "gold"
"""The run that the traces are."""
_CARD = PolicyCard(name="gold path")
_LONGEST = 200
"""Actions that the package lets a game have while it looks for its path."""


def record_traces(lk: Lake, game: Game, count: int) -> None:
    """Record the first `count` worlds of the fold `train` whose gold path fits the horizon."""
    environment = build_maker(game.name, game.arguments("train"))()
    records: list[EpisodeRecord] = []
    for seed, path in gold_paths(game):
        if len(path) <= game.horizon:
            records.append(played(environment, seed, path))
        if len(records) == count:
            break
    environment.close()
    with lk.job(kind="collect", run_id=RUN, parameters={"game": game.model_dump(mode="json")}) as job:
        job.record(records)


def gold_paths(game: Game) -> Iterator[tuple[int, list[str]]]:
    """Number of a world in the fold `train`, and the actions of the package's own solution."""
    from textworld_express import TextWorldExpressEnv

    theirs = TextWorldExpressEnv(envStepLimit=_LONGEST)
    theirs.load(gameName=game.name, gameParams=",".join(f"{name}={value}" for name, value in game.properties.items()))
    for number, seed in enumerate(theirs.getValidSeedsTrain()):
        theirs.reset(seed=seed, gameFold="train", generateGoldPath=True)
        path = [str(action) for action in theirs.getGoldActionSequence()]
        while path[0] in game.skipped:
            path.pop(0)
        yield number, path


def played(environment: TextWorldExpress, seed: int, actions: Sequence[str]) -> EpisodeRecord:
    """An episode of given actions, which end it."""
    rollout = Rollout(task=Task(seed=seed), rollout_index=0, collection_round=0, expected_group_size=1, seed=0)
    now = environment.reset(rollout.task)
    record = build_episode(rollout, now, _CARD, environment=environment.name, split=environment.split)
    sums = StepTotals()
    for action in actions:
        after = environment.step({"role": "assistant", "content": action})
        step = build_step(now, Decision(action), after, _CARD, is_first=not record.steps)
        record.steps.append(step)
        sums.add(step)
        now = after
    ending = sums.ended(now)
    for name in ("status", "terminated", "stop_reason", "env_return", "final_observation", "completion_tokens"):
        setattr(record, name, getattr(ending, name))
    return record
