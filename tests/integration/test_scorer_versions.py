"""Versions of scorers: the view of the current ones against a slow reading, and which version credit takes and says."""

from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest

import lake
from lake import Lake
from lake.errors import UsageError
from lake.jobs import Job
from lake.show import find, gather
from pipelines.credit.chosen_jobs import choose
from pipelines.credit.estimators import estimator_class
from pipelines.credit.inputs import Sources, scorer_versions
from pipelines.credit.job import run_credit
from testkit.command_line import runner
from testkit.judged_lake import Row, ended, rows, same
from testkit.lakes import build_lake, rollout, siblings


def score(lk: Lake, scorer: str, version: str, values: dict[int, float | None], steps: bool = False) -> int:
    """A job that scores episodes by their place in the lake, and their first steps."""
    episodes = rows(lk, "episodes ORDER BY task_id, rollout_index")
    keys = [{name: episodes[n][name] for name in ("episode_id", "group_id", "run_id")} for n in values]
    levels: list[dict[str, Any]] = [{"step_index": None}, *([{"step_index": 0}] if steps else [])]
    frame = pl.DataFrame(
        [
            key | level | {"value": value, "scorer": scorer, "scorer_version": version}
            for key, value in zip(keys, values.values(), strict=True)
            for level in levels
        ],
        infer_schema_length=None,
    )
    with lk.job(kind="score", series={"scorer": scorer, "version": version}) as job:
        job.write("scores", frame.cast({"step_index": pl.Int32, "value": pl.Float64}))
    return job.job_id


@pytest.fixture
def lk(tmp_path: Path) -> Lake:
    """Four episodes; `judge` in three versions, the second being the newest; `style` in one; a job that failed."""
    lk = build_lake(tmp_path / "lake", siblings("t", [1.0, 0.0, 1.0, 0.0]))
    score(lk, "judge", "v1", {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4}, steps=True)
    score(lk, "judge", "v2", {0: 1.0, 1: 2.0, 2: None}, steps=True)
    score(lk, "style", "s", {0: 7.0, 3: 8.0})
    score(lk, "judge", "v3", {0: 9.0})
    score(lk, "judge", "v2", {1: 5.0})
    third = pl.DataFrame(rows(lk, "scores WHERE scorer_version = 'v3'")).drop("job_id", "series_id", "write_id")
    with pytest.raises(ZeroDivisionError), lk.job(kind="score") as job:
        write_and_fail(job, third)
    return lk


def write_and_fail(job: Job, scores: pl.DataFrame) -> None:
    job.write("scores", scores)
    raise ZeroDivisionError


def current(lk: Lake) -> list[Row]:
    """Slowly: the version of each scorer's newest job, and of it each episode's newest job."""
    when, scores = ended(lk), rows(lk, "scores")
    kept = []
    for scorer in {row["scorer"] for row in scores}:
        mine = [row for row in scores if row["scorer"] == scorer]
        version = max(mine, key=lambda row: when[row["job_id"]])["scorer_version"]
        mine = [row for row in mine if row["scorer_version"] == version]
        for episode in {row["episode_id"] for row in mine}:
            of_episode = [row for row in mine if row["episode_id"] == episode]
            newest = max(of_episode, key=lambda row: when[row["job_id"]])["job_id"]
            kept += [row for row in of_episode if row["job_id"] == newest]
    return kept


def test_current_scores_are_of_one_version_of_each_scorer(lk: Lake) -> None:
    same(rows(lk, "current_scores"), current(lk), "scorer", "episode_id", "step_index")
    found = lk.sql("SELECT scorer, scorer_version, step_index, value FROM current_scores ORDER BY ALL")
    assert found.rows() == [
        ("judge", "v2", 0, 1.0),
        ("judge", "v2", 0, None),
        ("judge", "v2", None, 1.0),
        ("judge", "v2", None, 5.0),
        ("judge", "v2", None, None),
        ("style", "s", None, 7.0),
        ("style", "s", None, 8.0),
    ]
    assert lk.sql("SELECT count(DISTINCT scorer_version) FROM latest_scores WHERE scorer = 'judge'").item() == 3


def test_a_version_is_one_whatever_series_its_jobs_are_of(tmp_path: Path) -> None:
    lk = build_lake(tmp_path / "lake", siblings("t", [1.0, 0.0]))
    score(lk, "judge", "v", {0: 1.0, 1: 2.0})
    frame = pl.DataFrame(rows(lk, "scores")).drop("job_id", "series_id", "write_id").with_columns(value=pl.lit(3.0))
    with lk.job(kind="score", series={"other": "code"}) as job:
        job.write("scores", frame)
    assert lk.sql("SELECT value FROM latest_scores").height == 4
    assert lk.sql("SELECT value FROM current_scores")["value"].to_list() == [3.0, 3.0]


def test_readers_see_one_version(lk: Lake) -> None:
    """The ledger, the hygiene of rewards, `trajlake show`."""
    judged = lk.sql("SELECT DISTINCT episode_scores FROM step_ledger WHERE episode_scores IS NOT NULL")
    assert sorted(len(scores) for scores in judged["episode_scores"].to_list()) == [1, 1, 1, 2]
    n = lk.sql("SELECT n FROM reward_hygiene WHERE source = 'judge of episodes'").item()
    assert n == 3
    first = lk.sql("SELECT id_text(episode_id) FROM episodes WHERE rollout_index = 0").item()
    snapshot = lk.snapshot()
    told = gather(snapshot, find(snapshot, first))
    assert [(row["scorer"], row["value"]) for row in told["scores"]] == [("judge", 1.0), ("style", 7.0)]


# ---------------------------------------------------------------- credit


def test_credit_takes_the_current_version_and_records_which(lk: Lake) -> None:
    report = run_credit(lk, estimator_class("dr_grpo")(), score="judge")
    assert report.scorer_versions == {"judge": "v2"}
    found = lk.sql(
        "SELECT DISTINCT rollout_index, a_episode FROM latest_advantages JOIN episodes USING (episode_id) ORDER BY ALL"
    )
    assert found.rows() == [(0, -2.0), (1, 2.0), (2, None), (3, None)]
    (text,) = lk.sql("SELECT parameters FROM job_runs WHERE kind = 'credit'")["parameters"]
    assert msgspec.json.decode(text)["scorer_versions"] == {"judge": "v2"}
    assert choose(lk.snapshot(), f"{lake.ids.to_text(report.job_id)}").title.endswith("(dr_grpo, score judge@v2)")
    pinned = run_credit(lk, estimator_class("dr_grpo")(), score="judge@v1")
    assert pinned.scorer_versions == {"judge@v1": "v1"}
    assert choose(lk.snapshot(), f"{lake.ids.to_text(pinned.job_id)}").title.endswith("(dr_grpo, score judge@v1)")
    assert run_credit(lk, estimator_class("dr_grpo")()).scorer_versions == {}


def test_every_source_has_its_version(lk: Lake) -> None:
    snapshot = lk.snapshot()
    sources = Sources(score="style", rewards="judge@v1")
    assert scorer_versions(snapshot, sources, ("judge", "nobody")) == {"style": "s", "judge@v1": "v1", "judge": "v2"}
    estimator = estimator_class("gdpo").model_validate({"batch_key": "all", "components": {"judge": 1, "style": 2}})
    assert run_credit(lk, estimator).scorer_versions == {"judge": "v2", "style": "s"}


def test_steps_that_the_current_version_did_not_judge_have_no_reward(lk: Lake) -> None:
    """v2 judged episode 1 again, and no step of it: what an older job said of its steps is no reward any more."""
    estimator = estimator_class("gigpo").model_validate({"default_step_reward": 0.0, "gamma": 1.0})
    assert run_credit(lk, estimator, rewards="judge").scorer_versions == {"judge": "v2"}
    returns = lk.sql(
        "SELECT rollout_index, return_to_go FROM latest_advantages JOIN episodes USING (episode_id)"
        " WHERE step_index = 0 ORDER BY ALL"
    )
    assert returns["return_to_go"].to_list() == [1.0, 0.0, 0.0, 0.0]
    score(lk, "judge", "v4", {0: 1.0})
    with pytest.raises(UsageError, match=r"no scores of 'judge' for steps; valid: judge@v1, judge@v2$"):
        run_credit(lk, estimator_class("gigpo")(), rewards="judge")


def test_the_command_says_which_version(
    lk: Lake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cli = runner(monkeypatch, capsys)
    told = cli("credit", "rloo", "--lake", lk.uri, "--score", "judge")
    assert "scores of judge@v2\n" in told.out
    assert "scores of judge@v1\n" in cli("credit", "rloo", "--lake", lk.uri, "--score", "judge@v1").out
    assert "scores of" not in cli("credit", "rloo", "--lake", lk.uri).out


# ---------------------------------------------------------------- KL in the reward


def ratios(lk: Lake, *named: tuple[str, int | None]) -> None:
    """A row of `ratios` of the first step for each checkpoint and version."""
    row = rows(lk, "steps ORDER BY episode_id, step_index LIMIT 1")[0]
    keys = {name: row[name] for name in ("episode_id", "step_index", "group_id", "run_id")}
    values = {"encoding_id": 1, "temperature": 1.0, "n_action": 1, "log_ratio": -0.5, "logprobs": [-1.0]}
    for checkpoint, version in named:
        told = keys | values | {"checkpoint": checkpoint, "policy_version": version}
        with lk.job(kind="ratio", parameters={"of": checkpoint, "version": version}) as job:
            job.write("ratios", pl.DataFrame([told]))


@pytest.mark.parametrize(
    ("arguments", "there"),
    [
        (["checkpoint=new"], "of checkpoint 'new'; there is: nothing of any"),
        (["checkpoint=new"], "of checkpoint 'new'; there is: other, ref (policy_version 3), ref (policy_version 4)"),
        (["checkpoint=ref", "policy_version=5"], "'ref', policy_version 5; there is: ref (policy_version 3), ref"),
    ],
)
def test_kl_to_a_checkpoint_that_nobody_scored_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    there: str,
) -> None:
    lk = build_lake(tmp_path / "lake", [rollout("t", 0, 1.0)])
    if "nothing" not in there:
        ratios(lk, ("ref", 3), ("ref", 4), ("other", None))
    cli = runner(monkeypatch, capsys)
    options = [word for argument in arguments for word in ("--arg", argument)]
    fault = cli("score", "kl_in_reward", "--lake", lk.uri, *options).fault
    assert f"kl_in_reward: `ratios` has nothing of checkpoint {there.removeprefix('of checkpoint ')}" in fault
    assert lk.sql("SELECT count(*) FROM jobs WHERE kind = 'score'").item() == 0


def test_kl_to_a_checkpoint_that_is_there_is_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lk = build_lake(tmp_path / "lake", [rollout("t", 0, 1.0, num_steps=1)])
    ratios(lk, ("ref", 3))
    cli = runner(monkeypatch, capsys)
    assert cli("score", "kl_in_reward", "--lake", lk.uri, "--arg", "checkpoint=ref").code == 0
    assert lk.sql("SELECT value FROM current_scores WHERE step_index IS NULL")["value"].to_list() == [-0.5]
