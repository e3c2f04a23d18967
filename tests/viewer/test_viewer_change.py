"""What changed from A to B: every figure against plain loops over the rows, and the page without a browser."""

import math
import random
import re
import statistics
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lake import Lake, ids
from lake.judgements.credit import find_credit
from lake.records import EpisodeRecord
from lake.statistics import t_quantile
from pipelines.credit.estimators.grpo import GRPO
from pipelines.credit.job import run_credit
from testkit.lakes import RUN, add_credit, build_lake, rollout
from testkit.streamlit_pages import column, links, open_page, show, words
from testkit.wording import Wording
from viewer import filters, run_details
from viewer.queries import ListWindow, Sort, compare, episodes, lineage
from viewer.queries.compare import Side
from viewer.queries.episodes import EpisodeFilter
from viewer.reader import Reader
from viewer.run_details import make_point_address
from viewer.server import ENVIRONMENT

ALL = ListWindow(1000)
Rows = list[dict[str, Any]]


def played(seed: int) -> list[EpisodeRecord]:
    """Rounds 0 and 1 of eight tasks, three rollouts each; some unscored, some steps of unknown validity."""
    draw = random.Random(seed)
    rows_of_side = []
    for round_ in (0, 1):
        for task in range(8):
            for index in range(3):
                outcome = draw.choice([None, 0.0, 0.25, 1.0])
                record = rollout(f"t{task}", index, outcome, num_steps=draw.randint(1, 5), collection_round=round_)
                record.status = draw.choice(["completed", "truncated"])
                for step in record.steps:
                    step.is_action_valid = draw.choice([None, True, False])
                    step.state_is_error = draw.choice([None, True, False])
                rows_of_side.append(record)
    return rows_of_side


@pytest.fixture(scope="module")
def lk(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    lk = build_lake(tmp_path_factory.mktemp("change"), played(1))
    with lk.job(kind="collect", run_id="other") as job:
        long = rollout("elsewhere", 0, 0.5, num_steps=9, policy_version=3)
        job.record([rollout("t0", 0, 1.0), long, rollout("never scored", 0, None, num_steps=1)])
    rows = lk.sql("SELECT episode_id, group_id, run_id, num_steps FROM episodes")
    with lk.job(kind="score") as job:
        scores = rows.with_columns(value=pl.when(pl.col("num_steps") > 1).then(pl.col("num_steps") / 10))
        names = {"scorer": pl.lit("brief"), "scorer_version": pl.lit("1"), "step_index": pl.lit(None, pl.Int32)}
        job.write("scores", scores.drop("num_steps").with_columns(**names))
    add_credit(lk)
    return lk


@pytest.fixture(scope="module")
def snap(lk: Lake) -> Reader:
    return Reader(lk.snapshot())


@pytest.fixture(scope="module")
def rows(lk: Lake) -> dict[str, Rows]:
    return {name: lk.snapshot().scan(name).collect().to_dicts() for name in ("episodes", "steps", "advantages")}


def mean(values: list[float]) -> float | None:
    return statistics.fmean(values) if values else None


def drop_unknown(values: Any) -> list[float]:
    return [float(value) for value in values if value is not None]


def belongs(row: dict[str, Any], side: Side) -> bool:
    return (
        (side.run is None or row["run_id"] == side.run)
        and (side.rounds is None or side.rounds[0] <= row["collection_round"] <= side.rounds[1])
        and side.policy_version in (None, row["policy_version"])
    )


def figures_of(rows: dict[str, Rows], side: Side, task: str) -> dict[str, float | None]:
    """Every figure of a task of a side, by its definition."""
    mine = [row for row in rows["episodes"] if belongs(row, side) and row["task_id"] == task]
    named = {row["episode_id"] for row in mine}
    steps = [row for row in rows["steps"] if row["episode_id"] in named and row["is_active"]]
    judged = [row for row in rows["advantages"] if row["episode_id"] in named]
    complete = [row for row in judged if row["a_episode"] is not None and row["a_step"] is not None]
    return {
        "outcome": mean(drop_unknown(row["env_return"] for row in mine)),
        "num_steps": mean(drop_unknown(row["num_steps"] for row in mine)),
        "failed": mean([float(row["status"] == "failed") for row in mine]),
        "truncated": mean([float(row["status"] == "truncated") for row in mine]),
        "invalid": mean([1 - value for value in drop_unknown(row["is_action_valid"] for row in steps)]),
        "tool_errors": mean(drop_unknown(row["state_is_error"] for row in steps)),
        "disagree": mean([float(row["a_episode"] * row["a_step"] < 0) for row in complete]),
        "size": mean([abs(value) for value in drop_unknown(row["advantage"] for row in judged)]),
        "score brief": mean([row["num_steps"] / 10 for row in mine if row["num_steps"] > 1]),
    }


SIDES = [
    (Side(RUN, (0, 0)), Side(RUN, (1, 1))),
    (Side(RUN), Side("other")),
    (Side(RUN, policy_version=0), Side("other", policy_version=3)),
    (Side(), Side("other", (0, 5))),
]


def compared(snap: Reader, first: Side, second: Side) -> tuple[compare.Frames, pl.DataFrame]:
    current = find_credit(snap)
    frames = (compare.read_tasks(snap, first, current), compare.read_tasks(snap, second, current))
    return frames, compare.compare_figures(
        frames, (compare.read_scores(snap, first), compare.read_scores(snap, second))
    )


@pytest.mark.parametrize(("first", "second"), SIDES)
def test_figures_by_task(snap: Reader, rows: dict[str, Rows], first: Side, second: Side) -> None:
    _, actual = compared(snap, first, second)
    tasks = sorted({row["task_id"] for row in rows["episodes"]})
    for row in actual.to_dicts():
        a, b = (
            {task: value for task in tasks if (value := figures_of(rows, side, task)[row["figure"]]) is not None}
            for side in (first, second)
        )
        common = sorted(a.keys() & b.keys())
        assert (row["tasks"], row["only_a"], row["only_b"]) == (len(common), len(a) - len(common), len(b) - len(common))
        assert row["is_paired"] == (len(common) > 1)
        used = [[values[task] for task in (common if len(common) > 1 else values)] for values in (a, b)]
        expected = [mean(values) for values in used]
        assert [row["a"], row["b"]] == pytest.approx(expected)
        if None not in expected:
            assert row["difference"] == pytest.approx(expected[1] - expected[0], abs=1e-12)
            assert row["low"] is None or row["low"] < row["difference"] < row["high"]
    names = set(actual["figure"])
    assert {"outcome", "num_steps", "invalid", "tool_errors", "size", "score brief"} <= names
    assert "completion_tokens" not in names, "nobody knows of tokens"


def test_the_interval_of_a_paired_figure_is_students(tmp_path: Path) -> None:
    """With P - 1 degrees of freedom or fewer, whose quantile for P = 6 is 2.5706 (any table): never narrower."""
    pairs = [(0.0, 0.5), (0.25, 0.5), (0.5, 1.0), (0.0, 0.0), (1.0, 1.25), (0.75, 0.5)]
    episodes = [
        rollout(f"t{n}", 0, value, collection_round=round_) for n, pair in enumerate(pairs)
        for round_, value in enumerate(pair)
    ]  # fmt: skip
    snap = build_lake(tmp_path, episodes).snapshot()
    frames = tuple(compare.read_tasks(snap, Side(RUN, (n, n)), None) for n in (0, 1))
    nobody = compare.read_scores(snap, Side("nobody"))
    (row,) = compare.compare_figures((frames[0], frames[1]), (nobody, nobody)).filter(figure="outcome").to_dicts()
    gaps = [b - a for a, b in pairs]
    half = 2.570582 * statistics.stdev(gaps) / math.sqrt(len(gaps))
    assert (row["low"] + row["high"]) / 2 == pytest.approx(statistics.fmean(gaps))
    assert (row["high"] - row["low"]) / 2 >= half * (1 - 1e-6)


def test_tasks_that_are_not_the_same_are_compared_as_samples(tmp_path: Path) -> None:
    values = ([0.0, 0.5, 1.0], [1.0, 0.75, 1.0, 0.25])
    episodes = [
        rollout(f"{side}{n}", 0, value, collection_round=side)
        for side, values_of_side in enumerate(values) for n, value in enumerate(values_of_side)
    ]  # fmt: skip
    snap = build_lake(tmp_path, episodes).snapshot()
    frames = tuple(compare.read_tasks(snap, Side(RUN, (n, n)), None) for n in (0, 1))
    nobody = compare.read_scores(snap, Side("nobody"))
    (row,) = compare.compare_figures((frames[0], frames[1]), (nobody, nobody)).filter(figure="outcome").to_dicts()
    assert (row["is_paired"], row["tasks"], row["only_a"], row["only_b"]) == (False, 0, 3, 4)
    assert (row["low"], row["high"]) == pytest.approx(welch(*values), rel=1e-4)


def welch(first: list[float], second: list[float]) -> tuple[float, float]:
    a, b = (statistics.variance(sample) / len(sample) for sample in (first, second))
    df = (a + b) ** 2 / (a**2 / (len(first) - 1) + b**2 / (len(second) - 1))
    middle = statistics.fmean(second) - statistics.fmean(first)
    half = t_quantile(df) * math.sqrt(a + b)
    return middle - half, middle + half


def test_tasks_by_difference(snap: Reader, rows: dict[str, Rows]) -> None:
    first, second = SIDES[0]
    frames, _ = compared(snap, first, second)
    actual = compare.compare_tasks(frames, ALL).to_dicts()
    tasks_AB = [{e["task_id"] for e in rows["episodes"] if belongs(e, side)} for side in (first, second)]
    assert {row["task_id"] for row in actual} == tasks_AB[0] & tasks_AB[1]
    one_sided = compare.list_one_sided_tasks(frames)
    assert set(one_sided.select("task_id", "side").rows()) == {
        (task, side) for task in tasks_AB[0] ^ tasks_AB[1] for side in "AB" if task in tasks_AB["AB".index(side)]
    }
    gaps = [row["difference"] for row in actual]
    assert drop_unknown(gaps) == sorted(drop_unknown(gaps))
    assert gaps[len(drop_unknown(gaps)) :] == [None] * (len(gaps) - len(drop_unknown(gaps)))
    outcomes = {row["episode_id"]: row["env_return"] for row in rows["episodes"]}
    for row in actual:
        a, b = (
            drop_unknown(
                e["env_return"] for e in rows["episodes"] if belongs(e, side) and e["task_id"] == row["task_id"]
            )
            for side in (first, second)
        )
        assert [row["a"], row["b"]] == pytest.approx([mean(a), mean(b)])
        if len(a) > 1 and len(b) > 1 and len(set(a)) + len(set(b)) > 2:
            assert (row["low"], row["high"]) == pytest.approx(welch(a, b), rel=1e-4)
        else:
            assert (row["low"], row["high"]) == (None, None)
        if a and b:
            ends = (min(a), max(b)) if row["difference"] > 0 else (max(a), min(b))
            assert (outcomes[row["a_episode"]], outcomes[row["b_episode"]]) == ends


def describe(outcomes: list[float], side: str) -> dict[str, Any]:
    deviation = statistics.stdev(outcomes) if len(outcomes) > 1 else None
    names = ("scored", "outcome", "deviation", "lowest", "highest")
    known = (len(outcomes), mean(outcomes), deviation, min(outcomes), max(outcomes))
    return {f"{side}_{name}": known_value for name, known_value in zip(names, known, strict=True)}


@given(
    st.lists(st.sampled_from([-1.0, 0.5]), min_size=1, max_size=6),
    st.lists(st.sampled_from([-1.0, 0.5]), min_size=1, max_size=6),
)
def test_of_two_values_the_test_of_a_task_counts_all_ways_to_divide_them(a: list[float], b: list[float]) -> None:
    pooled = a + b

    counts = Counter(sum(pooled[n] for n in chosen) for chosen in combinations(range(len(pooled)), len(a)))
    expected = sum(ways for ways in counts.values() if ways <= counts[sum(a)]) / counts.total()
    assert compare.test_task(describe(a, "a") | describe(b, "b")) == pytest.approx(expected)


def test_of_several_values_the_test_of_a_task_is_welchs() -> None:
    a, b = [0.1, 0.4, 0.35, 0.8], [0.9, 0.7, 0.95]
    p = compare.test_task(describe(a, "a") | describe(b, "b"))
    assert p is not None
    low, _ = compare._compute_welch_interval(
        mean(b) - mean(a), (statistics.stdev(a), len(a)), (statistics.stdev(b), len(b)), tail=p / 2
    )
    assert low == pytest.approx(0, abs=1e-4), "the interval at this level ends at 0"
    assert compare.test_task(describe([0.2], "a") | describe([0.4, 0.9], "b")) is None


def test_p_of_many_tasks_are_holms() -> None:
    adjusted = compare.adjust_for_many([0.01, None, 0.04, 0.03, 0.9])
    assert adjusted.to_list() == pytest.approx([0.04, None, 0.09, 0.09, 0.9])


def test_tasks_that_fell_to_0_are_told_although_the_mean_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four fall from all to none, whose samples have no deviation; twelve rise a little."""
    episodes = [
        rollout(f"t{task:02}", n, float(n < wins), collection_round=round_)
        for task in range(16)
        for round_, wins in enumerate((8, 0) if task < 4 else (3, 6))
        for n in range(8)
    ] + [rollout("alone", 0, 1.0, collection_round=0)]
    lk = show(build_lake(tmp_path, episodes), monkeypatch)
    at = open_page("change", a_run=RUN, a_rounds=0, b_run=RUN, b_rounds=1)
    assert column(at, "changed", "task_id")[:4] == ["t00", "t01", "t02", "t03"]
    assert column(at, "changed", "clear") == ["\N{CHECK MARK}"] * 4 + [""] * 12
    shown = words(at)
    assert "4 of 16 tasks fell and 0 rose beyond chance" in shown
    assert "Holm" in shown
    assert "Tasks of one side: 1 only in A and 0 only in B" in shown
    (outcome,) = compare.compare_figures(
        tuple(compare.read_tasks(Reader(lk.snapshot()), Side(RUN, (n, n)), None) for n in (0, 1)),  # type: ignore[arg-type]
        (compare.read_scores(Reader(lk.snapshot()), Side("nobody")),) * 2,
    ).filter(figure="outcome").to_dicts()  # fmt: skip
    assert outcome["low"] < 0 < outcome["high"], "the overall interval holds 0"
    assert f"{outcome['df']:.1f}" in shown or outcome["df"] == 15


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("name", compare.TASK_ORDERS)
def test_tasks_are_ordered_by_any_column(snap: Reader, name: str, descending: bool) -> None:
    frames, _ = compared(snap, Side(RUN), Side("other"))
    values = compare.compare_tasks(frames, ALL, Sort(name, descending))[name]
    assert values.to_list() == values.sort(descending=descending, nulls_last=True).to_list()
    assert (
        compare.compare_tasks(frames, ListWindow(3, 2), Sort(name, descending))[name].to_list() == values.to_list()[2:5]
    )


def test_a_run_over_its_rounds(snap: Reader, rows: dict[str, Rows]) -> None:
    actual = compare.read_figures_over(snap, RUN, "collection_round").to_dicts()
    assert [row["x"] for row in actual] == [0, 1]
    for row in actual:
        mine = [e for e in rows["episodes"] if e["run_id"] == RUN and e["collection_round"] == row["x"]]
        named = {e["episode_id"] for e in mine}
        steps = [s for s in rows["steps"] if s["episode_id"] in named]
        assert row["episodes"] == len(mine)
        assert row["outcome"] == pytest.approx(mean(drop_unknown(e["env_return"] for e in mine)))
        assert row["completion_tokens"] is None, "nobody knows of tokens"
        assert row["invalid"] == pytest.approx(1 - mean(drop_unknown(s["is_action_valid"] for s in steps)))
        assert row["tool_errors"] == pytest.approx(mean(drop_unknown(s["state_is_error"] for s in steps)))
        (row_of_score,) = compare.read_scores_over(snap, RUN, "collection_round").filter(x=row["x"]).to_dicts()
        assert row_of_score["value"] == pytest.approx(mean([e["num_steps"] / 10 for e in mine if e["num_steps"] > 1]))
        lacking = compare.read_unscored_over(snap, RUN, "collection_round").filter(x=row["x"])
        assert lacking.select("scorer", "episodes", "unscored").rows() == [
            ("brief", len(mine), sum(e["num_steps"] == 1 for e in mine)),
            ("env_return", len(mine), sum(e["env_return"] is None for e in mine)),
        ]


def test_a_scorer_that_stops_is_shown_over_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scorer that gives no value from round 1 on, with its error; round 2 has no episodes, and no point."""
    numbers = (0, 1, 3)
    records = [rollout("t", index, 1.0, collection_round=number) for number in numbers for index in (0, 1)]
    records[-1].status, records[-1].error = "failed", "the engine went away"
    lk = show(build_lake(tmp_path, records), monkeypatch)
    scores = lk.sql("SELECT episode_id, group_id, run_id, collection_round, rollout_index AS place FROM episodes")
    names = {"scorer": pl.lit("judge"), "scorer_version": pl.lit("1"), "step_index": pl.lit(None, pl.Int32)}
    is_silent = (pl.col("collection_round") > 0) & (pl.col("place") == 1)
    with lk.job(kind="score") as job:
        values = {"value": pl.when(~is_silent).then(0.5), "error": pl.when(is_silent).then(pl.lit("quota exceeded"))}
        job.write("scores", scores.with_columns(**names, **values).drop("collection_round", "place"))
    frame = compare.read_unscored_over(Reader(lk.snapshot()), RUN, "collection_round")
    assert frame.select("scorer", "x", "share").rows() == [("judge", 0, 0.0), ("judge", 1, 0.5), ("judge", 3, 0.5)]
    monkeypatch.setattr(run_details, "read", lambda query, *arguments: query(Reader(lk.snapshot()), *arguments))
    ((_, _, address),) = run_details.build_unscored_chart(RUN, "collection_round")
    assert address is not None
    opened_at = dict(parse_qsl(urlsplit(address({"x": 1, "scorer": "judge"})).query))
    at = open_page("episodes", **opened_at)
    assert column(at, "episodes", "rollout_index") == ["1"]
    assert column(open_page("job", job=job.job_id), "missing_scores", "reason") == ["quota exceeded"]
    assert column(open_page("job", job=job.job_id), "missing_scores", "scores") == ["2"]


@pytest.mark.parametrize("score", [None, "brief"])
def test_where_the_outcome_fell_most(tmp_path: Path, score: str | None) -> None:
    """Means 0.5, 0.75, unknown, 0.25, 0 and 1: the steepest fall is from 1 to 3. A fall within its interval does not
    count."""
    means = [(0, 0.5), (1, 0.75), (2, None), (3, 0.25), (4, 0.0), (5, 1.0)]
    off = {"t": 0.0, "u": 0.01, "v": -0.01}
    fell = [
        rollout(task, n, None if value is None else value + (off[task] if round_ == 3 else 0), collection_round=round_)
        for round_, value in means
        for task in off
        for n in range(2)
    ]
    lk = build_lake(tmp_path, fell)
    with lk.job(kind="collect", run_id="rising") as job:
        job.record([rollout("t", 0, float(round_), collection_round=round_) for round_ in range(3)])
    with lk.job(kind="collect", run_id="all") as job:
        job.record([rollout(task, 0, 1.0 - n, collection_round=n) for task in "tu" for n in range(2)])
    with lk.job(kind="collect", run_id="noisy") as job:
        noise = {"t": (0.0, 1.0), "u": (1.0, 0.0), "v": (1.0, 0.5)}
        job.record([rollout(task, 0, pair[n], collection_round=n) for task, pair in noise.items() for n in range(2)])
    if score is not None:
        with lk.job(kind="score") as job:
            rows = lk.sql("SELECT episode_id, group_id, run_id, env_return AS value FROM episodes")
            names = {"scorer": pl.lit(score), "scorer_version": pl.lit("1"), "step_index": pl.lit(None, pl.Int32)}
            job.write("scores", rows.with_columns(**names))
    falls = compare.find_steepest_falls(Reader(lk.snapshot()), (RUN, "rising", "noisy", "no such"), score)
    assert falls.select("run_id", "before", "after").rows() == [(RUN, 1, 3)]
    assert falls["fall"].item() == pytest.approx(0.5)
    assert compare.find_steepest_falls(Reader(lk.snapshot()), ("all",), score).select("before", "after").rows() == [
        (0, 1)
    ]
    assert compare.find_steepest_falls(Reader(lk.snapshot()), ("rising",), score).is_empty()


def test_of_many_falls_the_one_beyond_chance_counts(tmp_path: Path) -> None:
    """Five of eight tasks fail in round 10, which may be chance among 19 falls; in round 12 all fall by less."""
    rounds = [
        [1.0 - (round_ == 10 and task < 5) - (0.2 + task / 1000) * (round_ >= 12) for task in range(8)]
        for round_ in range(20)
    ]
    lk = build_lake(
        tmp_path,
        [
            rollout(f"t{task}", 0, value, collection_round=round_)
            for round_, values in enumerate(rounds)
            for task, value in enumerate(values)
        ],
    )
    falls = compare.find_steepest_falls(Reader(lk.snapshot()), (RUN,))
    assert falls.select("before", "after").rows() == [(11, 12)]


def test_runs_of_the_same_tasks_and_the_settings_in_which_they_differ(tmp_path: Path) -> None:
    lk = build_lake(tmp_path, [rollout(task, 0, 1.0) for task in "abc"])
    for run, tasks_, limit in (("short", "abc", 6), ("few", "ab", 10), ("elsewhere", "axy", 10)):
        with lk.job(kind="collect", run_id=run, parameters={"max_steps": limit, "policy": "p"}) as job:
            job.record([rollout(task, 0, 1.0) for task in tasks_])
    snapshot = Reader(lk.snapshot())
    newest = ("elsewhere", "few", "short", RUN)
    assert compare.list_runs_sharing_tasks(snapshot, newest) == [("short", RUN), ("few", "short"), ("few", RUN)]
    assert lineage.list_differing_settings(snapshot, "few", "short") == ["max_steps"]
    assert lineage.list_differing_settings(snapshot, "few", "elsewhere") == []


def test_settings_are_told_apart_by_their_kind_and_to_their_end(tmp_path: Path) -> None:
    """`1` and "1" differ, and so do documents after 100,000 characters."""
    lk = build_lake(tmp_path)
    long = [str(number) for number in range(30_000)]
    for run, parameters in (("a", {"seed": 1, "ids": long}), ("b", {"seed": "1", "ids": [*long, "more"]})):
        with lk.job(kind="collect", run_id=run, parameters=parameters):
            pass
    snapshot = Reader(lk.snapshot())
    assert lineage.list_differing_settings(snapshot, "a", "b") == ["ids", "seed"]
    first_job, second_job = lk.sql(
        "SELECT job_id FROM job_runs WHERE kind = 'collect' AND run_id IN ('a', 'b') ORDER BY run_id"
    )["job_id"]
    settings_changed = lineage.compare_jobs(snapshot, first_job, second_job).filter(setting="seed")
    assert settings_changed.select("a", "b", "differs").row(0) == ("1", '"1"', True)


def test_a_point_opens_all_rounds_that_it_stands_for() -> None:
    points = pl.DataFrame({"x": [0, 3], "last": [2, 3]})
    address = make_point_address("r", "collection_round", None, points)
    assert address({"x": 0}) == "/episodes?run=r&round_from=0&round_to=2"
    assert address({"x": 3, "tool": "pay"}) == "/episodes?run=r&round=3&failed=pay"
    assert make_point_address("r", "policy_version", None, points.drop("last"))({"x": 0}) == "/episodes?run=r&version=0"


def test_a_run_beyond_those_that_are_listed_can_be_compared(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, lk.uri)
    monkeypatch.setattr(filters, "MAX_RUNS", 1)
    at = open_page("change", a_run=RUN, b_run="other")
    assert [at.selectbox(key=f"{side}_run").value for side in "ab"] == [RUN, "other"]
    monkeypatch.setattr(filters, "MAX_RUNS", 3)
    assert "has no run" in open_page("change", a_run=RUN, b_run="nobody").warning[0].value


def test_what_nobody_recorded_is_unknown_over_rounds(tmp_path: Path) -> None:
    snap = build_lake(tmp_path, [rollout("t", 0, None)]).snapshot()
    (row,) = compare.read_figures_over(snap, RUN, "collection_round").to_dicts()
    assert (row["outcome"], row["invalid"], row["tool_errors"], row["truncated"]) == (None, None, None, 0.0)


def test_outcome_against_length(snap: Reader, rows: dict[str, Rows], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "BINS", 3)
    outcomes = compare.read_outcome_by_length(snap, Side(RUN), Side("other"))
    assert outcomes.select("steps", "last", "side").rows() == [
        (1, 3, "A"), (1, 3, "B"), (4, 6, "A"), (7, 9, "B"),
    ]  # fmt: skip
    for row in outcomes.to_dicts():
        run, inside = {"A": RUN, "B": "other"}[row["side"]], range(row["steps"], row["last"] + 1)
        mine = [e for e in rows["episodes"] if e["run_id"] == run and e["num_steps"] in inside]
        assert row["episodes"] == len(mine)
        assert row["outcome"] == pytest.approx(mean(drop_unknown(e["env_return"] for e in mine)))
        condition = EpisodeFilter(run=run, steps_from=row["steps"], steps_to=row["last"])
        assert episodes.compute_totals(snap, condition)["episodes"] == len(mine), "its list holds exactly them"
    assert compare.read_outcome_by_length(snap, Side("nobody"), Side("nobody")).is_empty()


def test_two_credits_step_by_step(tmp_path: Path) -> None:
    lk = build_lake(tmp_path)
    run_credit(lk, GRPO())
    add_credit(lk)
    snap = lk.snapshot()
    first, second = find_credit(snap, "grpo"), find_credit(snap, "gigpo")
    by_step: dict[tuple[int, int], list[float]] = {}
    for credit in (first, second):
        for episode, step, value in snap.sql(
            f"SELECT episode_id, step_index, advantage FROM {credit.rows}"
        ).iter_rows():
            by_step.setdefault((episode, step), []).append(value)
    pairs = [pair for pair in by_step.values() if None not in pair]
    counts = compare.count_flips(snap, first, second)
    assert counts == {"steps": len(pairs), "flipped": sum(a * b < 0 for a, b in pairs)}
    covered = compare.read_tasks(snap, Side(credit=first), None)
    assert covered["episodes"].sum() == snap.sql(f"SELECT count(DISTINCT episode_id) FROM {first.rows}").item()


# ---------------------------------------------------------------- the page


@pytest.fixture
def shown_lake(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> Lake:
    monkeypatch.setenv(ENVIRONMENT, lk.uri)
    return lk


def test_the_first_and_last_round_of_a_run_are_suggested(shown_lake: Lake) -> None:
    text = words(open_page("change"))
    assert f"(/change?a_run={RUN}&a_rounds=0&b_run={RUN}&b_rounds=1)" in text
    assert f"(/change?a_run={RUN}&b_run=other)" in text
    at = open_page("change", a_run=RUN, a_rounds=0, b_run=RUN, b_rounds=1)
    assert column(at, "figures", "figure")[0] == "Outcome"
    assert column(at, "figures", "figure")[-1] == "score brief"
    assert len(column(at, "changed", "task_id")) == 8
    target = links(at, "changed")[0]
    assert target is not None
    assert re.fullmatch(r"/compare\?episode=\w{13}&episode=\w{13}", target)
    assert links(at, "rounds_of_a_run")[1] == f"/episodes?run={RUN}&round=1"


def test_versions_of_held_out_episodes_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a run of evaluations has them: one round, several checkpoints."""
    played = [rollout(f"t{n % 3}", n, float(n < 2), policy_version=n % 2, num_steps=n + 1) for n in range(6)]
    monkeypatch.setenv(ENVIRONMENT, build_lake(tmp_path, played).uri)
    target = f"/change?a_run={RUN}&a_version=0&b_run={RUN}&b_version=1"
    assert f"({target})" in words(open_page("change"))
    at = open_page("change", a_run=RUN, a_version=0, b_run=RUN, b_version=1)
    assert column(at, "figures", "figure")[0] == "Outcome"
    assert column(at, "rounds_of_a_run", "x") == ["0", "1"]
    assert links(at, "rounds_of_a_run")[1] == f"/episodes?run={RUN}&version=1"
    assert f"/episodes?run={RUN}&version=0&steps_from=1&steps_to=1" in links(at, "lengths")


def test_two_runs_are_compared(shown_lake: Lake, wording: Wording) -> None:
    at = open_page("change", a_run=RUN, b_run="other")
    assert "A: 48 episodes of 8 tasks; B: 3 episodes of 3 tasks" in words(at)
    at = open_page("change", a_run="other", b_run="other")
    (info,) = at.info
    assert "are the same" in wording(info.value)


@pytest.mark.parametrize(
    ("parameters", "fragment"),
    [
        ({"a_rounds": "first"}, "Invalid rounds `first`: write 3 or 2-5."),
        ({"a_version": "x"}, "Invalid policy version `x`: write a whole number."),
        ({"a_credit": "nobody"}, "names no credit"),
        ({"a_run": RUN, "a_rounds": "7-9"}, "No episodes in A."),
    ],
)
def test_wrong_choices_are_answered_in_words(shown_lake: Lake, parameters: dict[str, str], fragment: str) -> None:
    at = open_page("change", **parameters)
    assert any(fragment in warning.value for warning in at.warning)


def test_two_credits_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lk = build_lake(tmp_path)
    run_credit(lk, GRPO())
    job = add_credit(lk)
    monkeypatch.setenv(ENVIRONMENT, lk.uri)
    at = open_page("change", a_credit="grpo", b_credit=ids.to_text(job))
    assert "advantages of opposite signs" in words(at)
    assert "Mean |A|" in column(at, "figures", "figure")


def test_a_run_leads_to_what_changed(shown_lake: Lake) -> None:
    target = f"(/change?a_run={RUN}&a_rounds=0&b_run={RUN}&b_rounds=1)"
    assert target in words(open_page("runs", run=RUN))
    assert target not in words(open_page("runs", run="other"))
