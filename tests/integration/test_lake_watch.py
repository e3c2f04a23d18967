"""`trajlake ingest --watch`: what is appended or put there is taken exactly once, no matter what happens to who
watches.

1. What is read when, in this process, by a clock of the test's own.
2. The command in its own process, next to others that write: interrupted, killed, started again.
3. Scores of episodes whose ingest was killed between the two commits.

What a watch leaves in the lake is compared with what one plain ingest of the same files leaves.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import lake
from lake import EpisodeRecord, Lake
from lake.errors import LakeAccessError, NotALakeError, UsageError
from lake.formats import jsonl
from lake.formats.base.format import Format, read_head
from lake.formats.base.source import Source
from lake.formats.registry import FORMATS
from lake.records import ScoreRecord
from lake.write import watch as watch_module
from lake.write.ingest import ingest, run_plan
from lake.write.sources import Report
from lake.write.watch import Watched, watch
from testkit.commands import Command
from testkit.copies import empty_lake
from testkit.episodes import assert_same, assert_whole, contents, episode, line, write_lines
from testkit.processes import Worker, at_the_gate
from testkit.wording import Wording

PATIENCE = 60.0
"""Seconds within which a watcher has to have taken something, on a busy machine too."""


# ---------------------------------------------------------------- 1. what is read when


class Clock:
    """Seconds, as the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(watch_module.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def lk(tmp_path: Path) -> Lake:
    return empty_lake(tmp_path / "lake")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "logs"
    folder.mkdir()
    return folder


def take_once(lk: Lake, watched: Watched) -> tuple[int, int, int]:
    """Records, new episodes and rejects of one look at everything."""
    reports = [run_plan(lk, plan, only_if_any=True) for plan in watched.list_changes()]
    for report in reports:
        assert report.records == report.new + report.present + report.rejected
    return tuple(sum(getattr(report, name) for report in reports) for name in ("records", "new", "rejected"))  # type: ignore[return-value]


def numbered(*numbers: int) -> list[EpisodeRecord]:
    return [episode("t", number) for number in numbers]


def append(path: Path, *items: EpisodeRecord | bytes) -> None:
    with path.open("ab") as file:
        file.write(b"".join(item if isinstance(item, bytes) else line(item) for item in items))


def same_as_one_ingest(lk: Lake, where: Path) -> None:
    """The lake shows what one ingest of the files as they are now would leave."""
    assert_whole(lk.snapshot())
    other_lake = empty_lake(where.parent / f"{where.name} at once")
    ingest(other_lake, where)
    names = ("episodes", "steps", "rejects")
    assert_same(contents(lk.snapshot(), names), contents(other_lake.snapshot(), names))


def test_lines_are_read_on_from_where_the_last_one_ended(lk: Lake, folder: Path, clock: Clock) -> None:
    path = write_lines(folder / "f.jsonl", numbered(0, 1))
    watched = Watched([str(folder)])
    assert take_once(lk, watched) == (2, 2, 0)
    assert take_once(lk, watched) == (0, 0, 0)
    append(path, *numbered(2), b"nonsense\n")
    assert take_once(lk, watched) == (2, 1, 1)
    assert lk.sql("SELECT position FROM rejects").item() == 4, "counted from the file's first line"
    same_as_one_ingest(lk, folder)


def test_half_a_line_is_left_until_its_other_half_comes(lk: Lake, folder: Path, clock: Clock) -> None:
    path = folder / "f.jsonl"
    text = line(episode("t", 0, extra={"note": "}"}))
    watched = Watched([str(folder)])
    for end in range(1, len(text) - 1):
        path.write_bytes(text[:end])
        assert take_once(lk, watched) == (0, 0, 0), text[:end]
    clock.now += 100
    assert take_once(lk, watched) == (0, 0, 0), "however long it takes"
    path.write_bytes(text)
    assert take_once(lk, watched) == (1, 1, 0)
    same_as_one_ingest(lk, folder)


def test_half_a_line_of_a_file_that_is_read_as_a_whole_is_left_too(lk: Lake, folder: Path, clock: Clock) -> None:
    chat = {"messages": [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "That."}]}
    row = json.dumps(chat).encode()
    path = folder / "chats.jsonl"
    watched = Watched([str(folder)])
    for text, expected in ((row[:-9], 0), (row, 1), (row + b"\n" + row[:-9], 1), (row + b"\n" + row + b"\n", 2)):
        path.write_bytes(text)
        take_once(lk, watched)
        clock.now += 2.1
        assert take_once(lk, watched)[0] == expected
    assert lk.sql("SELECT count(*) FROM rejects").item() == 0
    same_as_one_ingest(lk, folder)


def test_a_last_line_without_an_end_is_taken_and_its_end_is_no_line(lk: Lake, folder: Path, clock: Clock) -> None:
    path = folder / "f.jsonl"
    watched = Watched([str(path)])
    path.write_bytes(line(episode("t", 0)) + line(episode("t", 1)).rstrip())
    assert take_once(lk, watched) == (2, 2, 0)
    append(path, b"\n")
    assert take_once(lk, watched) == (0, 0, 0)
    append(path, b"nonsense\n")
    assert take_once(lk, watched) == (1, 0, 1)
    assert lk.sql("SELECT position FROM rejects").item() == 3
    same_as_one_ingest(lk, path)


@pytest.mark.parametrize("how", ["in place", "by another file", "shorter", "as long", "cut and appended"])
def test_a_file_that_is_written_anew_is_read_from_its_start(lk: Lake, folder: Path, clock: Clock, how: str) -> None:
    path = write_lines(folder / "f.jsonl", numbered(0, 1, 2))
    watched = Watched([str(folder)])
    assert take_once(lk, watched) == (3, 3, 0)
    if how == "in place":
        write_lines(path, numbered(3, 4, 5, 6))
        expected = (4, 4, 0)
    elif how == "by another file":
        write_lines(folder / "f.new.tmp", numbered(1, 2, 3, 4)).replace(path)
        expected = (4, 2, 0)
    elif how == "shorter":
        write_lines(path, numbered(5))
        expected = (1, 1, 0)
    elif how == "as long":
        write_lines(path, numbered(3, 4, 5))
        expected = (3, 3, 0)
    else:
        path.write_bytes(path.read_bytes()[: len(line(episode("t", 0))) + 5])
        assert take_once(lk, watched) == (1, 0, 0)
        append(path, b"\n", *numbered(7))
        expected = (2, 1, 1)
    assert take_once(lk, watched) == expected
    assert take_once(lk, watched) == (0, 0, 0)


def test_a_document_is_read_once_nobody_has_written_to_it_for_a_moment(lk: Lake, folder: Path, clock: Clock) -> None:
    path = folder / "runs.json"
    rows = tau(3)
    watched = Watched([str(folder)], quiet_seconds=2.0)
    text = json.dumps(rows)
    for end in (10, 100, len(text) - 1, len(text)):
        path.write_text(text[:end])
        clock.now += 1.5
        assert take_once(lk, watched) == (0, 0, 0)
    clock.now += 1.9
    assert take_once(lk, watched) == (0, 0, 0)
    clock.now += 0.2
    assert take_once(lk, watched) == (3, 3, 0)
    path.write_text(json.dumps(tau(4)))
    assert take_once(lk, watched) == (0, 0, 0)
    clock.now += 2.1
    assert take_once(lk, watched) == (4, 1, 0)


def test_a_packed_file_of_lines_is_read_whole_once_it_is_quiet(lk: Lake, folder: Path, clock: Clock) -> None:
    import gzip

    (folder / "f.jsonl.gz").write_bytes(gzip.compress(line(episode("t", 0))))
    watched = Watched([str(folder)])
    assert take_once(lk, watched) == (0, 0, 0)
    clock.now += 2.1
    assert take_once(lk, watched) == (1, 1, 0)


def test_a_session_is_read_again_as_a_whole_and_replaces_what_it_was(
    lk: Lake, folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        FORMATS, "jsonl", Format("jsonl", "sessions", jsonl.recognise, jsonl.read, by_line=False, is_whole=True)
    )
    watched = Watched([str(folder)])
    for steps in (1, 3, 3, 7):
        write_lines(folder / "s.jsonl", [episode("session", steps=steps)])
        take_once(lk, watched)
        clock.now += 2.1
        take_once(lk, watched)
    assert lk.sql("SELECT run_id, attempt, num_steps FROM episodes").rows() == [("s", 2, 7)]


def test_what_is_none_of_ours_is_told_once_and_looked_at_again_when_it_changes(
    lk: Lake, folder: Path, clock: Clock
) -> None:
    def skipped() -> dict[str, str]:
        return {name: why for plan in watched.list_changes() for name, why in plan.report.skipped.items()}

    path = folder / "notes.txt"
    path.write_text("hello")
    watched = Watched([str(folder)])
    assert skipped() == {}, "it may become something yet"
    clock.now += 2.1
    assert skipped().keys() == {"notes.txt"}
    clock.now += 10
    assert skipped() == {}
    write_lines(path, numbered(0))
    assert take_once(lk, watched) == (1, 1, 0)


def test_files_come_and_go(lk: Lake, folder: Path, clock: Clock) -> None:
    watched = Watched([str(folder / "later"), str(folder / "*.jsonl"), str(folder / "named.jsonl")])
    assert take_once(lk, watched) == (0, 0, 0)
    (folder / "later" / "new").mkdir(parents=True)
    assert take_once(lk, watched) == (0, 0, 0)
    write_lines(folder / "later" / "new" / "a.jsonl", numbered(0))
    write_lines(folder / "named.jsonl", numbered(1))
    assert take_once(lk, watched) == (2, 2, 0), "by two names, read once"
    (folder / "named.jsonl").unlink()
    assert take_once(lk, watched) == (0, 0, 0)
    write_lines(folder / "named.jsonl", numbered(2, 1))
    assert take_once(lk, watched) == (2, 1, 0)
    write_lines(folder / "next.tmp", numbered(2, 1, 3)).replace(folder / "named.jsonl")
    assert take_once(lk, watched) == (1, 1, 0), "another file, but it begins with what was read"


def test_a_log_that_is_rotated_stays_in_its_run(lk: Lake, folder: Path, clock: Clock) -> None:
    path = write_lines(folder / "a.jsonl", numbered(0, 1))
    watched = Watched([str(folder)])
    assert take_once(lk, watched) == (2, 2, 0)
    path.rename(folder / "a.jsonl.1")
    append(folder / "a.jsonl.1", *numbered(2))
    write_lines(path, numbered(3))
    assert take_once(lk, watched) == (2, 2, 0)
    path.rename(folder / "b.jsonl")
    assert take_once(lk, watched) == (0, 0, 0)
    assert set(lk.sql("FROM episodes")["run_id"]) == {"a"}


def test_what_is_no_file_is_told_once(lk: Lake, folder: Path, clock: Clock, wording: Wording) -> None:
    (folder / "link").symlink_to(folder.parent)
    watched = Watched([str(folder)])
    (plan,) = watched.list_changes()
    assert plan.report.skipped.keys() == {"link"}
    assert "name the folder to" in wording(plan.report.skipped["link"])
    assert watched.list_changes() == []


def test_a_file_that_goes_while_it_is_looked_at_is_left_until_it_is_there_again(
    lk: Lake, folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lines(folder / "a.jsonl", numbered(0))

    def open_missing(at: Path) -> Any:
        at.unlink()
        monkeypatch.setattr(watch_module, "read_head", read_head)
        return Source(at)

    monkeypatch.setattr(watch_module, "read_head", open_missing)
    watched = Watched([str(folder)])
    assert take_once(lk, watched) == (0, 0, 0)
    write_lines(path, numbered(0))
    assert take_once(lk, watched) == (1, 1, 0)


def test_a_file_that_goes_while_it_is_read_does_not_end_the_watch(
    lk: Lake, folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    class DoneError(Exception):
        pass

    write_lines(folder / "a.jsonl", numbered(0))
    path = write_lines(folder / "b.jsonl", numbered(1))
    rounds = iter(range(4))
    reports: list[Report] = []

    def sleep(_: float) -> None:
        if next(rounds) == 2:
            raise DoneError
        write_lines(path, numbered(1))

    def run_on_missing(at: Lake, plan: Any, **options: Any) -> Report:
        path.unlink(missing_ok=not reports)
        monkeypatch.setattr(watch_module, "run_plan", run_plan)
        return run_plan(at, plan, **options)

    monkeypatch.setattr(watch_module, "run_plan", run_on_missing)
    monkeypatch.setattr(watch_module.time, "sleep", sleep)
    with pytest.raises(DoneError):
        watch(lk, Watched([str(folder)]), tell=reports.append)
    same_as_one_ingest(lk, folder)


def test_a_failure_of_the_lake_ends_the_watch(lk: Lake, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_lines(folder / "a.jsonl", numbered(0))

    def full(*_: Any, **__: Any) -> Report:
        raise OSError(28, "No space left on device", str(folder / "lake"))

    monkeypatch.setattr(watch_module, "run_plan", full)
    with pytest.raises(OSError, match="No space left"):
        watch(lk, Watched([str(folder)]), tell=lambda _: None)


def test_the_lake_may_lie_inside_what_is_watched(folder: Path, clock: Clock) -> None:
    lk = empty_lake(folder / "lake")
    write_lines(folder / "a.jsonl", numbered(0))
    watched = Watched([str(folder), str(folder / "**")])
    assert take_once(lk, watched) == (1, 1, 0)
    clock.now += 10
    assert [plan.report for plan in watched.list_changes()] == []


def test_rejects_of_a_watch_are_those_of_one_ingest_also_after_a_restart(lk: Lake, folder: Path, clock: Clock) -> None:
    write_lines(folder / "b.jsonl", [b"nonsense\n", *numbered(0)])
    watched = Watched([str(folder)])
    take_once(lk, watched)
    write_lines(folder / "a.jsonl", [b"nonsense\n", *numbered(1)])
    take_once(lk, watched)
    append(folder / "b.jsonl", b"{}\n")
    take_once(lk, watched)
    assert take_once(lk, Watched([str(folder)])) == (5, 0, 3)
    assert lk.sql("SELECT count(*) FROM rejects").item() == 3
    same_as_one_ingest(lk, folder)


def test_what_is_not_there_yet_is_known(folder: Path) -> None:
    names = [str(folder), str(folder / "later"), str(folder / "*.jsonl")]
    assert Watched(names).absent() == names[1:], "an empty folder is there"
    write_lines(folder / "a.jsonl", numbered(0))
    assert Watched(names).absent() == names[1:2]


@pytest.mark.parametrize("name", ["-", "", "s3://bucket/logs"])
def test_what_cannot_be_watched_is_refused(name: str, wording: Wording) -> None:
    with pytest.raises(UsageError, match="valid: files, folders and") as caught:
        Watched([name])
    wording(caught.value)


def tau(number: int) -> list[dict[str, Any]]:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    return [{"task_id": n, "trial": 0, "reward": 0.0, "info": {}, "traj": chat} for n in range(number)]


# ---------------------------------------------------------------- 2. the command


class Watcher:
    """The command `ingest --watch` in its own process."""

    def __init__(self, uri: Path, *names: Path | str) -> None:
        self.uri = uri
        self.out = tempfile.TemporaryFile()  # noqa: SIM115 - it goes with the watcher
        self._process = Command(
            ["ingest", "--watch", *names, "--lake", uri], stdout=self.out, stderr=subprocess.PIPE, text=True
        )

    @property
    def said(self) -> str:
        """Its output so far."""
        return os.pread(self.out.fileno(), 1 << 20, 0).decode()

    def until(self, *, episodes: int = 0, condition: Callable[[], bool] = lambda: True) -> None:
        """Return when the lake shows so many episodes, and all else that is waited for."""
        deadline = time.monotonic() + PATIENCE
        while not (_count(self.uri) >= episodes and condition()):
            assert self._process.poll() is None, self._process.communicate()
            assert time.monotonic() < deadline, f"{_count(self.uri)} of {episodes} episodes after {PATIENCE} s"
            time.sleep(0.1)

    def end(self, how: signal.Signals = signal.SIGINT) -> tuple[int, str, str]:
        self._process.send_signal(how)
        _, err = self._process.communicate(timeout=PATIENCE)
        return self._process.returncode, self.said, err


def _count(uri: Path) -> int:
    try:
        return int(lake.open(uri).sql("SELECT count(*) FROM episodes").item())
    except (NotALakeError, LakeAccessError):
        return 0  # it is being made


@contextmanager
def watching(uri: Path, *names: Path | str) -> Iterator[Watcher]:
    watcher = Watcher(uri, *names)
    try:
        yield watcher
    finally:
        if watcher._process.poll() is None:
            watcher.end(signal.SIGKILL)
        watcher.out.close()


_WRITER = """
import sys, time
source, target, pieces, pause = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
data = open(source, "rb").read()
size = len(data) // pieces + 1
with open(target, "ab", buffering=0) as file:
    for start in range(0, len(data), size):
        file.write(data[start : start + size])
        time.sleep(pause)
"""


def writing(source: Path, target: Path, pieces: int, pause: float) -> subprocess.Popen[bytes]:
    """A process that appends a file's bytes piece by piece, without regard to lines."""
    return subprocess.Popen([sys.executable, "-c", _WRITER, str(source), str(target), str(pieces), str(pause)])


def sum_episodes(report_line: str) -> int:
    """Episodes by what a watcher says of each batch; of several files, each has its own line, too."""
    of_batches = [
        text for text in report_line.splitlines(keepends=True) if not text.startswith(" ") and text.endswith("\n")
    ]
    return sum(int(text.split(": ")[1].split()[0]) for text in of_batches)


def test_what_another_process_writes_is_taken_until_interrupted(folder: Path, tmp_path: Path, wording: Wording) -> None:
    source = write_lines(tmp_path / "source", [*numbered(*range(20)), b"nonsense\n", *numbered(*range(20, 30))])
    uri = tmp_path / "lake"
    with watching(uri, folder) as watcher, writing(source, folder / "f.jsonl", 75, 0.02) as writer:
        watcher.until(episodes=1)
        (folder / "new" / "deeper").mkdir(parents=True)
        write_lines(folder / "new" / "deeper" / "g.jsonl", numbered(100, 101))
        (folder / "runs.json").write_text(json.dumps(tau(3)))
        # A line names each batch after it is in the lake.
        watcher.until(episodes=35, condition=lambda: sum_episodes(watcher.said) == 35)
        assert writer.wait() == 0
        code, _, err = watcher.end()
    assert code == 0, err
    assert err.splitlines()[0] == f"watching {folder}; press Ctrl-C to stop"
    assert "stopped; " in wording(err.splitlines()[-1])
    assert "Traceback" not in err
    same_as_one_ingest(lake.open(uri), folder)


def test_a_watcher_that_is_killed_again_and_again_takes_everything_once(folder: Path, tmp_path: Path) -> None:
    rng = random.Random(7)
    records = [episode("t", n, scores=[ScoreRecord(scorer="judge", value=n / 60)], steps=1 + n % 3) for n in range(60)]
    source = write_lines(tmp_path / "source", records)
    uri = tmp_path / "lake"
    with writing(source, folder / "f.jsonl", 120, 0.03) as writer:
        for _ in range(2):
            with watching(uri, folder) as watcher:
                watcher.until(episodes=min(55, _count(uri) + 5))
                time.sleep(rng.uniform(0, 0.6))
                assert watcher.end(signal.SIGKILL)[0] == -signal.SIGKILL
            assert_whole(lake.open(uri).snapshot())
        assert writer.wait() == 0
    with watching(uri, folder) as watcher:
        scored = "SELECT count(*) FROM current_scores"
        watcher.until(episodes=60, condition=lambda: lake.open(uri).sql(scored).item() == 60)
        assert watcher.end()[0] == 0
    lk = lake.open(uri)
    same_as_one_ingest(lk, folder)
    values = lk.sql("SELECT rollout_index, value FROM current_scores JOIN episodes USING (episode_id) ORDER BY 1")
    assert values.rows() == [(n, n / 60) for n in range(60)]
    with watching(uri, folder) as watcher:
        watcher.until(condition=lambda: "(60 already present)" in watcher.said)
        assert watcher.end()[0] == 0


def test_watching_what_is_not_there_yet_is_told(tmp_path: Path) -> None:
    uri, name = tmp_path / "lake", tmp_path / "later.jsonl"
    with watching(uri, name) as watcher:
        stderr = watcher._process.stderr
        assert stderr is not None
        lines = [stderr.readline() for _ in range(2)]
        write_lines(name, numbered(0))
        watcher.until(episodes=1)
        code, out, err = watcher.end()
    assert code == 0
    assert lines[1] == f"{name} does not exist yet\n"
    assert len(err.splitlines()) == 1, "that it has ended"
    assert out == "later.jsonl: 1 episode, 2 steps, 0 rejects (0 already present) in run later\n"


# ---------------------------------------------------------------- 3. scores, killed in between


SCORED = [
    episode("t", n, scores=[ScoreRecord(scorer=name, value=float(n)) for name in ("judge", "other")]) for n in range(8)
]


@pytest.mark.parametrize(
    ("point", "side"),
    [
        ("commit:scores", "after"),
        pytest.param("write:scores", "before", marks=pytest.mark.slow),
        pytest.param("write:scores", "after", marks=pytest.mark.slow),
        pytest.param("commit:scores", "before", marks=pytest.mark.slow),
        pytest.param("commit:episodes", "after", marks=pytest.mark.slow),
    ],
)
def test_scores_of_an_ingest_that_was_killed_come_with_the_next(tmp_path: Path, point: str, side: str) -> None:
    path = write_lines(tmp_path / "f.jsonl", SCORED)
    uri = tmp_path / "lake"
    empty_lake(uri)
    worker = Worker("ingest", uri, path, "run", 4096, faults=f"{point} 1 {side} kill")
    worker.wait_until_ready()
    worker.go()
    assert worker.wait() == -signal.SIGKILL, worker.error
    lk = lake.open(uri)
    assert lk.sql("SELECT count(*) FROM episodes").item() == 8
    assert lk.sql("SELECT count(*) FROM current_scores").item() == 0
    report = ingest(lk, path, run_id="run")
    assert (report.new, report.present, report.scores) == (0, 8, 16)
    assert ingest(lk, path, run_id="run").scores == 0
    rows = lk.sql("SELECT rollout_index, value FROM current_scores JOIN episodes USING (episode_id) ORDER BY ALL")
    assert rows.rows() == [(n, float(n)) for n in range(8) for _ in range(2)]


def test_scores_of_two_ingests_of_the_same_file_at_once_are_written_once(tmp_path: Path) -> None:
    records = [episode("t", n, scores=[ScoreRecord(scorer="judge", value=float(n))]) for n in range(100)]
    path = write_lines(tmp_path / "f.jsonl", records)
    uri = tmp_path / "lake"
    empty_lake(uri)
    workers = [Worker("ingest", uri, path, "run", 24) for _ in range(2)]
    at_the_gate(*workers)
    reports = [json.loads(worker.finish()) for worker in workers]
    assert sum(report["new"] for report in reports) == sum(report["scores"] for report in reports) == 100
    rows = lake.open(uri).sql("SELECT rollout_index, value FROM scores JOIN episodes USING (episode_id) ORDER BY 1")
    assert rows.rows() == [(n, float(n)) for n in range(100)]


def test_two_processes_import_the_same_scores_at_once(tmp_path: Path) -> None:
    uri = tmp_path / "lake"
    lk = empty_lake(uri)
    lk.append([episode("t", n) for n in range(200)], run_id="run")
    files = []
    for name, numbers in (("one", range(120)), ("two", range(80, 200))):
        path = tmp_path / f"{name}.csv"
        path.write_text("task_id,rollout_index,value\n" + "".join(f"t,{n},{n}\n" for n in numbers))
        files.append(path)
    command = ["score", "import", "--name", "human", "--lake", uri]
    running = [Command([*command, path], stdout=subprocess.PIPE) for path in files]
    outputs = [process.communicate(timeout=PATIENCE)[0].decode() for process in running]
    assert [process.returncode for process in running] == [0, 0]
    new, present = zip(
        *((int(text.split(": ")[1].split()[0]), int(text.split("(")[1].split()[0])) for text in outputs), strict=True
    )
    assert (sum(new), sum(present)) == (200, 40), outputs
    rows = lake.open(uri).sql("SELECT rollout_index, value FROM current_scores JOIN episodes USING (episode_id)")
    assert sorted(rows.rows()) == [(n, float(n)) for n in range(200)]
