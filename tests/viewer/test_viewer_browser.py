"""The viewer in a real browser: pages render, clicks lead where they should, hostile text does nothing."""

import re
from typing import Any
from urllib.parse import urlsplit

import pytest

from lake import Lake, ids
from testkit.browsed_lake import HOSTILE
from testkit.browser_pages import address, go, open_row, rows_of, settled
from testkit.browsers import REQUIRE, missing
from testkit.examples import mostly_slow
from testkit.lakes import RUN
from testkit.viewer_process import Viewer

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def lk(browsed_lake: Lake) -> Lake:
    return browsed_lake


@pytest.fixture(scope="module")
def running(browsed: Viewer) -> Viewer:
    return browsed


def stands_at(page: Any, place: str) -> None:
    """Wait until the bar tells this place in the list; Streamlit's own bar may lie hidden below it."""
    page.get_by_text(place).filter(visible=True).wait_for()


def episode_text(lk: Lake, task: str, index: int, round_: int = 0) -> str:
    query = "SELECT episode_id FROM episodes WHERE task_id = ? AND rollout_index = ? AND collection_round = ?"
    return ids.to_text(lk.sql(query, [task, index, round_]).item())


def test_from_the_list_to_an_episode_and_its_advantages(page: Any, lk: Lake) -> None:
    go(page, f"/episodes?run={RUN}&task=mixed&round=1", "Episodes")
    page.get_by_text("1 to 4 of 4 episodes").wait_for()
    open_row(page, "Episodes", 0)
    settled(page, "Episode")
    assert urlsplit(page.url).path == "/episode"
    first = page.locator("[data-step='0']")
    first.locator(".head").click()
    page.locator("[data-step='-1']").get_by_text("You are at the gate.", exact=True).wait_for()
    for text in ("Plan 0 of rollout 0.", "go right", "+0.866", "+1.732", "0.902"):
        first.get_by_text(text, exact=True).first.wait_for()
    page.get_by_text("1 of 4 episodes that match the filter").wait_for()
    page.get_by_role("link", name="Next \u203a").click()
    page.get_by_text("2 of 4 episodes that match the filter").filter(visible=True).first.wait_for()
    page.get_by_role("heading", name="rollout 1").wait_for()
    page.get_by_role("link", name="Back to the list").click()
    page.get_by_text("1 to 4 of 4 episodes").wait_for()
    assert address(page) == {
        "run": RUN,
        "task": "mixed",
        "round": "1",
        "opened": episode_text(lk, "mixed", 1, round_=1),
    }
    assert rows_of(page, "Episodes").nth(1).get_attribute("aria-current") == "true"


@pytest.mark.slow("Back and Forward go where the reader was, and the opened row is marked")
def test_back_and_forward_go_where_the_reader_was(page: Any, lk: Lake) -> None:
    """A link is one entry of the history; filter, order and page come back, and the opened row is marked."""
    go(page, "/groups?task=d*", "Groups")
    page.get_by_role("link", name="Mean steps").click()
    page.wait_for_url("**sort=-mean_steps*")
    open_row(page, "Groups", 1)
    settled(page, "Group")
    page.get_by_role("link", name="Groups of the run").click()
    settled(page, "Groups")
    page.go_back()
    settled(page, "Group")
    assert "group" in address(page)
    page.go_back()
    settled(page, "Groups")
    opened = lk.sql("SELECT any_value(group_id) FROM episodes WHERE task_id = 'dead' AND collection_round = 1").item()
    assert address(page) == {"task": "d*", "sort": "-mean_steps", "opened": ids.to_text(opened)}
    assert rows_of(page, "Groups").nth(1).get_attribute("aria-current") == "true"
    page.go_back()
    settled(page, "Groups")
    assert address(page) == {"task": "d*"}
    page.go_forward()
    page.wait_for_url("**sort=-mean_steps*")


def test_a_row_opens_in_a_tab_of_its_own(page: Any) -> None:
    go(page, f"/episodes?run={RUN}&task=mixed&round=1", "Episodes")
    row = rows_of(page, "Episodes").nth(2)
    with page.context.expect_page() as opened:
        row.click(modifiers=["ControlOrMeta"])
    opened.value.get_by_text("3 of 4 episodes that match the filter").wait_for()
    opened.value.close()
    assert urlsplit(page.url).path == "/episodes"


def tab_to(page: Any, label: str) -> None:
    """Press the Tab key until the element with a selector has the focus, and one sees that it has."""
    for _ in range(120):
        page.keyboard.press("Tab")
        if page.evaluate("wanted => document.activeElement.matches(wanted)", label):
            drawn = "e => getComputedStyle(e).outlineStyle + getComputedStyle(e, '::after').outlineStyle"
            assert page.evaluate(f"({drawn})(document.activeElement)") != "nonenone", label
            return
    raise AssertionError(f"the Tab key does not lead to {label}")


def test_from_runs_to_a_step_and_back_without_a_mouse(page: Any, lk: Lake) -> None:
    go(page, f"/?run={RUN}", "Runs")
    tab_to(page, f"a[href^='/episodes?run={RUN}']")
    page.keyboard.press("Enter")
    settled(page, "Episodes")
    row = f"a[data-opened='{episode_text(lk, 'mixed', 1)}']"
    tab_to(page, row)
    page.keyboard.press("Enter")
    settled(page, "Episode")
    page.locator("[data-step='2']").wait_for()
    for key in ("j", "j", "Enter"):
        page.keyboard.press(key)
    page.locator("[data-step='1'] .body").wait_for()
    assert address(page)["step"] == "1"
    tab_to(page, "a[href*='opened=']")
    page.keyboard.press("Enter")
    settled(page, "Episodes")
    page.locator("tr.opened").wait_for()
    assert page.locator("tr.opened").filter(has=page.locator(row)).count() == 1


def test_keys_walk_the_filtered_list(page: Any, lk: Lake) -> None:
    """No key is lost, however fast they are pressed, and neither is the text in the field that finds."""
    go(page, f"/episode?episode={episode_text(lk, 'mixed', 0)}&list=task%3Dmixed%26round%3D0", "Episode")
    stands_at(page, "1 of 4 episodes")
    field, status = page.get_by_label("Find in the episode"), page.locator(".find .status")
    field.fill("go")
    status.get_by_text("1 of ").wait_for()
    field.blur()
    press = "document.body.dispatchEvent(new KeyboardEvent('keydown', { key: 'n', bubbles: true }))"
    page.evaluate(f"{press}; {press}; {press}")
    stands_at(page, "4 of 4 episodes")
    page.wait_for_function("!document.body.classList.contains('trajlake-following')")
    status.get_by_text("first at step").wait_for()
    assert field.input_value() == "go"
    page.keyboard.press("p")  # the page may still be at work: the key waits for it
    stands_at(page, "3 of 4 episodes")


# Notes in each frame which drawing of which conversation is shown, the rollout of the visible bar, and whether the
# parts that Streamlit draws for an episode are visible.
_WATCH = """() => {
  window.frames = [];
  const look = () => {
    const view = document[Symbol.for("trajlake.transcript")];
    const bars = [...document.querySelectorAll(".trajlake-bar .path")].filter((bar) => bar.getClientRects().length);
    const controls = getComputedStyle(document.querySelector(".st-key-episode-controls")).visibility === "visible";
    view.drawing ??= frames.length;
    const rollouts = bars.map((bar) => bar.textContent.match(/rollout (\\d+)/)[1]);
    frames.push([view.drawing, view.episode, rollouts.join(), controls]);
    requestAnimationFrame(look);
  };
  look();
}"""
_TEXT = "document.querySelector('.trajlake-transcript').textContent"


def test_the_next_episode_is_drawn_once_and_nothing_of_the_one_before_stands_beside_it(page: Any, lk: Lake) -> None:
    first, second = (episode_text(lk, "mixed", rollout) for rollout in (0, 1))
    go(page, f"/episode?episode={first}&list=task%3Dmixed%26round%3D0", "Episode")
    page.wait_for_timeout(500)
    page.evaluate(_WATCH)
    page.keyboard.press("n")
    stands_at(page, "2 of 4 episodes")
    assert address(page)["episode"] == second
    page.wait_for_function("frames.at(-1)[3]")
    frames = page.evaluate("frames")
    assert {(episode, rollout) for _, episode, rollout, _ in frames} == {(first, "0"), (second, "1")}
    of_second = [(drawing, controls) for drawing, episode, _, controls in frames if episode == second]
    assert len({drawing for drawing, _ in of_second}) == 1
    assert not of_second[0][1], "the credit and the details are of the first one until Streamlit has drawn them anew"
    shown = page.evaluate(_TEXT)
    page.reload()
    settled(page, "Episode")
    assert page.evaluate(_TEXT) == shown
    page.go_back()
    stands_at(page, "1 of 4 episodes")
    page.keyboard.press("n")
    stands_at(page, "2 of 4 episodes")
    page.go_back()  # before Streamlit has drawn the second one
    stands_at(page, "1 of 4 episodes")
    page.wait_for_function("!document.body.classList.contains('trajlake-following')")
    assert address(page)["episode"] == page.evaluate("document[Symbol.for('trajlake.transcript')].episode") == first


def test_without_an_answer_for_the_next_episode_streamlit_draws_it(page: Any, lk: Lake) -> None:
    page.route("**/opening?*", lambda route: route.fulfill(status=410))
    go(page, f"/episode?episode={episode_text(lk, 'mixed', 0)}&list=task%3Dmixed%26round%3D0", "Episode")
    page.keyboard.press("n")
    stands_at(page, "2 of 4 episodes")
    assert address(page)["episode"] == episode_text(lk, "mixed", 1)


@pytest.mark.slow("filters that are typed write the address and come back from it")
def test_filters_and_pages_write_the_address_and_come_back_from_it(page: Any) -> None:
    go(page, "/episodes", "Episodes")
    page.get_by_role("button", name="Filters").click()
    page.get_by_role("textbox", name="Task").fill("d*")
    page.keyboard.press("Enter")
    page.get_by_text("1 to 8 of 8 episodes").wait_for()
    page.get_by_role("combobox", name="Run").click()
    page.get_by_role("option", name=RUN, exact=True).click()
    page.get_by_test_id("stPopoverBody").wait_for(state="detached")  # a choice closes it; what is typed does not
    page.get_by_role("link", name=f"run: {RUN}").click()
    page.wait_for_function("!location.search.includes('run')")
    page.get_by_label("Text", exact=True).fill('"HALL 1"')
    page.keyboard.press("Enter")
    page.get_by_text("1 to 4 of 4 episodes").wait_for()
    assert address(page) == {"task": "d*", "text": '"HALL 1"'}
    page.reload()
    page.get_by_text("1 to 4 of 4 episodes").wait_for()


@pytest.mark.slow("facets narrow a list and chips take filters off, by clicks")
def test_facets_narrow_the_list_and_chips_take_filters_off(page: Any) -> None:
    go(page, "/episodes?text=hall&facets=true", "Episodes")
    page.get_by_role("link", name="failed rollout 2").click()
    page.get_by_text("1 to 2 of 2 episodes").wait_for()
    assert address(page) == {"text": "hall", "facets": "true", "error": "rollout"}
    page.get_by_role("link", name="text: hall").click()
    page.wait_for_function("!location.search.includes('text')")
    page.get_by_text("1 to 2 of 2 episodes").wait_for()
    page.wait_for_function("document.querySelector('input[aria-label=Text]').value === ''")
    page.go_back()
    page.wait_for_function("document.querySelector('input[aria-label=Text]').value === 'hall'")


@pytest.mark.slow("facets, chips and Back narrow and widen the list of groups in a browser")
def test_groups_are_narrowed_by_what_their_episodes_have(page: Any, lk: Lake) -> None:
    number = lk.sql("SELECT count(DISTINCT group_id) FROM episodes").item()
    go(page, f"/groups?run={RUN}&signal=live&facets=true", "Groups")
    page.get_by_role("link", name="failed rollout 2").click()
    page.get_by_text("1 to 2 of 2 groups").wait_for()
    narrowed = {"run": RUN, "signal": "live", "facets": "true", "error": "rollout"}
    assert address(page) == narrowed
    open_row(page, "Groups", 1)
    settled(page, "Group")
    page.get_by_role("link", name="As a list of episodes").click()
    settled(page, "Episodes")
    page.get_by_text("1 to 4 of 4 episodes").wait_for()
    page.go_back()
    settled(page, "Group")
    page.go_back()
    settled(page, "Groups")
    assert narrowed.items() <= address(page).items()
    assert rows_of(page, "Groups").nth(1).get_attribute("aria-current") == "true"
    page.get_by_role("link", name="error: failed rollout").click()
    page.get_by_text("1 to 4 of 4 groups").wait_for()
    assert "error" not in address(page)
    page.get_by_label("Text", exact=True).fill("tool server")
    page.keyboard.press("Enter")
    page.get_by_text("1 to 2 of 2 groups").wait_for()
    page.get_by_role("link", name="clear all").click()
    page.wait_for_function("!location.search.includes('signal')")
    page.get_by_text(re.compile(f"of {number} groups")).wait_for()


@pytest.mark.slow("the whole list is downloaded by a click")
def test_the_whole_list_is_downloaded(page: Any) -> None:
    go(page, "/episodes?task=d*", "Episodes")
    page.get_by_role("button", name="Download").click()
    with page.expect_download() as download:
        page.get_by_role("link", name="csv").click()
    assert download.value.suggested_filename == "episodes.csv"
    assert len(download.value.path().read_text().splitlines()) == 9
    page.locator("code").filter(has_text="trajlake export").filter(has_text="task_id LIKE").wait_for()


@pytest.mark.slow("a shared state of a group leads to the step of a sibling in a browser")
def test_from_a_group_to_a_shared_state_to_a_sibling_there(page: Any, lk: Lake) -> None:
    group = lk.sql("SELECT any_value(group_id) FROM episodes WHERE task_id = 'mixed' AND collection_round = 1").item()
    go(page, f"/group?group={ids.to_text(group)}", "Group")
    page.get_by_text("live group").first.wait_for()
    open_row(page, "Shared states", 0)
    page.get_by_role("heading", name="Steps from this state").wait_for()
    assert "anchor" in address(page)
    open_row(page, "Steps", 1)
    settled(page, "Episode")
    parameters = address(page)
    assert parameters["episode"] == episode_text(lk, "mixed", 1, round_=1)
    assert parameters["step"] == "0"
    page.get_by_text("2 of 4 episodes that match the filter").filter(visible=True).first.wait_for()


def test_from_a_metric_to_the_episodes_of_the_update(page: Any, lk: Lake) -> None:
    go(page, "/training", "Training")
    chart = page.get_by_test_id("stVegaLiteChart").first
    chart.locator("canvas, svg").first.wait_for()
    box = chart.bounding_box()
    page.mouse.click(box["x"] + box["width"] * 0.7, box["y"] + box["height"] / 2)
    heading = page.get_by_role("heading", name=re.compile(r"Update \d"))
    heading.wait_for()
    update = heading.inner_text().split()[1]
    job = lk.sql("SELECT job_id FROM job_runs WHERE kind = 'train'").item()
    assert address(page) == {"job": ids.to_text(job), "update": update}
    page.wait_for_function(
        "() => { const box = [...document.querySelectorAll('h3')].find(h => h.innerText.startsWith('Update'))"
        ".getBoundingClientRect(); return box.top >= 0 && box.bottom < window.innerHeight / 2; }"
    )
    open_row(page, "Batch", 0)
    settled(page, "Episode")
    page.get_by_text(re.compile(r"\d of 6 episodes that match the filter")).wait_for()
    page.locator("[data-step='0']").get_by_text(re.compile(r"^A = A")).wait_for()


@pytest.mark.slow("a run with a hostile name is opened by a click")
def test_a_run_is_chosen_by_a_click(page: Any) -> None:
    go(page, "/", "Runs")
    rows_of(page, "Runs").filter(has_text="<script>").click()
    page.get_by_role("heading", name="Run <script>").wait_for()
    assert address(page) == {"run": HOSTILE}


@pytest.mark.slow("a point of a run opens its episodes, and a chosen theme stays on all pages")
def test_a_point_opens_its_episodes_and_a_chosen_theme_stays_on_all_pages(page: Any) -> None:
    go(page, f"/?run={RUN}", "Runs")
    chart = page.get_by_test_id("stVegaLiteChart").first
    chart.locator("canvas, svg").first.wait_for()
    box = chart.bounding_box()
    page.mouse.click(box["x"] + box["width"] * 0.9, box["y"] + box["height"] / 2)
    page.wait_for_url("**/episodes?*")
    settled(page, "Episodes")
    assert address(page) == {"run": RUN, "round": "1"}
    page.go_back()
    settled(page, "Runs")
    page.get_by_role("button", name="Main menu").click()
    page.get_by_role("menuitemradio", name="Dark").click()
    go(page, "/jobs", "Jobs")
    background = page.evaluate("getComputedStyle(document.querySelector('.stApp')).backgroundColor")
    assert max(map(int, re.findall(r"\d+", background)[:3])) < 60


@pytest.mark.parametrize(
    "where", mostly_slow(["episode", "group", "episodes", "runs", "groups", "rejects"], "episodes")
)
def test_hostile_text_is_shown_and_does_nothing(page: Any, lk: Lake, where: str) -> None:
    """The fixture's end asserts that no script ran, no dialog opened and no other host was asked."""
    query = "SELECT episode_id, group_id FROM episodes WHERE status = 'completed' AND error IS NOT NULL"
    row = lk.sql(query).row(0, named=True)
    paths = {
        "episode": (f"/episode?episode={ids.to_text(row['episode_id'])}", "Episode"),
        "group": (f"/group?group={ids.to_text(row['group_id'])}", "Group"),
        "episodes": ("/episodes?text=onerror", "Episodes"),
        "runs": ("/", "Runs"),
        "groups": ("/groups", "Groups"),
        "rejects": ("/rejects?run=%3Cscript%3E", "Rejects"),
    }
    go(page, *paths[where])
    page.wait_for_timeout(300)


def test_a_missing_browser_skips_or_fails_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REQUIRE, raising=False)
    with pytest.raises(pytest.skip.Exception, match="no browser here"):
        missing("no browser here")
    monkeypatch.setenv(REQUIRE, "1")
    with pytest.raises(pytest.fail.Exception, match=f"no browser here, and {REQUIRE}=1 requires it"):
        missing("no browser here")
