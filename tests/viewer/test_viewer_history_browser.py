"""Where a reader was, in a real browser: older states, the menu, Back and Forward; views, annotations, SQL, a loop."""

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import polars as pl
import pytest

from lake import Lake, ids
from lake.locked import isolation
from lake.write.scores import Annotation, annotate
from testkit.browser_pages import address, fresh_page, go, open_row, rows_of, settled
from testkit.lakes import RUN, add_credit, build_lake, rollout
from testkit.viewer_process import Viewer, viewer

pytestmark = pytest.mark.browser
VIEWPORT = {"width": 1440, "height": 900}

HOSTILE = "<img src=x onerror='window.hostile = 1'> [x](javascript:window.hostile=1) **b**"


@pytest.fixture(scope="module")
def lk(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """24 episodes, then the snapshot `before`, then three more."""
    lk = build_lake(tmp_path_factory.mktemp("history"))
    add_credit(lk)
    lk.name_snapshot("before")
    with lk.job(kind="collect", run_id=RUN) as job:
        job.record([rollout("new", number, 1.0) for number in range(3)])
    return lk


def opener(page: Any) -> Any:
    """The button that says which state is shown, and opens the way to others."""
    return page.get_by_role("button", name=re.compile("^(As of |Data of )"))


def is_of(page: Any, state: str, episodes: int) -> None:
    """Wait until the list is of a state: `As of NAME`, or `Data of`, the newest."""
    page.get_by_role("button", name=re.compile(f"^{state}")).wait_for()
    page.get_by_text(f" of {episodes} episodes").wait_for()


def menu(page: Any, name: str) -> None:
    """Follow a link of the menu."""
    page.get_by_test_id("stTopNavLink").filter(has_text=re.compile(f"{name}$")).click()
    settled(page, name)


def entries(page: Any) -> int:
    return int(page.evaluate("history.length"))


def choose_state(page: Any, name: str) -> None:
    opener(page).click()
    field = page.get_by_role("combobox", name="As of")
    field.click()
    field.fill(name)
    page.keyboard.press("Enter")


@pytest.mark.slow("An older state goes along every link, and Back leads out of it.")
def test_an_older_state_goes_along_and_back_leads_out_of_it(page: Any) -> None:
    go(page, "/episodes?sort=-num_steps", "Episodes")
    is_of(page, "Data of", 27)
    before = entries(page)
    choose_state(page, "before")
    is_of(page, "As of before", 24)
    assert address(page) == {"sort": "-num_steps", "as_of": "before"}
    assert entries(page) == before + 1
    page.keyboard.press("Escape")
    open_row(page, "Episodes", 3)
    settled(page, "Episode")
    assert address(page)["as_of"] == "before"
    page.reload()
    settled(page, "Episode")
    assert opener(page).inner_text().startswith("As of before")
    menu(page, "Groups")
    assert address(page) == {"as_of": "before"}, "the menu goes along, too"
    page.get_by_text("1 to 6 of 6 groups").wait_for()
    page.go_back()
    settled(page, "Episode")
    page.go_back()
    settled(page, "Episodes")
    is_of(page, "As of before", 24)
    page.go_back()
    is_of(page, "Data of", 27)
    page.go_forward()
    is_of(page, "As of before", 24)
    opener(page).click()
    page.get_by_role("button", name="Read the newest state").click()
    is_of(page, "Data of", 27)
    assert "as_of" not in address(page)


@pytest.mark.slow("a state that is not there is told in a browser and changes nothing")
def test_a_state_that_is_not_there_is_told_and_changes_nothing(page: Any) -> None:
    go(page, "/episodes?as_of=before", "Episodes")
    before = entries(page)
    choose_state(page, HOSTILE)
    note = page.get_by_test_id("stPopoverBody").get_by_text("cannot name a snapshot")
    note.wait_for()
    assert HOSTILE in note.inner_text()
    is_of(page, "As of before", 24)
    assert entries(page) == before
    page.goto("/episodes?as_of=nowhere")
    page.get_by_text("there is no snapshot 'nowhere'").wait_for()
    page.reload()
    page.get_by_text("there is no snapshot 'nowhere'").wait_for()
    page.get_by_role("button", name="Try again with the newest data").click()
    is_of(page, "Data of", 27)


@pytest.mark.slow("what changed since an older state leads to new episodes and back in a browser")
def test_what_changed_since_leads_to_new_episodes_and_back(page: Any) -> None:
    go(page, "/episodes?as_of=before", "Episodes")
    opener(page).click()
    page.get_by_role("link", name="What changed since").click()
    settled(page, "What changed since")
    assert address(page) == {"since": "before"}
    open_row(page, "New episodes", 1)
    settled(page, "Episode")
    assert "as_of" not in address(page), "which the older state has not"
    page.go_back()
    settled(page, "What changed since")
    page.go_back()
    is_of(page, "As of before", 24)


def test_filters_that_pages_share_stay_with_their_page(browsed_page: Any, browsed_lake: Lake) -> None:
    """By links, the menu, Back and Forward: the run, the task, the group."""
    go(browsed_page, f"/?run={RUN}", "Runs")
    browsed_page.locator(f"a[href^='/episodes?run={RUN}']").first.click()
    settled(browsed_page, "Episodes")
    menu(browsed_page, "Groups")
    assert address(browsed_page) == {}
    browsed_page.get_by_role("button", name="Filters").click()
    browsed_page.get_by_role("textbox", name="Task").fill("d*")
    browsed_page.keyboard.press("Enter")
    browsed_page.get_by_text("1 to 2 of 2 groups").wait_for()
    browsed_page.keyboard.press("Escape")
    open_row(browsed_page, "Groups", 0)
    settled(browsed_page, "Group")
    group = address(browsed_page)["group"]
    menu(browsed_page, "Episodes")
    browsed_page.go_back()
    settled(browsed_page, "Group")
    assert address(browsed_page)["group"] == group
    browsed_page.go_back()
    browsed_page.get_by_text("1 to 2 of 2 groups").wait_for()
    assert address(browsed_page) == {"task": "d*", "opened": group}
    browsed_page.go_back()
    settled(browsed_page, "Episodes")
    assert address(browsed_page) == {"run": RUN}
    browsed_page.go_back()
    settled(browsed_page, "Runs")
    assert address(browsed_page) == {"run": RUN}
    browsed_page.go_forward()
    settled(browsed_page, "Episodes")
    browsed_page.go_forward()
    browsed_page.get_by_text("1 to 2 of 2 groups").wait_for()
    browsed_page.get_by_role("link", name="task: d*").wait_for()
    browsed_page.go_forward()
    settled(browsed_page, "Group")
    assert address(browsed_page)["group"] == group


# ---------------------------------------------------------------- views


@pytest.fixture
def other(browser: Any, running: Viewer) -> Iterator[Any]:
    """A page of someone else."""
    with fresh_page(browser, running.address, viewport={"width": 1024, "height": 768}) as opened:
        yield opened


def views(page: Any) -> Any:
    """What the button of the views opens."""
    page.get_by_role("button", name="Views").click()
    opened = page.get_by_test_id("stPopoverBody")
    opened.get_by_text("No views are saved yet.").or_(opened.get_by_role("link")).first.wait_for()
    return opened


@pytest.mark.slow("a view is saved, opened by others, replaced and removed in browsers")
def test_a_view_is_saved_opened_by_others_replaced_and_removed(page: Any, other: Any, lk: Lake) -> None:
    go(page, "/groups?task=d*&sort=-mean_steps", "Groups")
    opened = views(page)
    name = opened.get_by_role("textbox", name="Name")
    name.fill(HOSTILE)
    name.press("Enter")
    opened.get_by_role("link", name=HOSTILE).wait_for()

    go(other, "/episodes?task=mixed", "Episodes")
    views(other).get_by_role("link", name=HOSTILE).click()
    settled(other, "Groups")
    other.get_by_text("1 to 2 of 2 groups").wait_for()
    assert address(other) == {"task": "d*", "sort": "-mean_steps"}
    other.go_back()
    settled(other, "Episodes")
    assert address(other) == {"task": "mixed"}

    go(page, "/episodes?task=partial", "Episodes")
    opened = views(page)
    name.fill(HOSTILE)
    opened.get_by_role("button", name="Save this page").click()
    page.wait_for_function(
        "() => document.querySelector('.trajlake-chips a[href*=\"task=partial\"]')?.href.includes('/episodes')"
    )
    assert opened.get_by_role("link").count() == 1
    with viewer(lk.uri, "--read-only") as reading:
        page.goto(f"{reading.address}/episodes")
        settled(page, "Episodes")
        assert views(page).get_by_role("textbox").count() == 0
        page.get_by_role("link", name=HOSTILE).click()
        page.get_by_text("1 to 8 of 8 episodes").wait_for()
    go(other, "/", "Runs")
    opened = views(other)
    for fragment in ("there is no view 'nothing'", "No views are saved yet."):
        name = opened.get_by_role("textbox", name="Name")
        name.fill("nothing" if "nothing" in fragment else HOSTILE)
        opened.get_by_role("button", name="Remove the name").click()
        opened.get_by_text(fragment).wait_for()


# ---------------------------------------------------------------- annotations


@pytest.mark.slow("an annotation is taken back in a browser by whoever wrote it")
def test_what_was_said_is_taken_back_by_whoever_said_it(page: Any, lk: Lake) -> None:
    """The form keeps the author, though it is emptied."""
    episode = lk.sql("SELECT min(episode_id) FROM episodes WHERE task_id = 'dead'").item()
    go(page, f"/episode?episode={ids.to_text(episode)}", "Episode")
    page.get_by_text("Annotations (0)").click()
    page.get_by_role("textbox", name="Author").fill("ann")
    page.get_by_role("spinbutton", name="Number").fill("0.5")
    page.get_by_role("button", name="Add").click()
    page.get_by_text("Annotations (1)").wait_for()
    settled(page, "Episode")
    assert page.get_by_role("textbox", name="Author").input_value() == "ann"
    assert page.get_by_role("spinbutton", name="Number").input_value() == ""
    page.get_by_role("button", name="Take back").click()
    page.get_by_text("Annotations (0)").wait_for()
    annotation_rows = lk.sql(
        'SELECT author, value FROM annotations WHERE episode_id = ? ORDER BY "at"', [episode]
    ).rows()
    assert annotation_rows == [("ann", 0.5), ("ann", None)]


def test_what_is_said_is_said_of_the_step_that_was_opened(browsed_page: Any, browsed_lake: Lake) -> None:
    """Whether the form is there before the step is opened or after it."""
    episode = browsed_lake.sql("SELECT max(episode_id) FROM episodes WHERE task_id = 'dead'").item()
    go(browsed_page, f"/episode?episode={ids.to_text(episode)}", "Episode")
    fold = browsed_page.get_by_text("Annotations (0)")
    browsed_page.locator("[data-step='1'] .head").click()
    fold.click()
    of = browsed_page.get_by_role("combobox", name="Of")
    of.and_(browsed_page.locator("[value='step 1']")).wait_for()
    browsed_page.get_by_role("textbox", name="Words").fill("loops")
    browsed_page.locator("[data-step='0'] .head").focus()
    browsed_page.keyboard.press("Enter")
    of.and_(browsed_page.locator("[value='step 0']")).wait_for()
    browsed_page.locator("[data-step='1'] .body").wait_for()
    assert browsed_page.evaluate("document.activeElement.closest('[data-step]').dataset.step") == "0"
    assert browsed_page.get_by_role("textbox", name="Words").input_value() == "loops"
    browsed_page.get_by_role("textbox", name="Author").fill("ann")
    browsed_page.get_by_role("button", name="Add").click()
    browsed_page.get_by_text("Annotations (1)").wait_for()
    assert browsed_page.get_by_role("button", name="Add").is_visible()
    query = "SELECT step_index, text, author FROM latest_annotations WHERE episode_id = ?"
    assert browsed_lake.sql(query, [episode]).rows() == [(0, "loops", "ann")]
    assert address(browsed_page) == {"episode": ids.to_text(episode), "step": "0"}
    # Queues offer what was said before: other tests do not see this.
    annotate(browsed_lake, [Annotation(episode_id=episode, step_index=0)], "ann")


def test_a_queue_is_answered_by_keys_and_back_returns_to_what_was_answered(
    browsed_page: Any, browsed_lake: Lake
) -> None:
    go(browsed_page, "/episodes?task=mixed&round=1", "Episodes")
    browsed_page.get_by_role("button", name="Annotate").click()
    author = browsed_page.get_by_role("textbox", name="Author")
    author.fill("bob")
    author.press("Enter")
    link = browsed_page.get_by_role("link", name="Annotate these")
    browsed_page.wait_for_function("document.querySelector('a[href*=\"by%3Dbob\"]')")
    link.focus()
    browsed_page.keyboard.press("Enter")
    settled(browsed_page, "Episode")
    browsed_page.get_by_text("4 of 4 left to label").wait_for()
    browsed_page.locator("[data-step='0']").wait_for()
    for key in ("j", "Enter"):
        browsed_page.keyboard.press(key)
    browsed_page.locator("[data-step='0'] .body").wait_for()
    browsed_page.wait_for_function("location.search.includes('step=0')")
    current, before = address(browsed_page), entries(browsed_page)
    browsed_page.get_by_role("combobox", name="Of").and_(browsed_page.locator("[value='step 0']")).wait_for()
    settled(browsed_page, "Episode")
    browsed_page.keyboard.press("0")
    browsed_page.get_by_text("3 of 4 left to label").wait_for()
    settled(browsed_page, "Episode")
    assert address(browsed_page)["episode"] != current["episode"]
    assert "step" not in address(browsed_page)
    assert entries(browsed_page) == before + 1
    browsed_page.go_back()
    browsed_page.locator("[data-step='0'] .body").wait_for()
    assert address(browsed_page) == current
    query = "SELECT step_index, value FROM latest_annotations WHERE author = 'bob' AND episode_id = ?"
    assert browsed_lake.sql(query, [ids.from_text(current["episode"])]).rows() == [(0, 0.0)]


# ---------------------------------------------------------------- SQL


@pytest.mark.skipif(
    bool(isolation.find_missing_layers()), reason=f"no strong isolation here: {isolation.find_missing_layers()}"
)
def test_a_query_is_completed_run_opened_as_a_list_and_come_back_to_by_keys(browsed_page: Any) -> None:
    go(browsed_page, "/sql?q=SELECT+1+AS+one", "SQL")
    rows_of(browsed_page, "Rows").first.wait_for()
    field = browsed_page.get_by_role("textbox", name="One SELECT")
    field.focus()
    browsed_page.keyboard.press("ControlOrMeta+a")
    browsed_page.keyboard.type("SELECT episode_id, env_return FROM ep")
    completions = browsed_page.get_by_role("listbox", name="Completions")
    completions.get_by_role("option", name="episodes table", exact=True).wait_for()
    names = [option.split()[0] for option in completions.get_by_role("option").all_inner_texts()]
    for _ in range(names.index("episodes")):
        browsed_page.keyboard.press("ArrowDown")
    browsed_page.keyboard.press("Enter")
    completions.wait_for(state="detached")
    browsed_page.keyboard.type(" WHERE task_id = 'dead' ORDER BY ALL")
    query = "SELECT episode_id, env_return FROM episodes WHERE task_id = 'dead' ORDER BY ALL"
    assert field.input_value() == query
    browsed_page.keyboard.press("Control+Enter")
    link = browsed_page.get_by_role("link", name="Open as list: 8 episodes")
    link.wait_for()
    settled(browsed_page, "SQL")
    for _ in range(20):
        browsed_page.keyboard.press("Tab")
        if link.evaluate("link => link === document.activeElement"):
            break
    browsed_page.keyboard.press("Enter")
    settled(browsed_page, "Episodes")
    browsed_page.get_by_text("1 to 8 of 8 episodes").wait_for()
    browsed_page.go_back()
    settled(browsed_page, "SQL")
    assert field.input_value() == query
    browsed_page.go_back()
    rows_of(browsed_page, "Rows").filter(has_text=re.compile("^1$")).wait_for()
    assert field.input_value() == "SELECT 1 AS one"
    browsed_page.go_forward()
    link.wait_for()
    assert field.input_value() == query


# ---------------------------------------------------------------- a loop


@pytest.mark.slow("a round that a loop writes is drawn without a click")
def test_the_page_of_a_loop_follows_it(page: Any, lk: Lake) -> None:
    """A round that the loop writes is drawn without a click, and the page stays with its job."""
    train = lk.job(kind="train", run_id="looped", parameters={"loss": {"name": "ppo"}}).__enter__()
    parameters = {"loop": {"rounds": 5}, "train_job": ids.to_text(train.job_id)}
    loop = lk.job(kind="loop", run_id="looped", parameters=parameters).__enter__()
    go(page, f"/training?job={ids.to_text(train.job_id)}", "Training")
    page.get_by_text("running", exact=True).wait_for()
    page.get_by_text("0 of 5 rounds").wait_for()
    values = {"loop/return": 0.5, "loop/episodes": 16.0, "loop/tokens": 96.0, "loop/seconds": 1.0}
    rows = [{"step": 0, "name": name, "value": value, "at": datetime.now(UTC)} for name, value in values.items()]
    loop.write("metrics", pl.DataFrame(rows))
    page.get_by_text("1 of 5 rounds").wait_for()
    page.get_by_role("heading", name="Rounds", exact=True).wait_for()
    assert address(page)["job"] == ids.to_text(train.job_id)
