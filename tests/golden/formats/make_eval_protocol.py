"""Writes tests/golden/formats/eval_protocol with the real tool; needs its own environment:

python -m venv /tmp/env-ep && /tmp/env-ep/bin/pip install eval-protocol==0.3.33
cd /tmp && /tmp/env-ep/bin/python PROJECT/tests/golden/formats/make_eval_protocol.py
"""

import base64
import json
import sqlite3
import struct
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import zstandard
from eval_protocol.adapters.fireworks_tracing import convert_trace_dict_to_evaluation_row
from eval_protocol.dataset_logger.sqlite_dataset_logger_adapter import SqliteDatasetLoggerAdapter
from eval_protocol.models import (
    CostMetrics,
    EvalMetadata,
    EvaluateResult,
    EvaluationRow,
    ExecutionMetadata,
    InputMetadata,
    Message,
    MetricResult,
    Status,
    StepOutput,
)
from eval_protocol.types import TerminationReason
from openai.types import CompletionUsage

FOLDER = Path(__file__).parent / "eval_protocol"


def played(run: int) -> EvaluationRow:
    """A rollout against an environment with a control plane."""
    call = {
        "id": f"call_{run}",
        "type": "function",
        "function": {"name": "lake_move", "arguments": json.dumps({"action": "RIGHT"})},
    }
    step = {"step": 0, "reward": float(run), "terminated": True, "info": {}, "tool_calls": ["lake_move"]}
    messages = [
        Message(role="system", content="You play Frozen Lake."),
        Message(role="user", content="You are at the start."),
        Message.model_validate({"role": "assistant", "content": "", "tool_calls": [call]}),
        Message(role="tool", tool_call_id=f"call_{run}", content='{"position": 1}', control_plane_step=step),
        Message(role="assistant", content="I moved to the right.", reasoning_content="One step is enough."),
    ]
    row = EvaluationRow(
        messages=messages,
        tools=[{"type": "function", "function": {"name": "lake_move", "parameters": {"type": "object"}}}],
        input_metadata=InputMetadata(
            row_id="frozen-lake-7",
            completion_params={"model": "policy-1", "temperature": 0.2},
            dataset_info={"seed": 7},
        ),
        rollout_status=Status.rollout_finished(TerminationReason.CONTROL_PLANE_SIGNAL),
        evaluation_result=EvaluateResult(
            score=0.5 * run,
            reason="Reached the goal." if run else "Fell.",
            metrics={"efficiency": MetricResult(score=0.25, reason="One move.", is_score_valid=True)},
            step_outputs=[StepOutput(step_index=0, base_reward=0.125, reason="moved")],
        ),
        ground_truth={"goal": 15},
        eval_metadata=EvalMetadata(name="test_frozen_lake", version="0.1.0", num_runs=2, aggregation_method="mean"),
        created_at=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
    )
    row.execution_metadata = ExecutionMetadata(
        invocation_id="inv", experiment_id="exp", rollout_id=f"rollout-{run}", run_id=f"run-{run}"
    )
    row.execution_metadata.usage = CompletionUsage(prompt_tokens=50, completion_tokens=9, total_tokens=59)
    row.execution_metadata.cost_metrics = CostMetrics(input_cost=0.1, output_cost=0.2, total_cost_dollar=0.3)
    return row


def traced() -> EvaluationRow:
    """A row that the tool makes of a gateway's trace, with the payloads of its tokens."""
    body = b"".join(struct.pack("<if", token, logprob) for token, logprob in ((7, -0.25), (8, -0.5)))
    raw = struct.pack("<4sBBHIIQ", b"LP01", 1, 0, 0, 2, len(body), 0) + body
    payloads = {"logprobs": {"data": packed(raw)}, "prompt_token_ids": {"data": packed(json.dumps([1, 2, 3]).encode())}}
    trace = {
        "id": "trace-1",
        "input": {"messages": [{"role": "user", "content": "Say hello."}]},
        "output": [{"role": "assistant", "content": "Hello."}],
        "tags": ["rollout_id:rollout-t", "run_id:run-0", "experiment_id:exp", "invocation_id:inv", "row_id:hello"],
        "payloads": payloads,
    }
    row = convert_trace_dict_to_evaluation_row(trace)
    assert row is not None
    row.rollout_status = Status.rollout_error("The judge was not there.")
    row.created_at = datetime(2026, 1, 2, tzinfo=UTC)
    return row


def packed(raw: bytes) -> str:
    """As the gateway packs payloads."""
    return base64.b64encode(zstandard.ZstdCompressor().compress(raw)).decode()


def main() -> None:
    """Write the files."""
    FOLDER.mkdir(exist_ok=True)
    rows = [played(0), played(1), traced()]
    lines = [row.model_dump_json(exclude_none=True) for row in rows]
    (FOLDER / "rows.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    log = FOLDER / "logs.db"
    log.unlink(missing_ok=True)
    logger = SqliteDatasetLoggerAdapter(db_path=str(log))
    for row in rows:
        logger.log(row)
    logger._store._db.close()
    with closing(sqlite3.connect(log)) as db:
        db.execute("VACUUM")


if __name__ == "__main__":
    main()
