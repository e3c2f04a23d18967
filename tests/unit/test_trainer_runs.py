"""A run's folder: atomic files, one process at a time."""

import os
from pathlib import Path

import msgspec
import pytest

from lake.errors import CheckpointError, UsageError
from lake.judgements.credit import Credit
from trainer.atomic import atomic_folder, atomic_text
from trainer.runs.runs import RunFolder, RunRecord

RECORD = RunRecord(
    job_id=2**62 + 3,
    run_id="r",
    config={"loss": {"name": "awr", "beta": 0.5}},
    snapshot={"tokens": 2},
    source=Credit(7, "gigpo", {"score": "env_return"}, 8, 12),
    plan_hash="0123456789abc",
    model_sha256="f" * 64,
)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "new")
    assert folder.read() is None
    folder.write(RECORD)
    assert folder.read() == RECORD


def test_a_record_of_before_losses_owned_their_options_is_read_as_it_stands_now(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write(msgspec.structs.replace(RECORD, config={"loss": "awr", "awr": {"beta": 0.5}, "ppo": {}, "unit": None}))
    assert folder.read() == RECORD


def test_a_damaged_record_says_so(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"job_id": 1')
    with pytest.raises(CheckpointError, match=r"run\.json is damaged"):
        RunFolder(tmp_path).read()


def test_a_second_process_is_kept_out_until_the_first_has_gone(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with (
        folder.locked(),
        pytest.raises(UsageError, match=f"process {os.getpid()} trains into"),
        RunFolder(tmp_path).locked(),
    ):
        pass
    with folder.locked():
        pass


def test_a_folder_appears_in_full_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "folder"
    with pytest.raises(FileNotFoundError), atomic_folder(target) as partial:
        (partial / "missing" / "a").write_text("1")
    assert not target.exists()
    with atomic_folder(target) as partial:
        (partial / "inner").mkdir()
        (partial / "inner" / "b").write_text("2")
        assert not target.exists()
    assert [path.name for path in target.rglob("*")] == ["inner", "b"]


def test_a_folder_takes_the_place_of_what_was_there(tmp_path: Path) -> None:
    for text in ("old", "new"):
        with atomic_folder(tmp_path / "f") as partial:
            (partial / text).write_text(text)
    assert [path.name for path in (tmp_path / "f").iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_a_text_is_replaced_in_one_piece(tmp_path: Path) -> None:
    atomic_text(tmp_path / "t", "one")
    atomic_text(tmp_path / "t", "two")
    assert (tmp_path / "t").read_text() == "two"
    assert [path.name for path in tmp_path.iterdir()] == ["t"]
