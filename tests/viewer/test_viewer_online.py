"""The training page of an online run: what it does while it does it, and what its rounds came to, from a real loop."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest  # noqa: TID253 - the viewer's tests alone

import lake
from lake import Lake, ids
from lake.read.training import LOOP
from pipelines.collect.manager import run as manager
from testkit.lakes import rollout
from testkit.loops import looped, write_config
from testkit.streamlit_pages import (
    assert_sound,
    charts,
    column,
    columns,
    elements,
    facts,
    job_choice,
    open_page,
    opened,
    words,
)
from testkit.word_game import save_model
from trainer.evaluation.success import compute_success, read_attempts
from trainer.online import learner, rollouts
from trainer.online.loop import LoopResult, read_round_metrics
from trainer.online.settings import read_config
from trainer.runs.loop import build_metric_rows
from viewer import training_sections
from viewer.queries import ListWindow, training
from viewer.queries.training import Loop, LoopActivity
from viewer.server import ENVIRONMENT

Seen = list[tuple[str, list[LoopActivity]]]


class Watched(list[str]):
    """Lines of a loop; at each of them its lake is asked what it does."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.place = folder
        self.seen: Seen = []

    def append(self, line: str) -> None:
        lk = lake.open(self.place)
        job = lk.sql(f"SELECT job_id FROM job_runs WHERE kind = '{LOOP}'").item()
        self.seen.append((line, training.list_activities(lk, loop_at(lk, job))))


def observed(function: Callable[..., Any], watched: Watched) -> Callable[..., Any]:
    """The function, which says its name before it does anything."""

    def observing(*arguments: Any, **named: Any) -> Any:
        watched.append(function.__name__)
        return function(*arguments, **named)

    return observing


def loop_at(lk: Lake, job_id: int) -> Loop:
    loop = training.find_loop(lk, job_id)
    assert loop is not None
    return loop


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LoopResult, Seen]:
    """An undisturbed run of three rounds, evaluated before the first and the third and at the end."""
    folder = tmp_path_factory.mktemp("online")
    watched = Watched(folder / "lake")
    # The learning rate of the small model raises an alarm, whose line is none of the run's phases.
    config = read_config(
        str(write_config(folder, save_model(folder / "model"))), {"trainer": {"alarms": {"policy_jump": None}}}
    )
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((manager, "write_counts"), (rollouts, "run_credit"), (learner, "train_round")):
            patch.setattr(module, name, observed(getattr(module, name), watched))
        done = looped(folder, config, lines=watched)
    return folder, done, watched.seen


@pytest.fixture
def lk(run: tuple[Path, LoopResult, Seen], monkeypatch: pytest.MonkeyPatch) -> Lake:
    lk = lake.open(run[0] / "lake")
    monkeypatch.setenv(ENVIRONMENT, lk.uri)
    return lk


@pytest.fixture
def loop(lk: Lake) -> Loop:
    return loop_at(lk, lk.sql(f"SELECT job_id FROM job_runs WHERE kind = '{LOOP}'").item())


# ---------------------------------------------------------------- queries


def test_what_a_run_does_is_known_while_it_does_it(run: tuple[Path, LoopResult, Seen]) -> None:
    expected = []
    for number in range(3):
        if number in (0, 2):
            evaluating = LoopActivity("evaluating", number // 2, 6, 6)
            expected += [("write_counts", [evaluating]), (f"version {number}", [])]
        expected += [
            ("write_counts", [LoopActivity("collecting", number, 16, 16)]),
            ("run_credit", [LoopActivity("training", number)]),
            ("train_round", [LoopActivity("training", number)]),
            (f"round {number + 1}/3", []),
        ]
    expected += [("write_counts", [LoopActivity("evaluating", 2, 6, 6)]), ("version 3", [])]
    phases = [(line.partition(":")[0].partition(",")[0], doing) for line, doing in run[2] if "tasks" not in line]
    assert phases == expected


def test_rounds_are_what_the_loop_noted_and_what_its_updates_came_to(lk: Lake, loop: Loop) -> None:
    rows = {row["round"]: row for row in training.read_rounds(lk, loop, ListWindow()).iter_rows(named=True)}
    assert list(rows) == [2, 1, 0]
    metrics = read_round_metrics(lk, loop.job_id)
    spent = 0.0
    for number in range(3):
        row, metrics_of_round = rows[number], metrics[number]
        spent += metrics_of_round["loop/tokens"]
        assert (row["mean_return"], row["tokens"], row["seconds"], row["live_groups"]) == (
            metrics_of_round["loop/return"],
            metrics_of_round["loop/tokens"],
            metrics_of_round["loop/seconds"],
            metrics_of_round["loop/live_groups"],
        )
        assert (row["tokens_so_far"], row["first_update"], row["updates"]) == (spent, 2 * number, 2)
        entropies = lk.sql(
            "SELECT avg(value) FROM run_metrics WHERE job_id = ? AND name = 'entropy' AND step BETWEEN ? AND ?",
            [loop.train_job, 2 * number, 2 * number + 1],
        )
        assert row["entropy"] == pytest.approx(entropies.item())
        assert row["stale"] == 0
    assert training.read_rounds(lk, loop, ListWindow(1, 1))["round"].to_list() == [1]
    curves = training.read_round_curves(lk, loop)
    assert curves["failed_share"].to_list() == [
        metrics[n]["loop/failed"] / metrics[n]["loop/episodes"] for n in range(3)
    ]
    assert curves["mean_return"].to_list() == [rows[number]["mean_return"] for number in range(3)]
    assert curves.select("round", "last", "first_update").rows() == [(0, 0, 0), (1, 1, 2), (2, 2, 4)]


def test_a_point_of_several_rounds_opens_all_their_episodes(
    lk: Lake, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "POINTS", 2)
    curve, alone = training.read_round_curves(lk, loop).to_dicts()
    assert [(point["round"], point["last"], point["first_update"]) for point in (curve, alone)] == [
        (0, 1, 0),
        (2, 2, 4),
    ]
    assert training_sections.build_episodes_address(loop, curve) == "/episodes?run=asking&round_from=0&round_to=1"
    assert training_sections.build_groups_address(loop, curve) == training_sections.build_episodes_address(
        loop, curve
    ), "no list of groups is of several rounds"
    assert training_sections.build_groups_address(loop, alone) == "/groups?run=asking&round=2"


def test_evaluations_are_those_of_the_loop_with_the_intervals_of_eval(
    run: tuple[Path, LoopResult, Seen], lk: Lake, loop: Loop
) -> None:
    rows_by_version = {row["version"]: row for row in training.read_evaluations(lk, loop).iter_rows(named=True)}
    assert set(rows_by_version) == set(run[1].evaluations) == {0, 2, 3}
    for version, evaluation in run[1].evaluations.items():
        row = rows_by_version[version]
        assert (row["success"], row["score"], row["episodes"], row["unscored"]) == (
            pytest.approx(evaluation.success),
            pytest.approx(evaluation.score),
            evaluation.attempts,
            evaluation.unscored,
        )
        attempts = read_attempts(
            lk.snapshot(),
            by="run_id",
            score="env_return",
            where=f"run_id = 'asking-eval' AND policy_version = {version}",
        )
        by_eval = compute_success(attempts).row(0, named=True)
        assert (row["low"], row["high"]) == (pytest.approx(by_eval["low"]), pytest.approx(by_eval["high"]))
    metrics = read_round_metrics(lk, loop.job_id)
    assert [rows_by_version[version]["tokens"] for version in (0, 2)] == [
        0,
        metrics[0]["loop/tokens"] + metrics[1]["loop/tokens"],
    ]


# ---------------------------------------------------------------- the page


def test_a_finished_run_and_one_of_its_rounds(run: tuple[Path, LoopResult, Seen], lk: Lake, loop: Loop) -> None:
    at = open_page("training", job=loop.job_id, round=2)
    assert job_choice(at).value == ids.to_text(loop.train_job)
    text = words(at)
    assert "finished" in text
    assert progress(at) == "3 of 3 rounds"
    assert "Follow" not in text
    facts_shown = facts(at)
    assert facts_shown["Best version"] == str(run[1].best_version)
    assert facts_shown["Held-out success of version 3"] == f"{100 * run[1].evaluations[3].success:.0f} %"
    assert facts_shown["Episodes"] == "48"
    assert column(at, "rounds", "round") == ["2", "1", "0"]
    assert opened(at, "rounds") == [0]
    assert "parity" not in columns(at, "rounds"), "nobody pushed"
    assert charts(at) > 7, "held-out success, curves of the rounds, and the updates"
    job = ids.to_text(loop.train_job)
    for link in (
        "[Its episodes](/episodes?run=asking&round=2)",
        "[Its groups](/groups?run=asking&round=2)",
        "[Held-out episodes of version 2](/episodes?run=asking-eval&version=2)",
        f"[Its 2 updates, from 4](/training?job={job}&round=2&update=4)",
    ):
        assert link in text


def test_a_round_that_was_not_evaluated_and_one_that_is_not_there(lk: Lake) -> None:
    at = open_page("training", round=1, axis="Tokens")
    assert at.get("button_group")[0].value == "Tokens"
    assert "[Held-out" not in words(at)
    at.query_params["round"] = "7"
    assert "on a round 7" in assert_sound(at.run()).warning[0].value


def test_the_runs_page_shows_the_loop_and_not_its_newest_round_of_collecting(lk: Lake) -> None:
    assert any(part.value == "Metrics of loop" for part in open_page("runs", run="asking").subheader)
    steps = training.read_round_metrics(lk, "asking-eval").filter(name="finished")
    assert steps.rows() == [("finished", 0, 6.0), ("finished", 1, 6.0), ("finished", 2, 6.0)]


def progress(at: AppTest) -> str:
    """What the progress bar says."""
    return str(at.get("progress")[0].proto.text)


@pytest.fixture
def unfinished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lake:
    """A run that has started, and nothing more."""
    lk = lake.open(tmp_path / "lake", create=True)
    monkeypatch.setenv(ENVIRONMENT, lk.uri)
    train = lk.job(kind="train", run_id="r", parameters={"loss": {"name": "ppo"}}).__enter__()
    begin(lk, "r", loop={"rounds": 5}, train_job=ids.to_text(train.job_id))
    return lk


def begin(lk: Lake, run: str, **parameters: object) -> None:
    """A `loop` job that continues for ever."""
    lk.job(kind=LOOP, run_id=run, parameters=parameters).__enter__()


def test_a_run_without_a_round_yet_runs_and_is_followed(unfinished: Lake) -> None:
    at = open_page("training")
    assert "running" in words(at)
    assert progress(at) == "0 of 5 rounds"
    assert "No round is complete" in words(at)
    assert at.toggle(key="follow").value is True
    at.toggle(key="follow").set_value(False)
    assert_sound(at.run())


def test_a_run_that_writes_nothing_any_more_may_have_been_killed(
    unfinished: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_sections, "_QUIET_SECONDS", -1.0)
    text = words(open_page("training"))
    assert "silent" in text
    assert "command with `--resume`" in text


def test_what_a_job_says_of_a_loop_may_be_nonsense(unfinished: Lake) -> None:
    begin(unfinished, "odd")
    begin(unfinished, "odd", train_job="x")
    begin(unfinished, "odd", train_job=7, loop=[1])
    assert progress(open_page("training")) == "0 of 5 rounds"


@pytest.mark.parametrize("returned", [0.25, None])
def test_the_score_that_is_trained_on_is_shown_by_its_name_and_the_return_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, returned: float | None
) -> None:
    """Prompts have no return: then there is no column of it. Failed and unscored rollouts have curves."""
    lk = lake.open(tmp_path / "lake", create=True)
    with lk.job(kind="collect", run_id="r") as job:
        job.record([rollout("t", 0, 1.0), rollout("t", 0, None, collection_round=1, status="failed")])
    monkeypatch.setenv(ENVIRONMENT, lk.uri)
    train = lk.job(kind="train", run_id="r", parameters={"loss": {"name": "ppo"}}).__enter__()
    settings = {"rounds": 2, "credit": {"score": "judge@1"}}
    parameters = {"loop": settings, "train_job": ids.to_text(train.job_id)}
    with lk.job(kind=LOOP, run_id="r", parameters=parameters) as job:
        for number in range(2):
            row = {"loop/score": 0.5 + number, "loop/seconds": 1.0, "loop/carried": 3.0 * number}
            row |= {"loop/failed": float(number), "loop/episodes": 4.0}
            row |= {} if returned is None else {"loop/return": returned}
            job.write("metrics", build_metric_rows([(number, row)]))
        job.counts |= {"rounds": 2, "stopped_by": "rounds"}
    at = open_page("training", job=job.job_id)
    assert column(at, "rounds", "mean_score") == ["1.500", "0.500"]
    assert column(at, "rounds", "carried") == ["3", "0"]
    assert ("mean_return" in columns(at, "rounds")) == (returned is not None)
    curves = training.read_round_curves(lk, loop_at(lk, job.job_id))
    assert curves["mean_score"].to_list() == [0.5, 1.5]
    assert curves["failed_share"].to_list() == [0.0, 0.25]
    assert charts(at) == 2 + (returned is not None) + 2, "score, seconds, return, failed and unscored rollouts"
    html = "".join(str(element.proto) for element in elements(at) if element.type == "html")
    assert "Mean judge" in html
    assert ("Mean env_return" in html) == (returned is not None)
