"""Versions of scorers: the view of the current ones against a slow reading, and which version credit takes and says."""

import re
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest

import lake
from lake import Lake
from lake.errors import UsageError
from lake.judgements.credit import find_credit
from lake.judgements.scores import read_named_scores, read_scores_of
from lake.read.episode_text import find_episode, read_episode
from lake.read.snapshot import Snapshot
from lake.tables import TABLES
from lake.write.jobs import Job
from pipelines.credit.estimators import find_estimator
from pipelines.credit.health import IntegrityConfig
from pipelines.credit.inputs import CreditConfig, Sources, read_inputs
from pipelines.credit.job import run_credit
from testkit.command_line import runner
from testkit.copies import copied
from testkit.judged_lake import Row, ended, rows, same
from testkit.lakes import build_lake, rollout, siblings
from testkit.wording import Wording


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

    def make(template: Path) -> None:
        lk = build_lake(template, siblings("t", [1.0, 0.0, 1.0, 0.0]))
        score(lk, "judge", "v1", {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4}, steps=True)
        score(lk, "judge", "v2", {0: 1.0, 1: 2.0, 2: None}, steps=True)
        score(lk, "style", "s", {0: 7.0, 3: 8.0})
        score(lk, "judge", "v3", {0: 9.0})
        score(lk, "judge", "v2", {1: 5.0})
        third = pl.DataFrame(rows(lk, "scores WHERE scorer_version = 'v3'")).drop("job_id", "series_id", "write_id")
        with pytest.raises(ZeroDivisionError), lk.job(kind="score") as job:
            write_and_fail(job, third)

    return copied("versions of a judge", make, tmp_path / "lake")


def write_and_fail(job: Job, scores: pl.DataFrame) -> None:
    job.write("scores", scores)
    raise ZeroDivisionError


def current(lk: Lake) -> list[Row]:
    """Slowly: the version of each scorer's newest job, and of it each episode's newest job."""
    when, scores = ended(lk), rows(lk, "scores")
    newest_rows = []
    for scorer in {row["scorer"] for row in scores}:
        mine = [row for row in scores if row["scorer"] == scorer]
        version = max(mine, key=lambda row: when[row["job_id"]])["scorer_version"]
        mine = [row for row in mine if row["scorer_version"] == version]
        for episode in {row["episode_id"] for row in mine}:
            of_episode = [row for row in mine if row["episode_id"] == episode]
            newest = max(of_episode, key=lambda row: when[row["job_id"]])["job_id"]
            newest_rows += [row for row in of_episode if row["job_id"] == newest]
    return newest_rows


def test_current_scores_are_of_one_version_of_each_scorer(lk: Lake) -> None:
    same(rows(lk, "current_scores"), current(lk), "scorer", "episode_id", "step_index")
    for score in (
        [episode_row] for episode_row in lk.sql("SELECT episode_id FROM episodes")["episode_id"]
    ):  # one scored twice, two not
        of_few = read_scores_of(lk.snapshot(), score, TABLES["scores"].names).to_dicts()
        same(of_few, [row for row in current(lk) if row["episode_id"] in score], "scorer", "episode_id", "step_index")
    table_rows = lk.sql("SELECT scorer, scorer_version, step_index, value FROM current_scores ORDER BY ALL")
    assert table_rows.rows() == [
        ("judge", "v2", 0, 1.0),
        ("judge", "v2", 0, None),
        ("judge", "v2", None, 1.0),
        ("judge", "v2", None, 5.0),
        ("judge", "v2", None, None),
        ("style", "s", None, 7.0),
        ("style", "s", None, 8.0),
    ]
    assert lk.sql("SELECT count(DISTINCT scorer_version) FROM latest_scores WHERE scorer = 'judge'").item() == 3


def versions(lk: Lake) -> list[tuple[str, str, bool]]:
    versions = lk.sql("SELECT scorer, scorer_version, is_current FROM scorer_versions ORDER BY ALL").rows()
    return [(scorer, version, is_current) for scorer, version, is_current in versions]


def test_a_version_is_current_by_what_ran_last_or_said_so(lk: Lake) -> None:
    assert versions(lk) == [("judge", "v1", False), ("judge", "v2", True), ("judge", "v3", False), ("style", "s", True)]
    for scorer, version in (("judge", "v2"), ("style", "s")):
        expected = max(
            (row for row in current(lk) if row["scorer"] == scorer), key=lambda row: ended(lk)[row["job_id"]]
        )
        job = lk.sql("SELECT job_id FROM scorer_versions WHERE scorer = ? AND scorer_version = ?", [scorer, version])
        assert job.item() == expected["job_id"]
    with lk.job(kind="score", parameters={"confirms": "judge@v1"}) as job_v1:
        pass
    assert [version for _, version, is_current in versions(lk) if is_current] == ["v1", "s"]
    job_id = lk.sql("SELECT job_id FROM scorer_versions WHERE scorer_version = 'v1'").item()
    assert job_id == job_v1.job_id
    assert set(lk.sql("SELECT scorer_version FROM current_scores WHERE scorer = 'judge'")["scorer_version"]) == {"v1"}
    assert run_credit(lk, find_estimator("dr_grpo")(), score="judge").scorer_versions == {"judge": "v1"}


def test_what_confirms_nothing_changes_nothing(lk: Lake) -> None:
    """Another kind of job, an unknown version, no scorer, a job that failed."""
    before = versions(lk)
    for kind, confirms in (("credit", "judge@v1"), ("score", "judge@v9"), ("score", "v1")):
        with lk.job(kind=kind, parameters={"confirms": confirms}):
            pass
        assert versions(lk) == before, confirms
    with pytest.raises(ZeroDivisionError), lk.job(kind="score", parameters={"confirms": "judge@v1"}):
        raise ZeroDivisionError
    assert versions(lk) == before


def test_a_version_is_one_whatever_series_its_jobs_are_of(tmp_path: Path) -> None:
    lk = build_lake(tmp_path / "lake", siblings("t", [1.0, 0.0]))
    score(lk, "judge", "v", {0: 1.0, 1: 2.0})
    frame = pl.DataFrame(rows(lk, "scores")).drop("job_id", "series_id", "write_id").with_columns(value=pl.lit(3.0))
    with lk.job(kind="score", series={"other": "code"}) as job:
        job.write("scores", frame)
    assert lk.sql("SELECT value FROM latest_scores")["value"].to_list() == [3.0, 3.0]
    assert lk.sql("SELECT value FROM current_scores")["value"].to_list() == [3.0, 3.0]


def test_readers_see_one_version(lk: Lake) -> None:
    """The ledger, the hygiene of rewards, `trajlake show`."""
    judged = lk.sql("SELECT DISTINCT episode_scores FROM step_ledger WHERE episode_scores IS NOT NULL")
    assert sorted(len(scores) for scores in judged["episode_scores"].to_list()) == [1, 1, 1, 2]
    n = lk.sql("SELECT n FROM reward_hygiene WHERE source = 'judge of episodes'").item()
    assert n == 3
    first = lk.sql("SELECT id_text(episode_id) FROM episodes WHERE rollout_index = 0").item()
    snapshot = lk.snapshot()
    shown_episode = read_episode(snapshot, find_episode(snapshot, first))
    assert [(row["scorer"], row["value"]) for row in shown_episode["scores"]] == [("judge", 1.0), ("style", 7.0)]


# ---------------------------------------------------------------- credit


def test_credit_takes_the_current_version_and_records_which(lk: Lake) -> None:
    report = run_credit(lk, find_estimator("dr_grpo")(), score="judge")
    assert report.scorer_versions == {"judge": "v2"}
    advantages = lk.sql(
        "SELECT DISTINCT rollout_index, a_episode FROM latest_advantages JOIN episodes USING (episode_id) ORDER BY ALL"
    )
    assert advantages.rows() == [(0, -2.0), (1, 2.0), (2, None), (3, None)]
    (text,) = lk.sql("SELECT parameters FROM job_runs WHERE kind = 'credit'")["parameters"]
    assert msgspec.json.decode(text)["scorer_versions"] == {"judge": "v2"}
    assert find_credit(lk.snapshot(), f"{lake.ids.to_text(report.job_id)}").title.startswith(
        "dr_grpo (score judge@v2), series "
    )
    pinned = run_credit(lk, find_estimator("dr_grpo")(), score="judge@v1")
    assert pinned.scorer_versions == {"judge@v1": "v1"}
    assert find_credit(lk.snapshot(), f"{lake.ids.to_text(pinned.job_id)}").title.startswith(
        "dr_grpo (score judge@v1), series "
    )
    assert run_credit(lk, find_estimator("dr_grpo")()).scorer_versions == {}


def test_every_source_has_its_version(lk: Lake) -> None:
    scores = read_named_scores(lk.snapshot(), ["style", "judge@v1", "judge", "nobody"])
    assert scores.versions == {"style": "s", "judge@v1": "v1", "judge": "v2"}
    estimator = find_estimator("gdpo").model_validate({"batch_key": "all", "components": {"judge": 1, "style": 2}})
    assert run_credit(lk, estimator).scorer_versions == {"judge": "v2", "style": "s"}


def test_a_credit_job_reads_its_scores_with_one_query(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """All its sources together. Later reads are of other rows: values of steps, by range, and reasons for messages."""
    texts: list[str] = []
    sql = Snapshot.sql

    def spy(snapshot: Snapshot, query: str, *params: Any) -> pl.DataFrame:
        texts.append(query)
        return sql(snapshot, query, *params)

    monkeypatch.setattr(Snapshot, "sql", spy)
    estimator = find_estimator("gdpo").model_validate({"batch_key": "all", "components": {"judge": 1, "style": 2}})
    sources = Sources(score="style", rewards="judge@v1")
    read_inputs(lk.snapshot(), CreditConfig.resolve(estimator, sources, IntegrityConfig(), purity=True), print)
    assert len([text for text in texts if re.search(r"scores\b|scorer_versions", text)]) == 1


def test_steps_that_the_current_version_did_not_judge_have_no_reward(lk: Lake) -> None:
    """v2 judged episode 1 again, and no step of it: what an older job said of its steps is no reward any more."""
    estimator = find_estimator("gigpo").model_validate({"default_step_reward": 0.0, "gamma": 1.0})
    assert run_credit(lk, estimator, rewards="judge").scorer_versions == {"judge": "v2"}
    returns = lk.sql(
        "SELECT rollout_index, return_to_go FROM latest_advantages JOIN episodes USING (episode_id)"
        " WHERE step_index = 0 ORDER BY ALL"
    )
    assert returns["return_to_go"].to_list() == [1.0, 0.0, 0.0, 0.0]
    score(lk, "judge", "v4", {0: 1.0})
    with pytest.raises(UsageError, match=r"no scores of 'judge' for steps; valid: judge@v1, judge@v2$"):
        run_credit(lk, find_estimator("gigpo")(), rewards="judge")


def test_a_version_that_is_not_there_is_refused(lk: Lake) -> None:
    valid = "valid: judge@v1, judge@v2, judge@v3$"
    for score in ("judge@", "judge@v9"):
        with pytest.raises(UsageError, match=f"no scores of '{score}' for episodes; {valid}"):
            run_credit(lk, find_estimator("dr_grpo")(), score=score)


def test_the_command_says_which_version(
    lk: Lake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cli = runner(monkeypatch, capsys)
    command = cli("credit", "rloo", "--lake", lk.uri, "--score", "judge")
    assert "scores of judge@v2\n" in command.out
    assert "scores of" not in cli("credit", "rloo", "--lake", lk.uri).out


def reasons(lk: Lake, version: str, *why: str) -> None:
    """A version without a value; of each episode why."""
    episodes = rows(lk, "episodes ORDER BY task_id, rollout_index")
    keys = [{name: row[name] for name in ("episode_id", "group_id", "run_id")} for row in episodes]
    errors_frame = pl.DataFrame([key | {"error": text} for key, text in zip(keys, why, strict=False)])
    named = {"scorer": "judge", "scorer_version": version, "step_index": pl.lit(None, pl.Int32)}
    with lk.job(kind="score", series={"version": version}) as job:
        job.write(
            "scores",
            errors_frame.with_columns(value=pl.lit(None, pl.Float64), **{k: _lit(v) for k, v in named.items()}),
        )


def _lit(value: Any) -> pl.Expr:
    return value if isinstance(value, pl.Expr) else pl.lit(value)


def test_a_version_without_a_value_is_told_with_its_reason_and_the_others(
    lk: Lake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wording: Wording
) -> None:
    cli = runner(monkeypatch, capsys)
    reasons(lk, "v5", "words is no number", "it timed out", "words is no number", "words is no number")
    command = cli("credit", "dr_grpo", "--lake", lk.uri, "--score", "judge")
    assert command.code == 1
    assert "dr_grpo defines none of 12 advantages in 1 group" in command.err.splitlines()[-1]
    first = wording(command.err.splitlines()[0])
    assert first.startswith("judge@v5 has no value ")
    assert "4 chosen episodes, most often (3) because: words is no number" in first
    assert first.endswith(": judge@v2, judge@v3, judge@v1")
    steps = cli(
        "credit", "gigpo", "--lake", lk.uri, "--score", "style", "--rewards", "judge@v1", "--where", "rollout_index = 3"
    )
    assert "style" not in steps.err
    assert "judge" not in steps.err


def test_chosen_episodes_that_were_never_scored_are_told(
    lk: Lake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wording: Wording
) -> None:
    cli = runner(monkeypatch, capsys)
    alone = ("--where", "rollout_index IN (1, 2)")
    command = cli("credit", "dr_grpo", "--lake", lk.uri, "--score", "style", *alone)
    first = wording(command.err.splitlines()[0])
    assert first.startswith("style@s has no value ")
    assert "2 chosen episodes" in first
    assert first.endswith("no other version")
    command = cli("credit", "gigpo", "--lake", lk.uri, "--rewards", "judge", *alone, "--check", "singleton=off")
    first = wording(command.err.splitlines()[0])
    assert first.startswith("judge@v2 has no value ")
    assert "Other versions: " in first
    options = ("--set", "batch_key=all", "--set", 'components={"style": 1.0}')
    assert "style@s has no value" in cli("credit", "gdpo", "--lake", lk.uri, *options, *alone).err


# ---------------------------------------------------------------- KL in the reward


def ratios(lk: Lake, *named: tuple[str, int | None]) -> None:
    """A row of `ratios` of the first step for each checkpoint and version."""
    row = rows(lk, "steps ORDER BY episode_id, step_index LIMIT 1")[0]
    keys = {name: row[name] for name in ("episode_id", "step_index", "group_id", "run_id")}
    values = {"encoding_id": 1, "temperature": 1.0, "n_action": 1, "log_ratio": -0.5, "logprobs": [-1.0]}
    for checkpoint, version in named:
        ratio_row = keys | values | {"checkpoint": checkpoint, "policy_version": version}
        with lk.job(kind="ratio", parameters={"of": checkpoint, "version": version}) as job:
            job.write("ratios", pl.DataFrame([ratio_row]))


def test_kl_is_scored_to_a_checkpoint_that_is_there_and_refused_to_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lk = build_lake(tmp_path / "lake", [rollout("t", 0, 1.0, num_steps=1)])
    cli = runner(monkeypatch, capsys)

    def refused(score: str, *arguments: str) -> bool:
        options = [word for argument in arguments for word in ("--arg", argument)]
        fault = cli("score", "kl_in_reward", "--lake", lk.uri, *options).fault
        assert lk.scan("jobs").filter(kind="score").collect().is_empty()
        return f"no rows of checkpoint {score}" in fault

    assert refused("'new'; it has: no rows at all", "checkpoint=new")
    ratios(lk, ("ref", 3))
    assert refused("'ref', policy_version 5; it has: ref (policy_version 3)", "checkpoint=ref", "policy_version=5")
    assert cli("score", "kl_in_reward", "--lake", lk.uri, "--arg", "checkpoint=ref").code == 0
    scores = lk.sql("SELECT value FROM current_scores WHERE step_index IS NULL")
    assert scores["value"].to_list() == [-0.5]
    ratios(lk, ("ref", 4), ("other", None))
    several = "'new'; it has: other, ref (policy_version 3), ref (policy_version 4)"
    fault = cli("score", "kl_in_reward", "--lake", lk.uri, "--arg", "checkpoint=new").fault
    assert f"no rows of checkpoint {several}" in fault


def test_a_scorer_named_like_the_recorded_return_is_told(
    lk: Lake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cli = runner(monkeypatch, capsys)
    assert "--score env_return@" not in cli("credit", "dr_grpo", "--lake", lk.uri).err
    assert cli("score", "env_return", "--lake", lk.uri).code == 0
    (version,) = lk.sql("SELECT scorer_version FROM current_scores WHERE scorer = 'env_return' LIMIT 1").row(0)
    assert f"--score env_return@{version} takes it" in cli("credit", "dr_grpo", "--lake", lk.uri).err
    named = cli("credit", "dr_grpo", "--lake", lk.uri, "--score", f"env_return@{version}")
    assert f"scores of env_return@{version}" in named.out


def test_versions_of_a_reward_never_stand_side_by_side(lk: Lake) -> None:
    """Another version opens another series, also where only some groups are computed anew."""
    dr_grpo = find_estimator("dr_grpo")()
    first = run_credit(lk, dr_grpo, score="judge@v1")
    assert first.groups_computed == 1
    score(lk, "judge", "v9", {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.5})
    second = run_credit(lk, dr_grpo, score="judge", where="rollout_index < 3")
    assert second.series_id != first.series_id
    assert run_credit(lk, dr_grpo, score="judge@v1").skipped, "the old version's rows stand"
