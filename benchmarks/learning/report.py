"""The report: tables of the page between its markers, made from the runs, which stand in a JSON file beside it."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev

from pydantic import BaseModel, ConfigDict

from benchmarks.ladder.report import BEGIN, END, table
from benchmarks.ladder.statistics import verdicts
from benchmarks.learning.anchors import AnchorTable
from benchmarks.learning.arms import ARMS, BY_NAME, COMPARED, RATES
from benchmarks.learning.results import Result, Results, Task
from benchmarks.learning.settings import Game, Settings
from benchmarks.learning.study import compared_tasks, start_tasks, tuning_tasks

LEAST_SEEDS = 5
"""Fewer are not tested."""
_CURVE_POINTS = 10


class GameReport(BaseModel):
    """What there is of a game."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    label: str
    seeds: int
    """Planned."""
    budget: int
    """Tokens of a compared run."""
    anchors: AnchorTable | None
    starts: list[Result]
    tuning: list[Result]
    compared: list[Result]

    @property
    def whole_seeds(self) -> list[int]:
        """Seeds whose arms have all ended."""
        done = {(result.task.seed, result.task.arm) for result in self.compared}
        return [seed for seed in range(self.seeds) if all((seed, arm.name) in done for arm in ARMS)]

    def of(self, arm: str) -> list[Result]:
        """An arm's runs, of the whole seeds, in order."""
        results_by_seed = {result.task.seed: result for result in self.compared if result.task.arm == arm}
        return [results_by_seed[seed] for seed in self.whole_seeds]


class Report(BaseModel):
    """The study as far as it has come."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    games: list[GameReport]


def write_report(out: Path, settings: Settings, games: Sequence[Game], page: Path) -> None:
    """Put the tables into a page, and the runs into a JSON file of the same name.

    Args:
        out: folder of the study.
        settings: of the study.
        games: which.
        page: Markdown with both markers.

    Raises:
        ValueError: the page has no markers.
    """
    report = collected(out, settings, games)
    page.write_text(with_tables(page.read_text(), report))
    page.with_suffix(".json").write_text(report.model_dump_json(indent=1) + "\n")


def with_tables(text: str, report: Report) -> str:
    """A page with its tables. Raises ValueError: it has no markers."""
    if BEGIN not in text or END not in text.partition(BEGIN)[2]:
        raise ValueError(f"the page has no place for the tables: put the lines {BEGIN} and {END} into it")
    head, tail = text.partition(BEGIN)[0], text.partition(BEGIN)[2].partition(END)[2]
    return f"{head}{BEGIN}\n\n{tables(report)}\n\n{END}{tail}"


def collected(out: Path, settings: Settings, games: Sequence[Game]) -> Report:
    """Read what has ended."""
    results = Results(out / "results")

    def ended(tasks: Iterable[Task]) -> list[Result]:
        return [result for task in tasks if (result := results.get(task)) is not None]

    reports = []
    for game in games:
        anchors = out / "anchors" / f"{game.name}.json"
        is_tuned = not results.missing(tuning_tasks(game))
        reports.append(
            GameReport(
                name=game.name,
                label=game.label,
                seeds=settings.seeds,
                budget=settings.tokens,
                anchors=AnchorTable.model_validate_json(anchors.read_text()) if anchors.exists() else None,
                starts=ended(start_tasks(settings, game)),
                tuning=ended(tuning_tasks(game)),
                compared=ended(compared_tasks(settings, game, results)) if is_tuned else [],
            )
        )
    return Report(games=reports)


def tables(report: Report) -> str:
    """All tables, game after game."""
    sections = [_done(report)]
    for game in report.games:
        tables = (_starts(game), _anchors(game), _tuning(game), _declared(game), _arms(game), _curve(game))
        sections += [f"### {game.label.capitalize()}", *(part for part in tables if part)]
    return "\n\n".join(sections)


def _done(report: Report) -> str:
    rows = []
    for game in report.games:
        runs = [*game.starts, *game.tuning, *game.compared]
        rows.append(
            (
                game.label,
                f"{len(game.compared)} of {game.seeds * len(ARMS)}",
                f"{len(game.whole_seeds)} of {game.seeds}",
                f"{sum(run.tokens for run in runs):,}",
                f"{sum(run.seconds for run in runs) / 3600:.1f}",
                f"{sum(run.cpu_seconds for run in runs) / 3600:.1f}",
            )
        )
    head = ("game", "compared runs", "whole seeds", "tokens", "hours", "processor hours")
    return "What has been run (tokens and hours with those that chose learning rates):\n\n" + table(head, rows)


def _starts(game: GameReport) -> str:
    if not game.starts:
        return ""
    values = [100 * result.success for result in game.starts]
    note = f"Start weights on the held-out worlds: {fmean(values):.1f} % success over {len(values)} seeds"
    spread = f", from {min(values):.1f} to {max(values):.1f} %"
    anchors = game.anchors
    invalid = (
        "" if anchors is None else f"; {anchors.invalid:.1%} of their actions are not among those that the game lists"
    )
    return f"{note}{spread}{invalid}."


def _anchors(game: GameReport) -> str:
    anchors = game.anchors
    if anchors is None:
        return ""
    rows = [
        (row.name, f"{row.shared:.1%}", f"{row.meaningful:.1%}", f"{row.singleton:.1%}", f"{row.ways_in:.1f}")
        for row in anchors.rows
    ]
    head = ("the same state is the same", "shared", "meaningful", "alone", "ways in")
    note = (
        f"State normalisations, on {anchors.episodes} rollouts ({anchors.steps:,} steps, {anchors.success:.1%} success)"
        " of the tuning seed's start weights:"
    )
    return f"{note}\n\n{table(head, rows)}"


def _tuning(game: GameReport) -> str:
    if not game.tuning:
        return ""
    rows = []
    for arm in ARMS:
        results_by_rate = {result.task.learning_rate: result for result in game.tuning if result.task.arm == arm.name}
        rows.append(
            (
                arm.label,
                *(f"{100 * results_by_rate[rate].success:.1f}" if rate in results_by_rate else "" for rate in RATES),
            )
        )
    head = ("arm", *(f"{rate:g}" for rate in RATES))
    return f"Success in % on worlds of the fold `dev`, by learning rate, on the tuning seed:\n\n{table(head, rows)}"


def _declared(game: GameReport) -> str:
    seeds = len(game.whole_seeds)
    if seeds < LEAST_SEEDS:
        return f"Nothing is tested yet: {seeds} of {game.seeds} seeds are whole, and {LEAST_SEEDS} are needed."
    rows = []
    for measure, values in _measures(game).items():
        for arm, base, result, holm in (verdicts_found := verdicts(values, COMPARED)):
            words = next(each.words for each in verdicts_found if (each.one, each.other) == (arm, base))
            low, high = (None, None) if result.low is None else (100 * result.low, 100 * (result.high or 0.0))
            rows.append(
                (
                    measure,
                    BY_NAME[arm].label,
                    BY_NAME[base].label,
                    f"{100 * (result.difference or 0.0):+.1f}",
                    "none: all seeds differ alike" if low is None else f"{low:+.1f} to {high:+.1f}",
                    "" if result.p is None else f"{result.p:.4f}",
                    f"{holm:.4f}",
                    words,
                )
            )
    head = ("measure", "arm", "against", "difference, points", "95 % interval", "p, exact", "p, Holm", "verdict")
    return f"The declared comparisons, over {seeds} paired seeds:\n\n{table(head, rows)}"


def _measures(game: GameReport) -> dict[str, dict[str, list[float]]]:
    return {
        "success after the budget": {arm.name: [run.success for run in game.of(arm.name)] for arm in ARMS},
        "area under the curve": {arm.name: [run.area for run in game.of(arm.name)] for arm in ARMS},
    }


def _arms(game: GameReport) -> str:
    if not game.whole_seeds:
        return ""
    starts = {result.task.seed: result.success for result in game.starts}
    rows = []
    for arm in ARMS:
        runs = game.of(arm.name)
        values = [100 * run.success for run in runs]
        rows.append(
            (
                arm.label,
                f"{runs[0].task.learning_rate:g}",
                f"{fmean(values):.1f}",
                f"{stdev(values):.1f}" if len(values) > 1 else "",
                " ".join(f"{value:.1f}" for value in values),
                f"{fmean(100 * (run.success - starts[run.task.seed]) for run in runs):+.1f}",
                f"{100 * fmean(run.area for run in runs):.1f}",
                f"{fmean(run.tokens for run in runs):,.0f}",
                f"{fmean(run.optimizer_steps for run in runs):.0f}",
                f"{fmean(fmean(each.live_groups for each in run.rounds) for run in runs):.1f}",
            )
        )
    costs = ("tokens", "updates", "live groups a round")
    head = ("arm", "learning rate", "success, %", "sd", "by seed", "minus start", "area, %", *costs)
    return f"All arms over the whole seeds (tokens, updates and live groups are means):\n\n{table(head, rows)}"


def _curve(game: GameReport) -> str:
    if not game.whole_seeds:
        return ""
    grid = [game.budget * (2 * point + 1) // (2 * _CURVE_POINTS) for point in range(_CURVE_POINTS)]
    rows = [
        (
            BY_NAME[arm.name].label,
            *(f"{100 * fmean(success_at(run, at) for run in game.of(arm.name)):.0f}" for at in grid),
        )
        for arm in ARMS
    ]
    head = ("tokens, thousands", *(f"{at / 1000:g}" for at in grid))
    return f"Success of the collected rollouts in %, by the tokens collected until then:\n\n{table(head, rows)}"


def success_at(run: Result, tokens: int) -> float:
    """Success of the round that was being collected after so many tokens; of the last one beyond its end."""
    collected_before = 0
    for each in run.rounds:
        collected_before += each.tokens
        if tokens < collected_before:
            return each.success
    return run.rounds[-1].success
