"""`trajlake eval` on real lakes."""

import json
from pathlib import Path

import polars as pl
import pytest

import lake
from lake import Lake
from lake.write.ingest import ingest
from testkit.command_line import Cli, runner
from testkit.lakes import build_lake, rollout, siblings
from testkit.shared import shared_data
from testkit.wording import Wording
from trainer.evaluation.success import read_attempts


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    return runner(monkeypatch, capsys)


@pytest.fixture(scope="module")
def lk(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Two versions of a policy on three tasks; one attempt failed without a score, one has a sub-agent."""
    episodes = []
    for version, outcomes in ((1, ([0.0, 1.0], [0.0, 0.0], [1.0, 0.0])), (2, ([1.0, 1.0], [0.0, 1.0], [1.0, None]))):
        for task, outcome in enumerate(outcomes):
            episodes += siblings(f"t{task}", outcome, policy_version=version, collection_round=version)
    episodes.append(rollout("t0", 9, 1.0, policy_version=2, relation="subagent", agent_id="helper"))
    return build_lake(tmp_path_factory.mktemp("eval") / "lake", episodes)


def table(cli: Cli, *arguments: object) -> dict[tuple[str, str], dict[str, object]]:
    done = cli("eval", *map(str, arguments), "--format", "json")
    assert done.code == 0, done.err
    return {(row["name"], row["measure"]): row for row in json.loads(done.out)}


def test_versions_of_a_policy(lk: Lake, cli: Cli) -> None:
    rows = table(cli, "--lake", lk.uri, "--by", "policy_version", "--k", "1,2")
    assert {name for name, _ in rows} == {"tiny@1", "tiny@2"}
    success = rows["tiny@2", "success"]
    assert (success["value"], success["attempts"], success["unscored"], success["tasks"]) == (0.8, 5, 1, 3)
    assert rows["tiny@1", "pass@1"]["value"] == pytest.approx(1 / 3)
    # t2 has one scored attempt of version 2: it says nothing of two.
    assert (rows["tiny@2", "pass@2"]["value"], rows["tiny@2", "pass@2"]["tasks"]) == (1.0, 2)
    assert rows["tiny@2", "pass^2"]["value"] == 0.5


def test_what_is_left_out_is_told(lk: Lake, cli: Cli, wording: Wording) -> None:
    done = cli("eval", "--lake", lk.uri)
    assert "(sub-agents, forks): 1" in wording(done.err)
    assert "attempts without a score" in done.err


def test_one_version_against_the_other(lk: Lake, cli: Cli) -> None:
    done = cli("eval", "--lake", lk.uri, "--by", "policy_version", "--against", "tiny@2", "tiny@1", "--format", "json")
    rows = {row["measure"]: row for row in json.loads(done.out)}
    assert rows["pass@1"]["difference"] == pytest.approx((0.5 + 0.5 + 0.5) / 3)
    # Three differences of the same sign: 2 of 8 patterns are as large.
    assert (rows["pass@1"]["p"], rows["pass@1"]["test"], rows["pass@1"]["tasks"]) == (0.25, "exact", 3)


def test_one_run_s_episodes(tmp_path: Path, cli: Cli) -> None:
    copy = build_lake(tmp_path / "lake", [*siblings("t", [1.0, 0.0]), *siblings("t", [1.0], run_id="other")])
    assert {name for name, _ in table(cli, "--lake", copy.uri)} == {"demo", "other"}
    rows = table(cli, "--lake", copy.uri, "--run", "other", "--by", "policy")
    assert [(row["value"], row["attempts"]) for (_, measure), row in rows.items() if measure == "success"] == [(1.0, 1)]
    fault = cli("eval", "--lake", copy.uri, "--run", "none").fault
    assert "--run 'none'" in fault
    assert "demo, other" in fault
    assert "satisfies" in cli("eval", "--lake", copy.uri, "--run", "other", "--where", "env_return < 1").fault


def test_a_scorer_s_values(lk: Lake, cli: Cli, tmp_path: Path) -> None:
    copy = build_lake(tmp_path / "lake", siblings("t", [1.0, 0.0, None]))
    ids = copy.scan("episodes").sort("rollout_index").select("episode_id", "group_id", "run_id").collect()
    for version, values in (("v1", [0.9, 0.1, 0.8]), ("v2", [0.2, None, 0.7])):
        with copy.job(kind="score", parameters={"version": version}) as job:
            scores = ids.with_columns(scorer=pl.lit("judge"), scorer_version=pl.lit(version), value=pl.Series(values))
            job.write("scores", scores)
    newest = table(cli, "--lake", copy.uri, "--score", "judge", "--threshold", "0.5")["demo", "success"]
    assert (newest["value"], newest["attempts"], newest["unscored"]) == (0.5, 2, 1)
    first = table(cli, "--lake", copy.uri, "--score", "judge@v1", "--threshold", "0.5")["demo", "success"]
    assert first["value"] == pytest.approx(2 / 3)
    assert "valid: judge@v1, judge@v2" in cli("eval", "--lake", copy.uri, "--score", "judge@v3").fault
    assert "valid: env_return, judge" in cli("eval", "--lake", copy.uri, "--score", "nobody").fault


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["--k", "0"], "--k '0': give whole numbers from 1 on"),
        (["--k", "two"], "--k 'two': give whole numbers"),
        (["--against", "demo", "nobody"], "there is no 'nobody' to compare; valid: demo"),
        (["--where", "nonsense = 1"], "--where 'nonsense = 1' is not a predicate"),
        (["--where", "false"], "no episode satisfies"),
    ],
)
def test_mistakes_are_one_line(lk: Lake, cli: Cli, arguments: list[str], fragment: str) -> None:
    assert fragment in cli("eval", "--lake", lk.uri, *arguments).fault


def test_names_without_a_common_task_cannot_be_compared(tmp_path: Path, cli: Cli, wording: Wording) -> None:
    episodes = [*siblings("a", [1.0], policy_version=1), *siblings("b", [0.0], policy_version=2)]
    lk = build_lake(tmp_path / "lake", episodes)
    fault = cli("eval", "--lake", lk.uri, "--by", "policy_version", "--against", "tiny@1", "tiny@2").fault
    assert "'tiny@1' and 'tiny@2' " in wording(fault)
    assert "(1 and 1 tasks)" in fault


def test_tasks_of_two_environments_do_not_mix(tmp_path: Path) -> None:
    episodes = [*siblings("0", [1.0], environment="air"), *siblings("0", [0.0], environment="rail", collection_round=1)]
    attempts = read_attempts(build_lake(tmp_path / "lake", episodes).snapshot(), by="run_id")
    assert attempts["task"].to_list() == ["air/0", "rail/0"]


def test_tau_bench_has_its_published_pass_hat_k(tmp_path: Path, cli: Cli) -> None:
    """README of sierra-research/tau-bench at 9ed9fd9, table Airline, TC (gpt-4o): 0.420, 0.273, 0.220, 0.200."""
    lk = lake.open(tmp_path / "lake", create=True)
    ingest(lk, shared_data("tau_bench", "gpt-4o-airline.json"))
    rows = table(cli, "--lake", lk.uri, "--k", "1,2,3,4")
    names = ("pass@1", "pass^2", "pass^3", "pass^4")
    assert [round(float(str(rows["gpt-4o-airline", name]["value"])), 3) for name in names] == [0.42, 0.273, 0.22, 0.2]
    stderr = cli("eval", "--lake", lk.uri, "--k", "4,5,9").err
    assert "--k 5,9: " in stderr
    assert "more than 4 scored attempts" in stderr
