"""What the run came to, as one dictionary of plain figures, every one of them read from the lake."""

from typing import Any

import msgspec
import numpy as np

from benchmarks.proof_run.start import SFT, TRACES
from lake.errors import UsageError
from lake.lake import Lake
from lake.statistics.intervals import wilson
from lake.statistics.paired import compare_paired

RUN = "proof"
"""The loop's run; its evaluations are a run with `-eval` behind."""
_ATTEMPTS = """
SELECT collection_round, task_id, coalesce(env_return, 0) AS success, n_steps
FROM episodes WHERE run_id = ? ORDER BY collection_round, task_id
"""
_TOKENS = """
SELECT sum(len(context_ids) + len(action_ids))::BIGINT AS tokens, sum(len(action_ids))::BIGINT AS sampled
FROM tokens SEMI JOIN (SELECT episode_id FROM episodes WHERE run_id = ?) USING (episode_id)
"""
_INVALID = """
SELECT e.collection_round, avg((NOT is_action_valid)::INT) AS malformed, avg(is_error::INT) AS without_effect
FROM steps JOIN episodes AS e USING (episode_id) WHERE e.run_id = ? GROUP BY 1 ORDER BY 1
"""


def figures(lk: Lake) -> dict[str, Any]:
    """All of it. Raises UsageError: the run has not ended."""
    jobs = lk.sql("SELECT kind, job_id, counts FROM job_runs WHERE run_id = ? AND status = 'succeeded'", [RUN])
    ended = {kind: (job_id, msgspec.json.decode(counts)) for kind, job_id, counts in jobs.iter_rows() if counts}
    if "loop" not in ended:
        raise UsageError(f"the run {RUN!r} has not ended; go on with it: trajlake loop --resume")
    job, counts = ended["loop"]
    return {
        "traces": _traces(lk),
        "sft": _sft(lk),
        "rounds": _rounds(lk, job, ended["train"][0]),
        "stopped_by": counts["stopped_by"],
        "weights_sha256": counts["weights_sha256"],
        "attempts": _attempts_of(lk, job),
        "evaluation": _evaluation(lk),
        "tokens": {run: _row(lk, _TOKENS, run) for run in (RUN, f"{RUN}-eval")},
        "seconds": _seconds(lk),
        "probe": _probe(lk),
    }


def _row(lk: Lake, query: str, *parameters: Any) -> dict[str, Any]:
    return lk.sql(query, list(parameters)).row(0, named=True)


def _traces(lk: Lake) -> dict[str, Any]:
    query = "SELECT count(*) AS episodes, sum((env_return > 0)::INT)::BIGINT AS solved FROM episodes WHERE run_id = ?"
    return _row(lk, query, TRACES)


def _metrics(lk: Lake, job: int) -> dict[int, dict[str, float]]:
    rows = lk.sql("SELECT step, name, value FROM run_metrics WHERE job_id = ? AND value IS NOT NULL", [job])
    found: dict[int, dict[str, float]] = {}
    for step, name, value in rows.iter_rows():
        found.setdefault(step, {})[name] = value
    return dict(sorted(found.items()))


def _sft(lk: Lake) -> dict[str, Any]:
    job = _row(lk, "SELECT job_id, seconds FROM job_runs WHERE run_id = ? AND kind = 'train'", SFT)
    of = list(_metrics(lk, job["job_id"]).values())
    return {
        "updates": len(of),
        "tokens": int(sum(row["tokens"] for row in of)),
        "action_tokens": int(sum(row["action_tokens"] for row in of)),
        "first_loss": of[0]["loss"],
        "last_loss": of[-1]["loss"],
        "seconds": sum(row["seconds"] for row in of),
    }
