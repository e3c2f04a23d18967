"""The file-system floor: a folder and a bucket behave alike.

1. Objects: the same laws locally and on S3, with a dict as the oracle.
2. Put-if-absent: one winner, no matter who races with which library, and what is lost or killed.
"""

import json
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from threading import Event, Thread
from typing import Any

import hypothesis.strategies as st
import polars as pl
import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import given, settings

from lake.storage.objects import Objects
from testkit.examples import examples
from testkit.object_store import Store, answering, new_bucket, options, passed_on, send
from testkit.processes import Forked, at_the_gate, environment

SOON = timedelta(minutes=5)


@pytest.fixture(params=["folder", "bucket"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    """Empty objects: a folder that does not exist yet, and a prefix of a bucket."""
    if request.param == "folder":
        return Objects(str(tmp_path / "a place with é, + and %"))
    store: Store = request.getfixturevalue("s3")
    return Objects(store.root, store.options)


# ---------------------------------------------------------------- 1. objects


def test_an_object_is_written_found_read_and_deleted(objects: Objects) -> None:
    assert objects.list() == []
    assert objects.names() == set()
    assert objects.list("a/b") == []
    assert objects.get("a/b/c") is None
    assert not objects.exists("a/b/c")

    assert objects.create("a/b/c", b"one")
    assert not objects.create("a/b/c", b"one"), "even with the same bytes it exists already"
    assert objects.get("a/b/c") == b"one"
    assert objects.exists("a/b/c")
    assert not objects.exists("a/b"), "a folder is no object"
    assert objects.get("a/b") is None

    objects.put("a/b/c", b"two!")
    objects.put("a/bc", b"")
    (listed,) = objects.list("a/b")
    assert (listed.path, listed.bytes) == ("a/b/c", 4)
    assert listed.modified.tzinfo is UTC
    assert abs(listed.modified - datetime.now(UTC)) < SOON
    assert [f.path for f in objects.list()] == ["a/b/c", "a/bc"]
    objects.put("top", b"")
    assert objects.names() == {"a", "top"}
    objects.delete(["top"])
    assert objects.list("a/b/c") == [], "an object is no folder"

    objects.delete(["a/b/c", "a/none", "no/such/folder/x"])
    objects.delete([])
    assert [f.path for f in objects.list()] == ["a/bc"]
    assert objects.get("a/bc") == b""


def test_a_bucket_that_is_listed_in_pages_is_listed_whole() -> None:
    def page(request: BaseHTTPRequestHandler, _: bytes) -> None:
        is_last = "continuation-token=next" in request.path
        ending = "<IsTruncated>false</IsTruncated>" if is_last else _MORE
        send(request, 200, f"<ListBucketResult>{ending}{_CONTENTS.format(int(is_last))}</ListBucketResult>".encode())

    with answering(page) as endpoint:
        assert [listed.path for listed in Objects("s3://bucket/x", options(endpoint)).list("many")] == [
            "many/0",
            "many/1",
        ]


_MORE = "<IsTruncated>true</IsTruncated><NextContinuationToken>next</NextContinuationToken>"
_CONTENTS = (
    "<Contents><Key>x/many/{}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
    '<ETag>"e"</ETag><Size>1</Size></Contents>'
)


@pytest.mark.slow("A listing and a deletion of more objects than a page or a request holds are complete.")
def test_a_listing_of_more_than_a_page_is_complete(objects: Objects) -> None:
    names = [f"many/{n:04d}" for n in range(1003)]
    for name in names:
        objects.put(name, b"x")
    assert [f.path for f in objects.list("many")] == names
    objects.delete(names[:1001])
    assert [f.path for f in objects.list("many")] == names[1001:]


def test_a_uri_names_the_object(objects: Objects, tmp_path: Path) -> None:
    objects.put("a/b", b"x")
    if objects.folder is None:
        assert objects.uri("a/b") == f"{objects.root}/a/b"
        assert objects.uri("a/b").startswith("s3://bucket-")
    else:
        assert Path(objects.uri("a/b")).read_bytes() == b"x"
        assert objects.folder == tmp_path / "a place with é, + and %"
    assert objects.uri("") == objects.root


_PATHS = st.sampled_from(["a/x", "a/y.json", "a/b/x", "c/x", "c/d/e/f", "top"])
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("create"), _PATHS, st.binary(max_size=9)),
        st.tuples(st.just("put"), _PATHS, st.binary(max_size=9)),
        st.tuples(st.just("delete"), st.lists(_PATHS, max_size=3, unique=True)),
        st.tuples(st.just("list"), st.sampled_from(["", "a", "a/b", "c", "c/d", "none"])),
        st.tuples(st.just("get"), _PATHS),
    ),
    max_size=20,
)


def agree(objects: Objects, steps: list[tuple[str, ...]]) -> None:
    """The objects do what a dict does."""
    oracle: dict[str, bytes] = {}
    for verb, argument, *data in steps:
        if verb == "create":
            assert objects.create(argument, data[0]) == (argument not in oracle)
            oracle.setdefault(argument, data[0])
        elif verb == "put":
            objects.put(argument, data[0])
            oracle[argument] = data[0]
        elif verb == "delete":
            objects.delete(argument)
            for path in argument:
                oracle.pop(path, None)
        elif verb == "get":
            assert objects.get(argument) == oracle.get(argument)
            assert objects.exists(argument) == (argument in oracle)
        else:
            inside = {p: len(d) for p, d in sorted(oracle.items()) if not argument or p.startswith(f"{argument}/")}
            assert {f.path: f.bytes for f in objects.list(argument)} == inside


@given(steps=_STEPS)
@settings(max_examples=examples(40))
def test_a_folder_does_what_a_dict_does(steps: list[tuple[str, ...]], tmp_path_factory: pytest.TempPathFactory) -> None:
    agree(Objects(tmp_path_factory.mktemp("folder") / "root"), steps)


@given(steps=_STEPS)
@settings(max_examples=examples(15))
def test_a_bucket_does_what_a_dict_does(steps: list[tuple[str, ...]], s3_server: str) -> None:
    store = new_bucket(s3_server)
    agree(Objects(store.root, store.options), steps)


def test_prefixes_of_one_bucket_know_nothing_of_each_other(s3: Store) -> None:
    first, second = (Objects(f"s3://{s3.bucket}/{name}", s3.options) for name in ("lake", "lake2"))
    first.put("x", b"1")
    second.put("y", b"2")
    bucket = Objects(f"s3://{s3.bucket}", s3.options)
    assert [f.path for f in first.list()] == ["x"]
    assert [f.path for f in bucket.list()] == ["lake/x", "lake2/y"]
    assert bucket.get("lake2/y") == b"2"


# ---------------------------------------------------------------- 2. put-if-absent

_KILLED = """
import sys
from lake.storage.objects import Objects
objects, data = Objects(sys.argv[1]), bytes([int(sys.argv[2])]) * (2 << 20)
print("ready", flush=True)
for n in range(1000):
    objects.create(f"d/c{n}", data)
    objects.put("d/p", data)
"""


def test_a_killed_writer_leaves_no_half_written_object(tmp_path: Path) -> None:
    objects = Objects(tmp_path / "root")
    objects.put("d/p", b"\x00" * (2 << 20))
    for round_ in range(3):
        command = [sys.executable, "-c", _KILLED, objects.root, str(round_)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment()) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(0.03 * round_)
            process.send_signal(signal.SIGKILL)
        for entry in objects.list("d"):
            data = objects.get(entry.path)
            assert data is not None
            assert len(set(data)) == 1
            assert len(data) == 2 << 20
        objects.delete([f.path for f in objects.list("d") if f.path != "d/p"])
    paths = {f.path for f in objects.list("", staging=True)} - {"d/p"}
    assert all("#" in path for path in paths)
    objects.delete(sorted(paths))
    assert [f.path for f in objects.list("", staging=True)] == ["d/p"]


def test_threads_that_create_one_object_have_one_winner(objects: Objects) -> None:
    won: list[tuple[int, int]] = []
    gate = Event()

    def race(thread: int) -> None:
        gate.wait()
        won.extend((n, thread) for n in range(8) if objects.create(f"log/{n:020d}.json", b"%d" % thread))

    threads = [Thread(target=race, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    gate.set()
    for thread in threads:
        thread.join()
    assert sorted(n for n, _ in won) == list(range(8))
    assert all(objects.get(f"log/{n:020d}.json") == b"%d" % thread for n, thread in won)
    assert len(objects.list("log", staging=True)) == 8


def raced(objects: Objects, name: str) -> list[dict[str, Any]]:
    """Three processes that start at once make five commits each: what each tried and made."""
    arguments = (objects.root, json.dumps(objects.options))
    racers = [
        Forked("testkit.commit_racer", kind, *arguments, f"{name}-{kind}{number}", 5)
        for number, kind in enumerate(("delta", "objects", "objects"))
    ]
    at_the_gate(*racers)
    return [json.loads(racer.finish()) for racer in racers]


def test_processes_race_delta_rs_and_each_version_has_one_winner(objects: Objects) -> None:
    """Ours and delta-rs's commits are put-if-absent of the same kind."""
    write_deltalake(objects.root, pl.DataFrame({"a": [0]}), storage_options=objects.delta_options)
    reports: list[dict[str, Any]] = []
    while sum(report["tried"] - len(report["made"]) for report in reports) == 0:
        assert len(reports) < 10 * 3, "nobody ever lost: no race was seen"
        reports += raced(objects, f"round{len(reports)}")
    marks = sorted(mark for report in reports for mark in report["made"])
    logged = []
    for entry in objects.list("_delta_log"):
        data = objects.get(entry.path) or b""
        actions = [json.loads(line) for line in data.splitlines()]
        logged += [action["commitInfo"]["mark"] for action in actions if "mark" in action.get("commitInfo", {})]
    assert sorted(logged) == marks
    assert len(marks) == 5 * len(reports)
    assert DeltaTable(objects.root, storage_options=objects.delta_options).version() == len(marks)


def test_a_put_whose_answer_was_lost_is_known_to_have_happened(s3: Store) -> None:
    """The store keeps the object and the connection breaks: the retry is refused by the writer's own object."""
    lost: list[str] = []

    def lossy(request: BaseHTTPRequestHandler, body: bytes) -> None:
        status, data, headers = passed_on(s3.endpoint, request, body)
        if request.command == "PUT" and status == 200 and len(lost) < 4:
            lost.append(request.path)
            request.close_connection = True
            return
        kept_headers = {
            k: v for k, v in headers.items() if k.lower() not in ("content-length", "connection", "date", "server")
        }
        if request.command == "HEAD":
            kept_headers["Content-Length"] = headers.get("Content-Length", "0")
        send(request, status, data, **kept_headers)

    with answering(lossy) as endpoint:
        objects = Objects(s3.root, options(endpoint))
        assert objects.create("log/1.json", b"mine")
        assert lost
        assert not objects.create("log/1.json", b"mine"), "a later writer of the same bytes did not write it"
    assert Objects(s3.root, s3.options).get("log/1.json") == b"mine"


def test_a_put_that_fails_after_the_store_kept_it_is_known_to_have_happened(s3: Store) -> None:
    failed: list[int] = []

    def failing(request: BaseHTTPRequestHandler, body: bytes) -> None:
        status, data, headers = passed_on(s3.endpoint, request, body)
        if request.command == "PUT" and status == 200:
            failed.append(status)
            status, data = 500, b"<Error><Code>InternalError</Code></Error>"
        kept_headers = {k: v for k, v in headers.items() if k.lower().startswith(("x-amz", "etag", "last-modified"))}
        if request.command == "HEAD":
            kept_headers["Content-Length"] = headers.get("Content-Length", "0")
        send(request, status, data, **kept_headers)

    with answering(failing) as endpoint:
        assert Objects(s3.root, options(endpoint)).create("x", b"mine")
    assert len(failed) == 1
    assert not Objects(s3.root, s3.options).create("x", b"mine")
    assert Objects(s3.root, s3.options).get("x") == b"mine"
