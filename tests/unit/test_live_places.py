"""Where a lake can never be is told before anything is recorded for it; where it may come to be is no error."""

import socket
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import lake
from lake.cli import trajlake
from lake.errors import LakeAccessError, TrajlakeError, UsageError
from lake.live.places import check_place


def test_a_place_that_can_hold_no_lake_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "main.py").write_text("")
    for place, words in (
        (tmp_path / "file", "is a file, and a lake is a folder"),
        (tmp_path / "file" / "lake", "Not a directory; choose another folder"),
        (tmp_path / "code", "not a lake and not empty"),
        (Path("/proc/lake"), "choose another folder for the lake, or change its permissions"),
    ):
        with pytest.raises(LakeAccessError, match=words):
            check_place(place)
    with pytest.raises(UsageError, match="no place for"):
        check_place("ftp://somewhere/lake")
    assert [path.name for path in (tmp_path / "code").iterdir()] == ["main.py"]


def test_a_lake_and_a_place_for_one_are_taken(tmp_path: Path) -> None:
    check_place(tmp_path / "new" / "lake")
    lake.open(tmp_path / "new" / "lake", create=True)
    (tmp_path / "new" / "lake" / "notes.txt").write_text("beside the tables")
    check_place(tmp_path / "new" / "lake")
    check_place("s3://no-such-bucket/lake")


def started(folder: Path, *options: str) -> Result:
    """`trajlake record` into a lake below a folder that is not there, which fails to start."""
    given = [
        "--upstream",
        "http://127.0.0.1:9",
        "--lake",
        str(folder / "new" / "lake"),
        "--spool",
        str(folder / "spool"),
    ]
    return CliRunner().invoke(trajlake, ["record", *given, *options])


def test_a_recorder_that_fails_to_start_leaves_no_empty_lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        wrong = (
            ("--port", str(taken.getsockname()[1])),
            ("--port", "0", "--spool", str(tmp_path / "file")),
            ("--port", "0", "--host", "10.255.255.1", "--token", "secret"),
            ("--port", "0", "--spool-size", "9"),
            ("--port", "0", "--durable", "--on-full", "drop"),
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
    told = [started(tmp_path, "--host", "0.0.0.0", "--port", "0", *given) for given in ((), ("--token", token))]
    assert [type(done.exception) for done in told] == [UsageError, UsageError]
    assert str(told[0].exception) == str(told[1].exception)
    assert "TRAJLAKE_RECORD_TOKEN" in str(told[1].exception)
