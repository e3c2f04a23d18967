"""Many sessions at once on a real server: every page comes, and the server answers throughout."""

import ast
import itertools
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import urlopen

import pytest

from lake import Lake, ids
from testkit.lakes import add_credit, add_training, build_lake, siblings
from testkit.processes import environment
from testkit.viewer_process import Viewer, viewer
from testkit.viewer_sessions import PATIENCE, session

ROOT = Path(__file__).resolve().parents[2]
TABS = 10
CALLBACKS = {
    *("map_elements", "map_batches", "map_groups", "map_rows", "rolling_map", "fold", "reduce", "cum_fold"),
    *("cum_reduce", "register_io_source", "create_function", "sink_batches", "collect_batches", "pipe_with_schema"),
}
"""What makes Polars or DuckDB call a Python function from one of their threads."""


@pytest.fixture(scope="module")
def lk(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    episodes = [record for task in range(30) for record in siblings(f"task {task}", [1.0, 0.0, 0.5], num_steps=6)]
    lk = build_lake(tmp_path_factory.mktemp("sessions"), episodes)
    add_credit(lk)
    add_training(lk)
    return lk


def addresses(lk: Lake) -> list[tuple[str, str]]:
    """Every page of the lake that a tab may open: path and query."""
    addresses = [(name, "") for name in ("", "episodes", "groups", "training", "jobs", "rejects")]
    for page, column, table in (("episode", "episode_id", "episodes"), ("group", "group_id", "episodes")):
        values = lk.sql(f"SELECT DISTINCT {column} AS id FROM {table} ORDER BY id")["id"]
        addresses += [(page, f"{page}={ids.to_text(value)}") for value in values]
    return addresses + [("job", f"job={ids.to_text(job)}") for job in lk.sql("SELECT job_id FROM job_runs")["job_id"]]


def walk(running: Viewer, pages: Iterator[tuple[str, str]], end: float) -> int:
    """Open one page after the other in a tab until the end; how many."""
    with session(running.address) as tab:
        for number, (page, query) in enumerate(pages):
            if number and time.monotonic() > end:
                return number
            shown_page = tab.open(page, query)
            assert "exception {" not in shown_page, shown_page[shown_page.index("exception {") :][:2000]
    return 0


def work_together(lk: Lake, seconds: float) -> None:
    """Ten tabs walk through different pages from the first moment on, while health is asked for."""
    pages = addresses(lk)
    with viewer(lk.uri) as running, ThreadPoolExecutor(TABS) as pool:
        end = time.monotonic() + seconds
        ways = [itertools.islice(itertools.cycle(pages), tab * 7 % len(pages), None, tab + 1) for tab in range(TABS)]
        tabs = [pool.submit(walk, running, way, end) for way in ways]
        try:
            while not all(tab.done() for tab in tabs):
                with urlopen(f"{running.address}/_stcore/health", timeout=PATIENCE) as answer:
                    assert answer.read() == b"ok"
                time.sleep(0.2)
        except OSError:
            # Nothing but this ends a server whose threads wait for each other.
            running.process.kill()
            raise
        assert all(tab.result() for tab in tabs)
        assert "Traceback" not in "".join(running.said)


@pytest.mark.slow(
    "Ten sessions at once get their pages; two that do not wait for each other are in test_viewer_session.py."
)
def test_ten_sessions_at_once_get_their_pages_from_the_first_moment_on(lk: Lake) -> None:
    work_together(lk, 4)


@pytest.mark.slow
def test_ten_sessions_work_together_for_a_minute(lk: Lake) -> None:
    work_together(lk, 60)


FRAMES = """
import threading
import polars as pl
from lake.cli.options import format_ids

frame = pl.DataFrame({"episode_id": range(200), "group_id": range(200), "job_id": range(200), "text": ["a"] * 200})
ended = threading.Event()

def repeat(convert):
    while not ended.is_set():
        convert()

# A frame of its own for each, as sessions have: Polars 2.1 itself waits for ever where to_pandas of one thread meets
# another thread's reading of the same frame.
works = (frame.clone().to_arrow, frame.clone().to_pandas)
threads = [threading.Thread(target=repeat, args=(work,), daemon=True) for work in works]
[thread.start() for thread in threads]
for _ in range(100):
    format_ids(frame)
ended.set()
[thread.join() for thread in threads]
print("done")
"""


def test_frames_are_made_readable_while_other_threads_convert_theirs() -> None:
    """In its own process: threads that wait for each other cannot be ended."""
    done = subprocess.run(
        [sys.executable, "-c", FRAMES], env=environment(), capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert done.stdout == "done\n"


@pytest.mark.parametrize("layer", ["viewer", "lake"])
def test_polars_and_duckdb_call_no_function_of_ours(layer: str) -> None:
    """Their threads would wait for the interpreter, which anyone who waits for those threads may hold."""
    slow_pages = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.attr}"
        for path in sorted((ROOT / layer).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in CALLBACKS
    ]
    assert slow_pages == []
