"""Objects of a bucket as sources: one, those of a pattern, all below a prefix; called and counted like files.

The lake is in a folder: a lake in a bucket is the matter of test_lake_s3.
"""

import gzip
import json
import urllib.request
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
import pytest

from lake import Lake
from lake.errors import FormatError, NotALakeError, TrajlakeError, UsageError
from lake.write.ingest import ingest
from lake.write.sources import locate_arguments
from testkit.command_line import Cli, runner
from testkit.copies import empty_lake
from testkit.episodes import assert_same, contents, episode, line
from testkit.object_store import SECRET, Store


@pytest.fixture
def bucket(s3: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A bucket that the environment reaches."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    return s3


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], bucket: Store) -> Cli:
    return runner(monkeypatch, capsys)


def put(store: Store, key: str, data: bytes) -> None:
    """An object, by any key that HTTP can name."""
    url = f"{store.endpoint}/{store.bucket}/{quote(key)}"
    # What urllib says unasked is that the body is a form, which the server then reads as one.
    headers = {"Content-Type": "application/octet-stream", "Content-Length": str(len(data))}
    with urllib.request.urlopen(urllib.request.Request(url, data=data, method="PUT", headers=headers)) as answer:
        assert answer.status == 200


def put_lines(store: Store, *keys: str) -> None:
    for key in keys:
        put(store, key, line(episode(key)))


def list_files(*uris: str) -> list[list[tuple[str, str]]]:
    """The name of every file of each argument, and the place that it comes from."""
    with locate_arguments(uris, None) as arguments:  # type: ignore[arg-type]
        return [[(file.name, str(file.location)) for file in argument.files] for argument in arguments]


def names(uri: str) -> list[str]:
    return [name for name, _ in list_files(uri)[0]]


# ---------------------------------------------------------------- what a URI names


def test_an_object_a_prefix_a_pattern_and_a_bucket(bucket: Store) -> None:
    put_lines(bucket, "logs/a.jsonl", "logs/deep/b.jsonl", "logs/deep/er/c.jsonl", "other/d.jsonl", "logs.jsonl")
    root = f"s3://{bucket.bucket}"
    places = [f"{bucket.bucket}/logs/{name}" for name in ("a.jsonl", "deep/b.jsonl", "deep/er/c.jsonl")]
    assert list_files(f"{root}/logs/a.jsonl") == [[("a.jsonl", places[0])]]
    below = list(zip(("a.jsonl", "deep/b.jsonl", "deep/er/c.jsonl"), places, strict=True))
    assert list_files(f"{root}/logs", f"{root}/logs/") == [below, []], "each object once"
    assert list_files(f"{root}/logs/")[0] == below
    assert names(f"{root}/logs/*.jsonl") == ["a.jsonl"]
    assert list_files(f"{root}/logs/*")[0] == below
    assert names(f"{root}/logs/**/*.jsonl") == ["a.jsonl", "deep/b.jsonl", "deep/er/c.jsonl"]
    assert names(f"{root}/*/[bd].jsonl") == ["other/d.jsonl"]
    everything = ["logs.jsonl", "logs/a.jsonl", "logs/deep/b.jsonl", "logs/deep/er/c.jsonl", "other/d.jsonl"]
    assert names(root) == names(f"{root}/") == names(f"{root}/**") == everything


def test_the_same_objects_as_files_make_the_same_lake(bucket: Store, tmp_path: Path) -> None:
    tau = [{"task_id": 1, "trial": 0, "reward": 1.0, "info": {}, "traj": [{"role": "assistant", "content": "x"}]}]
    some = b"".join(line(episode("t", n)) for n in range(3))
    objects = {
        "in/a.jsonl": some + b"nonsense\n",
        "in/b/c.jsonl.gz": gzip.compress(some),
        "in/b/d.jsonl.zst": pa.compress(some, "zstd", asbytes=True),
        "in/tau.json": json.dumps(tau).encode(),
        "in/notes.txt": b"hello",
        "in/empty.jsonl": b"",
    }
    for key, data in objects.items():
        put(bucket, key, data)
        path = tmp_path / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    lakes = {name: empty_lake(tmp_path / name) for name in ("remote", "local")}
    report = ingest(lakes["remote"], f"s3://{bucket.bucket}/in")
    folder_report = ingest(lakes["local"], tmp_path / "in")
    assert (report.new, report.rejected, report.files) == (10, 1, 4)
    assert report == folder_report
    assert_same(contents(lakes["remote"].snapshot()), contents(lakes["local"].snapshot()))
    assert ingest(lakes["remote"], tmp_path / "in").present == 10, "a copy is a replay"
    stored = [lakes["remote"].scan(name).collect().write_json() for name in ("jobs", "episodes", "rejects")]
    assert not [text for text in stored if bucket.bucket in text or SECRET in text]


def test_keys_of_any_letters_are_found(bucket: Store) -> None:
    keys = [
        "in/with space.jsonl",
        "in/ümläut.jsonl",
        "in/a+b=c&d.jsonl",
        "in/50%.jsonl",
        "in/[x]*.jsonl",
        "in/#1.jsonl",
    ]
    put_lines(bucket, *keys)
    assert sorted(names(f"s3://{bucket.bucket}/in")) == sorted(key.removeprefix("in/") for key in keys)
    assert names(f"s3://{bucket.bucket}/in/[x]*.jsonl") == ["[x]*.jsonl"], "there is an object of this very name"
    assert names(f"s3://{bucket.bucket}/in/with space.jsonl") == ["with space.jsonl"]


def test_a_lake_markers_of_folders_and_what_is_hidden_are_left_alone(bucket: Store) -> None:
    import lake

    put_lines(bucket, "in/a.jsonl", "in/.hidden.jsonl", "in/.git/x.jsonl", "in/b.jsonl.tmp", "in/node_modules/x.jsonl")
    put(bucket, "in/folder/", b"")
    lk = lake.open(f"s3://{bucket.bucket}/in/lake", create=True, storage_options=bucket.options)
    lk.append([episode("mine")], run_id="run")
    assert names(f"s3://{bucket.bucket}/in") == ["a.jsonl"]
    assert names(f"s3://{bucket.bucket}/**/*.json*") == ["in/a.jsonl"]


def test_an_object_that_others_lie_below_is_told(bucket: Store) -> None:
    put_lines(bucket, "in/a", "in/a/b.jsonl", "in/c.jsonl")
    with locate_arguments([f"s3://{bucket.bucket}/in"], None) as (argument,):  # type: ignore[arg-type]
        assert len(argument.files) + len(argument.left_out) == 3
        assert "c.jsonl" in [file.name for file in argument.files]
    assert names(f"s3://{bucket.bucket}/in/a") == ["a"], "the object is named, not what lies below it"


def test_what_was_spooled_is_deleted(bucket: Store) -> None:
    put_lines(bucket, "in/a.jsonl")
    with locate_arguments([f"s3://{bucket.bucket}/in"], None) as (argument,):  # type: ignore[arg-type]
        path = argument.files[0].path
        assert path.read_bytes() == line(episode("in/a.jsonl"))
    assert not path.exists()


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize(
    ("uri", "error", "says"),
    [
        ("s3://BUCKET/absent.jsonl", FormatError, "there is no object at s3://BUCKET/absent.jsonl"),
        ("s3://BUCKET/absent/", FormatError, "there is no object at s3://BUCKET/absent/"),
        ("s3://BUCKET/in/*.parquet", FormatError, "there is no object at s3://BUCKET/in/*.parquet"),
        ("s3://no-such-bucket/x", NotALakeError, "no-such-bucket"),
        ("s3://", UsageError, "bucket"),
        ("https://example.org/x.jsonl", UsageError, "https"),
        ("s3://BUCKET/in/empty.jsonl", FormatError, "s3://BUCKET/in/empty.jsonl is empty"),
        ("s3://BUCKET/in/notes.txt", FormatError, "s3://BUCKET/in/notes.txt has no known format"),
    ],
)
def test_what_cannot_be_had_is_one_line(
    bucket: Store, tmp_path: Path, cli: Cli, uri: str, error: type[TrajlakeError], says: str
) -> None:
    put(bucket, "in/empty.jsonl", b"")
    put(bucket, "in/notes.txt", b"hello")
    uri, says = uri.replace("BUCKET", bucket.bucket), says.replace("BUCKET", bucket.bucket)
    with pytest.raises(error, match=says.replace("*", r"\*")):
        ingest(empty_lake(tmp_path / "lake"), uri)
    fault = cli("ingest", uri, "--lake", tmp_path / "new").fault
    assert says in fault
    assert SECRET not in fault
    assert not (tmp_path / "new").exists()


def test_files_and_objects_are_taken_in_one_command(bucket: Store, tmp_path: Path, cli: Cli) -> None:
    put_lines(bucket, "in/a.jsonl", "in/b.jsonl")
    (tmp_path / "c.jsonl").write_bytes(line(episode("c")))
    uri = f"s3://{bucket.bucket}/in"
    done = cli(
        "ingest",
        f"{uri}/a.jsonl",
        uri,
        tmp_path / "c.jsonl",
        "-",
        "--lake",
        tmp_path / "lake",
        stdin=line(episode("d")),
    )
    assert done.code == 0, done.err
    assert [text.split(",")[0] for text in done.out.splitlines()] == [
        f"{uri}/a.jsonl: 1 episode",
        f"{uri}: 1 episode",
        f"{tmp_path}/c.jsonl: 1 episode",
        "-: 1 episode",
    ]


def test_scores_are_imported_from_an_object(bucket: Store, tmp_path: Path) -> None:
    lk: Lake = empty_lake(tmp_path / "lake")
    lk.append([episode("a")], run_id="run")
    put(bucket, "labels.csv", b"task_id,value\na,1\n")
    from lake.write.score_import import import_file

    report = import_file(lk, f"s3://{bucket.bucket}/labels.csv", name="human")
    assert (report.source, report.new) == ("labels.csv", 1)
