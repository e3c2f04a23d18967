"""What a workload takes: sums of what it is made of, each part with a factor that was measured.

    y = f_run + f_episodes * E + f_steps * E * S + f_tokens * E * S * T

is the processor time of a job in seconds, its peak memory in bytes, or the stored bytes of a table, for E episodes of S
steps of T tokens. The factors stand in `fits.json`; those that a job has nothing to do with are left out of its sum. A
sum with a constant also says why small lakes seem to grow slower than linearly: the constant is most of what they take.

How long a job takes on the clock is its processor time over the cores that it can use (`Extent`); parts are assumed to
spread evenly, and what the driver does alone to stay where it is. A limit is reached where one process would need more
memory than its node has, or more time than there is: `Limit`.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Self

from lake.care.compaction import TARGET_BYTES
from lake.read.snapshot import Snapshot
from pipelines.credit.inputs.ranges import MEMORY_GB
from pipelines.estimate.workload import Workload

FITS = Path(__file__).with_name("fits.json")
GB = 1e9
DAY = 86_400.0
_WITHOUT = ("run",)
_ALL = ("run", "episodes", "steps", "tokens")
Factors = Mapping[str, float]
"""Driver -> what one of it takes: CPU seconds, bytes of memory, or stored bytes."""


class Extent(StrEnum):
    """What one run of a job can use."""

    PROCESS = "a core"
    NODE = "a node"
    CLUSTER = "all nodes"


@dataclass(frozen=True, slots=True)
class Job:
    """A job that is estimated."""

    extent: Extent
    drivers: tuple[str, ...] = _ALL
    """What its processor time depends on."""
    memory: tuple[str, ...] = _WITHOUT
    """What the peak memory of its largest process depends on."""
    bounded_gb: float | None = None
    """What its parts may hold at once, however large they are together, as each job's own default has it."""
    serial: str | None = None
    """Another job: what the driver of this one does before and after its parts."""


JOBS: dict[str, Job] = {
    "ingest": Job(Extent.CLUSTER, serial="commits of ingest"),
    "commits of ingest": Job(Extent.PROCESS, ("run", "episodes", "tokens"), ("run", "episodes")),
    "score": Job(Extent.CLUSTER),
    "credit": Job(Extent.CLUSTER, memory=("run", "steps"), bounded_gb=MEMORY_GB, serial="credit of a round"),
    "credit of a round": Job(Extent.PROCESS, ("run", "episodes"), ("run", "episodes")),
    "export": Job(Extent.CLUSTER, memory=("run", "steps"), bounded_gb=1.0),
    "compact": Job(Extent.CLUSTER, memory=("run", "steps", "tokens"), bounded_gb=1.0),
    "plan": Job(Extent.PROCESS, ("run", "episodes", "steps"), ("run", "episodes", "steps")),
    "stream": Job(Extent.NODE, memory=("run", "steps"), bounded_gb=1.0),
}
"""By name, as they follow each other. A round has eight groups."""
TABLE_DRIVERS: dict[str, tuple[str, ...]] = {
    "episodes": ("run", "episodes"),
    "steps": ("steps", "tokens"),
    "tokens": ("steps", "tokens"),
    "scores": ("run", "episodes"),
    "advantages": ("run", "episodes", "steps"),
    "credit_groups": ("run", "episodes"),
}
"""Table that grows with the episodes -> what its bytes depend on; the others are small beside them."""


@dataclass(frozen=True, slots=True)
class Fits:
    """Factors of everything that is estimated."""

    machine: str
    """What they were measured on."""
    jobs: Mapping[str, Mapping[str, Factors]]
    """Job -> `cpu` (seconds) and `memory` (bytes) -> factors."""
    tables: Mapping[str, Factors]
    """Table -> factors of its bytes."""

    @classmethod
    def load(cls) -> Self:
        """Those that come with Trajlake."""
        return cls(**json.loads(FITS.read_text()))


_fits = cache(Fits.load)


@dataclass(frozen=True, slots=True)
class Cluster:
    """What there is to compute with, and how fast episodes come."""

    nodes: int = 1
    cores: int = 8
    """Of a node."""
    memory_gb: float = 32.0
    """Of a node."""
    speed: float = 1.0
    """Speed of a core relative to one that the fits were measured on."""
    price: float = 0.0
    """Of an hour of a node."""
    days: float = 30.0
    """In which the episodes are collected."""
    commit_seconds: float = 0.25
    """What one commit takes alone: some round trips to the store."""
    function_seconds: float = 0.0
    """What the reward function itself takes for an episode, on a core."""


@dataclass(frozen=True, slots=True)
class TableEstimate:
    """A table when everything is written, compacted."""

    table: str
    gb: float
    files: int


@dataclass(frozen=True, slots=True)
class JobEstimate:
    """One run of a job over the whole lake."""

    job: str
    runs_on: str
    core_hours: float
    hours: float
    """On the clock."""
    cost: float
    """Of the nodes that it uses meanwhile."""
    memory_gb: float
    """Of its largest process, at its peak."""


@dataclass(frozen=True, slots=True)
class WritingEstimate:
    """How episodes come in."""

    groups_per_second: float
    """That are collected."""
    commits_per_second: float
    """That the lake gets: a group each, or fewer larger ones where committers gather what waits."""
    most_commits_per_second: float
    """That `episodes` can take, one after another."""
    visible_after_seconds: float
    """From a complete group to its commit, on average."""


@dataclass(frozen=True, slots=True)
class LimitEstimate:
    """Something that no further node helps against."""

    limit: str
    unit: str
    needed: float
    available: float
    reached_at_steps: float
    """Steps of a lake of such episodes that needs all there is; infinite where its size does not matter."""
    remedy: str


@dataclass(frozen=True, slots=True)
class Estimate:
    """All of it."""

    tables: list[TableEstimate]
    jobs: list[JobEstimate]
    writing: WritingEstimate
    limits: list[LimitEstimate]
    """The one that is reached first comes first."""


def drivers_of(work: Workload) -> dict[str, float]:
    """What a workload is made of."""
    tokens = work.steps * work.step_tokens
    return {"run": 1.0, "episodes": float(work.episodes), "steps": float(work.steps), "tokens": float(tokens)}


def predicted(factors: Factors, work: Workload) -> float:
    """The sum."""
    drivers = drivers_of(work)
    return sum(factor * drivers[name] for name, factor in factors.items())


def stored_of(snapshot: Snapshot) -> dict[str, float]:
    """Bytes of an episode in each estimated table that has rows, as the lake's files hold them now."""
    (episodes,) = snapshot.sql("SELECT count(*) FROM episodes").row(0)
    sizes = {name: snapshot.size(name) for name in TABLE_DRIVERS}
    return {name: size / episodes for name, (_, rows, size) in sizes.items() if rows}


def estimate(work: Workload, cluster: Cluster, *, stored: Mapping[str, float] | None = None) -> Estimate:
    """What a lake takes.

    Args:
        work: its size.
        cluster: what there is.
        stored: bytes of an episode by table, where another lake tells them; those of the fits are of text that
            compresses as words drawn by Zipf's law do.
    """
    tables = _tables(work, stored or {})
    jobs = [_job(name, work, cluster) for name in JOBS]
    limits = sorted((_limit(limit, work, cluster) for limit in _LIMITS), key=lambda found: found.reached_at_steps)
    return Estimate(tables, jobs, _writing(work, cluster), limits)


def _tables(work: Workload, stored: Mapping[str, float]) -> list[TableEstimate]:
    sizes = {
        name: stored[name] * work.episodes if name in stored else predicted(_fits().tables[name], work)
        for name in TABLE_DRIVERS
    }
    return [TableEstimate(name, size / GB, max(1, round(size / TARGET_BYTES))) for name, size in sizes.items()]


def _job(name: str, work: Workload, cluster: Cluster) -> JobEstimate:
    job = JOBS[name]
    cpu = _seconds(name, work, cluster)
    if name == "score":
        cpu += cluster.function_seconds * work.episodes
    serial = _seconds(job.serial, work, cluster) if job.serial else 0.0
    cores = {Extent.PROCESS: 1, Extent.NODE: cluster.cores, Extent.CLUSTER: cluster.cores * cluster.nodes}[job.extent]
    hours = (serial + max(0.0, cpu - serial) / cores) / 3600
    nodes = cluster.nodes if job.extent is Extent.CLUSTER else 1
    memory = _memory_of(name, work)
    return JobEstimate(name, job.extent.value, cpu / 3600, hours, hours * nodes * cluster.price, memory / GB)


def _memory_of(name: str, work: Workload) -> float:
    """Bytes at the peak of a job's largest process."""
    job, factors = JOBS[name], _fits().jobs[name]["memory"]
    own = predicted(factors, work)
    if job.bounded_gb is not None:
        own = min(own, factors["run"] + job.bounded_gb * GB)
    # The driver is one process with its parts, where these run in it.
    return own + (_memory_of(job.serial, work) - _memory_of(job.serial, work.times(0)) if job.serial else 0.0)


def _seconds(name: str, work: Workload, cluster: Cluster) -> float:
    return predicted(_fits().jobs[name]["cpu"], work) / cluster.speed


def _writing(work: Workload, cluster: Cluster) -> WritingEstimate:
    groups = work.episodes / work.group_size / (cluster.days * DAY)
    most = 1 / cluster.commit_seconds
    # A committer has one commit under way; the others' come in between. What arrives meanwhile goes into its next.
    turn = cluster.nodes * cluster.commit_seconds if groups > most else cluster.commit_seconds
    return WritingEstimate(groups, min(groups, most), most, 1.5 * turn)


@dataclass(frozen=True, slots=True)
class Limit:
    """What bounds a lake whatever the number of nodes."""

    name: str
    unit: str
    needed: Callable[[Workload, Cluster], float]
    available: Callable[[Cluster], float]
    remedy: str


def _memory(job: str) -> Callable[[Workload, Cluster], float]:
    return lambda work, _: _memory_of(job, work) / GB


def _time(job: str, unit: float) -> Callable[[Workload, Cluster], float]:
    return lambda work, cluster: _seconds(job, work, cluster) / unit


PATIENCE = 300.0
"""Seconds that a loop can wait for the credit of a round."""
_LIMITS = (
    Limit(
        "memory of the driver of credit",
        "GB",
        _memory("credit of a round"),
        lambda c: c.memory_gb,
        "--where by run, or a lake a run",
    ),
    Limit(
        "memory of the driver of ingest",
        "GB",
        _memory("commits of ingest"),
        lambda c: c.memory_gb,
        "a lake for each run; read them as one",
    ),
    Limit("memory of the plan of an epoch", "GB", _memory("plan"), lambda c: c.memory_gb, "train on a selection"),
    Limit(
        "credit after each round",
        "s",
        _time("credit of a round", 1.0),
        lambda _: PATIENCE,
        "only= looks at the round alone, as a loop does; or a lake for each run",
    ),
    Limit(
        "commits of one ingest as fast as collecting",
        "days",
        _time("commits of ingest", DAY),
        lambda c: c.days,
        "record instead, or ingest files in several processes",
    ),
)


def _limit(limit: Limit, work: Workload, cluster: Cluster) -> LimitEstimate:
    needed, available = limit.needed(work, cluster), limit.available(cluster)
    # Every need is a constant and a part that grows with the episodes.
    constant = limit.needed(work.times(0), cluster)
    growing = needed - constant
    factor = max(0.0, available - constant) / growing if growing else float("inf")
    return LimitEstimate(limit.name, limit.unit, needed, available, factor * work.steps, limit.remedy)
