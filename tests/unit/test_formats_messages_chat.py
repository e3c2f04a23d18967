"""Chat data: which forms a row has, what is a decision in it, and which rows are refused."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lake.errors import FormatError
from lake.formats.base.format import read_head
from lake.formats.base.source import Input
from lake.formats.registry import FORMATS, choose_format
from lake.records import EpisodeRecord, Reject
from testkit.formats import assert_never_raises, counts, read_file
from testkit.shared import shared_data

GOLDEN = Path(__file__).parents[1] / "golden" / "formats" / "messages"
SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": "Is 2 even?"}
YES = {"role": "assistant", "content": "Yes."}
NO = {"role": "assistant", "content": "No."}
WHY = {"role": "user", "content": "Why?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def read(path: Path, *rows: Any) -> tuple[list[EpisodeRecord], list[Reject]]:
    """The rows of a file of lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return read_file(path)


def read_one(path: Path, row: dict[str, Any]) -> EpisodeRecord:
    """The one episode of a row."""
    (record,), rejects = read(path, row)
    assert not rejects
    return record


def scores(record: EpisodeRecord) -> dict[str, float | None]:
    return {score.scorer: score.value for score in record.scores}


# ---------------------------------------------------------------- real files


def test_openais_fine_tuning_rows_are_episodes_whose_weights_say_what_is_trained_on() -> None:
    path = shared_data("formats", "chat_sft", "azure_openai_train.jsonl")
    answers = [m for line in path.read_text("utf-8").splitlines() for m in json.loads(line)["messages"]]
    acted = [message for message in answers if message["role"] == "assistant"]
    records, rejects = read_file(path)
    assert not rejects
    assert counts(records) == (10, len(acted), 0, [], sum(len(message["content"]) for message in acted))
    trained = [step.trainable for record in records for step in record.steps]
    assert trained == [message["weight"] == 1 for message in acted]
    assert trained.count(False) == 10
    assert [record.task_id for record in records] == [str(line) for line in range(1, 11)]


def test_llama_factorys_pairs_are_siblings_with_a_preference() -> None:
    path = shared_data("formats", "chat_sft", "v1_dpo_demo.jsonl")
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    sides = [row[key] for row in rows for key in ("chosen_messages", "rejected_messages")]
    texts = [part["value"] for side in sides for part in side[-1]["content"]]
    records, rejects = read_file(path)
    assert not rejects
    assert counts(records) == (20, 20, 0, [0.0] * 10 + [1.0] * 10, sum(map(len, texts)))
    assert [record.steps[0].action for record in records] == texts
    assert [(record.task_id, record.rollout_index, scores(record)["preference"]) for record in records[:3]] == [
        ("1", 0, 1.0),
        ("1", 1, 0.0),
        ("2", 0, 1.0),
    ]
    assert records[0].initial_messages == records[1].initial_messages


@pytest.mark.parametrize("name", ["sft.parquet", "sft.jsonl"])
def test_rows_that_datasets_stores_are_the_same_in_both_of_its_formats(name: str) -> None:
    """Its rows have a null for every key that another row has; in Parquet, so have the arguments of calls."""
    records, rejects = read_file(GOLDEN / name)
    assert not rejects
    assert counts(records) == (3, 6, 3, [], sum(len(f"Number {n} is nobody: „niemand“.") for n in range(3)))
    assert [record.task_id for record in records] == ["q0", "q1", "q2"]
    first = records[0]
    assert first.tools is not None
    assert first.tools[0]["function"]["name"] == "look_up"
    assert first.extra == {"source": "made up"}
    (call,) = first.steps[0].tool_calls or []
    assert call["function"]["arguments"]["who"] == "0"
    assert first.steps[1].context == [
        {"role": "tool", "tool_call_id": "call_0", "name": "look_up", "content": "Nobody."}
    ]


def test_preferences_and_unpaired_rows_that_datasets_stores() -> None:
    records, _ = read_file(GOLDEN / "preference.parquet")
    assert counts(records) == (
        4,
        4,
        0,
        [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 8.5, 8.5],
        len("Yes.No.") + 2 * len("I do not know."),
    )
    assert scores(records[1]) == {"preference": 0.0, "score": 2.0}
    records, _ = read_file(GOLDEN / "unpaired.jsonl")
    assert [(r.steps[0].state, r.steps[0].action, scores(r)) for r in records] == [
        ("The sky is", " blue.", {"label": 1.0}),
        ("The sky is", " a fish.", {"label": 0.0}),
    ]


# ---------------------------------------------------------------- forms


@pytest.mark.parametrize("key", ["messages", "conversation", "conversations", "trajectory"])
def test_every_message_of_an_assistant_is_a_decision(tmp_path: Path, key: str) -> None:
    record = read_one(tmp_path / "f.jsonl", {key: [SYSTEM, ASK, YES, WHY, NO, WHY]})
    assert [(step.state, step.action) for step in record.steps] == [("Is 2 even?", "Yes."), ("Why?", "No.")]
    assert record.initial_messages == [SYSTEM, ASK]
    assert record.final_observation == [WHY]
    assert record.env_return is None


def test_an_array_and_one_object_hold_the_same_rows_as_lines(tmp_path: Path) -> None:
    row = {"messages": [ASK, YES]}
    for text, positions in ((json.dumps([row, row], indent=1), [0, 1]), (json.dumps(row, indent=1), [0])):
        (tmp_path / "f.json").write_text(text, "utf-8")
        items = list(choose_format(tmp_path / "f.json").read(tmp_path / "f.json"))
        assert [item[0] for item in items if isinstance(item, tuple)] == positions


def test_what_an_assistant_says_in_a_prompt_is_history(tmp_path: Path) -> None:
    record = read_one(tmp_path / "f.jsonl", {"prompt": [ASK, YES, WHY], "completion": [NO]})
    assert [(step.state, step.action, step.context) for step in record.steps] == [("Why?", "No.", [])]
    assert record.initial_messages == [ASK, YES, WHY]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2 + 2 =", "completion": " 4", "system": "Add."},
        {"query": "2 + 2 =", "response": " 4", "system": "Add.", "history": []},
        {"question": "2 + 2 =", "response": " 4", "system_prompt": "Add."},
        {"prompt": [{"role": "user", "content": "2 + 2 ="}], "output": " 4", "system": "Add."},
        {"messages": [{"role": "user", "content": "2 + 2 ="}, YES | {"content": " 4"}], "system": [{"text": "Add."}]},
        {
            "systemInstruction": {"parts": [{"text": "Add."}]},
            "contents": [
                {"role": "user", "parts": [{"text": "2 + 2 ="}]},
                {"role": "model", "parts": [{"text": " 4"}]},
            ],
        },
    ],
)
def test_a_prompt_and_its_answer_in_every_spelling(tmp_path: Path, row: dict[str, Any]) -> None:
    record = read_one(tmp_path / "f.jsonl", row)
    assert (record.steps[0].state, record.steps[0].action) == ("2 + 2 =", " 4")
    assert record.initial_messages == [{"role": "system", "content": "Add."}, {"role": "user", "content": "2 + 2 ="}]


@pytest.mark.parametrize(("system", "extra"), [("Be brief.", None), ("Be long.", {"system": "Be long."})])
def test_a_system_prompt_that_the_chat_has_is_not_said_twice(tmp_path: Path, system: str, extra: Any) -> None:
    record = read_one(tmp_path / "f.jsonl", {"system": system, "messages": [SYSTEM, ASK, YES]})
    assert (record.initial_messages, record.extra) == ([SYSTEM, ASK], extra)


def test_dollys_context_is_the_input_of_its_instruction(tmp_path: Path) -> None:
    record = read_one(
        tmp_path / "f.jsonl", {"instruction": "Add.", "context": "2, 2", "response": "4", "category": "qa"}
    )
    assert (record.steps[0].state, record.steps[0].action, record.extra) == ("Add.\n2, 2", "4", {"category": "qa"})


def test_calls_in_messages_of_their_own_are_one_decision_with_the_text_before_them(tmp_path: Path) -> None:
    """ms-swift writes each call, and each result, as a message."""
    call, result = {"role": "tool_call", "content": '{"name": "f", "arguments": {}}'}, {"role": "tool_response"}
    rows = [ASK, YES, call, call, result | {"content": "1"}, result | {"content": "2"}, NO]
    record = read_one(tmp_path / "f.jsonl", {"messages": rows})
    assert [(step.state, step.action, len(step.tool_calls or [])) for step in record.steps] == [
        ("Is 2 even?", "Yes.", 2),
        ("1\n2", "No.", 0),
    ]


@pytest.mark.parametrize("key", ["value", "text"])
def test_roles_and_texts_by_other_names(tmp_path: Path, key: str) -> None:
    turns = [{"role": "User", key: "Is 2 even?"}, {"role": "ai", key: "Yes.", "content": None}]
    (step,) = read_one(tmp_path / "f.jsonl", {"messages": turns}).steps
    assert (step.state, step.action) == ("Is 2 even?", "Yes.")


@pytest.mark.parametrize(
    ("cells", "says"),
    [
        (pa.array([0, 2**60], pa.timestamp("ms")), "`more` is a timestamp[ms] that cannot be read"),
        (pa.array([0, 2**30], pa.date32()), "`more` is a date32[day] that cannot be read"),
        (pa.array([0, None], pa.timestamp("us", "Mars/Base")), ""),
        (pa.array([0.5, float("nan")]), "`$.more` is NaN, which JSON does not have"),
        (pa.array([[{"a": 0.5}], [{"a": float("inf")}]]), "`$.more[0].a` is Infinity"),
        (pa.array([[("a", 0.5)], [("a", float("nan"))]], pa.map_(pa.string(), pa.float64())), "`$.more[0][1]` is NaN"),
    ],
)
def test_a_cell_of_parquet_that_json_cannot_hold_costs_its_row_alone(tmp_path: Path, cells: Any, says: str) -> None:
    pq.write_table(pa.table({"messages": [[ASK, YES]] * 2, "more": cells}), tmp_path / "f.parquet")
    records, (reject,) = read_file(tmp_path / "f.parquet")
    assert len(records) == 1
    assert reject.reason == "invalid"
    assert reject.position == (1 if says else 0)
    assert reject.message.startswith(says or "`more` is a timestamp[us, tz=Mars/Base] that cannot be read")
    assert "Is 2 even?" in reject.raw


def test_how_long_something_took_is_in_seconds(tmp_path: Path) -> None:
    took = pa.array([1_500_000_001], pa.duration("ns"))
    pq.write_table(pa.table({"messages": [[ASK, YES]], "took": took}), tmp_path / "f.parquet")
    ((record,), _) = read_file(tmp_path / "f.parquet")
    assert record.extra == {"took": 1.500000001}


def test_the_same_rows_in_lines_an_array_and_parquet_are_the_same_episodes(tmp_path: Path) -> None:
    """Parquet cannot tell a null inside an object from a key that is missing."""
    asks = ASK | {"about": {"by": None, "at": "noon"}}
    acts = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    rows = [{"messages": [asks, acts], "kind": {"a": 1, "b": None}}, {"messages": [ASK, YES], "kind": None}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "f.parquet")
    (tmp_path / "f.json").write_text(json.dumps(rows), "utf-8")
    by_line, _ = read(tmp_path / "f.jsonl", *rows)
    assert [record.task_id for record in by_line] == ["1", "2"]
    assert by_line == read_file(tmp_path / "f.json")[0] == read_file(tmp_path / "f.parquet")[0]


def test_a_null_that_a_model_wrote_stays(tmp_path: Path) -> None:
    call = CALL | {"function": {"name": "f", "arguments": {"limit": None}}}
    record = read_one(tmp_path / "f.jsonl", {"messages": [ASK, {"role": "assistant", "tool_calls": [call]}]})
    assert record.steps[0].tool_calls == [call]


def test_alpaca_rows_have_their_input_behind_the_instruction(tmp_path: Path) -> None:
    row = {"instruction": "Add.", "input": "2, 2", "output": "4", "history": [["Hi.", "Hello."]], "lang": "en"}
    record = read_one(tmp_path / "f.jsonl", row)
    assert [(step.state, step.action) for step in record.steps] == [("Add.\n2, 2", "4")]
    assert [message["content"] for message in record.initial_messages or []] == ["Hi.", "Hello.", "Add.\n2, 2"]
    assert record.extra == {"lang": "en"}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Is 2 even?", "chosen": "Yes.", "rejected": "No."},
        {"prompt": [ASK], "chosen": [YES], "rejected": [NO]},
        {"prompt": "Is 2 even?", "chosen": [ASK, YES], "rejected": [ASK, NO], "messages": [ASK, YES]},
        {"chosen": [ASK, YES], "rejected": [ASK, NO]},
        {"messages": [ASK], "chosen": YES, "rejected": NO},
        {"instruction": "Is 2 even?", "chosen": "Yes.", "rejected": "No."},
        {"instruction": "Is 2 even?", "input": "", "output": ["Yes.", "No."]},
        {"input": {"messages": [ASK]}, "preferred_output": [YES], "non_preferred_output": [NO]},
        {"chosen": {"messages": [ASK, YES]}, "rejected": {"messages": [ASK, NO]}},
        {"messages": [ASK, YES], "rejected_response": "No."},
        {"messages": [ASK, YES], "rejected_messages": [ASK, NO]},
        {"query": "Is 2 even?", "response": "Yes.", "rejected_response": "No."},
        {"question": "Is 2 even?", "chosen": "Yes.", "rejected": "No."},
        {"prompt": "Is 2 even?", "chosen_response": "Yes.", "rejected_response": "No."},
        {"chosen": "\n\nHuman: Is 2 even?\n\nAssistant: Yes.", "rejected": "\n\nHuman: Is 2 even?\n\nAssistant: No."},
    ],
)
def test_a_pair_is_two_siblings_of_one_prompt(tmp_path: Path, row: dict[str, Any]) -> None:
    records, rejects = read(tmp_path / "f.jsonl", row)
    assert not rejects
    assert [[step.action for step in record.steps] for record in records] == [["Yes."], ["No."]]
    assert [(record.task_id, record.rollout_index, scores(record)) for record in records] == [
        ("1", 0, {"preference": 1.0}),
        ("1", 1, {"preference": 0.0}),
    ]
    assert [record.initial_messages for record in records] == [[ASK], [ASK]]
    assert [record.extra for record in records] == [None, None]


def test_what_chosen_and_rejected_share_is_history(tmp_path: Path) -> None:
    records, _ = read(tmp_path / "f.jsonl", {"chosen": [ASK, YES, WHY, YES], "rejected": [ASK, YES, WHY, NO]})
    assert [[step.action for step in record.steps] for record in records] == [["Yes."], ["No."]]
    same, _ = read(tmp_path / "f.jsonl", {"chosen": [ASK, YES], "rejected": [ASK, YES]})
    assert [len(record.steps) for record in same] == [1, 1], "two equal answers are answers"


def test_the_fields_of_one_side_are_told_of_it_alone(tmp_path: Path) -> None:
    row = {"prompt": "p", "chosen": "a", "rejected": "b", "chosen_model": "m1", "rejected_model": "m2", "margin": 3}
    better, rejected = read(tmp_path / "f.jsonl", row | {"chosen-rating": 5, "rejected-rating": 1, "score": 7})[0]
    assert (better.policy, rejected.policy) == ("m1", "m2")
    assert scores(better) == {"preference": 1.0, "score": 7.0, "rating": 5.0}
    assert scores(rejected) == {"preference": 0.0, "score": 7.0, "rating": 1.0}
    assert better.extra == rejected.extra == {"margin": 3}


def test_a_text_that_quotes_a_turn_is_no_hh_row_unless_both_sides_are(tmp_path: Path) -> None:
    records, _ = read(tmp_path / "f.jsonl", {"chosen": "\n\nHuman: hi\n\nAssistant: ho", "rejected": "Human: hi"})
    assert [record.steps[0].action for record in records] == ["\n\nHuman: hi\n\nAssistant: ho", "Human: hi"]


# ---------------------------------------------------------------- fields


def test_siblings_are_the_rows_of_an_id(tmp_path: Path) -> None:
    rows = [{"id": name, "messages": [ASK, YES]} for name in ("a", "b", "a")]
    records, _ = read(tmp_path / "f.jsonl", *rows, {"messages": [ASK, NO]}, {"id": 7, "messages": [ASK, NO]})
    assert [(r.task_id, r.rollout_index) for r in records] == [("a", 0), ("b", 0), ("a", 1), ("row 4", 0), ("7", 0)]


def test_rollouts_of_an_instance_are_siblings_and_whether_it_was_resolved_is_a_score(tmp_path: Path) -> None:
    rows = [{"instance_id": "a__1", "messages": [ASK, YES], "resolved": solved} for solved in (True, False)]
    records, _ = read(tmp_path / "f.jsonl", *rows)
    triples = [(record.task_id, record.rollout_index, scores(record)) for record in records]
    assert triples == [("a__1", 0, {"resolved": 1.0}), ("a__1", 1, {"resolved": 0.0})]


def test_the_first_row_decides_which_column_names_tasks(tmp_path: Path) -> None:
    records, _ = read(tmp_path / "f.jsonl", {"messages": [ASK, YES]}, {"id": "1", "messages": [ASK, YES]})
    assert [record.task_id for record in records] == ["1", "2"]
    assert records[1].extra == {"id": "1"}


def test_scores_labels_and_what_has_no_column(tmp_path: Path) -> None:
    row = {
        "messages": [ASK, YES],
        "reward": 1,
        "label": True,
        "rewards": {"help": 0.5, "pass@1": None},
        "split": "test",
    }
    record = read_one(tmp_path / "f.jsonl", row | {"model": "m", "ground_truth": "Yes.", "kind": {"a": [1]}})
    assert scores(record) == {"reward": 1.0, "label": 1.0, "help": 0.5, "pass_1": None}
    assert (record.policy, record.split, record.ground_truth, record.env_return) == ("m", "test", "Yes.", None)
    assert record.extra == {"kind": {"a": [1]}}


def test_a_label_that_is_no_truth_is_no_score(tmp_path: Path) -> None:
    assert read_one(tmp_path / "f.jsonl", {"messages": [ASK, YES], "label": 3}).extra == {"label": 3}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"content": None, "tool_calls": [CALL]}, ("", None, [CALL])),
        ({"content": None, "tool_calls": json.dumps([CALL])}, ("", None, [CALL])),
        ({"content": "", "tool_calls": []}, ("", None, None)),
        (
            {"content": None, "tool_calls": [{"id": "c1", "name": "f", "arguments": "{}"}]},
            ("", None, [CALL]),
        ),
        (
            {"content": None, "function_call": {"name": "f", "arguments": "{}"}},
            ("", None, [{k: v for k, v in CALL.items() if k != "id"}]),
        ),
        ({"content": "Yes.", "reasoning_content": "Hm."}, ("Yes.", "Hm.", None)),
        ({"content": "Yes.", "thinking": "Hm."}, ("Yes.", "Hm.", None)),
        ({"content": [{"type": "text", "text": "Ye"}, {"type": "text", "text": "s."}]}, ("Yes.", None, None)),
        (
            {
                "content": [
                    {"type": "reasoning", "value": "Hm."},
                    {"type": "text", "value": "Yes."},
                    {"type": "tool_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
                ]
            },
            ("Yes.", "Hm.", [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]),
        ),
        (
            {
                "content": [
                    {"type": "thinking", "thinking": "Hm."},
                    {"type": "text", "text": "Yes."},
                    {"type": "tool_use", "id": "c1", "name": "f", "input": "{}"},
                ]
            },
            ("Yes.", "Hm.", [CALL]),
        ),
    ],
)
def test_a_decision_in_every_spelling(tmp_path: Path, message: dict[str, Any], expected: tuple[Any, ...]) -> None:
    (step,) = read_one(tmp_path / "f.jsonl", {"messages": [ASK, {"role": "assistant"} | message]}).steps
    assert (step.action, step.reasoning, step.tool_calls) == expected


def test_the_older_role_of_a_tool_is_a_tool(tmp_path: Path) -> None:
    result = {"role": "function", "name": "f", "content": "Error: no"}
    record = read_one(tmp_path / "f.jsonl", {"messages": [ASK, YES, result, NO]})
    assert (record.steps[1].state_role, record.steps[1].state_is_error) == ("tool", True)


@pytest.mark.parametrize(("key", "weight"), [("weight", 0), ("loss_weight", 0.0), ("loss", False), ("weight", 1)])
def test_a_weight_of_nothing_is_not_trained_on(tmp_path: Path, key: str, weight: Any) -> None:
    (step,) = read_one(tmp_path / "f.jsonl", {"messages": [ASK, YES | {key: weight}]}).steps
    assert step.trainable is bool(weight)
    assert step.extra == {key: weight}


def test_a_row_with_an_error_failed(tmp_path: Path) -> None:
    record = read_one(tmp_path / "f.jsonl", {"messages": [ASK, YES], "error": "boom", "reward": 0})
    assert (record.status, record.error, scores(record), record.extra) == ("failed", "boom", {"reward": 0.0}, None)
    record = read_one(tmp_path / "f.jsonl", {"messages": [ASK, YES], "error": " "})
    assert (record.status, record.error) == ("completed", None)


def test_a_score_that_is_text_is_kept_and_reported_and_refused_if_strict(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    (record,), _ = read(path, {"messages": [ASK, YES], "reward": "0.5"})
    assert (record.scores, record.extra) == ([], {"reward": "0.5"})
    file = Input(path, "run")
    assert len(list(FORMATS["messages"].reader(file))) == 1
    assert [note.name for note in file.notes] == ["reward"]
    (reject,) = FORMATS["messages"].reader(Input(path, "run", is_strict=True))
    assert isinstance(reject, Reject)
    assert reject.reason == "unsupported"


def test_tools_may_be_json_text(tmp_path: Path) -> None:
    record = read_one(tmp_path / "f.jsonl", {"messages": [ASK, YES], "tools": '[{"name": "f"}]'})
    assert record.tools == [{"name": "f"}]
    assert read_one(tmp_path / "f.jsonl", {"messages": [ASK, YES], "tools": "none"}).extra == {"tools": "none"}


def test_messages_may_be_json_text(tmp_path: Path) -> None:
    assert read_one(tmp_path / "f.jsonl", {"messages": json.dumps([ASK, YES])}).steps[0].action == "Yes."


# ---------------------------------------------------------------- what is refused, and damage


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"messages": [ASK]}, "no decision of an agent, and no outcome"),
        ({"messages": []}, "no decision of an agent, and no outcome"),
        ({"messages": {}}, "`messages[0].role` is None"),
        ({"messages": 5}, "`messages` is int; valid: a list of messages"),
        ({"messages": ["hi"]}, "at `$.messages[0]`"),
        ({"messages": [ASK, {"role": "assistant", "content": 5}]}, "is int; valid: text, or parts"),
        ({"messages": [ASK, {"role": "assistant", "tool_calls": "no"}]}, "`messages[1].tool_calls` is a text that"),
        ({"prompt": "p"}, "neither `messages`, nor a `prompt`"),
        ({"chosen": [ASK], "rejected": [ASK, NO]}, "`chosen` holds nothing that an assistant said"),
        ({"instruction": "i", "output": "o", "history": [["q"]]}, "Expected `array` of length 2"),
        (17, "Expected `object`, got `int`"),
    ],
)
def test_a_wrong_row_is_refused_by_its_line_and_the_others_are_read(tmp_path: Path, row: Any, says: str) -> None:
    good = {"messages": [ASK, YES]}
    records, (reject,) = read(tmp_path / "f.jsonl", good, row, good)
    assert [record.task_id for record in records] == ["1", "3"]
    assert (reject.position, reject.reason) == (2, "invalid")
    assert says in reject.message
    assert json.loads(reject.raw) == row


def test_a_cut_file_keeps_the_rows_before_the_cut(tmp_path: Path) -> None:
    line = json.dumps({"messages": [ASK, YES]})
    (tmp_path / "f.jsonl").write_text(f"{line}\n{line}\n{line[:-9]}", "utf-8")
    records, (reject,) = read_file(tmp_path / "f.jsonl")
    assert (len(records), reject.position, reject.reason) == (2, 3, "truncated")
    (tmp_path / "f.json").write_text(f"[{line}, {line}, {line[:-9]}", "utf-8")
    records, (reject,) = read_file(tmp_path / "f.json")
    assert (len(records), reject.position, reject.reason) == (2, 2, "truncated")


def test_a_damaged_document_is_still_known_by_its_keys(tmp_path: Path) -> None:
    (tmp_path / "f.json").write_text('{"messages": [\n{"role": "user", "content": oops}]}', "utf-8")
    records, (reject,) = read_file(tmp_path / "f.json")
    assert (records, reject.position, reject.reason) == ([], 0, "malformed")


def test_a_line_in_another_encoding_is_refused_alone(tmp_path: Path) -> None:
    good = json.dumps({"messages": [ASK, YES]}).encode()
    latin = json.dumps({"messages": [ASK, {"role": "assistant", "content": "né"}]}, ensure_ascii=False).encode(
        "latin-1"
    )
    (tmp_path / "f.jsonl").write_bytes(b"\xef\xbb\xbf" + good + b"\n" + latin + b"\n" + good + b"\n")
    records, (reject,) = read_file(tmp_path / "f.jsonl")
    assert (len(records), reject.position, reject.reason) == (2, 2, "malformed")


def test_json_text_that_nests_too_deeply_is_kept_as_text(tmp_path: Path) -> None:
    deep = "[" * 600 + "]" * 600
    record = read_one(tmp_path / "f.jsonl", {"messages": [ASK, YES], "tools": deep})
    assert record.extra == {"tools": deep}


@pytest.mark.parametrize(
    "row",
    [
        {"id": "a", "messages": [SYSTEM, ASK, {**YES, "tool_calls": [CALL], "weight": 0}], "rewards": {"a": 1}},
        {"prompt": [ASK], "chosen": [YES], "rejected": [NO], "score_chosen": 1.0, "tools": "[]"},
        {"instruction": "i", "input": "x", "output": "o", "history": [["a", "b"]], "kto_tag": True},
        {
            "prompt": "p",
            "completion": [{"role": "assistant", "content": [{"type": "text", "value": "v"}]}],
            "label": True,
        },
    ],
)
def test_no_wrong_type_and_no_missing_key_raises(tmp_path: Path, row: dict[str, Any]) -> None:
    assert_never_raises(tmp_path / "f.jsonl", [row, {"messages": [ASK, YES]}], lines=True)


# ---------------------------------------------------------------- recognition


@pytest.mark.parametrize(
    "row",
    [
        {"task_id": "t", "steps": []},
        {"env_index": 0, "step": 0, "messages": [ASK]},
        {"messages": [ASK, YES], "rollout_status": {"status": "finished"}, "evaluation_result": None},
        {"example_id": 0, "prompt": [ASK], "completion": [YES], "reward": 1.0, "generation_ms": 1},
        {"messages": [ASK, YES], "info": {}, "trajectory_format": "mini-swe-agent-1"},
        {"messages": [ASK], "response": {"choices": []}},
        {"conversations": [{"from": "human", "value": "q"}]},
        {"prompt": "p"},
    ],
)
def test_rows_of_other_formats_are_left_to_them(tmp_path: Path, row: dict[str, Any]) -> None:
    (tmp_path / "f.jsonl").write_text(json.dumps(row) + "\n", "utf-8")
    assert not FORMATS["messages"].recognise(read_head(tmp_path / "f.jsonl"))


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"text": "Once upon a time.", "meta": {}}, "texts without roles"),
        ({"messages": [SYSTEM, ASK], "reference_answer": "Yes."}, "prompts without answers"),
        ({"prompt": [ASK], "data_source": "d", "reward_model": {"ground_truth": "Yes."}}, "prompts without answers"),
    ],
)
def test_data_that_nobody_answered_is_told_by_name(tmp_path: Path, row: dict[str, Any], says: str) -> None:
    (tmp_path / "f.jsonl").write_text(json.dumps(row) + "\n", "utf-8")
    with pytest.raises(FormatError, match=f"holds no trajectory: its rows are {says}"):
        choose_format(tmp_path / "f.jsonl")


def test_a_row_that_is_longer_than_the_head_is_recognised(tmp_path: Path) -> None:
    row = {"messages": [ASK, {"role": "assistant", "content": "x" * 200_000}]}
    assert len(read_one(tmp_path / "f.jsonl", row).steps[0].action) == 200_000
