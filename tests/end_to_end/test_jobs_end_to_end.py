"""Every job once, for real, from a file to a trained policy: what each command promises at the least.

What the jobs do beyond that, where they are killed, raced and lied to, is in tests/integration.
"""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import lake
from lake import ids
from lake.cli import trajlake
from lake.tables import TABLES
from testkit.episodes import assert_whole, write_lines
from testkit.judge_server import serving
from testkit.lakes import RUN, sample_episodes
from testkit.score_lakes import module

FUNCTIONS = """
from pipelines.score.judges import Judge

@reward_function
def brief(messages, **kwargs):
    return EvaluateResult(score=1.0 / len(messages))

@reward_function(requires_network=True, timeout=20)
async def judged(messages, **kwargs):
    answer = await Judge("m").ask(messages[-1].content)
    return EvaluateResult(score=float(answer), reason=answer)
"""
REWARD = """
[reward.half]
components = [{ scorer = "brief", weight = 0.5 }]
"""


def test_every_job_from_a_file_to_a_trained_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*arguments: Any) -> str:
        done = CliRunner().invoke(trajlake, [str(argument) for argument in (*arguments, "--lake", tmp_path / "lake")])
        assert done.exit_code == 0, (arguments, done.output, done.exception)
        return done.stdout

    source = write_lines(tmp_path / "episodes.jsonl", [*sample_episodes(), b"no record\n"])
    (tmp_path / "rewards.toml").write_text(REWARD)
    functions = module(tmp_path, FUNCTIONS)
    assert "24 episodes, 72 steps, 1 reject (0 already present)" in run("ingest", source, "--run", RUN)
    assert "24 already present" in run("ingest", source, "--run", RUN)
    run("score", f"{functions}:brief")
    with serving() as judge:
        monkeypatch.setenv("OPENAI_BASE_URL", judge.url)
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        run("score", f"{functions}:judged", "--allow-network", "--where", "task_id = 'mixed'")
        assert len(judge.requests) == 8
    run("score", "--reward", "half", "--config", tmp_path / "rewards.toml")
    run("credit", "gigpo")
    run("credit", "rloo")
    run("compare", "gigpo", "rloo")
    run("anchors")
    run("group", "pairs", "--step", "subsample:size=2")
    run("select", "live", "--filter", "dead_groups")
    model = tmp_path / "model"
    run("init-model", "--out", model, "--hidden-size", 32, "--vocabulary", 300)
    assert "weights sha256" in run("train", "--model", model, "--loss", "awr", "--out", tmp_path / "trained")
    run("rescore", tmp_path / "trained")
    assert "success" in run("eval")

    lk = lake.open(tmp_path / "lake")
    lk.name_snapshot("before")
    first, two = lk.scan("episodes").sort("episode_id").collect()["episode_id"][:2]
    run("retract", "--reason", "a test", ids.to_text(first))
    run("forget", "--yes", ids.to_text(two))
    run("compact", "episodes", "steps")
    run("vacuum")
    run("doctor")

    assert assert_whole(lk.snapshot()) == 22
    assert lk.at("before").scan("episodes").collect().height == 23, "what was forgotten is gone from the past as well"
    runs = lk.sql("SELECT kind, status, count(*) AS n FROM job_runs GROUP BY ALL ORDER BY ALL")
    assert set(runs["status"]) == {"succeeded"}
    kinds = "credit forget group ingest render rescore retract reward score select train"
    assert set(runs["kind"]) == set(kinds.split())
    written = {name for name in TABLES if lk.scan(name).collect().height}
    assert written == set(TABLES) - {"spans", "blobs", "annotations"}
