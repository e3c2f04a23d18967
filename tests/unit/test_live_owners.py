"""An impossible place of a lake is reported before anything is recorded for it; where it may come to be is no error."""

import socket
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from deltalake import DeltaTable

import lake
from lake import EpisodeRecord, StepRecord
from lake.cli import trajlake
from lake.errors import LakeAccessError, TrajlakeError, UsageError
from lake.live.delivery import adopt_spools
from lake.live.owners import check_lake_folder, resolve_owner, write_owner
from lake.live.spool import Spool


def test_a_place_that_can_hold_no_lake_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "main.py").write_text("")
    for uri, words in (
        (tmp_path / "file", "is a file, and a lake is a folder"),
        (tmp_path / "file" / "lake", "Not a directory; choose another folder"),
        (tmp_path / "code", "not a lake and not empty"),
        (Path("/proc/lake"), "choose another folder for the lake, or change its permissions"),
    ):
        with pytest.raises(LakeAccessError, match=words):
            check_lake_folder(uri)
    with pytest.raises(UsageError, match="cannot hold a lake"):
        check_lake_folder("ftp://somewhere/lake")
    assert [path.name for path in (tmp_path / "code").iterdir()] == ["main.py"]


def test_a_lake_and_a_place_for_one_are_taken(tmp_path: Path) -> None:
    check_lake_folder(tmp_path / "new" / "lake")
    lake.open(tmp_path / "new" / "lake", create=True)
    (tmp_path / "new" / "lake" / "notes.txt").write_text("beside the tables")
    check_lake_folder(tmp_path / "new" / "lake")
    check_lake_folder("s3://no-such-bucket/lake")


def started(folder: Path, *options: str) -> Result:
    """`trajlake record` into a lake below a folder that is not there, which fails to start."""
    arguments = [
        "--upstream",
        "http://127.0.0.1:9",
        "--lake",
        str(folder / "new" / "lake"),
        "--spool",
        str(folder / "spool"),
    ]
    return CliRunner().invoke(trajlake, ["record", *arguments, *options])


def test_a_recorder_that_fails_to_start_leaves_no_empty_lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as server:
        wrong = (
            ("--port", str(server.getsockname()[1])),
            ("--port", "0", "--spool", str(tmp_path / "file")),
            ("--port", "0", "--host", "10.255.255.1", "--token", "secret"),
            ("--port", "0", "--set", "spool_size=9"),
            ("--port", "0", "--durable", "--set", "on_full=drop"),
        )
        for options in wrong:
            done = started(tmp_path, *options)
            assert isinstance(done.exception, TrajlakeError | SystemExit), options
            assert done.exit_code != 0
            assert not (tmp_path / "new").exists(), options
    with pytest.raises(LakeAccessError):
        lake.recorder(tmp_path / "new" / "lake", run="r", spool=tmp_path / "file")
    assert not (tmp_path / "new").exists()
    (tmp_path / "new" / "lake").mkdir(parents=True)
    with pytest.raises(LakeAccessError):
        lake.recorder(tmp_path / "new" / "lake", run="r", spool=tmp_path / "file")
    assert (tmp_path / "new" / "lake").exists(), "it was there before"


@pytest.mark.parametrize("token", ["", " ", "\t \n"])
def test_blanks_are_no_token(tmp_path: Path, token: str) -> None:
    warnings = [
        started(tmp_path, "--host", "0.0.0.0", "--port", "0", *arguments) for arguments in ((), ("--token", token))
    ]
    assert [type(done.exception) for done in warnings] == [UsageError, UsageError]
    assert str(warnings[0].exception) == str(warnings[1].exception)
    assert "TRAJLAKE_RECORD_TOKEN" in str(warnings[1].exception)


@pytest.mark.parametrize("run", ["", "  ", "sk-proj-abcdefghijklmnopqrstuvwxyz0123456789AB"])
def test_a_run_that_no_row_could_bear_is_refused_before_a_call_is_taken(tmp_path: Path, run: str) -> None:
    done = started(tmp_path, "--port", "0", "--run", run)
    assert type(done.exception) is UsageError
    assert "--run" in str(done.exception)
    assert run.strip() not in str(done.exception) or not run.strip()


def test_a_lake_is_known_by_the_id_of_its_episodes(tmp_path: Path) -> None:
    """It stays through commits, compaction and a move, and another lake at its place has another one."""
    lk = lake.open(tmp_path / "lake", create=True)
    identity = lk.identity
    assert identity == DeltaTable(tmp_path / "lake" / "episodes").metadata().id
    for number in range(3):
        lk.append([EpisodeRecord(task_id=str(number), steps=[StepRecord(state="s", action="a")])], run_id="r")
    lk.compact("episodes")
    assert lk.identity == identity == DeltaTable(tmp_path / "lake" / "episodes").metadata().id
    (tmp_path / "lake").rename(tmp_path / "moved")
    assert lake.open(tmp_path / "moved").identity == identity
    assert lake.open(tmp_path / "lake", create=True).identity != identity


def test_the_id_of_a_lake_to_be_is_reserved_once_and_is_the_lakes(tmp_path: Path) -> None:
    first, second = resolve_owner(tmp_path / "lake"), resolve_owner(tmp_path / "lake")
    assert first == second
    assert lake.open(tmp_path / "lake", create=True).identity == first.lake
    reserved = tmp_path / "other" / "_trajlake" / "id"
    reserved.parent.mkdir(parents=True)
    reserved.write_bytes(b"\xff../..\n")
    with pytest.raises(LakeAccessError, match="delete it"):
        resolve_owner(tmp_path / "other")
    assert resolve_owner("s3://no-such-bucket/lake").lake is None


def test_a_spool_whose_owner_cannot_be_read_is_left_where_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    owner = resolve_owner(tmp_path / "lake")
    spool = Spool.create(tmp_path / "spools", owner=owner)
    spool.append(b"frame")
    assert spool.close()
    (spool.folder / "lake.json").write_bytes(b"[" * 100_000)
    assert adopt_spools(tmp_path / "spools", owner) == []
    assert str(spool.folder) in caplog.text
    write_owner(spool.folder, owner)
    (found,) = adopt_spools(tmp_path / "spools", owner)
    assert found.owner == owner
    found.close()
