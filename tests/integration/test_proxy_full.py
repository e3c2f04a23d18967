"""The recording proxy when spools and disks are full and buckets go away: what it let go arrives once.

It runs in this process, where its room can be made small.
"""

import json
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

import lake
from lake.live.proxy.relay import CallSettings
from testkit.copies import empty_lake
from testkit.disks import disk, grow
from testkit.engine_server import engine_server
from testkit.object_store import Store, answering, options, passed_on, send
from testkit.proxy_process import Client, proxy, proxy_here

CHAT = "/v1/chat/completions"
OF_TEXT: dict[str, Any] = {"settings": CallSettings(asks="never"), "batch_seconds": 0.05}
"""Delivered soon, and without token ids, which would be many times as long as the prompts, and are tested elsewhere."""


def answered(at: Client, number: int, size: int) -> tuple[int, bytes]:
    """What is answered to a call of a separate episode, with a prompt that the spool has to hold."""
    prompt = f"{number}: {'x' * size}"
    data = json.dumps({"model": "policy", "messages": [{"role": "user", "content": prompt}]}).encode()
    status, _, payload = at.ask("POST", f"/ep/{number}{CHAT}", data)
    return status, payload


def big(at: Client, number: int, size: int) -> int:
    """Its status alone."""
    return answered(at, number, size)[0]


def ended(at: Client, number: int) -> int:
    return at.ask("POST", f"/ep/{number}/v1/end", b"{}")[0]


def numbers(uri: str) -> list[int]:
    return sorted(int(name) for name in lake.open(uri).sql("SELECT task_id FROM episodes")["task_id"])


def unmount(folder: Path) -> None:
    """Take the lake away from a proxy that runs."""
    (folder / "lake").rename(folder / "away")
    (folder / "lake").write_text("nothing is mounted here")


def mount(folder: Path) -> None:
    """Give it back."""
    (folder / "lake").unlink()
    (folder / "away").rename(folder / "lake")


def eventually(check: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy that keeps less of its room for others and of its memory for frames, and tries again soon."""
    monkeypatch.setattr("lake.live.proxy.serve._RESERVE", 100_000)
    monkeypatch.setattr("lake.live.proxy.serve.BUFFER_BYTES", 1_600_000)
    monkeypatch.setattr("lake.live.delivery._LONGEST_PAUSE", 0.05)
    monkeypatch.setattr("lake.live.spool._LONGEST_PAUSE", 0.05)


def test_a_full_spool_refuses_calls_and_takes_them_again_when_it_is_delivered(tmp_path: Path) -> None:
    empty_lake(tmp_path / "lake")
    counts: list[int] = []
    with engine_server() as engine, proxy_here(engine, tmp_path, spool_bytes=400_000, **OF_TEXT) as at:
        unmount(tmp_path)
        while len(counts) < 20 and big(at, len(counts), 50_000) == 200:
            assert ended(at, len(counts)) == 200
            counts.append(len(counts))
        assert 1 < len(counts) < 20
        status, answer = answered(at, 20, 50_000)
        assert (status, b"no room to record" in answer, len(engine.asked)) == (503, True, len(counts))
        assert at.ask("GET", "/v1/models")[0] == 200
        mount(tmp_path)
        eventually(lambda: big(at, 20, 50_000) == 200)
        assert at.end().is_all
    assert numbers(at.lake) == [*counts, 20]


def test_a_full_spool_that_drops_lets_calls_go_on_and_leaves_out_whole_episodes(tmp_path: Path) -> None:
    empty_lake(tmp_path / "lake")
    small = {"spool_bytes": 400_000, "refuses": False, **OF_TEXT}
    with engine_server() as engine, proxy_here(engine, tmp_path, **small) as at:
        unmount(tmp_path)
        for number in range(6):
            assert [big(at, number, 25_000 + turn) for turn in range(3)] == [200] * 3
            assert ended(at, number) == 200
        mount(tmp_path)
        dropped = at.end().calls.dropped
    ((steps, count),) = lake.open(at.lake).sql("SELECT num_steps, count(*) FROM episodes GROUP BY ALL").rows()
    assert steps == 3, "an episode that lacks a call is none"
    assert 0 < count < 6
    assert dropped == 6 - count


def test_a_disk_that_fills_refuses_calls_and_loses_none_that_it_let_go(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    empty_lake(tmp_path / "lake")
    task_ids = []
    with (
        engine_server() as engine,
        disk(tmp_path / "disk", "300k") as small,
        proxy_here(engine, tmp_path, spool=small / "spool", spool_bytes=1 << 28, **OF_TEXT) as at,
    ):
        unmount(tmp_path)
        for number in range(60):
            if big(at, number, 50_000) != 200:
                break
            task_ids.append(number)
            status = ended(at, number)
            assert status == (503 if number > 3 else status), "it is in memory alone, and the agent is told so"
        assert 5 < len(task_ids) < 60
        assert b"no room to record" in at.ask("POST", CHAT, b'{"messages": []}')[2]
        grow(small, "256m")
        mount(tmp_path)
        eventually(lambda: big(at, 60, 1000) == 200)
        assert at.end().is_all
    assert "No space left on device" in caplog.text
    assert numbers(at.lake) == [*task_ids, 60]


@pytest.mark.slow("what is recorded while a bucket is away is there once when it is back, also of the proxy's process")
def test_a_bucket_that_goes_away_for_a_while_gets_every_episode_once(s3: Store, tmp_path: Path) -> None:
    state: dict[str, Any] = {"away": False, "refused": 0}

    def reply(request: BaseHTTPRequestHandler, body: bytes) -> None:
        if state["away"]:
            state["refused"] += 1
            send(request, 503)
            return
        status, data, headers = passed_on(s3.endpoint, request, body)
        request.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("connection", "transfer-encoding", "date", "server"):
                request.send_header(name, value)
        request.end_headers()
        request.wfile.write(data)

    with answering(reply) as endpoint, engine_server() as engine:
        variables = {name.upper(): value for name, value in options(endpoint).items()}
        with proxy(engine, tmp_path, "--lake", s3.root, **variables) as at:
            for number in range(30):
                state["away"] = 10 <= number < 20
                assert big(at, number, 100) == 200
                assert ended(at, number) == 200
                time.sleep(0.3)
            at.end()
    assert state["refused"] > 0
    task_ids = lake.open(s3.root, storage_options=s3.options).sql("SELECT task_id FROM episodes")["task_id"].to_list()
    assert sorted(map(int, task_ids)) == list(range(30))
