"""Every shipped view against a slow, obvious reading of the tables in Python."""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import lake
from lake import Lake
from lake.query_views import views
from testkit.lakes import add_credit, add_training, rollout, siblings

Row = dict[str, Any]
AT = datetime(2026, 1, 1, tzinfo=UTC)


def score_rows(steps: list[Row], scorer: str, values: Iterable[float | None], **fields: Any) -> pl.DataFrame:
    """Rows for `scores`: of whole episodes where `steps` are episodes."""
    rows = [
        {
            "episode_id": row["episode_id"],
            "step_index": row.get("step_index"),
            "group_id": row["group_id"],
            "run_id": row["run_id"],
            "scorer": scorer,
            "scorer_version": "1",
            "value": value,
            "error": "no judge" if value is None else None,
            "reason": fields.get("reason"),
        }
        for row, value in zip(steps, values, strict=True)
    ]
    return pl.DataFrame(rows, infer_schema_length=None)


def selection_rows(episodes: list[Row], dropped: dict[int, str], steps: Iterable[tuple[int, int]] = ()) -> pl.DataFrame:
    """Rows for `selections`: episodes by position that a filter drops, and single steps."""
    said: list[Row] = [
        row_keys(row) | {"step_index": None, "kept": n not in dropped, "filter": dropped.get(n)}
        for n, row in enumerate(episodes)
    ]
    said += [row_keys(episodes[n]) | {"step_index": step, "kept": False, "filter": "long"} for n, step in steps]
    return pl.DataFrame(said, infer_schema_length=None).with_columns(selection=pl.lit("s"))


def row_keys(row: Row) -> Row:
    return {name: row[name] for name in ("episode_id", "group_id", "run_id")}


def note(
    row: Row, author: str, label: str, value: float | None, text: str | None, second: int, step: int | None
) -> Row:
    keys = {key: row[key] for key in ("episode_id", "group_id", "run_id")}
    return keys | {
        "step_index": step,
        "annotation_id": second,
        "author": author,
        "label": label,
        "value": value,
        "text": text,
        "at": AT + timedelta(seconds=second),
    }


@pytest.fixture(scope="module")
def lk(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Two runs, dead, mixed and unscored groups, two credit series one of them computed twice, scores given twice,
    two selections, labels written over and taken back, a training that was resumed, a retracted episode."""
    lk = lake.open(tmp_path_factory.mktemp("views") / "lake", create=True)
    with lk.job(kind="collect", run_id="one") as job:
        job.record(
            [
                *siblings("mixed", [1.0, 0.0, 0.0, 1.0], expected_group_size=4, policy_version=1),
                *siblings("dead", [0.5, 0.5, 0.5], expected_group_size=4),
                *siblings("alone", [2.0]),
                rollout("mixed", 4, None, status="failed", error="gone", expected_group_size=4, policy_version=2),
            ]
        )
    with lk.job(kind="collect", run_id="two") as job:
        job.record(siblings("mixed", [-1.0, None, 3.0], num_steps=4))
        job.record([rollout("extra", 0, 1.0)])
    gone = rows(lk, "episodes WHERE task_id = 'extra'")[0]["episode_id"]
    lk.retract([gone], "a test")
    add_credit(lk)
    add_credit(lk, gamma=0.5)
    add_credit(lk)
    episodes = rows(lk, "episodes ORDER BY run_id, task_id, rollout_index")
    steps = rows(lk, "steps ORDER BY run_id, group_id, episode_id, step_index")
    with lk.job(kind="score", parameters={"judge": 1}) as job:
        job.write("scores", score_rows(steps[:6], "judge", [0.1, None, 0.3, 1.4, 0.5, 0.6]))
        job.write("scores", score_rows(episodes[:4], "judge", [1.0, 1.0, 1.0, None], reason="fine"))
    with lk.job(kind="score", parameters={"judge": 1}) as job:
        job.write("scores", score_rows(steps[:2], "judge", [0.9, 0.8]))
    with lk.job(kind="score", parameters={"other": 1}) as job:
        job.write("scores", score_rows(episodes, "other", [float(n % 2) for n in range(len(episodes))]))
    with lk.job(kind="select", parameters={"n": 1}) as job:
        job.write("selections", selection_rows(episodes, {0: "old", 1: "old"}))
    with lk.job(kind="select", parameters={"n": 2}) as job:
        job.write("selections", selection_rows(episodes[:6], {1: "dead", 2: "dead", 3: "short"}, [(0, 1), (1, 0)]))
    with lk.job(kind="annotate") as job:
        notes = [
            note(episodes[0], "ann", "quality", 1.0, None, 1, None),
            note(episodes[0], "ann", "quality", 2.0, "better", 2, None),
            note(episodes[0], "bob", "quality", 3.0, None, 1, None),
            note(episodes[0], "ann", "quality", None, "at a step", 3, 0),
            note(episodes[1], "ann", "mode", None, "lost", 1, None),
            note(episodes[1], "ann", "mode", None, None, 2, None),
        ]
        job.write("annotations", pl.DataFrame(notes, infer_schema_length=None))
    add_training(lk, updates=3, episodes_per_update=4, run_id="trained")
    with lk.job(kind="train", run_id="resumed") as job:
        batches = [
            {"attempt": attempt, "optimizer_step": step, "episode_id": episodes[e]["episode_id"]}
            | {"first_step": 0, "last_step": last, "action_tokens": 1, "epoch": epoch}
            for attempt, step, e, last, epoch in [
                (0, 0, 0, 2, 0),
                (0, 1, 1, 2, 0),
                (0, 2, 2, 2, 0),
                (1, 1, 1, 1, 0),
                (1, 2, 0, 2, 1),
            ]
        ]
        for attempt in (0, 1):
            mine = [row for row in batches if row["attempt"] == attempt]
            job.write("batches", pl.DataFrame(mine).drop("attempt").with_columns(attempt=pl.lit(attempt, pl.Int32)))
    return lk


def rows(lk: Lake, what: str) -> list[Row]:
    return lk.sql(f"SELECT * FROM {what}").to_dicts()


def same(found: Iterable[Row], expected: Iterable[Row], *key: str) -> None:
    """Equal rows in any order; floats to 12 digits."""

    def order(row: Row) -> str:
        return repr([row[name] for name in key])

    left, right = sorted(found, key=order), sorted(expected, key=order)
    assert [order(row) for row in left] == [order(row) for row in right]
    for one, other in zip(left, right, strict=True):
        for name, value in other.items():
            assert name in one
            if isinstance(value, float) and isinstance(one[name], float):
                assert math.isclose(one[name], value, rel_tol=1e-12, abs_tol=1e-12), (name, one, other)
            else:
                assert one[name] == value, (name, one, other)


def ended(lk: Lake) -> dict[int, datetime]:
    return {row["job_id"]: row["at"] for row in rows(lk, "jobs WHERE event = 'succeeded'")}


def newest(found: list[Row], when: dict[int, datetime], *key: str) -> list[Row]:
    """Rows of the newest job for each value of the key."""
    best: dict[Any, tuple[datetime, int]] = {}
    for row in found:
        place = tuple(row[name] for name in key)
        best[place] = max(best.get(place, (datetime.min.replace(tzinfo=UTC), 0)), (when[row["job_id"]], row["job_id"]))
    return [row for row in found if best[tuple(row[name] for name in key)][1] == row["job_id"]]


def deviation(values: list[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def grouped(found: Iterable[Row], *key: str) -> dict[Any, list[Row]]:
    parts: dict[Any, list[Row]] = defaultdict(list)
    for row in found:
        parts[tuple(row[name] for name in key)].append(row)
    return parts


# ---------------------------------------------------------------- jobs and what is latest


def test_job_runs_puts_the_rows_of_a_job_together(lk: Lake) -> None:
    jobs = grouped(rows(lk, "jobs"), "job_id")
    expected = []
    for (job_id,), events in jobs.items():
        start = next(row for row in events if row["event"] == "started")
        end = next((row for row in events if row["event"] != "started"), None)
        expected.append(
            {
                "job_id": job_id,
                "kind": start["kind"],
                "status": end["event"] if end else "started",
                "started_at": start["at"],
                "ended_at": end and end["at"],
                "counts": end and end["counts"],
            }
        )
    same(rows(lk, "job_runs"), expected, "job_id")


def test_a_job_that_was_resumed_is_shown_once_with_its_last_end(tmp_path: Path) -> None:
    lk = lake.open(tmp_path / "lake", create=True)
    row = {"job_id": 1, "series_id": 2, "kind": "train", "package_version": "0", "parameters": "{}"}
    row |= {"input_snapshot": "{}", "write_id": 3}
    events = [("started", 0), ("failed", 1), ("failed", 2), ("succeeded", 3)]
    for upto, status in ((1, "started"), (2, "failed"), (3, "failed"), (4, "succeeded")):
        frame = pl.DataFrame([row | {"event": e, "at": AT + timedelta(hours=h)} for e, h in events[:upto]])
        with session_over(tmp_path / str(upto), {"jobs": frame}) as session:
            (found,) = session.query("SELECT * FROM job_runs").to_dicts()
        assert found["status"] == status
        assert found["started_at"] == AT
        assert found["ended_at"] == (AT + timedelta(hours=upto - 1) if upto > 1 else None)
    del lk


def session_over(folder: Path, frames: dict[str, pl.DataFrame]) -> Any:
    """A session over frames, written as files."""
    from lake.objects import Objects
    from lake.query import Session
    from lake.visibility import DataFile

    folder.mkdir()
    files = {}
    for name, frame in frames.items():
        path = folder / f"{name}.parquet"
        frame.write_parquet(path)
        files[name] = [DataFile(str(path), frame.height, path.stat().st_size, frozenset())]
    return Session(lambda name: files.get(name, []), Objects(folder), lambda: pl.Series([], dtype=pl.Int64))


def test_latest_advantages_are_those_of_the_newest_job_of_each_series_and_group(lk: Lake) -> None:
    advantages = rows(lk, "advantages")
    expected = newest(advantages, ended(lk), "series_id", "group_id")
    assert len({row["series_id"] for row in expected}) == 2
    assert len(expected) < len(advantages)
    same(rows(lk, "latest_advantages"), expected, "series_id", "episode_id", "step_index")


def test_latest_scores_are_those_of_the_newest_job_of_each_series_scorer_and_episode(lk: Lake) -> None:
    scores = rows(lk, "scores")
    expected = newest(scores, ended(lk), "series_id", "scorer", "episode_id")
    assert 0 < len(expected) < len(scores)
    same(rows(lk, "latest_scores"), expected, "series_id", "scorer", "episode_id", "step_index")


def test_latest_annotations_are_the_last_words_that_were_not_taken_back(lk: Lake) -> None:
    last: dict[Any, Row] = {}
    for row in sorted(rows(lk, "annotations"), key=lambda row: row["at"]):
        last[row["episode_id"], row["step_index"], row["author"], row["label"]] = row
    expected = [row for row in last.values() if row["value"] is not None or row["text"] is not None]
    assert sorted((row["author"], row["value"], row["text"]) for row in expected if row["value"]) == [
        ("ann", 2.0, "better"),
        ("bob", 3.0, None),
    ]
    same(rows(lk, "latest_annotations"), expected, "annotation_id")


# ---------------------------------------------------------------- steps


def test_a_trajectory_is_the_steps_with_their_episode_in_reading_order(lk: Lake) -> None:
    episodes = {row["episode_id"]: row for row in rows(lk, "episodes")}
    expected = []
    for (episode_id,), steps in grouped(rows(lk, "steps"), "episode_id").items():
        so_far: float | None = None
        for step in sorted(steps, key=lambda row: row["step_index"]):
            if step["reward"] is not None:
                so_far = (so_far or 0.0) + step["reward"]
            episode = episodes[episode_id]
            of_episode = {
                name: episode[name] for name in ("task_id", "status", "env_return", "rollout_index", "num_steps")
            }
            expected.append(
                {name: step[name] for name in ("episode_id", "step_index", "run_id", "group_id", "state", "action")}
                | of_episode
                | {"reward": step["reward"], "reward_so_far": so_far}
                | {"is_last": step["step_index"] == episode["num_steps"] - 1}
            )
    same(rows(lk, "trajectory"), expected, "episode_id", "step_index")


def test_the_step_ledger_knows_everything_about_a_step(lk: Lake) -> None:
    when = ended(lk)
    scores = grouped(newest(rows(lk, "scores"), when, "series_id", "scorer", "episode_id"), "episode_id", "step_index")
    advantages = grouped(newest(rows(lk, "advantages"), when, "series_id", "group_id"), "episode_id", "step_index")

    def judged(episode_id: int, step_index: int | None) -> list[Row] | None:
        found = sorted(scores.get((episode_id, step_index), []), key=lambda row: row["scorer"])
        return [{name: row[name] for name in ("scorer", "value", "reason", "error")} for row in found] or None

    expected = [
        {name: step[name] for name in ("episode_id", "step_index", "run_id", "group_id", "action", "reward")}
        | {"series_id": None, "advantage": None, "job_id": None}
        | {
            name: credit[name]
            for name in ("series_id", "job_id", "a_episode", "a_step", "advantage", "flags")
            if credit
        }
        | {"step_scores": judged(step["episode_id"], step["step_index"])}
        | {"episode_scores": judged(step["episode_id"], None)}
        for step in rows(lk, "steps")
        for credit in advantages.get((step["episode_id"], step["step_index"]), [{}])
    ]
    assert any(row["step_scores"] and row["episode_scores"] for row in expected)
    same(rows(lk, "step_ledger"), expected, "series_id", "episode_id", "step_index")


def consumed(lk: Lake) -> list[Row]:
    """Batches, the newest attempt winning from its first step on."""
    found = []
    for _, batches in grouped(rows(lk, "batches"), "job_id").items():
        firsts: dict[int, int] = {}
        for row in batches:
            firsts[row["attempt"]] = min(firsts.get(row["attempt"], row["optimizer_step"]), row["optimizer_step"])
        for row in batches:
            later = [first for attempt, first in firsts.items() if attempt > row["attempt"]]
            if not any(first <= row["optimizer_step"] for first in later):
                found.append(row)
    return found


def test_step_seen_says_which_update_consumed_which_step(lk: Lake) -> None:
    runs = {row["job_id"]: row["run_id"] for row in rows(lk, "jobs WHERE event = 'started'")}
    seen: dict[Any, list[Row]] = defaultdict(list)
    for row in consumed(lk):
        for step in range(row["first_step"], row["last_step"] + 1):
            seen[row["job_id"], row["episode_id"], step].append(row)
    expected = [
        {
            "job_id": job_id,
            "run_id": runs[job_id],
            "episode_id": episode_id,
            "step_index": step,
            "times": len(found),
            "optimizer_steps": sorted(row["optimizer_step"] for row in found),
            "first_optimizer_step": min(row["optimizer_step"] for row in found),
            "last_optimizer_step": max(row["optimizer_step"] for row in found),
            "epochs": len({row["epoch"] for row in found}),
        }
        for (job_id, episode_id, step), found in seen.items()
    ]
    assert max(row["times"] for row in expected) == 2
    same(rows(lk, "step_seen"), expected, "job_id", "episode_id", "step_index")


# ---------------------------------------------------------------- groups and anchors


def test_groups_say_whether_comparing_siblings_says_anything(lk: Lake) -> None:
    expected = []
    for (group_id,), members in grouped(rows(lk, "episodes"), "group_id").items():
        returns = known(row["env_return"] for row in members)
        versions = known(row["policy_version"] for row in members)
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
    anchored = [row for row in rows(lk, "advantages") if row["anchor_key"] is not None]
    for (job_id, group_id, anchor), found in grouped(anchored, "job_id", "group_id", "anchor_key").items():
        visited = [steps[row["episode_id"], row["step_index"]] for row in found]
        returns = known(row["return_to_go"] for row in found)
        choices = Counter((row["action"], row["tool_calls"]) for row in visited)
        expected.append(
            {
                "job_id": job_id,
                "group_id": group_id,
                "anchor_key": anchor,
                "size": len(found),
                "episodes": len({row["episode_id"] for row in found}),
                "mean_return_to_go": statistics.fmean(returns) if returns else None,
                "sd_return_to_go": deviation(returns),
                "states": len({row["state_hash"] for row in visited}),
                "actions": len(choices),
                "top_action_share": max(choices.values()) / len(found),
                "error_share": sum(bool(row["state_is_error"]) for row in visited) / len(found),
                "mean_step_index": statistics.fmean(row["step_index"] for row in found),
            }
        )
    assert any(row["actions"] > 1 for row in expected)
    assert {row["size"] for row in expected} >= {1, 2}
    same(rows(lk, "anchors"), expected, "job_id", "group_id", "anchor_key")


# ---------------------------------------------------------------- hygiene and the funnel


def test_reward_hygiene_says_what_is_wrong_with_the_rewards(lk: Lake) -> None:
    episodes = {row["episode_id"]: row for row in rows(lk, "episodes")}
    found = [(row, "env_return", row["env_return"], None) for row in episodes.values()]
    found += [
        (episodes[row["episode_id"]], "env_reward", row["reward"], None)
        for row in rows(lk, "steps")
        if row["is_active"]
    ]
    for row in newest(rows(lk, "scores"), ended(lk), "series_id", "scorer", "episode_id"):
        source = f"{row['scorer']} of {'episodes' if row['step_index'] is None else 'steps'}"
        found.append((episodes[row["episode_id"]], source, row["value"], row["error"]))
    parts: dict[Any, list[tuple[Row, float | None, str | None]]] = defaultdict(list)
    for episode, source, value, error in found:
        parts[episode["run_id"], episode["task_id"], source].append((episode, value, error))
    expected = []
    for (run_id, task_id, source), entries in parts.items():
        values = known(value for _, value, _ in entries)
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
    scores = newest(rows(lk, "scores WHERE value IS NOT NULL OR true"), when, "series_id", "scorer", "episode_id")
    credit = grouped(newest(rows(lk, "advantages"), when, "series_id", "group_id"), "episode_id")
    selections = grouped(newest(rows(lk, "selections"), when, "group_id"), "episode_id")
    seen: dict[int, set[int]] = defaultdict(set)
    for row in consumed(lk):
        seen[row["episode_id"]] |= set(range(row["first_step"], row["last_step"] + 1))
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
        whole = episode["env_return"] is not None or any(row["step_index"] is None for row in values)
        reach(stages["scored"], mine, len(rewarded) if rewarded or whole else None, "unscored")
        defined = {row["step_index"] for row in credit.get((mine,), []) if row["defined"]}
        reason = "advantage unknown" if (mine,) in credit else "no credit job"
        reach(stages["credited"], mine, len(defined) or None, reason)
        chosen = selections.get((mine,), [])
        dropped = [row for row in chosen if row["step_index"] is None and not row["kept"]]
        lost = {row["step_index"] for row in chosen if row["step_index"] is not None and not row["kept"]}
        filtered = dropped[0]["filter"] if dropped else ""
        reach(stages["selected"], mine, None if dropped else len(active) - len(lost), filtered)
        reach(stages["trained"], mine, len(seen[mine]) or None, "not consumed")
    return [(name, *found) for name, found in stages.items()]


def reach(stage: tuple[dict[int, int], Counter[str]], episode_id: int, steps: int | None, reason: str) -> None:
    if steps is None:
        stage[1][reason] += 1
    else:
        stage[0][episode_id] = steps


def test_the_funnel_says_what_became_of_the_rollouts(lk: Lake) -> None:
    for run_id in ("one", "two"):
        found = rows(lk, f"funnel WHERE run_id = '{run_id}' ORDER BY stage_number")
        total = len(rows(lk, f"episodes WHERE run_id = '{run_id}'"))
        expected = funnel_of(lk, run_id)
        assert [row["stage"] for row in found] == [name for name, _, _ in expected]
        for row, (_, reached, reasons) in zip(found, expected, strict=True):
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


# ---------------------------------------------------------------- training


def test_trained_batches_and_run_metrics_count_a_resumed_attempt_once(lk: Lake) -> None:
    same(rows(lk, "trained_batches"), consumed(lk), "job_id", "optimizer_step", "episode_id", "first_step")
    metrics = rows(lk, "metrics")
    assert metrics
    same(rows(lk, "run_metrics"), metrics, "job_id", "name", "step")


def test_no_view_shows_a_retracted_episode(lk: Lake) -> None:
    (gone,) = [row["episode_id"] for row in rows(lk, "retractions")]
    hidden = set(views()) - {"trained_batches", "step_seen"}
    looked = 0
    for name in hidden:
        if "episode_id" in lk.sql(f"SELECT * FROM {name} LIMIT 0").columns:
            assert lk.sql(f"SELECT count(*) AS n FROM {name} WHERE episode_id = {gone}").item() == 0
            looked += 1
    assert looked >= 5


def test_every_view_answers_in_an_empty_lake(tmp_path: Path) -> None:
    lk = lake.open(tmp_path / "lake", create=True)
    for name in views():
        assert lk.sql(f"SELECT * FROM {name}").is_empty()
