"""The declared formats that come with Trajlake: files in the layouts of their tools, and what is read of them."""

import gzip
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace

from lake import ids
from lake.errors import FormatError
from lake.formats.base.source import Input
from lake.formats.declared import load_declaration
from lake.formats.registry import choose_format
from lake.records import EpisodeRecord, identify
from testkit.declared import DeclaredInput, describe, lines
from testkit.formats import read_file
from testkit.shared import shared_data
from unit import declared_inputs_agents as agents
from unit import declared_inputs_rows as rows

MODULES = ("declared_inputs_agents", "declared_inputs_rows", "declared_inputs_stores")
INPUTS: list[DeclaredInput] = [
    case
    for module in MODULES
    if (Path(__file__).parent / f"{module}.py").exists()
    for case in import_module(f"unit.{module}").INPUTS
]


def each(*fields: str) -> pytest.MarkDecorator:
    """Parametrise a test by the inputs that have these fields."""
    cases = [case for case in INPUTS if all(getattr(case, field) for field in fields)]
    return pytest.mark.parametrize("case", cases, ids=[f"{case.format}-{Path(case.file).name}" for case in cases])


def replaced(case: DeclaredInput, change: tuple[str, str]) -> DeclaredInput:
    assert case.text.count(change[0]) == 1
    return case._replace(text=case.text.replace(*change))


@each()
def test_a_file_is_recognised_and_read(case: DeclaredInput, tmp_path: Path) -> None:
    path = case.write(tmp_path)
    records, rejects = read_file(path)
    assert choose_format(path).name == case.format
    assert rejects == []
    assert [describe(record) for record in records] == case.episodes
    assert not any("unknown_entries" in (record.extra or {}) for record in records)
    list(choose_format(path).read_items(file := Input(path, "run")))
    assert "step key" not in {note.subject for note in file.notes}


@each()
def test_a_packed_file_is_read_like_the_text_in_it(case: DeclaredInput, tmp_path: Path) -> None:
    path = case.write(tmp_path)
    if path.suffix != ".db":
        plain, _ = read_file(path, "run")
        packed = path.rename(path.with_name(f"{path.name}.gz"))
        packed.write_bytes(gzip.compress(packed.read_bytes(), mtime=0))
        assert choose_format(packed).name == case.format
        assert read_file(packed, "run") == (plain, [])


@each("sibling")
def test_another_rollout_of_a_task_is_a_sibling(case: DeclaredInput, tmp_path: Path) -> None:
    (first, *_), _ = read_file(case.write(tmp_path / "a"), "run")
    (moved, *_), _ = read_file(case.write(tmp_path / "b"), "run")
    assert case.sibling is not None
    other = case.sibling[0] in case.file and case._replace(file=case.file.replace(*case.sibling))
    (second, *_), _ = read_file((other or replaced(case, case.sibling)).write(tmp_path / "c"), "run")
    assert (moved.task_id, moved.rollout_index) == (first.task_id, first.rollout_index)
    assert second.task_id == first.task_id
    assert second.rollout_index != first.rollout_index


@each("keys")
def test_keys_come_from_the_file(case: DeclaredInput, tmp_path: Path) -> None:
    records, _ = read_file(case.write(tmp_path), "run")
    for record, (run, task, agent, parent) in zip(records, case.keys, strict=True):
        assert (record.run_id, record.agent_id) == (run, agent)
        assert task is None or record.task_id == task
        key = replace(record, task_id=parent or "", agent_id=None, rollout_index=0)
        assert record.parent_episode_id == (parent and ids.to_text(identify(key, record.run_id or "run").episode_id))


@each()
def test_a_file_that_belongs_to_another_says_so(case: DeclaredInput, tmp_path: Path) -> None:
    case.write(tmp_path)
    for name in case.beside:
        with pytest.raises(FormatError, match="holds no trajectory"):
            choose_format(tmp_path / name)


@each("cut")
def test_of_a_cut_file_what_is_complete_is_read(case: DeclaredInput, tmp_path: Path) -> None:
    assert case.cut is not None
    records, rejects = read_file(case._replace(text=case.text[: -case.cut]).write(tmp_path))
    assert {reject.reason for reject in rejects} == {"truncated"}
    for record, episode in zip(records, case.episodes, strict=False):
        steps = [[step.get(name) for name in ("saw", "said", "calls")] for step in describe(record)["steps"]]
        assert (
            steps == [[step.get(name) for name in ("saw", "said", "calls")] for step in episode["steps"]][: len(steps)]
        )


@each("unknown")
def test_an_unknown_entry_is_kept_and_reported(case: DeclaredInput, tmp_path: Path) -> None:
    assert case.unknown is not None
    records, _ = read_file(replaced(case, case.unknown).write(tmp_path))
    assert len([entry for record in records for entry in (record.extra or {}).get("unknown_entries", [])]) == 1


# ---------------------------------------------------------------- sessions of coding agents


def test_pictures_stay_parts_of_what_the_model_saw(tmp_path: Path) -> None:
    pictures = {}
    for case in agents.INPUTS:
        records, _ = read_file(case.write(tmp_path / case.format))
        steps = [step for record in records for step in record.steps]
        messages = [message for step in steps for message in step.context]
        messages += [message for record in records for message in record.initial_messages or ()]
        parts = [part for m in messages if isinstance(m.get("content"), list) for part in m["content"]]
        pictures[case.format] = [part for part in parts if "inlineData" in part or part.get("type") == "image"]
    assert {name for name, parts in pictures.items() if parts} == {"copilot_cli", "gemini_cli", "pi"}


def test_lines_without_ids_follow_one_another(tmp_path: Path) -> None:
    said = {"role": "assistant", "content": [{"type": "text", "text": "3"}], "provider": "p", "stopReason": "stop"}
    entries = [
        {"type": "session", "id": "s", "timestamp": "2025-11-20T00:00:00Z", "cwd": "/w"},
        *({"type": "message", "timestamp": "2025-11-20T00:00:01Z", "message": message}
          for message in ({"role": "user", "content": "1 + 2"}, said, {"role": "user", "content": "Again."}, said)),
    ]  # fmt: skip
    (tmp_path / "s.jsonl").write_text(lines(*entries))
    (record,), _ = read_file(tmp_path / "s.jsonl")
    assert [(step.state, step.action) for step in record.steps] == [("1 + 2", "3"), ("Again.", "3")]


def test_a_history_that_a_person_cleared_is_no_context(tmp_path: Path) -> None:
    case = next(case for case in agents.INPUTS if case.format == "kimi_cli")
    clear = {"timestamp": 1767323060.0, "message": {"type": "TurnBegin", "payload": {"user_input": "/clear"}}}
    again = case.text[case.text.index('{"timestamp"') :].replace("Compare", "Name").replace("r-", "q-")
    (record,), _ = read_file(case._replace(text=case.text + lines(clear) + again).write(tmp_path))
    assert [step.state for step in record.steps if (step.extra or {}).get("history")] == ["", "Name a and b.", ""]
    assert len(record.steps) == 6


def test_other_files_of_a_tool_are_named_for_what_they_are(tmp_path: Path) -> None:
    others = {
        "context.jsonl": lines({"role": "_checkpoint", "id": 0}, {"role": "user", "content": "Hello."}),
        "logs.json": f'[{{"sessionId": "{agents.SESSION}", "messageId": 0, "type": "user", "message": "Hello."}}]',
    }
    for name, text in others.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(FormatError, match="holds no trajectory"):
            choose_format(tmp_path / name)


def test_results_of_a_published_amp_thread_are_texts() -> None:
    (record,), rejects = read_file(shared_data("cases", "12_amp_thread", "amp", "T-1.json"))
    assert rejects == []
    assert describe(record)["after"] == [("tool", "a.py")]


@pytest.mark.parametrize("name", ["copilot_cli/events.jsonl", "gemini_cli/session-2026-01-01T10-00-f86f5318.json"])
def test_documented_layouts_are_read(name: str) -> None:
    (record,), rejects = read_file(shared_data("cases", "unread", *name.split("/")))
    assert rejects == []
    assert [(step.state, step.action, len(step.tool_calls or ())) for step in record.steps] == [
        ("list", "", 1),
        ("a.py", "one file", 0),
    ]


# ---------------------------------------------------------------- rows and traces


def read_input(name: str, tmp_path: Path, index: int = 0) -> list[EpisodeRecord]:
    case = [case for case in rows.INPUTS if case.format == name][index]
    return read_file(case.write(tmp_path), "run")[0]


def test_prompts_of_a_batch_are_in_the_input_next_to_its_output(tmp_path: Path) -> None:
    (tmp_path / "input.jsonl").write_text(rows.BATCH_INPUT)
    failed = {"id": "b", "custom_id": "other", "response": None, "error": {"code": "batch_expired"}}
    (tmp_path / "output.jsonl").write_text(rows.BATCH_OUTPUT + lines(failed))
    (six, eight, wings), (reject,) = read_file(tmp_path / "output.jsonl")
    assert [record.task_id for record in (six, eight, wings)] == ["legs", "legs", "wings"]
    assert (six.rollout_index, eight.rollout_index) == (0, 1)
    assert [record.steps[0].state for record in (six, wings)] == [rows.ASKED, "How many wings has a fly?"]
    assert all(record.steps[0].trainable for record in (six, eight, wings))
    assert six.sampling == {"n": 2, "temperature": 0.5}
    assert wings.initial_messages is not None
    assert wings.initial_messages[0] == {"role": "system", "content": "Be short."}
    assert "batch_expired" in reject.raw
    with pytest.raises(FormatError, match="ingest the output"):
        choose_format(tmp_path / "input.jsonl")


def test_dumps_of_trainers_name_their_groups(tmp_path: Path) -> None:
    def list_groups(name: str, index: int = 0) -> list[tuple[str, int | None]]:
        return [(record.task_id, record.collection_round) for record in read_input(name, tmp_path, index)]

    assert list_groups("rllm") == [("ants:solver", None), ("ants:judge", None)]
    assert list_groups("areal") == [("7", 3), ("7", 3)]
    assert list_groups("roll") == [("p1", 5), ("p1", 5)]
    assert list_groups("roll", 1) == [("zoo_3_2_42", 5), ("zoo_3_2_42", 5)]
    (first, _), (second, _) = list_groups("slime")
    assert first != second, "two groups of one prompt are two tasks"
    same, _, other = list_groups("skyrl")
    assert same[1] == 8
    assert same != other, "the ground truths of one prompt differ"


def test_samples_of_an_evaluation_are_no_siblings_of_those_of_training(tmp_path: Path) -> None:
    case = next(case for case in rows.INPUTS if case.format == "areal")
    evaluation = case._replace(file=case.file.replace("rollout", "eval-rollout"))
    (trained, _), _ = read_file(case.write(tmp_path))
    (evaluated, _), _ = read_file(evaluation.write(tmp_path))
    assert (evaluated.task_id, evaluated.split) == ("eval-7", "eval")
    assert trained.task_id != evaluated.task_id


def test_dumps_of_trainers_have_their_exact_tokens(tmp_path: Path) -> None:
    sample, removed = read_input("slime", tmp_path)
    tokens = sample.steps[0].tokens
    assert tokens is not None
    assert (tokens.context_ids, tokens.action_ids) == ([1, 2], [3, 4, 5])
    assert (tokens.action_mask, tokens.action_logprobs) == ([True, False, True], [-0.5, 0.0, -1.5])
    assert [record.steps[0].policy_version for record in (sample, removed)] == [3, 3]
    look, six = read_input("rllm", tmp_path)[0].steps
    assert look.tokens is not None
    assert six.tokens is not None
    assert (look.tokens.context_ids, look.tokens.action_ids) == ([1, 2], [3])
    # The second prompt is the first one with its answer, and one token more.
    assert (six.tokens.context_ids, six.tokens.prefix_step_index, six.tokens.action_ids) == ([4], 0, [5, 6])
    assert (look.reward, six.reward, six.policy_version) == (0.0, 1.0, 4)


def test_traces_know_their_task_and_its_truth(tmp_path: Path) -> None:
    (langsmith,), (mlflow,), (weave,), (braintrust,) = (
        read_input(name, tmp_path) for name in ("langsmith", "mlflow", "weave", "braintrust")
    )
    assert (langsmith.task_id, langsmith.run_id) == ("ex-1", "ants-1")
    assert (braintrust.run_id, braintrust.ground_truth) == ("exp-1", "6")
    assert (mlflow.task_id, mlflow.ground_truth) == ("tr-1", [{"name": "expected", "value": "6"}])
    assert weave.task_id == "w-1"
    assert [span.kind for span in braintrust.spans].count("llm") == 2, "a scorer's call is a judge's"
    for record in (langsmith, mlflow, weave, braintrust):
        assert [span.step_index for span in record.spans if span.kind == "tool"] == [0]
        assert record.environment is not None


@pytest.mark.parametrize(
    ("name", "entries"), [("langsmith", rows.LANGSMITH_RUNS), ("braintrust", rows.BRAINTRUST_ROWS)]
)
def test_a_bulk_export_holds_objects_as_texts(name: str, entries: list[dict[str, Any]], tmp_path: Path) -> None:
    columns = sorted({key for entry in entries for key in entry})
    texts = [
        {key: json.dumps(field) if isinstance(field := entry.get(key), dict | list) else field for key in columns}
        for entry in entries
    ]
    pq.write_table(pa.Table.from_pylist(texts), tmp_path / "export.parquet")
    (case,) = (case for case in rows.INPUTS if case.format == name)
    records, rejects = read_file(tmp_path / "export.parquet")
    assert rejects == []
    assert [describe(record) for record in records] == case.episodes


def test_a_trace_without_contents_is_no_trajectory(tmp_path: Path) -> None:
    fields = ("id", "run_type", "trace_id", "parent_run_id", "start_time")
    runs = [{("run_id" if key == "id" else key): run[key] for key in fields} for run in rows.LANGSMITH_RUNS]
    (tmp_path / "runs.jsonl").write_text(lines(*runs))
    with pytest.raises(FormatError, match="without inputs and outputs"):
        choose_format(tmp_path / "runs.jsonl")


def test_columns_of_different_lengths_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rollout_dump_data.step_5.jsonl").write_text(lines(rows.ROLL_RLVR | {"scores": [1.0]}))
    records, (reject,) = read_file(tmp_path / "rollout_dump_data.step_5.jsonl")
    assert records == []
    assert "scores 1" in reject.message


def test_results_of_a_benchmark_without_an_answer_are_refused(tmp_path: Path) -> None:
    failed = {"id": "parallel_2", "result": "Error during inference: no answer", "traceback": "..."}
    path = tmp_path / "BFCL_v4_parallel_result.json"
    path.write_text(lines(rows.BFCL_ALONE, failed))
    (record,), (reject,) = read_file(path)
    assert (record.task_id, record.environment, record.completion_tokens) == ("parallel_1", "parallel", 9)
    assert "no decision" in reject.message
    path.write_text(
        lines({"accuracy": 0.5, "correct_count": 1, "total_count": 2}, {"id": "parallel_2", "valid": False})
    )
    with pytest.raises(FormatError, match="score file"):
        choose_format(path)


@pytest.mark.parametrize(
    "spans", ['list = "runs"\ntrace = "id"', 'list = "runs"\ntrace = "id"\nid = "id"\ncolour = "red"']
)
def test_a_declaration_of_spans_has_their_ids_and_known_fields(spans: str, tmp_path: Path) -> None:
    head = 'name = "n"\ndescription = "d"\nsource = "s"\n[recognise]\nkinds = ["lines"]\nkeys = ["runs"]\n[spans]\n'
    (tmp_path / "n.toml").write_text(head + spans)
    with pytest.raises(FormatError, match="spans"):
        load_declaration(tmp_path / "n.toml")
