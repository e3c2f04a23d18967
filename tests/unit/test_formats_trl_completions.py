"""TRL completion logs: groups by prompt, a score per reward function, and completions that are chats."""

from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lake.formats.base.format import read_head
from lake.formats.registry import FORMATS
from lake.records import EpisodeRecord, Reject
from testkit.formats import counts, read_file

GOLDEN = Path(__file__).parents[1] / "golden" / "formats" / "trl_completions"
ROW = {"step": 3, "prompt": "1 + 1 =", "completion": " 2", "accuracy": 1.0, "advantage": 0.5}


def read(path: Path, *rows: dict[str, Any]) -> tuple[list[EpisodeRecord], list[Reject]]:
    """Rows of a file as TRL writes them."""
    pl.DataFrame(list(rows), strict=False).write_parquet(path)
    return read_file(path)


@pytest.mark.parametrize("name", ["messages", "text"])
def test_tables_that_pandas_writes_as_trl_does(name: str) -> None:
    path = GOLDEN / f"completions_{name}.parquet"
    rows = pl.read_parquet(path).to_dicts()
    answers = [row["completion"] for row in rows]
    texts = [a if isinstance(a, str) else "".join(m["content"] for m in a if m["role"] == "assistant") for a in answers]
    decisions = sum(1 if isinstance(a, str) else sum(m["role"] == "assistant" for m in a) for a in answers)
    rewards = sorted(row[key] for row in rows for key in ("accuracy_reward", "format_reward") if row[key] is not None)
    records, rejects = read_file(path)
    assert not rejects
    assert counts(records) == (4, decisions, 0 if name == "text" else 1, rewards, sum(map(len, texts)))
    assert [record.collection_round for record in records] == [10] * 4
    assert [record.rollout_index for record in records] == [0, 1, 0, 1]
    assert records[0].task_id == records[1].task_id != records[2].task_id


def test_a_completion_with_a_call_is_two_decisions_of_one_rollout() -> None:
    record = read_file(GOLDEN / "completions_messages.parquet")[0][1]
    first, second = record.steps
    assert (first.state, first.tool_calls) == (
        "What is 1 + 1?",
        [{"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": {"who": "1 + 1"}}}],
    )
    assert (second.state, second.action) == ("2", "It is 2.")
    assert record.initial_messages == [{"role": "user", "content": "What is 1 + 1?"}]


def test_a_reward_function_that_did_not_apply_scored_nothing() -> None:
    record = read_file(GOLDEN / "completions_messages.parquet")[0][3]
    assert {score.scorer: score.value for score in record.scores} == {"accuracy_reward": None, "format_reward": 0.25}
    assert record.env_return is None, "the sum's weights are not in the file"
    assert record.extra == {"solution": "4", "tries": 1, "advantage": 0.7}


def test_one_reward_is_the_return(tmp_path: Path) -> None:
    ((record,), _) = read(tmp_path / "f.parquet", ROW)
    assert (record.env_return, record.extra) == (1.0, {"advantage": 0.5})
    assert [(step.state, step.action) for step in record.steps] == [("1 + 1 =", " 2")]
    ((record,), _) = read(tmp_path / "f.parquet", ROW | {"reward": 0.25})
    assert record.env_return == 0.25


def test_a_step_may_be_its_digits(tmp_path: Path) -> None:
    ((record,), _) = read(tmp_path / "f.parquet", ROW | {"step": "3"})
    assert record.collection_round == 3


def test_equal_prompts_of_other_steps_are_other_groups_of_the_same_task(tmp_path: Path) -> None:
    records, _ = read(tmp_path / "f.parquet", ROW, ROW | {"step": 4}, ROW)
    assert [(r.collection_round, r.rollout_index) for r in records] == [(3, 0), (4, 0), (3, 1)]
    assert len({record.task_id for record in records}) == 1


def test_the_task_of_a_prompt_is_the_same_in_every_file(tmp_path: Path) -> None:
    first, _ = read(tmp_path / "a.parquet", ROW)
    second, _ = read(tmp_path / "b.parquet", ROW | {"prompt": "2 + 2 ="}, ROW)
    assert first[0].task_id == second[1].task_id
    assert first[0].task_id.startswith("prompt-")


def test_rows_of_the_wrong_shape_are_refused_and_the_others_are_read(tmp_path: Path) -> None:
    rows = [ROW, ROW | {"step": None}, ROW | {"completion": None}, ROW | {"step": -1}, ROW]
    records, rejects = read(tmp_path / "f.parquet", *rows)
    assert len(records) == 2
    assert [(reject.position, reject.reason) for reject in rejects] == [(n, "invalid") for n in (1, 2, 3)]
    assert "`step` is None; valid: a whole number" in rejects[0].message


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": [1, 2]},
        {"prompt": {"a": 1}},
        {"completion": 5},
        {"step": "x"},
        {"step": 2.5},
        {"step": 2**40},
        {"accuracy": "high"},
        {"accuracy": float("nan")},
        {"accuracy": float("inf")},
        {"advantage": [1.0]},
        {"completion": [{"role": None, "content": "x"}]},
        {"completion": [{"role": "user", "content": "x"}]},
    ],
)
def test_columns_of_other_types_never_raise(tmp_path: Path, changes: dict[str, Any]) -> None:
    records, rejects = read(tmp_path / "f.parquet", ROW | changes)
    assert len(records) + len(rejects) == 1


def test_a_score_that_is_no_number_is_unknown(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({key: [value] for key, value in (ROW | {"accuracy": float("nan")}).items()}), tmp_path / "f"
    )
    ((record,), _) = read_file(tmp_path / "f")
    assert (record.env_return, record.scores[0].value) == (None, None)


def test_a_cut_file_is_told_to_be_cut(tmp_path: Path) -> None:
    data = (GOLDEN / "completions_text.parquet").read_bytes()
    (tmp_path / "f.parquet").write_bytes(data[:-40])
    (item,) = FORMATS["trl_completions"].read(tmp_path / "f.parquet")
    assert isinstance(item, Reject)
    assert "from row 0 on" in item.message


def test_tables_without_a_step_are_not_logs(tmp_path: Path) -> None:
    pl.DataFrame([{key: ROW[key] for key in ("prompt", "completion")}]).write_parquet(tmp_path / "f.parquet")
    assert not FORMATS["trl_completions"].recognise(read_head(tmp_path / "f.parquet"))
