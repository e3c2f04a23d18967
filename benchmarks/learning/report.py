"""The report: tables of the page between its markers, made from the runs, which stand in a JSON file beside it."""

from collections.abc import Iterable, Sequence
from math import isnan
from pathlib import Path
from statistics import fmean, stdev

import polars as pl
from pydantic import BaseModel, ConfigDict, ValidationError

from benchmarks.ladder.report import BEGIN, END, table
from benchmarks.ladder.statistics import Verdict, holm, paired
from benchmarks.learning.arms import BY_NAME, COMPARED, START
from benchmarks.learning.beforehand import Forecast, read_forecasts, write_forecasts
from benchmarks.learning.results import LANGUAGE, Result, Results, Task
from benchmarks.learning.settings import GATE, TUNING_SEEDS, Environment, StudyPlan
from benchmarks.learning.study import (
    added_tasks,
    choose_rate,
    compared_tasks,
    gains_over_start,
    gate_tasks,
    passes_gate,
    repeated_tasks,
    start_tasks,
    tuning_tasks,
)
from lake.errors import UsageError
from lake.read.text_table import count_noun
from lake.settings import describe_faults
from lake.storage.atomic import write_atomically

LEAST_SEEDS = 5
"""Fewer are not tested."""
_CURVE_POINTS = 10


class EnvironmentReport(BaseModel):
    """The runs of an environment."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    label: str
    seeds: int
    """Planned."""
    arms: list[str]
    budget: int
    """Tokens of a run."""
    starts: list[Result]
    tuning: list[Result]
    """Every arm at every learning rate, and at its own on all tuning seeds."""
    rates: dict[str, float]
    """Chosen learning rates, by arm; empty while tuning is under way."""
    gains: dict[str, float]
    """Gain over the start on the tuning seeds, by arm; empty while they are under way."""
    passes_gate: bool | None
    """None while the tuning seeds are under way."""
    compared: list[Result]
    added: list[Result] = []
    """Runs at rates that were added after the comparison."""
    repeated: list[Result] = []
    """Compared runs and their starts, run again and also measured cold."""
    forecasts: list[Forecast] = []
    """Diagnostics of the start weights' rollouts, before any training."""

    @property
    def whole_seeds(self) -> list[int]:
        """Seeds whose arms have all ended."""
        done = {(result.task.seed, result.task.arm) for result in self.compared}
        return [seed for seed in range(self.seeds) if all((seed, arm) in done for arm in self.arms)]

    @property
    def runs(self) -> list[Result]:
        """All runs."""
        return [*self.starts, *self.tuning, *self.compared, *self.added, *self.repeated]

    def list_results(self, arm: str) -> list[Result]:
        """Return an arm's runs of the whole seeds, in order."""
        results_by_seed = {result.task.seed: result for result in self.compared if result.task.arm == arm}
        return [results_by_seed[seed] for seed in self.whole_seeds]


class Report(BaseModel):
    """The study so far."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    environments: list[EnvironmentReport]
    language: list[Result] = []
    """Runs of a language model, each with a measure of the start before it."""

    def list_runs(self) -> list[Result]:
        """Return all runs, of small models first."""
        return [run for environment in self.environments for run in environment.runs] + self.language

    def list_names(self) -> list[str]:
        """Return the names of all runs, and of the diagnostics before them."""
        forecasts = [row for environment in self.environments for row in environment.forecasts]
        return [run.task.name for run in self.list_runs()] + [f"{row.environment}-{row.arm}" for row in forecasts]


def write_report(out: Path, plan: StudyPlan, environments: Sequence[Environment], page: Path) -> int:
    """Put the tables into a page, and the runs into a JSON file of the same name.

    Args:
        out: folder of the study.
        plan: what was planned.
        environments: environments of the report.
        page: Markdown with both markers.

    Returns:
        Number of runs that the page held with another outcome.

    Raises:
        UsageError: the page has no markers, or its JSON file holds results that the folder lacks.
    """
    report = collect_report(out, plan, environments)
    text = replace_tables(read_page(page), report)
    changed = 0
    if page.with_suffix(".json").exists() or _has_tables(page):
        stored, kept = read_report(page), report.list_names()
        lost = [name for name in stored.list_names() if name not in kept]
        if lost:
            raise UsageError(
                f"{page.with_suffix('.json')} holds {count_noun(len(lost), 'result')} that this report would lose, as "
                f"{lost[0]}: write all environments, and read them first with --restore {page}"
            )
        runs = {run.task.name: run for run in report.list_runs()}
        changed = sum(not run.repeats(runs[run.task.name]) for run in stored.list_runs())
    write_atomically(page.with_suffix(".json"), report.model_dump_json(indent=1).encode() + b"\n")
    write_atomically(page, text.encode())
    return changed


def _has_tables(page: Path) -> bool:
    return "|" in read_page(page).partition(BEGIN)[2].partition(END)[0]


def read_page(page: Path) -> str:
    """Read a page. Raises UsageError: it is no text."""
    try:
        return page.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{page} is not a text in UTF-8: name a Markdown page") from error


def read_report(page: Path) -> Report:
    """Read the JSON file beside a page. Raises UsageError: it is missing or damaged."""
    path = page.with_suffix(".json")
    if not path.exists():
        raise UsageError(f"{path} is missing; it holds the runs of {page.name}: restore it")
    try:
        return Report.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise UsageError(f"{path} is damaged: {describe_faults(error)}; restore it") from error


def restore_results(page: Path, out: Path) -> str:
    """Write what a page's JSON file holds into a study's folder, which then runs only what is missing.

    Args:
        page: the page that `write_report` filled.
        out: folder of the study; results that are there stay as they are.

    Returns:
        What was written, and how many results of the folder differ from the page's.

    Raises:
        UsageError: the JSON file is missing or damaged, or a result of the folder is.
    """
    report = read_report(page)
    for environment in report.environments:
        if environment.forecasts and not read_forecasts(out, environment.name):
            write_forecasts(out, environment.name, environment.forecasts)
    small_models = [run for environment in report.environments for run in environment.runs]
    added, different = 0, []
    for results, runs in (
        (Results(out / "results"), small_models),
        (Results(out / LANGUAGE / "results"), report.language),
    ):
        for run in runs:
            stored = results.get(run.task)
            if stored is None:
                results.add(run)
                added += 1
            elif not stored.repeats(run):
                different.append(run.task.name)
    sentence = f"{added} runs restored from {page}"
    if different:
        sentence += f"; {out} keeps its own outcome of {count_noun(len(different), 'run')}, as {different[0]}"
    return sentence


def replace_tables(text: str, report: Report) -> str:
    """Return a page with its tables. Raises UsageError: it does not have its two markers once."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or END not in text.partition(BEGIN)[2]:
        raise UsageError(f"the page has no room for the tables: put the lines {BEGIN} and {END} into it, once")
    head, tail = text.partition(BEGIN)[0], text.partition(BEGIN)[2].partition(END)[2]
    return f"{head}{BEGIN}\n\n{build_tables(report)}\n\n{END}{tail}"


def collect_report(out: Path, plan: StudyPlan, environments: Sequence[Environment]) -> Report:
    """Return the runs that have ended."""
    results = Results(out / "results")

    def list_ended(tasks: Iterable[Task]) -> list[Result]:
        return [result for task in tasks if (result := results.get(task)) is not None]

    reports = []
    for environment in environments:
        tuning = tuning_tasks(plan, environment)
        starts = start_tasks(plan, environment, TUNING_SEEDS, "dev")
        is_tuned = not results.missing(tuning)
        if is_tuned:
            tuning += [task for task in gate_tasks(plan, environment, results) if task not in tuning]
        is_through = is_tuned and not results.missing([*starts, *tuning])
        is_compared = is_through and passes_gate(plan, environment, results)
        reports.append(
            EnvironmentReport(
                name=environment.name,
                label=environment.label,
                seeds=plan.seeds,
                arms=list(plan.arms),
                budget=environment.regime(plan.changes).tokens,
                starts=list_ended([*starts, *start_tasks(plan, environment, range(plan.seeds), "test")]),
                tuning=list_ended(tuning),
                rates={arm: choose_rate(plan, environment, arm, results) for arm in plan.arms} if is_tuned else {},
                gains=gains_over_start(plan, environment, results) if is_through else {},
                passes_gate=is_compared if is_through else None,
                compared=list_ended(compared_tasks(plan, environment, results)) if is_compared else [],
                added=list_ended(added_tasks(plan, environment)),
                repeated=list_ended(repeated_tasks(plan, environment, results)) if is_compared else [],
                forecasts=read_forecasts(out, environment.name),
            )
        )
    return Report(environments=reports, language=Results(out / LANGUAGE / "results").read_all())


def build_tables(report: Report) -> str:
    """Return all tables: what was run, the gate, the declared comparisons, then each environment."""
    overviews = (_tell_progress, _tell_gate, _tell_successes, _tell_verdicts, _tell_prediction)
    sections = [tell(report) for tell in overviews]
    for environment in report.environments:
        tellers = (_tell_forecasts, _tell_tuning, _tell_arms, _tell_differences, _tell_repeated, _tell_curve)
        tables = [text for tell in tellers if (text := tell(environment))]
        if tables:
            sections += [f"### {environment.label}", *tables]
    if report.language:
        sections += ["### A language model", _tell_language(report.language)]
    return "\n\n".join(section for section in sections if section)


def _tell_progress(report: Report) -> str:
    rows = [
        (
            environment.label,
            f"{len(environment.tuning)}",
            f"{len(environment.compared)} of {environment.seeds * len(environment.arms)}",
            f"{len(environment.whole_seeds)} of {environment.seeds}",
            f"{sum(run.tokens for run in environment.runs):,}",
            f"{sum(run.cpu_seconds for run in environment.runs) / 3600:.2f}",
        )
        for environment in report.environments
    ]
    head = ("environment", "tuning runs", "compared runs", "whole seeds", "tokens", "processor hours")
    return "Runs:\n\n" + table(head, rows)


def _tell_gate(report: Report) -> str:
    rows = []
    for environment in report.environments:
        dev = [run.success for run in environment.starts if run.task.split == "dev"]
        if not environment.gains:
            continue
        gains = [f"{100 * environment.gains[arm]:+.1f}" for arm in environment.arms]
        rows.append((environment.label, f"{100 * fmean(dev):.1f}", *gains, "yes" if environment.passes_gate else "no"))
    if not rows:
        return "The gate: no environment has all its tuning runs yet."
    arms = report.environments[0].arms
    head = ("environment", "start, %", *(BY_NAME[arm].label for arm in arms), "compared")
    note = f"The gate: gain over the start in points, mean of {len(TUNING_SEEDS)} tuning seeds; {100 * GATE:.0f} needed"
    return f"{note}:\n\n{table(head, rows)}"


def _tell_successes(report: Report) -> str:
    rows = []
    for environment in report.environments:
        if seeds := environment.whole_seeds:
            starts = [run.success for run in environment.starts if run.task.split == "test" and run.task.seed in seeds]
            means = [fmean(run.success for run in environment.list_results(arm)) for arm in environment.arms]
            rows.append((environment.label, *(f"{100 * share:.1f}" for share in (fmean(starts), *means))))
    if not rows:
        return ""
    head = ("environment", "start", *(BY_NAME[arm].label for arm in report.environments[0].arms))
    return f"Success in % on worlds of the split `test`, means over whole seeds:\n\n{table(head, rows)}"


def list_verdicts(report: Report) -> list[tuple[EnvironmentReport, Verdict]]:
    """Return the declared comparisons of success of the environments that have enough whole seeds.

    The correction counts those of all environments that may still be compared; a missing one counts as p = 1.
    """
    pairs = []
    missing = 0
    for environment in report.environments:
        if len(environment.whole_seeds) >= LEAST_SEEDS:
            success = {arm: [run.success for run in environment.list_results(arm)] for arm in environment.arms}
            pairs += [(environment, arm, base, paired(success, arm, base)) for arm, base in COMPARED]
        elif environment.passes_gate is not False:
            missing += len(COMPARED)
    corrected = holm([1.0 if result.p is None else result.p for *_, result in pairs] + missing * [1.0])
    return [
        (environment, Verdict(arm, base, result, p))
        for (environment, arm, base, result), p in zip(pairs, corrected, strict=False)
    ]


def _tell_verdicts(report: Report) -> str:
    rows = []
    for environment, verdict in list_verdicts(report):
        result = verdict.result
        interval = "none: all seeds differ alike"
        if result.low is not None and result.high is not None:
            interval = f"{100 * result.low:+.1f} to {100 * result.high:+.1f}"
        areas = [[run.area for run in environment.list_results(arm)] for arm in (verdict.one, verdict.other)]
        area = 100 * (fmean(areas[0]) - fmean(areas[1]))
        rows.append(
            (
                environment.label,
                BY_NAME[verdict.one].label,
                BY_NAME[verdict.other].label,
                str(len(environment.whole_seeds)),
                f"{100 * (result.difference or 0.0):+.1f}",
                interval,
                "" if result.p is None else f"{result.p:.4f}",
                f"{verdict.holm:.4f}",
                verdict.words,
                f"{area:+.1f}",
            )
        )
    if not rows:
        return f"Nothing is tested yet: no environment has {LEAST_SEEDS} whole seeds."
    head = (
        "environment",
        "arm",
        "against",
        "seeds",
        "points",
        "95 % interval",
        "p, exact",
        "p, Holm",
        "verdict",
        "area",
    )
    return f"The declared comparisons of success after the budget:\n\n{table(head, rows)}"


def correlate_forecasts(environment: EnvironmentReport) -> float | None:
    """Return the rank correlation of agreement before training with mean success after it, over estimators.

    None: the environment has no agreement or no whole seed yet, or all estimators are equal.
    """
    forecasts = [each for each in environment.forecasts if each.arm in environment.arms]
    if len(forecasts) < 2 or not environment.whole_seeds:
        return None
    success = [fmean(run.success for run in environment.list_results(each.arm)) for each in forecasts]
    frame = pl.DataFrame({"agreement": [each.agreement for each in forecasts], "success": success})
    correlation: float = frame.select(pl.corr("agreement", "success", method="spearman")).item()
    return None if isnan(correlation) else correlation


def _tell_prediction(report: Report) -> str:
    correlations = [(each.label, correlate_forecasts(each)) for each in report.environments]
    rows = [(label, f"{value:+.2f}") for label, value in correlations if value is not None]
    if not rows:
        return ""
    note = "Rank correlation of agreement before training with success after it, over the estimators without a model"
    return f"{note}:\n\n{table(('environment', 'rank correlation'), rows)}"


def _tell_forecasts(environment: EnvironmentReport) -> str:
    if not environment.forecasts:
        return ""
    rows = [
        (
            BY_NAME[each.arm].label,
            f"{each.agreement:.3f}",
            f"{each.pairs:,}",
            "" if each.shared is None else f"{each.shared:.1%}",
            "" if each.meaningful is None else f"{each.meaningful:.1%}",
        )
        for each in environment.forecasts
    ]
    head = ("estimator", "agreement", "actions at states", "shared", "meaningful")
    note = f"Before training, from rollouts of the start weights of tuning seed {TUNING_SEEDS[0]}"
    return f"{note}:\n\n{table(head, rows)}"


def _tell_tuning(environment: EnvironmentReport) -> str:
    first = [run for run in (*environment.tuning, *environment.added) if run.task.seed == TUNING_SEEDS[0]]
    rates = sorted({run.task.learning_rate for run in first})
    success = {(run.task.arm, run.task.learning_rate): f"{100 * run.success:.1f}" for run in first}
    if not first:
        return ""
    rows = [
        (
            BY_NAME[arm].label,
            *(
                f"**{success.get((arm, rate), '')}**"
                if environment.rates.get(arm) == rate
                else success.get((arm, rate), "")
                for rate in rates
            ),
        )
        for arm in environment.arms
    ]
    note = "Success in % on worlds of the split `dev`, by learning rate, on the first tuning seed"
    added = {run.task.learning_rate for run in environment.added}
    head = ("arm", *(f"{rate:g}, added afterwards" if rate in added else f"{rate:g}" for rate in rates))
    return f"{note}:\n\n{table(head, rows)}"


def _tell_arms(environment: EnvironmentReport) -> str:
    if not environment.whole_seeds:
        return ""
    starts = {run.task.seed: run.success for run in environment.starts if run.task.split == "test"}
    rows = []
    for arm in environment.arms:
        runs = environment.list_results(arm)
        values = [100 * run.success for run in runs]
        entropies = [run.last_entropy for run in runs if run.last_entropy is not None]
        rows.append(
            (
                BY_NAME[arm].label,
                f"{runs[0].task.learning_rate:g}",
                f"{100 * fmean(run.success for run in runs):.1f}",
                f"{stdev(values):.1f}" if len(values) > 1 else "",
                " ".join(f"{value:.1f}" for value in values),
                f"{fmean(100 * (run.success - starts[run.task.seed]) for run in runs):+.1f}",
                f"{100 * fmean(run.area for run in runs):.1f}",
                f"{fmean(run.tokens for run in runs):,.0f}",
                f"{fmean(run.optimizer_steps for run in runs):.0f}",
                f"{fmean(fmean(each.live_groups for each in run.rounds) for run in runs):.1f}",
                f"{fmean(entropies):.2f}" if entropies else "",
            )
        )
    costs = ("tokens", "updates", "live groups a round", "last entropy, nats")
    head = ("arm", "learning rate", "success, %", "sd", "by seed", "minus start", "area, %", *costs)
    return f"All arms over {len(environment.whole_seeds)} whole seeds (means):\n\n{table(head, rows)}"


def _tell_differences(environment: EnvironmentReport) -> str:
    """Return GiGPO minus each other arm, in views that the declared comparison does not have."""
    seeds = environment.whole_seeds
    if len(seeds) < 2:
        return ""
    starts = {run.task.seed: run.success for run in environment.starts if run.task.split == "test"}
    weakest = min(seeds, key=starts.__getitem__)
    rounds = min(len(run.rounds) for arm in environment.arms for run in environment.list_results(arm))
    first, *others = (COMPARED[0][0], *(arm for arm in environment.arms if arm != COMPARED[0][0]))
    rows = []
    for arm in others:
        pairs = list(zip(environment.list_results(first), environment.list_results(arm), strict=True))
        gains = {run.task.seed: run.success - other.success for run, other in pairs}
        counts = (sum(gain > 0 for gain in gains.values()), sum(gain < 0 for gain in gains.values()))
        equal_rounds = fmean(run.average_success(rounds) - other.average_success(rounds) for run, other in pairs)
        rows.append(
            (
                BY_NAME[arm].label,
                f"{100 * fmean(gains.values()):+.1f}",
                f"{100 * fmean(gain for seed, gain in gains.items() if seed != weakest):+.1f}",
                f"{counts[0]}, {counts[1]}",
                f"{100 * fmean(run.area - other.area for run, other in pairs):+.1f}",
                f"{100 * equal_rounds:+.1f}",
            )
        )
    note = (
        f"{BY_NAME[first].label} minus another arm, in points (described, not tested). The weakest start is that of "
        f"seed {weakest}.\nAll runs have {rounds} rounds, over which the last column takes the mean of success"
    )
    head = ("arm", "success", "without the weakest start", "seeds above, below", "area", f"first {rounds} rounds")
    return f"{note}:\n\n{table(head, rows)}"


def _tell_repeated(environment: EnvironmentReport) -> str:
    arms = list(dict.fromkeys(run.task.arm for run in environment.repeated))
    by_arm = {arm: {run.task.seed: run for run in environment.repeated if run.task.arm == arm} for arm in arms}
    seeds = sorted(set.intersection(*(set(runs) for runs in by_arm.values()))) if arms else []
    if not seeds:
        return ""
    rows = []
    for arm, runs in by_arm.items():
        cold = [100 * runs[seed].cold_success for seed in seeds]
        rows.append(
            (
                "start" if arm == START else BY_NAME[arm].label,
                f"{100 * fmean(runs[seed].success for seed in seeds):.1f}",
                f"{fmean(cold):.1f}",
                " ".join(f"{value:.1f}" for value in cold),
            )
        )
    temperature = environment.repeated[0].task.changes["cold_temperature"]
    note = f"Run again after the comparison, {len(seeds)} seeds, and measured at temperature 1 and {temperature:g}"
    head = ("arm", "success, %", "cold success, %", "cold, by seed")
    return f"{note}:\n\n{table(head, rows)}"


def _tell_curve(environment: EnvironmentReport) -> str:
    if not environment.whole_seeds:
        return ""
    grid = list_curve_points(environment)
    rows = [
        (
            BY_NAME[arm].label,
            *(f"{100 * fmean(read_success(run, at) for run in environment.list_results(arm)):.0f}" for at in grid),
        )
        for arm in environment.arms
    ]
    head = ("tokens, thousands", *(f"{at / 1000:g}" for at in grid))
    return f"Success of the collected rollouts in %, by the tokens collected until then:\n\n{table(head, rows)}"


def _tell_language(runs: Sequence[Result]) -> str:
    starts = {(run.task.seed, run.task.changes["before"]): run for run in runs if run.task.arm == START}
    trained = sorted((run for run in runs if run.task.arm != START), key=lambda run: (run.task.seed, run.task.arm))
    rows = [
        (
            str(run.task.seed),
            BY_NAME[run.task.arm].label,
            f"{100 * starts[run.task.seed, run.task.arm].success:.1f}",
            f"{100 * run.success:.1f}",
            " ".join(f"{100 * each.success:.0f}" for each in run.rounds),
            f"{run.tokens:,}",
            f"{run.optimizer_steps}",
            f"{run.seconds / 60:.0f}",
        )
        for run in trained
    ]
    head = ("seed", "arm", "start, %", "success, %", "collected rollouts by round, %", "tokens", "updates", "minutes")
    (held_out,) = {run.worlds for run in runs}
    note = f"Success on {held_out} starts of the split `test`, before and after each run"
    return f"{note}:\n\n{table(head, rows)}"


def list_curve_points(environment: EnvironmentReport) -> list[int]:
    """Return the numbers of collected tokens at which the curve is read."""
    return [environment.budget * (2 * point + 1) // (2 * _CURVE_POINTS) for point in range(_CURVE_POINTS)]


def read_success(run: Result, tokens: int) -> float:
    """Return the success of the round that was under way after so many tokens; beyond the end, of the last one."""
    collected_before = 0
    for each in run.rounds:
        collected_before += each.tokens
        if tokens < collected_before:
            return each.success
    return run.rounds[-1].success
