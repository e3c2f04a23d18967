"""The learning study's bookkeeping: what is run and in which order, the gate, its measures, verdicts, and the page."""

import json
import math
import re
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from pydantic import ValidationError

from benchmarks.ladder.report import BEGIN, END
from benchmarks.learning import hold_folder, study
from benchmarks.learning.arms import COMPARED, START
from benchmarks.learning.beforehand import Forecast, correlate, read_forecasts, write_forecasts
from benchmarks.learning.report import (
    Report,
    build_tables,
    collect_report,
    correlate_forecasts,
    list_verdicts,
    read_success,
    replace_tables,
    restore_results,
    write_report,
)
from benchmarks.learning.results import LANGUAGE, Result, Results, Round, Task
from benchmarks.learning.runs import rounds_of
from benchmarks.learning.settings import ENVIRONMENTS, TUNING_SEEDS, StudyPlan
from benchmarks.learning.study import compared_tasks, passes_gate, stages, start_tasks
from lake.errors import UsageError
from lake.records import TokensRecord
from testkit.lakes import RUN, build_lake, rollout

PLAN = StudyPlan(seeds=8)
TAXI = ENVIRONMENTS["taxi"]
PAGE = Path(__file__).parents[2] / "docs" / "learning.md"
GUIDE = PAGE.parent / "guides" / "which-estimator.md"
BEST = dict.fromkeys(PLAN.arms, PLAN.rates[0]) | {"grpo": PLAN.rates[-1]}
"""RLOO is as good at any rate."""
FORECAST = Forecast(environment="taxi", arm="gigpo", agreement=0.2, pairs=10, shared=None, meaningful=None, live=1.0)
ROUNDS = [Round(tokens=100, success=0.25, live_groups=4), Round(tokens=300, success=0.75, live_groups=6)]


def end(task: Task, gain: int = 50) -> Result:
    """GiGPO beats GRPO by 10 worlds in each seed, and RLOO by turns; all gain over the start."""
    better = {"gigpo": 10, "rloo": 10 + 4 * (-1) ** task.seed}.get(task.arm, 0)
    if task.learning_rate in PLAN.added_rates["taxi"]:
        return Result(task=task, successes=200, worlds=200, rounds=ROUNDS)
    if task.split == "dev":
        better = 5 * (task.learning_rate == BEST.get(task.arm) or task.arm == "rloo")
    gained = 0 if task.arm == START else gain
    rounds = [] if task.arm == START else ROUNDS
    cold = 180 if "cold_temperature" in task.changes else None
    successes = 100 + task.seed % 8 + better + gained
    return Result(task=task, successes=successes, worlds=200, cold_successes=cold, rounds=rounds)


def run_all(folder: Path, stop: int | None = None, gain: int = 50) -> Results:
    """Write the files of a study of one environment, all or the first of the comparison."""
    results = Results(folder / "results")
    for number, tasks in enumerate(stages(PLAN, TAXI, results)):
        for task in results.missing(tasks)[: stop if number == 4 else None]:
            results.add(end(task, gain))
    return results


def test_rates_are_chosen_on_another_seed_and_another_split_the_smaller_on_ties(tmp_path: Path) -> None:
    results = run_all(tmp_path)
    tasks = compared_tasks(PLAN, TAXI, results)
    assert {(task.arm, task.learning_rate) for task in tasks} == set(BEST.items())
    assert {task.split for task in tasks} == {"test"}
    assert not {task.seed for task in tasks} & set(TUNING_SEEDS)
    first, tuning, gate, starts, compared, added, repeated = stages(PLAN, TAXI, results)
    assert {task.name for task in repeated} == {
        f"{task.name}-cold_temperature=0.01" for task in (*starts, *compared) if task.arm in (START, "gigpo", "rloo")
    }
    assert {(task.seed, task.split) for task in tuning} == {(TUNING_SEEDS[0], "dev")}
    assert {(task.seed, task.split, task.learning_rate == BEST[task.arm]) for task in gate} == {
        (seed, "dev", True) for seed in TUNING_SEEDS
    }
    assert first == start_tasks(PLAN, TAXI, TUNING_SEEDS, "dev")
    # A rate that was added afterwards chooses nothing, however good it is.
    assert {(task.seed, task.split, task.learning_rate) for task in added} == {(TUNING_SEEDS[0], "dev", 1e-4)}
    assert {results.read_ended(task).successes for task in added} == {200}
    assert "| arm | 0.0001, added afterwards | 0.0003 |" in build_tables(collect_report(tmp_path, PLAN, [TAXI]))
    cold = "90.0 " * PLAN.seeds
    assert f"| start | 51.8 | 90.0 | {cold}|" in build_tables(collect_report(tmp_path, PLAN, [TAXI]))
    assert [(task.seed, task.arm) for task in starts] == [(seed, START) for seed in range(PLAN.seeds)]


@pytest.mark.parametrize(("gain", "is_open"), [(40, True), (34, False)])
def test_an_environment_is_compared_only_if_every_arm_gained_enough(tmp_path: Path, gain: int, is_open: bool) -> None:
    """5 of 200 worlds more at the chosen rate: 45 are 22.5 points, 39 are 19.5."""
    results = run_all(tmp_path, gain=gain)
    assert passes_gate(PLAN, TAXI, results) is is_open
    language = Results(tmp_path / LANGUAGE / "results")
    gigpo = Task(environment="slippery-lake", arm="gigpo", seed=2, learning_rate=3e-5, split="test")
    for task in (gigpo, gigpo.model_copy(update={"arm": START, "learning_rate": 0.0, "changes": {"before": "gigpo"}})):
        language.add(end(task))
    report = collect_report(tmp_path, PLAN, [TAXI])
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\n{END}\n")
    write_report(tmp_path, PLAN, [TAXI], page)
    restore_results(page, tmp_path / "restored")
    assert collect_report(tmp_path / "restored", PLAN, [TAXI]) == report
    assert bool(report.environments[0].compared) is is_open
    assert "| 2 | GiGPO | 51.0 | 81.0 | 25 75 | 400 | 0 |" in page.read_text()
    assert f"| {'yes' if is_open else 'no'} |" in build_tables(report)


def test_seeds_come_one_after_the_other_so_that_whole_pairs_are_there_at_any_time(tmp_path: Path) -> None:
    arms = len(PLAN.arms)
    run_all(tmp_path, stop=arms * 5 + 1)
    report = collect_report(tmp_path, PLAN, [TAXI])
    (environment,) = report.environments
    assert environment.whole_seeds == [0, 1, 2, 3, 4]
    assert {len(environment.list_results(arm)) for arm in PLAN.arms} == {5}
    assert len(list_verdicts(report)) == len(COMPARED)
    few = environment.model_copy(update={"compared": environment.compared[: arms * 4 + 1]})
    assert list_verdicts(Report(environments=[few])) == []
    assert "Nothing is tested yet" in build_tables(Report(environments=[few]))


def test_a_run_that_ended_is_not_run_again_and_one_that_was_cut_short_is(tmp_path: Path) -> None:
    results = run_all(tmp_path)
    task = compared_tasks(PLAN, TAXI, results)[3]
    assert results.missing([task]) == []
    file = tmp_path / "results" / f"{task.name}.json"
    file.rename(file.with_suffix(".partial"))
    assert results.missing([task]) == [task]
    with pytest.raises(ValueError, match=f"run {task.name} is missing"):
        results.read_ended(task)


def test_a_damaged_result_and_one_of_another_run_are_refused_by_name(tmp_path: Path) -> None:
    results = run_all(tmp_path)
    task, other = compared_tasks(PLAN, TAXI, results)[:2]
    file, source = (tmp_path / "results" / f"{each.name}.json" for each in (task, other))
    whole = results.read_ended(task).model_dump(mode="json")
    impossible = [{"worlds": 0}, {"successes": 201}, {"successes": -1}, {"cold_successes": 201}, {"rounds": []}]
    changed = [json.dumps(whole | change).encode() for change in impossible]
    for content in (b"", b"{}", b"\xff", source.read_bytes(), *changed):
        file.write_bytes(content)
        with pytest.raises(UsageError, match=re.escape(str(file))):
            results.missing([task])


@pytest.mark.parametrize(
    "change",
    [{"environment": "../../evil"}, {"changes": {"weighs": "a/b"}}, {"learning_rate": 0}, {"learning_rate": math.inf}],
)
def test_a_task_names_a_file_of_its_folder_and_a_run_has_a_rate(change: dict[str, object]) -> None:
    valid = {"environment": "taxi", "arm": "gigpo", "seed": 0, "learning_rate": 1e-3, "split": "dev"}
    assert Task.model_validate(valid).name == "taxi-gigpo-0-0.001-dev"
    with pytest.raises(ValidationError):
        Task.model_validate(valid | change)


def test_a_report_loses_nothing_of_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\n{END}\n")
    with pytest.raises(UsageError, match=r"page\.json is missing"):
        restore_results(page, tmp_path)
    run_all(tmp_path)
    write_forecasts(tmp_path, "taxi", [FORECAST])
    write_report(tmp_path, PLAN, [TAXI], page)
    text, stored = page.read_text(), page.with_suffix(".json").read_text()
    run_all(tmp_path / "other")
    for folder, lost in (("new", r"\d+ results"), ("other", "1 result")):
        with pytest.raises(UsageError, match=f"holds {lost} that this report would lose"):
            write_report(tmp_path / folder, PLAN, [TAXI], page)
    assert (page.read_text(), page.with_suffix(".json").read_text()) == (text, stored)
    alone = tmp_path / "alone.md"
    alone.write_text(text)
    with pytest.raises(UsageError, match=r"alone\.json is missing"):
        write_report(tmp_path / "new", PLAN, [TAXI], alone)
    restore_results(page, tmp_path / "new")
    assert write_report(tmp_path / "new", PLAN, [TAXI], page) == 0
    assert page.with_suffix(".json").read_text() == stored


def test_results_of_the_folder_stay_and_those_that_differ_from_the_page_are_counted(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\n{END}\n")
    results = run_all(tmp_path)
    write_forecasts(tmp_path, "taxi", [FORECAST])
    write_report(tmp_path, PLAN, [TAXI], page)
    slower, worse = (results.read_ended(task) for task in compared_tasks(PLAN, TAXI, results)[:2])
    results.add(slower.model_copy(update={"seconds": 99.0}))
    results.add(worse.model_copy(update={"successes": 1}))
    own = [FORECAST.model_copy(update={"agreement": 0.5})]
    write_forecasts(tmp_path, "taxi", own)
    assert restore_results(page, tmp_path).endswith(f" 1 run, as {worse.task.name}")
    assert (results.read_ended(worse.task).successes, read_forecasts(tmp_path, "taxi")) == (1, own)
    assert write_report(tmp_path, PLAN, [TAXI], page) == 1


def test_two_processes_do_not_run_in_one_folder(tmp_path: Path) -> None:
    with hold_folder(tmp_path / "study"), pytest.raises(UsageError, match="another process runs in"):
        hold_folder(tmp_path / "study").__enter__()
    with hold_folder(tmp_path / "study"):
        pass


def test_damaged_diagnostics_are_refused_by_name(tmp_path: Path) -> None:
    write_forecasts(tmp_path, "taxi", [FORECAST])
    file = tmp_path / "beforehand" / "taxi.json"
    for content in (b"", file.read_bytes().replace(b"gigpo", b"best"), file.read_bytes().replace(b"0.2", b"7")):
        file.write_bytes(content)
        with pytest.raises(UsageError, match=re.escape(str(file))):
            read_forecasts(tmp_path, "taxi")


def test_the_lake_of_a_run_is_kept_until_its_result_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_task(out: Path, task: Task, _: object) -> Result:
        (out / "runs" / task.name).mkdir(parents=True)
        return end(task)

    def refuse(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(study, "run_task", run_task)
    add = Results.add
    monkeypatch.setattr(Results, "add", refuse)
    with pytest.raises(OSError, match="no space left"):
        study.run_study(tmp_path / "full", PLAN, [TAXI], processes=1, say=print)
    assert len(list((tmp_path / "full" / "runs").iterdir())) == 1
    monkeypatch.setattr(Results, "add", add)
    study.run_study(tmp_path / "whole", PLAN, [TAXI], processes=1, say=print)
    assert not any((tmp_path / "whole" / "runs").iterdir())


def test_measures() -> None:
    run = end(Task(environment="taxi", arm="gigpo", seed=0, learning_rate=1e-3, split="test"))
    assert run.tokens == 400
    assert run.area == pytest.approx((100 * 0.25 + 300 * 0.75) / 400)
    assert [read_success(run, tokens) for tokens in (0, 99, 100, 399, 400, 9999)] == [
        0.25,
        0.25,
        0.75,
        0.75,
        0.75,
        0.75,
    ]


def test_a_round_without_an_update_is_a_round(tmp_path: Path) -> None:
    episodes = []
    for number in range(3):
        record = rollout("walk", 0, float(number > 0), num_steps=2, collection_round=number)
        for step in record.steps:
            step.tokens = TokensRecord(context_ids=[1, 2], action_ids=[3], prefix_step_index=None)
        episodes.append(record)
    lk = build_lake(tmp_path / "lake", episodes)
    ids = lk.sql("SELECT episode_id FROM episodes ORDER BY collection_round").to_series()
    at, spans = datetime(2026, 1, 1, tzinfo=UTC), {"first_step": 0, "last_step": 1, "action_tokens": 2, "epoch": 0}
    with lk.job(kind="loop", run_id=RUN) as job:
        rows = [
            {"step": number, "name": "loop/live_groups", "value": [3, 0, 2][number], "at": at} for number in range(3)
        ]
        job.write("metrics", pl.DataFrame(rows))
    with lk.job(kind="train", run_id=RUN) as job:
        rows = [{"step": step, "name": "entropy", "value": [0.9, 0.8, 0.5, 0.4][step], "at": at} for step in range(4)]
        job.write("metrics", pl.DataFrame(rows))
        batches = [{"optimizer_step": step, "episode_id": ids[2 * (step // 2)], **spans} for step in range(4)]
        job.write("batches", pl.DataFrame(batches))
    rounds = rounds_of(lk, RUN)
    assert [(each.tokens, each.success, each.live_groups) for each in rounds] == [(6, 0, 3), (6, 1, 0), (6, 1, 2)]
    assert [each.entropy for each in rounds] == [0.9, None, 0.5]


def test_agreement_counts_a_pair_as_often_as_its_steps() -> None:
    pairs = pl.DataFrame(
        {"advantage": [1.0, 0.0, -2.0], "advantage_2": [0.5, 0.25, -1.0], "steps": [4, 1, 9], "steps_2": 1}
    )
    repeated = np.repeat(pairs.select("advantage", "advantage_2").to_numpy(), [2, 1, 3], axis=0)
    assert correlate(pairs) == pytest.approx(np.corrcoef(repeated.T)[0, 1])


def test_what_is_concluded(tmp_path: Path) -> None:
    run_all(tmp_path)
    report = collect_report(tmp_path, PLAN, [TAXI])
    verdicts = {(verdict.one, verdict.other): verdict for _, verdict in list_verdicts(report)}
    # All eight seeds agree: the smallest p there is, 2 / 256; half of them against half is none.
    against_grpo, against_rloo = verdicts["gigpo", "grpo"], verdicts["gigpo", "rloo"]
    assert against_grpo.result.p == pytest.approx(2 / 256)
    assert against_grpo.words == "better"
    assert against_rloo.words == "null: no difference shown"
    # All declared comparisons are corrected together: six, if another environment may still be compared.
    [first] = report.environments
    for change, count in (({}, 6), ({"compared": []}, 6), ({"compared": [], "passes_gate": False}, 3)):
        more = Report(environments=[first, first.model_copy(update={"name": "other", **change})])
        corrected = next(verdict.holm for _, verdict in list_verdicts(more) if verdict.other == "grpo")
        assert corrected == pytest.approx(count * 2 / 256), change


def test_agreement_is_ranked_against_success(tmp_path: Path) -> None:
    """GiGPO and RLOO share the best success of `run_all`, GRPO and HGPO the worst."""
    run_all(tmp_path)

    def correlation(agreement: dict[str, float]) -> float | None:
        forecasts = [FORECAST.model_copy(update={"arm": arm, "agreement": value}) for arm, value in agreement.items()]
        write_forecasts(tmp_path, "taxi", forecasts)
        [environment] = collect_report(tmp_path, PLAN, [TAXI]).environments
        return correlate_forecasts(environment)

    right = {"grpo": 0.1, "hgpo": 0.1, "gigpo": 0.2, "rloo": 0.2}
    assert correlation(right) == pytest.approx(1.0)
    assert correlation({arm: -value for arm, value in right.items()}) == pytest.approx(-1.0)
    assert correlation(dict.fromkeys(right, 0.1)) is None
    assert correlation({}) is None


def test_the_page_is_made_from_the_runs_beside_it() -> None:
    text = PAGE.read_text()
    report = Report.model_validate_json(PAGE.with_suffix(".json").read_text())
    assert replace_tables(text, report) == text
    with pytest.raises(UsageError, match="has no room for the tables"):
        replace_tables(f"{BEGIN}\n{END}\n" * 2, report)
    assert replace_tables(f"before\n{BEGIN}\nof last time\n{END}\nafter\n", report).endswith(f"\n\n{END}\nafter\n")


def test_the_figures_of_the_guide_are_those_of_the_page() -> None:
    rows = [line for line in GUIDE.read_text().splitlines() if re.search(r"\| \**\d", line)]
    assert len(rows) > len(COMPARED)
    assert [row for row in rows if row not in PAGE.read_text().splitlines()] == []


def test_the_program_of_the_guide_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    (program, output), *_ = re.findall(r"```python\n(.+?)```\n\n```text\n(.+?)```", GUIDE.read_text(), re.DOTALL)
    exec(program, {})
    assert capsys.readouterr().out == output
    (row,) = re.findall(r"^\| Taxi \| GiGPO \| RLOO \| 10 \| .+\| better .+$", PAGE.read_text(), re.MULTILINE)
    _, points, interval, p = (cell.strip() for cell in row.split("|")[4:8])
    assert output == f"{points} points, {interval}, p = {p}\n"
