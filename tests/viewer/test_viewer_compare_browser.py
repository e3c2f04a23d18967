"""Siblings side by side in a real browser: the ways in and out, Back, hostile text, long and wide comparisons."""

import re
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from lake import Lake, ids
from testkit.browsed_lake import HOSTILE
from testkit.browser_pages import address, go, settled
from testkit.lakes import RUN
from testkit.viewer_process import Viewer

pytestmark = pytest.mark.browser

MOST_NODES = 5000


@pytest.fixture(scope="module")
def lk(browsed_lake: Lake) -> Lake:
    return browsed_lake


@pytest.fixture(scope="module")
def running(browsed: Viewer) -> Viewer:
    return browsed


def group_of(lk: Lake, run: str, task: str) -> list[str]:
    query = """
        SELECT episode_id FROM episodes WHERE run_id = ? AND task_id = ? AND collection_round = 0 ORDER BY rollout_index
        """
    return [ids.to_text(episode_id) for episode_id in lk.sql(query, [run, task])["episode_id"]]


def compared(page: Any) -> list[str]:
    return parse_qs(urlsplit(page.url).query)["episode"]


def columns(page: Any) -> Any:
    return page.get_by_role("region", name="Side by side").locator("thead th")


def test_from_an_episode_to_its_siblings_to_one_of_their_steps_and_back(page: Any, lk: Lake) -> None:
    siblings = group_of(lk, RUN, "mixed")
    go(page, f"/episode?episode={siblings[2]}", "Episode")
    page.get_by_role("link", name="Compare with siblings").click()
    settled(page, "Side by side")
    assert columns(page).count() == 4
    url = page.url
    page.get_by_role("region", name="Side by side").get_by_role("link", name=re.compile("^1 go")).nth(1).click()
    settled(page, "Episode")
    assert address(page)["step"] == "1"
    page.locator("[data-step='1'] .body").wait_for()
    page.go_back()
    settled(page, "Side by side")
    assert page.url == url
    page.go_back()
    settled(page, "Episode")
    assert address(page)["episode"] == siblings[2]


@pytest.mark.slow("a rollout is taken out of a comparison and comes back")
def test_the_choice_of_the_group_and_of_the_comparison(page: Any, lk: Lake) -> None:
    group = lk.sql("SELECT any_value(group_id) FROM episodes WHERE task_id = 'mixed' AND collection_round = 0").item()
    go(page, f"/group?group={ids.to_text(group)}", "Group")
    page.get_by_role("link", name="Compare step by step").click()
    settled(page, "Side by side")
    assert sorted(compared(page)) == sorted(group_of(lk, RUN, "mixed"))
    out = compared(page)[1]
    columns(page).nth(1).get_by_title("Take this one out").click()
    page.wait_for_function("many => document.querySelectorAll('.trajlake-beside th').length === many", arg=3)
    assert out not in compared(page)
    page.go_back()
    page.wait_for_function("many => document.querySelectorAll('.trajlake-beside th').length === many", arg=4)
    assert out in compared(page)


def test_hostile_text_is_shown_and_does_nothing(page: Any, lk: Lake) -> None:
    go(
        page,
        "/compare?" + "&".join(f"episode={episode_id}" for episode_id in group_of(lk, HOSTILE, HOSTILE)),
        "Side by side",
    )
    region = page.get_by_role("region", name="Side by side")
    region.get_by_text("<script>").first.wait_for()
    assert region.locator("script, img, [onerror], a[href^=javascript]").count() == 0
    assert r"\x1b[31m" in region.inner_text()


def test_eight_rollouts_of_a_thousand_steps(page: Any, lk: Lake) -> None:
    siblings = group_of(lk, "long", "long")
    go(page, "/compare?" + "&".join(f"episode={episode_id}" for episode_id in siblings), "Side by side")
    page.get_by_text("1 to 40 of 1,000 lines").wait_for()
    page.wait_for_function("many => document.querySelectorAll('.trajlake-beside th').length === many", arg=8)
    assert columns(page).count() == 8
    assert page.locator("*").count() < MOST_NODES
    page.get_by_test_id("stPagination").get_by_text("25", exact=True).click()
    page.get_by_text("961 to 1,000 of 1,000 lines").wait_for()
    page.get_by_role("link", name=re.compile("^room 999 of 7")).click()
    settled(page, "Episode")
    assert (address(page)["episode"], address(page)["step"]) == (siblings[7], "999")
    page.go_back()
    page.get_by_text("961 to 1,000 of 1,000 lines").wait_for()


@pytest.mark.slow("a task that changed opens both transcripts side by side")
def test_from_what_changed_to_the_two_transcripts_and_back(page: Any) -> None:
    go(page, "/change", "What changed")
    page.get_by_role("link", name=f"{RUN}: round 0 and round 1").click()
    page.get_by_role("region", name="Figures").wait_for()
    assert page.get_by_label("A: run").input_value() == RUN
    page.get_by_role("link", name="Steps A").click()
    page.wait_for_url("**sort=-a_steps*")
    settled(page, "What changed")
    url = page.url
    page.get_by_role("region", name="Tasks").locator("tbody tr").filter(has_text="mixed").click()
    settled(page, "Side by side")
    assert columns(page).count() == 2
    assert len(compared(page)) == 2
    page.go_back()
    settled(page, "What changed")
    assert page.url.startswith(url)
    page.get_by_label("A: run").click()
    page.get_by_role("option", name="long").click()
    page.wait_for_url("**a_run=long*")
    page.get_by_text("No episodes in").or_(page.get_by_text("8 episodes of 1 task")).first.wait_for()


@pytest.mark.slow("an anchor leads to its groups and their steps in a browser")
def test_from_an_anchor_to_its_groups_to_their_steps_and_back(page: Any) -> None:
    go(page, "/anchors", "Anchors")
    page.get_by_role("region", name="States").locator("tbody tr").filter(has_text="You are at the gate.").click()
    page.get_by_role("heading", name="Groups that share this state").wait_for()
    url = page.url
    page.get_by_role("region", name="Groups of the state").locator("tbody tr").first.click()
    settled(page, "Group")
    page.get_by_role("heading", name="Steps from this state").wait_for()
    page.go_back()
    settled(page, "Anchors")
    page.get_by_role("heading", name="Groups that share this state").wait_for()
    assert page.url.startswith(url)
