"""The ladder's bookkeeping: a file that survives kills, knobs chosen on validation only, and the page."""

import json
from pathlib import Path

import pytest

from benchmarks.ladder.arms import ARMS, BETAS, BY_NAME, CREDITS, PRIMARY, RATES, Data
from benchmarks.ladder.budget import PARTS, Share, where
from benchmarks.ladder.data import DataSet
from benchmarks.ladder.ladder import EDGE, choose_knob, compared_tasks, edge_tasks, stages
from benchmarks.ladder.report import BEGIN, END, write_report
from benchmarks.ladder.results import Result, Results, Task
from benchmarks.ladder.runs import config_of
from benchmarks.ladder.settings import LadderSettings
from benchmarks.ladder.starts import Part

SETTINGS = LadderSettings()
BEST = {"bc": 1e-3, "ppo": 3e-4, "step-dpo": 3e-3}
"""Of the arms that choose a learning rate; all others do best at beta 3."""
SHARE = Share(
    where="run_id = 'ladder'", parts=PARTS, passes=2, minibatches=5, tokens=900, action_tokens=90, episodes=40
)
DATA = DataSet(
    settings=SETTINGS,
    jobs={name: f"job of {name}" for name in CREDITS},
    shares={data.value: SHARE for data in Data if data is not Data.NOTHING},
    optimizer_steps=10,
    held_out=[1, 2],
    validation=[3],
    figures={"episodes": 2016.0, "success": 0.213, "mean optimum": 6.66},
)


def successes(task: Task) -> int:
    """Of 512: more at the best value of the knob; on held-out starts bc-exp beats bc, and awr-1 is as good as awr-0."""
    if task.part == EDGE:
        return 512
    if task.part == Part.VALIDATION:
        return 200 if task.knob == BEST.get(task.arm, 3.0) else 150
    return 180 + task.seed + {"bc-exp": 20, "awr-1": 3 * (-1) ** task.seed}.get(task.arm, 0)


def complete(path: Path) -> Results:
    """A file of all runs."""
    results = Results(path)
    for tasks in stages(SETTINGS, results):
        for task in results.missing(tasks):
            results.add(Result(task, successes(task), 512, tokens=900, action_tokens=90, optimizer_steps=10))
    return results


def test_results_come_back_and_are_not_run_again(tmp_path: Path) -> None:
    results = complete(tmp_path / "results.jsonl")
    again = Results(tmp_path / "results.jsonl")
    assert again.of == results.of
    assert all(not again.missing(tasks) for tasks in stages(SETTINGS, again))
    assert len(again.of) == (9 * 3 + 8) * SETTINGS.tuning_seeds + len(ARMS) * SETTINGS.seeds


def test_a_line_that_a_kill_cut_short_is_run_again(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    tasks = [Task("held_out", "bc", seed, 1e-3, 1e-3) for seed in range(3)]
    first = Results(path)
    for task in tasks[:2]:
        first.add(Result(task, 10, 512))
    path.write_bytes(path.read_bytes()[:-9])
    after = Results(path)
    assert after.missing(tasks) == tasks[1:]
    after.add(Result(tasks[1], 12, 512))
    after.add(Result(tasks[2], 13, 512))
    assert {task.seed: result.successes for task, result in Results(path).of.items()} == {0: 10, 1: 12, 2: 13}


def test_what_was_declared_is_run_first(tmp_path: Path) -> None:
    *_, last, _ = stages(SETTINGS, complete(tmp_path / "results.jsonl"))
    declared = {name for pair in PRIMARY for name in pair}
    first = last[: len(declared) * SETTINGS.seeds]
    assert {(task.arm, task.seed) for task in first} == {(arm, seed) for arm in declared for seed in range(10)}
    assert len(last) == len(set(last)) == len(ARMS) * SETTINGS.seeds


def test_knobs_are_chosen_on_validation_and_by_the_mean(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl")
    for (value, seed), success in {
        (0.3, 100): 300, (0.3, 101): 100, (1.0, 100): 220, (1.0, 101): 220, (3.0, 100): 220, (3.0, 101): 220,
    }.items():  # fmt: skip
        results.add(Result(Task("validation", "awr-1", seed, value, 1e-3), success, 512))
    results.add(Result(Task("held_out", "awr-1", 0, 0.3, 1e-3), 512, 512))
    results.add(Result(Task("validation", "awr-1", 0, 0.3, 1e-3), 512, 512))
    assert choose_knob(results, BY_NAME["awr-1"], SETTINGS) == 1.0
    assert choose_knob(results, BY_NAME["behaviour"], SETTINGS) is None


def test_what_lies_beyond_the_range_is_tried_afterwards_and_chooses_nothing(tmp_path: Path) -> None:
    results = complete(tmp_path / "results.jsonl")
    tasks = edge_tasks(SETTINGS, results)
    assert {(task.arm, task.knob) for task in tasks} == {
        ("ppo", 9e-5),
        ("step-dpo", 9e-3),
        *((arm.name, 9.0) for arm in ARMS if arm.knob == "beta"),
    }
    assert {task.seed for task in tasks} == set(SETTINGS.choosing_seeds())
    assert all(task.learning_rate == (task.knob if task.arm in BEST else BEST["bc"]) for task in tasks)
    assert all(results.of[task].success == 1.0 for task in tasks)
    assert choose_knob(results, BY_NAME["ppo"], SETTINGS) == 3e-4
    assert choose_knob(results, BY_NAME["awr-1"], SETTINGS) == 3.0


def test_arms_with_beta_train_at_the_rate_that_cloning_chose(tmp_path: Path) -> None:
    results = complete(tmp_path / "results.jsonl")
    tasks = {task.arm: task for task in compared_tasks(7, SETTINGS, results)}
    assert list(tasks) == [arm.name for arm in ARMS]
    assert {task.seed for task in tasks.values()} == {7}
    assert {task.part for task in tasks.values()} == {Part.HELD_OUT}
    assert tasks["behaviour"].learning_rate is None
    for arm in ARMS[1:]:
        assert tasks[arm.name].learning_rate == (BEST[arm.name] if arm.knob == "learning_rate" else BEST["bc"])
        assert tasks[arm.name].knob == {"learning_rate": BEST.get(arm.name), "beta": 3.0, "": None}[arm.knob]


def test_both_sides_of_a_declared_comparison_differ_in_one_thing() -> None:
    """The same episodes, the same passes, the same order; loss and beta, or the credit job."""
    for arm, base in PRIMARY:
        sides = [
            config_of(DATA, Task("held_out", name, 3, 1e-3 if name == "bc" else 1.0, 1e-3), Path("start"))
            for name in (arm, base)
        ]
        differing = {
            field for field in type(sides[0]).model_fields if len({repr(getattr(s, field)) for s in sides}) > 1
        }
        assert differing <= {"loss", "advantages"}
        assert {side.epochs * (side.minibatches or 0) for side in sides} == {10}


def test_the_knob_reaches_the_configuration() -> None:
    for arm in ARMS[1:]:
        for value in arm.values or (None,):
            rate = value if arm.knob == "learning_rate" else 7e-4
            config = config_of(DATA, Task("held_out", arm.name, 0, value, rate), Path("start"))
            assert config.learning_rate == rate
            assert config.live_only is False
            assert (config.selection is not None) == (arm.data in (Data.LIVE, Data.PAIRS))
            assert config.advantages == (f"job of {arm.credit}" if arm.credit else None)
            if arm.knob == "beta":
                assert config.loss.beta == value
    assert len(set(RATES)) == len(set(BETAS)) == 3


def test_a_predicate_says_what_is_left_out() -> None:
    assert where(Data.LIVE, "ladder", PARTS) == "run_id = 'ladder'"
    assert where(Data.SUCCESSES, "ladder", 885) == "run_id = 'ladder' AND env_return >= 1 AND group_id % 1000 < 885"


def test_the_page_says_what_was_found(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text(DATA.model_dump_json())
    complete(tmp_path / "results.jsonl")
    page = tmp_path / "page.md"
    page.write_text(f"# Head\n\n{BEGIN}\n{END}\n\nTail\n")
    write_report(tmp_path, SETTINGS, page)
    text = page.read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    declared = {row[0]: row for row in rows if len(row) == 7}
    exp, gigpo = declared[BY_NAME["bc-exp"].label], declared[BY_NAME["awr-1"].label]
    assert exp[1:3] + exp[4:] == [BY_NAME["bc"].label, "+3.9", "0.002", "0.004", "better"]
    assert gigpo[1:3] + gigpo[4:] == [BY_NAME["awr-0"].label, "+0.0", "1.000", "1.000", "null: no difference shown"]
    arms = {row[0]: row for row in rows if len(row) == 11}
    assert arms["filtered BC"] == [
        "filtered BC",
        "learning rate 0.001",
        "36.0",
        "0.6",
        "35.2",
        "36.9",
        "",
        "",
        "900",
        "90",
        "10",
    ]
    assert arms[BY_NAME["bc-exp"].label][6:8] == ["+3.9", "10 of 10"]
    assert ["filtered BC", "learning rate", "0.0003: 29.3", "0.001: **39.1**", "0.003: 29.3", ""] in rows
    assert [
        BY_NAME["ppo"].label,
        "learning rate",
        "0.0003: **39.1**",
        *["0.001: 29.3", "0.003: 29.3"],
        "9e-05: 100.0",
    ] in rows
    assert ["episodes", "2,016"] in rows
    assert ["success", "21.3%"] in rows
    write_report(tmp_path, SETTINGS, page)
    assert page.read_text() == text
    figures = json.loads((tmp_path / "page.json").read_text())
    assert figures["bc"]["successes_by_seed"] == list(range(180, 190))


def test_a_report_of_half_a_ladder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text(DATA.model_dump_json())
    complete(tmp_path / "results.jsonl")
    path = tmp_path / "results.jsonl"
    lines = [
        line
        for line in path.read_text().splitlines(keepends=True)
        if '"held_out", "arm": "step-dpo", "seed": 4' not in line
    ]
    path.write_text("".join(lines))
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\n{END}\n")
    with pytest.raises(ValueError, match=r"1 runs are missing .*step-dpo"):
        write_report(tmp_path, SETTINGS, page)
    page.write_text("nothing")
    with pytest.raises(ValueError, match="has no place for the tables"):
        write_report(tmp_path, SETTINGS, page)
