"""NeMo RL logs: batches of one, whose masks say what was sampled, and whose texts have no roles."""

import json
from pathlib import Path
from typing import Any

import pytest

from lake.formats.base.format import read_head
from lake.formats.registry import FORMATS
from lake.records import EpisodeRecord, Reject
from testkit.formats import assert_never_raises, counts, read_file
from testkit.shared import shared_data

ROW: dict[str, Any] = {
    "content": [["q", "a", "o", "b"]],
    "rewards": [1.0],
    "input_lengths": [6],
    "token_ids": [[11, 12, 13, 14, 15, 16, 0, 0, 0]],
    "token_loss_mask": [[0, 0, 1, 1, 0, 1, 0, 0, 0]],
    "generation_logprobs": [[0, 0, -0.5, -0.25, 0, -1.0, 0, 0, 0]],
    "advantages": [[0.5] * 9],
    "idx": 0,
}


def read(path: Path, *rows: Any) -> tuple[list[EpisodeRecord], list[Reject]]:
    """The rows of a file of lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return read_file(path)


def read_one(path: Path, **changes: Any) -> EpisodeRecord:
    """The episode of a row; None takes a key away."""
    row = {key: value for key, value in (ROW | changes).items() if value is not None}
    (record,), rejects = read(path, row)
    assert not rejects
    return record


def test_a_sample_that_the_trainer_masked_is_not_trained_on(tmp_path: Path) -> None:
    assert not any(step.trainable for step in read_one(tmp_path / "f", sample_loss_mask=[0.0]).steps)
    assert all(step.trainable for step in read_one(tmp_path / "f", sample_loss_mask=[1.0]).steps)


def test_a_real_file_has_the_engines_tokens_of_each_decision() -> None:
    path = shared_data("formats", "nemo_rl", "train_data_step3.jsonl")
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    texts = [text for row in rows for text in row["content"][0][1::2]]
    records, rejects = read_file(path)
    assert not rejects
    rewards = sorted([row["rewards"][0] for row in rows] * 2)
    assert counts(records) == (4, len(texts), 0, rewards, sum(map(len, texts)))
    assert [step.action for record in records for step in record.steps] == texts
    for record, row in zip(records, rows, strict=True):
        masked = [position for position, weight in enumerate(row["token_loss_mask"][0]) if weight]
        tokens = [step.tokens for step in record.steps]
        assert [i for t in tokens if t for i in t.action_ids] == [row["token_ids"][0][position] for position in masked]
        assert [p for t in tokens if t for p in t.action_logprobs or ()] == [
            row["generation_logprobs"][0][position] for position in masked
        ]
        sequence = [i for t in tokens if t for i in (*t.context_ids, *t.action_ids)]
        assert sequence == row["token_ids"][0][: row["input_lengths"][0]]
    assert [(r.collection_round, r.split, r.agent_id, r.rollout_index) for r in records] == [
        (3, "train", "a", 0),
        (3, "train", "a", 1),
        (3, "train", "a", 0),
        (3, "train", "a", 1),
    ]
    assert records[0].task_id == records[1].task_id != records[2].task_id


def test_each_run_of_sampled_tokens_is_a_decision(tmp_path: Path) -> None:
    record = read_one(tmp_path / "f.jsonl")
    first, second = record.steps
    assert [(step.state, step.action) for step in record.steps] == [("q", "a"), ("o", "b")]
    assert first.tokens is not None
    assert second.tokens is not None
    assert (first.tokens.context_ids, first.tokens.action_ids) == ([11, 12], [13, 14])
    assert (second.tokens.context_ids, second.tokens.action_ids) == ([15], [16])
    assert second.tokens.prefix_step_index == 0, "it extends the step before"
    assert (first.tokens.action_logprobs, second.tokens.action_logprobs) == ([-0.5, -0.25], [-1.0])
    assert record.extra == {"advantages": [0.5] * 6, "idx": 0}


def test_texts_before_the_first_run_are_the_prompt_and_one_behind_the_last_is_observed(tmp_path: Path) -> None:
    ids = [[11, 12, 13, 14, 15, 16, 17, 18, 0]]
    content = [["sys", "q", "a", "o", "b", "end"]]
    record = read_one(tmp_path / "f.jsonl", content=content, token_ids=ids, input_lengths=[8])
    assert [message["content"] for message in record.initial_messages or []] == ["sys", "q"]
    assert [step.action for step in record.steps] == ["a", "b"]
    assert record.final_observation == [{"role": "user", "content": "end"}]
    assert record.extra is not None
    assert record.extra["final_token_ids"] == [17, 18]


def test_an_empty_text_behind_the_last_run_has_no_token(tmp_path: Path) -> None:
    record = read_one(tmp_path / "f.jsonl", content=[["q", "a", "o", "b", ""]])
    assert [step.action for step in record.steps] == ["a", "b"]


@pytest.mark.parametrize("content", [["q and a in one"], [["q and a"]]])
def test_fewer_texts_than_runs_are_one_decision_without_text(tmp_path: Path, content: list[Any]) -> None:
    (step,) = read_one(tmp_path / "f.jsonl", content=content).steps
    assert (step.state, step.action) == (None, "")
    assert step.tokens is not None
    assert (step.tokens.context_ids, step.tokens.action_ids) == ([11, 12], [13, 14, 15, 16])
    assert step.tokens.action_mask == [True, True, False, True]


def test_a_dump_without_texts_has_the_tokens_of_each_decision(tmp_path: Path) -> None:
    dump = {"step": 5, "sample_id": ["s"], "metadata": [{"prompt_idx": 12}], "prompt_ids": [[11, 12]]}
    record = read_one(tmp_path / "f.jsonl", content=None, **dump)
    assert [(step.state, step.action) for step in record.steps] == [(None, ""), (None, "")]
    assert [step.tokens.action_ids for step in record.steps if step.tokens] == [[13, 14], [16]]
    assert record.collection_round == 5
    assert record.extra is not None
    assert record.extra["metadata"] == {"prompt_idx": 12}


def test_without_a_mask_every_second_text_was_sampled(tmp_path: Path) -> None:
    row = {"content": [["q", "a"]], "input_lengths": [4], "idx": 0}
    ((record,), _) = read(tmp_path / "train_data_step12.jsonl", row)
    assert [(step.state, step.action, step.tokens) for step in record.steps] == [("q", "a", None)]
    assert (record.collection_round, record.env_return, record.scores) == (12, None, [])


def test_validation_logs_have_roles(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    chat += [{"role": "environment", "content": "Correct."}]
    row = {"content": [chat], "rewards": [1.0], "accuracy": [0.5], "idx": 0}
    ((record,), _) = read(tmp_path / "val_data_step4.jsonl", row)
    assert [(step.state, step.action) for step in record.steps] == [("q", "a")]
    assert (record.collection_round, record.split) == (4, "val")
    assert [(score.scorer, score.value) for score in record.scores] == [("reward", 1.0), ("accuracy", 0.5)]
    assert record.final_observation == chat[3:]


def test_siblings_share_their_prompt(tmp_path: Path) -> None:
    other_row = ROW | {"content": [["p", "a", "o", "b"]]}
    records, _ = read(tmp_path / "f.jsonl", ROW, other_row, ROW | {"content": [["q", "x", "y", "z"]]})
    assert [record.rollout_index for record in records] == [0, 0, 1]
    assert records[0].task_id == records[2].task_id


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rewards": [1.0, 0.0]}, "`rewards` is a list of 2; valid: a list of one"),
        ({"token_ids": 5}, "`token_ids` is int; valid: a list of one"),
        ({"token_loss_mask": [[0, 1]]}, "`token_loss_mask` has 2"),
        ({"token_ids": [["a"] * 9]}, "Expected `int`, got `str`"),
        ({"generation_logprobs": [[1.0] * 9]}, "`tokens.action_logprobs` holds 1.0"),
        ({"content": [["q", 5, "o", "b"]]}, "`$.content[0]`"),
    ],
)
def test_a_wrong_row_is_refused_by_its_line(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    records, (reject,) = read(tmp_path / "f.jsonl", ROW, ROW | changes, ROW)
    assert (len(records), reject.position, reject.reason) == (2, 2, "invalid")
    assert says in reject.message


def test_damaged_lines_are_refused_and_the_others_are_read(tmp_path: Path) -> None:
    line = json.dumps(ROW).encode()
    lines = (line, line.replace(b"-0.25", b"NaN"), line.replace(b'"q"', b'"\xe9"'), line, line[:50])
    (tmp_path / "f.jsonl").write_bytes(b"\n".join(lines))
    records, rejects = read_file(tmp_path / "f.jsonl")
    assert len(records) == 2
    assert [(r.position, r.reason) for r in rejects] == [(2, "malformed"), (3, "malformed"), (5, "truncated")]


def test_no_wrong_type_and_no_missing_key_raises(tmp_path: Path) -> None:
    small = ROW | {"token_ids": [[1, 2, 3]], "token_loss_mask": [[0, 1, 0]], "generation_logprobs": [[0, -1, 0]]}
    small |= {"advantages": [[1, 1, 1]], "input_lengths": [2], "content": [["q", "a"]], "agent_ref": [{"name": "a"}]}
    assert_never_raises(tmp_path / "f.jsonl", [small, ROW], lines=True)


def test_lines_with_an_idx_alone_are_of_another_format(tmp_path: Path) -> None:
    (tmp_path / "f.jsonl").write_text('{"idx": 0, "content": "x"}\n', "utf-8")
    assert not FORMATS["nemo_rl"].recognise(read_head(tmp_path / "f.jsonl"))
