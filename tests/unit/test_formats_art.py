"""ART trajectory groups: both versions of their Parquet files, which is the group's task, what is trained on."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lake import ids
from lake.formats.base.format import read_head
from lake.formats.registry import FORMATS
from lake.records import EpisodeRecord, Reject, identify
from testkit.formats import counts, damaged, read_file
from testkit.shared import shared_data

TEXTS = ("group_metadata", "group_metrics", "metrics", "metadata", "tools", "group_json", "trajectory_json")
ASK = {"role": "user", "content": "q"}
SAY = {"role": "assistant", "content": "a"}
CHOICE = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "b", "refusal": None}}


def write(path: Path, *rows: dict[str, Any]) -> Path:
    """Rows with the types of the tool's own schemas, as it declares them."""
    message = pa.struct([(name, pa.string()) for name in ("role", "content", "tool_calls", "tool_call_id")])
    message = pa.struct([*message, pa.field("trainable", pa.bool_())])
    fields = [("group_index", pa.int64()), *((name, pa.string()) for name in TEXTS[:2])]
    fields += [("group_logs", pa.list_(pa.string())), ("reward", pa.float64())]
    fields += [*((name, pa.string()) for name in TEXTS[2:5]), ("logs", pa.list_(pa.string()))]
    fields += [("messages", pa.list_(message))]
    if any("format_version" in row for row in rows):
        fields += [("format_version", pa.int16()), ("trajectory_index", pa.int64())]
        fields += [(name, pa.large_string()) for name in TEXTS[5:]]
    table = [
        {
            key: json.dumps(value) if key in TEXTS and not isinstance(value, str | None) else value
            for key, value in row.items()
        }
        for row in rows
    ]
    pq.write_table(pa.Table.from_pylist(table, schema=pa.schema(fields)), path, compression="zstd")
    return path


def flat(content: str, *, trainable: bool = True, **fields: Any) -> dict[str, Any]:
    """A row of the version without a number."""
    messages = [ASK | {"trainable": False}, {"role": "assistant", "content": content, "trainable": trainable}]
    return {"group_index": 0, "reward": 1.0, "messages": messages} | fields


def v2(trajectory: dict[str, Any] | None, **fields: Any) -> dict[str, Any]:
    """A row of version 2."""
    row = {"format_version": 2, "group_index": 0, "trajectory_index": 0, "group_json": {"metadata": {"scenario": "s"}}}
    return row | {"trajectory_json": trajectory, "reward": (trajectory or {}).get("reward")} | fields


def read(path: Path, *rows: dict[str, Any]) -> tuple[list[EpisodeRecord], list[Reject]]:
    return read_file(write(path, *rows))


# ---------------------------------------------------------------- without a number


def test_a_real_file_is_two_groups_of_three_with_a_call_each() -> None:
    path = shared_data("formats", "art", "0005.parquet")
    rows = pq.read_table(path).to_pylist()
    acted = [message for row in rows for message in row["messages"] if message["role"] == "assistant"]
    records, rejects = read_file(path)
    assert not rejects
    calls = sum(len(json.loads(message["tool_calls"])) for message in acted if message["tool_calls"])
    rewards = sorted([row["reward"] for row in rows] * 2)
    assert counts(records) == (6, len(acted), calls, rewards, sum(len(m["content"] or "") for m in acted))
    assert [(r.task_id, r.rollout_index) for r in records] == [(s, n) for s in ("s0", "s1") for n in range(3)]
    first = records[0]
    assert (first.collection_round, first.tools) == (5, json.loads(rows[0]["tools"]))
    assert (first.steps[1].state, first.steps[1].state_role) == ("hit", "tool")
    assert first.steps[0].tool_calls == json.loads(acted[0]["tool_calls"])
    assert first.extra == {
        "metrics": {"turns": 2},
        "metadata": {"task": 0},
        "logs": ["l1"],
        "group": {"metadata": {"scenario": "s0"}, "index": 0},
    }


def test_what_is_not_trainable_is_a_decision_that_is_not_trained_on(tmp_path: Path) -> None:
    records, _ = read(tmp_path / "f.parquet", flat("a"), flat("b", trainable=False))
    assert [[(step.action, step.trainable, step.extra) for step in record.steps] for record in records] == [
        [("a", True, None)],
        [("b", False, None)],
    ]
    assert records[0].initial_messages == [ASK]


@pytest.mark.parametrize(
    ("metadata", "task"), [({"task_id": 7, "scenario": "s"}, "7"), ({"id": "x"}, "x"), ({"level": 1}, "4"), (None, "4")]
)
def test_the_groups_metadata_names_its_task_or_its_index_does(tmp_path: Path, metadata: Any, task: str) -> None:
    ((record,), _) = read(tmp_path / "f.parquet", flat("a", group_index=4, group_metadata=metadata))
    assert record.task_id == task
    assert record.collection_round is None


def test_groups_of_one_scenario_are_siblings(tmp_path: Path) -> None:
    rows = [flat("a", group_index=n, group_metadata={"scenario": "s"}) for n in (0, 0, 1)]
    records, _ = read(tmp_path / "f.parquet", *rows)
    assert [(record.task_id, record.rollout_index) for record in records] == [("s", 0), ("s", 1), ("s", 2)]


def test_the_splits_of_a_step_share_no_key(tmp_path: Path) -> None:
    records = []
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        records += read(tmp_path / split / "0005.parquet", flat("a"))[0]
    assert [(r.task_id, r.split, r.collection_round) for r in records] == [("0", "train", 5), ("0 [val]", "val", 5)]


def test_metrics_that_are_called_scores_are_scores(tmp_path: Path) -> None:
    ((record,), _) = read(tmp_path / "f.parquet", flat("a", metrics={"accuracy": 0.5, "duration": 3.0}))
    assert [(score.scorer, score.value) for score in record.scores] == [("reward", 1.0), ("accuracy", 0.5)]


def test_a_reward_that_is_no_number_is_unknown(tmp_path: Path) -> None:
    ((record,), _) = read(tmp_path / "f.parquet", flat("a", reward=float("nan")))
    assert (record.env_return, record.scores[0].value, record.scores[0].metrics) == (None, None, {"value": "nan"})


# ---------------------------------------------------------------- version 2


def test_choices_were_sampled_by_the_policy_that_is_trained_and_messages_were_not(tmp_path: Path) -> None:
    logprobs = {"content": [{"token": "token_id:5", "logprob": -0.5}]}
    trajectory = {
        "messages_and_choices": [ASK, SAY, ASK, CHOICE | {"logprobs": logprobs}],
        "reward": 0.5,
        "initial_policy_version": 3,
        "final_policy_version": 4,
    }
    ((record,), _) = read(tmp_path / "f.parquet", v2(trajectory, trajectory_index=2))
    assert [(step.action, step.trainable, step.finish_reason) for step in record.steps] == [
        ("a", False, None),
        ("b", True, "stop"),
    ]
    assert record.steps[1].extra == {"logprobs": logprobs}
    assert (record.task_id, record.rollout_index, record.policy_version, record.source_version) == ("s", 2, 3, "2")
    assert (record.env_return, record.extra) == (
        0.5,
        {"final_policy_version": 4, "group": {"metadata": {"scenario": "s"}, "index": 0}},
    )


def test_a_reward_that_is_left_out_stands_in_its_column(tmp_path: Path) -> None:
    ((record,), _) = read(tmp_path / "f.parquet", v2({"messages_and_choices": [ASK, CHOICE]}, reward=0.0))
    assert record.env_return == 0.0


def test_a_group_without_trajectories_is_a_row_that_holds_none(tmp_path: Path) -> None:
    records, rejects = read(tmp_path / "f.parquet", v2(None, trajectory_index=None))
    assert (records, rejects) == ([], [])


def test_additional_histories_are_episodes_of_their_own(tmp_path: Path) -> None:
    histories = [{"messages_and_choices": [ASK, CHOICE]}, {"messages_and_choices": [ASK]}]
    trajectory = {"messages_and_choices": [ASK, CHOICE], "reward": 1.0, "additional_histories": histories}
    (main, second), _ = read(tmp_path / "f.parquet", v2(trajectory))
    assert (second.relation, second.agent_id, second.env_return) == ("subagent", "history 1", None)
    assert second.parent_episode_id == ids.to_text(identify(main, "f").episode_id)
    assert main.extra is not None
    assert main.extra["history 2"] == [ASK], "one without a decision is kept as it is"


def test_exchanges_are_calls_that_each_repeat_their_history(tmp_path: Path) -> None:
    def exchange(second: int, request: list[Any], content: str) -> dict[str, Any]:
        return {
            "request": {"messages": request, "temperature": 0.5},
            "response": {"choices": [CHOICE | {"message": {"role": "assistant", "content": content}}], "usage": {}},
            "model": "m",
            "start_time": f"2026-01-01T00:00:0{second}",
            "end_time": f"2026-01-01T00:00:0{second + 1}",
        }

    calls = [exchange(3, [ASK, SAY, {"role": "user", "content": "r"}], "b"), exchange(1, [ASK], "a")]
    ((record,), _) = read(tmp_path / "f.parquet", v2({"exchanges": {"chat_completions": calls}, "reward": 1.0}))
    assert [(step.state, step.action, step.model, step.latency) for step in record.steps] == [
        ("q", "a", "m", 1.0),
        ("r", "b", "m", 1.0),
    ]
    assert record.initial_messages == [ASK]
    assert record.steps[1].context == [{"role": "user", "content": "r"}]
    assert record.steps[0].started_at is not None


def test_exchanges_with_other_apis_are_not_known(tmp_path: Path) -> None:
    records, (reject,) = read(tmp_path / "f.parquet", v2({"exchanges": {"responses": [{}]}}), flat("a"))
    assert (len(records), reject.position, reject.reason) == (1, 0, "unsupported")
    assert "known: chat_completions" in reject.message


def test_a_later_version_is_not_known(tmp_path: Path) -> None:
    records, (reject,) = read(tmp_path / "f.parquet", v2({}, format_version=3), v2({"messages_and_choices": [CHOICE]}))
    assert (len(records), reject.position, reject.reason) == (1, 0, "unsupported")
    assert "`format_version` is 3; known: 2" in reject.message


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (flat("a", metadata="{"), "`metadata` is no JSON"),
        (flat("a", tools={"a": 1}), "`tools` is JSON of dict; valid: list"),
        (flat("a", group_index=None), "the key 'group_index' is missing"),
        (flat("a", messages=[{"content": "x"}]), "`messages_and_choices[0].role` is None"),
        (flat("a", messages=None, reward=None), "no decision of an agent, and no outcome"),
        (flat("a", metadata="[" * 5000), "`metadata` is no JSON"),
    ],
)
def test_a_wrong_row_is_refused_by_its_index(tmp_path: Path, row: dict[str, Any], says: str) -> None:
    records, (reject,) = read(tmp_path / "f.parquet", flat("a"), row, flat("b"))
    assert [record.steps[0].action for record in records] == ["a", "b"]
    assert (reject.position, reject.reason) == (1, "invalid")
    assert says in reject.message


def test_no_wrong_type_and_no_missing_key_of_a_trajectory_raises(tmp_path: Path) -> None:
    exchange = {"request": {"messages": [ASK]}, "response": {"choices": [CHOICE]}, "start_time": "2026-01-01T00:00:00"}
    message = {
        "messages_and_choices": [ASK, SAY | {"tool_calls": []}, CHOICE],
        "tools": [{}],
        "additional_histories": [{"messages_and_choices": [ASK, CHOICE]}],
        "metrics": {"accuracy": 1},
        "initial_policy_version": 1,
    }
    for value in (message, {"exchanges": {"chat_completions": [exchange]}}):
        read(tmp_path / "f.parquet", *(v2(variant, trajectory_index=None) for variant in damaged(value)))


def test_a_cut_file_is_told_to_be_cut(tmp_path: Path) -> None:
    path = write(tmp_path / "f.parquet", flat("a"))
    path.write_bytes(path.read_bytes()[:-30])
    (item,) = FORMATS["art"].read(path)
    assert isinstance(item, Reject)
    assert "from row 0 on" in item.message


def test_other_parquet_files_are_left_to_other_formats(tmp_path: Path) -> None:
    pq.write_table(pa.table({"messages": ["x"], "reward": [1.0], "group_index": [0]}), tmp_path / "f.parquet")
    assert not FORMATS["art"].recognise(read_head(tmp_path / "f.parquet"))
