"""Acting in a real browser: a queue walked by keys, SQL completed and its rows opened as a list, newer data."""

from typing import Any

import pytest

from lake import Lake
from lake.locked import isolation
from testkit.browser_pages import address, go, rows_of, settled
from testkit.lakes import RUN, build_lake, rollout

pytestmark = pytest.mark.browser
VIEWPORT = {"width": 1440, "height": 700}


@pytest.fixture(scope="module")
def lk(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    return build_lake(tmp_path_factory.mktemp("acting"))


@pytest.mark.slow("a queue that is walked by keys survives a reload")
def test_a_queue_is_walked_by_keys_and_survives_a_reload(page: Any, lk: Lake) -> None:
    go(page, "/episodes?task=mixed&round=0", "Episodes")
    page.get_by_role("button", name="Annotate").click()
    page.get_by_text("4 of 4 episodes of this list are left to label").wait_for()
    page.get_by_role("link", name="Annotate these").click()
    settled(page, "Episode")
    first = address(page)["episode"]
    page.get_by_text("4 of 4 left to label").wait_for()
    settled(page, "Episode")
    page.keyboard.press("1")
    page.get_by_text("3 of 4 left to label").wait_for()
    assert address(page)["episode"] != first
    assert lk.sql("SELECT label, value FROM latest_annotations WHERE value IS NOT NULL").rows() == [("rating", 1.0)]
    page.reload()
    settled(page, "Episode")
    page.get_by_text("3 of 4 left to label").wait_for()
    episode_text = address(page)["episode"]
    page.keyboard.press("n")
    page.wait_for_function(f"!location.search.includes('{episode_text}')")
    page.get_by_text("3 of 4 left to label").wait_for()


@pytest.mark.slow("names are completed while a query is typed")
@pytest.mark.skipif(
    bool(isolation.find_missing_layers()), reason=f"no strong isolation here: {isolation.find_missing_layers()}"
)
def test_names_are_completed_and_rows_are_opened_as_a_list(page: Any) -> None:
    go(page, "/sql", "SQL")
    field = page.get_by_role("textbox", name="One SELECT")
    field.fill("")
    field.press_sequentially("sel")
    completions = page.get_by_role("listbox", name="Completions")
    completions.get_by_role("option", name="SELECT").first.wait_for()
    page.keyboard.press("Escape")
    completions.wait_for(state="detached")
    field.fill("SELECT e. FROM episodes AS e WHERE e.task_id = 'mixed' ORDER BY ALL DESC")
    field.evaluate("field => field.setSelectionRange(9, 9)")
    field.press_sequentially("episode")
    completions.get_by_role("option", name="episode_id bigint", exact=True).wait_for()
    page.keyboard.press("Tab")
    completions.wait_for(state="detached")
    assert field.input_value().startswith("SELECT e.episode_id FROM")
    page.keyboard.press("Control+Enter")
    page.get_by_role("link", name="Open as list: 8 episodes").click()
    settled(page, "Episodes")
    page.get_by_text("1 to 8 of 8 episodes").wait_for()
    words_seen = [row.split()[-2] for row in rows_of(page, "Episodes").all_inner_texts()]
    assert words_seen == sorted(words_seen, reverse=True)


@pytest.mark.slow("newer episodes are read without losing the place in a list")
def test_newer_episodes_are_read_without_losing_the_place(page: Any, lk: Lake) -> None:
    go(page, f"/episodes?run={RUN}&sort=-rollout_index", "Episodes")
    main = page.get_by_test_id("stMain")
    # Until the list is drawn there is nothing to scroll.
    main.evaluate("main => (window.down = () => { main.scrollTo(0, 200); return main.scrollTop === 200; })")
    page.wait_for_function("() => window.down()")
    with lk.job(kind="collect", run_id="other") as job:
        job.record([rollout("new", number, 1.0) for number in range(3)])
    page.get_by_role("button", name="3 new episodes").click()
    page.get_by_role("button", name="3 new episodes").wait_for(state="detached")
    settled(page, "Episodes")
    top = main.evaluate("main => main.scrollTop")
    assert 100 < top < 300, "but for a line more or less above"
    assert address(page) == {"run": RUN, "sort": "-rollout_index"}
