"""Rows of `credit_groups` by hand: what is NULL, what is 0, and tool calls without the ids of their calls."""

import json
from typing import Any

import duckdb
import polars as pl
import pytest

from lake.ids import text_hash
from lake.read.query_views import read_macros
from lake.tables import TABLES
from pipelines.credit import GiGPO
from pipelines.credit.health import JOB_COLUMNS, SCHEMA, diagnose_groups, drop_call_ids
from testkit.credit_strategies import frame

Row = dict[str, Any]
EMPTY = text_hash("")
PURITY = ("last_actions_mean", "one_action_anchors", "error_anchors", "error_steps", "empty_steps")


def advantages(*walks: str, scores: list[float | None] | None = None, **options: Any) -> pl.LazyFrame:
    """Advantages of one group; an episode per word, a state per letter."""
    outcomes = scores or [1.0, 0.0, 0.0]
    rows = [
        {"episode_id": e, "group_id": 7, "step_index": n, "state": letter, "episode_score": outcomes[e]}
        for e, walk in enumerate(walks)
        for n, letter in enumerate(walk)
    ]
    config = GiGPO(step_source="terminal_score", **options)
    return config.advantages(frame(rows).drop("state_hash").lazy()).collect().lazy()


def episodes(*rows: Row) -> pl.LazyFrame:
    usual = {"group_id": 7, "run_id": "r", "policy_version": 1, "episode_score": 1.0}
    return pl.LazyFrame([{"episode_id": n} | usual | row for n, row in enumerate(rows)], infer_schema_length=None)


def steps(*walks: list[tuple[Any, ...]]) -> pl.LazyFrame:
    """(action, tool_calls, state_is_error) of every step of every episode, whose states are empty."""
    rows = [
        {"episode_id": e, "step_index": n, "action": a, "tool_calls": t, "state_is_error": x, "state_hash": EMPTY}
        for e, walk in enumerate(walks)
        for n, (a, t, x) in enumerate(walk)
    ]
    schema = {"episode_id": pl.Int64, "step_index": pl.Int32, "action": pl.String, "tool_calls": pl.String}
    return pl.LazyFrame(rows, schema=schema | {"state_is_error": pl.Boolean, "state_hash": pl.Int64})


def only_row(lazy: pl.LazyFrame) -> Row:
    groups = lazy.collect()
    assert groups.height == 1
    return groups.row(0, named=True)


def test_the_columns_are_those_of_the_table() -> None:
    table = TABLES["credit_groups"]
    assert [name for name in table.names if name not in JOB_COLUMNS] == list(SCHEMA)
    groups = diagnose_groups(advantages("ab", "ab"), episodes({}, {})).collect()
    assert groups.schema == SCHEMA
    required = [column.name for column in table.columns if column.required and column.name in SCHEMA]
    assert groups.select(required).null_count().sum_horizontal().item() == 0


def test_a_group_by_hand() -> None:
    """Two scored siblings meet in `a`; `b` and `c` are each seen by one; the first comes back to `a`."""
    rows = advantages("aba", "ac", scores=[1.0, 0.0], gamma=1.0)
    row = only_row(diagnose_groups(rows, episodes({"episode_score": 1.0}, {"episode_score": 0.0})))
    assert {name: row[name] for name in ("anchors", "singleton_steps", "shared_steps", "anchor_episodes_mean")} == {
        "anchors": 3,
        "singleton_steps": 2,
        "shared_steps": 3,
        "anchor_episodes_mean": 2.0,
    }
    assert (row["episodes"], row["scored"], row["steps"], row["defined_steps"]) == (2, 2, 5, 5)
    assert (row["score_mean"], row["score_min"], row["score_max"]) == (0.5, 0.0, 1.0)
    assert row["score_std"] == pytest.approx(0.5**0.5)
    assert row["is_dead"] is False
    assert row["findings"] == ""


def test_a_group_of_ties_is_dead() -> None:
    row = only_row(diagnose_groups(advantages("a", "a", scores=[1.0, 1.0]), episodes({}, {})))
    assert (row["is_dead"], row["score_std"], row["advantage_max"]) == (True, 0.0, 0.0)


def test_unscored_episodes_are_counted_and_have_no_part_in_the_figures() -> None:
    episode_rows = episodes({"policy_version": 1}, {"episode_score": None, "policy_version": 2}, {"episode_score": 0.0})
    row = only_row(diagnose_groups(advantages("a", "a", "a", scores=[1.0, None, 0.0]), episode_rows))
    assert (row["episodes"], row["scored"], row["policy_versions"]) == (3, 2, 1)
    assert row["score_mean"] == 0.5
    assert row["defined_steps"] == 2


def test_what_was_not_read_is_null_and_what_was_not_found_is_0() -> None:
    rows, episode_rows = advantages("ab", "cd"), episodes({}, {})
    unread = only_row(diagnose_groups(rows, episode_rows))
    assert [unread[name] for name in PURITY] == [None] * 5
    quiet = [("go", None, False)] * 2
    read = only_row(diagnose_groups(rows, episode_rows, steps(quiet, quiet)))
    assert [read[name] for name in PURITY] == [None, 0, 0, 0, 0], "no shared anchor: nothing to take a mean of"
    marks_only = steps(quiet, quiet).drop("action", "tool_calls")
    assert [only_row(diagnose_groups(rows, episode_rows, marks_only))[name] for name in PURITY] == [None, None, 0, 0, 0]
    actions_only = steps(quiet, quiet).drop("tool_calls", "state_is_error", "state_hash")
    row = only_row(diagnose_groups(rows, episode_rows, actions_only))
    assert [row[name] for name in PURITY] == [None, 0, None, None, None]


def test_purity_by_hand() -> None:
    """`x` is an error text reached by two actions where both act alike; `a` starts both and they part there."""
    walks = steps(
        [("left", None, False), ("again", None, True)],
        [("right", None, False), ("again", None, True)],
    )
    row = only_row(diagnose_groups(advantages("ax", "ax"), episodes({}, {}), walks))
    assert row["one_action_anchors"] == 1
    assert row["last_actions_mean"] == (0 + 2) / 2
    assert (row["error_anchors"], row["error_steps"], row["empty_steps"]) == (1, 2, 2)


def test_the_same_call_with_another_id_is_the_same_action() -> None:
    first = '[{"id":"call_a","name":"f","arguments":{"id":"1"}}]'
    second = first.replace("call_a", "call_b")
    alike = steps([("", first, False)], [("", second, False)])
    row = only_row(diagnose_groups(advantages("a", "a"), episodes({}, {}), alike))
    assert row["one_action_anchors"] == 1
    other_steps = steps([("", first, False)], [("", second.replace('"id":"1"', '"id":"2"'), False)])
    row = only_row(diagnose_groups(advantages("a", "a"), episodes({}, {}), other_steps))
    assert row["one_action_anchors"] == 0, "the id of an argument is not the id of a call"


def test_call_ids_are_taken_out_and_nothing_else() -> None:
    calls = pl.Series(
        [
            '[{"id":"x","name":"f"},{"name":"g","id":"y"}]',
            '[{"name":"f"}]',
            '[{"name":"f","arguments":"{\\"id\\": 3}"}]',
            '{"id": 1}',
            'not json "id"',
            '["id"]',
            '[{"call_id":"c","name":"f","arguments":{"id":"x","order":[{"id":1}]}}]',
            None,
        ]
    )
    assert drop_call_ids(calls).to_list() == [
        '[{"name":"f"},{"name":"g"}]',
        '[{"name":"f"}]',
        '[{"name":"f","arguments":"{\\"id\\": 3}"}]',
        '{"id": 1}',
        'not json "id"',
        '["id"]',
        '[{"name":"f","arguments":{"id":"x","order":[{"id":1}]}}]',
        None,
    ]
    with duckdb.connect() as connection:
        for script in read_macros():
            connection.execute(script)
        query = "SELECT without_call_ids(calls) FROM (SELECT unnest(?::VARCHAR[]) AS calls)"
        tool_names = [row[0] for row in connection.execute(query, [calls.to_list()]).fetchall()]
    assert [text and _read(text) for text in tool_names] == [text and _read(text) for text in drop_call_ids(calls)]


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def test_a_group_of_several_runs_has_no_run() -> None:
    row = only_row(diagnose_groups(advantages("a", "a"), episodes({"run_id": "r"}, {"run_id": "s"})))
    assert row["run_id"] is None
    bare = episodes({}, {}).drop("run_id", "policy_version")
    row = only_row(diagnose_groups(advantages("a", "a"), bare))
    assert (row["run_id"], row["policy_versions"]) == (None, 0)


def test_a_group_without_active_steps_has_a_row() -> None:
    episode_rows = episodes({}, {}, {"group_id": 9})
    groups = diagnose_groups(
        advantages("a", "a"), episode_rows, findings=pl.DataFrame({"group_id": [9], "findings": ["x"]})
    )
    last = groups.collect().row(1, named=True)
    assert (last["group_id"], last["episodes"], last["scored"], last["steps"], last["anchors"]) == (9, 1, 0, 0, 0)
    assert (last["is_dead"], last["score_mean"], last["advantage_mean"], last["findings"]) == (False, None, None, "x")


def test_no_groups_give_no_rows() -> None:
    none = diagnose_groups(advantages(), episodes({}).filter(pl.lit(value=False))).collect()
    assert none.schema == SCHEMA
    assert none.is_empty()


def test_signs_that_disagree_are_counted() -> None:
    """The winner took the longer way from `a`: below average there, above average as a whole."""
    rows = advantages("ab", "a", scores=[1.0, 0.9], gamma=0.5)
    row = only_row(diagnose_groups(rows, episodes({}, {})))
    signs = rows.collect().select("a_episode", "a_step").rows()
    assert [a * b < 0 for a, b in signs] == [True, False, True]
    assert row["sign_disagreements"] == 2
