"""A pytest plugin: what each test file costs in CPU seconds, and a failed run if a file far exceeds its budget.

CPU time counts, not wall time, because a busy machine stretches wall time most. A file is charged for the test process
and for everything that descends from it: forked workers, servers, browsers. Budgets are in `tests/budgets.toml`, for a
machine as fast as `benchmarks/fixed_work.py` names. A slower machine stretches CPU time too, and so does a neighbour on
the same processor, for minutes at a time. So each process that runs tests does a fixed piece of work between them, and
charges a test for the seconds that it would have cost on the named machine. A file over its budget is named, and one
over twice its budget fails the run.

    pytest --cost-file costs.tsv      also writes a line for every test: CPU seconds, wall seconds, name
"""

import math
import os
import time
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks.fixed_work import slowness

TESTS = Path(__file__).resolve().parents[1]
BUDGETS = TESTS / "budgets.toml"
_SHOWN = 10
FAILS_OVER = 2.0
"""Times its budget that a file must cost before the run fails."""
_SLOWNESS_AFTER = 2.0
"""Seconds after which the speed of this machine is measured again; a measurement costs 0.02."""
_WALK_AFTER = 0.05
"""Seconds a test must last before the table of processes is read again; shorter ones start no process of note."""
_TICKS = os.sysconf("SC_CLK_TCK")
_COST = "cost"


class Meter:
    """CPU seconds of this process and its descendants."""

    def __init__(self) -> None:
        self._own = _own_seconds()
        self._tree = tree_seconds(os.getpid())
        self._wall = time.monotonic()
        self._charged = 0.0
        """CPU seconds charged since the table of processes was read."""

    def lap(self) -> tuple[float, float]:
        """CPU and wall seconds since the last call."""
        own_seconds, wall = _own_seconds(), time.monotonic()
        cpu, elapsed = own_seconds - self._own, wall - self._wall
        self._own, self._wall = own_seconds, wall
        if elapsed > _WALK_AFTER:
            tree = tree_seconds(os.getpid())
            cpu = max(cpu, tree - self._tree - self._charged)
            self._tree, self._charged = tree, 0.0
        else:
            self._charged += cpu
        return cpu, elapsed


def _own_seconds() -> float:
    return time.process_time()


def tree_seconds(root: int) -> float:
    """CPU seconds of a process, its living descendants, and all those that they have waited for."""
    children: dict[int, list[int]] = defaultdict(list)
    ticks: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name of the command stands in brackets and may hold anything.
            fields = stat.read_text("utf-8", "replace").rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        process = int(stat.parent.name)
        children[int(fields[1])].append(process)
        ticks[process] = sum(map(int, fields[11:15]))
    total, waiting = 0, [root]
    while waiting:
        process = waiting.pop()
        total += ticks.get(process, 0)
        waiting += children[process]
    return total / _TICKS


class Budgets:
    """What `tests/budgets.toml` allows.

    Args:
        document: `[folders]`, CPU seconds of any file of a folder; `[files]`, those of the files that may need more.
    """

    def __init__(self, document: dict[str, Any]) -> None:
        self.folders: dict[str, float] = document["folders"]
        self.files: dict[str, float] = document["files"]

    def of(self, file: str) -> float | None:
        """CPU seconds for a file, named from the folder of tests; None if nothing limits it."""
        return self.files.get(file, self.folders.get(file.partition("/")[0]))


class Excess(NamedTuple):
    """A file that costs more than its budget: by how many times, and a sentence that says so."""

    times: float
    sentence: str


def excesses(seconds: dict[str, float], budgets: Budgets) -> list[Excess]:
    """Name each file that costs more than its budget.

    Args:
        seconds: CPU seconds on the machine of the budgets, by file, named from the folder of tests.
        budgets: what is allowed.
    """
    limits = {file: limit for file in seconds if (limit := budgets.of(file)) is not None}
    return [
        Excess(
            seconds[file] / limit if limit else math.inf,
            f"tests/{file} costs {seconds[file]:.1f} CPU seconds on the machine of the budgets; its budget is "
            f"{limit:g}. Make it cheaper, move repetitions to the slow suite, or give it a line of its own in "
            f"tests/budgets.toml.",
        )
        for file, limit in limits.items()
        if seconds[file] > limit
    ]


@cache
def budgets() -> Budgets:
    """Those of this checkout."""
    return Budgets(tomllib.loads(BUDGETS.read_text("utf-8")))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cost-file", metavar="FILE", help="file for a line of CPU and wall seconds of every test")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(_Measured(), "file-budgets-measured")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Report(config), "file-budgets-report")


class _Measured:
    """Where tests run: adds what each phase of a test cost to its report."""

    def __init__(self) -> None:
        self._meter = Meter()
        self._slowness, self._measured_at = 1.0, -math.inf

    def pytest_collection_finish(self) -> None:
        # What collecting costs, imports included, belongs to no test.
        self._meter.lap()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        report: pytest.TestReport = yield  # type: ignore[misc]
        cpu, wall = self._meter.lap()
        cost = cpu, wall, cpu / self._slowness_now()
        report.user_properties = [*report.user_properties, (_COST, cost)]
        return report  # type: ignore[return-value]

    def _slowness_now(self) -> float:
        if time.monotonic() - self._measured_at > _SLOWNESS_AFTER:
            self._slowness, self._measured_at = slowness(), time.monotonic()
            self._meter.lap()  # the measurement belongs to no test
        return self._slowness


class _Report:
    """Where results come together: adds up, prints, and judges."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._tests: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        self._files: dict[str, list[float]] = {}
        self._excesses: list[Excess] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == _COST:
                _add(self._tests[report.nodeid], value)
        if report.when == "teardown" and (path := self._config.getoption("cost_file")):
            cpu, wall, _ = self._tests[report.nodeid]
            with Path(path).open("a", encoding="utf-8") as lines:
                lines.write(f"{cpu:.3f}\t{wall:.3f}\t{report.nodeid}\n")

    def _total(self) -> dict[str, list[float]]:
        totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        for test, cost in self._tests.items():
            _add(totals[test.partition("::")[0].removeprefix("tests/")], cost)
        return totals

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        # The terminal prints its summary in the same hook, after this.
        self._files = self._total()
        self._excesses = excesses({file: cost[2] for file, cost in self._files.items()}, budgets())
        far_over = any(excess.times > FAILS_OVER for excess in self._excesses)
        if far_over and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        costliest = sorted(self._files.items(), key=lambda item: -item[1][0])[:_SHOWN]
        cpu, wall, reference = (sum(cost[axis] for cost in self._files.values()) for axis in range(3))
        terminalreporter.section(f"costliest files of {len(self._files)}: CPU seconds, wall seconds")
        for file, (file_cpu, file_wall, _) in costliest:
            terminalreporter.line(f"{file_cpu:8.1f} {file_wall:8.1f}  {file}")
        terminalreporter.line(f"{cpu:8.1f} {wall:8.1f}  all files, waits of {wall - cpu:.0f} s")
        terminalreporter.line(f"{reference:8.1f} CPU seconds on the machine of the budgets")
        for excess in self._excesses:
            terminalreporter.line(excess.sentence, red=excess.times > FAILS_OVER, yellow=excess.times <= FAILS_OVER)


def _add(cost: list[float], other: Sequence[float]) -> None:
    for axis, value in enumerate(other):
        cost[axis] += value
