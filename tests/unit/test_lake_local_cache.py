"""Parts of a bucket's files on a local disk: within their bound, whole or fetched again, fetched by one of several."""

import logging
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Barrier, Thread

import pytest

from lake.storage import local_cache, user_cache
from lake.storage.local_cache import LocalCache
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


def held(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_the_bound_holds_and_own_parts_stay_while_others_make_way(tmp_path: Path) -> None:
    limit, rng = 10_000, random.Random(0)
    asked: list[tuple[str, int]] = []
    earlier = LocalCache(tmp_path, limit, FILES[:2]).through(counting(asked))
    for _ in range(60):
        start, uri = rng.randrange(2_000), rng.choice(FILES[:2])
        assert earlier(uri, start, start + 1_500) == content(uri, start, start + 1_500)
        assert held(tmp_path) <= limit
    assert held(tmp_path) > limit // 2
    own = LocalCache(tmp_path, limit, FILES[2:]).through(counting(asked))
    parts = [(uri, start) for uri in FILES[2:] for start in range(0, 4_000, 1_000)]
    for _ in range(3):
        asked.clear()
        for uri, start in parts:
            assert own(uri, start, start + 2_000) == content(uri, start, start + 2_000)
            assert held(tmp_path) <= limit
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
    (tmp_path / "left-behind.new").write_bytes(b"by a process that was killed")
    assert read(FILES[0], 100, 900) == expected
    assert read(FILES[0], 100, 900) == expected
    assert len(asked) == 2
    assert sorted(path.suffix for path in tmp_path.iterdir() if path.stat().st_size) == [".part"]


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
        assert not list(folder.glob("*.new"))
    assert len(caplog.records) == 1
    assert user_cache.ENVIRONMENT in caplog.text


def test_a_folder_that_cannot_be_made_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    read = LocalCache(tmp_path / "file" / "cache", 1 << 20, FILES).through(content)
    for start in range(3):
        assert read(FILES[0], start, 100) == content(FILES[0], start, 100)
    assert len(caplog.records) == 1


def test_erasing_leaves_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(user_cache.ENVIRONMENT, str(tmp_path))
    folder = user_cache.folder(local_cache.KIND)
    LocalCache(folder, 1 << 20, FILES).through(content)(FILES[0], 0, 100)
    assert folder.stat().st_mode & 0o077 == 0, "nobody else reads the lake's tokens"
    local_cache.erase()
    assert not held(folder)
