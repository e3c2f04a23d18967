"""The frame around every page in a real browser, and the panels of a step: calls, waterfall, find, the SQL editor."""

from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

import polars as pl
import pytest

from lake import Lake, ids
from lake.records import SpanRecord
from testkit.browser_pages import fresh_page, go, open_row, settled
from testkit.lakes import build_lake, rollout
from testkit.viewer_process import Viewer, viewer

pytestmark = pytest.mark.browser
VIEWPORT = {"width": 1440, "height": 900}
START = datetime(2026, 1, 1, 12, tzinfo=UTC)
HOSTILE = "<img src=x onerror='window.hostile = 1'>\u202e"
MANY = 1000
NARROW = {"width": 480, "height": 900}


@pytest.fixture(scope="module")
def lk(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """An episode with times, spans and a judge, everything hostile; and one of many steps."""
    timed = rollout("timed", 0, 1.0, num_steps=3)
    timed.initial_messages = [{"role": "user", "content": "A needle_in_front of the steps."}]
    for index, step in enumerate(timed.steps):
        step.started_at, step.latency = START + timedelta(seconds=10 * index), 2.5
        step.model, step.finish_reason, step.extra = HOSTILE, "stop", {"as recorded": HOSTILE}
        step.prompt_tokens, step.completion_tokens = 1000 + index, 7
    ended = START + timedelta(seconds=40)
    span = SpanRecord(trace_id="t", span_id="s", kind="reward", name=HOSTILE, step_index=2, error=HOSTILE)
    span.started_at, span.ended_at = START + timedelta(seconds=30), ended
    grader = SpanRecord(trace_id="t", span_id="j", kind="model", name=f"grader {HOSTILE}")
    grader.started_at, grader.ended_at = START + timedelta(seconds=35), ended
    question = {"role": "user", "content": f"Is it right? {HOSTILE}"}
    verdict = {"message": {"role": "assistant", "content": f"It is **right**. {HOSTILE}"}}
    grader.attributes = {"input": [question], "output": {"choices": [verdict]}, "tokens": 17}
    timed.spans = [span, grader]
    lk = build_lake(tmp_path_factory.mktemp("frame"), [timed, rollout("long_walk", 0, 1.0, num_steps=MANY)])
    answer = {"request_id": 1, "episode_id": episode(lk, "timed"), "model": HOSTILE, "at": ended}
    answer |= {"prompt_tokens": 1234, "completion_tokens": 1, "answer": f"Good. {HOSTILE}"}
    with lk.job(kind="score", parameters={"scorer": "my_judge"}) as job:
        job.write("responses", pl.DataFrame([answer]))
    return lk


def episode(lk: Lake, task: str) -> int:
    return int(lk.sql("SELECT episode_id FROM episodes WHERE task_id = ?", [task]).item())


def open_episode(page: Any, lk: Lake, task: str, address: str = "") -> None:
    go(page, f"/episode?episode={ids.to_text(episode(lk, task))}&view=outline{address}", "Episode")
    page.locator(".trajlake-transcript .head").first.wait_for()


def top(page: Any, selector: str) -> float:
    return float(page.locator(selector).first.bounding_box()["y"])


def bottom(page: Any, selector: str) -> float:
    box = page.locator(selector).first.bounding_box()
    return float(box["y"] + box["height"])


def test_a_deep_link_fails_at_nothing_and_its_header_stands_still(running: Viewer, browser: Any, lk: Lake) -> None:
    with fresh_page(browser, running.address, viewport=VIEWPORT) as page:
        faults: list[str] = []
        page.on("console", lambda message: message.type == "error" and faults.append(message.text))
        page.on("response", lambda answer: answer.status >= 400 and faults.append(answer.url))
        tops = "window.tops = []; new MutationObserver(() => { const h = document.querySelector('h2');"
        tops += "if (h) tops.push(h.getBoundingClientRect().top) })"
        tops += ".observe(document, { childList: true, subtree: true })"
        page.add_init_script(tops)
        go(page, "/episodes?run=demo", "Episodes")
        assert faults == []
        seen = page.evaluate("[Math.min(...tops), Math.max(...tops)]")
        assert seen[1] - seen[0] < 4, f"the heading moved between {seen}"
        assert page.title() == "Episodes - Trajlake"


@pytest.mark.parametrize("size", [VIEWPORT, NARROW], ids=["wide", "narrow"])
def test_a_deep_link_to_a_step_shows_its_heading_below_what_stays_on_the_screen(page: Any, lk: Lake, size: Any) -> None:
    page.set_viewport_size(size)
    open_episode(page, lk, "long_walk", "&step=777")
    page.locator("[data-step='777'] .texts").wait_for()
    page.wait_for_function("() => document.querySelector(\"[data-step='777']\").getBoundingClientRect().top < 300")
    assert page.title() == "Episode demo / long_walk / 0, round 0 - Trajlake"
    head = top(page, "[data-step='777'] .head")
    for above in ("[data-testid=stHeader]", ".st-key-bar", ".toolbar"):
        assert bottom(page, above) <= head + 1, above
    if size == NARROW:
        path = page.locator("h1.path")
        assert path.inner_text() == "Episode demo \u203a long_walk \u203a group \u203a rollout 0, round 0"
        assert path.evaluate("(path) => path.scrollWidth <= path.clientWidth && path.clientWidth < 480")
        page.evaluate("document.querySelector('h1.path a').textContent = 'a_run_of_a_long_name_'.repeat(9)")
        assert path.evaluate("(path) => path.offsetHeight < 40"), "a long name is cut, and the path keeps one line"
        assert path.get_attribute("title") == "demo \u203a long_walk \u203a group \u203a rollout 0, round 0"
        link = path.get_by_role("link", name="long_walk")
        assert link.evaluate("(a) => parseFloat(getComputedStyle(a).textUnderlineOffset)") > 2, "underscores are seen"
        figures = page.locator(".trajlake-head .figures").filter(visible=True).first
        reason = f"<details class=fold><summary>judge <b>1</b> {'a reason of many words ' * 9}</summary></details>"
        figures.evaluate("(figures, reason) => { figures.innerHTML = reason; }", reason)
        summary = figures.locator("summary")
        assert summary.evaluate("(summary) => summary.getBoundingClientRect().right") <= NARROW["width"]
        assert summary.evaluate("(summary) => getComputedStyle(summary).textOverflow") == "ellipsis"
    else:
        page.set_viewport_size({"width": 1024, "height": 900})
        path = page.locator("h1.path")
        path.get_by_role("link", name="long_walk").evaluate("(task) => { task.textContent = 'long_walk_'.repeat(9); }")
        rollout_name = path.locator("> span")
        rollout_name.evaluate("(name) => { name.textContent = 'rollout 12345, round 67890, attempt 12345'; }")
        assert path.evaluate("(path) => path.scrollWidth <= path.clientWidth")
        cut = "(name) => name.scrollWidth > name.clientWidth && getComputedStyle(name).textOverflow"
        assert rollout_name.evaluate(cut) == "ellipsis", "what does not fit ends visibly"
        spare = "(a) => { const text = document.createRange(); text.selectNodeContents(a);"
        spare += "return a.getBoundingClientRect().width - text.getBoundingClientRect().width; }"
        assert path.get_by_role("link", name="demo").evaluate(spare) < 1, "no gap follows a short name"


def test_calls_times_and_judges_are_shown_as_recorded(page: Any, lk: Lake) -> None:
    """The call of a step; the waterfall, its axis and total; find in the messages before the steps; the keys."""
    open_episode(page, lk, "timed", "&step=1")
    page.locator("[data-step='1']").get_by_role("button", name="Call", exact=True).click()
    panel = page.locator(".call-panel")
    words = " ".join(panel.inner_text().split())
    for fact in ("latency 2.5 s", "tokens 1,001 in, 7 out", "finish reason stop", "cost not recorded", "12:00:10.000"):
        assert fact in words
    assert panel.locator("summary").all_inner_texts()[-1].startswith("as the source")

    page.get_by_role("button", name="Waterfall").click()
    panel = page.locator(".waterfall")
    panel.get_by_text("Total 40 s").wait_for()
    assert panel.locator(".axis span").all_inner_texts() == ["0 s", "10 s", "20 s", "30 s", "40 s"]
    assert panel.locator(".row .number").all_inner_texts()[1:] == ["2.5 s", "2.5 s", "2.5 s", "10 s", "5 s"]
    lefts = panel.locator(".track i").evaluate_all("(bars) => bars.map((bar) => parseFloat(bar.style.left))")
    assert lefts == [0, 25, 50, 75, 87.5]
    assert panel.locator(".track i.failed").count() == 1
    call = panel.get_by_role("button", name="grader")
    call.click()
    panel.locator(".call-panel .drawn strong", has_text="right").wait_for()
    assert "tokens 17" in panel.locator(".call-panel").inner_text()
    call.click()
    panel.locator(".call-panel").wait_for(state="detached")
    judge = panel.locator("details", has_text="my_judge")
    judge.locator("summary").click()
    judge.get_by_text("Good. <img").wait_for()

    page.get_by_label("Find in the episode").fill("NEEDLE_in_front")
    page.get_by_text("1 of 1 place").wait_for()
    page.locator("[data-step='-1'] .texts").get_by_text("needle_in_front").wait_for()

    page.keyboard.press("Escape")  # empties the field
    page.keyboard.press("Escape")  # leaves it
    page.keyboard.press("?")
    keys = page.get_by_role("dialog")
    assert {"j", "k", "/", "p", "?"} <= set(keys.locator("kbd").all_inner_texts())
    page.keyboard.press("Escape")
    keys.wait_for(state="detached")


def test_the_editor_colours_the_query_that_it_holds(page: Any, lk: Lake) -> None:
    go(page, "/sql", "SQL")
    field = page.locator(".st-key-query textarea")
    assert "monospace" in field.evaluate("(field) => getComputedStyle(field).fontFamily")
    field.fill(f"SELECT count(*), 'a' FROM episodes -- {HOSTILE}")
    page.locator(".trajlake-sql .comment").wait_for()
    marks = page.locator(".trajlake-sql i").evaluate_all("(marks) => marks.map((i) => [i.className, i.textContent])")
    assert [tuple(mark) for mark in marks[:5]] == [
        ("keyword", "SELECT"),
        ("function", "count"),
        ("text", "'a'"),
        ("keyword", "FROM"),
        ("table", "episodes"),
    ]
    page.get_by_text("Examples").click()
    page.get_by_role("link", name="Longest episodes").click()
    page.get_by_role("region", name="Rows").wait_for()
    assert page.locator(".trajlake-sql").inner_text().startswith("SELECT episode_id, run_id")


@pytest.mark.slow("a stopped server is named in words, with the command that starts it")
def test_a_stopped_server_is_named_in_words_with_the_command_that_starts_it(browser: Any, lk: Lake) -> None:
    """A page that the reader goes back to without a server is drawn once it has been started again."""
    with viewer(lk.uri) as started:
        page = browser.new_context(base_url=started.address, viewport=VIEWPORT).new_page()
        go(page, "/episodes", "Episodes")
        open_row(page, "Episodes", 0)
        settled(page, "Episode")
        page.locator(".trajlake-transcript .head").first.wait_for()
    stopped = page.get_by_role("alert")
    stopped.get_by_text(f"trajlake view --lake {lk.uri}").wait_for()
    assert "server has stopped" in stopped.inner_text()
    assert not page.get_by_text("streamlit run").is_visible()
    page.keyboard.type("/no")
    page.locator("[role=dialog]").wait_for(state="attached")
    page.keyboard.type("ne")
    assert page.get_by_label("Find in the episode").input_value() == "none", "no letter is a key"
    page.go_back()
    with viewer(lk.uri, "--port", str(urlsplit(started.address).port)):
        settled(page, "Episodes")
        stopped.wait_for(state="detached")
    page.context.close()
