"""The transcript in a real browser, as a conversation and as an outline: light however long, and harmless."""

import base64
import json
import re
import struct
import zlib
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import parse_qs, urlsplit
from urllib.request import Request, urlopen

import polars as pl
import pytest

from lake import Lake, ids
from lake.records import EpisodeRecord, StepRecord, TokensRecord
from testkit.browser_pages import open_row
from testkit.command_line import runner
from testkit.lakes import add_credit, build_lake, rollout
from viewer.reader import Reader
from viewer.transcript.page import load_episodes, render_html

pytestmark = pytest.mark.browser
VIEWPORT = {"width": 1440, "height": 900}

MARK = "window.hostile = (window.hostile || 0) + 1"
HOSTILE = f"<script>{MARK}</script><img src=x onerror='{MARK}'> [click](javascript:{MARK}) \u202e"
LONG = 600_000
"""Characters of a text that is cut twice: in a page, and where all of it is asked for."""
MANY = 1000
NODES = 5000
"""Elements that a page may have."""


def pixel() -> str:
    """A PNG of one red pixel, as a data URI."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\x00\xff\x00\x00")) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + body).decode()


def chat() -> EpisodeRecord:
    """Three steps: everything hostile; two calls with their results and an image; a long text."""
    record = rollout("chat", 0, 1.0)
    hostile, calls, long = record.steps
    many = 20_000
    tokens = {"action_ids": [7] * many, "action_logprobs": [-1.0] * many}
    calls.tokens = TokensRecord(context_ids=[1], prefix_step_index=None, **tokens)
    hostile.state = hostile.action = hostile.reasoning = HOSTILE
    hostile.tool_calls = [{"function": {"name": HOSTILE, "arguments": HOSTILE}}]
    hostile.context = [{"role": HOSTILE, "content": f"more {HOSTILE}"}]
    calls.action = "Now **I** look. \x1b[31mred\x1b[0m"
    calls.reasoning = (
        "# Plan\n- one\n- `two`\n\n[a page](http://beacon.invalid/)\n\nIt is **$x^2 < 4$**, for $5 and $6.\n"
        "$$\n\\frac{a}{b}\n$$\n$\\href{javascript:alert(1)}{y}$"
    )
    arguments = '{"code": "first line\\nsecond line", "deep": {"n": 1}}'
    calls.tool_calls = [{"id": "a", "function": {"name": "run", "arguments": arguments}}]
    image = {"type": "image_url", "image_url": {"url": pixel()}}
    long.context = [
        {"role": "tool", "tool_call_id": "a", "content": "It ran."},
        {"role": "user", "content": [{"type": "text", "text": "A picture:"}, image]},
    ]
    long.state = "z" * LONG + " needle"
    return record


def walk() -> EpisodeRecord:
    """Many steps; ten go to and fro."""
    record = rollout("walk", 0, 1.0, num_steps=MANY)
    for index, step in enumerate(record.steps):
        step.action = ("attic", "cellar")[index % 2] if 20 <= index < 30 else f"go {index}"
        step.latency = 0.5
    record.steps[700].reasoning = "A needle in a haystack."
    record.steps[704].reasoning, record.steps[705].reasoning = "The hay is dry.", "Dry is the hay."
    lines = "\n\n".join(f"line {number}" for number in range(200))
    for step, reply in ((900, lines), (902, f"Error: {lines}")):
        record.steps[step].tool_calls = [{"id": "log", "function": {"name": "log", "arguments": "{}"}}]
        record.steps[step + 1].context = [{"role": "tool", "tool_call_id": "log", "content": reply}]
    record.steps[905].context = [{"role": "user", "content": f"OBSERVATION:\n{lines}"}]
    code = {"code": "\n".join(f"print({number})" for number in range(100))}
    record.steps[800].tool_calls = [{"function": {"name": "run", "arguments": json.dumps(code)}}]
    record.steps[801].action = "```\n" + "loud\n" * 60_000 + "```"
    for step in record.steps[600:690:2]:
        step.reasoning = "A long thought. " * 150
    return record


@pytest.fixture(scope="module")
def lk(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    pair = [rollout("judged", number, float(number)) for number in range(2)]
    pair[0].ground_truth = {"open": ["the chest", "the door"]}
    lk = build_lake(tmp_path_factory.mktemp("transcript"), [chat(), rollout("chat", 1, 0.0), walk(), short(), *pair])
    judged = lk.sql("SELECT run_id, group_id, episode_id FROM episodes WHERE task_id = 'judged'")
    version = {"scorer_version": pl.lit("1"), "step_index": pl.lit(None, pl.Int32)}
    with lk.job(kind="score") as job:
        for number in range(6):
            score = {"value": pl.lit(number / 6), "reason": pl.lit(f"The {number}th reason is short.")}
            job.write("scores", judged.with_columns(scorer=pl.lit(f"a_judge_of_quality_{number}"), **score, **version))
        checks = pl.DataFrame({"scorer": [f"unit test number {number}" for number in range(244)]})
        job.write("scores", judged.join(checks.with_columns(value=1.0, **version), how="cross"))
    add_agents(lk)
    add_credit(lk, episode_norm="mean_norm")
    add_credit(lk)
    return lk


def add_agents(lk: Lake) -> None:
    """A sub-agent of a hostile name and texts at step 0 of `judged`, and its own sub-agent at an unknown step."""
    parent = lk.sql("SELECT episode_id FROM episodes WHERE task_id = 'judged' AND rollout_index = 0").item()
    for task, agent, step in (("part", HOSTILE, 0), ("part of the part", "inner", None)):
        record = rollout(task, 0, None, agent_id=agent, relation="subagent", parent_episode_id=ids.to_text(parent))
        record.parent_step_index = step
        record.steps[0].action = f"{HOSTILE} said {agent}"
        with lk.job(kind="collect", run_id="demo") as job:
            job.record([record])
        parent = lk.sql("SELECT episode_id FROM episodes WHERE task_id = ?", [task]).item()


def short() -> EpisodeRecord:
    """One step of a few words."""
    return EpisodeRecord(
        task_id="short", rollout_index=0, status="completed", steps=[StepRecord(state="Go.", action="stop")]
    )


EPISODE_OF = "SELECT episode_id FROM episodes WHERE task_id = ? AND rollout_index = 0"


def go(page: Any, lk: Lake, task: str, **address: str | int) -> None:
    """Open an episode and wait until its transcript stands: the outline, unless the address names no view."""
    address = {"view": "outline"} | address
    extra = "".join(f"&{name}={value}" for name, value in address.items())
    page.goto(f"/episode?episode={ids.to_text(lk.sql(EPISODE_OF, [task]).item())}{extra}")
    page.locator("[data-testid=stApp][data-test-script-state=notRunning]").wait_for()
    page.locator(".trajlake-transcript .head").first.wait_for()


def line(page: Any, index: int | str) -> Any:
    return page.locator(f"[data-step='{index}']")


def opened(page: Any, index: int) -> Any:
    """The texts of an opened step, once they are there."""
    texts = line(page, index).locator(".texts")
    texts.wait_for()
    return texts


def nodes(page: Any) -> int:
    return int(page.evaluate("document.querySelectorAll('*').length"))


def frames_sent(page: Any) -> list[Any]:
    """What the page says to Streamlit from now on, a frame each."""
    sent: list[Any] = []

    def note(frame: Any) -> None:
        sent.append(frame)

    page.on("websocket", lambda socket: socket.on("framesent", note))
    return sent


def focused(page: Any) -> str:
    return str(page.evaluate("document.activeElement.closest('[data-step]')?.dataset.step"))


def on_screen(page: Any, index: int) -> None:
    """Wait until a line is below the bar and above the screen's end."""
    page.wait_for_function(
        f"() => {{ const box = document.querySelector(\"[data-step='{index}'] .head\")?.getBoundingClientRect();"
        " return box && box.top > 60 && box.bottom < innerHeight; }"
    )


def top_of(page: Any, index: int) -> float:
    """Where a step begins, in pixels below the bar above the transcript."""
    script = f"""() => document.querySelector("[data-step='{index}']").getBoundingClientRect().top
        - document.querySelector('.trajlake-transcript .toolbar').getBoundingClientRect().bottom"""
    return float(page.evaluate(script))


def test_an_episode_opens_as_a_conversation_and_a_switch_keeps_the_step(page: Any, lk: Lake) -> None:
    """Deep link, switch by key, the choice in the address and in the browser; light at every place of 1,000 steps."""
    go(page, lk, "walk", view="", step=777)
    line(page, 777).get_by_text("You are on path 0.777.").wait_for()
    assert -2 < top_of(page, 777) < 60
    assert page.locator(".speech.by-assistant").count() > 2
    assert nodes(page) < NODES
    page.keyboard.press("v")
    page.wait_for_function("() => !document.querySelector('.trajlake-transcript.conversation')")
    page.wait_for_timeout(300)
    assert -2 < top_of(page, 777) < 60
    assert parse_qs(urlsplit(page.url).query)["view"] == ["outline"]
    page.get_by_role("button", name="Conversation").click()
    line(page, 777).locator(".speech").first.wait_for()
    page.wait_for_timeout(300)
    assert -2 < top_of(page, 777) < 60
    page.keyboard.press("j")
    assert focused(page) == "777", "the step in view"
    for part in (0.2, 0.9):
        page.evaluate(
            "part => { const main = document.querySelector('[data-testid=stMain]');"
            " main.scrollTo(0, part * main.scrollHeight); }",
            part,
        )
        page.wait_for_function(
            "() => [...document.querySelectorAll('.speech')].some(speech =>"
            " speech.getBoundingClientRect().top > 0 && speech.getBoundingClientRect().top < innerHeight)"
        )
        assert nodes(page) < NODES
    page.evaluate("document.activeElement.blur()")
    main = "document.querySelector('[data-testid=stMain]')"
    for key, end in (("End", f"{main}.scrollHeight - {main}.clientHeight"), ("Home", "0")):
        page.keyboard.press(key)
        page.wait_for_timeout(800)
        assert page.evaluate(f"Math.abs({main}.scrollTop - ({end}))") < 60, key
    page.keyboard.press("j")
    assert focused(page) == "0", "the messages before the steps have nothing to open"
    page.get_by_role("button", name="Outline").click()
    go(page, lk, "short", view="")
    assert page.locator(".trajlake-transcript.conversation").count() == 0, "the browser remembers the choice"


def test_what_is_read_stays_in_place_and_folded_output_shows_its_first_lines(page: Any, lk: Lake) -> None:
    """Above the reader steps are drawn that are about as high as they were taken to be."""
    go(page, lk, "walk", view="conversation", step=700)
    line(page, 700).locator(".speech").first.wait_for()
    page.mouse.move(600, 500)
    for _ in range(8):
        page.mouse.wheel(0, -400)
        page.wait_for_timeout(250)
        near = page.locator(".step.turn").evaluate_all(
            "rows => Number(rows.find(row => row.getBoundingClientRect().bottom > 300).dataset.step)"
        )
        before = top_of(page, near)
        page.wait_for_timeout(250)
        assert abs(top_of(page, near) - before) < 5
    assert near < 695
    errors = page.evaluate(
        "() => { const view = document[Symbol.for('trajlake.transcript')];"
        " return [...view.heights].map(([index, height]) => Math.abs(view.estimate(index) - height)); }"
    )
    assert len(errors) > 8
    assert sum(errors) / len(errors) < 40
    go(page, lk, "walk", view="conversation", step=900)
    preview = line(page, 900).locator("details.result:not([open]) > summary .preview")
    preview.wait_for()
    assert preview.get_attribute("data-text").splitlines() == [f"line {number}" for number in range(4)]
    assert 50 < preview.bounding_box()["height"] < 90
    assert nodes(page) < NODES
    page.keyboard.press("v")  # the outline folds what the step before has shown, and opens a reply that failed
    for step, kind, is_open in ((901, "message", False), (902, "result", True), (905, "message", False)):
        line(page, step).locator(".head").click()
        block = opened(page, step).locator(f".block.{kind}")
        assert block.evaluate("block => block.open") is is_open
    assert "the reply to step 904" in line(page, 905).locator(".block.message > summary").inner_text()
    go(page, lk, "walk", view="conversation", step=660)
    thought = line(page, 660).locator("details.reasoning:not([open]) > summary .preview")
    thought.wait_for()
    assert 50 < thought.bounding_box()["height"] < 90
    before, panel = top_of(page, 660), page.locator(".waterfall")
    page.get_by_role("button", name="Waterfall").click()
    panel.wait_for()
    page.wait_for_timeout(300)
    assert 60 < panel.bounding_box()["y"] < 300, "it is in view"
    page.get_by_role("button", name="Waterfall").click()
    page.wait_for_timeout(300)
    assert abs(top_of(page, 660) - before) < 5, "the reader is back where the waterfall was opened"


def test_the_wheel_moves_the_page_over_a_long_box_whose_lines_a_button_shows(page: Any, lk: Lake) -> None:
    """The bar above stays in one row under long names, and the toolbar below it."""
    go(page, lk, "walk", view="conversation", step=800)
    box, whole = line(page, 800).locator(".cut"), line(page, 800).get_by_role("button", name="all 100 lines")
    whole.wait_for()
    line(page, 801).get_by_role("button", name="all 600 loaded lines", exact=True).wait_for()
    assert box.evaluate("box => box.scrollHeight > 2 * box.clientHeight")
    box.hover()
    before = top_of(page, 800)
    page.mouse.wheel(0, 200)
    page.wait_for_timeout(300)
    assert abs(before - top_of(page, 800) - 200) < 5
    assert box.evaluate("box => box.scrollTop") == 0
    page.locator(".trajlake-bar h1 a").first.evaluate("link => { link.textContent = 'a_long_name_'.repeat(12); }")
    page.wait_for_timeout(300)
    bar, tools = (page.locator(name).bounding_box() for name in (".st-key-bar", ".trajlake-transcript .toolbar"))
    assert bar["height"] < 50
    assert bar["y"] + bar["height"] <= tools["y"] + 3
    assert page.locator(".trajlake-bar h1 a").nth(1).bounding_box()["width"] > 20
    whole.click()
    line(page, 800).get_by_role("button", name="fewer lines").wait_for()
    assert line(page, 800).locator(".whole").evaluate("box => box.scrollHeight <= box.clientHeight + 1")


def test_a_conversation_shows_each_message_once_and_harmless(page: Any, lk: Lake) -> None:
    """The first message is on the first screen, below a small head; prompts are folded; hostile text does nothing."""
    go(page, lk, "chat", view="conversation")
    first = page.locator(".speech").first
    first.wait_for()
    assert first.bounding_box()["y"] < 420
    assert page.locator(".trajlake-head").bounding_box()["height"] <= 130
    system = page.locator(".speech.by-system details").first
    assert not system.evaluate("node => node.open")
    system.locator("summary").click()
    assert system.locator(".text").is_visible()
    texts = page.locator(".trajlake-transcript .list")
    texts.get_by_text("It ran.", exact=True).wait_for()
    # The buttons of a text stand neither on it nor on the text before.
    places = texts.locator(".block[open]:has(> .tools button)").evaluate_all(
        """blocks => blocks.map((block) => {
            const [tools, text] = [block.querySelector(".tools"), block.querySelector(".text")];
            const before = block.previousElementSibling?.querySelector(":scope > .text");
            const [{ top, bottom }, below] = [tools.getBoundingClientRect(), text.getBoundingClientRect().top];
            return [bottom <= below + 2, !before || top >= before.getBoundingClientRect().bottom - 2];
        })"""
    )
    assert len(places) > 4
    assert all(map(all, places)), places
    assert texts.get_by_text("It ran.", exact=True).count() == 1
    shown_text = texts.inner_text()
    assert f"<script>{MARK}</script>" in shown_text
    assert r"\u202e" in shown_text
    assert page.locator(".trajlake-transcript :is(script, iframe, [href^=javascript], [onerror])").count() == 0
    line(page, 1).locator(".margin").hover()
    assert "advantage" in line(page, 1).locator(".margin").get_attribute("title")
    line(page, 1).locator(".margin").click()
    line(page, 1).locator(".ledger").wait_for()


def test_a_sub_agent_opens_in_place_with_its_own_and_keys_stay_with_the_episode(
    page: Any, lk: Lake, tmp_path: Path
) -> None:
    """A page has them, and so has a file, which asks for nothing."""
    go(page, lk, "judged", view="conversation")
    address, branch = page.url, page.locator(".branch")
    assert page.locator(".branch .speech").count() == 0, "it is read when it is opened"
    branch.locator("summary .role").click()
    inner = page.locator(".branch .branch")
    inner.locator("summary .role").click()
    inner.locator(".speech", has_text="said inner").wait_for()
    assert "unknown step" in inner.locator("summary .role").first.inner_text()
    assert page.locator(".branch .toolbar").count() == 0
    page.locator(".branch .margin").first.click()
    assert page.url == address, "a step of a sub-agent is no step of the page's episode"
    page.keyboard.press("v")
    page.locator(".trajlake-transcript:not(.conversation) > .toolbar").wait_for()
    page.keyboard.press("v")
    inner.locator(".speech", has_text="said inner").wait_for()
    assert page.evaluate("window.hostile") is None
    own_page = branch.locator("> summary a").first.get_attribute("href")
    assert own_page == f"/episode?episode={ids.to_text(lk.sql(EPISODE_OF, ['part']).item())}"
    loaded = load_episodes(Reader(lk.snapshot()).read, None, [lk.sql(EPISODE_OF, ["judged"]).item()])
    (tmp_path / "judged.html").write_bytes(render_html(loaded))
    page.goto((tmp_path / "judged.html").as_uri())
    reason = page.locator(".trajlake-head .figures > .fold > summary").first
    assert reason.evaluate("node => getComputedStyle(node).textOverflow") == "ellipsis", "as on the page"
    branch.first.locator("summary .role").click()
    inner.locator("summary .role").click()
    inner.locator(".speech", has_text="said inner").wait_for()


@pytest.mark.slow("step 0 is on a small screen below what 250 scorers say")
def test_step_0_is_on_a_small_screen_below_what_250_scorers_say(page: Any, lk: Lake) -> None:
    page.set_viewport_size({"width": 1024, "height": 768})
    go(page, lk, "judged")
    on_screen(page, 0)
    figure = page.locator(".trajlake-head .fold", has_text="a_judge_of_quality_5")
    figure.get_by_text("The 5th reason is short.").first.wait_for()
    figure.locator("summary").click()
    reason = figure.locator(".drawn", has_text="The 5th reason is short.")
    reason.wait_for()
    reason.click()
    assert reason.is_visible()
    page.keyboard.press("Escape")
    assert not reason.is_visible()
    figure.locator("summary").click()
    reason.wait_for()
    page.locator(".trajlake-head .task").click()
    assert not reason.is_visible()
    check = page.locator(".trajlake-head").get_by_text("unit test number 243")
    assert not check.is_visible()
    page.locator(".trajlake-head .others > summary").click()
    check.wait_for()
    page.locator(".trajlake-head .expected", has_text="the chest").wait_for()
    for size in ({"width": 1024, "height": 768}, VIEWPORT):
        page.set_viewport_size(size)
        assert page.locator(".trajlake-head").bounding_box()["height"] <= 130


@pytest.mark.slow("the page of an episode opens at its top with step 0 on the screen")
@pytest.mark.parametrize("task", ["chat", "walk"])
def test_the_page_opens_at_its_top_with_step_0_on_the_screen(page: Any, lk: Lake, task: str) -> None:
    go(page, lk, task)
    on_screen(page, 0)
    assert page.evaluate("document.querySelector('[data-testid=stMain]').scrollTop") == 0
    assert page.locator(".body").count() == 0


@pytest.mark.slow("a step inside a fold is unfolded by its address")
def test_a_step_inside_a_fold_is_unfolded(page: Any, lk: Lake) -> None:
    go(page, lk, "walk", step=25)
    on_screen(page, 25)
    opened(page, 25)


def test_by_the_keyboard_alone(page: Any, lk: Lake) -> None:
    go(page, lk, "walk")
    page.keyboard.press("j")
    assert focused(page) == "-1", "the messages before the first step"
    for _ in range(3):
        page.keyboard.press("j")
    assert focused(page) == "2"
    page.keyboard.press("k")
    assert focused(page) == "1"
    page.keyboard.press("Enter")
    assert "go 1" in opened(page, 1).inner_text()
    assert parse_qs(urlsplit(page.url).query)["step"] == ["1"]
    assert focused(page) == "1"
    page.keyboard.press("Enter")
    line(page, 1).locator(".body").wait_for(state="detached")
    page.keyboard.press("/")
    page.keyboard.type("needle")
    page.keyboard.press("Enter")
    on_screen(page, 700)


def test_a_walk_through_many_steps_stays_light(page: Any, lk: Lake) -> None:
    """All are opened; those near the screen are drawn."""
    go(page, lk, "walk")
    on_screen(page, 0)
    assert page.evaluate("document.querySelector('[data-testid=stMain]').scrollTop") == 0
    assert page.locator(".body").count() == 0
    assert nodes(page) < NODES
    page.get_by_role("button", name="Open all").click()
    opened(page, 0)
    for part in (0.3, 0.6, 1.0):
        page.evaluate(
            "part => { const main = document.querySelector('[data-testid=stMain]');"
            " main.scrollTo(0, part * main.scrollHeight); }",
            part,
        )
        page.wait_for_function(
            "() => [...document.querySelectorAll('.body')].some(body => body.querySelector('.texts')"
            " && body.getBoundingClientRect().top > 0 && body.getBoundingClientRect().top < innerHeight)"
        )
        assert nodes(page) < NODES


def test_steps_open_with_few_requests_and_repeats_by_a_click(page: Any, lk: Lake) -> None:
    """A request each at most; what lies next to an opened step is there before it is asked for. Repeats are folded."""
    go(page, lk, "walk")
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    for index in range(10):
        line(page, index).locator(".head").click()
    for index in range(10):
        line(page, index).scroll_into_view_if_needed()
        opened(page, index)
    assert 0 < len(requests) <= 20
    line(page, 10).locator(".head").hover()
    line(page, 10).locator(".head").click()
    opened(page, 10)
    assert {urlsplit(url).path for url in requests} <= {"/transcript", "/opening"}, "the neighbours are read ahead"

    fold = line(page, "fold-20")
    assert fold.locator(".what").inner_text() == "attic \u2194 cellar \u00d75"
    assert line(page, 22).count() == 0
    fold.locator(".head").click()
    line(page, 29).wait_for()
    fold.locator(".head").click()
    line(page, 22).wait_for(state="detached")


def test_a_page_whose_versions_the_server_forgot_names_them_anew(page: Any, lk: Lake) -> None:
    """A server that was started again knows no names: the page is run again, and what was asked is asked again."""
    refused = []

    def forget(route: Any) -> None:
        if refused:
            route.continue_()
        else:
            refused.append(route.request.url)
            route.fulfill(status=410)

    sent = frames_sent(page)
    go(page, lk, "walk")
    page.route("**/transcript?*", forget)
    page.wait_for_timeout(500)
    before = len(sent)
    line(page, 12).locator(".head").click()
    assert "go 12" in opened(page, 12).inner_text()
    assert len(refused) == 1
    assert len(sent) > before


def test_a_deep_link_opens_its_step_and_answers_are_for_own_pages_and_named_versions(page: Any, lk: Lake) -> None:
    urls: list[str] = []
    page.on("request", lambda request: urls.append(request.url))
    go(page, lk, "walk", step=615)
    on_screen(page, 615)
    assert "You are on path 0.615." in opened(page, 615).inner_text()
    assert page.locator(".body").count() == 1
    line(page, 625).locator(".head").click()
    assert "go 625" in opened(page, 625).inner_text()
    address = next(url for url in urls if "/transcript?" in url)

    def status(url: str, **headers: str) -> int:
        try:
            with urlopen(Request(url, headers=headers)) as answer:
                assert answer.headers["content-type"] == "application/json"
                assert answer.headers["cross-origin-resource-policy"] == "same-origin"
                assert answer.headers["x-content-type-options"] == "nosniff"
                return int(answer.status)
        except HTTPError as refused:
            with refused:
                return refused.code

    of, episode = (parse_qs(urlsplit(address).query)[name][0] for name in ("of", "episode"))
    assert status(address) == 200
    assert status(address, **{"Sec-Fetch-Site": "same-origin"}) == 200
    for site in ("same-site", "cross-site", "none"):
        assert status(address, **{"Sec-Fetch-Site": site}) == 403
    other_server = "http://127.0.0.1:1"
    assert status(address, Origin=other_server) == 403
    assert status(address.replace(of, "0" * 13)) == 410
    assert status(address.replace(episode, "0" * 13)) == 404
    assert status(address.replace(episode, "nonsense")) == 400
    opening = address.replace("/transcript?", "/opening?")
    assert status(opening) == 200
    for wrong, code in ((of, 410), (episode, 404)):
        with pytest.raises(HTTPError) as refused, urlopen(opening.replace(wrong, "0" * 13)):
            pass
        with refused.value:
            assert (refused.value.code, lk.uri in refused.value.read().decode()) == (code, True)


@pytest.mark.slow("find marks what it found, and says of how many steps it is")
def test_find_reaches_steps_that_are_not_open(page: Any, lk: Lake) -> None:
    go(page, lk, "walk")
    page.get_by_label("Find in the episode").fill("NEEDLE in")
    page.get_by_text("1 of 1 step").wait_for()
    on_screen(page, 700)
    opened(page, 700).get_by_text("A needle in a haystack.").wait_for()
    page.wait_for_function("() => CSS.highlights.get('trajlake-found')?.size === 1")
    page.get_by_label("Find in the episode").fill("is dry")
    page.get_by_text("1 of 2 steps").wait_for()
    page.keyboard.press("Enter")
    opened(page, 705)
    # The words of the first step stand side by side, those of the second do not.
    page.wait_for_function("() => CSS.highlights.get('trajlake-found')?.size === 3")
    page.keyboard.press("Escape")
    page.wait_for_function("() => !CSS.highlights.get('trajlake-found')")
    field = "document.activeElement === document.querySelector('.trajlake-transcript input')"
    assert page.locator(".find .status").inner_text() == page.get_by_label("Find in the episode").input_value() == ""
    assert page.evaluate(field)
    page.keyboard.press("Escape")
    assert not page.evaluate(field)
    answers: list[Any] = []
    page.route("**/transcript?*find=*", lambda route: answers.append(route))  # noqa: PLW0108 - a builtin takes no mark
    page.get_by_label("Find in the episode").fill("nowhere at all")
    page.get_by_text("searching").wait_for()
    answers[0].continue_()
    page.get_by_text("nowhere in this episode").wait_for()
    page.unroute("**/transcript?*find=*")
    page.get_by_label("Find in the episode").fill(ids.to_text(lk.sql(EPISODE_OF, ["walk"]).item()))
    page.get_by_text("only as an id of this episode").wait_for()


@pytest.mark.slow("what a list was searched for is in the field of the episode that it opens, below its head")
def test_what_a_list_was_searched_for_is_marked_where_its_episode_opens(page: Any, lk: Lake) -> None:
    page.goto("/episodes?text=needle+haystack")
    open_row(page, "Episodes", 0)
    page.get_by_text("in 1 step, first at step 700").wait_for()
    assert page.get_by_label("Find in the episode").input_value() == "needle haystack"
    assert page.locator(".trajlake-head").bounding_box()["y"] > 0, "the head is on the screen"
    page.get_by_role("button", name="Next hit").click()
    page.get_by_text("1 of 1 step").wait_for()
    on_screen(page, 700)
    page.wait_for_function("() => CSS.highlights.get('trajlake-found')?.size === 2")
    page.get_by_label("Find in the episode").fill("")
    page.wait_for_function("() => !CSS.highlights.get('trajlake-found')")


def test_an_image_is_shown_and_a_long_text_is_cut_until_asked_for(page: Any, lk: Lake) -> None:
    go(page, lk, "chat", step=2)
    texts = opened(page, 2)
    texts.locator("img").wait_for()
    page.wait_for_function("() => document.querySelector('.trajlake-transcript img').naturalWidth === 1")
    assert len(texts.inner_text()) < 10_000
    texts.get_by_role("button", name=f"Show 500,000 of {LONG + 7:,} characters").click()
    texts.get_by_text(f"The first 500,000 of {LONG + 7:,} characters").wait_for()
    assert len(texts.locator("pre").filter(has_text="zzz").inner_text()) == 500_000
    assert nodes(page) < NODES


def test_a_call_and_its_result_are_one_block_and_texts_are_formatted_and_harmless(page: Any, lk: Lake) -> None:
    go(page, lk, "chat", step=1)
    pair = opened(page, 1).locator(".pair")
    assert pair.locator(".call .tool").inner_text() == "run"
    assert "It ran." in pair.locator("details.result").inner_text()
    assert pair.get_by_text("first line\nsecond line", exact=True).inner_text() == "first line\nsecond line"
    assert 'deep {"n": 1}' in pair.locator("details.call").inner_text()
    # Markdown is formatted without links, and a terminal's colours are drawn.
    texts = opened(page, 1)
    reasoning = texts.locator(".reasoning")
    assert reasoning.locator(".heading").inner_text() == "Plan"
    assert reasoning.locator("code").inner_text() == "two"
    assert "a page (http://beacon.invalid/)" in reasoning.inner_text()
    assert reasoning.locator("a, [href]").count() == 0
    assert reasoning.locator("strong math msup").text_content() == "x2"
    assert reasoning.locator(".formula math[display=block] mfrac").count() == 1
    assert "for $5 and $6." in reasoning.inner_text()
    reasoning.get_by_role("button", name="as written").click()
    assert "# Plan\n- one" in reasoning.locator("pre").inner_text()
    assert texts.locator(".action .terminal .fg1").inner_text() == "red"
    # Hostile text does nothing: the fixture's end asserts that no script ran and no other host was asked.
    line(page, 0).locator(".head").click()
    texts = opened(page, 0)
    for kind in ("state", "action", "reasoning", "call", "message"):
        text_shown = texts.locator(f".block.{kind} .text").first.inner_text()
        assert f"<script>{MARK}</script>" in text_shown, kind
        assert r"\u202e" in text_shown, kind
    assert page.locator(".trajlake-transcript :is(script, img, iframe, [href^=javascript])").count() == 0


@pytest.mark.slow("a text and a link are copied whole")
def test_a_text_is_copied_whole(page: Any, lk: Lake) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    go(page, lk, "walk", step=700)
    reasoning = opened(page, 700).locator(".reasoning")
    reasoning.get_by_role("button", name="copy").click()
    reasoning.get_by_text("copied", exact=True).wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == "A needle in a haystack."
    aside = line(page, 700).locator(".aside")
    aside.get_by_role("button", name="copy link").click()
    aside.get_by_text("copied", exact=True).wait_for()
    assert page.evaluate("navigator.clipboard.readText()").endswith("step=700")


def test_tokens_are_drawn_on_a_canvas_and_told_by_the_keyboard(page: Any, lk: Lake) -> None:
    go(page, lk, "chat", step=1)
    opened(page, 1)
    line(page, 1).get_by_role("button", name="Tokens").click()
    strip = line(page, 1).locator(".strip")
    strip.get_by_text("20,000 exact tokens of the engine, 20,000 sampled").wait_for()
    strip.locator("canvas").focus()
    page.keyboard.press("ArrowRight")
    strip.get_by_text(re.compile(r"token 0: id 7, .*behaviour log-probability .1\.000, sampled")).wait_for()
    painted = "node => new Set(node.getContext('2d').getImageData(0, 0, node.width, 40).data).size > 4"
    assert strip.locator("canvas").evaluate(painted)
    strip.get_by_text("No checkpoint rescored this step").wait_for()
    assert nodes(page) < NODES


@pytest.mark.slow("hiding reasoning keeps a step open")
def test_hiding_reasoning_keeps_the_step_open(page: Any, lk: Lake) -> None:
    go(page, lk, "walk", step=3)
    opened(page, 3)
    line(page, 4).locator(".head").click()
    page.get_by_role("button", name="Details").click()
    page.get_by_text("Reasoning", exact=True).click()
    page.wait_for_function("() => document.querySelector('.without-reasoning [data-step=\"4\"] .texts')")
    assert not line(page, 4).locator(".reasoning").is_visible()


@pytest.mark.slow("another credit keeps the reader's place in a transcript")
def test_another_credit_keeps_the_reader_s_place(page: Any, lk: Lake) -> None:
    go(page, lk, "chat", step=0)
    assert "+0.707" in line(page, 0).locator(".head").inner_text()
    line(page, 1).locator(".head").click()
    opened(page, 1)
    page.get_by_role("combobox", name="Credit").click()
    page.get_by_role("option").filter(has_not_text="current").first.click()
    page.wait_for_function("() => document.querySelector('[data-step=\"0\"] .head')?.innerText.includes('+0.500')")
    opened(page, 1).get_by_text("It ran.").wait_for()
    line(page, 1).locator(".aside").get_by_text("+0.500").first.wait_for()


def test_a_file_to_send_holds_all_and_asks_for_nothing(
    browser: Any, lk: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The siblings of a group, opened from the disk: hostile text is text, and no address is asked for anything."""
    group = ids.to_text(lk.sql("SELECT any_value(group_id) FROM episodes WHERE task_id = 'chat'").item())
    out = tmp_path / "chat.html"
    assert runner(monkeypatch, capsys)("page", "--lake", lk.uri, group, "--out", str(out)).code == 0
    page = browser.new_page(viewport=VIEWPORT)
    urls: list[str] = []
    faults: list[str] = []
    page.on("request", lambda request: urls.append(request.url))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: faults.append(message.text))
    page.goto(out.as_uri())
    for index, fragment in (
        (0, f"<script>{MARK}</script>"),
        (1, "It ran."),
        (2, f"The first 3,000 of {LONG + 7:,} characters"),
    ):
        line(page, index).scroll_into_view_if_needed()
        assert fragment in opened(page, index).inner_text()
    page.get_by_label("Find in the episode").fill("it RAN")
    page.get_by_text("1 of 1 step").wait_for()  # the message that the result came in, and not the result too
    page.get_by_label("Find in the episode").fill('"red" I')
    page.get_by_text("1 of 1 step").wait_for()
    page.get_by_role("button", name="Waterfall").click()
    assert page.locator(".waterfall").inner_text().endswith("of this episode.")
    assert page.locator(".waterfall .row, .waterfall button").count() == 0
    page.set_viewport_size({"width": 480, "height": 300})
    assert page.evaluate("document.documentElement.scrollWidth") == 480, "the index fits"
    page.get_by_role("link", name="rollout 1").click()
    heading = page.get_by_role("heading", name="demo / chat / 1")
    for _ in range(2):
        heading.wait_for()
        assert -2 < heading.bounding_box()["y"] < 100, "the episode is in view, below a higher index"
        address = page.url
        page.goto("about:blank")
        page.goto(address)
    line(page, -1).get_by_text("You are at the gate.").wait_for()
    assert page.evaluate("window.hostile") is None
    assert [url for url in urls if not url.startswith(("data:image/png", out.as_uri()))] == []
    assert faults == []
    page.close()
