"""Pages of the viewer over a million episodes and six million steps, uncompacted: the server's CPU and wall seconds.

    python benchmarks/bench_viewer.py [--lake LAKE] [--episodes 1000000] [--only NAME] [--few]

Makes the lake (`viewer_lake`), unless an earlier call did. Streamlit runs every page as it is, without a browser: first
in a process that has read nothing, then in a session that begins after another commit (cold), then for another page of
the same kind in the same state (warm), so that no answer is remembered. Baseline: DuckDB reads from the same files, as
plain Parquet, the columns that a list shows, and orders them. The measurement is the median page, with the
slowest pages as waits.
"""

import argparse
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

import duckdb  # noqa: E402
from measurement import Measurement, add_measurement_option, write_measurement  # noqa: E402
from viewer_lake import SIBLINGS, TOOLS, add_episodes, make  # noqa: E402

import lake  # noqa: E402
from lake.storage.local_cache import CACHE_VARIABLE  # noqa: E402
from testkit.streamlit_pages import APP, AppTest, assert_sound, go_to, words  # noqa: E402
from viewer import session  # noqa: E402
from viewer.launch import import_pages  # noqa: E402
from viewer.reader import Reader  # noqa: E402
from viewer.server import ENVIRONMENT  # noqa: E402

FEW = ("list", "list by outcome", "filter: run, outcome", "group", "episode", "training, an update", "runs", "groups")
"""The pages of `--few`."""
Address = dict[str, str | list[str]]
Case = tuple[str, str, Address, Address]
"""What it is called, its page, an address, and another of the same kind."""
LIST = "run_id, group_id, episode_id, task_id, rollout_index, collection_round, attempt, num_steps, env_return"
SEARCHES = (("R7919X", "R15838X"), ("lamp199 shelf3", "lamp198 shelf4"), (TOOLS[0], TOOLS[1]), ("door", "key"))
HAVING = {
    "tool": (TOOLS[0], TOOLS[1]),
    "failed": (TOOLS[0], TOOLS[1]),
    "error": ("state", "action"),
    "scorer": ("judge", "nobody"),
    "flag": ("singleton_anchor", "constant_anchor"),
    "tag": ("rating", "odd"),
    "text": ("lamp199 shelf3", "lamp198 shelf4"),
}
"""Filters of groups by what their episodes have, each with two values."""
_in_queries = [0.0]


def cases(lk: lake.Lake) -> list[Case]:
    """All pages, by name."""
    query = "SELECT id_text(episode_id), id_text(group_id) FROM episodes WHERE rollout_index = 0 AND task_id = '7'"
    rows = lk.sql(f"{query} ORDER BY collection_round, episode_id").rows()
    (e, g), (e2, g2) = rows[0], rows[1]
    both = "SELECT list(id_text(episode_id)) FROM (SELECT episode_id FROM episodes WHERE group_id = id(?) LIMIT 2)"
    pair, pair2 = ({"episode": lk.sql(both, [group]).item().to_list()} for group in (g, g2))
    anchors = lk.sql("SELECT DISTINCT id_text(anchor_key) AS a FROM advantages WHERE anchor_episodes > 2 LIMIT 2")["a"]
    deep, sort, run = {"page": "20000"}, {"sort": "-outcome"}, {"run": "run 1"}
    judge = sort | {"score": "judge", "min": "0.5"}
    found: list[Case] = [
        ("list", "episodes", {}, {"page": "2"}),
        ("list, deep page", "episodes", deep, {"page": "20001"}),
        ("list by outcome", "episodes", sort, sort | {"page": "2"}),
        ("list, another order", "episodes", sort, {"sort": "num_steps"}),
        ("filter: run, outcome", "episodes", run | {"min": "0.5"}, {"run": "run 2", "min": "0.5"}),
        ("filter and order: a scorer", "episodes", judge, judge | {"min": "0.6"}),
        ("filter: a tool", "episodes", {"tool": TOOLS[0]}, {"tool": TOOLS[1]}),
        ("facets", "episodes", {"facets": "true"}, {"facets": "true", "run": "run 2"}),
        ("group", "group", {"group": g}, {"group": g2}),
        ("episode", "episode", {"episode": e}, {"episode": e2}),
        ("episode of a list", "episode", {"episode": e, "list": "run=run+1"}, {"episode": e2, "list": "run=run+1"}),
        ("side by side", "compare", pair, pair2),
        ("training", "training", {}, {"update": "5"}),
        ("training, an update", "training", {"update": "7"}, {"update": "8"}),
        ("runs", "runs", {}, run),
        ("what changed: rounds", "change", *_sides("a_rounds", "b_rounds")),
        ("what changed: runs", "change", *_sides("a_run", "b_run")),
        ("groups", "groups", {}, {"page": "2"}),
        ("groups: dead ones of a run", "groups", run | {"signal": "dead"}, {"run": "run 2", "signal": "dead"}),
        *((f"groups with {name}", "groups", {name: one}, {name: two}) for name, (one, two) in HAVING.items()),
        ("groups, facets", "groups", {"facets": "true"}, {"facets": "true", "run": "run 2"}),
        ("anchors", "anchors", {}, {"page": "2"}),
        ("groups of an anchor", "anchors", {"anchor": anchors[0]}, {"anchor": anchors[1]}),
        ("jobs", "jobs", {}, {"sort": "kind"}),
    ]
    return found + [(f"search `{one}`", "episodes", {"text": one}, {"text": two}) for one, two in SEARCHES]


def _sides(a: str, b: str) -> tuple[Address, Address]:
    values = ("run 0", "run 1", "run 2") if a == "a_run" else ("0", "1", "2")
    common: Address = {} if a == "a_run" else {"a_run": "run 0", "b_run": "run 0"}
    return common | {a: values[0], b: values[1]}, common | {a: values[1], b: values[2]}


class Tab:
    """A browser session."""

    def __init__(self) -> None:
        self._at = AppTest.from_file(str(APP), default_timeout=600)
        self._go("rejects", {"run": "nothing"})
        self._at.run()

    def _go(self, page: str, address: Address) -> None:
        self._at.query_params.clear()
        for name, value in address.items():
            self._at.query_params[name] = value
        go_to(self._at, page)

    def open(self, page: str, address: Address) -> tuple[float, float, float]:
        """CPU seconds of a page, those of them in queries, and wall seconds."""
        # By way of another page: without a browser, the widgets of a page would keep the values that they have.
        self._go("rejects", {"run": "nothing"})
        self._at.run()
        self._go(page, address)
        _in_queries[0] = 0.0
        cpu, wall = time.process_time(), time.perf_counter()
        self._at.run()
        figures = time.process_time() - cpu, _in_queries[0], time.perf_counter() - wall
        assert_sound(self._at)
        assert "lake could not be read" not in words(self._at)
        return figures


def count_queries() -> None:
    """Tell the CPU of queries from that of the page around them."""
    for name in ("read", "holding"):
        setattr(Reader, name, _counted(getattr(Reader, name)))


def _counted(work: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        before, cpu = _in_queries[0], time.process_time()
        try:
            return work(*args, **kwargs)
        finally:
            _in_queries[0] = before + time.process_time() - cpu  # a query may read within

    return run


def baseline(lk: lake.Lake) -> float:
    """CPU seconds of a bare engine for the columns of a list, in order."""
    paths = [file.path for file in lk.snapshot().files("episodes")]
    cpu = time.process_time()
    duckdb.execute(f"SELECT {LIST} FROM read_parquet({paths}) ORDER BY ALL").to_arrow_table()
    return time.process_time() - cpu


def main() -> None:
    """Make the lake, open its pages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lake", type=Path, help="a lake that an earlier call made, or where to make it")
    parser.add_argument("--episodes", type=int, default=1_000_000)
    parser.add_argument("--cache", type=Path, help="a folder for the index that stays")
    parser.add_argument("--only", help="pages whose names begin like this")
    parser.add_argument("--few", action="store_true", help=f"these pages alone: {'; '.join(FEW)}")
    add_measurement_option(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.lake or Path(folder, "lake")
        os.environ[CACHE_VARIABLE], os.environ[ENVIRONMENT] = str(arguments.cache or folder), str(path)
        if not path.exists():
            make(path, arguments.episodes)
        lk = lake.open(path)
        import_pages()
        count_queries()
        baseline_seconds = min(baseline(lk) for _ in range(3))
        print(f"baseline: {baseline_seconds:.2f} CPU s\n")
        print("| page | first, CPU s | in queries | cold, CPU s | in queries | warm, CPU s | in queries | wall s |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- |")
        pages = [case for case in cases(lk) if case[0].startswith(arguments.only or "")]
        pages = [case for case in pages if not arguments.few or case[0] in FEW]
        write_measurement(
            arguments.measurement, summarise([_time(lk, *case) for case in pages], arguments.episodes, baseline_seconds)
        )


def summarise(seconds: list[tuple[float, float]], episodes: int, baseline_seconds: float) -> Measurement:
    """Return the figures of pages from the CPU seconds of each, cold and warm."""
    cold, warm = (sorted(column) for column in zip(*seconds, strict=True))
    median = statistics.median(warm)
    waits = {"viewer, slowest page, cold": cold[-1], "viewer, slowest page, warm": warm[-1]}
    return Measurement(
        job="a page of the viewer, warm",
        size=f"{episodes:,} episodes, {len(seconds)} pages",
        seconds=median,
        clock="CPU",
        throughput=1 / median,
        unit="pages/s",
        peak_gb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        baseline="DuckDB sorts the columns of a list",
        baseline_seconds=baseline_seconds,
        ratio=median / baseline_seconds,
        waits_ms={name: 1e3 * wait for name, wait in waits.items()},
        aims={"viewer, slowest page, cold": 1000.0, "viewer, slowest page, warm": 300.0},
    )


def _time(lk: lake.Lake, what: str, page: str, address: Address, another: Address) -> tuple[float, float]:
    session._viewed_lakes.clear()
    tab = Tab()
    first = tab.open(page, address)
    number = int(lk.sql("SELECT count(*) FROM episodes").item())
    with lk.job(kind="collect", run_id="run 0"):  # which changes `jobs`, too, as most commits do
        add_episodes(Path(lk.uri), number, number + SIBLINGS)
    tab = Tab()
    cold, warm = tab.open(page, address), tab.open(page, another)
    figures = (*first[:2], *cold[:2], *warm)
    print(f"| {what} | {' | '.join(f'{figure:.2f}' for figure in figures)} |", flush=True)
    return cold[0], warm[0]


if __name__ == "__main__":
    main()
