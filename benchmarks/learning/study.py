"""The whole study: start weights, learning rates and the gate on tuning seeds, then the comparison."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean

from benchmarks.learning.arms import START
from benchmarks.learning.results import Result, Results, Task
from benchmarks.learning.runs import remove_run, run_task
from benchmarks.learning.settings import TUNING_SEEDS, Environment, StudyPlan
from benchmarks.learning.workers import end_with_parent

Say = Callable[[str], None]


def run_study(out: Path, plan: StudyPlan, environments: Sequence[Environment], *, processes: int, say: Say) -> None:
    """Run what is missing, environment after environment.

    Args:
        out: folder of the study: results/, starts/ and the runs that are under way.
        plan: seeds and changes of the regime.
        environments: environments of the study.
        processes: runs at a time.
        say: takes a line of progress.
    """
    results = Results(out / "results")
    with ExitStack() as stack:
        pool = None
        if processes > 1:
            context = multiprocessing.get_context("spawn")
            pool = stack.enter_context(ProcessPoolExecutor(processes, context, initializer=prepare_worker))
        for environment in environments:
            for tasks in stages(plan, environment, results):
                missing = results.missing(tasks)
                for ended in (task for task in tasks if task not in missing):
                    remove_run(out, ended)  # there if a kill came after its result was stored
                for number, result in enumerate(_run_all(out, missing, pool, say), start=1):
                    results.add(result)
                    remove_run(out, result.task)
                    say(f"{number}/{len(missing)} {_describe(result)}")
            if not passes_gate(plan, environment, results):
                say(f"{environment.label}: an arm gains less than {plan.gate:.0%} on tuning seeds; it is not compared")


def stages(plan: StudyPlan, environment: Environment, results: Results) -> Iterator[list[Task]]:
    """Return the runs of an environment, stage by stage: a later one rests on the results of those before."""
    # Start weights are made by the first run that needs them, so their own measurement comes first.
    yield start_tasks(plan, environment, TUNING_SEEDS, "dev")
    yield tuning_tasks(plan, environment)
    yield gate_tasks(plan, environment, results)
    if passes_gate(plan, environment, results):
        yield start_tasks(plan, environment, range(plan.seeds), "test")
        yield compared_tasks(plan, environment, results)
        yield added_tasks(plan, environment)
        yield repeated_tasks(plan, environment, results)


def start_tasks(plan: StudyPlan, environment: Environment, seeds: Sequence[int], split: str) -> list[Task]:
    """Return the measurements of start weights as they are."""
    return [_task(plan, environment, START, seed, 0.0, split) for seed in seeds]


def tuning_tasks(plan: StudyPlan, environment: Environment) -> list[Task]:
    """Return every arm with every learning rate, on the first tuning seed and the split `dev`."""
    return _tasks_at(plan, environment, plan.rates)


def added_tasks(plan: StudyPlan, environment: Environment) -> list[Task]:
    """Return the runs at the rates that were added after the comparison: no choice depends on them."""
    return _tasks_at(plan, environment, plan.added_rates.get(environment.name, ()))


def repeated_tasks(plan: StudyPlan, environment: Environment, results: Results) -> list[Task]:
    """Return the compared runs that are run again, with their starts, and also measured at the cold temperature."""
    changes = {**plan.changes, "cold_temperature": plan.cold_temperature}
    arms = plan.repeated.get(environment.name, ())
    tasks = start_tasks(plan, environment, range(plan.seeds), "test") + compared_tasks(plan, environment, results)
    return [task.model_copy(update={"changes": changes}) for task in tasks if arms and task.arm in (START, *arms)]


def _tasks_at(plan: StudyPlan, environment: Environment, rates: Sequence[float]) -> list[Task]:
    return [_task(plan, environment, arm, TUNING_SEEDS[0], rate, "dev") for rate in rates for arm in plan.arms]


def choose_rate(plan: StudyPlan, environment: Environment, arm: str, results: Results) -> float:
    """Return the learning rate with the highest success on the tuning seed; the smaller of equals."""
    tried = [task for task in tuning_tasks(plan, environment) if task.arm == arm]
    return max(tried, key=lambda task: (results.read_ended(task).success, -task.learning_rate)).learning_rate


def gate_tasks(plan: StudyPlan, environment: Environment, results: Results) -> list[Task]:
    """Return every arm at its learning rate on all tuning seeds; those of the first are there already."""
    return [
        _task(plan, environment, arm, seed, choose_rate(plan, environment, arm, results), "dev")
        for seed in TUNING_SEEDS
        for arm in plan.arms
    ]


def gains_over_start(plan: StudyPlan, environment: Environment, results: Results) -> dict[str, float]:
    """Return the mean gain of each arm over its start on the tuning seeds, by arm."""
    starts = {
        task.seed: results.read_ended(task).success for task in start_tasks(plan, environment, TUNING_SEEDS, "dev")
    }
    gains: dict[str, list[float]] = {}
    for task in gate_tasks(plan, environment, results):
        gains.setdefault(task.arm, []).append(results.read_ended(task).success - starts[task.seed])
    return {arm: fmean(differences) for arm, differences in gains.items()}


def passes_gate(plan: StudyPlan, environment: Environment, results: Results) -> bool:
    """Return whether every arm gains enough for the environment to be compared."""
    return min(gains_over_start(plan, environment, results).values()) >= plan.gate


def compared_tasks(plan: StudyPlan, environment: Environment, results: Results) -> list[Task]:
    """Return the comparison, all arms of a seed together: whenever the study is stopped, whole pairs are there."""
    rates = {arm: choose_rate(plan, environment, arm, results) for arm in plan.arms}
    return [
        _task(plan, environment, arm, seed, rate, "test") for seed in range(plan.seeds) for arm, rate in rates.items()
    ]


def _task(plan: StudyPlan, environment: Environment, arm: str, seed: int, rate: float, split: str) -> Task:
    document = {"environment": environment.name, "arm": arm, "seed": seed, "learning_rate": rate, "split": split}
    return Task.model_validate({**document, "changes": plan.changes})


def _run_all(out: Path, tasks: Sequence[Task], pool: ProcessPoolExecutor | None, say: Say) -> Iterator[Result]:
    """Run tasks here, or in processes of their own; results come as they are done."""
    if pool is None:
        yield from (run_task(out, task, say) for task in tasks)
        return
    for future in as_completed([pool.submit(run_task, out, task, _drop) for task in tasks]):
        yield future.result()


def prepare_worker() -> None:
    """Prepare a process of the pool."""
    end_with_parent()
    silence_bars()


def silence_bars() -> None:
    """Switch off the bars that transformers draws for each model."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def _drop(_: str) -> None:
    """Drop a line of progress: two processes would mix theirs."""


def _describe(result: Result) -> str:
    return (
        f"{result.task.name}: success {result.success:.3f}, {result.tokens} tokens, {result.optimizer_steps} updates, "
        f"{result.cpu_seconds:.0f} processor seconds"
    )
