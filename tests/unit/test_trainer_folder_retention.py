"""Which checkpoints stay on disk."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from trainer.runs.folder import prune, select_retained


def folders(folder: Path, *names: str) -> list[Path]:
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "state.json").write_text("{}")
    return [folder / name for name in names]


def test_only_what_is_kept_stays(tmp_path: Path) -> None:
    first, two, orphan = folders(tmp_path, "step-1", "step-2", "step-9")
    assert prune(tmp_path, [two]) == [first, orphan]
    assert sorted(tmp_path.iterdir()) == [two]


def test_a_removal_that_was_killed_is_finished(tmp_path: Path) -> None:
    (two,) = folders(tmp_path, "step-2")
    folders(tmp_path, ".step-1.removed")
    assert prune(tmp_path, [two]) == []
    assert sorted(tmp_path.iterdir()) == [two]


@given(st.integers(1, 8), st.integers(1, 4) | st.none(), st.integers(1, 8) | st.none())
def test_the_newest_and_the_best_stay(count: int, keep_last: int | None, best: int | None) -> None:
    written = [(step, Path(f"step-{step}")) for step in range(1, count + 1)]
    stays = {step for step, _ in select_retained(written, keep_last, best)}
    newest = set(range(1, count + 1)) if keep_last is None else set(range(max(1, count - keep_last + 1), count + 1))
    assert stays == newest | ({best} if best is not None and best <= count else set())
