"""What the run came to, as one dictionary of plain figures, every one of them read from the lake."""

from typing import Any

import msgspec
import numpy as np

from benchmarks.proof_run.start import SFT, TRACES
from lake.errors import UsageError
from lake.lake import Lake
from lake.statistics import compare_paired, wilson_interval

_ATTEMPTS = """
SELECT collection_round, task_id, coalesce(env_return >= 1, false)::DOUBLE AS success, num_steps
FROM episodes WHERE run_id = ? ORDER BY collection_round, task_id
"""
_TOKENS = """
SELECT sum(len(context_ids) + len(action_ids))::BIGINT AS tokens, sum(len(action_ids))::BIGINT AS sampled
FROM tokens SEMI JOIN (SELECT episode_id FROM episodes WHERE run_id = ?) USING (episode_id)
"""
_STEPS = "SELECT collection_round, avg(num_steps) FROM episodes WHERE run_id = ? GROUP BY 1"
_INVALID = """
SELECT e.collection_round, avg((NOT is_action_valid)::INT) AS malformed, avg(state_is_error::INT) AS refused
FROM steps JOIN episodes AS e USING (episode_id) WHERE e.run_id = ? GROUP BY 1 ORDER BY 1
"""
_SECONDS = """
SELECT kind, sum(seconds), min(started_at), max(ended_at) FROM job_runs WHERE run_id IN (?, ?) GROUP BY kind
"""
_UPDATES = """
SELECT DISTINCT optimizer_step, collection_round FROM trained_batches JOIN episodes USING (episode_id)
WHERE job_id = ? ORDER BY 1
"""


def figures(lk: Lake, run: str) -> dict[str, Any]:
    """All of it, for a loop's run; its evaluations are a run with `-eval` behind.

    Raises:
        UsageError: the run has not ended.
    """
    jobs = lk.sql("SELECT kind, job_id, counts FROM job_runs WHERE run_id = ? AND status = 'succeeded'", [run])
    ended = {kind: (job_id, msgspec.json.decode(counts)) for kind, job_id, counts in jobs.iter_rows() if counts}
    if "loop" not in ended:
        raise UsageError(f"the run {run!r} has not ended; go on with it: trajlake loop --resume")
    job, counts = ended["loop"]
    return {
        "traces": _traces(lk),
        "sft": _sft(lk),
        "rounds": _rounds(lk, run, job, ended["train"][0]),
        "stopped_by": counts["stopped_by"],
        "weights_sha256": counts["weights_sha256"],
        "attempts": _attempts_of(lk, job),
        "evaluation": _evaluation(lk, f"{run}-eval"),
        "tokens": {"rounds": _row(lk, _TOKENS, run), "evaluations": _row(lk, _TOKENS, f"{run}-eval")},
        "seconds": _seconds(lk, run),
        "probe": _probe(lk, run),
    }


def _row(lk: Lake, query: str, *parameters: Any) -> dict[str, Any]:
    return lk.sql(query, list(parameters)).row(0, named=True)


def _traces(lk: Lake) -> dict[str, Any]:
    query = "SELECT count(*) AS episodes, sum((env_return > 0)::INT)::BIGINT AS solved FROM episodes WHERE run_id = ?"
    return _row(lk, query, TRACES)


def _metrics(lk: Lake, job: int) -> dict[int, dict[str, float]]:
    rows = lk.sql("SELECT step, name, value FROM run_metrics WHERE job_id = ? AND value IS NOT NULL", [job])
    rounds: dict[int, dict[str, float]] = {}
    for step, name, value in rows.iter_rows():
        rounds.setdefault(step, {})[name] = value
    return dict(sorted(rounds.items()))


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


def _rounds(lk: Lake, run: str, loop_job: int, train_job: int) -> list[dict[str, float]]:
    """A row a round: what was collected, and the mean of its updates."""
    of_loop, updates = _metrics(lk, loop_job), _metrics(lk, train_job)
    invalid = {row[0]: row[1:] for row in lk.sql(_INVALID, [run]).iter_rows()}
    steps = dict(
        lk.sql("SELECT collection_round, avg(num_steps) FROM episodes WHERE run_id = ? GROUP BY 1", [run]).rows()
    )
    spans = lk.sql(_UPDATES, [train_job]).rows()
    rows = []
    for number, row in of_loop.items():
        if "loop/return" not in row:
            continue  # the last weights, which only an evaluation played
        mine = [updates[step] for step, of_round in spans if of_round == number]
        names = ("entropy", "ratio_ess", "tokens", "action_tokens", "seconds", "learning_rate")
        means = {name: float(np.mean([update[name] for update in mine])) for name in names if mine}
        rows.append(
            {"round": number, "updates": len(mine), "steps": steps[number]}
            | {name.removeprefix("loop/"): value for name, value in row.items() if name.startswith("loop/")}
            | {"malformed": invalid[number][0], "refused": invalid[number][1]}
            | {f"update_{name}": value for name, value in means.items()}
        )
    return rows


def _evaluation(lk: Lake, run: str) -> dict[str, Any]:
    """The held-out starts before and after, start by start."""
    attempts = lk.sql(_ATTEMPTS, [run]).rows()
    rounds = sorted({row[0] for row in attempts})
    ends = (rounds[0], rounds[-1])
    before, after = ({task: won for at, task, won, _ in attempts if at == number} for number in ends)
    tasks = sorted(before)
    compared = compare_paired(np.array([(after[task], before[task]) for task in tasks], np.float64), seed=0)
    pairs = [(before[task] >= 1, after[task] >= 1) for task in tasks]
    return {
        "starts": len(tasks),
        "before": sum(before for before, _ in pairs),
        "after": sum(after for _, after in pairs),
        "gained": pairs.count((False, True)),
        "lost": pairs.count((True, False)),
        "interval_before": wilson_interval(sum(before for before, _ in pairs) / len(tasks), len(tasks)),
        "interval_after": wilson_interval(sum(after for _, after in pairs) / len(tasks), len(tasks)),
        "difference": compared.difference,
        "low": compared.low,
        "high": compared.high,
        "p": compared.p,
        "test": compared.test,
        "steps": [
            float(np.mean([steps for at, _, _, steps in attempts if at == number]))
            for number in (rounds[0], rounds[-1])
        ],
        "invalid": [row[1:] for row in lk.sql(_INVALID, [run]).iter_rows()],
    }


def _attempts_of(lk: Lake, job: int) -> int:
    """How often the loop was started, without starts that came to no round."""
    attempts: int = lk.sql("SELECT count(DISTINCT attempt) FROM metrics WHERE job_id = ?", [job]).item()
    return attempts


def _seconds(lk: Lake, run: str) -> dict[str, float]:
    """Wall time of the run's jobs by kind, and from the start of its first to the end of its last."""
    query = (
        "SELECT kind, sum(seconds), min(started_at), max(ended_at) FROM job_runs WHERE run_id IN (?, ?) GROUP BY kind"
    )
    rows = lk.sql(query, [run, f"{run}-eval"]).rows()
    duration = max(row[3] for row in rows) - min(row[2] for row in rows)
    return {row[0]: row[1] for row in rows} | {"whole": duration.total_seconds()}


def _probe(lk: Lake, run: str) -> dict[str, float]:
    """What the parity probes found, over all pushes."""
    query = """
    SELECT name, count(*), avg(value), max(value) FROM run_metrics
    WHERE kind = 'push' AND run_id = ? AND value IS NOT NULL GROUP BY name
    """
    return {name: {"pushes": n, "mean": mean, "max": most} for name, n, mean, most in lk.sql(query, [run]).iter_rows()}
