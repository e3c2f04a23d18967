"""Import, export, import: what reads again as the same episodes, and what may differ where a format has no place."""

import json
import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from lake.export.target import Choices
from lake.formats.eval_protocol import EXPORT_KEY
from testkit import eval_protocol_files, massgen_files
from testkit.copies import empty_lake
from testkit.examples import mostly_slow
from testkit.export_trials import write_job
from testkit.round_trips import assert_same, exported, records, there_and_back
from testkit.shared import CHECKOUT, shared_data

GOLDEN = CHECKOUT / "tests" / "golden" / "formats"
REAL = [
    "agent_lightning/v1_archive_20260407.jsonl",
    "art/0005.parquet",
    "atif/gen_trial_v18",
    "atif/nat",
    "chat_sft/axolotl_conversation.json",
    "chat_sft/azure_openai_train.jsonl",
    "chat_sft/v1_dpo_demo.jsonl",
    "claude_code/agentlogs_subagent.jsonl",
    "codex/agentlogs_crud.jsonl",
    "eval_protocol/datasets_2025-08-05.jsonl",
    "inspect/gen_0.3.285_addition_3epochs.eval",
    "langfuse/langgraph-python-2025-08-22.trace.json",
    "massgen/mass_coordination_20250802_235932.json",
    "mini_swe_agent/github_issue.traj.json",
    "nemo_gym/blackjack.example_rollouts.jsonl",
    "nemo_rl/train_data_step3.jsonl",
    "openai_agents/traces.jsonl",
    "openhands/v0_basic.json",
    "otlp/openinference_openai.json",
    "swe_agent/function_calling_simple.traj",
    "tau2/telecom_gpt4o_mono.json",
    "verifiers/wordle--gpt-4.1-mini_816ec3b0",
    "verifiers_v1/traces.jsonl",
    "verl/7.jsonl",
]


SAME_KEYS = "chat_sft/v1_dpo_demo.jsonl"
"""Chats again, which have no names: they need their own run."""


def test_every_format_leaves_as_our_lines_and_comes_back_as_it_was(tmp_path: Path) -> None:
    """All of them from one folder, which costs a tenth of what a job for each does."""
    for name in set(REAL) - {SAME_KEYS}:
        path, copy = shared_data("formats", *name.split("/")), tmp_path / "files" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if path.is_dir() else shutil.copy)(path, copy)
    lk = empty_lake(tmp_path / "lake")
    report = lk.ingest(tmp_path / "files", run_id="run")
    for name in set(REAL) - {SAME_KEYS}:
        assert any(ingested.episodes for file, ingested in report.by_file.items() if file.startswith(name)), name
    assert lk.ingest(shared_data("formats", *SAME_KEYS.split("/")), run_id="other").new > 0
    before = records(lk)
    after, manifest = there_and_back(lk, tmp_path, "jsonl")
    assert_same(before, after)
    assert manifest.left_out == {}
    assert lk.ingest(tmp_path / "out").present == len(before), "and the lake that it came from knows it"


@pytest.mark.parametrize("name", mostly_slow(["atif/gen_trial_v18", "atif/nat"], "atif/nat"))
def test_atif_reads_again_as_the_same_episodes(name: str, tmp_path: Path) -> None:
    lk = empty_lake(tmp_path / "lake")
    lk.ingest(shared_data("formats", *name.split("/")), run_id="run")
    after, manifest = there_and_back(lk, tmp_path, "atif")
    assert_same(records(lk), after)
    assert manifest.left_out == {}


def test_a_job_with_everything_that_atif_has_reads_again_as_the_same(tmp_path: Path) -> None:
    lk = empty_lake(tmp_path / "lake")
    report = lk.ingest(write_job(tmp_path / "nightly"))
    assert report.rejected == 0, report.first_fault
    before = records(lk)
    assert {record.relation for record in before.values()} == {None, "subagent", "continuation"}
    assert len(before) == 19
    after, manifest = there_and_back(lk, tmp_path, "atif")
    assert_same(before, after)
    assert manifest.left_out == {}
    assert lk.ingest(tmp_path / "out").present == len(before)


def as_objects(value: Any) -> Any:
    """Arguments of tool calls that are JSON text as what they say."""
    if isinstance(value, list):
        return [as_objects(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: json.loads(item) if key == "arguments" and isinstance(item, str) else as_objects(item)
        for key, item in value.items()
    }


MESSAGES = ["chat_sft/azure_openai_train.jsonl", "chat_sft/v1_dpo_demo.jsonl", "sft.jsonl", "sft.parquet"]


def chats(name: str) -> Path:
    return shared_data("formats", *name.split("/")) if "/" in name else GOLDEN / "messages" / name


@pytest.mark.parametrize(
    "name",
    mostly_slow(
        [*MESSAGES, "preference.parquet", "unpaired.jsonl"],
        "chat_sft/v1_dpo_demo.jsonl",
        "preference.parquet",
    ),
)
def test_messages_read_again_as_the_same_episodes(name: str, tmp_path: Path) -> None:
    """Arguments of tool calls may have become objects: chat templates need them."""
    lk = empty_lake(tmp_path / "lake")
    lk.ingest(chats(name))
    after, manifest = there_and_back(lk, tmp_path, "messages")
    assert_same(records(lk), after, as_objects)
    assert manifest.left_out == {}


@pytest.mark.parametrize("name", mostly_slow(MESSAGES, "chat_sft/v1_dpo_demo.jsonl"))
def test_messages_of_a_parquet_file_differ_in_what_one_type_cannot_hold(name: str, tmp_path: Path) -> None:
    """Arguments are JSON text; keys of messages that no chat API has (LLaMA-Factory's loss_weight) are left out."""

    def alike(value: Any) -> Any:
        if isinstance(value, list):
            return [alike(item) for item in value]
        if isinstance(value, dict):
            compared_items = {key: alike(item) for key, item in value.items() if key != "loss_weight"}
            return {key: item for key, item in compared_items.items() if key != "extra" or item}
        return value

    lk = empty_lake(tmp_path / "lake")
    lk.ingest(chats(name))
    after, manifest = there_and_back(lk, tmp_path, "messages-parquet")
    assert_same(records(lk), after, lambda value: alike(as_objects(value)))
    assert manifest.left_out.keys() <= {"keys of messages"}
    assert ("keys of messages" in manifest.left_out) == (name == "chat_sft/v1_dpo_demo.jsonl")


def test_verls_rollouts_read_again_as_the_same_episodes(tmp_path: Path) -> None:
    """A line names no run."""
    path = shared_data("formats", "verl", "7.jsonl")
    lk = empty_lake(tmp_path / "lake")
    lk.ingest(path, run_id="7")
    after, manifest = there_and_back(lk, tmp_path, "verl-rollouts", run_id="7")
    assert_same(records(lk), after)
    assert manifest.left_out == {}
    written = (tmp_path / "out" / "00000.jsonl").read_text("utf-8").splitlines()
    lines = path.read_text("utf-8").splitlines()
    numbered = [line.replace('"acc": true', '"acc": 1.0').replace('"acc": false', '"acc": 0.0') for line in lines]
    assert sorted(map(by_key, written)) == sorted(map(by_key, numbered)), "and as the same lines: a score is a number"


def by_key(line: str) -> str:
    return json.dumps(json.loads(line), sort_keys=True)


@pytest.mark.parametrize("name", mostly_slow(["completions_messages", "completions_text"], "completions_messages"))
def test_trls_completions_read_again_as_the_same_episodes(name: str, tmp_path: Path) -> None:
    """A row names no run. Arguments of tool calls are JSON text."""
    lk = empty_lake(tmp_path / "lake")
    lk.ingest(GOLDEN / "trl_completions" / f"{name}.parquet", run_id=name)
    after, manifest = there_and_back(lk, tmp_path, "trl-completions", run_id=name)
    assert_same(records(lk), after, as_objects)
    assert manifest.left_out == {}


ROWS = [
    *(
        eval_protocol_files.row(rollout=f"r-{number}", run=f"run-{number}", **fields)
        for number, fields in enumerate(
            [
                {},
                {"tools": None, "pid": None, "ground_truth": [1, {"a": None}]},
                {"evaluation_result": {"score": 0.5, "is_score_valid": False, "reason": None, "error": "late"}},
                {"evaluation_result": None, "created_at": "2026-01-01 10:00:00.123456", "new_field": {"x": [1.0, 1]}},
                {"input_metadata": {}, "eval_metadata": None, "rollout_status": {"status": "finished"}},
            ]
        )
    ),
    eval_protocol_files.row(
        [
            eval_protocol_files.USER,
            eval_protocol_files.END
            | {"payloads": {"logprobs": {"data": eval_protocol_files.lp01([(9, -0.5), (10, -0.1)])}}}
            | {"weight": 1, "name": None},
        ],
        rollout="tokens",
        payloads={"prompt_token_ids": {"data": eval_protocol_files.pti1([7, 8])}},
    ),
    eval_protocol_files.row(
        [eval_protocol_files.USER, eval_protocol_files.END, eval_protocol_files.USER, eval_protocol_files.END],
        rollout="turns",
        execution_metadata={
            "rollout_id": "turns",
            "extra": {
                "step_rewards": [0.5, 1],
                "assistant_turn_payloads": [
                    {"assistant_turn_index": 0, "prompt_token_ids": [1], "completion_token_ids": [2]},
                    {
                        "assistant_turn_index": 1,
                        "prompt_token_ids": [1, 2, 3],
                        "completion_token_ids": [4, 5],
                        "completion_logprobs": [-0.10536051541566849, -0.1],
                        "routing_matrices": ["x"],
                    },
                    {"assistant_turn_index": 7},
                ],
            },
        },
    ),
]


def without_keys(row: Any) -> Any:
    """A row as it may leave: without the keys of APIs."""
    row = json.loads(json.dumps(row))
    (row.get("input_metadata") or {}).get("completion_params", {}).pop("api_key", None)
    return row


@pytest.mark.parametrize("name", mostly_slow(["eval-protocol", "eval-protocol-db"], "eval-protocol"))
def test_a_log_of_eval_protocol_passes_through_unchanged(name: str, tmp_path: Path) -> None:
    log = eval_protocol_files.write_closed_log(tmp_path / "logs.db", ROWS)
    lk = empty_lake(tmp_path / "lake")
    report = lk.ingest(log, run_id="logs")
    assert (report.new, report.rejected) == (len(ROWS), 0), report.first_fault
    before = records(lk)
    after, manifest = there_and_back(lk, tmp_path, name, run_id="logs")
    assert_same(before, after)
    assert manifest.left_out == {}
    written = {row["execution_metadata"]["rollout_id"]: row for row in rows_of(tmp_path / "out")}
    assert written == {row["execution_metadata"]["rollout_id"]: without_keys(row) for row in ROWS}
    assert "hidden" not in json.dumps(list(written.values()))


def rows_of(folder: Path) -> list[Any]:
    """The rows of an export, from its lines or its log."""
    import sqlite3
    from contextlib import closing

    if (path := folder / "00000.jsonl").exists():
        return [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    with closing(sqlite3.connect(folder / "00000.db")) as db:
        log_rows = db.execute("SELECT rollout_id, data FROM evaluationrow ORDER BY id").fetchall()
    rows = [json.loads(data) for _, data in log_rows]
    assert [row["execution_metadata"]["rollout_id"] for row in rows] == [rollout for rollout, _ in log_rows]
    return rows


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("logs.db", "eval-protocol-db"),
        pytest.param("datasets_2025-08-05.jsonl", "eval-protocol", marks=pytest.mark.slow),
        pytest.param("rows.jsonl", "eval-protocol", marks=pytest.mark.slow),
        pytest.param("logs.db", "eval-protocol", marks=pytest.mark.slow),
        pytest.param("rows.jsonl", "eval-protocol-db", marks=pytest.mark.slow),
        pytest.param("datasets_2025-08-05.jsonl", "eval-protocol-db", marks=pytest.mark.slow),
    ],
)
def test_rows_that_the_tool_itself_wrote_pass_through_unchanged(source: str, name: str, tmp_path: Path) -> None:
    golden = GOLDEN / "eval_protocol" / source
    path = golden if golden.exists() else shared_data("formats", "eval_protocol", source)
    lk = empty_lake(tmp_path / "lake")
    lk.ingest(path, run_id="run")
    after, _ = there_and_back(lk, tmp_path, name, run_id="run")
    assert_same(records(lk), after)
    lines = (path if path.suffix == ".jsonl" else path.with_name("rows.jsonl")).read_text("utf-8").splitlines()
    ordered = sorted(map(by_key, lines))
    if source.startswith("datasets") and name.endswith("db"):
        return  # rows of 2025 have their ids at the top
    assert sorted(map(by_key, map(json.dumps, rows_of(tmp_path / "out")))) == ordered


def test_advantages_leave_with_rows_and_are_not_read_back(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from lake.cli import trajlake

    lk = empty_lake(tmp_path / "lake")
    lk.ingest(eval_protocol_files.write_closed_log(tmp_path / "logs.db", ROWS[:4]))
    done = CliRunner().invoke(trajlake, ["credit", "rloo", "--lake", lk.uri])
    assert done.exit_code == 0, done.output
    after, manifest = there_and_back(lk, tmp_path, "eval-protocol", run_id="logs")
    assert manifest.jobs["credit"]["estimator"] == "rloo"
    for row in rows_of(tmp_path / "out"):
        assert len(row["execution_metadata"]["extra"][EXPORT_KEY]["advantages"]) == 3
    assert_same(records(lk), after)


def test_a_tree_of_massgens_traces_passes_through_unchanged(tmp_path: Path) -> None:
    traces = [
        massgen_files.streamed(),
        massgen_files.prompted(),
        massgen_files.coordinated(),
        massgen_files.failed(),
    ]
    massgen_files.write_traces(tmp_path / "rl_data", traces)
    lk = empty_lake(tmp_path / "lake")
    lk.ingest(tmp_path / "rl_data" / "traces", run_id="run")
    exported(lk, tmp_path / "out", "massgen")
    mine, theirs = (
        {path.relative_to(root): path.read_bytes() for path in root.rglob("*.json")}
        for root in (tmp_path / "out", tmp_path / "rl_data")
    )
    mine.pop(Path("manifest.json"))
    index = Path("metadata", "trace_index.json")
    assert json.loads(mine.pop(index)) == json.loads(theirs.pop(index))
    assert mine == theirs, "byte for byte"
    other_lake = empty_lake(tmp_path / "other")
    other_lake.ingest(tmp_path / "out" / "traces", run_id="run")
    assert_same(records(lk), records(other_lake))


def test_scores_of_massgens_traces_are_reward_spans_and_the_traces_are_read_as_they_were(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from lake.cli import trajlake

    (tmp_path / "rl_data").mkdir()
    traces = [massgen_files.streamed(), massgen_files.prompted(), massgen_files.coordinated()]
    traces[2] |= {"spans": traces[2]["spans"][:2], "total_reward": None}
    del traces[0]["metadata"], traces[0]["total_reward"]
    for trace in traces:
        (tmp_path / "rl_data" / f"{trace['trace_id']}.json").write_text(json.dumps(trace))
    lk = empty_lake(tmp_path / "lake")
    lk.ingest(tmp_path / "rl_data", run_id="run")
    for scorer in ("tool_success", "coordination"):
        done = CliRunner().invoke(trajlake, ["score", scorer, "--lake", lk.uri])
        assert done.exit_code == 0, done.output
    manifest = exported(lk, tmp_path / "out", "massgen")
    written = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "out").rglob("traces/*/*/*.json")}
    trace_by_id = {trace["trace_id"]: trace for trace in traces}
    scored = "SELECT scorer, step_index, value FROM current_scores WHERE value IS NOT NULL AND scorer != 'human'"
    values = sorted(lk.sql(f"{scored} AND scorer IN ('tool_success', 'coordination')")["value"])
    added = [
        span for name, trace in written.items() for span in trace["spans"] if span not in trace_by_id[name]["spans"]
    ]
    assert sorted(span["reward"] for span in added) == values
    assert {tuple(span) for span in added} == {tuple(massgen_files.span("reward", 0))}, "keys of the tool's class alone"
    coordination = written[traces[2]["trace_id"]]
    assert coordination["total_reward"] == pytest.approx(1.4 + 1.0), "one voter agrees with itself"
    index = json.loads((tmp_path / "out" / "metadata" / "trace_index.json").read_text())["traces"]
    assert index[traces[2]["trace_id"]]["total_reward"] == coordination["total_reward"]
    nulls = lk.sql("SELECT count(*) FROM current_scores WHERE value IS NULL").item()
    assert manifest.left_out.get("scores without a value", 0) == nulls
    other_lake = empty_lake(tmp_path / "other")
    assert other_lake.ingest(tmp_path / "out" / "traces", run_id="run").rejected == 0
    before, after = records(lk), records(other_lake)
    facts = "SELECT content_hash FROM episodes ORDER BY episode_id"
    assert lk.sql(facts).equals(other_lake.sql(facts)), "the episodes are the same"
    again = {(key, score.scorer, score.step_index): score.value for key in after for score in after[key].scores}
    for key, record in before.items():
        assert {(key, score.scorer, score.step_index): score.value for score in record.scores}.items() <= again.items()
    assert sum(name in ("tool_success", "coordination") for _, name, _ in again) == len(values)


def test_the_total_of_a_scored_massgen_trace_is_the_score_that_counts(tmp_path: Path) -> None:
    massgen_files.write_traces(tmp_path / "rl_data", [massgen_files.coordinated()])
    lk = empty_lake(tmp_path / "lake")
    lk.ingest(tmp_path / "rl_data" / "traces", run_id="run")
    (episode_id,) = lk.sql("SELECT episode_id FROM episodes")["episode_id"]
    lk.add_scores(pl.DataFrame({"episode_id": [episode_id], "value": [0.25]}), name="judge")
    exported(lk, tmp_path / "out", "massgen", choices=Choices(score="judge"))
    (path,) = (tmp_path / "out").rglob("traces/*/*/*.json")
    assert json.loads(path.read_text())["total_reward"] == 0.25
