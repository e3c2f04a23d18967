"""A bucket that goes away while agents are recorded, and clocks that jump: what was finished arrives once.

The agents hear of nothing: no call raises, and none is refused.
"""

import dataclasses
import functools
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import lake
from lake.live.recorder import Recorder
from lake.storage.objects import Objects
from testkit.object_store import Store
from testkit.port_forward import forward_port
from testkit.processes import environment

STEPS = 3


def agent(recorder: Recorder, number: int, pause: Callable[[], None] = lambda: None) -> None:
    """One episode."""
    with recorder.episode("task", rollout_index=number) as episode:
        messages = [{"role": "user", "content": "begin"}]
        for turn in range(STEPS):
            pause()
            with episode.step(messages=messages) as step:
                step.action(f"{number}.{turn}")
            messages += [{"role": "assistant", "content": f"{number}.{turn}"}, {"role": "user", "content": "go on"}]
        episode.reward(number)


def until(met: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


@pytest.mark.slow("what is recorded while a bucket is away for a minute arrives when it is back, and this is told once")
@pytest.mark.parametrize("seconds", [0, 60])
def test_what_is_recorded_while_a_bucket_is_away_arrives_when_it_is_back(
    s3: Store, tmp_path: Path, seconds: float, caplog: pytest.LogCaptureFixture
) -> None:
    with forward_port(s3.endpoint) as forward:
        store = dataclasses.replace(s3, endpoint=forward.endpoint)
        recorder = lake.recorder(
            store.root, run="r", spool=tmp_path / "spool", batch_seconds=0.05, storage_options=store.options
        )
        agent(recorder, 0)
        assert recorder.flush(120)
        forward.shut()
        for number in range(1, 20):
            agent(recorder, number)
        until(lambda: recorder.stats().problem is not None)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.5)
        agent(recorder, 20)
        assert recorder.stats().delivered == 1
        forward.open()
        until(lambda: recorder.flush(120))
        stats = recorder.stats()
        assert recorder.close(120)
    assert (stats.delivered, stats.rejected, stats.left_out, stats.troubles) == (21, 0, 0, 0)
    assert stats.problem is None
    assert caplog.text.count("it is tried again") == 1
    rows = lake.open(s3.root, storage_options=s3.options).sql(
        "SELECT rollout_index, num_steps FROM episodes ORDER BY 1"
    )
    assert rows.rows() == [(number, STEPS) for number in range(21)]


def test_a_bucket_that_comes_and_goes_has_each_episode_once(s3: Store, tmp_path: Path) -> None:
    """Shut at random moments, in the middle of commits too: an answer that was lost is no second episode."""
    draw = random.Random(5)
    with forward_port(s3.endpoint) as forward:
        store = dataclasses.replace(s3, endpoint=forward.endpoint)
        recorder = lake.recorder(
            store.root, run="r", spool=tmp_path / "spool", batch_seconds=0.02, storage_options=store.options
        )
        recorder.flush(120)
        for moment in range(4):
            for number in range(5):
                agent(recorder, 5 * moment + number)
            time.sleep(draw.uniform(0.0, 0.4))
            forward.shut()
            time.sleep(draw.uniform(0.0, 0.2))
            forward.open()
        until(lambda: recorder.flush(120))
        stats = recorder.stats()
        assert recorder.close(120)
    assert (stats.delivered, stats.rejected, stats.left_out) == (20, 0, 0)
    opened = lake.open(s3.root, storage_options=s3.options)
    numbers = opened.sql("SELECT rollout_index FROM episodes ORDER BY 1")["rollout_index"].to_list()
    assert numbers == list(range(20))
    assert opened.sql("SELECT count(*) AS n FROM steps").item() == 20 * STEPS


def test_clocks_that_jump_by_days_lose_and_reorder_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program's clock and the lake's, forth and back, between steps, episodes and commits."""
    draw, ahead, real = random.Random(3), [0.0], time.time

    def jump() -> None:
        ahead[0] = draw.choice([-40, -1, -0.1, 0, 0.1, 1, 40]) * 86400 * draw.random()

    def now() -> datetime:
        return datetime.now(UTC) + timedelta(seconds=ahead[0])

    monkeypatch.setattr("time.time", lambda: real() + ahead[0])
    monkeypatch.setattr("lake.opening.open", functools.partial(lake.open, clock=now))
    with lake.recorder(tmp_path / "lake", run="r", spool=tmp_path / "spool", batch_seconds=0.02) as recorder:

        def work(first: int) -> None:
            for number in range(first, first + 8):
                agent(recorder, number, jump)

        threads = [threading.Thread(target=work, args=(8 * n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert recorder.flush(60)
        assert recorder.stats().troubles == 0
    opened = lake.open(tmp_path / "lake")
    query = (
        "SELECT rollout_index, bool_and(s.started_at BETWEEN e.started_at AND e.ended_at) AS is_inside, "
        "list(action ORDER BY s.started_at) = list(action ORDER BY step_index) AS is_ordered, count(*) AS steps "
        "FROM steps s JOIN episodes e USING (episode_id) GROUP BY ALL ORDER BY 1"
    )
    assert opened.sql(query).rows() == [(number, True, True, STEPS) for number in range(24)]


KILLED = """
import os, signal, sys, time
import lake
from lake.live.owners import read_owner

recorder = lake.recorder(sys.argv[1], run="r", spool=sys.argv[2], batch_seconds=0.05)
with recorder.episode("old").step(state="s") as step:
    step.action("a")
recorder._sink.spool.sync(60)
while read_owner(recorder._sink.spool.folder).lake is None:
    time.sleep(0.05)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_recorded_for_a_deleted_lake_of_a_bucket_is_kept_apart(
    s3: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its recorder asked for the lake's id before anything had ended, and was killed then."""
    for name, value in s3.options.items():
        monkeypatch.setenv(name.upper(), value)
    lake.open(s3.root, create=True)
    program = [sys.executable, "-c", KILLED, s3.root, str(tmp_path / "spool")]
    env = {name.upper(): value for name, value in s3.options.items()}
    done = subprocess.run(program, env=environment(**env), timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    objects = Objects(s3.root)
    objects.delete([entry.path for entry in objects.list()])
    with lake.recorder(s3.root, run="r", spool=tmp_path / "spool") as recorder:
        agent(recorder, 1)
        assert recorder.flush(120)
    assert lake.open(s3.root).sql("SELECT task_id FROM episodes")["task_id"].to_list() == ["task"]
    assert caplog.text.count("trajlake spools") == 1
    assert len(list((tmp_path / "spool").rglob("*.frames"))) == 1
