"""The viewer's reads on real lakes, against oracles that loop over plain rows."""

import csv
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from io import BytesIO, StringIO
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import duckdb
import polars as pl
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lake import Lake, Snapshot, ids
from lake.errors import UsageError
from lake.judgements import outcomes
from lake.judgements.credit import Credit, find_covering, find_credit, find_jobs
from lake.judgements.selections import select_where
from lake.search import quote_words
from lake.tables import STATUSES
from lake.write.jobs import Job
from pipelines.credit import GiGPO
from pipelines.credit.job import run_credit
from testkit.copies import empty_lake
from testkit.examples import examples
from testkit.lakes import RUN, add_credit, add_training, build_lake, full_lake, judged_lake, rollout, siblings
from trainer.evaluation.success import compute_success, read_attempts
from viewer import download
from viewer.queries import (
    LakeReader,
    ListWindow,
    Sort,
    anchors,
    build_like_pattern,
    episodes,
    groups,
    lineage,
    runs,
    training,
    training_data,
    transcripts,
)
from viewer.queries.episodes import EpisodeFilter
from viewer.queries.groups import GroupFilter, Signal
from viewer.reader import Reader

ALL = ListWindow(1000)
ODD = "it's e.outcome $run of (e.task_id)"
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def lk(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """The full lake, and a second run whose task names hold wildcards."""
    lk = full_lake(tmp_path_factory.mktemp("lake"))
    odd = [rollout(task, 0, 0.5, num_steps=2, collection_round=None) for task in ("50%_off", "50 xoff", "3", "20", ODD)]
    with lk.job(kind="collect", run_id="odd names") as job:
        job.record(odd)
    return lk


@pytest.fixture(scope="module")
def snapshot(lk: Lake) -> Snapshot:
    return lk.snapshot()


@pytest.fixture(scope="module")
def snap(snapshot: Snapshot) -> Reader:
    """The snapshot with one open SQL session, as the viewer reads it."""
    return Reader(snapshot)


@pytest.fixture(scope="module")
def facts(snapshot: Snapshot) -> Rows:
    return snapshot.scan("episodes").collect().to_dicts()


@pytest.fixture(scope="module")
def steps(snapshot: Snapshot) -> Rows:
    return snapshot.scan("steps").collect().to_dicts()


@pytest.fixture(scope="module")
def credit_job(snap: Reader) -> Credit:
    return find_credit(snap)


@pytest.fixture(scope="module")
def training_job(snap: Reader) -> int:
    return int(snap.sql("SELECT job_id FROM job_runs WHERE kind = 'train'").item())


def find(facts: Rows, **fields: Any) -> dict[str, Any]:
    """The one row with these values."""
    (row,) = [row for row in facts if all(row[name] == value for name, value in fields.items())]
    return row


# ---------------------------------------------------------------- episodes


def matches(row: dict[str, Any], texts: list[str], condition: EpisodeFilter) -> bool:
    """The filter, spelled out for one episode and the text of each of its steps."""
    value = row["env_return"]
    task = condition.task
    by_task = task is None or (
        row["task_id"] == task
        if "*" not in task
        else row["task_id"].startswith(task.split("*")[0]) and row["task_id"].endswith(task.split("*")[-1])
    )
    return (
        by_task
        and condition.run in (None, row["run_id"])
        and (not condition.status or row["status"] in condition.status)
        and condition.group in (None, row["group_id"])
        and (condition.low is None or (value is not None and value >= condition.low))
        and (condition.high is None or (value is not None and value <= condition.high))
        and (not condition.unscored or value is None)
        and condition.collection_round in (None, row["collection_round"])
        and condition.policy_version in (None, row["policy_version"])
        and (condition.text is None or any(holds(text, condition.text) for text in texts))
    )


def holds(text: str, searched: str) -> bool:
    """Whether a step's text holds all words of a search; quotes and punctuation play no part in those drawn here."""
    return all(word in text.lower() for word in re.findall(r"\w+", searched.lower()))


def _falling(column: str) -> Sort:
    return Sort(column, descending=True)


filters = st.builds(
    EpisodeFilter,
    run=st.sampled_from([None, None, RUN, "odd names", "nobody"]),
    task=st.sampled_from([None, None, "mixed", "dead", "50%_off", "50*off", "m*", "3", "par*al"]),
    status=st.lists(st.sampled_from(STATUSES), max_size=2, unique=True).map(tuple),
    low=st.sampled_from([None, None, 0.0, 0.5, 1.0]),
    high=st.sampled_from([None, None, 0.0, 0.5]),
    unscored=st.booleans(),
    text=st.sampled_from([None, None, "HALL 1", "go left", "rollout 3", "left plan", "'; DROP TABLE episodes"]),
    collection_round=st.sampled_from([None, None, 0, 1]),
    policy_version=st.sampled_from([None, None, 10]),
    unlabelled=st.sampled_from([None, None, ("rating", None), ("rating", "ann")]),
)


orders = st.none() | st.builds(Sort, st.sampled_from(sorted(episodes.ORDERS)), st.booleans())


@settings(max_examples=examples(50))
@given(condition=filters, order=orders, size=st.integers(1, 9))
@example(condition=EpisodeFilter(low=0.5, high=0.5), order=None, size=9)
def test_pages_hold_every_matching_episode_once(
    snap: Reader, facts: Rows, steps: Rows, condition: EpisodeFilter, order: Sort | None, size: int
) -> None:
    texts = defaultdict(list)
    for step in steps:
        texts[step["episode_id"]].append(f"{step['state']} {step['action']} {step['reasoning'] or ''}")
    expected = {row["episode_id"] for row in facts if matches(row, texts[row["episode_id"]], condition)}

    total = episodes.compute_totals(snap, condition)["episodes"]
    assert total == len(expected)
    pages = [
        episodes.read_page(snap, condition, order, ListWindow.page(n, size)) for n in range(1, -(-total // size) + 2)
    ]
    listed = pl.concat(pages)["episode_id"].to_list()
    assert len(listed) == len(set(listed))
    assert set(listed) == expected
    assert pages[-1].is_empty()
    assert all(page.height <= size for page in pages)


@pytest.mark.parametrize("order", [None, *map(Sort, episodes.ORDERS), _falling("outcome")])
def test_previous_and_next_walk_the_list_in_its_order(snap: Reader, order: Sort | None) -> None:
    condition = EpisodeFilter(run=RUN, status=("completed",))
    listed = episodes.read_page(snap, condition, order, ALL)["episode_id"].to_list()
    for position, episode_id in enumerate(listed, start=1):
        position_found = episodes.find_position(snap, condition, order, episode_id)
        assert position_found is not None
        assert (position_found.position, position_found.total) == (position, len(listed))
        assert position_found.previous == (listed[position - 2] if position > 1 else None)
        assert position_found.next == (listed[position] if position < len(listed) else None)


def test_a_place_beyond_the_first_part_of_a_list_is_that_in_the_whole(
    snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episodes, "FIRST", 4)
    reader, condition = Reader(snapshot), EpisodeFilter(run=RUN)
    listed = [None, *episodes.list_episodes(reader, condition, None), None]
    for position in (1, 3, 4, 5, len(listed) - 2):
        position_found = episodes.find_position(reader, condition, None, listed[position])
        assert position_found is not None
        assert (position_found.position, position_found.total) == (position, len(listed) - 2)
        assert (position_found.previous, position_found.next) == (listed[position - 1], listed[position + 1])


def test_an_episode_that_the_filter_leaves_out_has_no_place(snap: Reader, facts: Rows) -> None:
    failed = next(row for row in facts if row["status"] == "failed")
    condition = EpisodeFilter(status=("completed",))
    assert episodes.find_position(snap, condition, None, failed["episode_id"]) is None


@pytest.mark.parametrize(
    ("order", "key"),
    [
        (Sort("outcome"), lambda row: (row["outcome"] is None, row["outcome"] or 0)),
        (_falling("outcome"), lambda row: (row["outcome"] is None, -(row["outcome"] or 0))),
        (_falling("num_steps"), lambda row: -row["num_steps"]),
        (
            _falling("collection_round"),
            lambda row: (row["collection_round"] is None, -(row["collection_round"] or 0)),
        ),
        (None, lambda row: row["run_id"]),
    ],
)
def test_orders(snap: Reader, order: Sort | None, key: Callable[[dict[str, Any]], Any]) -> None:
    listed = episodes.read_page(snap, EpisodeFilter(), order, ALL).to_dicts()
    assert listed == sorted(listed, key=key)


def test_numbered_tasks_are_in_the_order_of_their_numbers(snap: Reader) -> None:
    listed = episodes.read_page(snap, EpisodeFilter(run="odd names"), None, ALL)["task_id"].to_list()
    assert listed == ["3", "20", "50 xoff", "50%_off", ODD]


def test_wildcards_of_sql_are_ordinary_characters(snap: Reader) -> None:
    def tasks(task: str) -> list[str]:
        return episodes.read_page(snap, EpisodeFilter(task=task), None, ALL)["task_id"].to_list()

    assert tasks("50%_off") == ["50%_off"]
    assert tasks("50_*") == []
    assert tasks("50*") == ["50 xoff", "50%_off"]
    assert build_like_pattern(r"a\b%_*") == r"a\\b\%\_%"


def test_totals_count_unscored_episodes_but_do_not_average_them(snap: Reader, facts: Rows) -> None:
    mine = [row for row in facts if row["run_id"] == RUN]
    scored = [row["env_return"] for row in mine if row["env_return"] is not None]
    totals = episodes.compute_totals(snap, EpisodeFilter(run=RUN))
    assert totals["episodes"] == len(mine) > totals["scored"] == len(scored)
    assert totals["mean_return"] == pytest.approx(statistics.fmean(scored))
    assert totals["groups"] == len({row["group_id"] for row in mine})


def test_totals_of_nothing_are_unknown_not_0(snap: Reader) -> None:
    totals = episodes.compute_totals(snap, EpisodeFilter(run="nobody"))
    assert totals == {"episodes": 0, "groups": 0, "scored": 0, "mean_return": None, "mean_steps": None}


def test_the_batch_of_an_update_as_a_filter(snap: Reader, training_job: int) -> None:
    batch = snap.sql("SELECT episode_id FROM batches WHERE optimizer_step = 2")["episode_id"].to_list()
    frame = episodes.read_page(snap, EpisodeFilter(update=(training_job, 2)), None, ALL)
    assert sorted(frame["episode_id"]) == sorted(batch)
    assert episodes.compute_totals(snap, EpisodeFilter(update=(training_job, 99)))["episodes"] == 0


@settings(max_examples=examples(50))
@given(condition=filters)
@example(EpisodeFilter(score="env_return", low=0.5))
@example(EpisodeFilter(run=ODD))
@example(EpisodeFilter(task=ODD))
def test_a_predicate_names_the_episodes_of_a_list(snap: Reader, condition: EpisodeFilter) -> None:
    where = episodes.build_predicate(snap, condition)
    assert where is not None
    named = select_where(snap, ["episode_id"], where or None, may_be_empty=True)["episode_id"].to_list()
    assert named == sorted(episodes.read_page(snap, condition, None, ALL)["episode_id"])


def test_a_predicate_knows_the_outcome_that_a_scorer_gives(tmp_path: Path) -> None:
    lk = build_lake(tmp_path, [rollout(f"{number}", 0, None) for number in range(4)])
    scores = lk.sql("SELECT run_id, group_id, episode_id, CAST(task_id AS DOUBLE) AS value FROM episodes")
    with lk.job(kind="score", run_id=RUN) as job:
        names = {"scorer": pl.lit(ODD), "scorer_version": pl.lit("1"), "step_index": pl.lit(None, pl.Int32)}
        job.write("scores", scores.with_columns(**names))
    snap = Reader(lk.snapshot())
    for score in (None, ODD):
        where = episodes.build_predicate(snap, EpisodeFilter(score=score, low=2.0))
        assert select_where(snap, ["task_id"], where)["task_id"].sort().to_list() == ["2", "3"]


def test_a_search_that_found_many_has_no_predicate(snap: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    condition = EpisodeFilter(text="hall")
    assert episodes.build_predicate(snap, condition)
    monkeypatch.setattr(episodes, "_MOST_IDS", 3)
    assert episodes.build_predicate(snap, condition) is None


@pytest.mark.parametrize("write", [download.write_csv, download.write_jsonl, download.write_parquet])
def test_a_downloaded_file_holds_the_whole_list_in_its_order(
    snap: Reader, monkeypatch: pytest.MonkeyPatch, write: Callable[[Iterable[pl.DataFrame]], Iterable[bytes]]
) -> None:
    monkeypatch.setattr(episodes, "PART_ROWS", 5)
    condition, order = EpisodeFilter(text="hall"), _falling("num_steps")
    sent = list(write(episodes.read_parts(snap, condition, order)))
    assert len(sent) >= 4, "part by part"
    data = BytesIO(b"".join(sent))
    episode_ids = {
        download.write_csv: pl.read_csv,
        download.write_jsonl: pl.read_ndjson,
        download.write_parquet: pl.read_parquet,
    }[write](data)
    listed = episodes.read_page(snap, condition, order, ALL)
    assert episode_ids["episode_id"].to_list() == [ids.to_text(value) for value in listed["episode_id"]]
    assert episode_ids["task_id"].cast(pl.String).to_list() == listed["task_id"].to_list()
    assert episode_ids["found_step"].to_list() == listed["found_step"].to_list()


def test_a_list_of_nothing_is_a_file_with_names(snap: Reader) -> None:
    (sent,) = download.write_csv(episodes.read_parts(snap, EpisodeFilter(run="nobody"), None))
    assert sent.startswith(b"episode_id,outcome,")
    nothing = pl.read_parquet(
        BytesIO(b"".join(download.write_parquet(episodes.read_parts(snap, EpisodeFilter(run="nobody"), None))))
    )
    assert nothing.height == 0


FORMULAS = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "\uff1d1"]


def test_a_downloaded_csv_runs_nothing_in_a_spreadsheet() -> None:
    """Neither values of any kind of text nor names of columns, two of which may then be alike."""
    columns = dict.fromkeys([*FORMULAS, "'=1+1"], FORMULAS)
    frame = pl.DataFrame(columns).cast({"=1+1": pl.Enum(FORMULAS), "+1": pl.Categorical})
    rows = list(csv.reader(StringIO(b"".join(download.write_csv([frame])).decode(), newline="")))
    assert rows[0] == [f"'{name}" for name in FORMULAS] + ["'=1+1"]
    assert rows[1:] == [[f"'{text}"] * len(columns) for text in FORMULAS]


def read_excerpts(reader: Reader, text: str, page: pl.DataFrame) -> pl.DataFrame:
    return episodes.read_excerpts(reader, text, tuple(page.select("episode_id", "found_step").rows()))


def test_a_search_says_where_the_text_stands(snap: Reader) -> None:
    page = episodes.read_page(snap, EpisodeFilter(run=RUN, text="HALL plan"), None, ALL)
    frame = read_excerpts(snap, "HALL plan", page)
    assert set(page["found_step"]) == {1}, "the first state is a gate, the second a hall"
    assert set(page["found_steps"]) == {1}
    assert set(frame["episode_id"]) == set(page["episode_id"])
    assert set(frame["found_in"]) == {"reasoning"}
    assert all(text.startswith("Plan 1 of rollout ") for text in frame["excerpt"])


def test_loose_words_find_first_the_episodes_in_which_they_stand_side_by_side(tmp_path: Path) -> None:
    records = siblings("t", [0.0, 0.5, 1.0])
    records[0].steps[0].action = records[2].steps[0].action = "A command that it can run"
    records[2].steps[1].reasoning = "You may Run a  command."
    reader = Reader(build_lake(tmp_path, records).snapshot())
    page = episodes.read_page(reader, EpisodeFilter(text="run a command"), None, ALL)
    assert page.select("rollout_index", "found_step", "found_steps").rows() == [(2, 1, 2), (0, 0, 1)]
    excerpts = read_excerpts(reader, "run a command", page)
    assert dict(excerpts.select("found_in", "excerpt").rows())["reasoning"] == "You may Run a command."
    by_number = episodes.read_page(reader, EpisodeFilter(text="run a command"), Sort("rollout_index"), ALL)
    assert by_number["rollout_index"].to_list() == [0, 2], "an order of the reader's choice stays"
    marked = [hit[0] for hit in episodes.compile_hits("run a command").finditer("a run: Run a command at")]
    assert marked == ["run", "Run a command"]
    assert episodes.compile_hits("a").pattern == "a"
    assert not any(map(quote_words, ('"run a command"', "run", "run run")))


def test_a_search_finds_messages_too(snap: Reader) -> None:
    page = episodes.read_page(snap, EpisodeFilter(text='"through a MAZE"'), None, ALL)
    assert page.height == episodes.compute_totals(snap, EpisodeFilter())["episodes"]
    assert set(page["found_step"]) == {None}
    assert set(read_excerpts(snap, '"through a MAZE"', page)["found_in"]) == {"first messages"}


def test_a_search_finds_tasks_episodes_and_groups_by_their_ids(tmp_path: Path) -> None:
    """The id of a task or its beginning of three letters, and whole ids of an episode or a group."""
    records = [*siblings("django__django-11099", [1.0, 0.0]), rollout("dj", 0, 1.0)]
    reader = Reader(build_lake(tmp_path, records).snapshot())
    (row,) = reader.sql("SELECT episode_id, group_id FROM episodes WHERE task_id = 'dj'").rows()
    django = ["django__django-11099"] * 2
    named = {"Django__django-11099": django, '"django__"': django, "DJ": ["dj"]}
    for text, tasks in (named | {ids.to_text(number): ["dj"] for number in row}).items():
        page = episodes.read_page(reader, EpisodeFilter(text=text), None, ALL)
        assert page["task_id"].to_list() == tasks, text
        if text in named:
            excerpts = read_excerpts(reader, text, page).select("found_in", "excerpt").rows()
            assert excerpts == [("task id", task) for task in tasks]


def test_a_search_shows_what_was_said(tmp_path: Path) -> None:
    lk = build_lake(tmp_path, siblings("t", [1.0, 0.0]))
    rows = lk.sql("SELECT episode_id, group_id, run_id FROM episodes ORDER BY rollout_index LIMIT 1")
    named = {"scorer": pl.lit("judge"), "scorer_version": pl.lit("1"), "reason": pl.lit("It guessed the code.")}
    with lk.job(kind="score") as job:
        job.write("scores", rows.with_columns(value=pl.lit(0.0), step_index=pl.lit(None, pl.Int32), **named))
    reader = Reader(lk.snapshot())
    page = episodes.read_page(reader, EpisodeFilter(text="guessed code"), None, ALL)
    assert page.select("episode_id", "found_step", "found_steps").rows() == [(rows["episode_id"][0], None, 1)]
    (row,) = read_excerpts(reader, "guessed code", page).rows()
    assert row[1:] == ("said by judge", "It guessed the code.")
    with lk.job(kind="score") as job:  # of a step that no episode has: what was imported may be wrong
        named["reason"] = pl.lit("It never was here.")
        job.write("scores", rows.with_columns(value=pl.lit(0.0), step_index=pl.lit(99, pl.Int32), **named))
    reader = Reader(lk.snapshot())
    page = episodes.read_page(reader, EpisodeFilter(text="never was"), None, ALL)
    assert read_excerpts(reader, "never was", page)["excerpt"].to_list() == ["It never was here."]


def test_a_search_for_nothing_is_told(snap: Reader) -> None:
    with pytest.raises(UsageError, match="letter or a digit"):
        episodes.read_page(snap, EpisodeFilter(text="***"), None, ALL)


# ---------------------------------------------------------------- runs


def test_overview(snap: Reader, facts: Rows, steps: Rows) -> None:
    by_group = defaultdict(list)
    for row in facts:
        by_group[row["group_id"]].append(row["env_return"])
    scored = [[v for v in values if v is not None] for values in by_group.values()]
    judged = [values for values in scored if len(values) >= 2]
    assert runs.read_overview(snap) == {
        "episodes": len(facts),
        "num_runs": 2,
        "tasks": len({row["task_id"] for row in facts}),
        "scored": sum(row["env_return"] is not None for row in facts),
        "steps": len(steps),
        "groups": len(by_group),
        "judged_groups": len(judged),
        "dead_groups": sum(len(set(values)) == 1 for values in judged),
        "rejects": 0,
    }


def test_the_list_of_runs_newest_first(snap: Reader, facts: Rows) -> None:
    listed = runs.read_page(snap, 1.0, ALL)
    assert listed["run_id"].to_list() == ["odd names", RUN]
    assert runs.count_runs(snap) == 2
    assert runs.list_names(snap) == [RUN, "odd names"]
    returns = [row["env_return"] for row in facts if row["run_id"] == RUN and row["env_return"] is not None]
    demo = find(listed.to_dicts(), run_id=RUN)
    assert demo["success"] == pytest.approx(sum(value >= 1.0 for value in returns) / len(returns))
    assert (demo["episodes"], demo["groups"], demo["rounds"], demo["tasks"]) == (24, 6, 2, 3)
    assert runs.read_run(snap, RUN, 1.0) == demo
    assert demo["dead_share"] == pytest.approx(2 / 6)
    assert find(listed.to_dicts(), run_id="odd names")["dead_share"] is None, "groups of one cannot be dead"
    assert runs.read_page(snap, 1.0, ListWindow(1, 1))["run_id"].to_list() == [RUN]


def test_what_counts_as_success_is_chosen(snap: Reader) -> None:
    at = {
        level: find(runs.read_page(snap, level, ALL).to_dicts(), run_id="odd names")["success"] for level in (0.5, 1.0)
    }
    assert at == {0.5: 1.0, 1.0: 0.0}


def test_curves_over_rounds_and_versions(snap: Reader, facts: Rows) -> None:
    assert runs.list_axes(snap, RUN) == ["collection_round", "policy_version"]
    assert runs.list_axes(snap, "odd names") == []
    for axis in runs.list_axes(snap, RUN):
        points = runs.read_curve(snap, RUN, axis, 1.0).to_dicts()
        assert [point["x"] for point in points] == sorted({row[axis] for row in facts if row["run_id"] == RUN})
        for point in points:
            mine = [row for row in facts if row["run_id"] == RUN and row[axis] == point["x"]]
            values = [row["env_return"] for row in mine if row["env_return"] is not None]
            assert (point["episodes"], point["scored"]) == (len(mine), len(values))
            assert point["mean_return"] == pytest.approx(statistics.fmean(values))
            assert point["sd_return"] == pytest.approx(statistics.stdev(values))
            assert point["low"] < point["success"] < point["high"]
            assert point["dead_share"] == pytest.approx(1 / 3)
            assert 0 < point["failed_share"] == sum(row["status"] == "failed" for row in mine) / len(mine)


def test_the_interval_is_wilsons(tmp_path: Path) -> None:
    """8 of 10: 0.4902 to 0.9433 (Wilson 1927; any table). 0 of 10 ends at 0.2775, not at 0."""
    outcomes = [1.0] * 8 + [0.0] * 2
    good = [rollout("a", i, value, collection_round=0) for i, value in enumerate(outcomes)]
    bad = [rollout("a", i, 0.0, collection_round=1) for i in range(10)]
    points = runs.read_curve(build_lake(tmp_path, good + bad).snapshot(), RUN, "collection_round", 1.0).to_dicts()
    assert (points[0]["low"], points[0]["high"]) == pytest.approx((0.4902, 0.9433), abs=5e-5)
    assert (points[1]["low"], points[1]["high"]) == pytest.approx((0.0, 0.2775), abs=5e-5)


def test_a_curve_has_the_intervals_of_eval(tmp_path: Path) -> None:
    """Attempts at a task are no independent trials: the tasks are the sample."""
    rates = {0: (8, 0, 8, 1), 1: (4, 5, 3, 4)}
    lk = build_lake(
        tmp_path,
        [
            rollout(task, i, float(i < wins), collection_round=number)
            for number, of_tasks in rates.items()
            for task, wins in zip("abcd", of_tasks, strict=True)
            for i in range(8)
        ],
    )
    points = {point["x"]: point for point in runs.read_curve(lk.snapshot(), RUN, "collection_round", 1.0).to_dicts()}
    for number in rates:
        attempts = read_attempts(lk.snapshot(), by="run_id", score="env_return", where=f"collection_round = {number}")
        by_eval = compute_success(attempts).row(0, named=True)
        assert (points[number]["low"], points[number]["high"]) == pytest.approx((by_eval["low"], by_eval["high"]))
    assert points[0]["high"] - points[0]["low"] > 1.5 * (points[1]["high"] - points[1]["low"])


def test_a_round_without_scores_is_a_gap(tmp_path: Path) -> None:
    lk = build_lake(tmp_path, [rollout("a", 0, None, collection_round=0), rollout("a", 0, 1.0, collection_round=1)])
    first, second = runs.read_curve(lk.snapshot(), RUN, "collection_round", 1.0).to_dicts()
    assert (first["success"], first["low"], first["high"], first["mean_return"]) == (None, None, None, None)
    assert second["success"] == 1.0


def test_a_long_curve_is_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "POINTS", 4)
    lk = build_lake(tmp_path, [rollout("a", 0, float(n % 2), collection_round=n) for n in range(10)])
    points = runs.read_curve(lk.snapshot(), RUN, "collection_round", 1.0)
    assert points["x"].to_list() == [0, 3, 6, 9]
    assert points["episodes"].to_list() == [3, 3, 3, 1]
    assert points["last"].to_list() == [2, 5, 8, 11]
    ends = [EpisodeFilter(run=RUN, round_from=x, round_to=last) for x, last in points.select("x", "last").iter_rows()]
    assert [episodes.compute_totals(lk.snapshot(), condition)["episodes"] for condition in ends] == [3, 3, 3, 1]


def test_tasks_hardest_first(snap: Reader) -> None:
    tasks = runs.read_tasks(snap, RUN, 1.0, ALL)
    assert tasks["task_id"].to_list() == ["partial", "mixed", "dead"]
    assert tasks["success"].to_list() == pytest.approx([2 / 6, 3 / 8, 1.0])
    assert tasks["scored"].to_list() == [6, 8, 8]
    assert runs.count_tasks_by_success(snap, RUN, 1.0)["tasks"].sum() == 3


def test_a_run_exists_or_not(snap: Reader) -> None:
    assert runs.has_episodes(snap, RUN)
    assert not runs.has_episodes(snap, "demo' OR 1=1 --")


# ---------------------------------------------------------------- outcomes


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """Run `demo` has returns, `chats` has none; `judge` scored two of three chats, `late` one, `late` the demo, too."""
    lk = build_lake(tmp_path_factory.mktemp("judged"), [rollout("t", 0, 1.0)])
    with lk.job(kind="collect", run_id="chats") as job:
        job.record(siblings("t", [None, None, None]))
    rows = lk.sql("SELECT episode_id, group_id, run_id, rollout_index FROM episodes")
    chats, demo = rows.filter(run_id="chats").sort("rollout_index"), rows.filter(run_id=RUN)
    said = [
        chats.with_columns(scorer=pl.lit("judge"), value=pl.Series([0.25, 0.75, None])),
        chats.head(1).with_columns(scorer=pl.lit("late"), value=pl.lit(0.0)),
        demo.with_columns(scorer=pl.lit("late"), value=pl.lit(0.5)),
    ]
    with lk.job(kind="score") as job:
        scores = pl.concat(said).drop("rollout_index").with_columns(scorer_version=pl.lit("1"))
        job.write("scores", scores.with_columns(step_index=pl.lit(None, pl.Int32)))
    return Reader(lk.snapshot())


def test_a_run_without_returns_is_judged_by_the_scorer_of_most_of_its_episodes(judged: Reader) -> None:
    assert outcomes.find_scorers_of_runs(judged) == {"chats": "judge"}
    assert outcomes.list_choices(judged) == ["env_return", "judge", "late"]
    means = dict(runs.read_page(judged, 0.5, ALL).select("run_id", "mean_return").iter_rows())
    assert means == {RUN: 1.0, "chats": 0.5}
    assert runs.read_overview(judged)["scored"] == 3
    assert runs.read_tasks(judged, "chats", 0.5, ALL).select("scored", "success").rows() == [(2, 0.5)]


def test_a_score_that_comes_later_does_not_change_the_outcome_of_a_run(tmp_path: Path) -> None:
    lk = empty_lake(tmp_path)
    with lk.job(kind="collect", run_id="chats") as job:
        job.record(siblings("t", [None] * 4))
    rows = lk.sql("SELECT episode_id, group_id, run_id FROM episodes ORDER BY rollout_index")

    def said_by(scorer: str, episodes: int) -> dict[str, str]:
        scores = rows.head(episodes).with_columns(scorer=pl.lit(scorer), scorer_version=pl.lit("1"), value=pl.lit(1.0))
        with lk.job(kind="score", parameters={"scorer": scorer}) as job:
            job.write("scores", scores.with_columns(step_index=pl.lit(None, pl.Int32)))
        return outcomes.find_scorers_of_runs(Reader(lk.snapshot()))

    assert said_by("few", 1) == {"chats": "few"}
    assert said_by("half", 2) == {"chats": "half"}, "nobody scored most of them: whoever scored more"
    assert said_by("reward", 3) == {"chats": "reward"}
    assert said_by("a later one", 4) == {"chats": "reward"}


@pytest.mark.parametrize(
    ("score", "outcome"),
    [
        (None, [0.25, 0.75, None, 1.0]),
        ("env_return", [None, None, None, 1.0]),
        ("judge", [0.25, 0.75, None, None]),
        ("late", [0.0, None, None, 0.5]),
        ("'; DROP TABLE episodes", [None] * 4),
    ],
)
def test_the_chosen_outcome_is_shown_filtered_and_ordered(
    judged: Reader, score: str | None, outcome: list[float | None]
) -> None:
    def listed(**filters: Any) -> list[float | None]:
        return episodes.read_page(judged, EpisodeFilter(score=score, **filters), _falling("outcome"), ALL)[
            "outcome"
        ].to_list()

    outcomes_known = sorted((value for value in outcome if value is not None), reverse=True)
    assert listed() == outcomes_known + [None] * outcome.count(None)
    assert listed(low=0.5) == [value for value in outcomes_known if value >= 0.5]
    assert listed(unscored=True) == [None] * outcome.count(None)
    (group,) = groups.read_page(judged, GroupFilter(EpisodeFilter(run="chats", score=score)), ALL).to_dicts()
    assert group["scored"] == sum(value is not None for value in outcome[:3])
    assert groups.read_group(judged, group["group_id"], score).items() <= group.items()
    assert groups.read_siblings(judged, group["group_id"], None, ALL, score)["outcome"].to_list() == outcome[:3]


# ---------------------------------------------------------------- one episode


def test_tokens_that_only_the_calls_tell_are_added_up_if_every_call_tells_them(tmp_path: Path) -> None:
    complete, half = rollout("told", 0, 1.0), rollout("half", 0, 1.0)
    for step in complete.steps:
        step.prompt_tokens, step.cost = 10, 0.5
    half.steps[0].prompt_tokens = 10
    snap = build_lake(tmp_path, [complete, half]).snapshot()
    expected = [
        transcripts.read_episode(snap, i)
        for i in snap.sql("SELECT episode_id FROM episodes ORDER BY task_id")["episode_id"]
    ]
    assert [(row["prompt_tokens"], row["completion_tokens"], row["cost"]) for row in expected if row] == [
        (None, None, None),
        (30, None, 1.5),
    ]


def test_an_episode_and_its_steps(snap: Reader, facts: Rows) -> None:
    row = find(facts, task_id="mixed", rollout_index=2, collection_round=1)
    episode = transcripts.read_episode(snap, row["episode_id"])
    assert episode is not None
    assert (episode["task_id"], episode["env_return"], episode["num_steps"]) == ("mixed", 0.0, 3)
    listed = transcripts.read_steps(snap, row["episode_id"], [2, 1, 9])
    assert listed["step_index"].to_list() == [1, 2]
    assert listed["state"].to_list() == ["You are in hall 0.", "You are on path 2.2."]
    assert listed["reasoning"][0] == "Plan 1 of rollout 2."
    assert transcripts.read_outline(snap, row["episode_id"], ListWindow(2, 1))["reward"].to_list() == [0.0, 0.0]
    assert transcripts.read_reward_scale(snap, row["episode_id"]) == (0.0, True)
    assert transcripts.read_episode(snap, 1) is None
    assert transcripts.read_steps(snap, 1, [0]).is_empty()
    assert transcripts.read_outline(snap, 1, ALL).is_empty()


def test_an_unscored_episode_has_unknown_rewards_not_0(snap: Reader, facts: Rows) -> None:
    failed = next(row for row in facts if row["status"] == "failed")
    assert transcripts.read_outline(snap, failed["episode_id"], ALL)["reward"].to_list() == [None, None, None]
    assert transcripts.read_reward_scale(snap, failed["episode_id"]) == (0.0, False)


def test_long_texts_are_cut_in_sql_and_their_length_is_told(tmp_path: Path) -> None:
    long = rollout("long", 0, 1.0, num_steps=1)
    long.steps[0].action = "x" * 10_000
    long.steps[0].context = [{"role": "user", "content": "y" * (transcripts.DOCUMENT + 1)}]
    snap = build_lake(tmp_path, [long]).snapshot()
    episode_id = snap.sql("SELECT episode_id FROM episodes").item()
    (row,) = transcripts.read_steps(snap, episode_id, [0]).to_dicts()
    assert (len(row["action"]), row["action_length"]) == (transcripts.TEXT, 10_000)
    assert (row["reasoning_length"], row["tool_calls"], row["tool_calls_length"]) == (20, None, 0)
    assert len(row["context"]) == transcripts.DOCUMENT < row["context_length"]
    assert transcripts.read_text(snap, episode_id, 0, "action", 20_000) == "x" * 10_000
    assert transcripts.read_text(snap, episode_id, 0, "action", 5) == "xxxxx"
    assert transcripts.read_text(snap, episode_id, 7, "action", 5) == ""
    assert transcripts.read_document(snap, episode_id, "initial_messages", 4)[0] == '[{"r'
    assert transcripts.read_document(snap, episode_id, "tools") == (None, 0)


def test_scores_of_an_episode(tmp_path: Path) -> None:
    lk = build_lake(tmp_path, [rollout("a", 0, None)])
    (row,) = lk.sql("SELECT episode_id, group_id, run_id FROM episodes").to_dicts()
    with lk.job(kind="score") as job:
        values = {"scorer": "judge", "scorer_version": "1", "reason": "fine", "error": None, "isolation": None}
        job.write("scores", pl.DataFrame([row | values | {"step_index": None, "value": 0.5}]))
    assert transcripts.read_all_scores(lk.snapshot(), row["episode_id"]).select("scorer", "value", "reason").rows() == [
        ("judge", 0.5, "fine")
    ]


# ---------------------------------------------------------------- credit


def test_the_ledger_is_what_the_job_wrote(snap: Reader, snapshot: Snapshot, facts: Rows, credit_job: Credit) -> None:
    row = find(facts, task_id="mixed", rollout_index=1, collection_round=0)
    mine = (pl.col("episode_id") == row["episode_id"]) & (pl.col("series_id") == credit_job.series_id)
    expected = snapshot.scan("advantages").filter(mine).sort("step_index").collect()
    frame = training.read_advantages(snap, row["episode_id"], credit_job)
    assert frame.equals(expected.select(frame.columns))
    assert training.read_advantages(snap, 1, credit_job).is_empty()


def test_a_series_counts_with_its_newest_job(tmp_path: Path) -> None:
    lk = build_lake(tmp_path)
    old, new, other_job = add_credit(lk), add_credit(lk), add_credit(lk, omega=0.0)
    snap = lk.snapshot()
    of_jobs = [find_credit(snap, ids.to_text(job)) for job in (old, new, other_job)]
    (row,) = snap.sql("SELECT episode_id, group_id FROM episodes WHERE task_id = 'mixed' LIMIT 1").to_dicts()
    for covers in (find_covering(snap, episode_id=row["episode_id"]), find_covering(snap, group_id=row["group_id"])):
        assert [cover.credit.series_id for cover in covers] == [of_jobs[2].series_id, of_jobs[1].series_id]
        assert [cover.is_current for cover in covers] == [True, False]
    series = covers[1].credit
    assert training.look_up_credit(snap, series.text) == series
    assert training.look_up_credit(snap, ids.to_text(old)) == of_jobs[0]
    assert training.look_up_credit(snap, "0000000000007") is None
    ledgers = [training.read_advantages(snap, row["episode_id"], series_id) for series_id in (series, of_jobs[1])]
    assert ledgers[0].equals(ledgers[1])


def test_a_failed_credit_job_is_no_choice(tmp_path: Path) -> None:
    lk = build_lake(tmp_path)
    with pytest.raises(ZeroDivisionError), lk.job(kind="credit") as job:
        raise ZeroDivisionError
    assert training.look_up_credit(lk.snapshot(), ids.to_text(job.job_id)) is None


def test_summary_of_a_credit_job(snap: Reader, snapshot: Snapshot, credit_job: Credit) -> None:
    rows = snapshot.scan("advantages").collect().to_dicts()
    advantages_known = [row["advantage"] for row in rows if row["advantage"] is not None]
    summary = training.summarise_credit(snap, find_jobs(snap, credit_job)[0])
    assert summary["steps"] == len(rows)
    assert summary["undefined"] == len(rows) - len(advantages_known) > 0
    assert (summary["positive"], summary["negative"], summary["zero"]) == (
        sum(v > 0 for v in advantages_known),
        sum(v < 0 for v in advantages_known),
        sum(v == 0 for v in advantages_known),
    )
    assert (summary["groups"], summary["dead_groups"]) == (6, 2)
    assert summary["mean_size"] == pytest.approx(statistics.fmean(map(abs, advantages_known)))
    assert summary["shared"] == sum(row["anchor_episodes"] > 1 for row in rows)


# ---------------------------------------------------------------- groups


def test_the_list_of_groups_tells_live_from_dead(snap: Reader) -> None:
    frame = groups.read_page(snap, GroupFilter(EpisodeFilter(run=RUN)), ALL)
    assert frame.select("collection_round", "task_id", "signal").rows() == [
        (0, "dead", "dead"),
        (0, "mixed", "live"),
        (0, "partial", "live"),
        (1, "dead", "dead"),
        (1, "mixed", "live"),
        (1, "partial", "live"),
    ]
    partial = find(frame.to_dicts(), task_id="partial", collection_round=0)
    assert (partial["size"], partial["scored"], partial["lowest"], partial["highest"]) == (4, 3, 0.0, 1.0)
    assert partial["sd_return"] == pytest.approx(statistics.stdev([1.0, 0.0, 0.0]))


@pytest.mark.parametrize(
    ("condition", "number"),
    [
        (GroupFilter(), 11),
        (GroupFilter(signal=Signal.DEAD), 2),
        (GroupFilter(signal=Signal.UNJUDGED), 5),
        (GroupFilter(EpisodeFilter(run=RUN, collection_round=1), Signal.LIVE), 2),
        (GroupFilter(EpisodeFilter(task="m*")), 2),
        (GroupFilter(EpisodeFilter(task="50%_off")), 1),
        (GroupFilter(EpisodeFilter(run="nobody")), 0),
    ],
)
def test_filters_of_groups(snap: Reader, condition: GroupFilter, number: int) -> None:
    assert groups.count_groups(snap, condition) == number
    assert groups.read_page(snap, condition, ALL).height == number
    assert groups.read_page(snap, condition, ListWindow(1, number)).is_empty()


def test_one_group_and_its_siblings(snap: Reader, snapshot: Snapshot, facts: Rows, credit_job: Credit) -> None:
    row = find(facts, task_id="mixed", rollout_index=0, collection_round=1)
    group = groups.read_group(snap, row["group_id"])
    assert group is not None
    assert (group["size"], group["mean_return"], group["signal"]) == (4, 0.5, "live")
    assert groups.read_group(snap, 1) is None
    listed = groups.read_siblings(snap, row["group_id"], credit_job, ALL)
    assert listed["rollout_index"].to_list() == [0, 1, 2, 3]
    assert listed["outcome"].to_list() == [1.0, 0.0, 0.0, 1.0]
    advantages = snapshot.scan("advantages").filter(pl.col("episode_id") == listed["episode_id"][0]).collect()
    assert listed["mean_advantage"][0] == pytest.approx(advantages["advantage"].mean())
    assert listed["a_episode"].to_list() == pytest.approx([0.866, -0.866, -0.866, 0.866], abs=1e-3)
    without = groups.read_siblings(snap, row["group_id"], None, ALL)
    assert without["a_episode"].to_list() == [None] * 4
    assert without["outcome"].to_list() == listed["outcome"].to_list()


def test_anchor_states_that_siblings_share(snap: Reader, facts: Rows, credit_job: Credit) -> None:
    """All start at the gate; even and odd rollouts pass a hall each; then everybody is alone."""
    group_id = find(facts, task_id="mixed", rollout_index=0, collection_round=1)["group_id"]
    frame = anchors.read_page(snap, group_id, credit_job, ALL)
    assert frame.select("state", "size", "episodes", "actions").rows()[0] == ("You are at the gate.", 4, 4, 2)
    assert sorted(frame["state"][1:]) == ["You are in hall 0.", "You are in hall 1."]
    assert frame["episodes"].to_list() == [4, 2, 2]
    assert anchors.count_anchors(snap, group_id, credit_job) == 3
    assert anchors.compute_shares(snap, group_id, credit_job) == {
        "steps": 12,
        "shared": 8,
        "alone": 4,
        "doubted": 0,
        "doubted_weight": 0.0,
    }
    gate = frame.row(0, named=True)
    assert (gate["lowest"], gate["highest"]) == pytest.approx((0.0, 0.95**2))
    assert gate["spread"] == pytest.approx(0.95**2)


def test_visits_of_an_anchor_state(snap: Reader, facts: Rows, credit_job: Credit) -> None:
    row = find(facts, task_id="mixed", rollout_index=0, collection_round=1)
    anchor = anchors.read_page(snap, row["group_id"], credit_job, ALL)["anchor_key"][0]
    frame = anchors.read_visits(snap, row["group_id"], anchor, credit_job, ALL)
    assert frame.select("rollout_index", "step_index", "action", "outcome").rows() == [
        (0, 0, "go right", 1.0),
        (1, 0, "go left", 0.0),
        (2, 0, "go right", 0.0),
        (3, 0, "go left", 1.0),
    ]
    assert frame["a_step"].sum() == pytest.approx(0.0)
    assert anchors.read_visits(snap, row["group_id"], 1, credit_job, ALL).is_empty()
    assert anchors.read_visits(snap, 1, anchor, credit_job, ALL).is_empty()


def test_a_state_visited_twice_by_one_rollout_is_not_shared(tmp_path: Path) -> None:
    looping = rollout("loop", 0, 1.0, num_steps=2)
    looping.steps[1].state = looping.steps[0].state
    alone = rollout("loop", 1, 0.0, num_steps=1)
    alone.steps[0].state = "elsewhere"
    lk = build_lake(tmp_path, [looping, alone])
    add_credit(lk)
    snap = lk.snapshot()
    credit = find_credit(snap)
    group_id = snap.sql("SELECT any_value(group_id) FROM episodes").item()
    assert anchors.read_page(snap, group_id, credit, ALL).is_empty()
    assert anchors.count_anchors(snap, group_id, credit) == 0
    assert anchors.compute_shares(snap, group_id, credit) == {
        "steps": 3,
        "shared": 0,
        "alone": 1,
        "doubted": 0,
        "doubted_weight": 0.0,
    }


def test_empty_and_error_states_are_doubted(tmp_path: Path) -> None:
    """Anything may lead to them: here a step to the right and one to the left."""
    records = [rollout("t", index, float(index)) for index in range(2)]
    for record in records:
        record.steps[1].state = "[]"
        record.steps[2].state = "Error: no such room"
        record.steps[2].state_is_error = True
    lk = build_lake(tmp_path, records)
    add_credit(lk)
    snap = lk.snapshot()
    group_id = snap.sql("SELECT any_value(group_id) FROM episodes").item()
    frame = anchors.read_page(snap, group_id, find_credit(snap), ALL)
    assert {row["state"]: (row["doubt"], row["ways_in"]) for row in frame.to_dicts()} == {
        "You are at the gate.": (None, 0),
        "[]": ("empty", 2),
        "Error: no such room": ("error text", 2),
    }
    first = snap.sql("SELECT episode_id FROM episodes WHERE rollout_index = 0").item()
    assert transcripts.read_outline(snap, first, ALL)["state_is_empty"].to_list() == [False, True, False]


def test_every_list_is_ordered_by_any_of_its_columns(
    snap: Reader, facts: Rows, credit_job: Credit, training_job: int
) -> None:
    """As Polars orders the whole list, what is not known last in both directions."""
    group_id = find(facts, task_id="mixed", rollout_index=0, collection_round=1)["group_id"]
    lists: list[tuple[Iterable[str], Callable[[Sort], pl.DataFrame]]] = [
        (episodes.ORDERS, lambda sort: episodes.read_page(snap, EpisodeFilter(), sort, ALL)),
        (groups.ORDERS, lambda sort: groups.read_page(snap, GroupFilter(), ALL, sort)),
        (groups.SIBLING_ORDERS, lambda sort: groups.read_siblings(snap, group_id, credit_job, ALL, None, sort)),
        (anchors.ORDERS, lambda sort: anchors.read_page(snap, group_id, credit_job, ALL, sort)),
        (lineage.JOB_ORDERS, lambda sort: lineage.read_jobs(snap, None, None, ALL, sort)),
        (lineage.REJECT_ORDERS, lambda sort: lineage.read_rejects(snap, None, None, ALL, sort)),
        (runs.ORDERS, lambda sort: runs.read_page(snap, 1.0, ALL, None, sort)),
        (runs.TASK_ORDERS, lambda sort: runs.read_tasks(snap, RUN, 1.0, ALL, None, sort)),
        (training.BATCH_ORDERS, lambda sort: training.read_batch(snap, training_job, 2, credit_job, ALL, sort)),
    ]
    for columns, page in lists:
        for column, descending in product(columns, (False, True)):
            values = page(Sort(column, descending))[column]
            if column == "task_id":  # numbers by size, before names
                continue
            assert values.equals(values.sort(descending=descending, nulls_last=True)), (column, descending)


# ---------------------------------------------------------------- training


def test_training_jobs_and_their_curves(snap: Reader, training_job: int) -> None:
    (job,) = training.list_jobs(snap).to_dicts()
    assert (job["job_id"], job["updates"], job["metrics"], job["status"]) == (training_job, 4, 2, "succeeded")
    curves = training.read_metrics(snap, training_job)
    assert curves.filter(pl.col("name") == "loss")["value"].to_list() == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4])
    assert curves.filter(pl.col("name") == "kl")["value"].to_list() == [None, 0.01, 0.02, 0.03]
    assert training.list_jobs_of_run(snap, RUN)["job_id"].to_list() == [training_job]
    assert training.list_jobs_of_run(snap, "odd names").is_empty()
    assert training.read_metrics_at(snap, training_job, 0) == {"kl": None, "loss": 1.0}
    assert training.read_metrics_at(snap, training_job, 99) == {}
    assert training.find_update_range(snap, training_job) == (0, 3)
    assert training.find_update_range(snap, 1) is None
    assert training.read_checkpoints(snap, training_job)["optimizer_step"].to_list() == [4]


@settings(max_examples=examples(50))
@given(active=st.lists(st.sampled_from([0.0, 1.0, 2.0, None]), max_size=12), gap=st.integers(1, 3))
def test_stretches_of_alarms(active: list[float | None], gap: int) -> None:
    """Steps may be apart: a stretch ends where an update without an alarm is, and nowhere else."""
    frame = pl.DataFrame(
        {"job_id": [7] * len(active), "step": [gap * n for n in range(len(active))], "value": active, "name": "alarms"},
        schema={"job_id": pl.Int64, "step": pl.Int64, "value": pl.Float64, "name": pl.String},
    )
    connection = duckdb.connect()
    connection.register("run_metrics", frame)
    reads = cast("LakeReader", SimpleNamespace(sql=lambda query, params: connection.sql(query, params=params).pl()))
    expected: list[tuple[int, int]] = []
    open_at, last = None, 0
    for step, value in [*zip(frame["step"], active, strict=True), (None, 0.0)]:
        if value and open_at is None:
            open_at = step
        if not value and open_at is not None:
            expected.append((open_at, last))
            open_at = None
        last = step
    assert training.list_alarms(reads, 7) == (expected, len(expected))
    assert training.list_alarms(reads, 7, 1) == (expected[:1], len(expected))


@pytest.mark.parametrize(
    ("rates", "jumps"),
    [
        ([1.0, 1.0, 1.0, 10.0, 10.0], [(3, 1.0, 10.0)]),
        ([1.0, 1.0, 0.4, 0.4], [(2, 1.0, 0.4)]),
        ([1.0, 1.0, 2.0, 1.0, 1.0], []),
        ([0.1, 0.4, 1.0, 1.0], []),
        ([0.0, 1.0, 2.0, 2.0, 1.0, 0.2, 0.0], []),
        ([1.0, None, 10.0, 10.0, 4.0, 4.0], [(4, 10.0, 4.0)]),
        ([], []),
    ],
    ids=["rise", "fall", "twice is none", "warm-up", "warm-up and decay", "unknown", "no rate"],
)
def test_jumps_of_the_learning_rate(rates: list[float | None], jumps: list[tuple[int, float, float]]) -> None:
    frame = pl.DataFrame(
        {"job_id": 7, "step": range(len(rates)), "value": rates, "name": "learning_rate"},
        schema={"job_id": pl.Int64, "step": pl.Int64, "value": pl.Float64, "name": pl.String},
    )
    connection = duckdb.connect()
    connection.register("run_metrics", frame)
    reads = cast("LakeReader", SimpleNamespace(sql=lambda query, params: connection.sql(query, params=params).pl()))
    assert training.find_rate_jumps(reads, 7) == jumps
    assert training.find_rate_jumps(reads, 7, 0) == []


def test_tasks_that_are_evaluated_and_trained_on(tmp_path: Path) -> None:
    """Of the split `test` and of the evaluations of a run; a task of the same name elsewhere is another one."""
    records = [rollout(task, 0, 1.0, split="train") for task in "abcd"]
    records += [rollout(task, 1, 1.0, split="test") for task in "aex"]
    lk = build_lake(tmp_path, records)
    with lk.job(kind="collect", run_id=f"{RUN}-eval") as job:
        job.record([rollout("b", 0, 1.0), rollout("y", 0, 1.0), rollout("c", 0, 1.0, environment="shop")])
    with lk.job(kind="collect", run_id="untouched") as job:
        job.record([rollout("a", 0, 1.0, split="train"), rollout("a", 1, 1.0)])
    reader = Reader(lk.snapshot())
    assert runs.find_trained_evaluation_tasks(reader, RUN)["trained"] == 0, "nothing was trained on"
    with lk.job(kind="train", run_id="trainer") as job:
        consumed(lk, job, 0, f"run_id = '{RUN}' AND split = 'train'")
    reader = Reader(lk.snapshot())
    row = runs.find_trained_evaluation_tasks(reader, RUN)
    assert (row["evaluated"], row["trained"], row["tasks"], row["trainers"]) == (6, 2, ["a", "b"], ["trainer"])
    row = runs.find_trained_evaluation_tasks(reader, f"{RUN}-eval")
    assert (row["evaluated"], row["trained"], row["tasks"]) == (3, 1, ["b"])
    assert runs.find_trained_evaluation_tasks(reader, "untouched")["evaluated"] == 0


def test_the_batch_of_an_update_with_its_advantages(
    snap: Reader, snapshot: Snapshot, facts: Rows, training_job: int, credit_job: Credit
) -> None:
    read = training.find_credit_of_job(snap, training_job)
    assert read is not None
    assert read.series_id == credit_job.series_id
    frame = training.read_batch(snap, training_job, 1, credit_job, ALL)
    assert frame.height == training.count_batch(snap, training_job, 1, None) == 6
    advantages = defaultdict(list)
    for row in snapshot.scan("advantages").collect().to_dicts():
        advantages[row["episode_id"]].append(row["advantage"])
    for row in frame.to_dicts():
        fact = find(facts, episode_id=row["episode_id"])
        advantages_known = [value for value in advantages[row["episode_id"]] if value is not None]
        assert row["outcome"] == fact["env_return"]
        assert row["action_tokens"] == 5 * fact["num_steps"]
        assert row["undefined"] == fact["num_steps"] - len(advantages_known)
        assert row["dead"] == (fact["task_id"] == "dead")
        if advantages_known:
            assert row["mean_advantage"] == pytest.approx(statistics.fmean(advantages_known))
            assert (row["lowest"], row["highest"]) == (min(advantages_known), max(advantages_known))
        else:
            assert (row["mean_advantage"], row["mean_size"]) == (None, None)
    sizes = [value for value in frame["mean_size"] if value is not None]
    assert sizes == sorted(sizes, reverse=True)
    assert training.read_batch(snap, training_job, 1, None, ALL)["mean_advantage"].to_list() == [None] * 6


def test_the_groups_of_a_batch(snap: Reader, facts: Rows, training_job: int, credit_job: Credit) -> None:
    rows = training.read_batch(snap, training_job, 1, credit_job, ALL).to_dicts()
    frame = training.read_batch_groups(snap, training_job, 1, credit_job)
    assert set(frame["total"]) == {len({row["group_id"] for row in rows})} == {frame.height}
    assert set(frame["dead_total"]) == {frame["dead"].sum()}
    for group in frame.to_dicts():
        mine = [row for row in rows if row["group_id"] == group["group_id"]]
        fact = find(facts, episode_id=mine[0]["episode_id"])
        assert (group["task_id"], group["collection_round"]) == (fact["task_id"], fact["collection_round"])
        assert (group["episodes"], group["dead"]) == (len(mine), any(row["dead"] for row in mine))
        assert group["policy_version"] == min(row["policy_version"] for row in mine)
        outcomes_known = [row["outcome"] for row in mine if row["outcome"] is not None]
        assert group["mean_return"] == pytest.approx(statistics.fmean(outcomes_known))
        assert group["action_tokens"] == sum(row["action_tokens"] for row in mine)
    sizes = [value for value in frame["mean_size"] if value is not None]
    assert sizes == sorted(sizes, reverse=True)
    assert training.read_batch_groups(snap, training_job, 1, None)["mean_size"].to_list() == [None] * frame.height
    played = training_data.read_versions_around(snap, training_job, 3)
    for update in (2, 3):
        batch = training.read_batch(snap, training_job, update, None, ALL)["policy_version"]
        assert played[update].versions == (batch.min(), batch.max())
    assert set(played) == {2, 3}
    assert training.list_jobs_with_update(snap, 3) == [training_job]
    assert training.list_jobs_with_update(snap, 4) == []


def test_what_the_updates_consumed(snap: Reader, training_job: int, credit_job: Credit) -> None:
    frame = training.read_consumption(snap, training_job, credit_job)
    assert frame["step"].to_list() == [0, 1, 2, 3]
    assert frame["episodes"].to_list() == [6, 6, 6, 6]
    for row in frame.to_dicts():
        rows = training.read_batch(snap, training_job, row["step"], credit_job, ALL).to_dicts()
        returns = [r["outcome"] for r in rows if r["outcome"] is not None]
        assert row["mean_return"] == pytest.approx(statistics.fmean(returns))
        assert row["dead_share"] == pytest.approx(sum(r["dead"] for r in rows) / len(rows)), "all have 3 steps"
        assert row["undefined"] == pytest.approx(sum(r["undefined"] for r in rows) / (3 * len(rows)))
        assert 0 <= row["positive"] + row["negative"] + row["undefined"] <= 1
    without = training.read_consumption(snap, training_job, None)
    assert without["mean_return"].to_list() == frame["mean_return"].to_list()
    assert without["dead_share"].to_list() == [None] * 4


@pytest.mark.parametrize("by", ["job", "series"])
def test_the_credit_that_a_training_job_names(tmp_path: Path, by: str) -> None:
    lk = build_lake(tmp_path)
    first, _ = add_credit(lk), add_credit(lk, omega=0.0)
    series = lk.sql("SELECT series_id FROM job_runs WHERE job_id = ?", [first]).item()
    job = add_training(lk, advantages=ids.to_text(first if by == "job" else series))
    add_credit(lk)
    read = training.find_credit_of_job(lk.snapshot(), job)
    assert read is not None
    assert read.series_id == series
    assert find_jobs(lk.snapshot(), read) == (first,), "what came later it has not read"


def credit_jobs(lk: Lake, job_id: int, update: int = 0) -> set[int | None]:
    """The credit jobs whose advantages an update is shown with."""
    snap = lk.snapshot()
    return set(training.read_batch(snap, job_id, update, training.find_credit_of_job(snap, job_id), ALL)["credit_job"])


def test_a_training_job_that_names_nothing_read_the_newest_credit_before_it(tmp_path: Path) -> None:
    lk = build_lake(tmp_path)
    before_all = add_training(lk)
    add_credit(lk)
    newest = add_credit(lk, gamma=0.5)
    job = add_training(lk)
    add_credit(lk, omega=0.0)
    assert training.find_credit_of_job(lk.snapshot(), before_all) is None
    assert credit_jobs(lk, before_all) == {None}
    assert credit_jobs(lk, job) == {newest}
    assert training.find_credit_of_job(lk.snapshot(), 1) is None


def consumed(lk: Lake, job: Job, update: int, where: str = "true") -> None:
    """What an optimizer step of a training job consumed: whole episodes."""
    mine = lk.sql(f"SELECT episode_id, num_steps FROM episodes WHERE {where}")
    fixed = {"optimizer_step": update, "first_step": 0, "action_tokens": 1, "epoch": 0}
    rows = mine.select("episode_id", last_step=pl.col("num_steps") - 1)
    job.write("batches", rows.with_columns(pl.lit(value).alias(name) for name, value in fixed.items()))


def test_a_batch_has_the_outcomes_by_which_its_runs_go(tmp_path: Path) -> None:
    lk = judged_lake(tmp_path)
    with lk.job(kind="train", run_id=RUN) as job:
        consumed(lk, job, 0)
    snap = lk.snapshot()
    assert training.read_batch(snap, job.job_id, 0, None, ALL, _falling("outcome"))["outcome"].to_list() == [1.0, 0.25]
    assert training.read_batch_groups(snap, job.job_id, 0, None)["mean_return"].to_list() == [0.625]
    assert training.read_consumption(snap, job.job_id, None)["mean_return"].to_list() == [0.625]


def test_a_loop_that_computes_credit_as_it_goes_read_the_newest_of_each_round(tmp_path: Path) -> None:
    """One training job over two rounds, each with a credit job of its own; what came later it has not read."""
    lk = build_lake(tmp_path)
    rounds = []
    with lk.job(kind="train", run_id=RUN) as job:
        for number in (0, 1):
            where = f"collection_round = {number}"
            run_credit(lk, GiGPO(gamma=0.5), only=where)
            rounds.append(run_credit(lk, GiGPO(), only=where).job_id)
            consumed(lk, job, number, where)
    add_credit(lk, omega=0.0)
    assert [credit_jobs(lk, job.job_id, number) for number in (0, 1)] == [{rounds[0]}, {rounds[1]}]
    frame = training.read_consumption(lk.snapshot(), job.job_id, training.find_credit_of_job(lk.snapshot(), job.job_id))
    assert frame["mean_size"].null_count() == 0


# ---------------------------------------------------------------- lineage


def test_jobs(snap: Reader, training_job: int) -> None:
    kinds = ["collect", "train", "credit", "collect"]
    assert lineage.read_jobs(snap, None, None, ALL)["kind"].to_list() == kinds
    assert lineage.count_jobs(snap, None, None) == 4
    assert lineage.count_jobs(snap, "collect", "succeeded") == 2
    assert lineage.read_jobs(snap, "train", None, ALL)["job_id"].to_list() == [training_job]
    assert lineage.count_jobs(snap, None, "failed") == 0
    assert lineage.list_job_kinds(snap) == ["collect", "credit", "train"]
    job = lineage.read_job(snap, training_job)
    assert job is not None
    assert (job["run_id"], job["status"]) == (RUN, "succeeded")
    assert '"loss":"ppo"' in job["parameters"]
    assert lineage.read_job(snap, 1) is None


def test_rejects(tmp_path: Path) -> None:
    lk = build_lake(tmp_path, [rollout("a", 0, 1.0)])
    other_record = rollout("a", 0, 0.0)
    with lk.job(kind="collect", run_id=RUN) as job:
        job.record([other_record, rollout("b", 0, float("nan"))])
    snap = lk.snapshot()
    assert lineage.count_reject_reasons(snap) == {"conflict": 1, "invalid": 1}
    (row,) = lineage.read_rejects(snap, "invalid", None, ALL).to_dicts()
    assert "env_return" in row["message"]
    assert lineage.count_rejects(snap, None, RUN) == 2
    assert lineage.count_rejects(snap, None, "other") == 0
    reject = lineage.read_reject(snap, row["reject_id"])
    assert reject is not None
    assert reject["raw_length"] == len(reject["raw"]) > 0
    assert reject["job_id"] == job.job_id
    assert lineage.read_reject(snap, 1) is None


# ---------------------------------------------------------------- empty


def test_every_read_of_an_empty_lake_is_empty(tmp_path: Path) -> None:
    import lake

    snap = Reader(lake.open(tmp_path / "empty", create=True).snapshot())
    assert set(runs.read_overview(snap).values()) == {0}
    assert runs.list_names(snap) == []
    assert episodes.compute_totals(snap, EpisodeFilter())["episodes"] == 0
    assert groups.count_groups(snap, GroupFilter()) == lineage.count_jobs(snap, None, None) == 0
    frames = [
        runs.read_page(snap, 1.0, ALL),
        episodes.read_page(snap, EpisodeFilter(text="x"), None, ALL),
        groups.read_page(snap, GroupFilter(), ALL),
        training.list_jobs(snap),
        training.read_metrics(snap, 1),
        training.read_consumption(snap, 1, None),
        training.read_batch(snap, 1, 0, None, ALL),
        lineage.read_jobs(snap, None, None, ALL),
        lineage.read_rejects(snap, None, None, ALL),
        runs.read_curve(snap, "x", "collection_round", 1.0),
    ]
    assert [frame.height for frame in frames] == [0] * len(frames)


def test_a_group_that_mixes_policy_versions_shows_it(tmp_path: Path) -> None:
    mixed = siblings("a", [0.0, 1.0])
    mixed[1].policy_version = 5
    (row,) = groups.read_page(Reader(build_lake(tmp_path, mixed).snapshot()), GroupFilter(), ALL).to_dicts()
    assert (row["first_version"], row["last_version"]) == (0, 5)
