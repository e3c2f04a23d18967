"""Storage that fails says what to do, in one line, soon and without secrets; and every engine gets the same options.

1. Errors.
2. Options and engines.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import duckdb
import polars as pl
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from lake.errors import LakeAccessError, NotALakeError, TrajlakeError, UsageError
from lake.storage.objects import Objects
from testkit.disks import disk, folder_to_lock, read_only
from testkit.examples import mostly_slow
from testkit.object_store import SECRET, Store, answering, options, passed_on, refusal, send, unused_endpoint
from testkit.processes import environment

# ---------------------------------------------------------------- 1. errors

CALLS = {
    "list": lambda o: o.list(),
    "get": lambda o: o.get("a"),
    "exists": lambda o: o.exists("a"),
    "create": lambda o: o.create("a", b"x"),
    "put": lambda o: o.put("a", b"x"),
    "delete": lambda o: o.delete(["a"]),
    "read": lambda o: o.filesystem({o.uri("a"): 5}).open(o.uri("a")).read(),
}


def failure(call: str, objects: Objects) -> TrajlakeError:
    """The error of a call, checked: soon, one line, no secrets, not even in the chain that a traceback prints."""
    start = time.monotonic()
    with pytest.raises(TrajlakeError) as caught:
        CALLS[call](objects)
    assert time.monotonic() - start < 40
    assert "\n" not in str(caught.value)
    assert SECRET not in str(caught.value)
    assert caught.value.__suppress_context__
    assert str(caught.value).startswith(objects.root)
    return caught.value


@pytest.mark.parametrize("call", CALLS)
def test_a_missing_bucket_is_named(call: str, s3_server: str) -> None:
    error = failure(call, Objects("s3://no-such-bucket/x", options(s3_server)))
    assert isinstance(error, NotALakeError)
    assert "there is no bucket `no-such-bucket`" in str(error)


@pytest.mark.parametrize(
    ("call", "status", "code"),
    [
        *((call, 403, "AccessDenied") for call in CALLS),
        ("get", 403, "InvalidAccessKeyId"),
        ("create", 401, "Unauthorized"),
    ],
)
def test_refused_credentials_are_named(call: str, status: int, code: str) -> None:
    with answering(refusal(status, code)) as endpoint:
        error = failure(call, Objects("s3://bucket/x", options(endpoint)))
    assert isinstance(error, LakeAccessError)
    assert "access denied; check AWS_ACCESS_KEY_ID" in str(error)


@pytest.mark.parametrize("call", mostly_slow(["list", "create", "read"], "create"))
def test_an_unreachable_endpoint_is_named(call: str) -> None:
    error = failure(call, Objects("s3://bucket/x", options(f"{unused_endpoint()}")))
    assert "cannot be reached" in str(error)
    assert "check the network and" in str(error)


def test_an_endpoint_in_plain_http_is_explained(s3: Store) -> None:
    error = failure("get", Objects(s3.root, s3.options | {"aws_allow_http": "false"}))
    assert "set AWS_ALLOW_HTTP=true" in str(error)


def test_missing_credentials_are_named(s3: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    store_options = {k: v for k, v in s3.options.items() if "key" not in k}
    with answering(refusal(404, "NoRole")) as metadata:
        error = failure("get", Objects(s3.root, store_options | {"aws_metadata_endpoint": metadata}))
    assert "no usable credentials; set AWS_ACCESS_KEY_ID" in str(error)


@pytest.mark.parametrize(
    ("root", "store_options", "says"),
    [
        ("az://box/x", {}, "no usable credentials; set AZURE_STORAGE_ACCOUNT_NAME"),
        (
            "gs://box/x",
            {"google_service_account": "/no/such/file"},
            "no usable credentials; set GOOGLE_SERVICE_ACCOUNT",
        ),
    ],
)
def test_other_stores_say_what_they_lack(root: str, store_options: dict[str, str], says: str) -> None:
    with pytest.raises(LakeAccessError) as caught:
        Objects(root, store_options)
    assert says in str(caught.value)


def test_an_unknown_option_is_refused_without_its_value() -> None:
    with pytest.raises(UsageError, match="aws_secret_acces_key") as caught:
        Objects("s3://bucket/x", {"aws_secret_acces_key": SECRET})
    assert SECRET not in str(caught.value)


def test_a_folder_that_may_not_be_written_is_explained(tmp_path: Path) -> None:
    with folder_to_lock(tmp_path / "locked") as path:
        objects = Objects(path)
        objects.put("a", b"x")
        with read_only(path):
            for call in ("create", "put", "delete"):
                assert "no permission to write" in str(failure(call, objects))
            assert objects.get("a") == b"x"


def test_a_full_disk_is_explained_and_leaves_nothing(tmp_path: Path) -> None:
    with disk(tmp_path / "disk", "100k") as path:
        objects = Objects(path)
        for write in (objects.create, objects.put):
            with pytest.raises(LakeAccessError, match="the disk is full"):
                write("d/big", b"x" * 200_000)
        assert objects.list("", staging=True) == []


def test_secrets_are_taken_out_of_any_text(s3: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "session/token-of-the-environment")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "sig=azure-secret")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/home/me/credentials")
    objects = Objects(s3.root, s3.options)
    text = objects.redacted(
        f"{SECRET} AKIATESTTESTTEST session%2Ftoken-of-the-environment sig=azure-secret /home/me/credentials us-east-1"
    )
    assert text == "*** *** *** *** /home/me/credentials us-east-1"
    assert SECRET not in repr(objects)


def test_errors_of_other_engines_are_said_in_the_same_words(s3_server: str) -> None:
    objects = Objects("s3://no-such-bucket/x", options(s3_server))
    errors = []
    with pytest.raises(OSError, match="NoSuchBucket") as delta:
        DeltaTable(objects.uri("t"), storage_options=objects.delta_options)
    errors.append(objects.explain_failure(delta.value))
    with pytest.raises(FileNotFoundError, match="NoSuchBucket") as polars:
        pl.scan_parquet(objects.uri("t/x.parquet"), storage_options=objects.polars_options).collect()
    errors.append(objects.explain_failure(polars.value))
    for error in errors:
        assert isinstance(error, NotALakeError)
        assert "there is no bucket `no-such-bucket`" in str(error)
        assert str(error).isascii()


# ---------------------------------------------------------------- 2. options and engines


def test_a_local_folder_needs_no_options_and_loads_no_client(tmp_path: Path) -> None:
    objects = Objects(tmp_path)
    assert (objects.delta_options, objects.polars_options, objects.filesystem({})) == ({}, {}, None)
    code = (
        "import sys; from lake.storage.objects import Objects; o = Objects(sys.argv[1]); "
        "o.create('a', b'x'); o.list(); "
        "print(*({'obstore', 'fsspec', 'polars', 'deltalake', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], check=False, capture_output=True, text=True, env=environment()
    )
    assert (done.stdout.strip(), done.stderr) == ("", "")


@pytest.fixture(params=["options", "environment"])
def anyhow(request: pytest.FixtureRequest, s3: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Objects]:
    """The same bucket, reached by options and by the environment alone."""
    if request.param == "options":
        yield Objects(s3.root, {name.upper(): value for name, value in s3.options.items()})
    else:
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
        yield Objects(s3.root)


def test_every_engine_reads_a_bucket_with_the_same_options(anyhow: Objects) -> None:
    frame = pl.DataFrame({"a": range(5000), "text": [f"{n:064d}" for n in range(5000)]})
    write_deltalake(anyhow.uri("t"), frame, storage_options=anyhow.delta_options)
    table = DeltaTable(anyhow.uri("t"), storage_options=anyhow.delta_options)
    (uri,) = table.file_uris()
    assert pl.scan_parquet(uri, storage_options=anyhow.polars_options).collect().equals(frame)
    (entry,) = [f for f in anyhow.list("t") if f.path.endswith(".parquet")]
    assert anyhow.uri(entry.path) == uri
    files = anyhow.filesystem({uri: entry.bytes})
    assert files is not None
    assert pl.from_arrow(pq.ParquetFile(files.open(uri)).read()).equals(frame)
    with duckdb.connect(":memory:") as connection:
        connection.register_filesystem(files)
        connection.execute(f"SET allowed_directories = ['{anyhow.root}']")
        connection.execute("SET enable_external_access = false")
        connection.execute("SET lock_configuration = true")
        sql = f"SELECT sum(a) AS a, max(text) AS text, count(*) AS n FROM read_parquet(['{uri}'])"
        assert connection.execute(sql).fetchall() == [(5000 * 4999 // 2, f"{4999:064d}", 5000)]
        log = anyhow.uri("t/_delta_log/00000000000000000000.json")
        for nothing in (f"glob('{anyhow.root}/**')", f"read_text('{log}')", f"read_blob('{anyhow.root}/t/*')"):
            assert connection.execute(f"SELECT * FROM {nothing}").fetchall() == [], "only the snapshot's files exist"
        for hostile in (
            "SELECT * FROM read_text('/etc/passwd')",
            f"COPY (SELECT 1) TO '{anyhow.uri('t/evil.parquet')}'",
            "SELECT * FROM read_text('s3://other-bucket/x')",
        ):
            with pytest.raises(duckdb.Error):
                connection.execute(hostile)
    assert len(anyhow.list("t")) == 2


def test_duckdb_reads_ranges_and_asks_once(s3: Store) -> None:
    frame = pl.DataFrame({"a": range(20_000), "wide": [os.urandom(64).hex() for _ in range(20_000)]})
    requests: list[tuple[str, int]] = []

    def counting(request: BaseHTTPRequestHandler, body: bytes) -> None:
        status, data, headers = passed_on(s3.endpoint, request, body)
        requests.append((request.command, len(data)))
        kept_headers = {k: v for k, v in headers.items() if k.lower() in ("etag", "last-modified", "content-range")}
        send(request, status, data, **kept_headers)

    direct = Objects(s3.root, s3.options)
    write_deltalake(direct.uri("t"), frame, storage_options=direct.delta_options)
    (entry,) = [f for f in direct.list("t") if f.path.endswith(".parquet")]
    with answering(counting) as endpoint, duckdb.connect(":memory:") as connection:
        objects = Objects(s3.root, options(endpoint))
        uri = objects.uri(entry.path)
        connection.execute("SET threads = 4")
        connection.register_filesystem(objects.filesystem({uri: entry.bytes}))
        for _ in range(2):
            assert connection.execute(f"SELECT sum(a) FROM read_parquet('{uri}')").fetchall() == [(199990000,)]
    assert {verb for verb, _ in requests} == {"GET"}
    assert len(requests) <= 4
    assert sum(size for _, size in requests) < entry.bytes / 4


def test_a_file_that_is_gone_is_named(s3: Store) -> None:
    objects = Objects(s3.root, s3.options)
    uri = objects.uri("t/gone.parquet")
    files = objects.filesystem({uri: 1000})
    assert files is not None
    with duckdb.connect(":memory:") as connection:
        connection.register_filesystem(files)
        with pytest.raises(duckdb.Error):
            connection.execute(f"SELECT * FROM read_parquet('{uri}')")
    assert isinstance(files.failure, LakeAccessError)
    assert "t/gone.parquet" in str(files.failure)


def test_the_server_is_asked_nothing_when_objects_are_made() -> None:
    paths: list[str] = []
    with answering(lambda request, _: (paths.append(request.path), send(request, 404))[1]) as endpoint:
        Objects("s3://bucket/x", options(endpoint))
    assert paths == []
