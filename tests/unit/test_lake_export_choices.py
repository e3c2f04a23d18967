"""Which decisions and episodes an export for trainers holds: by selection, by what is learned from, by score."""

import json
from pathlib import Path
from typing import Any

import pytest

from lake import EpisodeRecord, Lake, StepRecord
from lake.export import find_target
from lake.export.job import ExportRequest, Manifest, export
from lake.export.target import Choices
from pipelines.credit import GiGPO
from pipelines.credit.estimators import ESTIMATORS
from pipelines.credit.job import run_credit
from pipelines.select import Length, Selection, run_select
from testkit.copies import copied, empty_lake
from trainer.data.preferences import label_episodes as trainer_labels
from trainer.evaluation.success import read_attempts, summarise_tasks
from viewer.queries import ListWindow, runs

THRESHOLD = {"choices": Choices(threshold=0.1)}


def walk(index: int, reward: float | None, *actions: str) -> EpisodeRecord:
    """A rollout of the task `door`, whose every state is the same."""
    return EpisodeRecord(
        task_id="door",
        rollout_index=index,
        env_return=reward,
        initial_messages=[{"role": "user", "content": "Open the door."}],
        steps=[
            StepRecord(
                state="a door",
                context=[{"role": "user", "content": "a door"}] if number else [],
                action=action,
                is_copied_context=action == "copied",
            )
            for number, action in enumerate(actions)
        ],
    )


@pytest.fixture
def lk(tmp_path: Path) -> Lake:
    """Three siblings that earn 0, 0.5 and 1."""

    def make(folder: Path) -> None:
        rollouts = [walk(0, 0.0, "push", "knock"), walk(1, 0.5, "knock", "pull"), walk(2, 1.0, "pull", "copied")]
        lk = empty_lake(folder)
        lk.append(rollouts, run_id="a")
        run_credit(lk, GiGPO(step_source="terminal_score"))

    return copied("three siblings to choose from", make, tmp_path / "lake")


def exported(lk: Lake, out: Path, name: str, **options: Any) -> tuple[list[dict[str, Any]], Manifest]:
    """The rows of an export into one file, and its manifest."""
    manifest = export(lk, ExportRequest(find_target(name), out / f"{name}.jsonl", **options))
    return [json.loads(line) for line in (out / f"{name}.jsonl").read_text("utf-8").splitlines()], manifest


def test_steps_that_a_selection_dropped_are_not_learned_from(lk: Lake, tmp_path: Path) -> None:
    run_select(lk, Selection(name="short", filters=(Length(max_action_characters=4),)))
    rows, manifest = exported(lk, tmp_path, "prompt-completion", selection="short")
    decisions = [(row["rollout_index"], row["step_index"], row["completion"][0]["content"]) for row in rows]
    assert sorted(decisions) == [(0, 0, "push"), (1, 1, "pull"), (2, 0, "pull")]
    assert list(manifest.left_out.values()) == [3]
    (behind,) = [row for row in rows if row["rollout_index"] == 1]
    assert "knock" in str(behind["prompt"]), "a dropped step stays in the prompt of those behind it"


def test_pairs_of_an_anchor_state_hold_decisions_that_are_learned_from_alone(lk: Lake, tmp_path: Path) -> None:
    credit = lk.sql("SELECT action, a_step FROM current_advantages JOIN steps USING (episode_id, step_index)")
    best = max(credit.rows(), key=lambda row: row[1])
    assert best[0] == "copied", "its advantage is the highest of the state"
    (row,), _ = exported(lk, tmp_path, "preference", choices=Choices(pairs="anchors"))
    assert [row[side][0]["content"] for side in ("chosen", "rejected")] == ["pull", "push"]


def test_a_score_on_the_threshold_is_a_success_everywhere(lk: Lake, tmp_path: Path) -> None:
    """In exports, in evaluations, in the labels of a loss and in the viewer; the mean of a group is no threshold."""
    labels = {}
    for name, choices in (("mean", Choices()), ("fixed", Choices(threshold=0.5))):
        (tmp_path / name).mkdir()
        rows, _ = exported(lk, tmp_path / name, "unpaired", choices=choices)
        labels[name] = {row["rollout_index"]: row["label"] for row in rows}
    assert labels == {"mean": {0: False, 1: False, 2: True}, "fixed": {0: False, 1: True, 2: True}}
    attempts = read_attempts(lk.snapshot(), by="run_id", score="env_return")
    outcomes = attempts.select("episode_id", outcome="score")
    signs = trainer_labels(outcomes, 0.5).sides["sign"].to_list()
    (run,) = runs.read_page(lk.snapshot(), 0.5, ListWindow(9)).to_dicts()
    (tasks,) = summarise_tasks(attempts, 0.5).to_dicts()
    assert sorted(signs) == [-1, 1, 1]
    assert (tasks["successes"], run["success"]) == (2, pytest.approx(2 / 3))


@pytest.fixture
def booked(tmp_path: Path) -> Lake:
    """Two siblings whose environment told no return of the first; a scorer judged both, and credit took its values."""
    lk = empty_lake(tmp_path / "lake")
    lk.append([walk(0, None, "push"), walk(1, 0.25, "pull")], run_id="a")
    lk.add_scores(lk.sql("SELECT episode_id, (1 - rollout_index)::DOUBLE AS value FROM episodes"), name="booked")
    run_credit(lk, ESTIMATORS["rloo"](), score="booked")
    return lk


@pytest.mark.parametrize(
    ("name", "column"),
    [("messages", "reward"), ("prompt-completion", "reward"), ("verl-rollouts", "score"), ("unpaired", "score")],
)
def test_the_score_of_the_current_credit_counts(booked: Lake, tmp_path: Path, name: str, column: str) -> None:
    for options in ({}, {"choices": Choices(score="booked")}, {"choices": Choices(score="booked@imported")}):
        rows, manifest = exported(booked, tmp_path, name, **options)
        assert [row[column] for row in sorted(rows, key=lambda row: row["rollout_index"])] == [1.0, 0.0]
        assert str(manifest.score).startswith("booked@")
        (tmp_path / f"{name}.jsonl").unlink()
        (tmp_path / f"{name}.jsonl.manifest.json").unlink(missing_ok=True)
    (row,), manifest = exported(booked, tmp_path, name, credit="none", where="env_return IS NOT NULL", **THRESHOLD)
    assert (row[column], manifest.choices["score"]) == (0.25, "env_return")


@pytest.mark.parametrize("name", ["messages", "messages-parquet", "trl-completions", "verl-rollouts"])
def test_a_reward_of_a_scorer_is_not_read_as_the_return(booked: Lake, tmp_path: Path, name: str) -> None:
    export(booked, ExportRequest(find_target(name), tmp_path / "out"))
    other_lake = empty_lake(tmp_path / "other")
    assert other_lake.ingest(tmp_path / "out").new == 2
    rows = other_lake.sql("SELECT rollout_index, env_return, extra FROM episodes ORDER BY 1").rows()
    assert [row[:2] for row in rows] == [(0, None), (1, 0.25)]
    assert not any("reward_of" in (extra or "") or "env_return" in (extra or "") for _, _, extra in rows)
    scores = other_lake.sql("SELECT rollout_index, scorer, value FROM current_scores JOIN episodes USING (episode_id)")
    assert sorted(scores.rows()) == [(0, "booked", 1.0), (1, "booked", 0.0)]


def test_a_manifest_counts_what_every_shard_left_out(lk: Lake, tmp_path: Path) -> None:
    other_record = walk(0, 1.0, "pull", "copied")
    other_record.task_id = "window"
    lk.append([other_record], run_id="a")
    manifest = export(lk, ExportRequest(find_target("prompt-completion"), tmp_path / "out", shard_episodes=1))
    assert len(manifest.shards) == 2
    assert list(manifest.left_out.values()) == [2]


def test_siblings_with_one_score_are_no_pair(tmp_path: Path) -> None:
    lk = empty_lake(tmp_path / "lake")
    rewards = {"pull": 1.0, "push": 0.5, "knock": 0.5, "wait": 0.0}
    lk.append([walk(index, reward, action) for index, (action, reward) in enumerate(rewards.items())], run_id="a")
    rows, _ = exported(lk, tmp_path, "preference")
    assert [(row["chosen_score"], row["rejected_score"]) for row in rows] == [(1.0, 0.0)]


def test_rows_stand_by_run_whatever_came_first(tmp_path: Path) -> None:
    lk = empty_lake(tmp_path / "lake")
    for run in "dbca":
        lk.append([walk(index, 1.0, "pull") for index in range(2)], run_id=run)
    rows, _ = exported(lk, tmp_path, "messages")
    assert [row["run_id"] for row in rows] == list("aabbccdd")
