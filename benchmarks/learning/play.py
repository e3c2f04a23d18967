"""Playing: episodes of the noisy script, and rollouts of a model in this process, as `trajlake collect` does."""

import random
from pathlib import Path

from benchmarks.learning.settings import Environment, Regime
from benchmarks.learning.worlds import NoisyScript, PuzzleGame, Split
from lake import ids
from lake.lake import Lake
from lake.records import EpisodeRecord
from pipelines.collect.environments import Task
from pipelines.collect.environments.games import build_outcome, name_start
from pipelines.collect.factory import PlayedWeights, build_player, describe_options
from pipelines.collect.manager.run import Collection, collect
from pipelines.collect.players import Rollout, StepTotals, build_episode, build_step
from pipelines.collect.policies import Decision, PolicyCard
from pipelines.collect.settings import PlayerOptions, RolloutLimits, RunSettings
from pipelines.collect.tasks import list_seed_tasks
from trainer.config import TrainConfig
from trainer.losses.sft import SFT
from trainer.runs.offline import make_deterministic

TRACES = "traces"
"""Run of the script's episodes."""
_ENDING = ("status", "terminated", "stop_reason", "env_return", "final_observation", "completion_tokens")


def player_options(environment: Environment, split: Split, temperature: float = 1.0) -> PlayerOptions:
    """Return the options of a model in this process; an action is one token and its end."""
    sampling = {"max_tokens": 4, "temperature": temperature}
    return PlayerOptions.model_validate({"env": environment.env, "env_args": {"split": split}, "sampling": sampling})


def record_traces(lk: Lake, environment: Environment, regime: Regime, seed: int) -> None:
    """Record the script's episodes as one collect job."""
    game = PuzzleGame(environment.name, "train")
    rng = random.Random(ids.key_hash("learning-traces", environment.name, seed))
    card = PolicyCard(name="noisy script", sampling={"noise": regime.noise})
    records: list[EpisodeRecord] = []
    for _ in range(regime.traces):
        records.append(_play_script(game, rng.randrange(1_000_000), regime.noise, card, len(records), seed))
    parameters = {"environment": environment.name, "noise": regime.noise, "seed": seed}
    with lk.job(kind="collect", run_id=TRACES, parameters=parameters) as job:
        job.record(records)


def _play_script(game: PuzzleGame, world: int, noise: float, card: PolicyCard, number: int, seed: int) -> EpisodeRecord:
    task = Task(seed=world)
    rollout = Rollout(task=task, rollout_index=number, collection_round=0, expected_group_size=1, seed=seed)
    answer = game.reset(world)
    script = NoisyScript(game, noise, ids.key_hash("trace", seed, number))
    before = build_outcome(answer, task_id=name_start(game, answer))
    record = build_episode(rollout, before, card, environment=game.name, split=game.split)
    totals = StepTotals()
    while not before.done:
        action = script.act()
        after = build_outcome(game.step(action))
        step = build_step(before, Decision(action), after, card, is_first=not record.steps)
        record.steps.append(step)
        totals.add(step)
        before = after
    ending = totals.ended(before)
    for name in _ENDING:
        setattr(record, name, getattr(ending, name))
    return record


def play(
    lk: Lake,
    environment: Environment,
    model: Path,
    run: str,
    *,
    split: Split,
    worlds: int,
    siblings: int,
    seed: int,
    temperature: float = 1.0,
) -> None:
    """Make sure that a run of one round is in the lake.

    Args:
        lk: lake of the rollouts.
        environment: environment that is played.
        model: folder of the weights that play.
        run: name of the run.
        split: split of the worlds.
        worlds: number of seeds.
        siblings: rollouts of each.
        seed: seed of the samples.
        temperature: temperature of the samples.
    """
    options = player_options(environment, split, temperature)
    make_deterministic(TrainConfig(model=str(model), loss=SFT(), seed=seed, threads=1))
    run_settings = RunSettings(run=run, groups=worlds, group_size=siblings, seed=seed)
    collection = Collection(
        run_settings=run_settings, limits=RolloutLimits(), rounds=1, settings=describe_options(options)
    )
    player = build_player(options, lk.uri, run, PlayedWeights(model, 0))
    collect(lk, player, list_seed_tasks(0, worlds), collection, say=_ignore)


def _ignore(_: str) -> None:
    """Drop a line of progress."""
