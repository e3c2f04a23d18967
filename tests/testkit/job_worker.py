"""Jobs on an executor, in its own process; some of its workers, or a whole node, get killed.

    python -m testkit.job_worker URI STORAGE EXECUTOR FATE FOLDER JOB ...

STORAGE are storage options as JSON. Each JOB is `NAME ARGUMENTS` as JSON, of `JOBS`; a line of JSON with its report is
printed for each. The process that has the second part meets its FATE: `none`; `before` its task or `after` it (its
answer is lost) it is killed; `node`: so is the node that it belongs to; `wait`: every part leaves a mark in FOLDER, and
the second waits for a file `go` there, so that the driver can be killed in the meantime; `late`: so does the fourth in
the order of the job, whichever worker has it, and what comes before it gets done.
"""

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec

import lake
from lake import Lake
from lake.execution import make_executor
from lake.execution.executor import Executor

ONE_COMMIT = 3600.0
"""Seconds between commits: so that there is one, however long a cluster takes to find out that a node is lost."""


class DoomedExecutor:
    """An executor some of whose parts are killed."""

    def __init__(self, inner: Executor, fate: str, folder: str) -> None:
        self._inner = inner
        self._fate = fate
        self._folder = folder
        self.workers = inner.workers
        self.is_here = inner.is_here
        self.most_bytes = 0
        """That were in the object stores of a cluster when a result came."""

    def map(self, task: Any, items: Iterable[Any], *, without: Collection[str] = ()) -> Iterator[Any]:
        doomed = ((task, self._fate, self._folder, index, item) for index, item in enumerate(items, 1))
        for result in self._inner.map(run_doomed, doomed, without=without):
            self.most_bytes = max(self.most_bytes, _object_store_bytes())
            yield result

    def on_nodes(self, task: Any, item: Any) -> Any:
        return self._inner.on_nodes(task, item)


def run_doomed(item: tuple[Any, str, str, int, Any]) -> Any:
    """Run a part, and meet its fate."""
    task, fate, folder, index, part = item
    number = _number(folder)
    if (number, fate) == (2, "wait") or (index, fate) == (4, "late"):
        while not Path(folder, "go").exists():
            time.sleep(0.02)
    if number == 2 and fate in ("before", "after", "node"):
        Path(folder, "lost").touch()
    if number == 2 and fate == "node":
        os.kill(os.getppid(), signal.SIGKILL)  # the raylet
    if number == 2 and fate in ("before", "node"):
        os.kill(os.getpid(), signal.SIGKILL)
    result = task(part)
    if number == 2 and fate == "after":
        os.kill(os.getpid(), signal.SIGKILL)
    return result


def _number(folder: str) -> int:
    """Which part this is, by the marks that parts leave."""
    for number in range(1, 1000):
        try:
            os.close(os.open(Path(folder) / f"part-{number}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        return number
    raise AssertionError("more parts than a test has")


def score(lk: Lake, executor: Executor | None, target: str, **options: Any) -> dict[str, Any]:
    """`trajlake score`."""
    from pipelines.score.functions import ScoreConfig
    from pipelines.score.job import run_score

    lines: list[str] = []
    config = ScoreConfig(commit_seconds=ONE_COMMIT, **options)
    report = run_score(lk, target, executor=executor, notice=lines.append, config=config)
    figures = report.model_dump(mode="json", exclude={"series_id", "job_ids", "seconds"})
    return {"jobs": len(report.job_ids), "said": lines, **figures}


def credit(lk: Lake, executor: Executor | None) -> dict[str, Any]:
    """`trajlake credit gigpo`, a range for each group."""
    from pipelines.credit import GiGPO
    from pipelines.credit.job import run_credit

    report = run_credit(lk, GiGPO(), executor=executor, memory_gb=1e-6)
    return report.model_dump(mode="json", exclude={"job_id", "series_id"})


def export(lk: Lake, executor: Executor | None, out: str) -> dict[str, Any]:
    """`trajlake export`, in shards; what the files hold."""
    from lake.export import find_target
    from lake.export.job import ExportRequest
    from lake.export.job import export as run

    run(lk, ExportRequest(find_target("jsonl"), Path(out), shard_episodes=3), executor=executor)
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(Path(out).glob("*.jsonl"))}


def compact(lk: Lake, executor: Executor | None, target_bytes: int) -> dict[str, Any]:
    """`trajlake compact steps`, and how many rows each file has then."""
    done = lk.compact("steps", target_bytes=target_bytes, executor=executor)
    entries = lk.snapshot().entries("steps")
    return {"files": [done.files_before, done.files_after], "rows": sorted(entry.rows for entry in entries)}


def rescore(lk: Lake, executor: Executor | None, model: str) -> dict[str, Any]:
    """`trajlake rescore`, in several chunks."""
    from trainer.evaluation import scoring
    from trainer.evaluation.rescore import rescore as run

    with patch.object(scoring, "CHUNK_TOKENS", (60, 60)):
        report = run(lk, model, executor=executor, commit_seconds=ONE_COMMIT)
    return {"scored": report.scored, "tokens": report.tokens, "jobs": len(report.job_ids)}


def ingest(lk: Lake, executor: Executor | None, source: str, part_bytes: int) -> dict[str, Any]:
    """`trajlake ingest`, in many parts."""
    from lake.write import ingest
    from lake.write.ingest import ingest as run

    with patch.object(ingest, "PART_BYTES", part_bytes):
        report = run(lk, source, executor=executor)
    return dict(json.loads(msgspec.json.encode(report, order="deterministic")))


JOBS: dict[str, Callable[..., dict[str, Any]]] = {
    job.__name__: job for job in (score, credit, export, compact, rescore, ingest)
}


def main(uri: str, storage: str, executor: str, fate: str, folder: str, *jobs: str) -> None:
    """Run the jobs."""
    Path(folder).mkdir(exist_ok=True)
    executor_used: Any = DoomedExecutor(make_executor(executor, 1 if executor == "processes" else 2), fate, folder)
    lk = lake.open(uri, storage_options=json.loads(storage))
    for job in jobs:
        name, _, arguments = job.partition(" ")
        print(json.dumps(JOBS[name](lk, executor_used, **json.loads(arguments))), flush=True)
    if executor == "ray":
        print(json.dumps({"object_store_bytes": executor_used.most_bytes}), flush=True)


def _object_store_bytes() -> int:
    """What the object stores of the cluster hold now."""
    import ray

    if not ray.is_initialized():
        return 0
    name = "object_store_memory"
    return int(ray.cluster_resources().get(name, 0.0) - ray.available_resources().get(name, 0.0))


if __name__ == "__main__":
    # By its name: other processes look its functions up there.
    from testkit import job_worker

    job_worker.main(*sys.argv[1:])
