"""Parts of a bucket's files on a local disk: within their bound, whole or fetched again, fetched by one of several."""

import errno
import fcntl
import logging
import os
import pwd
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest

from lake.errors import LakeAccessError
from lake.storage import local_cache
from lake.storage.local_cache import LocalCache, cache_reads
from testkit.disks import disk

FILES = [f"s3://b/l/tokens/{name}.parquet" for name in "abcd"]
WORKER = """
import sys
from pathlib import Path
from lake.storage.local_cache import LocalCache

def fetch(uri, start, end):
    with open(sys.argv[2], "a") as log:
        log.write(f"{uri} {start}\\n")
    return uri.encode().ljust(end - start, b".")

uris = [f"s3://b/{number}" for number in range(40)]
read = LocalCache(Path(sys.argv[1]), 1 << 20, uris).through(fetch)
input()
for uri in uris:
    assert read(uri, 0, 1000) == uri.encode().ljust(1000, b".")
"""


def content(uri: str, start: int, end: int) -> bytes:
    """What a file holds: told by its name alone."""
    return random.Random(uri).randbytes(end)[start:]


def counting(asked: list[tuple[str, int]]) -> Callable[[str, int, int], bytes]:
    """Reads a bucket, and remembers what was asked of it."""

    def read(uri: str, start: int, end: int) -> bytes:
        asked.append((uri, start))
        return content(uri, start, end)

    return read


def measure_folder(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.suffix != ".lock" and path.name != "lock")


def test_the_bound_holds_and_own_parts_stay_while_others_make_way(tmp_path: Path) -> None:
    limit, rng = 10_000, random.Random(0)
    asked: list[tuple[str, int]] = []
    earlier = LocalCache(tmp_path, limit, FILES[:2]).through(counting(asked))
    for _ in range(60):
        start, uri = rng.randrange(2_000), rng.choice(FILES[:2])
        assert earlier(uri, start, start + 1_500) == content(uri, start, start + 1_500)
        assert measure_folder(tmp_path) <= limit
    assert measure_folder(tmp_path) > limit // 2
    own = LocalCache(tmp_path, limit, FILES[2:]).through(counting(asked))
    parts = [(uri, start) for uri in FILES[2:] for start in range(0, 4_000, 1_000)]
    for _ in range(3):
        asked.clear()
        for uri, start in parts:
            assert own(uri, start, start + 2_000) == content(uri, start, start + 2_000)
            assert measure_folder(tmp_path) <= limit
    kept = limit // 2_016
    assert len(asked) == len(parts) - kept, "pass after pass the same parts come from the disk"


@pytest.mark.parametrize("damage", ["flipped", "short", "empty"])
def test_a_damaged_part_is_fetched_again(tmp_path: Path, damage: str) -> None:
    asked: list[tuple[str, int]] = []
    read = LocalCache(tmp_path, 1 << 20, FILES).through(counting(asked))
    expected = read(FILES[0], 100, 900)
    (part,) = tmp_path.glob("*.part")
    whole = part.read_bytes()
    part.write_bytes({"flipped": bytes([*whole[:-1], whole[-1] ^ 1]), "short": whole[:-1], "empty": b""}[damage])
    (tmp_path / ".left-behind.part.partial").write_bytes(b"by a process that was killed")
    later = LocalCache(tmp_path, 1 << 20, FILES).through(counting(asked))
    assert later(FILES[0], 100, 900) == expected
    assert later(FILES[0], 100, 900) == expected
    assert len(asked) == 2
    assert measure_folder(tmp_path) == len(whole), "nor is there anything else"


def test_of_several_processes_one_fetches_each_part(tmp_path: Path) -> None:
    log, folder = tmp_path / "log", tmp_path / "cache"
    command = [sys.executable, "-c", WORKER, str(folder), str(log)]
    workers = [subprocess.Popen(command, stdin=subprocess.PIPE, text=True) for _ in range(3)]
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("\n")
        worker.stdin.flush()
    assert [worker.wait(60) for worker in workers] == [0, 0, 0]
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.close()
    assert len(log.read_text().splitlines()) == 40


def test_of_several_threads_one_fetches_a_part(tmp_path: Path) -> None:
    asked: list[tuple[str, int]] = []
    gate, read = Barrier(4), LocalCache(tmp_path, 1 << 20, FILES).through(counting(asked))

    def go() -> None:
        gate.wait()
        for start in range(20):
            read(FILES[0], start, 500)

    threads = [Thread(target=go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(asked) == [(FILES[0], start) for start in range(20)]


def test_a_full_disk_is_said_once_and_read_around(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    asked: list[tuple[str, int]] = []
    with disk(tmp_path / "small", "64k") as folder, caplog.at_level(logging.WARNING):
        read = LocalCache(folder, 1 << 30, FILES).through(counting(asked))
        for _ in range(2):
            for start in range(10):
                assert read(FILES[0], start, 20_000) == content(FILES[0], start, 20_000)
        assert 10 < len(asked) < 20, "what was kept before the disk was full is still read from it"
        assert not list(folder.glob("*.partial"))
    assert len(caplog.records) == 1
    assert local_cache.CACHE_VARIABLE in caplog.text


def test_without_a_folder_of_the_user_nothing_is_kept_and_that_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv(local_cache.CACHE_VARIABLE, str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    for _ in range(2):
        read = cache_reads(content, 1 << 20, FILES)
        assert read(FILES[0], 0, 100) == content(FILES[0], 0, 100)
    assert not list((tmp_path / "temporary").iterdir())
    assert len(caplog.records) == 1
    local_cache.erase_cached_files()


def test_without_a_home_folder_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    for name in (local_cache.CACHE_VARIABLE, "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert cache_reads(content, 1 << 20, FILES) is content
    local_cache.erase_cached_files()
    assert local_cache.ensure_cache_folder("search").is_dir(), "the search has a folder of the process"


def test_a_folder_that_others_may_read_is_closed_to_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(local_cache.CACHE_VARIABLE, str(tmp_path))
    folder = local_cache.cache_path(local_cache.KIND)
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    cache_reads(content, 1 << 20, FILES)(FILES[0], 0, 100)
    assert [oct(path.stat().st_mode & 0o077) for path in (folder, *folder.glob("*.part"))] == ["0o0", "0o0"]
    folder.chmod(0o777)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert cache_reads(content, 1 << 20, FILES) is content, "what another user wrote is not read"
    assert folder.stat().st_mode & 0o777 == 0o777


def test_nothing_is_erased_in_a_folder_of_another_user_and_what_cannot_be_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(local_cache.CACHE_VARIABLE, str(tmp_path))
    cache_reads(content, 1 << 20, FILES)(FILES[0], 0, 100)
    folder = local_cache.cache_path(local_cache.KIND)

    def refused(self: Path, **_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refused)
        with pytest.raises(LakeAccessError, match=f"{folder} .*forgotten rows.*delete it yourself"):
            local_cache.erase_cached_files()
    owner = os.geteuid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: owner + 1)
        local_cache.erase_cached_files()
    assert measure_folder(folder)


def test_erasing_waits_for_a_fetch_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It began before the bucket's files were deleted, so what it writes is what is to be erased."""
    monkeypatch.setenv(local_cache.CACHE_VARIABLE, str(tmp_path))
    eraser = Thread(target=local_cache.erase_cached_files)

    def forgotten_meanwhile(uri: str, start: int, end: int) -> bytes:
        eraser.start()
        eraser.join(0.2)
        return content(uri, start, end)

    cache_reads(content, 1 << 20, FILES)(FILES[0], 0, 100)
    cache_reads(forgotten_meanwhile, 1 << 20, FILES)(FILES[1], 0, 100)
    eraser.join()
    assert not measure_folder(local_cache.cache_path(local_cache.KIND))


def test_erasing_takes_nothing_from_under_a_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(local_cache.CACHE_VARIABLE, str(tmp_path))
    folder = local_cache.require_cache_folder(local_cache.KIND)
    eraser = Thread(target=local_cache.erase_cached_files)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / ".a-0-1.part.partial").write_bytes(b"half of it")
        eraser.start()
        eraser.join(0.2)
        assert measure_folder(folder)
    eraser.join()
    assert not measure_folder(folder)


def test_what_finds_no_room_waits_for_nobody_and_the_folder_is_listed_seldom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked: list[int] = []
    listed: list[Path] = []
    flock, scandir = fcntl.flock, os.scandir

    def lock(descriptor: int, operation: int) -> None:
        locked.append(descriptor)
        flock(descriptor, operation)

    def listing(path: Path) -> Any:
        listed.append(path)
        return scandir(path)

    monkeypatch.setattr(fcntl, "flock", lock)
    monkeypatch.setattr(os, "scandir", listing)
    # Two ranks, in turn: neither knows what the other adds but from the folder.
    ranks = [LocalCache(tmp_path, 10 * 1_016, FILES).through(content) for _ in range(2)]
    for start in range(10):
        ranks[start % 2](FILES[0], start, start + 1_000)
    assert locked
    assert len(listed) == 2, "when each begins"
    assert measure_folder(tmp_path) == 10 * 1_016
    for rank in ranks:
        rank(FILES[0], 10, 1_010)
    assert measure_folder(tmp_path) == 10 * 1_016
    locked.clear()
    listed.clear()
    for start in range(11, 20):
        for rank in ranks:
            assert rank(FILES[0], start, start + 1_000) == content(FILES[0], start, start + 1_000)
    assert measure_folder(tmp_path) == 10 * 1_016
    assert not locked
    assert not listed


def test_a_part_that_cannot_fit_puts_nothing_out(tmp_path: Path) -> None:
    asked: list[tuple[str, int]] = []
    other = LocalCache(tmp_path, 10_000, FILES[:1]).through(counting(asked))
    other(FILES[0], 0, 5_000)
    own = LocalCache(tmp_path, 10_000, FILES[1:]).through(content)
    own(FILES[1], 0, 3_000)
    own(FILES[1], 0, 8_000)
    other(FILES[0], 0, 5_000)
    assert len(asked) == 1


def test_good_data_is_used_where_its_use_cannot_be_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(path: Path) -> None:
        raise PermissionError(path)

    asked: list[tuple[str, int]] = []
    read = LocalCache(tmp_path, 1 << 20, FILES).through(counting(asked))
    monkeypatch.setattr(os, "utime", refused)
    assert read(FILES[0], 0, 100) == read(FILES[0], 0, 100)
    assert len(asked) == 1
    assert not caplog.records
