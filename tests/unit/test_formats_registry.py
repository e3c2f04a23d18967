"""Formats among each other: every file is claimed by one of them, however damaged, and by no other."""

from pathlib import Path

import pytest

from lake.errors import FormatError
from lake.formats.base.format import read_head
from lake.formats.registry import FORMATS, choose_format
from testkit.shared import CHECKOUT, shared_data

FIXTURES = CHECKOUT / "tests" / "golden" / "formats"
MADE = sorted(path for path in FIXTURES.rglob("*") if path.is_file() and path.suffix not in (".py", ".md", ".pyc"))
READ_WITH_OTHERS = {".txt", ".db-wal", ".db-shm"}


def claims(path: Path) -> list[str]:
    """The formats that say a file is theirs, or know what of theirs it is."""
    head = read_head(path)
    return [fmt.name for fmt in FORMATS.values() if fmt.recognise(head) or fmt.no_trajectory(head) is not None]


def real_files() -> list[Path]:
    """The shared files of all formats."""
    folder = shared_data("formats")
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".md", ".txt"))


@pytest.mark.parametrize("path", MADE, ids=[str(path.relative_to(FIXTURES)) for path in MADE])
def test_a_file_that_a_tool_wrote_is_claimed_by_one_format(path: Path) -> None:
    if path.suffix not in READ_WITH_OTHERS:
        assert len(claims(path)) == 1, claims(path)


def test_real_files_are_claimed_by_one_format_each() -> None:
    several = {path.name: formats_claiming for path in real_files() if len(formats_claiming := claims(path)) != 1}
    assert several == {}


@pytest.mark.parametrize("share", [0.3, 0.7, 0.95])
def test_a_text_that_is_cut_is_claimed_by_the_format_of_the_whole_or_by_none(share: float, tmp_path: Path) -> None:
    """What tells a document apart may be its last key: then no one guesses, but that rows of chats are chats."""
    for path in [*real_files(), *MADE]:
        if path.suffix == ".gz" or read_head(path).kind not in ("lines", "array", "object"):
            continue
        data = path.read_bytes()
        cut = tmp_path / path.name
        cut.write_bytes(data[: max(1, int(len(data) * share))])
        assert set(claims(cut)) <= {"messages", *claims(path)}, path


def test_no_format_claims_what_is_none_of_theirs(tmp_path: Path) -> None:
    for number, text in enumerate(
        ("{}", '{"a": 1}\n{"a": 2}', '[{"a": 1}]', "text", "a,b\n1,2", '{"messages": 1}', "[1]")
    ):
        path = tmp_path / f"{number}.json"
        path.write_text(text, "utf-8")
        with pytest.raises(FormatError, match="has no known format"):
            choose_format(path)
