"""The viewer's pages in a real Chromium: how long a click takes, how many elements a page has, what it costs to send.

    python benchmarks/bench_viewer_browser.py [--clicks 20]

Two lakes: an episode of a thousand steps, and conversations of tau-bench's shape. The browser's clock measures from the
click to the first frame that shows its effect. Requests that the server answers at once are measured for comparison.
The browser, the server and this script share the processors: run it where nothing else does.
"""

import argparse
import statistics
import sys
import tempfile
import urllib.request
from pathlib import Path
from time import perf_counter
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

import tau_like  # noqa: E402

import lake  # noqa: E402
from lake import Lake, ids  # noqa: E402
from testkit.browser_pages import fresh_page, settled  # noqa: E402
from testkit.browsers import chromium  # noqa: E402
from testkit.lakes import add_credit, build_lake, rollout  # noqa: E402
from testkit.viewer_process import viewer  # noqa: E402

MANY = 1_000
PAUSE_MS = 500
"""Between two clicks, as a reader makes."""

# Does something and resolves with the milliseconds until the page holds an element, painted.
UNTIL = """
([act, target, awaited]) => new Promise((resolve) => {
  const began = performance.now();
  const look = () => document.querySelector(awaited)
    ? requestAnimationFrame(() => resolve(performance.now() - began))
    : requestAnimationFrame(look);
  if (act === "back") history.back();
  else document.querySelector(target).click();
  look();
})
"""

# What acts, and an expression that is true once the page shows it, become one script: the page's policy forbids eval.
TIMED = """
() => new Promise((resolve) => {
  const visible = (selector) => [...document.querySelectorAll(selector)].filter((element) => element.checkVisibility());
  const title = () => visible("h1.path").at(-1)?.innerText;
  const status = () => visible(".find .status").at(-1)?.textContent;
  const write = (text) => {
    const field = visible(".find input").at(-1);
    field.value = text;
    field.dispatchEvent(new Event("input"));
  };
  const firstOnScreen = (selector) => visible(selector).find((element) => element.getBoundingClientRect().top > 0);
  const before = title(), began = performance.now();
  ACT;
  const look = () => (SHOWN)
    ? requestAnimationFrame(() => resolve(performance.now() - began))
    : requestAnimationFrame(look);
  look();
})
"""
CONVERSATIONS = 150
BYTES_OF_A_CONVERSATION = 25_000


def timed(page: Any, act: str, shown: str) -> float:
    """Milliseconds from an act until the page shows its effect, painted."""
    return float(page.evaluate(TIMED.replace("ACT", act).replace("SHOWN", shown)))


def long_lake(folder: Path) -> Lake:
    """Two siblings of a thousand steps, with a credit."""
    walks = [rollout("walk", index, float(index), num_steps=MANY) for index in range(2)]
    for walk in walks:
        for index, step in enumerate(walk.steps):
            step.action = f"go {index}"  # equal ones would be folded to a line
    lk = build_lake(folder, walks)
    add_credit(lk)
    return lk


def told(what: str, milliseconds: list[float]) -> None:
    """Print the least, the median and the most."""
    figures = (min(milliseconds), statistics.median(milliseconds), max(milliseconds))
    print(f"| {what} | {' | '.join(f'{figure:.0f}' for figure in figures)} |", flush=True)


def round_trips(address: str, times: int) -> list[float]:
    """Milliseconds of requests that the server answers at once."""
    found = []
    for _ in range(times):
        began = perf_counter()
        with urllib.request.urlopen(f"{address}/_stcore/health") as answer:
            answer.read()
        found.append(1_000 * (perf_counter() - began))
    return found


def elements(page: Any) -> int:
    """Elements of the page."""
    return int(page.evaluate("document.querySelectorAll('*').length"))


def steps(page: Any, episode: str, clicks: int) -> None:
    """Open steps of the long episode one after the other, each when the one before it stands."""
    frames: list[int] = []
    page.on("websocket", lambda socket: socket.on("framereceived", lambda frame: frames.append(len(frame))))

    def cost(what: str) -> None:
        print(f"| {what}: elements, messages, KB | {elements(page):,} | {len(frames)} | {sum(frames) / 1e3:.0f} |")
        frames.clear()

    page.goto(f"/episode?episode={episode}&view=outline")
    settled(page, "Episode")
    page.locator(".trajlake-transcript .head").first.wait_for()
    page.wait_for_timeout(2 * PAUSE_MS)
    cost(f"an episode of {MANY:,} steps")

    def opened(index: int) -> float:
        line = f"[data-step='{index}']"
        page.locator(line).scroll_into_view_if_needed()
        page.wait_for_timeout(PAUSE_MS)
        return float(page.evaluate(UNTIL, ["click", f"{line} .head", f"{line} .texts"]))

    # What lies beside an opened step is read ahead; a click from a script comes without a pointer over it.
    found = [(opened(index), opened(index + 1)) for index in range(0, 6 * clicks, 6)]
    told("a step opens that nothing announced, ms", [alone for alone, _ in found])
    told("a step opens beside an opened one, ms", [beside for _, beside in found])
    cost(f"{2 * clicks} steps open")


def pages(page: Any, clicks: int) -> None:
    """From a list to an episode and back, by links."""
    there, back = [], []
    page.goto("/episodes")
    settled(page, "Episodes")
    for _ in range(clicks):
        page.locator("tbody a[href*=episode]").first.wait_for()
        page.wait_for_timeout(PAUSE_MS)
        there.append(page.evaluate(UNTIL, ["click", "tbody a[href*=episode]", ".trajlake-transcript .head"]))
        settled(page, "Episode")
        page.wait_for_timeout(PAUSE_MS)
        back.append(page.evaluate(UNTIL, ["back", "", "tr.opened"]))
        settled(page, "Episodes")
    told("from the list to an episode, its transcript drawn, ms", there)
    told("Back to the list, its row marked, ms", back)


def turn(page: Any, label: str) -> float:
    """Go to the neighbour of an episode that a link names."""
    page.wait_for_timeout(PAUSE_MS)
    link = f"[...document.querySelectorAll('.turn a')].findLast((link) => link.innerText.includes('{label}'))"
    is_drawn = "title() !== before && document.querySelector('.trajlake-transcript .speech')"
    return timed(page, f"{link}.click()", is_drawn)


def conversations(page: Any, clicks: int) -> None:
    """Read conversations: to the next and back, their words, their messages and steps."""
    page.goto("/episodes")
    settled(page, "Episodes")
    page.locator("tbody a[href*=episode]").first.click()
    settled(page, "Episode")
    told("the next episode, its conversation drawn, ms", [turn(page, "Next") for _ in range(clicks)])
    told("the previous episode, which was read before, ms", [turn(page, "Previous") for _ in range(clicks)])
    settled(page, "Episode")
    hits, folds, ledgers = [], [], []
    for number in range(clicks):
        page.wait_for_timeout(PAUSE_MS)
        hits.append(timed(page, f"write('{'etao'[number % 4]}')", "status()"))
        page.wait_for_timeout(PAUSE_MS)
        timed(page, "write('')", "!status() && firstOnScreen('.speech details > summary')")
        summary = "firstOnScreen('.speech details > summary'); const was = summary.parentElement.open"
        folds.append(timed(page, f"const summary = {summary}; summary.click()", "summary.parentElement.open !== was"))
        page.wait_for_timeout(PAUSE_MS)
        opened = "document.querySelector('.step .aside')"
        ledgers.append(timed(page, "firstOnScreen('.step:not(.end) > .head').click()", opened))
        timed(page, f"{opened}.closest('.step').querySelector('.head').click()", f"!{opened}")
    told("find, its hits marked, ms", hits)
    told("a message folds, ms", folds)
    told("a step's ledger opens, ms", ledgers)


def conversation_lake(folder: Path) -> Lake:
    """Conversations of a simulated user with an agent that has tools, with a credit."""
    folder.mkdir()
    lk = lake.open(folder / "lake", create=True)
    source = folder / "airline.json"
    tau_like.write(source, CONVERSATIONS * BYTES_OF_A_CONVERSATION)
    lk.ingest(source)
    add_credit(lk, step_source="terminal_score")
    return lk


def main() -> None:
    """Make the lake, click, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clicks", type=int, default=20)
    clicks = parser.parse_args().clicks
    with tempfile.TemporaryDirectory() as folder:
        lk = long_lake(Path(folder))
        episode = ids.to_text(lk.sql("SELECT episode_id FROM episodes ORDER BY rollout_index LIMIT 1").item())
        print("| what | least | median | most |\n| --- | --- | --- | --- |")
        with viewer(lk.uri) as running, chromium() as browser:
            told("a request that is answered at once, ms", round_trips(running.address, clicks))
            with fresh_page(browser, running.address) as page:
                steps(page, episode, clicks)
            with fresh_page(browser, running.address) as page:
                pages(page, clicks)
        talks = conversation_lake(Path(folder, "talks"))
        with viewer(talks.uri) as running, chromium() as browser, fresh_page(browser, running.address) as page:
            conversations(page, clicks)


if __name__ == "__main__":
    main()
