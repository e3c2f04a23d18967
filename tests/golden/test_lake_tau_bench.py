"""The real tau-bench file: gpt-4o on 50 airline tasks, four trials each, and what was counted in it by hand."""

import json
from pathlib import Path

import polars as pl
import pytest

import lake
from lake import Lake
from lake.write.ingest import ingest
from lake.write.sources import Report
from testkit.episodes import assert_same, assert_whole, contents
from testkit.shared import shared_data

EPISODES, STEPS = 200, 2454


@pytest.fixture(scope="module")
def file() -> Path:
    return shared_data("tau_bench", "gpt-4o-airline.json")


@pytest.fixture(scope="module")
def lk(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """The file, ingested once; nothing here writes to it."""
    lk = lake.open(tmp_path_factory.mktemp("tau") / "lake", create=True)
    ingest(lk, file)
    return lk


def counts(report: Report) -> tuple[int, int, int, int]:
    assert report.records == report.new + report.present + report.rejected
    return report.new, report.steps, report.present, report.rejected


def test_it_is_taken_once_and_once_more_under_another_run(file: Path, tmp_path: Path) -> None:
    lk = lake.open(tmp_path / "lake", create=True)
    assert counts(ingest(lk, file)) == (EPISODES, STEPS, 0, 0)
    once = contents(lk.snapshot())
    assert counts(ingest(lk, file)) == (0, 0, EPISODES, 0)
    assert counts(ingest(lake.open(lk.uri), file, batch_size=17)) == (0, 0, EPISODES, 0)
    assert_same(contents(lk.snapshot()), once)
    assert counts(ingest(lk, file, run_id="again")) == (EPISODES, STEPS, 0, 0)
    assert assert_whole(lk.snapshot()) == 2 * EPISODES
    assert lk.sql("SELECT DISTINCT run_id FROM episodes ORDER BY 1")["run_id"].to_list() == ["again", "gpt-4o-airline"]
    assert lk.sql("SELECT count(DISTINCT group_id) AS n FROM episodes").item() == 100


@pytest.mark.parametrize("batch_size", [1, 64])
def test_the_batch_size_changes_nothing(lk: Lake, file: Path, tmp_path: Path, batch_size: int) -> None:
    part = tmp_path / file.name
    rows = json.loads(file.read_text("utf-8"))[: 40 if batch_size == 1 else 200]
    part.write_text(json.dumps(rows), "utf-8")
    reopened = lake.open(tmp_path / "lake", create=True)
    assert counts(ingest(reopened, part, batch_size=batch_size))[0] == len(rows)
    again, expected = contents(reopened.snapshot()), contents(lk.snapshot())
    mine = again["episodes"].select("episode_id")
    assert_same(again, {name: expected[name].join(mine, on="episode_id", how="semi") for name in ("episodes", "steps")})


def test_groups_are_tasks_with_four_trials(lk: Lake) -> None:
    groups = lk.sql(
        "SELECT group_id, count(*) AS n, count(DISTINCT task_id) AS tasks, list_sort(list(rollout_index)) AS trials,"
        " sum(env_return) AS won FROM episodes GROUP BY group_id"
    )
    assert groups.height == 50
    assert set(groups["n"]) == {4}
    assert set(groups["tasks"]) == {1}
    assert groups["trials"].to_list() == [[0, 1, 2, 3]] * 50
    assert groups.group_by("won").len().sort("won").rows() == [(0, 14), (1, 12), (2, 10), (3, 4), (4, 10)]
    assert groups.filter(pl.col("won").is_between(1, 3)).height == 26, "live groups: their outcomes differ"


def test_returns_ends_and_states(lk: Lake) -> None:
    returns = lk.sql("SELECT env_return, count(*) AS n FROM episodes GROUP BY 1 ORDER BY 1")
    assert returns.rows() == [(0.0, 116), (1.0, 84)]
    ends = lk.sql("SELECT status, terminated, stop_reason, count(*) AS n FROM episodes GROUP BY ALL ORDER BY n")
    assert ends.rows() == [
        ("truncated", False, None, 5),
        ("completed", True, "transfer_to_human_agents", 48),
        ("completed", True, "user", 147),
    ]
    assert lk.sql("SELECT max(num_steps) AS n FROM episodes WHERE status = 'truncated'").item() == 30
    assert lk.sql("SELECT count(*) AS n FROM steps WHERE reward IS NOT NULL").item() == 0
    errors = lk.sql("SELECT count(*) AS n, count(DISTINCT state_role) AS roles FROM steps WHERE state_is_error")
    assert errors.row(0) == (72, 1), "of 73 in the file one is the last word of an episode"


def test_anchors_of_the_exact_text(lk: Lake) -> None:
    """Steps of one group in the same state: 37 % of them share theirs with another trial, mostly tool results."""
    anchors = lk.sql(
        "SELECT group_id, state_hash, any_value(state_role) AS role, count(*) AS steps,"
        " count(DISTINCT episode_id) AS episodes, count(DISTINCT state) AS texts"
        " FROM steps GROUP BY group_id, state_hash"
    )
    assert set(anchors["texts"]) == {1}, "one hash, one text"
    assert anchors.height == 1798
    shared = anchors.filter(pl.col("episodes") >= 2)
    assert shared.height == 276
    assert shared.group_by("role").len().sort("role").rows() == [("tool", 259), ("user", 17)]
    assert round(shared["steps"].sum() / STEPS, 2) == 0.37


def test_nothing_of_the_chats_is_lost(lk: Lake, file: Path) -> None:
    """Initial messages, each step's context and answer, and the final observation, put together, are the file."""
    rows = json.loads(file.read_text("utf-8"))
    episodes = {(row["task_id"], row["rollout_index"]): row for row in lk.scan("episodes").collect().to_dicts()}
    steps = lk.scan("steps").sort("episode_id", "step_index").collect().partition_by("episode_id", as_dict=True)
    for row in rows:
        stored = episodes[str(row["task_id"]), row["trial"]]
        chat = json.loads(stored["initial_messages"])
        for step in steps[stored["episode_id"],].to_dicts():
            chat += json.loads(step["context"])
            calls = step["tool_calls"]
            chat.append({"role": "assistant", "content": step["action"], "tool_calls": calls and json.loads(calls)})
        chat += json.loads(stored["final_observation"])
        assert [without_nulls(message) for message in chat] == [without_nulls(message) for message in row["traj"]]
        assert json.loads(stored["extra"])["info"] == row["info"]


def without_nulls(message: dict[str, object]) -> dict[str, object]:
    """A message without its empty and its null fields, which say the same."""
    return {key: value for key, value in message.items() if value not in (None, "")}
