"""Ingest by parts ends as ingest in one process: the same rows, rejects, scores, runs and counts.

1. The law: any files, any parts, any lake before.
2. Lines of a file from any place on.
3. Runs: decided by what the lake held before, no matter what comes with them.
4. Others write, forget and tidy up in the meantime.
5. What travels, and what is refused.
6. Real processes, some of them killed.
"""

import json
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lake
from lake import EpisodeRecord, Lake, StepRecord
from lake.cli import trajlake
from lake.errors import FormatError, UsageError
from lake.execution.executor import Executor
from lake.execution.local import LocalExecutor
from lake.formats import jsonl
from lake.formats.base.format import Format
from lake.formats.base.source import Input, find_line_cuts, read_lines
from lake.formats.registry import FORMATS
from lake.records import ScoreRecord
from lake.write import ingest as ingest_module
from lake.write.ingest import ingest
from lake.write.sources import COMPARED, Report
from testkit.clocks import open_with_clock, set_clock
from testkit.commands import Command
from testkit.copies import empty_lake
from testkit.episodes import FACTS, assert_same, assert_whole, contents, episode, line, write_lines
from testkit.examples import examples
from testkit.pickling_executor import PicklingExecutor
from testkit.processes import environment, kill_when
from testkit.wording import Wording

Lines = list[list[bytes]]
"""Of each file."""


def judged(value: float, **fields: Any) -> EpisodeRecord:
    """The same episode, no matter what annotations say."""
    return episode("judged", scores=[ScoreRecord(scorer="judge", value=value, reason="because")], **fields)


def retry(attempt: int, action: str = "again") -> EpisodeRecord:
    return EpisodeRecord(task_id="retried", attempt=attempt, steps=[StepRecord(state="s", action=action)])


POOL = [
    *(line(episode("t", n, tokens=n == 2)) for n in range(4)),
    line(EpisodeRecord(task_id="t", steps=[StepRecord(state="s", action="other")])),  # a conflict
    *(line(judged(value)) for value in (0.25, 0.75)),
    line(judged(0.5, run_id="named")),
    *(line(retry(attempt)) for attempt in (0, 1, 2)),
    line(episode("grown", steps=1)),
    line(episode("grown", steps=3)),
    line(episode("huge", extra={"text": "x" * 70_000})),
    b"{}\n",
    b"nonsense\n",
    b"\n",
    b'{"task_id": "t", "task_id": "u", "steps": []}\r\n',
]
FILES = st.lists(st.lists(st.sampled_from(POOL), max_size=8), min_size=1, max_size=3)
QUICK = settings(
    max_examples=examples(8),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def write_files(folder: Path, files: Lines) -> Path:
    for number, lines in enumerate(files):
        write_lines(folder / f"f{number}.jsonl", [b'{"task_id": 1}\n', *lines])
    return folder


def read_tables(lk: Lake) -> dict[str, pl.DataFrame]:
    """What readers see of an ingest."""
    frames = contents(lk.snapshot(), (*FACTS, "spans"))
    for name, query in {
        "scores": "SELECT episode_id, step_index, scorer, scorer_version, value, reason FROM latest_scores",
        "retractions": "SELECT episode_id, kind, superseded_by FROM retractions",
        "blobs": "SELECT DISTINCT sha256, n_bytes FROM blobs",
    }.items():
        frames[name] = lk.sql(f"{query} ORDER BY ALL")
    assert_whole(lk.snapshot())
    return frames


def counted(lk: Lake) -> list[tuple[Any, ...]]:
    """The rows of ingest jobs."""
    query = "SELECT run_id, parameters, rows_in, rows_out, rows_dropped, counts, status FROM job_runs"
    return lk.sql(f"{query} WHERE kind = 'ingest' ORDER BY started_at").rows()


def assert_like(lk: Lake, report: Report, other_lake: Lake, expected: Report) -> None:
    assert report == expected
    assert_same(read_tables(lk), read_tables(other_lake))
    assert counted(lk) == counted(other_lake)
    assert not list(Path(lk.uri, "scores").glob("[!_]*.parquet")) or lk.sql("SELECT count(*) FROM scores").item()


def small_parts(patch: pytest.MonkeyPatch, size: int) -> None:
    patch.setattr(ingest_module, "PART_BYTES", size)


# ---------------------------------------------------------------- 1. the law


@QUICK
@given(
    before=st.lists(st.sampled_from(POOL), max_size=6),
    files=FILES,
    size=st.integers(400, 3000),
    batch=st.integers(2, 9),
    local=st.booleans(),
    full=st.booleans(),
    run=st.sampled_from([None, "run"]),
)
def test_rows_rejects_scores_and_counts_are_those_of_one_process(
    before: list[bytes],
    files: Lines,
    size: int,
    batch: int,
    local: bool,
    full: bool,
    run: str | None,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """`full`: the records are sessions that continue; in one run (`run`) keys meet across files."""
    folder = tmp_path_factory.mktemp("any")
    source = write_files(folder / "source", files)
    earlier = write_lines(folder / "source" / "earlier" / "f1.jsonl", [b'{"task_id": 1}\n', *before])
    first, second = (empty_lake(folder / name) for name in ("one", "other"))
    with pytest.MonkeyPatch.context() as patch:
        if full:
            fmt = Format("jsonl", "sessions", jsonl.recognise, jsonl.read, by_line=True, is_whole=True, any_line=True)
            patch.setitem(FORMATS, "jsonl", fmt)
        small_parts(patch, size)
        for lk in (first, second):
            ingest(lk, earlier, run_id=run or "f1")
        executor: Executor = LocalExecutor(1) if local else PicklingExecutor()
        report = ingest(first, source, executor=executor, batch_size=batch, run_id=run)
        assert_like(first, report, second, ingest(second, source, run_id=run))


# ---------------------------------------------------------------- 2. lines from any place on


@given(
    lines=st.lists(st.binary(max_size=12).map(lambda data: data.replace(b"\n", b"")), max_size=12),
    is_ended=st.booleans(),
    size=st.integers(1, 40),
)
def test_lines_of_pieces_are_those_of_the_file(
    lines: list[bytes], is_ended: bool, size: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("cut") / "f"
    path.write_bytes(b"\n".join(lines) + b"\n" * is_ended)
    places = [(0, 0), *find_line_cuts(path, size)]
    ends = [byte for _, byte in places[1:]]
    pieces = [
        list(read_lines(Input(path, "run", from_line=number, from_byte=byte, until_byte=end)))
        for (number, byte), end in zip(places, [*ends, None], strict=True)
    ]
    assert list(chain.from_iterable(pieces)) == list(read_lines(Input(path, "run")))
    assert all(later - earlier >= size for earlier, later in zip([0, *ends], ends, strict=False))
    assert not places[1:] or max(ends) < path.stat().st_size


def test_a_large_file_is_read_in_pieces_and_a_packed_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gzip

    small_parts(monkeypatch, 300)
    lines = [line(episode("t", n)) for n in range(20)]
    plain = write_lines(tmp_path / "plain.jsonl", lines)
    packed = tmp_path / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress(b"".join(lines)))
    for path, is_cut in ((plain, True), (packed, False)):
        lk, executor = empty_lake(tmp_path / path.stem), PicklingExecutor()
        report = ingest(lk, path, executor=executor)
        assert (report.new, report.runs) == (20, {path.name.partition(".")[0]})
        assert (len(executor.answers) > 5) is is_cut


# ---------------------------------------------------------------- 3. runs


@pytest.mark.parametrize("executor", [None, PicklingExecutor()])
def test_a_file_goes_on_in_the_run_that_had_its_first_records_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executor: Executor | None
) -> None:
    """Also one that is read in pieces, when only the first holds them."""
    small_parts(monkeypatch, 300)
    lk = empty_lake(tmp_path / "lake")
    records = [episode("t", n) for n in range(20)]
    ingest(lk, write_lines(tmp_path / "march.jsonl", records[:COMPARED]))
    report = ingest(lk, write_lines(tmp_path / "moved" / "april.jsonl", records), executor=executor)
    assert (report.new, report.present, report.runs) == (20 - COMPARED, COMPARED, {"march"})


@pytest.mark.parametrize(("executor", "batch_size"), [(None, 1), (PicklingExecutor(), 4096)])
def test_what_an_ingest_brings_itself_decides_nothing_about_runs(
    tmp_path: Path, executor: Executor | None, batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_parts(monkeypatch, 1)
    for name in ("april", "march"):
        write_lines(tmp_path / "in" / f"{name}.jsonl", [episode("t", n) for n in range(3)])
    report = ingest(empty_lake(tmp_path / "lake"), tmp_path / "in", executor=executor, batch_size=batch_size)
    assert (report.new, report.runs) == (6, {"april", "march"})


def test_an_index_stays_as_it_is(tmp_path: Path) -> None:
    lk = empty_lake(tmp_path / "lake")
    keys = []
    with lk.job(kind="record", run_id="run") as job:
        for n in range(3):
            index = job.copy_index()
            job.record([episode("t", n)])
            keys = lk.sql("SELECT episode_id, content_hash FROM episodes ORDER BY rollout_index").rows()
            assert len(index.look_up([key for key, _ in keys], ()).contents) == n
    assert lk.contents_of([*(key for key, _ in keys), 1]) == dict(keys)


# ---------------------------------------------------------------- 4. in the meantime


@QUICK
@given(files=FILES, other_lines=FILES, size=st.integers(400, 2000), when=st.integers(0, 3))
def test_another_ingest_at_the_same_time_changes_nothing_but_who_was_first(
    files: Lines, other_lines: Lines, size: int, when: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It comes in between what workers saw and what is committed. Both end as if one had come after the other."""
    folder = tmp_path_factory.mktemp("two")
    ours, theirs = (write_files(folder / name, lines) for name, lines in (("ours", files), ("theirs", other_lines)))
    lk, alone = empty_lake(folder / "lake"), empty_lake(folder / "alone")
    second = lake.open(lk.uri)

    def between(number: int) -> None:
        if number == when:
            ingest(second, theirs, run_id="run")

    with pytest.MonkeyPatch.context() as patch:
        small_parts(patch, size)
        report = ingest(lk, ours, run_id="run", executor=PicklingExecutor(between))
    assert report.records == report.new + report.present + report.rejected
    ingest(second, theirs, run_id="run")
    for source in (ours, theirs):
        ingest(alone, source, run_id="run")
    keys = "SELECT task_id, rollout_index, attempt FROM episodes ORDER BY ALL"
    assert lk.sql(keys).equals(alone.sql(keys))
    read_tables(lk)


def test_the_same_files_twice_at_once_are_there_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one has all that workers had staged by the time that it is looked at."""
    small_parts(monkeypatch, 300)
    path = write_lines(tmp_path / "f.jsonl", [judged(0.5), *(episode("t", n) for n in range(20)), b"junk\n"])
    lk, alone = empty_lake(tmp_path / "lake"), empty_lake(tmp_path / "alone")
    expected = ingest(alone, path)
    executor = PicklingExecutor(lambda number: number or ingest(lake.open(lk.uri), path))
    report = ingest(lk, path, executor=executor)
    assert len(executor.answers) > 5
    assert (report.new, report.present, report.rejected) == (0, 21, 1)
    assert_same(read_tables(lk), read_tables(alone))
    assert (report.records, report.by_file, report.copies) == (expected.records, expected.by_file, expected.copies)


def test_what_is_forgotten_meanwhile_does_not_come_back(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "f.jsonl", [episode("t", n) for n in range(3)])
    lk = empty_lake(tmp_path / "lake")

    def between(_: int) -> None:
        reader = lake.open(lk.uri)
        ingest(reader, path)
        reader.forget(reader.sql("SELECT episode_id FROM episodes WHERE rollout_index = 1")["episode_id"].to_list())

    report = ingest(lk, path, executor=PicklingExecutor(between))
    assert (report.new, report.present, report.rejected) == (0, 2, 1)
    assert lk.sql("SELECT DISTINCT reason FROM rejects").rows() == [("forgotten",)]


def test_a_conflict_that_is_none_after_all_leaves_no_reject(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two contents of a key a worker takes the first; the part before it had brought the second."""
    first, second = (
        EpisodeRecord(run_id="run", task_id="t", steps=[StepRecord(state="s", action=action)]) for action in "ab"
    )
    source = write_files(tmp_path / "source", [[line(second)], [line(first), line(second)]])
    small_parts(monkeypatch, (source / "f0.jsonl").stat().st_size)  # a file each
    lk, alone = empty_lake(tmp_path / "lake"), empty_lake(tmp_path / "alone")
    report = ingest(lk, source, executor=PicklingExecutor())
    assert (report.new, report.present, report.rejected) == (1, 1, 3)
    assert_like(lk, report, alone, ingest(alone, source))
    assert lk.sql("SELECT raw FROM rejects WHERE reason = 'conflict'").height == 1


@pytest.mark.parametrize("hours", [-1.0, 2.0])
def test_files_that_waited_for_long_are_written_again(tmp_path: Path, hours: float) -> None:
    """Vacuum may have taken them: hours after, or where the clock went back and no one knows."""
    lk = open_with_clock(tmp_path / "lake")
    path = write_lines(tmp_path / "f.jsonl", [judged(0.5), episode(), b"junk\n"])

    def between(_: int) -> None:
        set_clock(lk.uri, hours)
        for name in ("episodes", "steps", "scores", "rejects"):
            for file in Path(lk.uri, name).glob("*.parquet"):
                file.unlink()

    report = ingest(lk, path, executor=PicklingExecutor(between))
    assert (report.new, report.scores, report.rejected) == (2, 1, 1)
    assert lk.sql("SELECT reason FROM rejects").rows() == [("malformed",)]
    assert assert_whole(lk.snapshot()) == 2
    assert lk.sql("SELECT value FROM latest_scores").rows() == [(0.5,)]


def test_a_worker_whose_clock_is_ahead_is_believed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are as old as this machine's clock says, so nothing is read twice."""
    monkeypatch.setattr(ingest_module, "record_batch", _counted := _Counted(ingest_module.record_batch))
    lk = open_with_clock(tmp_path / "lake", hours=-0.1)  # workers open the lake with the clock of the machine
    ingest(lk, write_lines(tmp_path / "f.jsonl", [episode()]), executor=PicklingExecutor())
    assert _counted.calls == 1, "by the worker alone"


class _Counted:
    def __init__(self, inner: Callable[..., None]) -> None:
        self._inner = inner
        self.calls = 0

    def __call__(self, *args: Any) -> None:
        self.calls += 1
        self._inner(*args)


# ---------------------------------------------------------------- 5. what travels


def test_rows_stay_in_the_lake(tmp_path: Path) -> None:
    secret = "a text of an episode"
    lines = [
        line(episode(secret, scores=[ScoreRecord(scorer="judge", value=1.0, reason=secret)])),
        b'{"task_id": "%s"}\n' % secret.encode(),
    ]
    lk, executor = empty_lake(tmp_path / "lake"), PicklingExecutor()
    report = ingest(lk, write_lines(tmp_path / "f.jsonl", lines), executor=executor)
    assert (report.new, report.scores, report.rejected) == (1, 1, 1)
    (answer,) = executor.answers
    assert secret.encode() not in answer
    assert len(lk.sql("SELECT * FROM scores")) == 1


def test_what_comes_back_grows_with_episodes_and_not_with_their_texts(tmp_path: Path) -> None:
    sizes = []
    for steps, text in ((1, "x"), (50, "x" * 1000)):
        records = [episode("t", n, steps=steps, final_observation=[{"text": text}]) for n in range(40)]
        executor = PicklingExecutor()
        name = f"{steps}"
        ingest(empty_lake(tmp_path / name), write_lines(tmp_path / f"{name}.jsonl", records), executor=executor)
        sizes.append(sum(map(len, executor.answers)))
    assert sizes[1] < 1.5 * sizes[0]
    assert sizes[1] < 40 * 300


def test_a_worker_may_be_in_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_lines(tmp_path / "in" / "f.jsonl", [episode()])
    monkeypatch.chdir(tmp_path)
    report = ingest(empty_lake(tmp_path / "lake"), "in", executor=PicklingExecutor())
    assert (report.source, report.new) == ("in", 1)


def test_a_file_that_a_worker_does_not_have_is_named_with_its_machine(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "f.jsonl", [episode()])
    lk = empty_lake(tmp_path / "lake")
    part = ingest_module.FileSlice.of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            ingest_module.FileSlice,
            "of",
            lambda *args: replace(part(*args), file=replace(args[0].file, path=tmp_path / "elsewhere.jsonl")),
        )
        with pytest.raises(FormatError, match=f"elsewhere.jsonl is not there on {platform.node()}.*mount"):
            ingest(lk, path, executor=PicklingExecutor())
    assert lk.sql("SELECT status FROM job_runs").rows() == [("failed",)]


@pytest.mark.parametrize("option", ["--watch", "--dry-run", "--query"])
def test_what_runs_in_one_process_is_refused(tmp_path: Path, option: str, wording: Wording) -> None:
    path = write_lines(tmp_path / "f.jsonl", [episode()])
    words = ["ingest", str(path), "--lake", str(tmp_path / "lake"), option, "--workers", "2"]
    done = CliRunner().invoke(trajlake, words)
    assert isinstance(done.exception, UsageError)
    assert option in wording(done.exception)
    assert not (tmp_path / "lake").exists()


# ---------------------------------------------------------------- 6. real processes


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Files of seven parts."""
    files = [[line(episode(f"t{n}", i)) for i in range(3)] for n in range(6)]
    return write_files(tmp_path / "source", [*files, POOL])


def in_one_process(tmp_path: Path, source: Path) -> tuple[Lake, Report]:
    """What one process makes of them."""
    lk = empty_lake(tmp_path / "alone")
    return lk, ingest(lk, source)


def driver(lk: Lake, source: Path, fate: str, marks: Path) -> "subprocess.Popen[str]":
    """A process that has another process ingest them, whose second part meets its fate."""
    job = f"ingest {json.dumps({'source': str(source), 'part_bytes': 300})}"
    words = [lk.uri, "{}", "processes", fate, str(marks), job]
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "testkit.job_worker", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
    )


def test_a_worker_that_is_killed_after_its_work_loses_nothing(tmp_path: Path, source: Path) -> None:
    """Its answer is lost: the part runs again, and what the dead one wrote is in files that no one names."""
    lk, (other_lake, expected) = empty_lake(tmp_path / "lake"), in_one_process(tmp_path, source)
    process = driver(lk, source, "after", tmp_path / "marks")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err[-2000:]
    assert (tmp_path / "marks" / "lost").exists(), "nobody was killed"
    assert_like(lk, msgspec.convert(json.loads(out), Report), other_lake, expected)


def test_a_driver_that_is_killed_is_run_again(tmp_path: Path, source: Path) -> None:
    """What it had committed stands, whole; its workers end, and commit nothing."""
    lk, (other_lake, expected) = empty_lake(tmp_path / "lake"), in_one_process(tmp_path, source)
    marks = tmp_path / "marks"
    process = driver(lk, source, "late", marks)
    kill_when(process, lambda: lk.sql("SELECT 1 FROM episodes").height > 0, "nothing was committed")
    process.communicate()
    (marks / "go").touch()
    episodes = assert_whole(lk.snapshot())
    assert 0 < episodes < expected.new
    report = ingest(lk, source, executor=LocalExecutor(1))
    assert (report.new, report.records) == (expected.new - episodes, expected.records)
    assert_same(read_tables(lk), read_tables(other_lake))


@pytest.mark.slow("A command that runs twice at once takes everything once, in processes of its own.")
def test_a_command_that_runs_twice_at_once_takes_everything_once(tmp_path: Path, source: Path) -> None:
    lk, (other_lake, expected) = empty_lake(tmp_path / "lake"), in_one_process(tmp_path, source)
    words = ["ingest", str(source), "--lake", lk.uri, "--executor", "processes", "--workers", "1", "--batch-size", "2"]
    commands = [Command(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in commands]
    assert [process.returncode for process in commands] == [0, 0], outputs
    assert_same(read_tables(lk), read_tables(other_lake))
    counts = lk.sql("SELECT sum(rows_out) AS new, count(*) AS jobs FROM job_runs WHERE kind = 'ingest'").row(0)
    assert counts == (expected.new, 2)
