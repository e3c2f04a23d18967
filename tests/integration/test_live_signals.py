"""A handler of signals that records, in the middle of records: nothing hangs, and each episode is there once."""

import signal
from pathlib import Path

import lake
from lake.live.recorder import Recorder
from testkit.copies import empty_lake


def play(recorder: Recorder, task: str, done: list[str]) -> None:
    with recorder.episode(task) as episode, episode.step(state="s") as step:
        step.action("a")
    done.append(task)


def test_a_handler_of_signals_may_record(tmp_path: Path) -> None:
    """The timer runs by this process's own time, so that its signals come while it records."""
    opened = empty_lake(tmp_path / "lake")
    done: list[str] = []
    by_handler: list[str] = []
    running: list[None] = []
    with lake.recorder(tmp_path / "lake", run="r", spool=tmp_path / "spool") as recorder:

        def handle(*_: object) -> None:
            if len(running) < 2:  # a handler is interrupted by the next signal, but not without end
                running.append(None)
                play(recorder, f"handler-{len(done)}-{len(running)}", by_handler)
                running.pop()

        before = signal.signal(signal.SIGVTALRM, handle)
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.002, 0.002)
            while len(by_handler) < 50:
                play(recorder, f"main-{len(done)}", done)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)
        assert recorder.stats().troubles == 0
    assert opened.sql("SELECT count(*) FROM episodes").item() == len(done) + len(by_handler)
