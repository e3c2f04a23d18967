"""Laws of the order of tasks: every epoch has each task once, and follows from (seed, epoch) alone."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lake.errors import FormatError
from pipelines.collect.tasks import Cursor, advance_cursor, draw_order, list_seed_tasks, read_tasks, take_tasks
from testkit.wording import Wording

COUNTS = st.integers(1, 200)
SEEDS = st.integers(0, 2**40)


@given(COUNTS, SEEDS, st.integers(0, 50))
def test_an_epoch_is_each_task_once_in_an_order_of_its_own(count: int, seed: int, epoch: int) -> None:
    order = draw_order(count, seed, epoch)
    assert sorted(order) == list(range(count))
    assert order == draw_order.__wrapped__(count, seed, epoch)
    if count > 20:
        assert order != draw_order(count, seed, epoch + 1)
        assert order != draw_order(count, seed + 1, epoch)


@given(COUNTS, SEEDS, st.integers(1, 250), st.integers(1, 3))
def test_rounds_visit_every_task_once_an_epoch_and_none_twice_in_a_round(
    count: int, seed: int, a_round: int, epochs: int
) -> None:
    tasks, cursor = list_seed_tasks(7, count), Cursor()
    played: list[list[int]] = [[] for _ in range(epochs)]
    while cursor.epoch < epochs:
        seeds = [task.seed for task in take_tasks(tasks, seed, cursor, a_round)]
        assert 0 < len(set(seeds)) == len(seeds) <= a_round
        played[cursor.epoch] += seeds
        cursor = advance_cursor(tasks, cursor, len(seeds))
    assert [sorted(epoch) for epoch in played] == [list(range(7, 7 + count))] * epochs


def test_rows_of_a_file_are_tasks_and_bad_ones_are_named(tmp_path: Path) -> None:
    rows = [
        {"prompt": "2 + 2?", "ground_truth": "4", "topic": "sums"},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "name": "named"},
        {"seed": 17},
        {"ground_truth": "nothing to show"},
        {"prompt": "x", "messages": []},
        {"messages": [{"content": "no role"}]},
        {"prompt": "again", "seed": 17},
        [1],
    ]
    file = tmp_path / "tasks.jsonl"
    file.write_text("\n".join([*map(json.dumps, rows), "", "{no json"]))
    tasks = read_tasks(file)
    assert [(task.seed, task.name) for task in tasks.tasks] == [(0, None), (1, "named"), (17, None)]
    assert tasks.tasks[0].messages == [{"role": "user", "content": "2 + 2?"}]
    assert (tasks.tasks[0].ground_truth, tasks.tasks[0].data) == ("4", {"topic": "sums"})
    assert [line.split(": ")[1] for line in tasks.rejected] == [f"line {number}" for number in (4, 5, 6, 7, 8, 10)]
    assert "`seed` 17 is that of line 3 too" in tasks.rejected[3]
    assert read_tasks(file).fingerprint == tasks.fingerprint


def test_rows_that_show_nothing_or_another_prompt_under_one_name_are_no_tasks(tmp_path: Path, wording: Wording) -> None:
    """Groups are of one task: a name that meant two prompts would compare answers to different questions."""
    rows = [{"prompt": "a", "name": "n"}, {"prompt": "b", "name": "n"}, {"prompt": 17}, {"prompt": " "}, {"seed": 9}]
    file = tmp_path / "tasks.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    tasks = read_tasks(file, are_shown=True)
    assert [task.seed for task in tasks.tasks] == [0]
    assert [wording(line).removeprefix(f"{file}: ").partition(": ")[0] for line in tasks.rejected] == [
        f"line {number}" for number in range(2, 6)
    ]
    for line, fact in zip(tasks.rejected, ("`name` 'n'", "`prompt`", "is empty", "no `messages`"), strict=True):
        assert fact in line
    assert [task.seed for task in read_tasks(file).tasks] == [0, 9]


def test_rows_that_are_no_text_or_nested_too_deep_are_named(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    deep = b"[" * 5000 + b"]" * 5000
    file.write_bytes(b'{"prompt": "good"}\n{"prompt": "\xff"}\n{"prompt": "x", "more": ' + deep + b"}\n")
    tasks = read_tasks(file)
    assert [task.seed for task in tasks.tasks] == [0]
    assert [line.split(": ")[1] for line in tasks.rejected] == ["line 2", "line 3"]


def test_a_parquet_file_says_the_same(tmp_path: Path) -> None:
    import polars as pl

    rows = [{"prompt": "a", "ground_truth": "1"}, {"prompt": "b", "ground_truth": None}]
    pl.DataFrame(rows).write_parquet(tmp_path / "tasks.parquet")
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tasks = read_tasks(tmp_path / "tasks.parquet")
    assert tasks == read_tasks(tmp_path / "tasks.jsonl")


@pytest.mark.parametrize(("content", "fragment"), [("", "has no rows"), ("[]", "line 1: a task must be an object")])
def test_a_file_without_tasks_is_refused(content: str, fragment: str, tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text(content)
    with pytest.raises(FormatError, match=fragment):
        read_tasks(tmp_path / "tasks.jsonl")
    with pytest.raises(FormatError, match="a file of tasks"):
        read_tasks(tmp_path / "missing.jsonl")
    (tmp_path / "bad.parquet").write_bytes(b"no parquet")
    with pytest.raises(FormatError, match="be read as Parquet"):
        read_tasks(tmp_path / "bad.parquet")
