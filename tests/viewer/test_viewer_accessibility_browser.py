"""Pages against axe-core, light and dark: nothing serious or critical, nothing wider than the window or too large.

The group that is shown has 300 siblings, the episodes a thousand steps.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Error as BrowserError

from lake import Lake, ids
from testkit.browser_pages import go
from testkit.lakes import RUN, add_credit, add_training, build_lake, rollout

pytestmark = pytest.mark.browser

WIDTHS, NARROW = (1440, 1024), 480
MOST_NODES = 5_000
SIBLINGS, STEPS = 300, 1_000
KINDS = ("/", "/episodes", "/episode", "/compare")
"""Pages that differ in kind: charts, a list, a transcript, columns side by side."""
SCHEMES = ("light", "dark")
SMALL_CHIPS = """
    [...document.querySelectorAll("code, .mark, .chip, .trajlake-chips > *")]
        .filter(chip => !chip.closest("pre") && parseFloat(getComputedStyle(chip).fontSize) < 12)
        .map(chip => `is written small: ${chip.textContent}`)
"""
"""Names, ids and marks in less than 12 px."""
CUT = """
    [...document.querySelectorAll(".trajlake-table")]
        .filter(table => table.scrollWidth > table.clientWidth)
        .map(table => `has a table that is wider than its frame: ${table.ariaLabel}`)
"""
STREAMLIT: dict[str, str] = {}
"""What Streamlit's own elements break, by `rule: selector of the element`, and why that cannot be changed here."""


@pytest.fixture(scope="module")
def lk(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    lk = build_lake(tmp_path_factory.mktemp("accessibility"))
    many = [rollout("many", n, float(n % 2), num_steps=STEPS if n < 2 else 1) for n in range(SIBLINGS)]
    for walk in many[:2]:
        for index, step in enumerate(walk.steps):
            step.action = f"go {index}"  # equal ones would be folded to a line
    with lk.job(kind="collect", run_id=RUN) as job:
        job.record(many)
    add_credit(lk)
    add_training(lk)
    return lk


def pages(lk: Lake) -> Iterator[tuple[str, str]]:
    """Every page: its address and its heading."""
    query = "SELECT group_id, list(episode_id ORDER BY rollout_index) FROM episodes WHERE task_id = 'many' GROUP BY ALL"
    group, siblings = lk.sql(f"{query} LIMIT 1").row(0)
    first, second = (ids.to_text(episode) for episode in siblings[:2])
    job = lk.sql("SELECT any_value(job_id) FROM job_runs WHERE kind = 'credit'").item()
    yield "/", "Runs"
    yield "/episodes?facets=true", "Episodes"
    yield f"/episode?episode={first}&step=0", "Episode"
    yield "/groups", "Groups"
    yield f"/group?group={ids.to_text(group)}", "Group"
    yield f"/compare?episode={first}&episode={second}", "Side by side"
    yield "/anchors", "Anchors"
    yield "/training?update=1", "Training"
    yield f"/change?a_run={RUN}&a_rounds=0&b_run={RUN}&b_rounds=1", "What changed"
    yield "/jobs", "Jobs"
    yield f"/job?job={ids.to_text(job)}", "Job"
    yield "/annotations", "Annotations"
    yield "/sql?q=SELECT+1+AS+one", "SQL"
    yield "/rejects", "Rejects"


def faults(page: Any) -> list[str]:
    """What axe finds that keeps readers out, but for what Streamlit alone can change."""
    violations = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    messages = [
        f"{rule['id']}: {' '.join(map(str, node['target']))} ({node['failureSummary']})"
        for rule in violations
        if rule["impact"] in ("serious", "critical")
        for node in rule["nodes"]
    ]
    return [fault for fault in messages if not any(fault.startswith(prefix) for prefix in STREAMLIT)]


def lasting(page: Any, faults_now: str) -> list[str]:
    """Faults of a page that do not pass: one that takes up a theme runs again, and its styles with it."""
    with suppress(BrowserError):
        page.wait_for_function(f"() => ({faults_now}).length === 0", timeout=10_000)
    texts: list[str] = page.evaluate(faults_now)
    return texts


@pytest.mark.parametrize(
    ("is_everything", "turn"),
    [
        pytest.param(False, 0, id="kinds"),
        pytest.param(True, 0, id="all", marks=pytest.mark.slow("every page is readable, half of them dark")),
        pytest.param(True, 1, id="all, turned", marks=pytest.mark.slow("every page is readable, the other half dark")),
    ],
)
def test_nothing_keeps_readers_out_of_a_page(page: Any, lk: Lake, is_everything: bool, turn: int) -> None:
    """One half is light, the other dark; widths take turns, and a conversation is narrow too."""
    faults_by_page: dict[str, list[str]] = {}
    walked = [(path, heading) for path, heading in pages(lk) if is_everything or path.partition("?")[0] in KINDS]
    assert is_everything or len(walked) == len(KINDS)
    for number, (path, heading) in enumerate(walked):
        scheme = SCHEMES[(2 * number // len(walked) + turn) % 2]
        width = WIDTHS[(number + turn) % 2]
        if path.startswith("/episode?") and not is_everything:
            width = NARROW
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        go(page, path, heading)
        faults_found = faults(page)
        if (background_of(page) == "dark") != (scheme == "dark"):
            faults_found.append(f"does not follow the scheme {scheme}")
        overflow = "document.querySelector('[data-testid=stMain]')"
        if page.evaluate(f"{overflow}.scrollWidth > {overflow}.clientWidth"):
            faults_found.append("is wider than the window")
        if (nodes := page.evaluate("document.querySelectorAll('*').length")) >= MOST_NODES:
            faults_found.append(f"has {nodes} elements")
        faults_found += lasting(page, SMALL_CHIPS)
        faults_found += lasting(page, CUT)
        if faults_found:
            faults_by_page[f"{path} at {width}, {scheme}"] = faults_found
    assert faults_by_page == {}


def background_of(page: Any) -> str:
    """Whether text is brighter than what is behind it (dark), or not (light)."""
    colours = page.evaluate(
        "() => ['backgroundColor', 'color'].map(name => getComputedStyle(document.querySelector('.stApp'))[name])"
    )
    background, text = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in colours)
    return "light" if background > text else "dark"
