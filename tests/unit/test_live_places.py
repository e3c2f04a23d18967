"""Where a lake can never be is told before anything is recorded for it; where it may come to be is no error."""

from pathlib import Path

import pytest

import lake
from lake.errors import LakeAccessError, UsageError
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
