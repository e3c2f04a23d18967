"""The spool: what was synced is read back, no matter what happens to the file behind it.

1. Laws of segments, over any frames: cuts, flipped bits, bytes in a wrong place.
2. A spool in this process: order, sync, room, trimming, a disk that refuses.
3. Spools of processes that died.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lake.errors import LakeAccessError
from lake.live import spool as spool_module
from lake.live.owners import spool_root
from lake.live.spool import (
    FRAME_BYTES,
    HEADER_BYTES,
    START,
    Spool,
    SpoolFullError,
    new_header,
    pack_frames,
    read_frames,
)
from testkit.processes import environment

PAYLOADS = st.lists(st.binary(min_size=1, max_size=60), max_size=8)


# ---------------------------------------------------------------- 1. laws


def read_back(data: bytes) -> list[bytes]:
    return [payload for _, payload in read_frames(data[HEADER_BYTES:], data[:HEADER_BYTES])]


@given(PAYLOADS, st.data())
def test_a_segment_that_is_cut_anywhere_holds_the_frames_before_the_cut(
    payloads: list[bytes], data: st.DataObject
) -> None:
    header = new_header()
    packed = header + pack_frames(payloads, header, HEADER_BYTES)
    cut = data.draw(st.integers(HEADER_BYTES, len(packed)))
    ends = [HEADER_BYTES + sum(len(p) + FRAME_BYTES for p in payloads[: n + 1]) for n in range(len(payloads))]
    assert read_back(packed[:cut]) == payloads[: sum(end <= cut for end in ends)]


@given(PAYLOADS.filter(bool), st.data())
def test_a_flipped_bit_never_gives_a_wrong_frame(payloads: list[bytes], data: st.DataObject) -> None:
    header = new_header()
    damaged = bytearray(header + pack_frames(payloads, header, HEADER_BYTES))
    bit = data.draw(st.integers(0, 8 * len(damaged) - 1))
    damaged[bit // 8] ^= 1 << bit % 8
    frames = read_back(bytes(damaged))
    assert len(frames) < len(payloads)
    assert frames == payloads[: len(frames)]


@given(PAYLOADS, st.binary(max_size=200))
def test_nothing_behind_a_torn_frame_is_taken(payloads: list[bytes], after: bytes) -> None:
    """Not even whole frames: what was written later may depend on what is torn."""
    header = new_header()
    first = pack_frames(payloads, header, HEADER_BYTES)
    torn = pack_frames([b"torn"], header, HEADER_BYTES + len(first))[:-1]
    behind = pack_frames([b"whole", after + b"."], header, HEADER_BYTES + len(first) + len(torn))
    assert read_back(header + first + torn + behind) == payloads


@given(PAYLOADS.filter(lambda payloads: len(payloads) > 1))
def test_frames_of_another_segment_or_place_are_none(payloads: list[bytes]) -> None:
    header, other_header = new_header(), new_header()
    data = pack_frames(payloads, header, HEADER_BYTES)
    assert read_back(other_header + data) == []
    assert read_back(header + data[FRAME_BYTES + len(payloads[0]) :]) == []


def test_blocks_that_were_never_written_are_no_frames() -> None:
    header = new_header()
    assert read_back(header + pack_frames([b"one"], header, HEADER_BYTES) + bytes(4096)) == [b"one"]


# ---------------------------------------------------------------- 2. in one process


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    spool = Spool.create(tmp_path / "spools", segment_bytes=1000)
    yield spool
    spool.close()


def contents(spool: Spool) -> list[bytes]:
    return [payload for _, payload in spool.frames()]


def fill(spool: Spool, patience: float = 10) -> None:
    for _ in range(100):
        spool.append(b"x" * 100)
        spool.sync(patience)


def test_what_was_synced_is_read_in_order_over_many_segments(spool: Spool) -> None:
    sent = [b"%d" % number * 50 for number in range(100)]
    for payload in sent:
        spool.append(payload)
        assert spool.sync(10)
    frames = list(spool.frames())
    assert [payload for _, payload in frames] == sent
    assert all(start < two for (start, _), (two, _) in pairwise(frames))
    assert len({position.segment for position, _ in frames}) > 5
    assert [spool.payload(position) for position, _ in frames[::30]] == sent[::30]
    assert [payload for _, payload in spool.frames(frames[41][0])] == sent[42:]


def test_threads_lose_nothing_and_keep_their_own_order(spool: Spool) -> None:
    def work(name: int) -> None:
        for number in range(200):
            spool.append(b"%d %d" % (name, number))

    threads = [threading.Thread(target=work, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert spool.sync(10)
    pairs = [tuple(map(int, payload.split())) for payload in contents(spool)]
    assert len(pairs) == 1600
    assert all([number for writer, number in pairs if writer == name] == list(range(200)) for name in range(8))


def test_a_full_spool_refuses_and_has_room_again_when_it_is_trimmed(tmp_path: Path) -> None:
    spool = Spool.create(tmp_path, max_bytes=3000, segment_bytes=500)
    with pytest.raises(SpoolFullError, match=r"no room for 108 bytes: it holds 2,\d\d\d of 3,000 bytes"):
        fill(spool)
    spool.append(b"a small word that lets others go", is_reserved=True)
    with pytest.raises(SpoolFullError):
        spool.append(b"x" * 100, wait=0.01)
    waiting = threading.Thread(target=spool.append, args=(b"y" * 100,), kwargs={"wait": 10})
    waiting.start()
    spool.trim(list(spool.frames())[15][0])
    waiting.join()
    assert spool.sync(10)
    assert contents(spool)[-1] == b"y" * 100
    assert spool.size < 3000
    with pytest.raises(SpoolFullError):
        spool.append(b"z" * 3000, wait=10)
    spool.close(remove=True)


def test_only_whole_segments_before_a_position_are_deleted(spool: Spool) -> None:
    for number in range(60):
        spool.append(b"%03d" % number * 20)
        spool.sync(10)
    frames = list(spool.frames())
    spool.trim(START)
    assert contents(spool) == [payload for _, payload in frames]
    position, payload = frames[37]
    spool.trim(position)
    remaining = contents(spool)
    assert remaining == [payload for _, payload in frames][-len(remaining) :]
    assert payload in remaining
    assert len(remaining) < 60


class Disk:
    """A disk that refuses the next writes, each after a part of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refusals = 0
        self._write = os.pwrite
        monkeypatch.setattr(spool_module.os, "pwrite", self.write)
        monkeypatch.setattr(spool_module, "_LONGEST_PAUSE", 0.001)

    def write(self, file: int, data: bytes, offset: int) -> int:
        if self.refusals:
            self.refusals -= 1
            self._write(file, bytes(data)[: len(data) // 2], offset)
            raise OSError(28, "No space left on device")
        return self._write(file, data, offset)


def test_a_disk_that_refuses_is_tried_again_and_nothing_is_lost(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    spool.append(b"before")
    assert spool.sync(10)
    disk = Disk(monkeypatch)
    disk.refusals = 10**9
    spool.append(b"first")
    assert not spool.sync(0.05)
    assert spool.problem == "No space left on device"
    spool.append(b"second")
    disk.refusals = 3
    assert spool.sync(10)
    assert spool.problem is None
    assert contents(spool) == [b"before", b"first", b"second"]
    # What the tries left behind is not read by anyone who comes next either.
    spool.close()
    (again,) = Spool.adopt(spool.folder.parent)
    assert contents(again) == [b"before", b"first", b"second"]
    assert again.cut_bytes == 0
    again.close()


def test_what_the_disk_refuses_fills_the_memory_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = Spool.create(tmp_path, buffer_bytes=1000)
    Disk(monkeypatch).refusals = 10**9
    with pytest.raises(SpoolFullError, match="because No space left on device"):
        fill(spool, patience=0.001)
    assert spool.size <= 1000
    assert not spool.close()


def test_a_folder_that_cannot_be_made_is_a_users_fault(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LakeAccessError, match="name another folder"):
        Spool.create(tmp_path / "file" / "spools")


def test_only_its_owner_may_read_a_spool(spool: Spool) -> None:
    spool.append(b"private")
    spool.sync(10)
    modes = {path.stat().st_mode & 0o077 for path in [spool.folder.parent, *spool.folder.parent.rglob("*")]}
    assert modes == {0}


def test_each_lake_and_program_has_spools_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAJLAKE_SPOOL", str(tmp_path / "spools"))
    roots = [spool_root(uri, part) for uri in ("a", "b/a", "s3://bucket/a") for part in ("recorder", "proxy")]
    assert len(set(roots)) == 6
    assert spool_root("a", "proxy") == spool_root(str(tmp_path / "a"), "proxy")
    assert all(root.is_relative_to(tmp_path / "spools") for root in roots)


# ---------------------------------------------------------------- 3. dead processes


def test_a_living_process_keeps_its_spool_and_a_dead_ones_is_taken_over_once(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from lake.live.spool import Spool; "
        "spool = Spool.create(Path(sys.argv[1])); spool.append(b'one'); spool.sync(); "
        "spool.append(b'two'); spool.sync(); print('ready', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment()
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert Spool.adopt(tmp_path) == []
        process.send_signal(signal.SIGKILL)
    (adopted,) = Spool.adopt(tmp_path)
    assert contents(adopted) == [b"one", b"two"]
    assert Spool.adopt(tmp_path) == []
    adopted.append(b"three")
    assert adopted.sync(10)
    assert contents(adopted) == [b"one", b"two", b"three"]
    adopted.close(remove=True)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_a_torn_tail_is_cut_and_told(spool: Spool, caplog: pytest.LogCaptureFixture) -> None:
    spool.append(b"whole")
    spool.close()
    path = spool_module.segment_path(spool.folder, 1)
    path.write_bytes(path.read_bytes() + pack_frames([b"x" * 100], b"", 0)[:50])
    (adopted,) = Spool.adopt(spool.folder.parent)
    assert adopted.cut_bytes == 50
    assert "50 invalid bytes" in caplog.text
    adopted.append(b"after")
    assert adopted.sync(10)
    assert contents(adopted) == [b"whole", b"after"]
    adopted.close()


def test_a_spool_of_a_newer_version_is_left_alone(spool: Spool, caplog: pytest.LogCaptureFixture) -> None:
    spool.append(b"whole")
    spool.close()
    path = spool_module.segment_path(spool.folder, 1)
    newer = path.read_bytes().replace(spool_module.MAGIC, spool_module.MAGIC[:-2] + b"02")
    path.write_bytes(newer)
    assert Spool.adopt(spool.folder.parent) == []
    assert "newer trajlake" in caplog.text
    assert path.read_bytes() == newer
