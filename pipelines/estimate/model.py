"""Linear cost model of a workload, with measured factors.

    y = f_run + f_episodes * E + f_steps * E * S + f_tokens * E * S * T

is the processor time of a job in seconds, its peak memory in bytes, or the stored bytes of a table, for E episodes of S
steps of T tokens. The factors are in `fits.json`. A job's sum omits the factors that do not affect it. The constant
dominates small lakes, so they seem to grow slower than linearly.

The wall time of a job is its processor time divided by the cores that it can use (`Extent`). Parts are assumed to
spread evenly, and the driver's serial work does not spread. A limit is reached where one process would need more memory
than its node has, or more time than is available (`ScalingLimit`).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Self

from lake.care.maintenance import TARGET_BYTES
from lake.errors import UsageError
from lake.read.snapshot import Snapshot
from pipelines.credit.inputs import MEMORY_GB

ACTION_SHARE = 0.25
"""Share of a step's tokens that the policy writes, in the lakes of the measurements."""
TOKEN_CHARACTERS = 4
"""Characters per token in the same lakes; also converts texts to tokens where a lake has only texts."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Number and shape of the episodes."""

    episodes: float
    episode_steps: float
    """Mean number of decisions per episode."""
    step_tokens: float
    """Mean number of tokens that a step adds: its action, and the new part of its context."""
    group_size: int = 8
    """Number of episodes per group."""

    @property
    def steps(self) -> float:
        """Return the total number of decisions."""
        return self.episodes * self.episode_steps

    def times(self, factor: float) -> Self:
        """Multiply the number of episodes."""
        return replace(self, episodes=self.episodes * factor)


def measure_workload(snapshot: Snapshot) -> Workload:
    """Measure the episodes of a lake, without retracted ones.

    Raises:
        UsageError: the lake has no steps.
    """
    episodes, steps, groups = snapshot.sql(
        "SELECT count(*) AS episodes, sum(num_steps) AS steps, count(DISTINCT group_id) AS groups FROM episodes"
    ).row(0)
    if not steps:
        raise UsageError("the lake has no steps to measure; give --steps, --episode-steps and --step-tokens instead")
    rows, tokens = snapshot.sql(
        "SELECT count(*) AS n, sum(n_context + n_action) AS tokens FROM "
        "(SELECT DISTINCT ON (episode_id, step_index) n_context, n_action FROM tokens)"
    ).row(0)
    if not rows:
        # Without token rows, estimate the tokens that `train` would render from the texts.
        rows, characters = snapshot.sql(
            "SELECT count(*) AS n, sum(coalesce(length(state), 0) + length(action)) AS characters FROM steps"
        ).row(0)
        tokens = characters / TOKEN_CHARACTERS
    return Workload(episodes, steps / episodes, tokens / rows, max(1, round(episodes / groups)))


FITS = Path(__file__).with_name("fits.json")
GB = 1e9
DAY = 86_400.0
_WITHOUT = ("run",)
_ALL = ("run", "episodes", "steps", "tokens")
Factors = Mapping[str, float]
"""Driver -> cost per unit: CPU seconds, bytes of memory, or stored bytes."""


class Extent(StrEnum):
    """Cores that one run of a job can use."""

    PROCESS = "a core"
    NODE = "a node"
    CLUSTER = "all nodes"


@dataclass(frozen=True, slots=True)
class EstimatedJob:
    """Cost drivers of a job."""

    extent: Extent
    drivers: tuple[str, ...] = _ALL
    """Drivers of its processor time."""
    memory: tuple[str, ...] = _WITHOUT
    """Drivers of the peak memory of its largest process."""
    bounded_gb: float | None = None
    """Memory limit for the parts in one process, in GB: the default of the job."""
    serial: str | None = None
    """Name of the entry for the driver's serial work before and after the parts."""


JOBS: dict[str, EstimatedJob] = {
    "ingest": EstimatedJob(Extent.CLUSTER, serial="commits of ingest"),
    "commits of ingest": EstimatedJob(Extent.PROCESS, ("run", "episodes", "tokens"), ("run", "episodes")),
    "score": EstimatedJob(Extent.CLUSTER),
    "credit": EstimatedJob(Extent.CLUSTER, memory=("run", "steps"), bounded_gb=MEMORY_GB, serial="credit of a round"),
    "credit of a round": EstimatedJob(Extent.PROCESS, ("run", "episodes"), ("run", "episodes")),
    "export": EstimatedJob(Extent.CLUSTER, memory=("run", "steps"), bounded_gb=1.0),
    "compact": EstimatedJob(Extent.CLUSTER, memory=("run", "steps", "tokens"), bounded_gb=1.0),
    "plan": EstimatedJob(Extent.PROCESS, ("run", "episodes", "steps"), ("run", "episodes", "steps")),
    "stream": EstimatedJob(Extent.NODE, memory=("run", "steps"), bounded_gb=1.0),
}
"""Jobs by name, in the order of a pipeline. A round has eight groups."""
TABLE_DRIVERS: dict[str, tuple[str, ...]] = {
    "episodes": ("run", "episodes"),
    "steps": ("steps", "tokens"),
    "tokens": ("steps", "tokens"),
    "scores": ("run", "episodes"),
    "advantages": ("run", "episodes", "steps"),
    "credit_groups": ("run", "episodes"),
}
"""Table that grows with the episodes -> drivers of its bytes; other tables are small in comparison."""


@dataclass(frozen=True, slots=True)
class Fits:
    """Measured factors of all jobs and tables."""

    machine: str
    """Machine of the measurements."""
    jobs: Mapping[str, Mapping[str, Factors]]
    """Job -> `cpu` (seconds) and `memory` (bytes) -> factors."""
    tables: Mapping[str, Factors]
    """Table -> factors of its bytes."""

    @classmethod
    def load(cls) -> Self:
        """Load the factors that come with Trajlake."""
        return cls(**json.loads(FITS.read_text()))


load_fits = cache(Fits.load)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Machines, and the rate of collection."""

    nodes: int = 1
    cores: int = 8
    """Cores of a node."""
    memory_gb: float = 32.0
    """Memory of a node in GB."""
    speed: float = 1.0
    """Speed of a core relative to one that the fits were measured on."""
    price: float = 0.0
    """Price of a node for an hour."""
    days: float = 30.0
    """Days in which the episodes are collected."""
    commit_seconds: float = 0.25
    """Seconds of one commit without contention: some round trips to the store."""
    function_seconds: float = 0.0
    """CPU seconds of the reward function per episode."""


@dataclass(frozen=True, slots=True)
class TableEstimate:
    """Size of a table after compaction."""

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
    """Wall time in hours."""
    cost: float
    """Price of the nodes that it uses."""
    memory_gb: float
    """Peak memory of its largest process in GB."""


@dataclass(frozen=True, slots=True)
class WritingEstimate:
    """Rate and delay of writing episodes."""

    groups_per_second: float
    """Number of collected groups per second."""
    commits_per_second: float
    """Number of commits per second: one per group, or fewer where committers gather waiting groups."""
    most_commits_per_second: float
    """Maximum number of serial commits per second to `episodes`."""
    visible_after_seconds: float
    """Mean seconds from a complete group to its commit."""


@dataclass(frozen=True, slots=True)
class LimitEstimate:
    """A limit that more nodes do not move."""

    limit: str
    unit: str
    needed: float
    available: float
    reached_at_steps: float
    """Steps of a lake of such episodes that reaches the limit; infinite if the size has no effect."""
    remedy: str


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimate of a lake: tables, jobs, writing and limits."""

    tables: list[TableEstimate]
    jobs: list[JobEstimate]
    writing: WritingEstimate
    limits: list[LimitEstimate]
    """Limits in the order in which a growing lake reaches them."""


def compute_drivers(work: Workload) -> dict[str, float]:
    """Return the size of a workload in each driver."""
    tokens = work.steps * work.step_tokens
    return {"run": 1.0, "episodes": float(work.episodes), "steps": float(work.steps), "tokens": float(tokens)}


def predict_amount(factors: Factors, work: Workload) -> float:
    """Return the sum of factors times drivers."""
    drivers = compute_drivers(work)
    return sum(factor * drivers[name] for name, factor in factors.items())


def measure_stored_bytes(snapshot: Snapshot) -> dict[str, float]:
    """Return the stored bytes per episode of each estimated table that has rows."""
    (episodes,) = snapshot.sql("SELECT count(*) FROM episodes").row(0)
    sizes = {name: snapshot.size(name) for name in TABLE_DRIVERS}
    return {name: size / episodes for name, (_, rows, size) in sizes.items() if rows}


def estimate(work: Workload, cluster: Cluster, *, stored: Mapping[str, float] | None = None) -> Estimate:
    """Estimate tables, jobs, writing and limits of a lake.

    Args:
        stored: bytes per episode by table, measured on another lake. The default factors assume text that compresses
            like words drawn by Zipf's law.
    """
    tables = []
    for name in TABLE_DRIVERS:
        if stored and name in stored:
            size = stored[name] * work.episodes
        else:
            size = predict_amount(load_fits().tables[name], work)
        tables.append(TableEstimate(name, size / GB, max(1, round(size / TARGET_BYTES))))
    jobs = [estimate_job(name, work, cluster) for name in JOBS]
    limits = sorted((limit.estimate(work, cluster) for limit in _LIMITS), key=lambda limit: limit.reached_at_steps)
    return Estimate(tables, jobs, estimate_writing(work, cluster), limits)


def estimate_job(name: str, work: Workload, cluster: Cluster) -> JobEstimate:
    """Estimate one run of a job over all episodes."""
    job = JOBS[name]
    cpu = estimate_cpu_seconds(name, work, cluster)
    if name == "score":
        cpu += cluster.function_seconds * work.episodes
    serial = estimate_cpu_seconds(job.serial, work, cluster) if job.serial else 0.0
    cores = {Extent.PROCESS: 1, Extent.NODE: cluster.cores, Extent.CLUSTER: cluster.cores * cluster.nodes}[job.extent]
    hours = (serial + max(0.0, cpu - serial) / cores) / 3600
    nodes = cluster.nodes if job.extent is Extent.CLUSTER else 1
    memory = estimate_peak_bytes(name, work)
    return JobEstimate(name, job.extent.value, cpu / 3600, hours, hours * nodes * cluster.price, memory / GB)


def estimate_peak_bytes(name: str, work: Workload) -> float:
    """Return the peak bytes of a job's largest process."""
    job, factors = JOBS[name], load_fits().jobs[name]["memory"]
    peak = predict_amount(factors, work)
    if job.bounded_gb is not None:
        peak = min(peak, factors["run"] + job.bounded_gb * GB)
    if job.serial:
        # The driver and the parts share a process where the parts run in it.
        peak += estimate_peak_bytes(job.serial, work) - estimate_peak_bytes(job.serial, work.times(0))
    return peak


def estimate_cpu_seconds(name: str, work: Workload, cluster: Cluster) -> float:
    """Return the processor time of a job in seconds."""
    return predict_amount(load_fits().jobs[name]["cpu"], work) / cluster.speed


def estimate_writing(work: Workload, cluster: Cluster) -> WritingEstimate:
    """Estimate the commits while episodes are collected."""
    groups = work.episodes / work.group_size / (cluster.days * DAY)
    max_commits = 1 / cluster.commit_seconds
    # A committer has one commit in progress, between those of the others. Its next commit takes the waiting groups.
    turn = cluster.nodes * cluster.commit_seconds if groups > max_commits else cluster.commit_seconds
    return WritingEstimate(groups, min(groups, max_commits), max_commits, 1.5 * turn)


@dataclass(frozen=True, slots=True)
class ScalingLimit:
    """A bound on the size of a lake for any number of nodes."""

    name: str
    unit: str
    needed: Callable[[Workload, Cluster], float]
    available: Callable[[Cluster], float]
    remedy: str

    def estimate(self, work: Workload, cluster: Cluster) -> LimitEstimate:
        """Compare the need with the amount available, and extrapolate the size that reaches the limit."""
        needed, available = self.needed(work, cluster), self.available(cluster)
        # Every need is the sum of a constant and a part proportional to the number of episodes.
        constant = self.needed(work.times(0), cluster)
        growing = needed - constant
        factor = max(0.0, available - constant) / growing if growing else float("inf")
        return LimitEstimate(self.name, self.unit, needed, available, factor * work.steps, self.remedy)


PATIENCE = 300.0
"""Maximum seconds that a loop waits for the credit of a round."""
_LIMITS = (
    ScalingLimit(
        "memory of the driver of credit",
        "GB",
        lambda work, _: estimate_peak_bytes("credit of a round", work) / GB,
        lambda cluster: cluster.memory_gb,
        "--where by run, or a lake a run",
    ),
    ScalingLimit(
        "memory of the driver of ingest",
        "GB",
        lambda work, _: estimate_peak_bytes("commits of ingest", work) / GB,
        lambda cluster: cluster.memory_gb,
        "a lake for each run; read them as one",
    ),
    ScalingLimit(
        "memory of the plan of an epoch",
        "GB",
        lambda work, _: estimate_peak_bytes("plan", work) / GB,
        lambda cluster: cluster.memory_gb,
        "train on a selection",
    ),
    ScalingLimit(
        "credit after each round",
        "s",
        lambda work, cluster: estimate_cpu_seconds("credit of a round", work, cluster),
        lambda _: PATIENCE,
        "only= reads just the round, as a loop does; or a lake for each run",
    ),
    ScalingLimit(
        "commits of one ingest as fast as collecting",
        "days",
        lambda work, cluster: estimate_cpu_seconds("commits of ingest", work, cluster) / DAY,
        lambda cluster: cluster.days,
        "record instead, or ingest files in several processes",
    ),
)
