"""The whole ladder: data, start weights, knobs on validation starts, then every arm and seed on held-out starts."""

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

from benchmarks.ladder.arms import ARMS, BY_NAME, PRIMARY, RATE_OF, Arm, Data
from benchmarks.ladder.data import DataSet, Say, data_set, start_weights
from benchmarks.ladder.results import Result, Results, Task
from benchmarks.ladder.runs import run_task
from benchmarks.ladder.settings import LadderSettings
from benchmarks.ladder.starts import Part

EDGE = "edge"
"""Part of the runs of `edge_tasks`."""
RunAll = Callable[[Sequence[Task]], Iterator[Result]]


def run_ladder(out: Path, settings: LadderSettings, *, processes: int, say: Say) -> Results:
    """Run what is missing.

    Args:
        out: folder of the ladder: lake, models, data.json, results.jsonl.
        settings: sizes and seeds.
        processes: runs at a time.
        say: takes a line of progress.
    """
    out.mkdir(parents=True, exist_ok=True)
    data = data_set(out, settings, say)
    for seed in (*settings.choosing_seeds(), *settings.compared_seeds()):
        start_weights(out, settings, seed)
        say(f"start weights of seed {seed}: there")
    results = Results(out / "results.jsonl")
    with _runner(out, data, processes) as run_all:
        for tasks in stages(settings, results):
            missing = results.missing(tasks)
            for number, result in enumerate(run_all(missing), start=1):
                results.add(result)
                say(f"{number}/{len(missing)} {_line(result)}")
    return results


def stages(settings: LadderSettings, results: Results) -> Iterator[list[Task]]:
    """What there is to run, stage by stage: a later one rests on the results of those before."""
    rate_arms = [arm for arm in ARMS if arm.knob == "learning_rate"]
    yield [task for arm in rate_arms for task in tuning_tasks(arm, settings, None)]
    rate = choose_knob(results, BY_NAME[RATE_OF], settings)
    yield [task for arm in ARMS if arm.knob == "beta" for task in tuning_tasks(arm, settings, rate)]
    compared = [task for seed in settings.compared_seeds() for task in compared_tasks(seed, settings, results)]
    # What was declared comes first, so that a ladder that is stopped early still has it.
    declared = {name for pair in PRIMARY for name in pair}
    yield sorted(compared, key=lambda task: task.arm not in declared)
    yield edge_tasks(settings, results)


def tuning_tasks(arm: Arm, settings: LadderSettings, rate: float | None) -> list[Task]:
    """Every value of an arm's knob on the seeds that choose it.

    Args:
        arm: which.
        settings: of the ladder.
        rate: learning rate of arms with another knob.
    """
    return [
        Task(Part.VALIDATION, arm.name, seed, value, value if arm.knob == "learning_rate" else rate)
        for value in arm.values
        for seed in settings.choosing_seeds()
    ]


def edge_tasks(settings: LadderSettings, results: Results) -> list[Task]:
    """One value further, on validation starts, for knobs whose best value was the last of those tried.

    They come after the comparison and change nothing in it: they say whether a wider range would have.
    """
    rate = choose_knob(results, BY_NAME[RATE_OF], settings)
    tasks = []
    for arm in ARMS:
        value = choose_knob(results, arm, settings)
        if value is None or value not in (arm.values[0], arm.values[-1]) or len(arm.values) < 2:
            continue
        inner = arm.values[1] if value == arm.values[0] else arm.values[-2]
        further = float(f"{value * value / inner:.3g}")
        own_value = further if arm.knob == "learning_rate" else rate
        tasks += [Task(EDGE, arm.name, seed, further, own_value) for seed in settings.choosing_seeds()]
    return tasks


def choose_knob(results: Results, arm: Arm, settings: LadderSettings) -> float | None:
    """The value of an arm's knob with the highest success on validation starts; the smallest of equals."""
    if not arm.knob:
        return None
    seeds = settings.choosing_seeds()
    success_by_knob: dict[float, list[float]] = {}
    for task, result in results.of.items():
        if task.part == Part.VALIDATION and task.arm == arm.name and task.seed in seeds and task.knob is not None:
            success_by_knob.setdefault(task.knob, []).append(result.success)
    return max(sorted(success_by_knob), key=lambda value: fmean(success_by_knob[value]))


def compared_tasks(seed: int, settings: LadderSettings, results: Results) -> list[Task]:
    """Every arm with its chosen knob on one seed."""
    rate = choose_knob(results, BY_NAME[RATE_OF], settings)
    tasks = []
    for arm in ARMS:
        knob = choose_knob(results, arm, settings)
        own_value = knob if arm.knob == "learning_rate" else rate
        tasks.append(Task(Part.HELD_OUT, arm.name, seed, knob, None if arm.data is Data.NOTHING else own_value))
    return tasks


@contextmanager
def _runner(out: Path, data: DataSet, processes: int) -> Iterator[RunAll]:
    """Runs tasks here, or in processes of their own; results come as they are done."""
    if processes == 1:
        yield lambda tasks: (run_task(out, data, task) for task in tasks)
        return
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:

        def run_all(tasks: Iterable[Task]) -> Iterator[Result]:
            for future in as_completed([pool.submit(run_task, out, data, task) for task in tasks]):
                yield future.result()

        yield run_all


def _line(result: Result) -> str:
    task = result.task
    return (
        f"{task.part} {task.arm} seed {task.seed} knob {task.knob} rate {task.learning_rate}: "
        f"success {result.success:.3f}, {result.tokens} tokens, {result.seconds:.1f} s"
    )
