"""`trajlake select`: filters on the command line and in a file, the report, users' faults."""

from pathlib import Path

import msgspec
import pytest

import lake
from testkit.command_line import Cli, runner
from testkit.lakes import add_credit, build_lake


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    from pipelines import COMMANDS

    monkeypatch.setitem(COMMANDS, "select", ("pipelines.select.commands:select", "Choose what is trained on."))
    return runner(monkeypatch, capsys)


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    lk = build_lake(tmp_path_factory.mktemp("select") / "lake")
    add_credit(lk)
    return lk.uri


def test_the_report_has_a_row_per_filter_in_order(cli: Cli, uri: str) -> None:
    filters = ["--filter", "dead_groups", "--filter", "max_steps=30", "--filter", "max_action_characters=7"]
    done = cli("select", "clean", "--lake", uri, *filters, "--format", "csv")
    assert done.code == 0
    header, *lines = done.out.splitlines()
    assert set(header.split(",")) == {"filter", "dropped_steps", "dropped_episodes", "steps_left", "episodes_left"}
    assert lines == [
        "dead_groups,10,30,14,42",
        "length,0,0,14,42",
        "length#2,0,22,14,20",
    ]
    assert done.err.splitlines()[0] == "clean: 14 of 24 episodes kept"
    assert done.err.splitlines()[1].startswith("written by job ")
    again = cli("select", "clean", "--lake", uri, *filters, "--format", "json")
    assert again.err.splitlines()[1].startswith("nothing to do: ")
    assert msgspec.json.decode(again.out)[0] == {
        "filter": "dead_groups",
        "dropped_episodes": 10,
        "dropped_steps": 30,
        "episodes_left": 14,
        "steps_left": 42,
    }
    assert cli("select", "clean", "--lake", uri, *filters, "--force").err.splitlines()[1].startswith("written by job ")


def test_a_selection_may_stand_in_a_file(cli: Cli, uri: str, tmp_path: Path) -> None:
    config = tmp_path / "select.toml"
    config.write_text(
        """
        [select]
        name = "either"
        [[select.filters]]
        kind = "status"
        keep = ["completed"]
        [[select.filters]]
        kind = "combined"
        keep = "any"
        filters = [{kind = "min_reward", at_least = 0.5}, {kind = "dead_groups"}]
        """
    )
    done = cli("select", "--lake", uri, "--config", config, "--where", "collection_round = 0", "--format", "json")
    assert [row["filter"] for row in msgspec.json.decode(done.out)] == ["status", "combined"]
    assert done.err.startswith("either: 11 of 12 episodes kept")
    reasons = lake.open(uri).sql("SELECT DISTINCT reason FROM selections WHERE selection = 'either' AND NOT kept")
    assert reasons["reason"].to_list() == ["status failed"]


def test_a_credit_job_may_decide(cli: Cli, uri: str) -> None:
    job = lake.open(uri).sql("SELECT id_text(job_id) AS job FROM job_runs WHERE kind = 'credit'").item()
    done = cli("select", "credited", "--lake", uri, "--filter", "dead_groups", "--credit", job[:9], "--format", "csv")
    assert done.out.splitlines()[1:] == ["credit,0,0,24,72", "dead_groups,8,24,16,48"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "select: `name` is missing; `filters` is missing"),
        (("clean",), "no filters: pass --filter FILTER, or filters under [select] of --config FILE"),
        (("a b", "--filter", "status"), "select: `name` is 'a b'; valid: letters, digits"),
        (("clean", "--filter", "dead"), "unknown filter 'dead'"),
        (("clean", "--filter", "top_q"), "set either fraction or count"),
        (("clean", "--filter", "status", "--where", "true) UNION (SELECT 1"), "more than one SQL expression"),
        (("clean", "--filter", "status", "--score", "judge"), "no scores of 'judge' for episodes; valid: env_return"),
        (("clean", "--filter", "status", "--credit", "zzzz"), "names no estimator, series or job with advantages"),
        (("clean", "--filter", "min_steps=99"), "leaves none of 24 episodes (dropped: length 24)"),
        (("clean", "--filter", "max_tokens=9"), "length dropped 24 for 'number of tokens unknown'; to keep what is"),
        (("clean", "--filter", "max_tokens=9"), "--filter KIND:KEY=VALUE,unknown=keep"),
        (("clean", "--filter", "max_steps=x"), "`filters.0.length.max_steps` is 'x'; valid: a whole number"),
        (("clean", "--config", "missing.toml"), "missing.toml"),
    ],
)
def test_a_users_fault_is_one_line(cli: Cli, uri: str, arguments: tuple[str, ...], message: str) -> None:
    assert message in cli("select", "--lake", uri, *arguments).fault
