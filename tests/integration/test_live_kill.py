"""Recording processes that are killed, run out of disk or lose their lake: what was finished is there once, none twice.

The agents are threads of a separate process. Each prints the number of an episode when its context has been left,
which is when the recorder has promised it. Every process is killed at a random moment; the next one over the same lake
delivers what was left.
"""

import contextlib
import random
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

import lake
from lake.live.recorder import Recorder
from testkit.copies import empty_lake
from testkit.disks import disk
from testkit.processes import environment

AGENTS = """
import itertools, random, sys, threading
import lake

folder, first, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
numbers = itertools.count(first)

def work(recorder):
    for number in numbers:
        task = number % 100
        with recorder.episode(f"task-{task}", rollout_index=number, extra={"number": number}) as episode:
            for turn in range(steps):
                with episode.step(state=f"{number} sees {turn}") as step:
                    step.action(f"{number} does {turn}")
                    with step.tool_call("tool", {"turn": turn}) as call:
                        call.result("x" * random.randrange(2000))
                    step.reward(turn)
            episode.reward(number)
        sys.stdout.write(f"{number}\\n")
        sys.stdout.flush()

recorder = lake.recorder(f"{folder}/lake", run="agent", spool=f"{folder}/spool", batch_seconds=0.1)
for thread in [threading.Thread(target=work, args=(recorder,)) for _ in range(8)]:
    thread.start()
"""
STEPS = 3


def killed_after(folder: Path, seconds: float, first: int) -> list[int]:
    """The episodes that agents had finished when their process was killed, `seconds` after the first one."""
    command = [sys.executable, "-c", AGENTS, str(folder), str(first), str(STEPS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(), text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        lines += process.stdout.readlines()
        timer.join()
    # The line that was being written when the process died is no promise.
    return [int(line) for line in lines if line.endswith("\n")]


@pytest.mark.parametrize("moments", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_random_moments_every_finished_episode_is_there_once(moments: int, tmp_path: Path) -> None:
    draw = random.Random(moments)
    empty_lake(tmp_path / "lake")
    finished: list[int] = []
    for moment in range(moments):
        finished += killed_after(tmp_path, draw.uniform(0.0, 0.2), first=moment * 10**6)
    with lake.recorder(tmp_path / "lake", run="agent", spool=tmp_path / "spool") as recorder:
        assert recorder.flush(120)
        stats = recorder.stats()
    assert stats.rejected == 0
    rows = lake.open(tmp_path / "lake").sql(
        "SELECT rollout_index AS number, status, num_steps, env_return, episode_id FROM episodes"
    )
    counts = Counter(rows["number"].to_list())
    assert set(counts.values()) <= {1}
    assert set(finished) <= counts.keys()
    assert len(finished) > 5 * moments
    completed = rows.filter(rows["status"] == "completed")
    assert set(finished) <= set(completed["number"].to_list())
    assert (completed["num_steps"] == STEPS).all()
    assert (completed["env_return"] == completed["number"]).all()
    # Those that were not finished are what they were, and no more than the threads of each process.
    assert 0 <= rows.height - completed.height <= 8 * moments
    assert set(rows["status"]) <= {"completed", "aborted"}
    steps = lake.open(tmp_path / "lake").sql(
        "SELECT count(*) AS n, bool_and(action = rollout_index || ' does ' || step_index) AS is_own "
        "FROM steps JOIN episodes USING (episode_id)"
    )
    assert steps.row(0) == (rows["num_steps"].sum(), True)
    assert [path.name for path in (tmp_path / "spool").iterdir()] == ["lock"]


def agent(recorder: Recorder, number: int) -> None:
    """One episode."""
    with recorder.episode("task", rollout_index=number) as episode, episode.step(state="s") as step:
        step.action("x" * 20_000)


def delivered(folder: Path) -> list[int]:
    rows = lake.open(folder / "lake").sql("SELECT rollout_index AS number FROM episodes ORDER BY 1")
    return list(rows["number"])


def test_a_disk_that_is_full_below_the_spool_does_not_disturb_the_agent(tmp_path: Path) -> None:
    """What is finished in the meantime waits in memory, and arrives when there is room."""
    empty_lake(tmp_path / "lake")
    with disk(tmp_path / "disk", "1m") as small:
        recorder = lake.recorder(tmp_path / "lake", run="agent", spool=small / "spool", batch_seconds=0.05)
        agent(recorder, 0)
        assert recorder.flush(60)
        filler = small / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        problems = set()
        for number in range(1, 60):
            agent(recorder, number)
            problems.add(recorder.stats().problem)
        assert "No space left on device" in problems
        filler.unlink()
        assert recorder.close(60)
        stats = recorder.stats()
    assert (stats.finished, stats.left_out, stats.troubles) == (60, 0, 0)
    assert delivered(tmp_path) == list(range(60))


def test_a_spool_that_alone_fills_its_disk_makes_room_by_delivering(tmp_path: Path) -> None:
    empty_lake(tmp_path / "lake")
    with disk(tmp_path / "disk", "1m") as small:
        recorder = lake.recorder(tmp_path / "lake", run="agent", spool=small / "spool", batch_seconds=0.05)
        with recorder.episode("task", rollout_index=100) as episode:
            # The beginning of an open episode may be all that is still needed of the spool.
            with episode.step(state="s") as step:
                step.action("x" * 20_000)
            for number in range(100):
                agent(recorder, number)
            # A flush that finds the disk still full fails, and delivers what it can: a later one succeeds.
            assert any(recorder.flush(60) for _ in range(4))
            assert recorder.stats().delivered == 100
        assert recorder.close(60)
    assert delivered(tmp_path) == list(range(101))


def test_what_was_recorded_while_the_lake_was_away_is_delivered_by_the_next_process(tmp_path: Path) -> None:
    """Killed while its lake cannot be opened: another one, started when it can, finds all."""
    empty_lake(tmp_path / "lake")
    newest = max((tmp_path / "lake" / "episodes" / "_delta_log").glob("*.json"))
    damage = newest.with_name(f"{int(newest.stem) + 1:020}.json")
    damage.write_text("no commit")
    finished = killed_after(tmp_path, 0.1, first=0)
    damage.unlink()
    with lake.recorder(tmp_path / "lake", run="agent", spool=tmp_path / "spool"):
        pass
    assert finished
    assert set(finished) <= set(delivered(tmp_path))
