"""Files as eval-protocol writes them: its SQLite log, its lines, playback files, and the gateway's token payloads.

Built from the tool's documented structures alone, so that readers and writers of the format can be tested with them.
"""

import base64
import json
import sqlite3
import struct
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa

SYSTEM = {"role": "system", "content": "Play."}
USER = {"role": "user", "content": "Where to?"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "move", "arguments": '{"to": "left"}'}}],
}
MOVED = {
    "role": "tool",
    "tool_call_id": "c1",
    "content": "You moved.",
    "control_plane_step": {"step": 0, "reward": 0.25, "terminated": False, "info": {}, "tool_calls": ["move"]},
}
THERE = {
    "role": "tool",
    "tool_call_id": "c1",
    "content": "You are there.",
    "control_plane_step": {"step": 1, "reward": 1.0, "terminated": True, "termination_reason": "stop"},
}
END = {"role": "assistant", "content": "I am there.", "reasoning_content": "Done."}
CHAT = [SYSTEM, USER, CALL, MOVED, CALL, THERE, END]


def row(
    messages: list[Any] | None = None, *, rollout: str = "r-1", run: str | None = "run-1", **fields: Any
) -> dict[str, Any]:
    """An evaluation row of today."""
    return {
        "messages": CHAT if messages is None else messages,
        "tools": [{"type": "function", "function": {"name": "move"}}],
        "input_metadata": {
            "row_id": "row-a",
            "completion_params": {"model": "m-1", "temperature": 0.5, "api_key": "hidden"},
            "dataset_info": {"seed": 42, "environment_context": {"game": "lake"}},
        },
        "rollout_status": status(100, "Rollout finished", "stop"),
        "ground_truth": {"goal": "there"},
        "evaluation_result": {
            "score": 0.75,
            "is_score_valid": True,
            "reason": "It got there.",
            "metrics": {"speed": {"score": 0.5, "is_score_valid": True, "reason": "Slow.", "data": {"moves": 2}}},
            "step_outputs": [
                {"step_index": 0, "base_reward": 0.1, "terminated": False, "metrics": {}},
                {"step_index": "2", "base_reward": 0.9, "terminated": True, "metrics": {"end": 1}, "reason": "End."},
                {"step_index": "after", "base_reward": 0.3},
            ],
            "agg_score": 0.6,
        },
        "execution_metadata": {
            "invocation_id": "inv-1",
            "experiment_id": "exp-1",
            "rollout_id": rollout,
            "run_id": run,
            "usage": {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120},
            "cost_metrics": {"input_cost": 0.1, "output_cost": 0.2, "total_cost_dollar": 0.3},
            "rollout_duration_seconds": 2.5,
            "finish_reason": "stop",
        },
        "created_at": "2026-01-01T00:00:00Z",
        "eval_metadata": {"name": "test_lake", "version": "0.1", "num_runs": 2, "aggregation_method": "mean"},
        "pid": 7,
    } | fields


def status(code: int, message: str, reason: str | None = None, error: str | None = None) -> dict[str, Any]:
    """A rollout's status."""
    kind, domain = "type.googleapis.com/google.rpc.ErrorInfo", "evalprotocol.io"
    details = []
    if reason is not None:
        about = {"termination_reason": reason}
        details.append({"@type": kind, "reason": "TERMINATION_REASON", "domain": domain, "metadata": about})
    if error is not None:
        about = {"error_message": error}
        details.append({"@type": kind, "reason": "EXTRA_INFO", "domain": domain, "metadata": about})
    return {"code": code, "message": message, "details": details}


def write_log(path: Path, rows: list[Any], *, journal: str = "wal") -> sqlite3.Connection:
    """The tool's log with rows in it, and the connection of the tool that still has it open."""
    db = sqlite3.connect(path, isolation_level=None)
    db.execute(f"PRAGMA journal_mode = {journal}")
    db.execute(
        'CREATE TABLE "evaluationrow" ("id" INTEGER NOT NULL PRIMARY KEY, "rollout_id" VARCHAR(255) NOT NULL, '
        '"data" JSON NOT NULL, "updated_at" REAL)'
    )
    db.execute('CREATE UNIQUE INDEX "evaluationrow_rollout_id" ON "evaluationrow" ("rollout_id")')
    for number, value in enumerate(rows):
        add_to_log(db, value, f"rollout-{number}")
    return db


def add_to_log(db: sqlite3.Connection, value: Any, rollout: str) -> None:
    """One more row; a text is written as it is."""
    text = value if isinstance(value, str) else json.dumps(value)
    db.execute("INSERT INTO evaluationrow (rollout_id, data, updated_at) VALUES (?, ?, 0.0)", (rollout, text))


def write_closed_log(path: Path, rows: list[Any], *, journal: str = "wal") -> Path:
    """The tool's log after the tool has gone."""
    with closing(write_log(path, rows, journal=journal)):
        return path


def lp01(tokens: list[tuple[int, float]], *, version: int = 1) -> str:
    """Ids and log-probabilities of a completion, as the tracing gateway packs them."""
    body = b"".join(struct.pack("<if", token, logprob) for token, logprob in tokens)
    return _packed(struct.pack("<4sBBHIIQ", b"LP01", version, 0, 0, len(tokens), len(body), 0) + body)


def pti1(ids: list[int]) -> str:
    """Ids of a prompt, as the tracing gateway packs them."""
    body = struct.pack(f"<{len(ids)}i", *ids)
    return _packed(struct.pack("<4sBBHIIQ", b"PTI1", 1, 0, 0, len(ids), len(body), 0) + body)


def pti_json(ids: list[int]) -> str:
    """The same, as newer gateways pack them."""
    return _packed(json.dumps(ids).encode())


def _packed(raw: bytes) -> str:
    return base64.b64encode(pa.compress(raw, codec="zstd", asbytes=True)).decode()
