"""Columns in memory: what they answer is what the files say, no matter what happened to the lake in between."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pytest

from lake import Lake
from lake.read import column_cache, query_pruning, view_binding
from lake.read.column_cache import COLUMNS, ColumnCache
from lake.read.parquet import DataFile
from lake.records import StepRecord
from lake.storage.objects import Objects
from pipelines.credit import GiGPO
from pipelines.credit.job import run_credit
from testkit.copies import empty_lake
from testkit.lakes import rollout, siblings

TOOLS = {"episode_id": pl.Int64, "tools": pl.List(pl.String)}
QUESTIONS = (
    "SELECT * EXCLUDE (initial_messages) FROM episodes",
    *(f"SELECT {', '.join(f'{name}.{column}' for column in columns)} FROM {name}" for name, columns in COLUMNS.items()),
    "SELECT run_id, count(*), avg(env_return), max(task_id) FROM episodes GROUP BY ALL",
    "SELECT episode_id FROM episodes WHERE task_id LIKE 'b%' AND collection_round BETWEEN 1 AND 2 AND seed IS NOT NULL",
    "SELECT episode_id, outcome FROM (SELECT *, env_return AS outcome FROM episodes) WHERE outcome IN (0, 1)",
    "SELECT episode_id FROM episodes WHERE initial_messages LIKE '%maze%' AND rollout_index <> 1",
    "SELECT episode_id, scorer, value FROM current_scores WHERE value >= 0.5",
    "SELECT * FROM episode_steps",
    "SELECT unnest(tools_called) FROM episode_steps JOIN episodes USING (episode_id) WHERE error_states > 0",
)
CALLS: list[list[Any]] = [
    [],
    [{"name": "go", "arguments": "{}"}, {"name": "look"}],
    [{"function": {"name": "act"}}, {"name": "go"}],
]
STEPS = [
    StepRecord(
        state=f"{n}",
        action="go",
        tool_calls=CALLS[n % 3],
        is_active=n != 4,
        is_action_valid=[True, False, None][n % 3],
        state_is_error=[None, True][n % 2],
    )
    for n in range(6)
]


@pytest.fixture(autouse=True)
def _however_little_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query_pruning, "FEW_FILES", 0)


@pytest.fixture
def lk(tmp_path: Path) -> Lake:
    return empty_lake(tmp_path)


def add(lk: Lake, task: str, number: int) -> None:
    with lk.job(kind="collect", run_id=f"run {number % 2}") as job:
        job.record(siblings(task, [0.0, 1.0, None], collection_round=number, steps=STEPS[number % 3 :]))


def last(row: dict[str, Any], after: dict[str, Any]) -> str | None:
    """The tool of a step's last call, if an error came back."""
    calls = json.loads(row["tool_calls"] or "[]")
    return (calls[-1].get("name") or calls[-1]["function"]["name"]) if calls and after["state_is_error"] else None


def come_to(lk: Lake) -> list[dict[str, Any]]:
    """`episode_steps`, slowly."""
    faults_found = []
    steps = lk.sql("SELECT * FROM steps ORDER BY episode_id, step_index").to_dicts()
    for episode in sorted({row["episode_id"] for row in steps}):
        mine = [row for row in steps if row["episode_id"] == episode]
        active = [row for row in mine if row["is_active"]]
        calls = [call for row in mine for call in json.loads(row["tool_calls"] or "[]")]
        faults_found.append(
            {
                "episode_id": episode,
                "run_id": mine[0]["run_id"],
                "steps": len(mine),
                "tools_called": sorted({call.get("name") or call["function"]["name"] for call in calls}),
                "tools_failed": sorted(
                    {failed for before, after in pairwise(mine) if (failed := last(before, after)) is not None}
                ),
                "invalid_actions": sum(row["is_action_valid"] is False for row in mine),
                "error_states": sum(row["state_is_error"] is True for row in mine),
                "active_steps": len(active),
                "judged_actions": sum(row["is_action_valid"] is not None for row in active),
                "active_invalid": sum(row["is_action_valid"] is False for row in active),
                "judged_states": sum(row["state_is_error"] is not None for row in active),
                "active_errors": sum(row["state_is_error"] is True for row in active),
            }
        )
    return faults_found


def score(lk: Lake, value: float, fault: type[Exception] | None = None) -> None:
    rows = lk.sql("SELECT run_id, group_id, episode_id FROM episodes")
    named = {"scorer": pl.lit("judge"), "scorer_version": pl.lit("1"), "step_index": pl.lit(None, pl.Int32)}
    with lk.job(kind="score") as job:
        job.write("scores", rows.with_columns(value=pl.lit(value), **named))
        if fault is not None:
            raise fault


def states(lk: Lake) -> Iterator[None]:
    """A lake's life, stopped again and again."""
    for number, task in enumerate(["a", "b1", "b2"]):
        add(lk, task, number)
        yield
    score(lk, 0.2)
    yield
    with pytest.raises(ZeroDivisionError):
        score(lk, 0.9, ZeroDivisionError)
    score(lk, 0.7)
    yield
    lk.retract(lk.sql("SELECT episode_id FROM episodes LIMIT 2")["episode_id"], reason="wrong")
    yield
    for name in ("episodes", "scores", "steps"):
        lk.compact(name)
    yield
    lk.forget(lk.sql("SELECT episode_id FROM episodes LIMIT 1")["episode_id"], reason="asked")
    yield
    add(lk, "c", 3)
    yield


def test_memory_answers_as_files_do(lk: Lake) -> None:
    cache = ColumnCache(lk.snapshot().objects)
    for number, _ in enumerate(states(lk)):
        snapshot = lk.snapshot()
        with snapshot.session(cache=cache) as session, snapshot.session() as plain:
            for question in QUESTIONS if number in (5, 8) else QUESTIONS[number % 4 :: 4]:
                frame, expected = session.query(question), plain.query(question)
                assert frame.schema == expected.schema
                assert frame.sort(pl.all()).equals(expected.sort(pl.all())), question
            assert session.query("SELECT * FROM episode_steps ORDER BY episode_id").to_dicts() == come_to(lk)


OF_GROUPS = (
    "SELECT * EXCLUDE (initial_messages) FROM episodes WHERE {groups}",
    "SELECT task_id, env_return FROM episodes WHERE {groups} AND rollout_index > 0",
    "SELECT rollout_index FROM episodes WHERE episode_id IN (SELECT min(episode_id) FROM episodes WHERE {groups})",
    "SELECT a.*, e.task_id FROM (SELECT * FROM advantages WHERE {groups}) AS a JOIN episodes AS e USING (episode_id)",
    "SELECT * FROM credit_groups WHERE {groups}",
    "SELECT count(*) FROM episodes AS e JOIN episodes AS o USING (group_id) WHERE e.{groups} AND o.rollout_index = 0",
)


def test_few_groups_answer_as_files_do(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ColumnCache(lk.snapshot().objects)
    limits = {2: (view_binding._MOST_ROWS, 2), 7: (4, 12)}
    for number, _ in enumerate(states(lk)):
        if number not in limits:  # many rows; some of them hidden and some gone
            continue
        if number == 2:
            run_credit(lk, GiGPO(step_source="terminal_score"))
        snapshot = lk.snapshot()
        groups = snapshot.sql("SELECT DISTINCT group_id FROM episodes ORDER BY 1")["group_id"].to_list()
        choices = [f"group_id IN ({', '.join(map(str, some))})" for some in (groups[:1], groups[1:], groups[:1], [7])]
        questions = [text.format(groups=among) for among in choices for text in OF_GROUPS]
        some = ", ".join(map(str, snapshot.sql("SELECT episode_id FROM episodes ORDER BY 1 LIMIT 3")["episode_id"]))
        questions.append(f"SELECT task_id, env_return FROM episodes WHERE episode_id IN ({some})")
        with snapshot.session() as plain:
            expected = [plain.query(question).sort(pl.all()) for question in questions]
        for name, most in zip(("_MOST_ROWS", "_MOST_TABLES"), limits[number], strict=True):
            monkeypatch.setattr(view_binding, name, most)
        with snapshot.session(cache=cache) as session:
            for question, answer in zip(questions, expected, strict=True):
                assert session.query(question).sort(pl.all()).equals(answer), question


def test_columns_that_a_query_does_not_read_change_no_answer(lk: Lake) -> None:
    add(lk, "a", 0)
    with lk.snapshot().session(cache=ColumnCache(lk.snapshot().objects)) as session, lk.snapshot().session() as plain:
        for question in (
            "SELECT action FROM steps",
            "SELECT count(*) FROM (SELECT * FROM steps UNION ALL SELECT * FROM steps WHERE state = '1')",
            "SELECT * FROM steps",
            "SELECT count(DISTINCT s) FROM steps AS s",
            "SELECT COLUMNS('state.*') FROM steps WHERE step_index = 1",
            "SELECT a.reward, b.state FROM steps AS a JOIN steps AS b USING (episode_id, step_index)",
            "SELECT state FROM steps ORDER BY action, tool_calls, episode_id, step_index",
        ):
            assert session.query(question).sort(pl.all()).equals(plain.query(question).sort(pl.all())), question


def test_a_younger_state_reads_what_is_new(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    read_columns = column_cache._read_columns

    def counted(name: str, files: Sequence[DataFile], objects: Objects) -> pa.Table:
        read.append(len(files))
        return read_columns(name, files, objects)

    monkeypatch.setattr(column_cache, "_read_columns", counted)
    cache = ColumnCache(lk.snapshot().objects)
    questions = []
    for number in range(12):
        add(lk, "a", number)
        questions.append(lk.snapshot().files("episodes"))
        rows = cache.rows("episodes", questions[-1])
        assert sum(part.num_rows for part in rows) == 3 * (number + 1)
        assert len(rows) <= 9, "parts are put together"
    assert read == [1] * 12
    assert sum(part.num_rows for part in cache.rows("episodes", questions[3])) == 12


def test_an_episode_whose_steps_are_in_a_held_and_in_a_new_file_is_added_up_as_one(lk: Lake) -> None:
    add(lk, "a", 0)
    (whole_file,) = lk.snapshot().files("steps")
    halves = [replace(whole_file, path=f"{half}", rows=9) for half in range(2)]
    cache, files_read = ColumnCache(lk.snapshot().objects), []

    def add_up(files: Sequence[DataFile]) -> pa.Table:
        files_read.append([file.path for file in files])
        return pa.table({"episode_id": [1, 2], "steps": [len(files), len(files)]})

    assert cache.sums("episode_steps", halves[:1], add_up)[0]["steps"].to_pylist() == [1, 1]
    assert [part["steps"].to_pylist() for part in cache.sums("episode_steps", halves, add_up)] == [[2, 2]]
    assert files_read == [["0"], ["1"], ["0", "1"]]


def test_what_is_held_is_bounded(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    with lk.job(kind="collect", run_id="run") as job:
        job.record([rollout("a", number, 0.0) for number in range(20)])
    files = lk.snapshot().files("episodes")
    cache = ColumnCache(lk.snapshot().objects)
    assert cache.rows("steps", lk.snapshot().files("steps")) == ()
    assert sum(part.num_rows for part in cache.rows("episodes", files)) == 20
    monkeypatch.setattr(column_cache, "_MOST_ROWS", 19)
    assert cache.rows("episodes", files) == ()
    jobs = lk.snapshot().files("jobs")
    assert sum(part.num_rows for part in cache.rows("jobs", jobs)) == 2
    monkeypatch.setattr(column_cache, "_MOST_JOBS", 1)
    assert cache.rows("jobs", jobs) == ()


@pytest.mark.parametrize(("empty", "other_tools"), [(5, 0), (300_000, 3)])
def test_episodes_that_call_no_tool_are_read_whatever_their_number(
    tmp_path: Path, empty: int, other_tools: int
) -> None:
    """DuckDB reads a part in batches, and fails at one whose lists are all empty over coded values."""
    rows = pl.DataFrame(
        {"episode_id": range(empty + other_tools), "tools": [[]] * empty + [["a", "b"]] * other_tools}, TOOLS
    )
    file = DataFile("f", empty + other_tools, 1, frozenset())
    held = ColumnCache(Objects(tmp_path)).sums(
        "episode_steps", [file], lambda _: rows.to_arrow(compat_level=pl.CompatLevel.oldest())
    )
    connection = duckdb.connect()
    connection.register("held", held[0])
    actual = connection.sql("SELECT unnest(tools) AS tool, count(*) AS n FROM held GROUP BY 1 ORDER BY 1").fetchall()
    assert actual == ([("a", other_tools), ("b", other_tools)] if other_tools else [])
