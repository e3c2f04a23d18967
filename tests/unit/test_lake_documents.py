"""JSON that lies in a lake is foreign: no matter what is in it, a command works or names the object that is in its
way."""

import json
from collections.abc import Callable

import pytest

from lake import Lake, ids
from lake.care.doctor import examine
from lake.care.pins import _CLAIMS, _LEASES, _SNAPSHOTS, _VACUUMS
from lake.care.saved_views import _FOLDER, read_saved_views, save_view
from lake.documents import decode_document, parse_json_object
from lake.errors import LakeAccessError, TrajlakeError, UsageError
from lake.storage.commits import _REVOKED
from lake.storage.data_files import _REPLACED
from lake.storage.objects import Objects
from testkit.copies import empty_lake
from testkit.episodes import episode

DEEP = "[" * 100_000 + "]" * 100_000
DOCUMENTS: dict[str, str | bytes] = {
    "deep": DEEP,
    "deep in a field": '{"name": "x", "address": "/", "versions": ' + DEEP + "}",
    "cut": '{"name": ',
    "empty": "",
    "null": "null",
    "no UTF-8": b'"\xff"',
    "numbers": '{"name": 1, "versions": {"episodes": 1e400}}',
    "naive time": '{"name": "x", "versions": {"episodes": 1}, "created_at": "2026-01-01T00:00:00"}',
    "naive moment": '"2026-01-01T00:00:00"',
    "huge": '{"name": "x", "versions": {"episodes": 99999999999999999999}, "created_at": "2026-01-01T00:00:00Z"}',
    "unknown": '{"name": "x", "versions": {"no table": 3}, "created_at": "2026-01-01T00:00:00Z"}',
}


@pytest.fixture(scope="module")
def lk(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    lk = empty_lake(tmp_path_factory.mktemp("documents") / "lake")
    lk.append([episode("a")], run_id="run")
    return lk


def bytes_of(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode()


def error_of(read: Callable[[Lake], object], lk: Lake) -> TrajlakeError | None:
    try:
        read(lk)
    except TrajlakeError as error:
        return error
    return None


def _claim(lk: Lake) -> None:
    with lk.claim("x", "here"):
        pass


READERS: dict[str, list[Callable[[Lake], object]]] = {
    _FOLDER: [lambda lk: read_saved_views(Objects(lk.uri))],
    _SNAPSHOTS: [Lake.snapshots, lambda lk: lk.at("x").sql("SELECT 1"), lambda lk: lk.vacuum(dry_run=True)],
    _LEASES: [lambda lk: lk.cuts([1]), lambda lk: lk.vacuum(dry_run=True)],
    _VACUUMS: [lambda lk: lk.name_snapshot("new")],
    f"{_CLAIMS}/{ids.to_text(ids.text_hash('x'))}": [_claim],
    _REVOKED: [lambda lk: lk.append([episode("b", len(lk.history("episodes")))], run_id="run")],
    _REPLACED: [lambda lk: lk.at(lk.snapshot().versions).sql("SELECT count(*) FROM episodes")],
}
"""What reads the objects of a folder."""


@pytest.mark.parametrize("folder", READERS)
def test_any_object_is_read_or_named(lk: Lake, folder: str) -> None:
    objects = Objects(lk.uri)
    path = f"{folder}/{'1' if folder.startswith(_CLAIMS) else 'x'}.json"
    faults = set()
    for name, text in DOCUMENTS.items():
        objects.put(path, bytes_of(text))
        for read in (*READERS[folder], examine) if name == "deep" else READERS[folder]:
            error = error_of(read, lk)
            assert error is None or isinstance(error, UsageError) or path in str(error), name
            faults |= set() if error is None else {name}
    objects.delete([path, f"{_SNAPSHOTS}/new.json"])
    assert not faults if folder == _FOLDER else faults >= {"deep", "cut", "empty", "null", "no UTF-8"}


def test_a_damaged_view_hides_no_other(lk: Lake) -> None:
    objects = Objects(lk.uri)
    save_view(objects, "sound", "/runs", "ann")
    for name, text in DOCUMENTS.items():
        objects.put(f"{_FOLDER}/{name}.json", bytes_of(text))
    assert [view.name for view in read_saved_views(objects)] == ["sound"]


@pytest.mark.parametrize("text", [None, *(text for text in DOCUMENTS.values() if isinstance(text, str))])
def test_a_column_of_json_is_an_object_or_nothing(text: str | None) -> None:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = {}
    assert parse_json_object(text) == (value if isinstance(value, dict) else {})


def test_a_document_of_another_type_is_refused_with_its_place_and_the_remedy() -> None:
    with pytest.raises(LakeAccessError, match=r"^jobs\.counts of job 1 .*; delete it$"):
        decode_document("[1]", dict, "jobs.counts of job 1", "delete it")
    assert decode_document("[1]", list, "jobs.counts of job 1", "delete it") == [1]
