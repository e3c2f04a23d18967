"""Rows of a SELECT or a frame as episodes: the three shapes, their defaults, and what is wrong told with its row."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lake import EpisodeRecord, Lake
from lake.errors import QueryError, UsageError
from lake.formats.base.source import Input
from lake.formats.query import choose_shape, read_rows
from lake.records import Reject
from lake.write.ingest import ingest
from lake.write.sources import Report
from testkit.command_line import Cli, runner
from testkit.copies import empty_lake
from testkit.episodes import episode, line

Row = dict[str, Any]


@pytest.fixture
def lk(tmp_path: Path) -> Lake:
    return empty_lake(tmp_path / "lake")


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Cli:
    monkeypatch.chdir(tmp_path)
    return runner(monkeypatch, capsys)


def records(rows: Sequence[Row], shape: Any = None) -> list[EpisodeRecord]:
    """Episodes of rows, without rejects."""
    items_read = list(read_rows(rows, shape or choose_shape(rows[0]), Input(Path("f"), "run"), "query"))
    assert not [item for item in items_read if isinstance(item, Reject)]
    return [item[1] for item in items_read if isinstance(item, tuple)]


def fault(*rows: Row, shape: Any = None) -> tuple[int, str]:
    """Position and message of the one reject of rows that are one episode."""
    (item,) = read_rows(rows, shape or choose_shape(rows[0]), Input(Path("f"), "run"), "query")
    assert isinstance(item, Reject)
    assert item.reason == "invalid"
    return item.position, item.message


def query(folder: Path, sql: str) -> Path:
    path = folder / "q.sql"
    path.write_text(sql.replace("FOLDER", str(folder)), "utf-8")
    return path


def ingest_twice(lk: Lake, path: Path) -> Report:
    """Ingested, and the second time nothing new."""
    report = ingest(lk, path, format_name="query")
    again = ingest(lk, path, format_name="query")
    assert (again.new, again.present, again.rejected) == (0, report.new + report.present, report.rejected)
    return report


CHAT: list[Row] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "what is there?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at":"it"}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "a door"}]},
    {"role": "assistant", "content": "a door", "reasoning_content": "I saw it"},
    {"role": "user", "content": "thanks"},
]


# ---------------------------------------------------------------- the shapes say the same


CONTENTS = st.text("abc \n'\"{[", max_size=8)
MESSAGES = st.one_of(
    st.builds(lambda text: {"role": "user", "content": text}, CONTENTS),
    st.builds(lambda text: {"role": "tool", "tool_call_id": "c", "content": text}, CONTENTS),
    st.builds(lambda text: {"role": "assistant", "content": text}, CONTENTS),
    st.builds(
        lambda text, name: {
            "role": "assistant",
            "content": text,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": name, "arguments": "{}"}}],
        },
        CONTENTS,
        st.sampled_from(["look", "go"]),
    ),
)
CHATS = st.lists(MESSAGES, min_size=1, max_size=6).map(
    lambda some: [{"role": "user", "content": "begin"}, *some, {"role": "assistant", "content": "end"}]
)


@settings(max_examples=2 * settings().max_examples)
@given(data=st.data(), chats=st.lists(CHATS, min_size=1, max_size=3), as_text=st.booleans())
def test_any_shape_of_the_same_episodes_gives_the_same_steps(
    data: st.DataObject, chats: list[list[Row]], as_text: bool
) -> None:
    rewards = [
        [data.draw(st.none() | st.floats(-1, 1)) if message["role"] == "assistant" else None for message in chat]
        for chat in chats
    ]
    episodes = [
        {
            "task_id": f"t{number}",
            "messages": json.dumps(chat) if as_text else chat,
            "step_rewards": [
                reward for message, reward in zip(chat, rewards_known, strict=True) if message["role"] == "assistant"
            ],
        }
        for number, (chat, rewards_known) in enumerate(zip(chats, rewards, strict=True))
    ]
    rows: list[Row] = [
        {"task_id": f"t{number}", "message_index": index, "reward": reward, **message}
        for number, (chat, rewards_known) in enumerate(zip(chats, rewards, strict=True))
        for index, (message, reward) in enumerate(zip(chat, rewards_known, strict=True))
    ]
    expected = records(episodes)
    steps: list[Row] = [
        {"task_id": record.task_id, "step_index": index, **step_row(step)}
        for record in expected
        for index, step in enumerate(record.steps)
    ]

    def by_task(records_read: list[EpisodeRecord]) -> list[EpisodeRecord]:
        return sorted(records_read, key=lambda record: record.task_id)

    assert by_task(records(data.draw(st.permutations(rows)), "messages")) == expected
    shuffled = by_task(records(data.draw(st.permutations(steps)), "steps"))
    assert [record.steps for record in shuffled] == [record.steps for record in expected]


def step_row(step: Any) -> Row:
    names = ("state", "action", "reward", "tool_calls", "context", "state_role", "state_is_error", "extra")
    return {name: value for name in names if (value := getattr(step, name)) is not None}


@pytest.mark.parametrize("library", ["polars", "lazy", "pandas", "arrow"])
def test_frames_of_all_libraries_say_the_same(lk: Lake, library: str) -> None:
    rows = [
        {"task_id": "t", "step_index": 1, "state": "s1", "action": "b", "reward": None, "seen": [1, 2]},
        {"task_id": "t", "step_index": 0, "state": "s0", "action": "a", "reward": 0.5, "seen": [3]},
    ]
    frame: Any = pl.DataFrame(rows)
    frame = {"polars": frame, "lazy": frame.lazy(), "pandas": pd.DataFrame(rows), "arrow": pa.Table.from_pylist(rows)}[
        library
    ]
    report = lk.ingest_frame(frame, run_id="run")
    assert (report.new, report.rejected) == (1, 0)
    assert lk.sql("SELECT step_index, state, action, reward, extra FROM steps ORDER BY 1").rows() == [
        (0, "s0", "a", 0.5, '{"seen":[3]}'),
        (1, "s1", "b", None, '{"seen":[1,2]}'),
    ]
    assert lk.ingest_frame(frame, run_id="run").present == 1


# ---------------------------------------------------------------- episodes


def test_a_row_of_messages_is_an_episode() -> None:
    (record,) = records(
        [{"messages": CHAT, "step_rewards": [0, None], "env_return": "0.5", "scores": {"judge": 1}, "mood": "calm"}]
    )
    first, last = record.steps
    assert (first.state, first.action, first.reward) == ("what is there?", "", 0.0)
    assert first.tool_calls == CHAT[2]["tool_calls"]
    assert (last.state, last.action, last.reasoning, last.reward) == ("a door", "a door", "I saw it", None)
    assert record.initial_messages == CHAT[:2]
    assert record.final_observation == CHAT[5:]
    assert (record.task_id, record.rollout_index, record.env_return, record.extra) == ("0", 0, 0.5, {"mood": "calm"})
    assert [(score.scorer, score.value) for score in record.scores] == [("judge", 1.0)]


def test_columns_that_are_missing_take_their_defaults() -> None:
    chats = [{"messages": CHAT} for _ in range(2)]
    assert [(r.task_id, r.rollout_index) for r in records(chats)] == [("0", 0), ("1", 0)]
    named = [{"messages": CHAT, "task_id": 7}, {"messages": CHAT, "task_id": 8}, {"messages": CHAT, "task_id": 7}]
    assert [(r.task_id, r.rollout_index) for r in records(named)] == [("7", 0), ("8", 0), ("7", 1)]
    assert [r.task_id for r in records([{"messages": CHAT, "episode": "e"}])] == ["e"]
    retried = [{"messages": CHAT, "task_id": "t", "attempt": attempt} for attempt in (0, 1)]
    assert [(r.rollout_index, r.attempt) for r in records(retried)] == [(0, 0), (0, 1)]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"messages": None}, "row 0: `messages` is NoneType; valid: a list of messages, or JSON text of one"),
        ({"messages": "hello"}, "row 0: `messages` is str; valid: a list of messages"),
        ({"messages": "[{]"}, "row 0: `messages` is no JSON"),
        ({"messages": ["hi"]}, "row 0: Expected `object`, got `str` - at `$.messages[0]`"),
        ({"messages": [{"content": "x"}]}, "row 0: `messages[0].role` is None"),
        ({"messages": [{"role": "user", "content": 7}]}, "row 0: the content of a 'user' message"),
        (
            {"messages": CHAT, "step_rewards": [1]},
            "row 0: `step_rewards` is [1]; valid: a number or null for each of 2",
        ),
        ({"messages": CHAT, "step_rewards": [1, "x"]}, "row 0: a reward is 'x'; valid: a number, or null"),
        ({"messages": CHAT, "env_return": "much"}, "row 0: Expected `float | null`, got `str` - at `$.env_return`"),
        ({"messages": CHAT, "env_return": float("nan")}, "row 0: `env_return` is nan; valid: a finite number"),
        ({"messages": CHAT, "rollout_index": -1}, "row 0: Expected `int` >= 0 - at `$.rollout_index`"),
        ({"messages": CHAT, "scores": {"judge": "good"}}, "row 0: Expected `float | null`, got `str`"),
        ({"messages": CHAT, "scores": "good"}, "row 0: Expected `array`, got `str`"),
        ({"messages": CHAT, "status": "odd"}, "`status` is 'odd'; valid: completed"),
        ({"messages": CHAT[:2]}, "it holds no decision of an agent"),
        ({"messages": CHAT, "task_id": " "}, "`task_id` is ' '"),
        ({"messages": CHAT, "task_id": [1]}, "row 0: Expected `int | str`, got `array` - at `$.task_id`"),
        ({"messages": CHAT, "extra": "text", "more": 1}, "a value is not of the type"),
    ],
)
def test_what_is_wrong_with_an_episode_is_told_with_its_row(row: Row, says: str) -> None:
    position, message = fault(row, shape="episodes")
    assert position == 0
    assert says in message


# ---------------------------------------------------------------- steps and messages


def test_rows_of_an_episode_need_not_stand_together_nor_in_order() -> None:
    rows = [
        {"episode": name, "step_index": index, "action": f"{name}{index}", "env_return": outcome}
        for index, outcome in ((2, None), (0, 1.0), (10, 2.0))
        for name in "ab"
    ]
    first, second = records(rows)
    assert [step.action for step in first.steps] == ["a0", "a2", "a10"]
    assert [step.action for step in second.steps] == ["b0", "b2", "b10"]
    assert first.env_return == 1.0, "of the first row that has it"


def test_numbers_of_an_order_may_be_text_or_floating_point() -> None:
    for convert in (str, float):
        rows = [{"step_index": convert(n), "action": str(n)} for n in (10, 9, 2)]
        (record,) = records(rows)
        assert [step.action for step in record.steps] == ["2", "9", "10"]


def test_without_a_column_for_it_the_natural_key_tells_episodes_apart() -> None:
    different: list[Row] = [
        {"run_id": "other"},
        {"task_id": "other"},
        {"rollout_index": 1},
        {"attempt": 1},
        {"agent_id": "other"},
        {"collection_round": 1},
        {"seed": 1},
    ]
    base = {"run_id": "r", "task_id": "t", "rollout_index": 0, "attempt": 0, "agent_id": "a", "collection_round": 0}
    rows = [{**base, "seed": 0, **columns, "action": "x"} for columns in ({}, *different)]
    items_read = records([*rows, *rows])
    assert len(items_read) == len(rows)
    assert {len(record.steps) for record in items_read} == {2}
    assert [record.agent_id for record in items_read].count("other") == 1
    assert len(records([{"action": "x"}, {"action": "y"}])) == 1


def test_agents_that_share_an_episode_are_those_of_its_steps() -> None:
    rows = [{"episode": 1, "agent_id": name, "action": "x", "policy_version": 3} for name in "pq"]
    (record,) = records(rows)
    assert [step.agent_id for step in record.steps] == ["p", "q"]
    assert (record.agent_id, record.task_id) == (None, "1")
    assert (record.policy_version, record.steps[0].policy_version) == (None, 3)


def test_a_message_a_row_keeps_what_it_has_no_column_for() -> None:
    rows = [{"role": "user", "content": "q", "lang": "en"}, {"role": "assistant", "content": "a", "weight": 2}]
    (record,) = records(rows)
    assert record.initial_messages == [rows[0]]
    assert record.steps[0].extra == {"weight": 2}


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{"action": "x"}, {"action": None}], "row 1: Object missing required field `action`"),
        ([{"action": "x"}, {"action": 7}], "row 1: Expected `str`, got `int` - at `$.action`"),
        ([{"action": "x"}, {"action": "y", "reward": "much"}], "row 1: Expected `float | null`, got `str`"),
        ([{"action": "x"}, {"action": "y", "reward": float("inf")}], "row 1: `reward` is inf; valid: a finite number"),
        ([{"action": "x"}, {"action": "y", "tool_calls": "[{"}], "row 1: `tool_calls` is no JSON"),
        ([{"action": "x"}, {"action": "y", "env_return": "z"}], "row 1: Expected `float | null`, got `str`"),
        ([{"action": "x", "step_index": 0}, {"action": "y"}], "row 1: `step_index` is None; valid: a whole number"),
        ([{"action": "x"}, {"action": "y", "step_index": 1.5}], "row 0: `step_index` is None"),
        (
            [{"action": "x", "step_index": 0}, {"action": "y", "step_index": "zero"}],
            "row 1: `step_index` is 'zero'; valid: a whole number",
        ),
        (
            [{"action": name, "step_index": 3} for name in "xy"],
            "row 1: `step_index` is 3, as in row 0; valid: each number once",
        ),
        ([{"role": "assistant"}, {"role": None}], "row 1: `message.role` is None"),
        ([{"role": "user"}, {"role": "assistant", "reward": []}], "row 1: a reward is []; valid: a number"),
        ([{"role": "user"}, {"role": "assistant", "tool_calls": "x"}], "row 1: `message.tool_calls` is str"),
        ([{"role": "assistant"}, {"role": "user", "scores": [{"value": 1}]}], "row 1: Object missing required field"),
    ],
)
def test_what_is_wrong_with_one_of_several_rows_is_told_with_that_row(rows: list[Row], says: str) -> None:
    position, message = fault(*rows)
    assert position == 0, "where the episode begins"
    assert says in message


def test_one_wrong_episode_does_not_take_others_with_it(lk: Lake) -> None:
    rows = [
        {"episode": n % 3, "step_index": n // 3, "action": "x", "reward": "bad" if n == 4 else "1", "stat": n}
        for n in range(9)
    ]
    report = lk.ingest_frame(pl.DataFrame(rows))
    assert str(report.columns).endswith(": stat (state?)")
    assert (report.records, report.new, report.rejected) == (3, 2, 1)
    (reject,) = lk.scan("rejects").select("position", "message", "raw").collect().rows()
    assert reject[0] == 1
    assert reject[1].startswith("row 4: Expected `float | null`")
    assert [row["step_index"] for row in json.loads(reject[2])] == [0, 1, 2]


# ---------------------------------------------------------------- queries


def test_a_select_over_json_sees_texts_as_they_are(lk: Lake, tmp_path: Path) -> None:
    """Contents that are now a text and now a list of parts have the type JSON: Arrow would show texts in quotes."""
    lines = [{"id": "a", "chat": CHAT}, {"id": "b", "chat": [*CHAT, {"role": "assistant", "content": '"quoted"'}]}]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in lines))
    report = ingest_twice(
        lk, query(tmp_path, "SELECT id AS task_id, chat AS messages FROM read_json('FOLDER/chats.jsonl')")
    )
    assert (report.new, report.rejected) == (2, 0)
    rows = lk.sql("SELECT task_id, state, action FROM steps JOIN episodes USING (episode_id) ORDER BY ALL").rows()
    assert rows == [
        ("a", "a door", "a door"),
        ("a", "what is there?", ""),
        ("b", "a door", "a door"),
        ("b", "thanks", '"quoted"'),
        ("b", "what is there?", ""),
    ]
    assert json.loads(lk.sql("SELECT initial_messages FROM episodes LIMIT 1").item()) == CHAT[:2]


def test_a_select_over_csv_and_parquet(lk: Lake, tmp_path: Path) -> None:
    (tmp_path / "steps.csv").write_text("task,n,did,got\nt1,1,left,0.5\nt1,0,right,\n")
    pl.DataFrame({"task": ["t1"], "outcome": [1.0]}).write_parquet(tmp_path / "outcomes.parquet")
    sql = """
        -- steps beside their outcomes
        SELECT task AS task_id, n AS step_index, did AS action, got AS reward, outcome AS env_return
        FROM read_csv('FOLDER/steps.csv') JOIN read_parquet('FOLDER/outcomes.parquet') USING (task); -- done
        """
    assert ingest_twice(lk, query(tmp_path, sql)).steps == 2
    rows = lk.sql("SELECT action, reward, env_return FROM steps s JOIN episodes USING (episode_id) ORDER BY step_index")
    assert rows.rows() == [("right", None, 1.0), ("left", 0.5, 1.0)]


def test_values_of_all_types_are_kept_as_json_has_them(lk: Lake, tmp_path: Path) -> None:
    sql = r"""
        SELECT 'x' AS action, 7::HUGEINT AS task_id, 1.50::DECIMAL(4, 2) AS price, MAP {'a': 1} AS counts,
            '\xAA'::BLOB AS bytes, DATE '2024-01-02' AS day, TIMESTAMP '2024-01-02 10:00:00' AS started_at,
            INTERVAL 1 DAY AS lasts, [[1, 2], [3]] AS nested, {'in': [{'deep': 1.25::DECIMAL(4, 2)}]} AS tree,
            '"text"'::JSON AS state, '{"k": [1, "a"]}'::JSON AS document, 'a'::ENUM('a', 'b') AS choice,
            union_value(n := 3) AS either, '101'::BIT AS bits, NULL AS nothing
        """
    assert ingest_twice(lk, query(tmp_path, sql)).new == 1
    step = lk.sql("SELECT * FROM steps").to_dicts()[0]
    assert step["state"] == "text"
    assert step["started_at"].isoformat() == "2024-01-02T10:00:00+00:00"
    assert json.loads(step["extra"]) == {
        "price": 1.5,
        "counts": {"a": 1},
        "bytes": "\\xAA",
        "day": "2024-01-02",
        "lasts": "1 day",
        "nested": [[1, 2], [3]],
        "tree": {"in": [{"deep": 1.25}]},
        "document": {"k": [1, "a"]},
        "choice": "a",
        "either": {"n": 3},
        "bits": "101",
    }
    assert lk.sql("SELECT task_id FROM episodes").item() == "7"


def test_numbers_that_are_none_are_refused_wherever_they_stand(lk: Lake, tmp_path: Path) -> None:
    sql = """
        SELECT [{'role': 'assistant', 'content': 'a'}] AS messages, [r] AS step_rewards
        FROM (VALUES ('nan'::DOUBLE), ('inf'::DOUBLE), (0.5)) t(r)
        """
    report = ingest_twice(lk, query(tmp_path, sql))
    assert (report.new, report.rejected) == (1, 2)
    messages = lk.sql("SELECT message FROM rejects ORDER BY position")["message"].to_list()
    assert len(messages) == 2
    for value, message in zip(("nan", "inf"), messages, strict=True):
        assert message.startswith(f"steps[0]: `reward` is {value}; valid: a finite number")


def test_rows_without_an_order_are_numbered_the_same_again(lk: Lake, tmp_path: Path) -> None:
    pl.DataFrame({"k": range(50_000)}).write_parquet(tmp_path / "k.parquet")
    sql = """
        SELECT 'one' AS task_id, [{'role': 'assistant', 'content': 'group ' || (k % 997)}] AS messages
        FROM read_parquet('FOLDER/k.parquet') GROUP BY k % 997
        """
    report = ingest_twice(lk, query(tmp_path, sql))
    assert (report.new, report.rejected) == (997, 0)
    assert lk.sql("SELECT max(rollout_index) FROM episodes").item() == 996


def test_a_name_is_no_variable_of_ours(tmp_path: Path, lk: Lake) -> None:
    for name in ("rows", "connection", "file", "batch"):
        with pytest.raises(QueryError, match=f"Table with name {name} does not exist"):
            ingest(lk, query(tmp_path, f"FROM {name}"), format_name="query")


@pytest.mark.parametrize(
    ("sql", "says"),
    [
        ("", "q.sql is empty"),
        ("-- nothing", "q.sql holds 0 statements; --query takes a file with one SELECT"),
        ("SELECT 1; SELECT 2", "q.sql holds 2 statements"),
        ("CREATE TABLE t AS SELECT 'x' AS action", "q.sql holds no SELECT"),
        ("COPY (SELECT 1) TO 'stolen.csv'", "q.sql holds no SELECT"),
        (
            "WITH a AS (COPY (SELECT 1) TO 'stolen.csv') SELECT 'x' AS action",
            "q.sql holds no SELECT alone: its WITH writes",
        ),
        ("PIVOT (SELECT 'x' AS action) ON action USING count(*)", "q.sql holds several statements in one; of a PIVOT"),
        ("SELECT FROM", "q.sql cannot be run: Parser Error: syntax error"),
        ("SELECT 'x' AS action FROM read_csv('absent.csv')", "q.sql cannot be run: IO Error: No files found"),
        ("SELECT 'x' AS action, 1 AS a, 2 AS a", "q.sql gives the column `a` twice; name each of them with AS"),
        ("SELECT 1 AS one", "rows of one of three shapes are needed (episodes: a column `messages`; messages:"),
    ],
)
def test_a_query_that_cannot_be_run_is_one_line_and_makes_no_lake(
    tmp_path: Path, cli: Cli, sql: str, says: str
) -> None:
    query(tmp_path, sql)
    assert says in cli("ingest", "--query", "q.sql", "--lake", "new").fault
    assert {path.name for path in tmp_path.iterdir()} == {"q.sql"}


def test_a_query_that_fails_in_the_middle_is_one_line(tmp_path: Path, cli: Cli) -> None:
    did = "(CASE WHEN i = 9000 THEN 'no' ELSE '1' END)::INT::VARCHAR"
    query(tmp_path, f"SELECT i AS task_id, {did} AS action FROM range(10000) t(i)")
    fault = cli("ingest", "--query", "q.sql", "--lake", "new").fault
    assert "q.sql: Conversion Error: Could not convert string 'no' to INT32" in fault


def test_a_query_that_is_no_text_is_refused(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "q.sql").write_bytes(b"SELECT '\xff' AS action")
    assert "q.sql: 'utf-8' codec can't decode" in cli("ingest", "--query", "q.sql", "--lake", "new").fault
    (tmp_path / "q.sql").write_bytes(b"\xef\xbb\xbfSELECT 'x' AS action")
    assert cli("ingest", "--query", "q.sql", "--lake", "new").code == 0, "Windows begins it with a mark"


def test_a_query_is_named_not_recognised(tmp_path: Path, cli: Cli) -> None:
    query(tmp_path, "SELECT 'x' AS action")
    assert "q.sql has no known format" in cli("ingest", "q.sql", "--lake", "new").fault
    (tmp_path / "ours.jsonl").write_bytes(line(episode("t")))
    says = "ours.jsonl looks like jsonl; --query takes a file of SQL, leave it out"
    assert says in cli("ingest", "--query", "ours.jsonl", "--lake", "new").fault
    assert "q.sql: 1 episode, 1 step" in cli("ingest", "--query", "q.sql", "--lake", "new").out
    assert "q.sql (query): 1 episode, 1 step" in cli("ingest", "--query", "q.sql", "--dry-run", "--lake", "x").out


# ---------------------------------------------------------------- frames


def test_a_frame_of_pandas_may_hold_what_arrow_cannot(lk: Lake) -> None:
    frame = pd.DataFrame({"messages": [CHAT, CHAT[:3], None], "mixed": [1, "a", float("nan")]})
    report = lk.ingest_frame(frame)
    assert (report.new, report.rejected) == (2, 1)
    assert lk.sql("SELECT message FROM rejects").item().startswith("row 2: `messages` is NoneType")
    assert sorted(lk.sql("SELECT extra FROM episodes")["extra"]) == ['{"mixed":"1"}', '{"mixed":"a"}']


def test_what_pandas_calls_missing_is_not_zero_and_not_a_number(lk: Lake) -> None:
    frame = pd.DataFrame({"task_id": [7, 7, None], "action": ["a", "b", "c"], "reward": [0.0, float("nan"), None]})
    assert lk.ingest_frame(frame).rejected == 0
    assert lk.sql("SELECT task_id, reward FROM steps JOIN episodes USING (episode_id) ORDER BY ALL").rows() == [
        ("2", None),
        ("7", 0.0),
        ("7", None),
    ]


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        ([{"action": "x"}], "list is not a frame; valid: a frame of Polars or pandas, or an Arrow table"),
        (pl.Series(["x"]), "Series is not a frame"),
        (pl.DataFrame({"done": ["x"]}), "rows of one of three shapes are needed"),
        (pd.DataFrame([["x", "y"]], columns=["action", "action"]), "the frame has the column 'action' twice"),
        (pd.DataFrame({"action": ["x"], "o": [object()]}), "the frame's row 0: `o` is object"),
        (
            pl.DataFrame({"action": ["x"], "o": pl.Series([object()], dtype=pl.Object)}),
            "the frame's column `o` is Object: cannot",
        ),
        (
            pl.DataFrame({"action": ["x"], "o": pl.Series([1], dtype=pl.Int128)}),
            "the frame's column `o` is Int128: Int",
        ),
        (pa.table({"action": ["x"], "o": pa.array([1], pa.decimal256(60, 2))}), "the frame's column `o` is decimal256"),
        (
            pa.table({"action": ["x"], "o": pa.array([{}], pa.struct([]))}),
            "the frame's column `o` is Struct({}): Unable",
        ),
        (pd.DataFrame({"action": ["\ud800"]}, dtype=object), "the frame's row 0: `action` is str: 'utf-8' codec can't"),
        (pl.scan_csv("absent.csv"), "the frame cannot be read: No such file"),
        (pl.LazyFrame({"action": ["x"]}).select("absent"), "the frame cannot be read: unable to find column"),
    ],
)
def test_what_is_no_frame_of_rollouts_is_refused(lk: Lake, frame: Any, says: str) -> None:
    with pytest.raises(UsageError) as refused:
        lk.ingest_frame(frame)
    assert says in str(refused.value)


def test_cells_of_pandas_that_are_numpys_are_numbers(lk: Lake) -> None:
    frame = pd.DataFrame({"action": ["a", "b"], "reward": pd.arrays.SparseArray([0.0, 0.5]), "o": [np.float64(1), "x"]})
    assert lk.ingest_frame(frame).new == 1
    assert lk.sql("SELECT reward, extra FROM steps ORDER BY 1").rows() == [(0.0, '{"o":"1.0"}'), (0.5, '{"o":"x"}')]


def test_a_cell_that_python_cannot_hold_costs_its_episode_alone(lk: Lake) -> None:
    far = pa.array([0, 1, 2**60], pa.timestamp("ms"))
    frame = pa.table({"task_id": ["a", "b", "b"], "action": ["x"] * 3, "started_at": far})
    report = lk.ingest_frame(frame)
    assert (report.new, report.rejected) == (1, 1)
    assert report.first_fault is not None
    assert report.first_fault[1:2] == (1,)
    assert report.first_fault[2].startswith("row 2: `started_at` is a timestamp[ms] that cannot be read")


def test_a_shape_can_be_named(lk: Lake) -> None:
    frame = pl.DataFrame({"role": ["assistant"], "content": ["said"], "action": ["did"]})
    assert lk.ingest_frame(frame, run_id="told").new == 1
    assert lk.ingest_frame(frame, shape="steps", run_id="named").new == 1
    assert lk.sql("SELECT run_id, action FROM steps ORDER BY 1").rows() == [("named", "did"), ("told", "said")]
    with pytest.raises(UsageError, match="rows of the shape 'chats' are needed"):
        lk.ingest_frame(frame, shape="chats")
    with pytest.raises(UsageError, match="run's name is empty"):
        lk.ingest_frame(frame, run_id=" ")
