"""A run's folder: atomic files, one process at a time."""

import os
import shutil
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from lake.errors import CheckpointError, UsageError
from lake.judgements.credit import Credit
from lake.storage.atomic import (
    FILES,
    atomic_folder,
    check_complete,
    find_settled,
    read_unreplaced,
    recover,
    remove_folder,
    write_atomically,
)
from trainer.runs.folder import RunFolder, RunRecord

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
    folder = RunFolder(tmp_path)
    assert folder.read() is None
    folder.write(RECORD)
    assert folder.read() == RECORD


def test_a_damaged_record_says_so(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"job_id": 1')
    with pytest.raises(CheckpointError, match=r"run\.json is damaged"):
        RunFolder(tmp_path).read()


def test_a_second_process_is_kept_out_until_the_first_has_gone(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with (
        folder.lock(),
        pytest.raises(UsageError, match=f"process {os.getpid()} trains into"),
        RunFolder(tmp_path).lock(),
    ):
        pass
    with folder.lock():
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
    assert {path.name for path in target.rglob("*")} == {"inner", "b", FILES}


def test_a_folder_takes_the_place_of_what_was_there(tmp_path: Path) -> None:
    for text in ("old", "new"):
        with atomic_folder(tmp_path / "f") as partial:
            (partial / text).write_text(text)
    assert {path.name for path in (tmp_path / "f").iterdir()} == {"new", FILES}
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def write_three(target: Path, text: str) -> None:
    with atomic_folder(target) as partial:
        for name in ("a", "b", "inner/c"):
            (partial / name).parent.mkdir(exist_ok=True)
            (partial / name).write_text(text)


def texts(target: Path) -> set[str]:
    check_complete(target)
    return {(target / name).read_text() for name in ("a", "b", "inner/c")}


def killed_at(number: int, work: Callable[[], object]) -> bool:
    """Do some work in a process that ends before its n-th change to a file; whether it came to that."""
    if (child := os.fork()) == 0:
        left = number

        def stop(event: str, _: object) -> None:
            nonlocal left
            if event == "open" or (event.startswith("os.") and event not in ("os.scandir", "os.listdir")):
                left -= 1
                if left < 0:
                    os._exit(9)

        sys.addaudithook(stop)
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def test_a_kill_at_any_moment_leaves_the_old_folder_or_the_new_in_full(tmp_path: Path) -> None:
    states = []
    for number in count():
        place = tmp_path / str(number) / "f"
        write_three(place, "old")
        is_killed = killed_at(number, lambda place=place: write_three(place, "new"))
        (before,) = texts(find_settled(place))
        another = Path(shutil.copytree(place.parent, tmp_path / f"{number}-again")) / "f"
        recover(place.parent)
        assert texts(place) == {before}
        write_three(another, "newest")
        assert texts(another) == {"newest"}
        assert [path.name for folder in (place, another) for path in folder.parent.iterdir()] == ["f", "f"]
        states.append(before)
        if not is_killed:
            break
    assert len(states) > 20
    assert states == sorted(states, reverse=True)
    assert set(states) == {"old", "new"}


def test_a_second_kill_leaves_a_folder_in_full_as_well(tmp_path: Path) -> None:
    for number in count():
        place = tmp_path / str(number) / "f"
        write_three(place, "old")
        place.rename(place.with_name(".f.replaced"))
        is_killed = killed_at(number, lambda place=place: write_three(place, "new"))
        assert texts(find_settled(place)) in ({"old"}, {"new"})
        if not is_killed:
            break


def test_a_removal_that_is_killed_leaves_all_or_nothing(tmp_path: Path) -> None:
    there = []
    for number in count():
        place = tmp_path / str(number) / "f"
        write_three(place, "old")
        is_killed = killed_at(number, lambda place=place: remove_folder(place))
        there.append(place.exists())
        if place.exists():
            assert texts(place) == {"old"}
        recover(place.parent)
        assert there[-1] or not list(place.parent.iterdir())
        if not is_killed:
            break
    assert there == sorted(there, reverse=True)
    assert set(there) == {True, False}


def test_what_is_set_aside_of_a_folder_under_its_own_name_gets_no_second_one(tmp_path: Path) -> None:
    write_three(tmp_path / "f", "old")
    (tmp_path / "f").rename(tmp_path / ".f.replaced")
    assert find_settled(tmp_path / "f").name == ".f.replaced"
    with RunFolder(tmp_path).lock():
        assert texts(tmp_path / "f") == {"old"}
    assert find_settled(tmp_path / "f").name == "f"


def test_a_reader_gets_one_folder_in_full_while_others_take_its_place(tmp_path: Path) -> None:
    place = tmp_path / "f"
    write_three(place, "0")
    texts_read = []

    def read(folder: Path) -> set[str]:
        first = (folder / "a").read_text()
        if len(texts_read) < 3:
            write_three(place, str(int(first) + 1))
        texts_read.append(first)
        return {first, (folder / "b").read_text()}

    assert read_unreplaced(place, read) == {"3"}
    assert texts_read == ["0", "1", "2", "3"]


def test_a_reader_of_a_folder_that_is_always_replaced_gives_up(tmp_path: Path) -> None:
    write_three(tmp_path / "f", "old")
    with pytest.raises(UsageError):
        read_unreplaced(tmp_path / "f", lambda folder: write_three(folder, "new"))


def test_a_fault_of_a_reader_is_its_own_where_nothing_was_replaced(tmp_path: Path) -> None:
    write_three(tmp_path / "f", "old")
    with pytest.raises(FileNotFoundError):
        read_unreplaced(tmp_path / "f", lambda folder: (folder / "d").read_text())


@pytest.mark.parametrize("name", ["a", "inner/c"])
def test_a_copy_that_lacks_a_file_is_noticed(tmp_path: Path, name: str) -> None:
    write_three(tmp_path / "f", "old")
    (tmp_path / "f" / name).unlink()
    with pytest.raises(UsageError, match=name):
        check_complete(tmp_path / "f")


def test_weights_that_are_cut_short_are_noticed_and_a_text_may_be_edited(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "f") as partial:
        (partial / "config.json").write_text("{}")
        (partial / "model.safetensors").write_bytes(b"12345")
    (tmp_path / "f" / "config.json").write_text('{"more": 1}')
    check_complete(tmp_path / "f")
    (tmp_path / "f" / "model.safetensors").write_bytes(b"1234")
    with pytest.raises(UsageError, match=r"model\.safetensors"):
        check_complete(tmp_path / "f")


def test_a_file_is_replaced_in_one_piece(tmp_path: Path) -> None:
    write_atomically(tmp_path / "t", b"one")
    write_atomically(tmp_path / "t", b"two")
    with pytest.raises(TypeError):
        write_atomically(tmp_path / "t", b"thr", None)  # type: ignore[arg-type]
    assert (tmp_path / "t").read_bytes() == b"two"
    assert [path.name for path in tmp_path.iterdir()] == ["t"]
