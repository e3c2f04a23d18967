"""Exports on disks that are full or locked, of lakes that are damaged, and while a lake changes under them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lake import Lake
from lake.errors import LakeAccessError
from lake.export import TARGETS, job
from lake.export.job import MANIFEST, STATE
from testkit.copies import copied
from testkit.disks import disk, folder_to_lock, grow, read_only
from testkit.episodes import episode
from testkit.examples import mostly_slow
from testkit.round_trips import exported
from testkit.wording import Wording

GROUPS = 16
FORMATS = ("jsonl", "messages-parquet", "trl-completions", "eval-protocol-db", "atif", "massgen")
KINDS = mostly_slow(FORMATS[:-1], "jsonl")


@pytest.fixture
def lk(tmp_path: Path) -> Lake:
    def make(folder: Path) -> None:
        import lake

        records = [episode(f"task-{n}", index, steps=20, tokens=True) for n in range(GROUPS) for index in range(2)]
        lake.open(folder, create=True).append(records, run_id="run")

    return copied("export-faults", make, tmp_path / "lake")


def content(folder: Path) -> dict[str, bytes]:
    """The files of an export."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", KINDS)
def test_a_full_disk_is_told_and_the_export_goes_on_once_there_is_room(lk: Lake, tmp_path: Path, name: str) -> None:
    exported(lk, tmp_path / "whole", name, shard_episodes=8)
    with disk(tmp_path / "small", "32k") as small:
        with pytest.raises(LakeAccessError, match=r"(No space left|full).*run it again"):
            exported(lk, small / "out", name, shard_episodes=8)
        assert not (small / "out" / MANIFEST).exists()
        grow(small, "8m")
        exported(lk, small / "out", name, shard_episodes=8)
        assert content(small / "out") == content(tmp_path / "whole")


@pytest.mark.parametrize("name", KINDS)
def test_a_folder_that_may_not_be_written_is_told(lk: Lake, tmp_path: Path, name: str) -> None:
    with folder_to_lock(tmp_path / "locked") as folder, read_only(folder):
        with pytest.raises(LakeAccessError, match=r"Read-only file system|Permission denied"):
            exported(lk, folder / "out", name)
        with pytest.raises(LakeAccessError, match=r"Read-only file system|Permission denied"):
            exported(lk, folder, name)
        assert list(folder.iterdir()) == []


def test_a_file_where_a_folder_has_to_be_is_told(lk: Lake, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file" / "out", tmp_path / "file" / "out.jsonl"):
        with pytest.raises(LakeAccessError, match=r"file.*: (File exists|Not a directory)"):
            exported(lk, out, "jsonl")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("table", mostly_slow(["episodes", "steps", "tokens"], "steps"))
def test_a_damaged_lake_is_told_and_what_was_written_stays(lk: Lake, tmp_path: Path, table: str) -> None:
    paths = sorted(Path(lk.uri, table).glob("*.parquet"))
    contents = {path: path.read_bytes() for path in paths}
    for path in paths:
        path.write_bytes(contents[path][: len(contents[path]) // 2])
    with pytest.raises(LakeAccessError):
        exported(lk, tmp_path / "out", "jsonl", shard_episodes=8)
    assert not (tmp_path / "out" / MANIFEST).exists()
    for path in paths:
        path.write_bytes(contents[path])
    manifest = exported(lk, tmp_path / "out", "jsonl", shard_episodes=8)
    assert manifest.episodes == 2 * GROUPS


def test_a_lake_that_is_gone_is_told(lk: Lake, tmp_path: Path) -> None:
    shutil.rmtree(lk.uri)
    with pytest.raises(LakeAccessError):
        exported(lk, tmp_path / "out", "jsonl")
    assert not (tmp_path / "out").exists()


def test_a_state_that_is_damaged_is_told(lk: Lake, tmp_path: Path, wording: Wording) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / STATE).write_text("{")
    with pytest.raises(LakeAccessError) as caught:
        exported(lk, tmp_path / "out", "jsonl")
    text = wording(caught.value)
    assert STATE in text
    assert "delete it" in text


def stop_after(monkeypatch: pytest.MonkeyPatch, shards: int, then: Any = None) -> None:
    """Let an export write so many shards, and stop it like Ctrl-C, or do something and let it continue."""
    write, done = job.write_table, []
    tree = job.write_tree

    def counted(original: Any) -> Any:
        def wrapped(*args: Any) -> Any:
            if len(done) == shards:
                if then is None:
                    raise KeyboardInterrupt
                then()
            done.append(1)
            return original(*args)

        return wrapped

    monkeypatch.setattr("lake.export.job.write_table", counted(write))
    monkeypatch.setattr("lake.export.job.write_tree", counted(tree))


@pytest.mark.parametrize("name", mostly_slow(FORMATS, "atif"))
def test_nothing_of_a_retracted_episode_is_left_of_an_export_that_was_stopped(
    lk: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            exported(lk, out, name, shard_episodes=8)
    written = content(out)
    assert len(written) > 2
    episode_ids = lk.sql("SELECT episode_id FROM episodes WHERE task_id < 'task-2'")["episode_id"]
    lk.retract(episode_ids)
    manifest = exported(lk, out, name, shard_episodes=8)
    assert manifest.episodes == 2 * GROUPS - len(episode_ids)
    exported(lk, tmp_path / "anew", name, shard_episodes=8)
    assert content(out) == content(tmp_path / "anew")


def test_a_stopped_export_of_something_else_is_begun_anew_on_the_newest_snapshot(
    lk: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            exported(lk, out, "atif", shard_episodes=8)
    lk.append([episode("later")], run_id="run")
    manifest = exported(lk, out, "jsonl", where="task_id = 'later'")
    assert manifest.rows == 1
    assert sorted(content(out)) == ["00000.jsonl", MANIFEST]


def test_an_export_that_was_stopped_does_not_go_on_on_files_that_a_vacuum_took(
    lk: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            exported(lk, out, "jsonl", shard_episodes=8)
    monkeypatch.setattr(Lake, "missing", lambda self, versions: "a file")
    manifest = exported(lk, out, "jsonl", shard_episodes=8)
    assert manifest.rows == 2 * GROUPS


@pytest.mark.parametrize("name", mostly_slow(["jsonl", "atif"], "jsonl"))
def test_an_episode_that_is_forgotten_while_an_export_runs_stops_it_or_is_not_in_it(
    lk: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """What was written before it was forgotten is for the process that forgets to delete; nothing is a traceback."""
    last = lk.sql("SELECT episode_id FROM episodes ORDER BY run_id, group_id DESC, episode_id DESC LIMIT 1").item()
    with monkeypatch.context() as patch:
        stop_after(patch, 2, lambda: lk.forget([last]) if not lk.sql("SELECT 1 FROM retractions").height else None)
        try:
            exported(lk, tmp_path / "out", name, shard_episodes=8)
        except LakeAccessError:
            assert not (tmp_path / "out" / MANIFEST).exists()
    if not (tmp_path / "out" / MANIFEST).exists():
        exported(lk, tmp_path / "out", name, shard_episodes=8)
    assert json.loads((tmp_path / "out" / MANIFEST).read_text())["format"] in TARGETS
    exported(lk, tmp_path / "after", name)
    text = b"".join(content(tmp_path / "after").values())
    assert text.count(b'"run_id"') > 0
    assert lk.sql("SELECT count(*) AS n FROM episodes").item() == 2 * GROUPS - 1
