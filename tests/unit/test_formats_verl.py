"""verl rollout data: a decision a line, siblings by prompt, sessions of several outputs."""

import json
from pathlib import Path
from typing import Any

import pytest

from lake import ids
from lake.formats.base.format import read_head
from lake.formats.registry import FORMATS
from lake.records import EpisodeRecord, Reject, identify
from testkit.formats import assert_never_raises, counts, read_file
from testkit.shared import shared_data

ROW = {"input": "user\n1 + 1?\nassistant\n", "output": "<think>Hm.</think> 2", "gts": "2", "score": 1.0, "step": 7}


def read(path: Path, *rows: Any) -> tuple[list[EpisodeRecord], list[Reject]]:
    """The rows of a file of lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return read_file(path)


def test_a_real_file_is_two_groups_of_four() -> None:
    path = shared_data("formats", "verl", "7.jsonl")
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    records, rejects = read_file(path)
    assert not rejects
    rewards = sorted([row["score"] for row in rows] * 2 + [float(row["acc"]) for row in rows])
    assert counts(records) == (8, 8, 0, rewards, sum(len(row["output"]) for row in rows))
    assert [record.steps[0].action for record in records] == [row["output"] for row in rows]
    assert [record.steps[0].state for record in records] == [row["input"] for row in rows]
    assert [record.rollout_index for record in records] == [0, 1, 2, 3] * 2
    assert len({record.task_id for record in records}) == 2
    assert {record.collection_round for record in records} == {7}
    assert [record.ground_truth for record in records] == [row["gts"] for row in rows]
    assert records[0].extra == {"request_id": "req-0-0"}


def test_the_oldest_rows_have_neither_truth_nor_further_columns(tmp_path: Path) -> None:
    ((record,), _) = read(tmp_path / "f", {key: ROW[key] for key in ("input", "output", "score", "step")})
    assert (record.env_return, record.ground_truth, record.extra) == (1.0, None, None)


def test_numbers_of_the_reward_function_are_scores_if_they_are_called_so(tmp_path: Path) -> None:
    ((record,), _) = read(tmp_path / "f", ROW | {"acc": True, "format_reward": 0.5, "pred": 4, "num_turns": 2})
    assert [(s.scorer, s.value) for s in record.scores] == [("score", 1.0), ("acc", 1.0), ("format_reward", 0.5)]
    assert record.extra == {"pred": 4, "num_turns": 2}


def test_a_maximum_is_no_score(tmp_path: Path) -> None:
    ((record,), _) = read(tmp_path / "f", ROW | {"max_score": 10, "resolved": True})
    assert [(s.scorer, s.value) for s in record.scores] == [("score", 1.0), ("resolved", 1.0)]


def test_a_score_may_be_unknown(tmp_path: Path) -> None:
    ((record,), _) = read(tmp_path / "f", ROW | {"score": None})
    assert (record.env_return, record.scores[0].value) == (None, None)


def test_a_score_that_is_no_number_is_no_return(tmp_path: Path) -> None:
    ((record,), rejects) = read(tmp_path / "f", ROW | {"score": float("nan"), "pred": float("inf")})
    assert not rejects
    assert (record.env_return, record.scores[0].value, record.scores[0].metrics) == (None, None, {"value": "nan"})


def test_further_outputs_of_a_session_continue_the_first(tmp_path: Path) -> None:
    rows = [ROW | {"uid": "p_0_0"}, ROW | {"uid": "p_0_1", "input": "cut history"}, ROW | {"uid": "p_1_0"}]
    first, second, third = read(tmp_path / "f", *rows)[0]
    assert (second.relation, second.task_id, second.rollout_index) == ("continuation", first.task_id, 0)
    parent = ids.to_text(identify(first, "f").episode_id)
    assert (second.parent_episode_id, second.root_episode_id) == (parent, parent)
    assert (second.env_return, third.relation, third.rollout_index) == (None, None, 1)


def test_a_session_is_not_continued_over_another_step(tmp_path: Path) -> None:
    records, _ = read(tmp_path / "f", ROW | {"uid": "p_0_0"}, ROW | {"uid": "p_0_1", "step": 8})
    assert [record.relation for record in records] == [None, None]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"output": 5}, "at `$.output`"),
        ({"step": -1}, "at `$.step`"),
        ({"step": 2**31}, "at `$.step`"),
        ({"score": "1"}, "at `$.score`"),
    ],
)
def test_a_wrong_row_is_refused_by_its_line(tmp_path: Path, row: dict[str, Any], says: str) -> None:
    records, (reject,) = read(tmp_path / "f", ROW, ROW | row, ROW)
    assert (len(records), reject.position, reject.reason) == (2, 2, "invalid")
    assert says in reject.message


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    (reject,) = read(tmp_path / "f", ROW, {key: ROW[key] for key in ROW if key != "input"})[1]
    assert "missing required field `input`" in reject.message


def test_damaged_lines_are_refused_and_the_others_are_read(tmp_path: Path) -> None:
    line = json.dumps(ROW).encode()
    no_text = line.replace(b"1.0", b"oops")
    latin = line.replace(b"Hm.", "Hé".encode("latin-1"))
    (tmp_path / "f").write_bytes(b"\n".join((line, no_text, latin, line, line[:-9])))
    records, rejects = read_file(tmp_path / "f")
    assert len(records) == 2
    assert [(reject.position, reject.reason) for reject in rejects] == [
        (2, "malformed"),
        (3, "malformed"),
        (5, "truncated"),
    ]


def test_no_wrong_type_and_no_missing_key_raises(tmp_path: Path) -> None:
    rows = [ROW | {"uid": f"p_0_{n}", "acc": True} for n in range(3)]
    assert_never_raises(tmp_path / "f", rows, lines=True)


def test_rows_with_an_input_that_is_no_text_are_of_another_format(tmp_path: Path) -> None:
    (tmp_path / "f").write_text(json.dumps(ROW | {"input": {"question": 1}}) + "\n", "utf-8")
    assert not FORMATS["verl"].recognise(read_head(tmp_path / "f"))
