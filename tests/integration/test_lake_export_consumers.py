"""The tools that exports are made for read them with their own code: nothing is refused, or lost on the way.

Each tool is installed once per machine in its own environment, which takes minutes; `make test-slow`.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from lake import EpisodeRecord, Lake, ScoreRecord, StepRecord, TokensRecord, ids
from lake.cli import trajlake
from lake.records import identify
from testkit.consumers import consumed
from testkit.copies import copied
from testkit.round_trips import exported

pytestmark = pytest.mark.slow

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {key: kind}}}}
    for name, key, kind in (("look", "at", {"type": "string"}), ("count", "many", {"type": "integer"}))
]


def call(name: str, **arguments: Any) -> dict[str, Any]:
    """A tool call as chat APIs have it."""
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def rollout(task: str, index: int, reward: float | None) -> EpisodeRecord:
    """Two decisions; the first calls one of two tools, whose arguments have nothing in common."""
    used = call("look", at="door") if index % 2 else call("count", many=3)
    message = {"role": "tool", "tool_call_id": "c1", "content": f"seen by {index}"}
    return EpisodeRecord(
        task_id=task,
        rollout_index=index,
        env_return=reward,
        environment="house",
        policy="tiny",
        tokenizer="tiny",
        ground_truth={"door": "open"},
        tools=TOOLS if task == "tools" else None,
        initial_messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Do {task}."}],
        final_observation=[{"role": "user", "content": "Thanks."}],
        status="truncated" if index == 3 else "completed",
        stop_reason="max_steps" if index == 3 else None,
        steps=[
            StepRecord(
                state=f"Do {task}.",
                state_role="user",
                action="I look.",
                reasoning="hm",
                tool_calls=[used],
                tokens=TokensRecord(context_ids=[1, 2], action_ids=[3], action_logprobs=[-0.5]),
            ),
            StepRecord(state="", state_role="tool", context=[message], action=f"Done {index}.", reward=0.5),
        ],
        scores=[ScoreRecord(scorer="judge", value=0.25, reason="fair"), ScoreRecord(scorer="unsure", value=None)],
        extra={"note": "kept"},
    )


def records() -> list[EpisodeRecord]:
    """Two groups, one with tools; one sibling without a return; a sub-agent."""
    episodes = [rollout(task, index, float(index % 2)) for task in ("tools", "talk") for index in range(4)]
    episode_id = ids.to_text(identify(episodes[0], "run").episode_id)
    related = {"agent_id": "helper", "relation": "subagent", "parent_episode_id": episode_id, "parent_step_index": 0}
    return [*episodes, rollout("talk", 4, None), msgspec.structs.replace(rollout("tools", 0, None), **related)]


@pytest.fixture
def lk(tmp_path: Path) -> Lake:
    def make(folder: Path) -> None:
        import lake

        lake.open(folder, create=True).append(records(), run_id="run")
        done = CliRunner().invoke(trajlake, ["credit", "rloo", "--lake", str(folder)])
        assert done.exit_code == 0, done.output

    return copied("export-consumers", make, tmp_path / "lake")


TRL = ("trl==1.16.0", "datasets==4.8.5")
SCOUT = ("inspect-scout==0.6.1", "inspect-ai==0.3.285")
HARBOR = ("toml==0.10.2", "shortuuid==1.0.13")
EVAL_PROTOCOL = ("eval-protocol==0.3.33",)
VERL = ("datasets==4.8.5", "omegaconf==2.3.0", "hydra-core==1.3.2", "tensordict==0.10.0", "torchdata==0.11.0")
VERL += ("codetiming==1.4.0",)
CHATS = ("messages", "prompt-completion", "preference", "unpaired")


def test_datasets_and_trl_load_render_and_train_on_chats(lk: Lake, tmp_path: Path) -> None:
    names = [name for shape in CHATS for name in (shape, f"{shape}-parquet")]
    counts = {name: exported(lk, tmp_path / name, name, shard_episodes=5).rows for name in names}
    report = consumed("trl", TRL, *(tmp_path / name for name in names))
    for name in names:
        assert len(report[name]["rows"]) == counts[name] > 2, name
        assert report[name]["are_conversations"], name
        assert report[name]["loss"] > 0, name
    for shape in CHATS:
        lines, table = report[shape], report[f"{shape}-parquet"]
        assert lines["texts"] == table["texts"], "of the same chats, whatever file holds them"
        assert set(lines["columns"]) <= set(table["columns"])
        for line, table_row in zip(lines["rows"], table["rows"], strict=True):
            assert {key: line[key] for key in ("task_id", "tools")} == {
                key: table_row[key] for key in ("task_id", "tools")
            }
    texts = [row["text"] for row in report["messages"]["texts"]]
    assert sum('<call>look {"at": "door"}</call>' in text for text in texts) == 4, "arguments have no keys of others"
    assert sum('<call>count {"many": 3}</call>' in text for text in texts) == 6
    by_step = report["prompt-completion"]
    rewards = [row["step_reward"] for row in by_step["rows"]]
    assert rewards == [None, 0.5] * 10
    assert {text["completion"] for text in by_step["texts"] if "Done 1" in text["completion"]} == {
        "Done 1.</assistant>"
    }
    for pair, text in zip(report["preference"]["rows"], report["preference"]["texts"], strict=True):
        assert pair["chosen_score"] > pair["rejected_score"]
        assert text["prompt"].endswith("<assistant>")
    assert sorted(report["preference"]["labels"]) == [False] * 4 + [True] * 4
    assert [row["label"] for row in report["unpaired"]["rows"]].count(True) == 4


def test_inspect_scout_reads_the_folder_as_its_database(lk: Lake, tmp_path: Path) -> None:
    exported(lk, tmp_path / "out", "scout", shard_episodes=5)
    report = consumed("scout", SCOUT, tmp_path / "out")
    transcripts = report["transcripts"]
    assert len(transcripts) == 10
    assert len(report["good"]) == 4, "env_return can be asked for"
    names = {
        (transcript["task_id"], transcript["task_repeat"], transcript["agent"]): transcript
        for transcript in transcripts.values()
    }
    transcript = names["talk", 3, None]
    assert (transcript["task_set"], transcript["model"], transcript["score"], transcript["limit"]) == (
        "house",
        "tiny",
        "1.0",
        "max_steps",
    )
    assert [message["role"] for message in transcript["messages"]] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
    ]
    question, answered, done = transcript["messages"][2:5]
    assert [part.get("reasoning") or part["text"] for part in question["content"]] == ["hm", "I look."]
    assert (question["tool_calls"][0]["function"], question["tool_calls"][0]["arguments"]) == ("look", {"at": "door"})
    assert (answered["content"], answered["tool_call_id"]) == ("seen by 3", "c1")
    assert done["metadata"] == {"step_index": 1, "reward": 0.5, "advantage": pytest.approx(2 / 3)}
    assert json.loads(transcript["metadata"]["scores"]) == {"judge": 0.25, "unsure": None}


def test_harbors_models_take_every_document_and_result(lk: Lake, tmp_path: Path) -> None:
    manifest = exported(lk, tmp_path / "out", "atif")
    report = consumed("harbor", HARBOR, tmp_path / "out", alone=("--ignore-requires-python", "harbor==0.25.0"))
    assert len(report["trajectories"]) == len(report["results"]) == 9, "the sub-agent is inside another one"
    assert manifest.rows == 18
    for name, spelled in report["trajectories"].items():
        assert spelled == json.loads((tmp_path / "out" / name).read_text("utf-8")), "nothing is dropped"
    for name, result in report["results"].items():
        rewards = result["verifier_result"]["rewards"]
        assert rewards["judge"] == 0.25
        assert "unsure" not in rewards
        document = report["trajectories"][name.replace("result.json", "agent/trajectory.json")]
        assert {"scorer": "unsure", "step_index": None, "value": None} in document["extra"]["trajlake"]["scores"]
    assert sum("subagent_trajectories" in document for document in report["trajectories"].values()) == 1
    stopped = [result for result in report["results"].values() if result["exception_info"]]
    assert [result["exception_info"]["exception_type"] for result in stopped] == ["AgentTimeoutError"] * 2


def test_eval_protocol_takes_the_lines_and_its_logger_the_log(lk: Lake, tmp_path: Path) -> None:
    exported(lk, tmp_path / "rows.jsonl", "eval-protocol")
    exported(lk, tmp_path / "logs.db", "eval-protocol-db")
    report = consumed("eval_protocol", EVAL_PROTOCOL, tmp_path / "rows.jsonl", tmp_path / "logs.db")
    assert (len(report["rows"]), report["stored"], len(report["logged"]), report["after"]) == (10, 10, 10, 10)
    written = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text("utf-8").splitlines()]
    for sent, row in zip(written, report["rows"], strict=True):
        # The model fills in its creation time where there is none.
        assert {key: row[key] for key in sent} == sent
    messages = {row["execution_metadata"]["rollout_id"]: row["messages"] for row in report["rows"]}
    assert {row["execution_metadata"]["rollout_id"]: row["messages"] for row in report["logged"]} == messages


def test_verl_loads_and_batches_the_prompts(lk: Lake, tmp_path: Path) -> None:
    exported(lk, tmp_path / "train.parquet", "verl")
    report = consumed("verl", VERL, tmp_path / "train.parquet", alone=("verl==0.9.1",))
    assert report["raw_prompt"] == [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Do {task}."}]
        for task in ("tools", "talk")
    ]
    assert report["data_source"] == report["ability"] == ["house", "house"]
    assert report["reward_model"] == [{"style": "rule", "ground_truth": '{"door":"open"}'}] * 2
    assert len(set(report["index"])) == 2, "verl tells prompts apart by it"
    assert [info["task_id"] for info in report["extra_info"]] == ["tools", "talk"]
