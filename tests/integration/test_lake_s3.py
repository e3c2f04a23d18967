"""A lake in a bucket does what a lake in a folder does, and keeps its credentials to itself.

1. One life: ingest, replay, SQL, scan, snapshots, retraction, compaction, vacuum, erasure, jobs.
2. Several writers, and writers that are killed.
3. Credentials are nowhere: not in an object, not in what a process prints, not in an error.
4. A bucket that cannot be had is one line, soon.
"""

import json
import subprocess
import time
import urllib.parse
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import polars as pl
import pytest

import lake
from lake import Lake
from lake.errors import LakeAccessError, NotALakeError, QueryError, TrajlakeError
from lake.storage.objects import Objects
from lake.write.ingest import ingest
from lake.write.sources import Report
from testkit.commands import trajlake
from testkit.episodes import assert_same, assert_whole, contents, episode, write_lines
from testkit.full_lake import add_round
from testkit.object_store import SECRET, Store, answering, refusal, unused_endpoint
from testkit.processes import COMMAND, Worker, at_the_gate, environment

RECORDS = 20


def open_lake(store: Store, **options: object) -> Lake:
    """The store's lake, made if needed."""
    return lake.open(store.root, create=True, storage_options=store.options, **options)  # type: ignore[arg-type]


def command(store: Store, *args: str | Path) -> subprocess.CompletedProcess[str]:
    """The command line, with the store's options in its environment."""
    return trajlake(*args, "--lake", store.root, env=environment(**store.environment))


def ingesting(store: Store, file: Path, batch_size: int, faults: str = "") -> Worker:
    """A process that ingests a file at its signal."""
    faults = f"env {json.dumps(store.environment)};{faults}"
    return Worker("ingest", store.root, file, "run", batch_size, faults=faults)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Episodes, and a bad line."""
    records = [episode(f"task {n // 4}", n % 4, steps=1 + n % 3, tokens=n % 2 == 0) for n in range(RECORDS)]
    return write_lines(tmp_path_factory.mktemp("source") / "source.jsonl", [*records, b'{"task_id": "no steps"}\n'])


@pytest.fixture(scope="module")
def expected(file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, pl.DataFrame]:
    """What a lake in a folder shows after the same ingest."""
    lk = lake.open(tmp_path_factory.mktemp("local") / "lake", create=True)
    ingest(lk, file, run_id="run")
    return contents(lk.snapshot())


# ---------------------------------------------------------------- 1. one life


def test_a_lake_in_a_bucket_shows_what_one_in_a_folder_shows(
    s3: Store, file: Path, expected: dict[str, pl.DataFrame]
) -> None:
    lk = open_lake(s3)
    assert lk.uri == s3.root
    report = ingest(lk, file, run_id="run")
    assert (report.new, report.rejected) == (RECORDS, 1)
    assert_same(contents(lk.snapshot()), expected)
    again = ingest(lk, file, run_id="run", batch_size=7)
    assert (again.new, again.present) == (0, RECORDS)
    assert_same(contents(lake.open(s3.root, storage_options=s3.options).snapshot()), expected)

    sql = "SELECT task_id, count(*) AS n, sum(num_steps)::BIGINT AS steps FROM episodes GROUP BY task_id ORDER BY 1"
    by_sql = lk.sql(sql)
    by_scan = lk.scan("episodes").group_by("task_id").agg(n=pl.len().cast(pl.Int64), steps=pl.sum("num_steps"))
    assert by_sql.equals(by_scan.sort("task_id").cast({"steps": pl.Int64}).collect())
    with lk.snapshot().session() as session:
        assert session.stream("SELECT * FROM tokens", rows=7).read_all().num_rows == expected["tokens"].height
    with pytest.raises(QueryError, match="disabled by configuration"):
        lk.sql("SELECT * FROM read_text('/etc/passwd')")


def test_snapshots_outlive_compaction_and_vacuum(s3: Store) -> None:
    now = datetime.now(UTC)

    def clock() -> datetime:
        return now

    lk = open_lake(s3, clock=clock)
    lk.append([episode("task", n) for n in range(3)], run_id="run")
    before = contents(lk.snapshot())
    lk.name_snapshot("paper")
    lk.append([episode("later", n) for n in range(2)], run_id="run")
    (missing_id, *_) = lk.sql("SELECT episode_id FROM episodes WHERE task_id = 'later' ORDER BY 1")["episode_id"]
    assert lk.retract([missing_id], "a test") == 1
    now += timedelta(days=40)
    files = len(lk.snapshot().files("steps"))
    lk.compact("steps")
    assert len(lk.snapshot().files("steps")) == 1 < files
    now += timedelta(days=8)
    paths = {entry.path for entry in Objects(s3.root, s3.options).list("steps")}
    (deleted,) = (done.deleted_files for done in lk.vacuum(retention=timedelta(days=7)) if done.table == "steps")
    assert len(paths - {entry.path for entry in Objects(s3.root, s3.options).list("steps")}) == deleted == 1
    assert assert_whole(lk.snapshot()) == 3 + 1
    reopened = lake.open(s3.root, storage_options=s3.options, clock=clock)
    assert_same(contents(reopened.at("paper")), before)
    assert reopened.at("paper").sql("SELECT count(*) AS n FROM steps").item() == 3 * 2


def test_a_forgotten_episode_is_in_no_object(s3: Store) -> None:
    lk = open_lake(s3)
    lk.append([episode("whisper-it", 0), episode("task", 1)], run_id="run")
    (forgotten,) = lk.sql("SELECT episode_id FROM episodes WHERE task_id = 'whisper-it'")["episode_id"]
    lk.forget([forgotten], "asked to")
    assert assert_whole(lk.snapshot()) == 1
    objects = Objects(s3.root, s3.options)
    for entry in objects.list():
        data = objects.get(entry.path) or b""
        assert b"whisper-it" not in data
        if entry.path.endswith(".parquet"):
            frame = pl.read_parquet(data)
            assert "whisper-it" not in str(frame.to_dicts()), entry.path
    assert lk.append([episode("whisper-it", 0)], run_id="run").new == 0


@pytest.mark.slow("Jobs write every table in a bucket, as in a folder.")
def test_jobs_of_every_table_work_in_a_bucket(s3: Store, tmp_path: Path) -> None:
    local, remote = lake.open(tmp_path / "lake", create=True), open_lake(s3)
    for lk in (local, remote):
        add_round(lk, 0)
    for name in lake.tables.TABLES:
        assert remote.scan(name).collect().height == local.scan(name).collect().height, name


# ---------------------------------------------------------------- 2. several writers, killed ones


def test_writers_of_overlapping_batches_write_everything_once(s3: Store, tmp_path: Path) -> None:
    records = [episode("task", n, steps=1 + n % 4, tokens=True) for n in range(16)]
    files = [write_lines(tmp_path / f"{n}.jsonl", records[4 * n : 4 * n + 12]) for n in range(2)]
    workers = [ingesting(s3, path, size) for path, size in zip(files, (6, 8), strict=True)]
    at_the_gate(*workers)
    reports = [msgspec.json.decode(worker.finish(), type=Report) for worker in workers]
    assert sum(report.new for report in reports) == 16
    assert all(report.new + report.present == 12 for report in reports)
    lk = lake.open(s3.root, storage_options=s3.options)
    assert assert_whole(lk.snapshot()) == 16
    assert lk.sql("SELECT status FROM job_runs")["status"].to_list() == ["succeeded"] * 2


@pytest.mark.slow("A writer that is killed beside any of its commits to a bucket is made good by the same command.")
@pytest.mark.parametrize(
    "point", ["create 1 before", "commit:steps 2 after", "commit:episodes 2 before", "commit:episodes 2 after"]
)
def test_a_killed_writer_is_made_good_by_the_same_command(
    point: str, s3: Store, file: Path, expected: dict[str, pl.DataFrame]
) -> None:
    worker = ingesting(s3, file, 7, f"{point} kill")
    at_the_gate(worker)
    assert worker.wait() == -9, worker.error
    lk = open_lake(s3)
    present = assert_whole(lk.snapshot())
    assert present in (0, 7, 14)
    report = ingest(lk, file, run_id="run", batch_size=9)
    assert (report.new, report.present) == (RECORDS - present, present)
    assert_same(contents(lk.snapshot()), expected)


def test_writers_killed_at_any_moment_lose_and_double_nothing(
    s3: Store, file: Path, expected: dict[str, pl.DataFrame]
) -> None:
    for seconds in (0.1, 0.3):
        worker = ingesting(s3, file, 4)
        at_the_gate(worker)
        time.sleep(seconds)
        worker.kill()
    lk = open_lake(s3)
    present = assert_whole(lk.snapshot())
    assert ingest(lk, file, run_id="run", batch_size=10).new == RECORDS - present
    assert_same(contents(lk.snapshot()), expected)


# ---------------------------------------------------------------- 3. credentials

SECRETS = [SECRET.encode(), urllib.parse.quote(SECRET, safe="").encode()]
KEY_ID = b"AKIATESTTESTTEST"


def test_credentials_are_in_no_object_and_no_output(s3: Store, file: Path) -> None:
    for args, code, says in (
        (["ingest", file, "--run", "run"], 0, f"{RECORDS} episodes"),
        (["sql", "SELECT no_such_column FROM jobs"], 1, "no_such_column"),
        (["doctor"], 0, "fine"),
    ):
        done = command(s3, *args)
        assert done.returncode == code, done.stderr
        assert says in done.stdout + done.stderr
        assert not any(leak in (done.stdout + done.stderr).encode() for leak in [*SECRETS, KEY_ID])
    # RUST_LOG is read when delta-rs is loaded: its own interpreter.
    env = environment(**s3.environment, RUST_LOG="debug")
    words = [*COMMAND, "tables", "--lake", s3.root]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False, env=env)
    assert "AwsCredential" in done.stderr, "delta-rs says what it does, the id of the key included, and no secret"
    assert not any(leak in done.stderr.encode() for leak in SECRETS)

    objects = Objects(f"s3://{s3.bucket}", s3.options)
    listed = objects.list()
    assert any("_delta_log" in entry.path for entry in listed)
    for entry in listed:
        data = objects.get(entry.path) or b""
        texts = [data]
        if entry.path.endswith(".parquet"):
            texts.append(str(pl.read_parquet(data).to_dicts()).encode())
        assert not any(leak in text for leak in [*SECRETS, KEY_ID] for text in texts), entry.path


# ---------------------------------------------------------------- 4. no bucket


def refused(store: Store, says: str, kind: type[TrajlakeError]) -> None:
    """Opening it fails in one line, soon, in this process and on the command line."""
    for create in (False, True):
        start = time.monotonic()
        with pytest.raises(kind) as caught:
            lake.open(store.root, create=create, storage_options=store.options)
        assert time.monotonic() - start < 40
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)
    done = command(store, "sql", "SELECT 1")
    assert done.returncode == 1
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert SECRET not in done.stdout + done.stderr


def test_a_missing_bucket_is_one_line(s3_server: str) -> None:
    refused(Store(s3_server, "no-such-bucket"), "there is no bucket `no-such-bucket`", NotALakeError)


def test_wrong_credentials_are_one_line() -> None:
    with answering(refusal(403, "InvalidAccessKeyId")) as endpoint:
        refused(Store(endpoint, "bucket"), "access denied; check AWS_ACCESS_KEY_ID", LakeAccessError)


def test_an_unreachable_endpoint_is_one_line() -> None:
    refused(Store(unused_endpoint(), "bucket"), "cannot be reached; check the network", LakeAccessError)


def test_a_prefix_with_other_objects_is_no_place_for_a_lake(s3: Store) -> None:
    with pytest.raises(NotALakeError, match="is not a lake"):
        lake.open(s3.root, storage_options=s3.options)
    objects = Objects(s3.root, s3.options)
    objects.put("readme.txt", b"not a lake")
    with pytest.raises(NotALakeError, match="not empty"):
        open_lake(s3)
    objects.delete(["readme.txt"])
    assert open_lake(s3).sql("SELECT count(*) AS n FROM episodes").item() == 0


def test_files_that_are_gone_are_one_line(s3: Store) -> None:
    lk = open_lake(s3)
    lk.append([episode("task", n) for n in range(3)], run_id="run")
    assert lk.sql("SELECT count(*) AS n FROM steps").item() == 6
    objects = Objects(s3.root, s3.options)
    objects.delete([f.path for f in objects.list("steps") if f.path.endswith(".parquet")])
    reopened = lake.open(s3.root, storage_options=s3.options)
    for query in ("SELECT sum(step_index) FROM steps", "SELECT max(state) FROM trajectory"):
        with pytest.raises(LakeAccessError) as caught:
            reopened.sql(query)
        assert "\n" not in str(caught.value)
        assert "Traceback" not in str(caught.value)
        assert f"{s3.root}: " in str(caught.value)
        assert "steps/" in str(caught.value)
