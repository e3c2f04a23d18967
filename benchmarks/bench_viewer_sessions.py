"""Ten sessions of one viewer over the large lake: its memory, and whether one waits for what another searches.

    python benchmarks/bench_viewer_sessions.py --lake LAKE [--cache FOLDER]

The lake is `viewer_lake`'s, made if it is not there. The server is the real one, a process of its own; sessions are
websockets that speak Streamlit's protocol, as a browser does, and wait until the script of a page has ended. Seconds on
the clock, the server's CPU seconds, and the server's memory as the kernel counts it (RSS, and its peak).
"""

import argparse
import os
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from urllib.parse import urlencode

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

from viewer_lake import TOOLS, make  # noqa: E402

import lake  # noqa: E402
from lake.storage.local_cache import CACHE_VARIABLE  # noqa: E402
from testkit import viewer_sessions  # noqa: E402
from testkit.viewer_process import viewer  # noqa: E402
from testkit.viewer_sessions import Session, session  # noqa: E402

SESSIONS = 10
PAGES = 20
HEAD = "| what | pages | median, s | most, s |\n| --- | --- | --- | --- |"
_TICKS = os.sysconf("SC_CLK_TCK")
viewer_sessions.PATIENCE = 900.0


def opened(tab: Session, page: str, /, **address: str) -> float:
    """Seconds until a page has come, which must be sound."""
    began = perf_counter()
    said = tab.open(page, urlencode(address))
    seconds = perf_counter() - began
    assert "could not be read" not in said
    assert "Traceback" not in said
    return seconds


def megabytes(process: int, what: str) -> int:
    """A figure of the server's memory: VmRSS, VmHWM (its peak)."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith(what)).split()[1]) // 1024


def cpu(process: int) -> float:
    """CPU seconds of the server so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def told(what: str, seconds: Iterable[float]) -> None:
    """Print the median and the most."""
    found = list(seconds)
    print(f"| {what} | {len(found)} | {statistics.median(found):.2f} | {max(found):.2f} |", flush=True)


def beside(searching: Session, work: Callable[[], list[float]]) -> tuple[list[float], list[float]]:
    """Seconds of some work, and of the searches that another session makes meanwhile, each for other words."""
    done = threading.Event()

    def search() -> list[float]:
        found: list[float] = []
        while not done.is_set():
            number = len(found)
            found.append(opened(searching, "episodes", text=f"lamp{number} shelf{number + 1} door"))
        return found

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(search)
        try:
            seconds = work()
        finally:
            done.set()
        return seconds, running.result()


def reader(tab: Session, number: int, group: str, episode: str) -> list[float]:
    """What one of ten readers opens, with words, filters and pages that no other has."""
    run = f"run {number % 4}"
    return [
        opened(tab, "episodes", run=run, min=f"0.{number}"),
        opened(tab, "episodes", text=f"room{number} key{number}"),
        opened(tab, "episodes", sort="-outcome", round=str(number)),
        opened(tab, "episodes", tool=TOOLS[number], facets="true"),
        opened(tab, "group", group=group),
        opened(tab, "episode", episode=episode, list=urlencode({"run": run})),
        opened(tab, "training", update=str(number)),
        opened(tab, "groups", run=run, page=str(number + 2)),
        opened(tab, "", run=run),
    ]


def main() -> None:
    """Measure on one server."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lake", type=Path, help="a lake that an earlier call made, or where to make it")
    parser.add_argument("--cache", type=Path, help="a folder for the index that stays")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = arguments.lake or Path(folder, "lake")
        os.environ[CACHE_VARIABLE] = str(arguments.cache or folder)
        if not path.exists():
            make(path, 1_000_000)
        query = (
            "SELECT id_text(group_id), id_text(episode_id) FROM episodes WHERE rollout_index = 0 ORDER BY episode_id"
        )
        named = lake.open(path).sql(f"{query} LIMIT {SESSIONS}").rows()
        started = stack.enter_context(viewer(str(path)))
        server = started.process.pid
        tabs = [stack.enter_context(session(started.address)) for _ in range(SESSIONS)]
        print(f"server, nothing opened: {megabytes(server, 'VmRSS')} MB\n")
        print(HEAD)
        told("the first list", [opened(tabs[0], "episodes")])
        told("the first search, its index made", [opened(tabs[1], "episodes", text="lamp199 shelf3")])
        pages = [str(number) for number in range(2, PAGES + 2)]
        told("pages of the list, alone", [opened(tabs[0], "episodes", page=page) for page in pages])
        listed, searched = beside(tabs[1], lambda: [opened(tabs[0], "episodes", page=f"1{page}") for page in pages])
        told("pages of the list, beside searches", listed)
        told("those searches", searched)
        print(f"\nRSS: {megabytes(server, 'VmRSS')} MB, peak {megabytes(server, 'VmHWM')} MB\n", flush=True)
        print(HEAD)
        began, spent = perf_counter(), cpu(server)
        with ThreadPoolExecutor(SESSIONS) as pool:
            readers = [pool.submit(reader, tab, n, *named[n]) for n, tab in enumerate(tabs)]
            told(f"{SESSIONS} readers at once, each with its own", [s for one in readers for s in one.result()])
        print(f"\nin {perf_counter() - began:.0f} s, {cpu(server) - spent:.0f} CPU s", end="; ")
        print(f"RSS: {megabytes(server, 'VmRSS')} MB, peak {megabytes(server, 'VmHWM')} MB")


if __name__ == "__main__":
    main()
