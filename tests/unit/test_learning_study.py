"""The learning study's bookkeeping: what is run and in which order, its measures, its verdicts, and the page."""

from pathlib import Path

import polars as pl
import pytest
from pydantic import TypeAdapter

from benchmarks.ladder.report import BEGIN, END
from benchmarks.learning.anchors import CHOSEN, DEFINITIONS, meaningful
from benchmarks.learning.arms import ARMS, RATES, START
from benchmarks.learning.report import Report, collected, success_at, tables, with_tables
from benchmarks.learning.results import Result, Results, Round, Task
from benchmarks.learning.settings import COIN, GAMES, TUNING_SEED, Settings
from benchmarks.learning.study import compared_tasks, stages
from pipelines.credit.anchors import Anchors
from pipelines.credit.anchors.measures import Walks

SETTINGS = Settings()
PAGE = Path(__file__).parents[2] / "docs" / "learning.md"
BEST = {"gigpo": RATES[0], "grpo": RATES[-1], "rloo": RATES[0]}
"""RLOO is as good at either rate."""
ROUNDS = [Round(tokens=100, success=0.25, live_groups=4), Round(tokens=300, success=0.75, live_groups=6)]


def result(task: Task) -> Result:
    """GiGPO beats GRPO by 10 worlds in each seed, and RLOO by turns."""
    better = {"gigpo": 10, "rloo": 10 + 4 * (-1) ** task.seed}.get(task.arm, 0)
    if task.fold == "dev":
        better = 5 * (task.learning_rate == BEST[task.arm] or task.arm == "rloo")
    return Result(task=task, successes=100 + task.seed % 8 + better, worlds=200, rounds=ROUNDS)


def run_all(folder: Path, stop: int | None = None) -> Results:
    """The files of a study of one game, all or the first of the comparison."""
    results = Results(folder / "results")
    for number, tasks in enumerate(stages(SETTINGS, COIN, results)):
        for task in results.missing(tasks)[: stop if number == 2 else None]:
            results.add(result(task))
    return results


def test_rates_are_chosen_on_another_seed_and_another_fold_the_smaller_on_ties(tmp_path: Path) -> None:
    results = run_all(tmp_path)
    tasks = compared_tasks(SETTINGS, COIN, results)
    assert {(task.arm, task.learning_rate) for task in tasks} == set(BEST.items())
    assert {task.fold for task in tasks} == {"test"}
    start, tuning, compared = stages(SETTINGS, COIN, results)
    assert {(task.seed, task.fold) for task in tuning} == {(TUNING_SEED, "dev")}
    assert TUNING_SEED not in {task.seed for task in compared}
    assert [(task.seed, task.arm) for task in start] == [(seed, START) for seed in range(SETTINGS.seeds)]


def test_seeds_come_one_after_the_other_so_that_whole_pairs_are_there_at_any_time(tmp_path: Path) -> None:
    run_all(tmp_path, stop=len(ARMS) * 5 + 1)
    (game,) = collected(tmp_path, SETTINGS, [COIN]).games
    assert game.whole_seeds == [0, 1, 2, 3, 4]
    assert {len(game.of(arm.name)) for arm in ARMS} == {5}
    assert "over 5 paired seeds" in tables(Report(games=[game]))
    few = game.model_copy(update={"compared": game.compared[: len(ARMS) * 4 + 1]})
    assert "Nothing is tested yet: 4 of 8 seeds are whole" in tables(Report(games=[few]))


def test_a_run_that_ended_is_not_run_again_and_one_that_was_cut_short_is(tmp_path: Path) -> None:
    results = run_all(tmp_path)
    task = compared_tasks(SETTINGS, COIN, results)[3]
    assert results.missing([task]) == []
    file = tmp_path / "results" / f"{task.name}.json"
    file.rename(file.with_suffix(".partial"))
    assert results.missing([task]) == [task]
    with pytest.raises(ValueError, match=f"run {task.name} is missing"):
        results.read_ended(task)


def test_measures(tmp_path: Path) -> None:
    run = result(Task(game="coin", arm="gigpo", seed=0, learning_rate=1e-3, fold="test"))
    assert run.tokens == 400
    assert run.area == pytest.approx((100 * 0.25 + 300 * 0.75) / 400)
    assert [success_at(run, tokens) for tokens in (0, 99, 100, 399, 400, 9999)] == [0.25, 0.25, 0.75, 0.75, 0.75, 0.75]


def test_what_is_concluded(tmp_path: Path) -> None:
    run_all(tmp_path)
    lines = tables(collected(tmp_path, SETTINGS, [COIN])).splitlines()
    primary = [line for line in lines if line.startswith("| success after the budget")]
    # All eight seeds agree: the smallest p there is, 2 / 256; half of them against half is none.
    assert "| GiGPO | GRPO | +5.0 | none: all seeds differ alike | 0.0078 | 0.0234 | better |" in primary[0]
    assert "| GiGPO | RLOO | +0.0 |" in primary[1]
    assert primary[1].endswith("| null: no difference shown |")
    assert sum(line.startswith("| area under the curve") for line in lines) == 3


def test_the_page_is_made_from_the_runs_beside_it() -> None:
    text = PAGE.read_text()
    report = Report.model_validate_json(PAGE.with_suffix(".json").read_text())
    assert [game.name for game in report.games] == list(GAMES)
    assert with_tables(text, report) == text
    with pytest.raises(ValueError, match="has no place for the tables"):
        with_tables("nothing", report)
    assert with_tables(f"before\n{BEGIN}\nof last time\n{END}\nafter\n", report).endswith(f"\n\n{END}\nafter\n")


FIRST = "Your task is to find the coin.  Take it.\n\n"
KITCHEN = "You are in the kitchen. There is a stove. \nTo the North you see a door."
OPEN = "You are in the kitchen. There is a stove. \nTo the North you see the pantry."
EMPTY, FULL = "\n\nInventory: \n  nothing", "\n\nInventory: \n  a coin"


def walks_of(texts: list[str], rewards: list[float] | None = None, episodes: list[int] | None = None) -> Walks:
    """Steps of siblings that saw these texts."""
    ids = episodes or list(range(len(texts)))
    rewards_given = rewards or [0.0] * len(texts)
    frame = pl.DataFrame(
        {
            "group_id": [1] * len(texts),
            "episode_id": ids,
            "step_index": [ids[:at].count(episode_id) for at, episode_id in enumerate(ids)],
            "state": texts,
            "state_hash": [hash(text) % 2**62 for text in texts],
            "reward": rewards_given,
            "episode_score": [
                sum(r for r, e in zip(rewards_given, ids, strict=True) if e == episode_id) for episode_id in ids
            ],
            "status": ["completed"] * len(texts),
        }
    )
    return Walks.of(frame.lazy(), ("state",))


def partition(name: str, texts: list[str]) -> list[int]:
    """Which of these texts are the same state: the index of the first of each."""
    walks = walks_of(texts)
    definition = TypeAdapter(Anchors).validate_python(DEFINITIONS[name])
    keys = definition.keys(walks.batch, walks.included_N).to_list()
    return [keys.index(key) for key in keys]


def test_what_each_normalisation_takes_for_the_same_state() -> None:
    texts = [
        FIRST + KITCHEN + EMPTY,
        KITCHEN + EMPTY,
        f"Unknown action.\n\n{KITCHEN}{EMPTY}",
        KITCHEN + FULL,
        OPEN + EMPTY,
    ]
    assert partition("answer, view, inventory (as shown)", texts) == [0, 1, 2, 3, 4]
    assert partition(CHOSEN, texts) == [0, 0, 0, 3, 4]
    assert partition("view alone", texts) == [0, 0, 0, 0, 4]
    assert partition("room's name", texts) == [0, 0, 0, 0, 0]
    assert partition("game's answer alone", texts) == [0, 1, 2, 1, 4]
    assert partition("game's answer alone", ["No.\n\n" + KITCHEN + EMPTY, "No.\n\n" + OPEN + FULL]) == [0, 0]


def test_an_anchor_is_meaningful_where_siblings_meet_and_come_to_different_returns() -> None:
    exact = TypeAdapter(Anchors).validate_python({"kind": "exact"})
    met = walks_of(["hall", "hall", "attic", "cellar"], rewards=[0.0, 0.0, 1.0, 0.0], episodes=[0, 1, 0, 1])
    assert meaningful(met, exact) == 0.5
    alike = walks_of(["hall", "hall", "attic", "cellar"], rewards=[0.0, 0.0, 1.0, 1.0], episodes=[0, 1, 0, 1])
    assert meaningful(alike, exact) == 0.0
    alone = walks_of(["hall", "hall", "attic"], rewards=[0.0, 1.0, 0.0], episodes=[0, 0, 1])
    assert meaningful(alone, exact) == 0.0
