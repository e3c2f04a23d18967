"""The report: tables of the page between its markers, and every seed's result in a JSON file beside it."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from benchmarks.ladder.arms import ARMS, BY_NAME, PRIMARY, Arm
from benchmarks.ladder.data import DataSet
from benchmarks.ladder.ladder import EDGE, compared_tasks, stages
from benchmarks.ladder.results import Result, Results
from benchmarks.ladder.settings import LadderSettings
from benchmarks.ladder.starts import Part
from benchmarks.ladder.statistics import paired, verdicts

BEGIN, END = "<!-- results -->", "<!-- /results -->"
BASE = "bc"
"""Arm that the others are described against."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A ladder without gaps."""

    data: DataSet
    tuning: list[Result]
    """On validation starts, one value beyond the range included where it was run."""
    compared: dict[str, list[Result]]
    """By arm, in order of the seeds."""

    @property
    def success(self) -> dict[str, list[float]]:
        """By arm, success of each seed."""
        return {name: [result.success for result in results] for name, results in self.compared.items()}


def write_report(out: Path, settings: LadderSettings, page: Path) -> None:
    """Put the tables into a page, and the results into a JSON file of the same name.

    Args:
        out: folder of the ladder.
        settings: of the ladder.
        page: Markdown with both markers.

    Raises:
        ValueError: runs are missing, or the page has no markers.
    """
    text = page.read_text()
    if BEGIN not in text or END not in text.partition(BEGIN)[2]:
        msg = f"{page} has no place for the tables: put the lines {BEGIN} and {END} into it"
        raise ValueError(msg)
    ladder = finished(out, settings)
    head, tail = text.partition(BEGIN)[0], text.partition(BEGIN)[2].partition(END)[2]
    page.write_text(f"{head}{BEGIN}\n\n{tables(ladder)}\n\n{END}{tail}")
    page.with_suffix(".json").write_text(as_json(ladder))


def finished(out: Path, settings: LadderSettings) -> Finished:
    """Read a ladder that has run to its end.

    Raises:
        ValueError: runs are missing.
    """
    data, results = DataSet.model_validate_json((out / "data.json").read_text()), Results(out / "results.jsonl")
    for tasks in stages(settings, results):
        missing = results.missing(tasks)
        if missing:
            msg = f"{len(missing)} runs are missing in {out}, the first is {missing[0]}; run the ladder again"
            raise ValueError(msg)
    tuning = [result for task, result in results.of.items() if task.part in (Part.VALIDATION, EDGE)]
    by_seed = [compared_tasks(seed, settings, results) for seed in settings.compared_seeds()]
    compared = {arm.name: [results.of[tasks[at]] for tasks in by_seed] for at, arm in enumerate(ARMS)}
    return Finished(data, tuning, compared)


def tables(ladder: Finished) -> str:
    """All tables."""
    sections = (_data(ladder), _declared(ladder), _arms(ladder), _tuning(ladder))
    return "\n\n".join(sections)


def as_json(ladder: Finished) -> str:
    """Every compared run, one line each, so that the tables can be computed again."""
    fields = ("knob", "learning_rate", "tokens", "action_tokens", "optimizer_steps", "starts")
    lines = []
    for name, results in ladder.compared.items():
        first = {field: getattr(results[0].task, field, getattr(results[0], field, None)) for field in fields}
        successes = [result.successes for result in results]
        lines.append(f' "{name}": {json.dumps(first | {"successes_by_seed": successes})}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))


def _data(ladder: Finished) -> str:
    rows = []
    for name, value in ladder.data.figures.items():
        is_share = "success of" in name or name == "success"
        rows.append((name, f"{value:.1%}" if is_share else f"{value:,.0f}" if value == int(value) else f"{value:.1f}"))
    return "The data set:\n\n" + table(("", ""), rows)


def _declared(ladder: Finished) -> str:
    rows = [
        (
            BY_NAME[arm_name].label,
            BY_NAME[base_name].label,
            f"{100 * require_number(result.difference):+.1f}",
            "none: all seeds differ alike"
            if result.low is None
            else f"{100 * result.low:+.1f} to {100 * require_number(result.high):+.1f}",
            f"{require_number(result.p):.3f}",
            f"{holm:.3f}",
            verdict.words,
        )
        for verdict in verdicts(ladder.success, PRIMARY)
        for arm_name, base_name, result, holm in (verdict,)
    ]
    head = ("arm", "against", "difference, points", "95 % interval", "p, exact", "p, Holm", "verdict")
    return "The declared comparisons (intervals: Student's, over seeds):\n\n" + table(head, rows)


def _arms(ladder: Finished) -> str:
    rows = [_arm(ladder, arm) for arm in ARMS]
    head = ("arm", "knob", "success, %", "sd", "lowest", "highest", f"minus {BY_NAME[BASE].label}", "better of these")
    costs = ("tokens", "action tokens", "steps")
    note = "All arms over the seeds; differences are described, not tested:"
    return f"{note}\n\n" + table((*head, *costs), rows)


def _arm(ladder: Finished, arm: Arm) -> list[str]:
    results, success = ladder.compared[arm.name], ladder.success
    values = [100 * value for value in success[arm.name]]
    against = paired(success, arm.name, BASE)
    better = sum(
        arm_success > base_success for arm_success, base_success in zip(success[arm.name], success[BASE], strict=True)
    )
    difference = f"{100 * require_number(against.difference):+.1f}" if arm.name != BASE else ""
    return [
        arm.label,
        f"{arm.knob.replace('_', ' ')} {results[0].task.knob:g}" if arm.knob else "",
        f"{fmean(values):.1f}",
        f"{stdev(values):.1f}",
        f"{min(values):.1f}",
        f"{max(values):.1f}",
        difference,
        f"{better} of {len(values)}" if arm.name != BASE else "",
        *(f"{number:,}" for number in (results[0].tokens, results[0].action_tokens, results[0].optimizer_steps)),
    ]


def _tuning(ladder: Finished) -> str:
    rows = []
    for arm in filter(lambda arm: arm.values, ARMS):
        success_by_knob: dict[float, list[float]] = {}
        for result in ladder.tuning:
            if result.task.arm == arm.name and result.task.knob is not None:
                success_by_knob.setdefault(result.task.knob, []).append(100 * result.success)
        knob = ladder.compared[arm.name][0].task.knob
        cells = [
            f"{value:g}: {'**' * (value == knob)}{fmean(success_by_knob[value]):.1f}{'**' * (value == knob)}"
            for value in arm.values
        ]
        beyond = [
            f"{value:g}: {fmean(values):.1f}" for value, values in success_by_knob.items() if value not in arm.values
        ]
        rows.append((arm.label, arm.knob.replace("_", " "), *cells, *(beyond or [""])))
    head = ("arm", "knob", "low", "middle", "high", "beyond, afterwards")
    note = (
        "Success in % on validation starts, by the knob's value; what was chosen is bold. Where that was the end of "
        "the range,\nthe value after it was tried when all was over; it changed nothing above:"
    )
    return f"{note}\n\n{table(head, rows)}"


def require_number(value: float | None) -> float:
    """A figure of a comparison of at least two seeds, which is always there."""
    assert value is not None
    return value
