"""The shipped views of groups, anchors, rewards and the funnel against a slow, obvious reading of the tables."""

import statistics
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest

from lake import Lake
from testkit import episodes as make
from testkit.copies import empty_lake
from testkit.full_lake import advantages
from testkit.judged_lake import Row, consumed, deviation, drop_unknown, ended, grouped, judged_lake, newest, rows, same


@pytest.fixture(scope="module")
def lk(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Nothing here writes to it."""
    return judged_lake(tmp_path_factory.mktemp("views") / "lake")


# ---------------------------------------------------------------- groups and anchors


def test_groups_say_whether_comparing_siblings_says_anything(lk: Lake) -> None:
    expected = []
    for (group_id,), members in grouped(rows(lk, "episodes"), "group_id").items():
        returns = drop_unknown(row["env_return"] for row in members)
        versions = drop_unknown(row["policy_version"] for row in members)
        planned = members[0]["expected_group_size"]
        expected.append(
            {
                "group_id": group_id,
                "run_id": members[0]["run_id"],
                "task_id": members[0]["task_id"],
                "size": len(members),
                "expected_size": planned,
                "complete": None if planned is None else len(members) >= planned,
                "scored": len(returns),
                "mean_return": statistics.fmean(returns) if returns else None,
                "sd_return": deviation(returns),
                "dead": len(returns) >= 2 and len(set(returns)) == 1,
                "singleton": len(returns) < 2,
                "failed": sum(row["status"] in ("failed", "aborted") for row in members),
                "first_version": min(versions, default=None),
                "last_version": max(versions, default=None),
                "mixed_policies": len(set(versions)) > 1 or len({row["policy"] for row in members}) > 1,
                "mean_steps": statistics.fmean(row["num_steps"] for row in members),
            }
        )
    assert {(row["dead"], row["singleton"]) for row in expected} == {(True, False), (False, True), (False, False)}
    assert any(row["mixed_policies"] for row in expected)
    same(rows(lk, "groups"), expected, "group_id")


def test_anchors_say_what_is_compared_where(lk: Lake) -> None:
    steps = {(row["episode_id"], row["step_index"]): row for row in rows(lk, "steps")}
    expected = []
    anchored = [row for row in rows(lk, "current_advantages") if row["anchor_key"] is not None]
    for (group_id, anchor), group_rows in grouped(anchored, "group_id", "anchor_key").items():
        visited = [steps[row["episode_id"], row["step_index"]] for row in group_rows]
        returns = drop_unknown(row["return_to_go"] for row in group_rows)
        choices = Counter((row["action"], row["tool_calls"]) for row in visited)
        expected.append(
            {
                "group_id": group_id,
                "anchor_key": anchor,
                "size": len(group_rows),
                "episodes": len({row["episode_id"] for row in group_rows}),
                "mean_return_to_go": statistics.fmean(returns) if returns else None,
                "sd_return_to_go": deviation(returns),
                "states": len({row["state_hash"] for row in visited}),
                "actions": len(choices),
                "top_action_share": max(choices.values()) / len(group_rows),
                "error_share": sum(bool(row["state_is_error"]) for row in visited) / len(group_rows),
                "mean_step_index": statistics.fmean(row["step_index"] for row in group_rows),
            }
        )
    assert any(row["actions"] > 1 for row in expected)
    assert {row["size"] for row in expected} >= {1, 2}
    same(rows(lk, "anchors"), expected, "group_id", "anchor_key")


@pytest.mark.parametrize(
    ("arguments", "actions"),
    [(['{"id": "1"}', '{"id": "1"}'], 1), (['{"id": "1"}', '{"id": "2"}'], 2)],
    ids=["the same call", "other arguments"],
)
def test_the_id_of_a_call_makes_no_other_action(tmp_path: Path, arguments: list[str], actions: int) -> None:
    lk = empty_lake(tmp_path / "lake")
    records = [make.episode("t", index, steps=1) for index in range(2)]
    for index, record in enumerate(records):
        call = {"id": f"call_{index}", "type": "function", "function": {"name": "find", "arguments": arguments[index]}}
        record.steps[0] = msgspec.structs.replace(record.steps[0], state="hall", action="", tool_calls=[call])
    lk.append(records, run_id="run")
    with lk.job(kind="credit") as job:
        job.write("advantages", advantages(lk.scan("steps").collect()).with_columns(anchor_key=pl.lit(1)))
    assert lk.sql("SELECT size, actions FROM anchors").rows() == [(2, actions)]


# ---------------------------------------------------------------- hygiene and the funnel


def test_reward_hygiene_says_what_is_wrong_with_the_rewards(lk: Lake) -> None:
    episodes = {row["episode_id"]: row for row in rows(lk, "episodes")}
    score_rows = [(row, "env_return", row["env_return"], None) for row in episodes.values()]
    score_rows += [
        (episodes[row["episode_id"]], "env_reward", row["reward"], None)
        for row in rows(lk, "steps")
        if row["is_active"]
    ]
    for row in newest(rows(lk, "scores"), ended(lk), "series_id", "scorer", "episode_id"):
        source = f"{row['scorer']} of {'episodes' if row['step_index'] is None else 'steps'}"
        score_rows.append((episodes[row["episode_id"]], source, row["value"], row["error"]))
    groups: dict[Any, list[tuple[Row, float | None, str | None]]] = defaultdict(list)
    for episode, source, value, error in score_rows:
        groups[episode["run_id"], episode["task_id"], source].append((episode, value, error))
    expected = []
    for (run_id, task_id, source), entries in groups.items():
        values = drop_unknown(value for _, value, _ in entries)
        of_task = [row for row in episodes.values() if (row["run_id"], row["task_id"]) == (run_id, task_id)]
        expected.append(
            {
                "run_id": run_id,
                "task_id": task_id,
                "source": source,
                "n": len(entries),
                "unscored": len(entries) - len(values),
                "unscored_share": (len(entries) - len(values)) / len(entries),
                "uncovered_episodes": len(of_task) - len({row["episode_id"] for row, _, _ in entries}),
                "errors": sum(error is not None for _, _, error in entries),
                "not_finite": 0,
                "outside_unit": sum(not 0 <= value <= 1 for value in values),
                "lowest": min(values, default=None),
                "highest": max(values, default=None),
                "mean": statistics.fmean(values) if values else None,
                "sd": deviation(values),
                "distinct_values": len(set(values)),
                "constant": len(values) >= 2 and len(set(values)) == 1,
            }
        )
    for column in ("unscored", "errors", "outside_unit", "constant", "uncovered_episodes"):
        assert any(row[column] for row in expected), column
    same(rows(lk, "reward_hygiene"), expected, "run_id", "task_id", "source")


def funnel_of(lk: Lake, run_id: str) -> list[tuple[str, dict[int, int], Counter[str]]]:
    """For each stage: steps of the episodes that reached it, and why the others did not."""
    when = ended(lk)
    episodes = rows(lk, f"episodes WHERE run_id = '{run_id}'")
    steps = grouped(rows(lk, "steps"), "episode_id")
    scores = rows(lk, "current_scores")
    credit = grouped(rows(lk, "current_advantages"), "episode_id")
    selections = grouped(newest(rows(lk, "selections"), when, "episode_id"), "episode_id")
    episodes_seen: dict[int, set[int]] = defaultdict(set)
    for row in consumed(lk):
        episodes_seen[row["episode_id"]] |= set(range(row["first_step"], row["last_step"] + 1))
    stages: dict[str, tuple[dict[int, int], Counter[str]]] = {
        name: ({}, Counter()) for name in ("generated", "scored", "credited", "selected", "trained")
    }
    for episode in episodes:
        mine = episode["episode_id"]
        active = {row["step_index"] for row in steps[mine,] if row["is_active"]}
        stages["generated"][0][mine] = episode["num_steps"]
        stages["generated"][1][episode["status"]] += 1
        values = [row for row in scores if row["episode_id"] == mine and row["value"] is not None]
        rewarded = {row["step_index"] for row in steps[mine,] if row["is_active"] and row["reward"] is not None}
        rewarded |= {row["step_index"] for row in values if row["step_index"] is not None}
        is_scored = episode["env_return"] is not None or any(row["step_index"] is None for row in values)
        reach(stages["scored"], mine, len(rewarded) if rewarded or is_scored else None, "unscored")
        defined = {row["step_index"] for row in credit.get((mine,), []) if row["defined"]}
        reason = "advantage unknown" if (mine,) in credit else "not in the current credit"
        reach(stages["credited"], mine, len(defined) or None, reason)
        selected = selections.get((mine,), [])
        dropped = [row for row in selected if row["step_index"] is None and not row["kept"]]
        lost = {row["step_index"] for row in selected if row["step_index"] is not None and not row["kept"]}
        filtered = dropped[0]["filter"] if dropped else ""
        reach(stages["selected"], mine, None if dropped else len(active) - len(lost), filtered)
        reach(stages["trained"], mine, len(episodes_seen[mine]) or None, "not consumed")
    return [(name, *counts) for name, counts in stages.items()]


def reach(stage: tuple[dict[int, int], Counter[str]], episode_id: int, steps: int | None, reason: str) -> None:
    if steps is None:
        stage[1][reason] += 1
    else:
        stage[0][episode_id] = steps


def test_the_funnel_says_what_became_of_the_rollouts(lk: Lake) -> None:
    for run_id in ("one", "two"):
        stage_rows = rows(lk, f"funnel WHERE run_id = '{run_id}' ORDER BY stage_number")
        total = len(rows(lk, f"episodes WHERE run_id = '{run_id}'"))
        expected = funnel_of(lk, run_id)
        assert [row["stage"] for row in stage_rows] == [name for name, _, _ in expected]
        for row, (_, reached, reasons) in zip(stage_rows, expected, strict=True):
            assert (row["episodes"], row["steps"], row["missing"]) == (
                len(reached),
                sum(reached.values()),
                total - len(reached),
            )
            assert {entry["reason"]: entry["episodes"] for entry in row["reasons"]} == reasons
            counts = [entry["episodes"] for entry in row["reasons"]]
            assert counts == sorted(counts, reverse=True)
    selected = next(row for row in rows(lk, "funnel WHERE stage = 'selected' AND run_id = 'one'"))
    assert selected["reasons"]
