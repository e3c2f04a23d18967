"""The whole study: start weights, state normalisations, learning rates on the tuning seed, then the comparison."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path

from benchmarks.learning.anchors import anchor_table
from benchmarks.learning.arms import ARMS, RATES, START
from benchmarks.learning.results import Result, Results, Task
from benchmarks.learning.runs import run_task
from benchmarks.learning.settings import TUNING_SEED, Game, Settings

Say = Callable[[str], None]


def run_study(out: Path, settings: Settings, games: Sequence[Game], *, processes: int, say: Say) -> None:
    """Run what is missing, game after game.

    Args:
        out: folder of the study: results/, anchors/, and for each game its lake and start weights.
        settings: sizes and seeds.
        games: which.
        processes: runs at a time.
        say: takes a line of progress.
    """
    results = Results(out / "results")
    with ExitStack() as stack:
        pool = None
        if processes > 1:
            context = multiprocessing.get_context("spawn")
            pool = stack.enter_context(ProcessPoolExecutor(processes, mp_context=context))
        for game in games:
            anchor_table(out, settings, game)
            say(f"{game.label}: state normalisations are measured")
            for tasks in stages(settings, game, results):
                missing = results.missing(tasks)
                for number, result in enumerate(_run_all(out, settings, missing, pool, say), start=1):
                    results.add(result)
                    say(f"{number}/{len(missing)} {_line(result)}")


def stages(settings: Settings, game: Game, results: Results) -> Iterator[list[Task]]:
    """What there is to run on a game, stage by stage: a later one rests on the results of those before."""
    # Start weights are made by the first run that needs them, so their own measurement comes first and alone.
    yield start_tasks(settings, game)
    yield tuning_tasks(game)
    yield compared_tasks(settings, game, results)


def start_tasks(settings: Settings, game: Game) -> list[Task]:
    """The start weights of every seed, as they are."""
    return [
        Task(game=game.name, arm=START, seed=seed, learning_rate=0.0, fold="test") for seed in range(settings.seeds)
    ]


def tuning_tasks(game: Game) -> list[Task]:
    """Every arm with every learning rate, on a seed that is not compared and another fold than the comparison's."""
    return [
        Task(game=game.name, arm=arm.name, seed=TUNING_SEED, learning_rate=rate, fold="dev")
        for rate in RATES
        for arm in ARMS
    ]


def chosen_rate(game: Game, arm: str, results: Results) -> float:
    """The learning rate with the highest success on the tuning seed; the smaller of equals."""
    tried = [task for task in tuning_tasks(game) if task.arm == arm]
    return max(tried, key=lambda task: (results.read_ended(task).success, -task.learning_rate)).learning_rate


def compared_tasks(settings: Settings, game: Game, results: Results) -> list[Task]:
    """Seed after seed, all arms of a seed together: whenever the study is stopped, whole pairs are there."""
    rates = {arm.name: chosen_rate(game, arm.name, results) for arm in ARMS}
    return [
        Task(game=game.name, arm=arm, seed=seed, learning_rate=rate, fold="test")
        for seed in range(settings.seeds)
        for arm, rate in rates.items()
    ]


def _run_all(
    out: Path, settings: Settings, tasks: Sequence[Task], pool: ProcessPoolExecutor | None, say: Say
) -> Iterator[Result]:
    """Run tasks here, or in processes of their own; results come as they are done."""
    if pool is None:
        yield from (run_task(out, settings, task, say) for task in tasks)
        return
    for future in as_completed([pool.submit(run_task, out, settings, task, print) for task in tasks]):
        yield future.result()


def _line(result: Result) -> str:
    return (
        f"{result.task.name}: success {result.success:.3f}, {result.tokens} tokens, {result.optimizer_steps} updates, "
        f"{result.seconds:.0f} s"
    )
