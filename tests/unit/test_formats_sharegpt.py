"""ShareGPT conversations: who speaks, and which turns are decisions."""

import json
from pathlib import Path
from typing import Any

import pytest

from lake.formats.base.format import read_head
from lake.formats.registry import FORMATS
from lake.records import EpisodeRecord, Reject
from testkit.formats import assert_never_raises, counts, read_file
from testkit.shared import shared_data

GOLDEN = Path(__file__).parents[1] / "golden" / "formats" / "sharegpt"
ASK = {"from": "human", "value": "Is 2 even?"}
YES = {"from": "gpt", "value": "Yes."}


def read(path: Path, *rows: Any) -> tuple[list[EpisodeRecord], list[Reject]]:
    """The rows of a file of lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return read_file(path)


def read_one(path: Path, *turns: dict[str, Any], **fields: Any) -> EpisodeRecord:
    """The episode of some turns."""
    (record,), rejects = read(path, {"conversations": turns} | fields)
    assert not rejects
    return record


def test_a_real_conversation_is_one_episode_of_what_gpt_said() -> None:
    path = shared_data("formats", "chat_sft", "axolotl_conversation.json")
    turns = json.loads(path.read_text("utf-8"))["conversations"]
    answers = [turn["value"] for turn in turns if turn["from"] == "gpt"]
    (record,), rejects = read_file(path)
    assert not rejects
    assert [step.action for step in record.steps] == answers
    assert counts([record]) == (1, len(answers), 0, [], sum(map(len, answers)))
    assert [step.state for step in record.steps] == [turn["value"] for turn in turns if turn["from"] == "human"]


def test_rows_that_datasets_stores_have_calls_results_and_tools() -> None:
    records, rejects = read_file(GOLDEN / "tools.parquet")
    assert not rejects
    assert counts(records) == (2, 4, 2, [], 2 * len("It rains."))
    first, second = records[0].steps
    assert first.tool_calls == [{"type": "function", "function": {"name": "look_up", "arguments": {"who": "weather"}}}]
    assert (second.state, second.state_role, second.action) == ("Rain.", "tool", "It rains.")
    assert records[0].initial_messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is the weather?"},
    ]
    assert records[0].tools is not None
    assert [record.task_id for record in records] == ["1", "2"]


@pytest.mark.parametrize(
    ("speaker", "role"), [("human", "user"), ("User", "user"), ("observation", "tool"), ("function_response", "tool")]
)
def test_who_is_observed(tmp_path: Path, speaker: str, role: str) -> None:
    (step,) = read_one(tmp_path / "f.jsonl", {"from": speaker, "value": "hi"}, YES).steps
    assert (step.state, step.state_role) == ("hi", role)


@pytest.mark.parametrize("speaker", ["gpt", "Assistant", "chatgpt", "model"])
def test_who_acts(tmp_path: Path, speaker: str) -> None:
    assert read_one(tmp_path / "f.jsonl", ASK, {"from": speaker, "value": "Yes."}).steps[0].action == "Yes."


def test_a_call_may_be_several_and_one_that_is_no_json_is_text(tmp_path: Path) -> None:
    two = json.dumps([{"name": "f", "arguments": "{}"}, {"name": "g", "arguments": {}}])
    record = read_one(
        tmp_path / "f.jsonl",
        ASK,
        {"from": "function_call", "value": two},
        {"from": "observation", "value": "ok"},
        {"from": "function_call", "value": "f()"},
    )
    assert [call["function"]["name"] for call in record.steps[0].tool_calls or []] == ["f", "g"]
    assert (record.steps[1].tool_calls, record.steps[1].action) == (None, "f()")


def test_a_pair_answers_the_conversation(tmp_path: Path) -> None:
    row = {"conversations": [ASK], "chosen": YES, "rejected": {"from": "gpt", "value": "No."}}
    records, _ = read(tmp_path / "f.jsonl", row)
    assert [(r.steps[0].action, r.rollout_index, r.scores[0].value) for r in records] == [
        ("Yes.", 0, 1.0),
        ("No.", 1, 0.0),
    ]


def test_an_unpaired_row_has_a_label_and_a_turn_its_weight(tmp_path: Path) -> None:
    record = read_one(tmp_path / "f.jsonl", ASK, YES | {"weight": 0}, kto_tag=True)
    assert [(score.scorer, score.value) for score in record.scores] == [("kto_tag", 1.0)]
    assert (record.steps[0].trainable, record.steps[0].extra) == (False, {"weight": 0})


@pytest.mark.parametrize(
    ("turn", "says"),
    [
        ({"from": "narrator", "value": "x"}, "`conversations[1].from` is 'narrator'; valid: user, assistant"),
        ({"value": "x"}, "`conversations[1].from` is None"),
        ({"from": "gpt", "value": 5}, "`conversations[1].value` is int; valid: text"),
        ("hi", "at `$.conversations[1]`"),
    ],
)
def test_a_turn_of_the_wrong_shape_is_refused_by_its_place(tmp_path: Path, turn: Any, says: str) -> None:
    good = {"conversations": [ASK, YES]}
    records, (reject,) = read(tmp_path / "f.jsonl", good, {"conversations": [ASK, turn]}, good)
    assert (len(records), reject.position, reject.reason) == (2, 2, "invalid")
    assert says in reject.message


def test_a_cut_array_keeps_its_rows(tmp_path: Path) -> None:
    row = json.dumps({"conversations": [ASK, YES]})
    (tmp_path / "f.json").write_text(f"[{row},\n{row[:-20]}", "utf-8")
    records, (reject,) = read_file(tmp_path / "f.json")
    assert (len(records), reject.position, reject.reason) == (1, 1, "truncated")


def test_a_damaged_document_is_still_known_by_its_keys(tmp_path: Path) -> None:
    (tmp_path / "f.json").write_text('{"conversations": [\n{"from": "human", "value": oops}]}', "utf-8")
    records, (reject,) = read_file(tmp_path / "f.json")
    assert (records, reject.position, reject.reason) == ([], 0, "malformed")


def test_a_line_in_another_encoding_is_refused_alone(tmp_path: Path) -> None:
    row = json.dumps({"conversations": [ASK, YES | {"value": "né"}]}, ensure_ascii=False)
    (tmp_path / "f.jsonl").write_bytes(row.encode() + b"\n" + row.encode("latin-1") + b"\n")
    records, (reject,) = read_file(tmp_path / "f.jsonl")
    assert (len(records), reject.position, reject.reason) == (1, 2, "malformed")


def test_no_wrong_type_and_no_missing_key_raises(tmp_path: Path) -> None:
    row = {
        "conversations": [ASK, {"from": "function_call", "value": '{"name": "f"}'}],
        "chosen": YES,
        "rejected": YES,
        "system": "s",
        "tools": "[]",
    }
    assert_never_raises(tmp_path / "f.jsonl", [row, {"conversations": [ASK, YES]}], lines=True)


@pytest.mark.parametrize(
    "row",
    [
        {"items": [ASK, YES]},
        {"conversations": [{"from": "human", "content": "Is 2 even?"}, {"from": "gpt", "content": "Yes."}]},
    ],
)
def test_turns_are_known_by_other_names(tmp_path: Path, row: Any) -> None:
    (record,), _ = read(tmp_path / "f.jsonl", row)
    assert [(step.state, step.action) for step in record.steps] == [("Is 2 even?", "Yes.")]


@pytest.mark.parametrize("row", [{"conversations": [{"role": "user", "content": "q"}]}, {"conversations": []}])
def test_other_conversations_are_left_to_other_formats(tmp_path: Path, row: Any) -> None:
    (tmp_path / "f.jsonl").write_text(json.dumps(row) + "\n", "utf-8")
    assert not FORMATS["sharegpt"].recognise(read_head(tmp_path / "f.jsonl"))
