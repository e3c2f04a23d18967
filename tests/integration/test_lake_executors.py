"""Every job on every executor gives the same rows, figures and files; on Ray with several nodes, and a lake in S3.

1. No one dies.
2. A worker, a node, the driver is killed.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import lake
from lake import EpisodeRecord, Lake
from lake.execution.local import LocalExecutor
from testkit.episodes import assert_whole, write_lines
from testkit.job_worker import JOBS
from testkit.object_store import Store, new_bucket
from testkit.processes import environment, kill_when
from testkit.ray_cluster import OBJECT_STORE_BYTES, RayCluster, ray_cluster
from testkit.sampled_lake import play, save_model
from testkit.score_lakes import conversation, module

__all__ = ["ray_cluster"]

Expected = Callable[..., tuple[Lake, list[dict[str, Any]]]]

TABLES = ("scores", "advantages", "ratios", "episodes", "steps", "rejects")
STAMPS = ("write_id", "job_id", "series_id")
SORTED = ("scorer", "reject_id", "episode_id", "step_index")
FUNCTIONS = """
from helpers import third

@reward_function
def pointwise(messages, task_id, rollout_index, steps, **kwargs):
    if task_id == "t1" and rollout_index == 1:
        raise ValueError("this one cannot be judged")
    outputs = [StepOutput(step["index"], third(step["index"])) for step in steps]
    return EvaluateResult(score=third(len(str(messages))) + third(rollout_index), reason=task_id, step_outputs=outputs)

@reward_function(mode="group")
def grouped(rollouts_messages, rollout_index, **kwargs):
    return [third(index) / third(1 + sum(rollout_index)) for index in rollout_index]

@reward_function(mode="batch")
def batched(rollouts_messages, rollout_index, **kwargs):
    return [third(index + len(rollout_index)) for index in rollout_index]
"""
RECORDS = [conversation(f"t{task}", index) for task in range(4) for index in range(3)]


NAMES = ("pointwise", "grouped", "batched")
JOB_NAMES = ("score", "credit", "rescore", "export", "compact", "ingest")


@dataclass(frozen=True)
class Given:
    """What jobs work with.

    Attributes:
        functions: a module with a helper next to it.
        folder: for the model.
    """

    functions: str
    folder: Path

    @cached_property
    def model(self) -> str:
        """A model that played the games."""
        return str(save_model(self.folder / "model"))

    @cached_property
    def games(self) -> list[EpisodeRecord]:
        """Episodes with tokens."""
        return play(self.model, tasks=3, siblings=4)

    def filled(
        self, uri: str | Path, options: Mapping[str, str] | None = None, kinds: Collection[str] = JOB_NAMES
    ) -> Lake:
        """A lake with a file per task, and one for the games, which only `rescore` needs."""
        lk = lake.open(str(uri), create=True, storage_options=dict(options or {}))
        for task in range(4):
            lk.append(RECORDS[3 * task : 3 * task + 3], run_id="r")
        if "rescore" in kinds:
            lk.append(self.games, run_id="games")
        return lk


@pytest.fixture(scope="module")
def jobs_sent(tmp_path_factory: pytest.TempPathFactory) -> Given:
    folder = tmp_path_factory.mktemp("given")
    module(folder, "def third(n):\n    return n / 3\n", "helpers.py")
    return Given(module(folder, FUNCTIONS), folder)


def jobs_of(
    jobs_sent: Given, out: Path, kinds: Collection[str] = JOB_NAMES, names: Sequence[str] = NAMES
) -> list[tuple[str, dict[str, Any]]]:
    """Each job of some kinds with its arguments; scoring by a function first."""
    jobs: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        *(("score", lambda name=name: {"target": f"{jobs_sent.functions}:{name}"}) for name in names),
        ("score", lambda: {"target": "tool_success"}),
        ("credit", dict),
        ("rescore", lambda: {"model": jobs_sent.model}),
        ("export", lambda: {"out": str(out)}),
        ("compact", lambda: {"target_bytes": 10_000}),  # two files a part
        ("ingest", lambda: {"source": str(files(out.parent / "files")), "part_bytes": 2000}),
    ]
    return [(name, arguments()) for name, arguments in jobs if name in kinds]


def files(folder: Path) -> Path:
    """Trajectories to be ingested: many files, a large one, and records that are there twice, in others or before."""
    for task in range(6):
        write_lines(folder / f"f{task}.jsonl", [conversation(f"new{task}", index) for index in range(3)])
    again = [conversation("t0", 0, run_id="r"), conversation("new1", 0, run_id="f1"), b"junk\n"]
    write_lines(folder / "large.jsonl", [*(conversation("large", index) for index in range(12)), *again])
    return folder


def rows(lk: Lake) -> dict[str, pl.DataFrame]:
    """What the jobs wrote, and what they left as it was."""
    frames = {name: lk.scan(name).collect() for name in TABLES}
    return {
        name: frame.drop(*STAMPS, "at", strict=False).sort(
            *(name for name in SORTED if name in frame.columns), nulls_last=True
        )
        for name, frame in frames.items()
    }


def assert_same_rows(lk: Lake, expected: Lake, *names: str) -> None:
    mine, theirs = rows(lk), rows(expected)
    for name in names or theirs:
        assert mine[name].equals(theirs[name], null_equal=True), name


def counts(lk: Lake) -> list[tuple[Any, ...]]:
    return lk.sql("SELECT kind, rows_in, rows_out, rows_dropped, counts FROM job_runs ORDER BY started_at").rows()


def plain(report: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in report.items() if name not in ("said", "printed")}


@pytest.fixture(scope="module")
def expected(jobs_sent: Given, tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """Jobs in this process, into a lake in a folder; made once for their kinds and the functions of scores."""

    @cache
    def of(kinds: tuple[str, ...], *names: str) -> tuple[Lake, list[dict[str, Any]]]:
        folder = tmp_path_factory.mktemp("here")
        lk = jobs_sent.filled(folder / "lake", kinds=kinds)
        return lk, [
            plain(JOBS[name](lk, None, **job)) for name, job in jobs_of(jobs_sent, folder / "out", kinds, names)
        ]

    return of


def driver(
    store: Store, cluster: RayCluster, fate: str, folder: Path, *jobs: tuple[str, dict[str, Any]]
) -> subprocess.Popen[str]:
    """A process that runs jobs on the cluster."""
    words = [store.root, json.dumps(store.options), "ray", fate, str(folder)]
    words += [f"{name} {json.dumps(job)}" for name, job in jobs]
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "testkit.job_worker", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(RAY_ADDRESS=cluster.address, RAY_USAGE_STATS_ENABLED="0"),
        start_new_session=True,
    )


def reports_of(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err[-4000:]
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


# ---------------------------------------------------------------- 1. no one dies


@pytest.mark.parametrize(
    ("kinds", "names"),
    [
        pytest.param(("score", "export"), ("pointwise",), marks=pytest.mark.slow("processes give what one gives")),
        pytest.param(JOB_NAMES, NAMES, marks=pytest.mark.slow("processes give what one gives, for every job")),
    ],
)
def test_processes_give_the_same(
    jobs_sent: Given, expected: Expected, tmp_path: Path, kinds: tuple[str, ...], names: tuple[str, ...]
) -> None:
    alone, reports = expected(kinds, *names)
    lk = jobs_sent.filled(tmp_path / "lake", kinds=kinds)
    executor = LocalExecutor(2, processes=True)
    jobs = jobs_of(jobs_sent, tmp_path / "out", kinds, names)
    assert [plain(JOBS[name](lk, executor, **job)) for name, job in jobs] == reports
    assert_same_rows(lk, alone)
    assert counts(lk) == counts(alone)


@pytest.mark.parametrize(
    ("kinds", "filled", "fate"),
    [(("score",), ("scores",), "before"), pytest.param(JOB_NAMES, TABLES, "none", marks=pytest.mark.slow)],
)
def test_ray_gives_the_same_and_a_node_that_is_too_weak_gets_no_part(
    jobs_sent: Given,
    expected: Expected,
    s3_server: str,
    ray_cluster: RayCluster,
    tmp_path: Path,
    kinds: tuple[str, ...],
    filled: tuple[str, ...],
    fate: str,
) -> None:
    """Also where the worker of a part is killed.

    By one function of a user: which episodes a part holds by its mode is decided before the executor sees it.
    """
    alone, report_texts = expected(kinds, "pointwise")
    store = new_bucket(s3_server)
    lk = jobs_sent.filled(store.root, store.options, kinds)
    jobs = jobs_of(jobs_sent, tmp_path / "out", kinds, ["pointwise"])
    *reports, end = reports_of(driver(store, ray_cluster, fate, tmp_path / "marks", *jobs))
    assert (tmp_path / "marks" / "lost").exists() == (fate != "none")
    assert list(map(plain, reports)) == report_texts
    assert not any(rows(alone)[name].is_empty() for name in filled)
    assert_same_rows(lk, alone)
    assert counts(lk) == counts(alone)
    (line,) = reports[0]["said"]
    assert "gets no part" in line
    assert "riscv64" in line
    assert reports[1]["said"] == [], "a built-in scorer needs no isolation"
    assert end["object_store_bytes"] < OBJECT_STORE_BYTES / 100, "rows travel through the lake"


# ---------------------------------------------------------------- 2. someone dies


@pytest.fixture(scope="module")
def large_cluster(ray_cluster: RayCluster) -> RayCluster:
    """With two nodes that can isolate user code."""
    ray_cluster.ask("node")
    return ray_cluster


@pytest.mark.slow("What a worker or a node of a Ray cluster loses runs again, for every kind of job.")
@pytest.mark.parametrize("fate", ["before", "after", "node"])
@pytest.mark.parametrize("name", JOB_NAMES)
def test_what_is_lost_on_ray_runs_again(
    jobs_sent: Given,
    s3_server: str,
    large_cluster: RayCluster,
    tmp_path: Path,
    name: str,
    fate: str,
) -> None:
    """A worker before its part, after it when its answer is lost, or with its node."""
    store = new_bucket(s3_server)
    lk = jobs_sent.filled(store.root, store.options, [name])
    job = _first(jobs_sent, tmp_path / "out", name)
    report, _ = reports_of(driver(store, large_cluster, fate, tmp_path / "marks", job))
    assert (tmp_path / "marks" / "lost").exists(), "nobody was killed"
    if fate == "node":
        large_cluster.ask("node")
    alone = jobs_sent.filled(tmp_path / "alone", kinds=[name])
    assert plain(report) == plain(JOBS[name](alone, None, **_first(jobs_sent, tmp_path / "alone-out", name)[1]))
    assert_same_rows(lk, alone)
    assert counts(lk) == counts(alone)
    if fate == "after" and name in ("score", "credit", "rescore"):
        assert lk.snapshot().dead_write_ids, "what the lost one wrote stays dead"


def _first(jobs: Given, out: Path, name: str) -> tuple[str, dict[str, Any]]:
    return jobs_of(jobs, out, [name])[0]


@pytest.mark.slow("A job on Ray whose driver is killed is run again, and its rows are those of one that was not.")
@pytest.mark.parametrize("name", ["score", "rescore", "export", "compact"])
def test_a_driver_that_is_killed_is_run_again(
    jobs_sent: Given, s3_server: str, large_cluster: RayCluster, tmp_path: Path, name: str
) -> None:
    store = new_bucket(s3_server)
    lk = jobs_sent.filled(store.root, store.options)
    job, marks = _first(jobs_sent, tmp_path / "out", name), tmp_path / "marks"
    process = driver(store, large_cluster, "wait", marks, job)
    kill_when(process, (marks / "part-2").exists, "no second part was begun", 300)
    process.communicate()
    (marks / "go").touch()
    alone = jobs_sent.filled(tmp_path / "alone")
    assert_same_rows(lk, alone)
    JOBS[name](lk, None, **job[1])
    JOBS[name](alone, None, **_first(jobs_sent, tmp_path / "alone-out", name)[1])
    assert_same_rows(lk, alone)
    if name == "export":
        mine, theirs = ({f.name: f.read_bytes() for f in (tmp_path / n).glob("*.jsonl")} for n in ("out", "alone-out"))
        assert mine == theirs


@pytest.mark.slow
def test_an_ingest_whose_driver_is_killed_keeps_what_was_committed(
    jobs_sent: Given, s3_server: str, large_cluster: RayCluster, tmp_path: Path
) -> None:
    """Unlike the others it commits as it goes: its contents are whole, and the next one brings the rest."""
    store = new_bucket(s3_server)
    lk, alone = jobs_sent.filled(store.root, store.options), jobs_sent.filled(tmp_path / "alone")
    job, marks = _first(jobs_sent, tmp_path / "out", "ingest"), tmp_path / "marks"
    before = assert_whole(lk.snapshot())
    process = driver(store, large_cluster, "late", marks, job)
    kill_when(process, lambda: lk.sql("SELECT 1 FROM episodes").height > before, "nothing was committed", 300)
    process.communicate()
    (marks / "go").touch()
    episodes_added = assert_whole(lk.snapshot()) - before
    JOBS["ingest"](alone, None, **job[1])
    expected = assert_whole(alone.snapshot()) - before
    assert 0 < episodes_added < expected
    assert JOBS["ingest"](lk, None, **job[1])["new"] == expected - episodes_added
    assert_same_rows(lk, alone)
