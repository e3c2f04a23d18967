"""LLM judges in a score run: consent, workers without walls, answers kept in the lake, keys kept out of it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from lake import Lake
from pipelines.score.functions import ScoreConfig
from pipelines.score.job import ScoreReport, run_score
from testkit.examples import mostly_slow
from testkit.judge_server import JudgeServer, crowd, raw, serving
from testkit.score_lakes import conversation, conversations, module, score_rows

KEY = "sk-very-secret-0123456789"
JUDGED = """
import asyncio
from pipelines.score.judges import Judge

judge = Judge("m", backoff=0.0, tries=2, timeout=5.0)

@reward_function(requires_network=True, timeout=20)
async def one_by_one(messages, **kwargs):
    answer = await judge.ask(messages[-1].content, temperature=0)
    return EvaluateResult(score=float(answer), reason=answer)

@reward_function(mode="group", requires_network=True)
async def together(rollouts_messages, **kwargs):
    answers = await asyncio.gather(
        judge.ask(" ".join(m[-1].content for m in rollouts_messages)),
        *(judge.ask(m[-1].content, about=[n]) for n, m in enumerate(rollouts_messages)),
    )
    return [float(answer) for answer in answers[1:]]

@reward_function(requires_network=True)
def paid_for_and_lost(messages, **kwargs):
    return {}[judge.ask_now(messages[-1].content)]
"""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[JudgeServer]:
    with serving(lambda body: str(len(body["messages"][-1]["content"]))) as running:
        monkeypatch.setenv("OPENAI_BASE_URL", running.url)
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        yield running


@pytest.fixture
def lk(tmp_path: Path) -> Lake:
    return conversations(tmp_path / "lake", 2, 3)


def judged(lk: Lake, tmp_path: Path, function: str, **options: Any) -> ScoreReport:
    return run_score(lk, f"{module(tmp_path, JUDGED)}:{function}", config=ALONE, **options)


ALONE = ScoreConfig(allow_network=True, concurrency=1)
"""One worker: starting one takes longer than what it is asked here."""


def list_questions(server: JudgeServer) -> list[str]:
    return sorted(request["messages"][-1]["content"] for request in server.requests)


def test_an_answer_is_asked_once_and_kept(lk: Lake, tmp_path: Path, server: JudgeServer) -> None:
    report = judged(lk, tmp_path, "one_by_one")
    assert (report.with_score, report.failed, report.answers) == (6, 0, 6)
    rows = score_rows(lk, "task_id, rollout_index, value, reason, isolation")
    assert {(row["value"], row["isolation"]) for row in rows} == {(float(len("done with t0.0")), "none")}
    assert list_questions(server) == [f"done with t{t}.{i}" for t in range(2) for i in range(3)]
    assert server.requests[0]["temperature"] == 0
    responses = lk.scan("responses").collect()
    assert responses.select("episode_id", "answer", "model").n_unique() == 6
    assert set(responses["job_id"]) == set(report.job_ids)
    again = judged(lk, tmp_path, "one_by_one", force=True)
    assert (again.scored, again.with_score, again.answers) == (6, 6, 0)
    assert len(server.requests) == 6, "scored again from the lake"
    lk.append([conversation("t0", 5)], run_id="r")
    assert judged(lk, tmp_path, "one_by_one").answers == 1


def test_requests_are_in_flight_as_declared(lk: Lake, tmp_path: Path, server: JudgeServer) -> None:
    server.script = [crowd(3)] * 6
    text = JUDGED.replace("timeout=20", "concurrency=3, timeout=20")
    assert run_score(lk, f"{module(tmp_path, text)}:one_by_one", config=ALONE).with_score == 6
    assert server.most_in_flight == 3


def test_a_judge_that_fails_is_null_with_the_reason_and_tried_again_later(
    lk: Lake, tmp_path: Path, server: JudgeServer
) -> None:
    server.script = [raw(f"who is {KEY}?".encode(), 401)] * 6
    report = judged(lk, tmp_path, "one_by_one")
    assert (report.with_score, report.failed, report.answers) == (0, 6, 0)
    assert report.examples[0].endswith("JudgeError: HTTP 401: who is ***?")
    assert {row["value"] for row in score_rows(lk)} == {None}
    again = judged(lk, tmp_path, "one_by_one", retry_failed=True)
    assert (again.with_score, again.failed) == (6, 0)
    assert judged(lk, tmp_path, "one_by_one", retry_failed=True).scored == 0


def test_what_was_paid_for_is_kept_even_if_the_function_fails(lk: Lake, tmp_path: Path, server: JudgeServer) -> None:
    report = judged(lk, tmp_path, "paid_for_and_lost", where="task_id = 't0'")
    assert (report.failed, report.answers) == (3, 3)
    assert report.examples[0].endswith("KeyError: '14'")
    judged(lk, tmp_path, "paid_for_and_lost", where="task_id = 't0'", retry_failed=True)
    assert len(server.requests) == 3


def test_an_answer_about_several_stands_for_each_and_goes_with_any(
    lk: Lake, tmp_path: Path, server: JudgeServer
) -> None:
    report = judged(lk, tmp_path, "together", where="task_id = 't0'")
    assert (report.with_score, report.answers) == (3, 4)
    about = lk.scan("responses").collect().group_by("request_id").agg(pl.col("episode_id").n_unique().alias("n"))
    assert sorted(about["n"]) == [1, 1, 1, 3]
    first = lk.sql("SELECT episode_id FROM episodes WHERE task_id = 't0' AND rollout_index = 0").item()
    lk.forget([first])
    responses = lk.scan("responses").collect()
    assert len(responses) == 2
    assert first not in responses["episode_id"]
    assert sorted(judged(lk, tmp_path, "together", where="task_id = 't0'").model_dump()["examples"]) == []
    assert len(server.requests) == 4 + 1, "only the joint question is another one now"


def test_an_episode_that_is_forgotten_while_it_is_judged_leaves_no_answer(
    lk: Lake, tmp_path: Path, server: JudgeServer
) -> None:
    """The joint question was about it too: its answer is not kept for the siblings either."""
    first = lk.sql("SELECT episode_id FROM episodes WHERE task_id = 't0' AND rollout_index = 0").item()

    def forgetful(body: dict[str, Any]) -> str:
        if first in lk.scan("episodes").collect()["episode_id"]:
            lk.forget([first])
        return str(len(body["messages"][-1]["content"]))

    server.answer = forgetful
    report = judged(lk, tmp_path, "together", where="task_id = 't0'")
    assert (report.scored, report.overtaken) == (2, 1)
    responses = lk.scan("responses").collect()
    assert len(responses) == responses["request_id"].n_unique() == 2
    assert set(responses["answer"]) == {str(len("done with t0.0"))}
    for path in Path(lk.uri).rglob("*.parquet"):
        rows = pl.read_parquet(path)
        if path.parent.name != "retractions" and "episode_id" in rows.columns:
            assert first not in rows["episode_id"], path


def test_the_key_is_nowhere_in_the_lake(lk: Lake, tmp_path: Path, server: JudgeServer) -> None:
    server.answer = lambda _: KEY
    server.script = [raw(KEY.encode(), 400)] * 2
    report = judged(lk, tmp_path, "one_by_one")
    assert report.failed == 6
    assert all(key == f"Bearer {KEY}" for key in server.keys)
    assert KEY not in report.model_dump_json()
    for path in Path(lk.uri).rglob("*"):
        if path.is_file():
            values = str(pl.read_parquet(path).to_dicts()) if path.suffix == ".parquet" else ""
            assert KEY.encode() not in path.read_bytes(), path
            assert KEY not in values, path


LOOSE = """
import os
key = lambda: os.environ["OPENAI_API_KEY"]

@reward_function(requires_network=True)
def loose(messages, rollout_index, **kwargs):
    print("my key is", key())
    if rollout_index == 1:
        raise ValueError(f"no luck with {key()}")
    if rollout_index == 2:
        return EvaluateResult(score=1.0, error="x" * 1985 + key())
    outputs = [StepOutput(step_index=0, base_reward=1.0, reason=key())]
    metrics = {key(): MetricResult(1.0, reason=f"<{key()}>")}
    return EvaluateResult(score=1.0, reason=key() + "!" + key(), metrics=metrics, step_outputs=outputs)

@reward_function(requires_network=True)
def wordy(messages, **kwargs):
    raise ValueError("a" * 1950 + key() * 4)
"""


@pytest.mark.parametrize("name", mostly_slow(["loose", "wordy"], "loose"))
def test_a_function_that_gives_the_key_away_gives_stars(
    name: str, lk: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    report = run_score(lk, f"{module(tmp_path, LOOSE)}:{name}", config=ALONE)
    rows = str(score_rows(lk))
    assert report.scored == 6
    assert "***" in rows
    for text in (rows, report.model_dump_json()):
        assert KEY not in text
        assert KEY[:12] not in text, "not a part of it either, where a text was cut"
    if name == "loose":
        assert "my key is ***" in report.printed
        row = score_rows(lk, "reason, metrics", "rollout_index = 0 AND step_index IS NULL")[0]
        assert row["reason"] == "***!***"
        assert '"***":' in row["metrics"]
        assert "<***>" in row["metrics"]


def test_equal_questions_of_two_calls_are_two_answers(lk: Lake, tmp_path: Path, server: JudgeServer) -> None:
    text = JUDGED.replace("judge.ask(messages[-1].content, temperature=0)", 'judge.ask("same", temperature=0)')
    report = run_score(lk, f"{module(tmp_path, text)}:one_by_one", config=ALONE)
    assert report.answers == len(server.requests) == 6


def test_only_named_variables_reach_the_worker(lk: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAMED", "yes")
    monkeypatch.setenv("SECRET", "no")
    text = """
import os
@reward_function(requires_network=True)
def seen(messages):
    return EvaluateResult(score=1.0, reason=f"{os.environ.get('NAMED')} {os.environ.get('SECRET')}")
"""
    config = ScoreConfig(allow_network=True, concurrency=1, environment=("NAMED", "ABSENT"))
    run_score(lk, f"{module(tmp_path, text)}:seen", config=config)
    assert {row["reason"] for row in score_rows(lk, "reason")} == {"yes None"}
    assert '"yes"' not in "".join(lk.sql("SELECT parameters FROM jobs")["parameters"])
