"""Several lakes read as one: credit and training over both, snapshots of both, commands, refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import lake
from lake import Lake
from lake.cli import trajlake
from lake.errors import UsageError
from lake.locked import isolation
from lake.locked.query import LockedReader
from testkit.lakes import build_lake, rollout, siblings
from testkit.object_store import Store
from testkit.offline_runs import configured, interrupted
from testkit.wording import Wording
from trainer.policy.tiny_model import TinyModelConfig, make_tiny_model
from trainer.runs.offline import resume, train

TEAM_A = siblings("shared", [1.0, 0.0]) + siblings("own", [0.0, 1.0])
TEAM_B = [rollout("shared", index, float(index % 2)) for index in (2, 3)]
COUNT = "SELECT count(*) FROM episodes"


@pytest.fixture
def lakes(tmp_path: Path) -> tuple[Lake, Lake]:
    """Two lakes of one run; a group has siblings in both."""
    return build_lake(tmp_path / "a b", TEAM_A), build_lake(tmp_path / "b", TEAM_B)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(trajlake, [str(argument) for argument in arguments])


def lake_options(lakes: tuple[Lake, Lake]) -> list[str]:
    return [part for lk in lakes for part in ("--lake", lk.uri)]


def test_a_command_over_two_lakes_compares_siblings_in_both_and_writes_into_the_first(lakes: tuple[Lake, Lake]) -> None:
    a, b = lakes
    done = run("credit", "grpo", *lake_options(lakes))
    assert done.exit_code == 0, done.output
    assert "6 episodes, 18 steps in 2 groups" in done.output
    sizes = "SELECT task_id, max(group_size) FROM current_advantages JOIN episodes USING (episode_id) GROUP BY 1"
    rows = run("sql", f"{sizes} ORDER BY 1", "--format", "json", *lake_options(lakes))
    assert json.loads(rows.stdout) == [
        {"task_id": "own", "max(group_size)": 2},
        {"task_id": "shared", "max(group_size)": 4},
    ]
    assert (a.sql("SELECT count(*) FROM advantages").item(), b.snapshot().files("advantages")) == (18, [])
    assert "shared" in run("show", "--task", "shared", "--rollout", 3, *lake_options(lakes)).stdout


def test_a_snapshot_holds_both_and_is_opened_again_by_name_time_and_versions(lakes: tuple[Lake, Lake]) -> None:
    joined = lake.open([lk.uri for lk in lakes])
    snapshot = run("snapshot", "create", "before", *lake_options(lakes))
    assert snapshot.exit_code == 0, snapshot.output
    versions = joined.snapshot().versions
    lakes[1].append([rollout("late", 0, 1.0)], run_id="demo")
    assert joined.sql(COUNT).item() == 7
    assert joined.at("before").sql(COUNT).item() == 6
    assert joined.at(versions).versions == versions
    assert run("sql", COUNT, "--as-of", "before", *lake_options(lakes)).stdout.split()[-1] == "6"
    (pin,) = joined.snapshots()
    assert pin.versions == versions
    with pytest.raises(UsageError, match=r"several lakes: open .*a b and .*b together"):
        lakes[0].at(versions)
    with pytest.raises(UsageError, match="exactly the lakes of"):
        lake.open([lakes[1].uri, lakes[0].uri]).at(versions)
    with pytest.raises(UsageError, match="and 2 are open"):
        joined.at(1)
    joined.drop_snapshot("before")
    assert lakes[1].snapshots() == []


def test_a_name_that_one_lake_cannot_take_is_given_in_none(lakes: tuple[Lake, Lake]) -> None:
    lakes[1].name_snapshot("taken")
    with pytest.raises(UsageError, match="there is a snapshot 'taken' already"):
        lake.open([lk.uri for lk in lakes]).name_snapshot("taken")
    assert lakes[0].snapshots() == []


@pytest.mark.parametrize("named", [5, ["L", 5], {"L", "M"}])
def test_what_names_no_lakes_is_refused(named: Any, wording: Wording) -> None:
    """A set has no first lake, into which jobs would write."""
    with pytest.raises(UsageError, match="or a list of") as caught:
        lake.open(named)
    wording(caught.value, NAMED=repr(named))


def test_two_rollouts_under_one_name_are_refused(lakes: tuple[Lake, Lake], wording: Wording) -> None:
    lakes[1].append([rollout("own", 0, 0.5)], run_id="demo")
    with pytest.raises(UsageError, match="1 episode, for example") as caught:
        lake.open([lk.uri for lk in lakes]).sql(COUNT)
    wording(caught.value)
    other_id = lakes[1].sql("SELECT episode_id FROM episodes WHERE task_id = 'own'")["episode_id"]
    lakes[1].retract(other_id)
    assert lake.open([lk.uri for lk in lakes]).sql(COUNT).item() == 6


def test_an_episode_that_every_lake_retracted_is_gone_and_one_that_a_lake_shows_is_not(
    lakes: tuple[Lake, Lake],
) -> None:
    lakes[1].append(TEAM_A, run_id="demo")
    joined = lake.open([lk.uri for lk in lakes])
    some = lakes[0].sql("SELECT episode_id FROM episodes WHERE task_id = 'own' ORDER BY 1")["episode_id"]
    lakes[0].retract(some)
    assert joined.sql(COUNT).item() == 6
    assert joined.scan("steps").collect().height == 18
    lakes[1].retract(some[:1])
    assert joined.sql(COUNT).item() == 5


@pytest.mark.skipif(
    bool(isolation.find_missing_layers()), reason=f"no strong isolation here: {isolation.find_missing_layers()}"
)
def test_a_locked_query_reads_both(lakes: tuple[Lake, Lake]) -> None:
    lakes[1].append(TEAM_A[:1], run_id="demo")
    joined = lake.open([lk.uri for lk in lakes]).snapshot()
    assert LockedReader(joined).sql(f"SELECT (SELECT count(*) FROM job_runs), ({COUNT})").row(0) == (3, 6)


def test_training_over_two_lakes_is_training_on_one_and_is_resumed(tmp_path: Path) -> None:
    """Rows of text are rendered into the first lake; the interrupted run reads what it read before."""
    episodes = TEAM_A + TEAM_B
    single_lake = build_lake(tmp_path / "whole", episodes)
    lakes_in_parts = [build_lake(tmp_path / name, episodes[first::2]) for first, name in enumerate("ab")]
    joined = lake.open([part.uri for part in lakes_in_parts])
    make_tiny_model(single_lake.snapshot(), tmp_path / "model", TinyModelConfig(vocabulary=300, hidden_size=32))
    config = configured(tmp_path / "model", epochs=1, episodes_per_step=2, checkpoint_every=1)
    straight = train(single_lake, config, tmp_path / "straight", run_id="r")
    interrupted(joined, config, tmp_path / "out", after=2)
    lakes_in_parts[1].append([rollout("late", 0, 1.0)], run_id="demo")
    assert resume(joined, tmp_path / "out").weights_sha256 == straight.weights_sha256


@pytest.mark.slow("Lakes in one bucket are read together, and a folder beside them is not.")
def test_lakes_in_one_bucket_are_read_together_and_a_folder_beside_them_is_not(s3: Store, tmp_path: Path) -> None:
    uris = [f"{s3.root}/{name}" for name in "ab"]
    for uri, episodes in zip(uris, (TEAM_A, TEAM_B), strict=True):
        lake.open(uri, create=True, storage_options=s3.options).append(episodes, run_id="demo")
    joined = lake.open(uris, storage_options=s3.options)
    assert joined.sql(COUNT).item() == joined.scan("episodes").collect().height == 6
    local_lake = build_lake(tmp_path / "here", TEAM_B)
    with pytest.raises(UsageError, match="all in local folders"):
        lake.open([local_lake.uri, uris[0]], storage_options=s3.options).snapshot()
