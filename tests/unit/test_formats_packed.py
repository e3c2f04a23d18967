"""Packed sources: gzip and zstd are read like the text they hold; where one is damaged, what came before is kept."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from lake.errors import FormatError
from lake.formats.base.format import Item
from lake.formats.base.source import get_stem
from lake.formats.registry import FORMATS, choose_format
from lake.records import Reject
from lake.write.sources import Argument, File, plan_ingest
from testkit.episodes import episode, line

LINES = b"".join(line(episode(f"task {n}", extra={"x": str(n) * 50})) for n in range(300))
ARRAY = json.dumps(
    [{"task_id": n, "trial": 0, "reward": 1, "traj": [{"role": "assistant", "content": "a"}]} for n in range(300)]
).encode()
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "zst": lambda data: bytes(pa.Codec("zstd").compress(data, asbytes=True)),
}
packed = pytest.mark.parametrize("ending", PACKERS)
sources = pytest.mark.parametrize(("name", "text"), [("jsonl", LINES), ("tau_bench", ARRAY)])


def read(path: Path, content: bytes, name: str) -> list[Item]:
    path.write_bytes(content)
    return list(FORMATS[name].read(path))


def comparable(items: list[Item]) -> list[Any]:
    return [item if isinstance(item, Reject) else item[1] for item in items]


@packed
@sources
def test_a_packed_file_reads_like_its_text(tmp_path: Path, ending: str, name: str, text: bytes) -> None:
    path = tmp_path / f"airline.json.{ending}"
    half = len(text) // 2
    pack = PACKERS[ending]
    plain = comparable(read(tmp_path / "airline.json", text, name))
    assert len(plain) == 300
    assert comparable(read(path, pack(text), name)) == plain
    assert comparable(read(path, pack(text[:half]) + pack(text[half:]), name)) == plain, "several pieces are one text"
    assert choose_format(path).name == name
    for named in (path, tmp_path / "airline.json"):
        assert plan_ingest(Argument(str(named), [File(named, named.name, named)])).report.run_id == "airline"


@packed
@sources
@pytest.mark.parametrize("left_out", [1, 4, 40])
def test_a_packed_file_that_is_cut_keeps_what_came_before(
    tmp_path: Path, ending: str, name: str, text: bytes, left_out: int
) -> None:
    *before, last = read(tmp_path / "f", PACKERS[ending](text)[:-left_out], name)
    assert isinstance(last, Reject)
    assert last.reason == "truncated"
    assert "data of f is cut: " in last.message
    assert "up to about byte" in last.message
    assert all(not isinstance(item, Reject) for item in before)
    assert last.position == len(before) + (name == "jsonl")


@packed
@sources
def test_damage_inside_a_packed_file_is_one_reject(tmp_path: Path, ending: str, name: str, text: bytes) -> None:
    data = bytearray(PACKERS[ending](text))
    data[-6] ^= 0xFF  # gzip: the checksum; zstd: inside the last block
    *before, last = read(tmp_path / "f", bytes(data), name)
    assert isinstance(last, Reject)
    assert last.reason == "malformed"
    assert "is damaged (" in last.message
    assert all(not isinstance(item, Reject) for item in before)


def test_what_was_whole_before_the_damage_is_kept_however_small_the_file(tmp_path: Path) -> None:
    data = bytearray(gzip.compress(LINES))
    cut, behind = data[: len(data) // 2], data + b"more"
    data[-6] ^= 0xFF
    counts = [len(read(tmp_path / "f", bytes(content), "jsonl")) for content in (cut, behind, data)]
    assert counts[0] > 100
    assert counts[1:] == [301, 301]


@packed
def test_a_packed_file_of_which_nothing_can_be_read_is_an_error(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"f.{ending}"
    path.write_bytes(PACKERS[ending](LINES)[:12])
    with pytest.raises(FormatError, match=r"is cut.*nothing in it"):
        choose_format(path)


def test_only_endings_of_packed_files_are_taken_off_twice() -> None:
    assert [get_stem(Path(name)) for name in ("a.jsonl.gz", "a.json.zst", "a.b.json", "a.gz")] == ["a", "a", "a.b", "a"]
