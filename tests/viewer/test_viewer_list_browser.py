"""Lists in a browser: no column is cut at usual widths, also with hostile texts, and ids lead where they say."""

from typing import Any

import pytest
from playwright.sync_api import expect

from lake import Lake
from testkit.browser_pages import go
from testkit.lakes import RUN

pytestmark = pytest.mark.browser

FRAMES = """
    [...document.querySelectorAll(".trajlake-table")]
        .map(table => [table.ariaLabel, table.scrollWidth - table.clientWidth])
"""
ADD_COLUMNS = """
    for (const row of document.querySelectorAll(".trajlake-table tr"))
        for (let number = 0; number < 5; number++) {
            const cell = row.insertBefore(row.lastChild.cloneNode(), row.lastChild);
            cell.className = "number";
            cell.textContent = cell.tagName === "TH" ? "A mean of many words" : "0.5";
        }
"""


@pytest.mark.parametrize(("address", "heading"), [("/episodes", "Episodes"), ("/", "Runs"), ("/groups", "Groups")])
def test_no_column_of_a_list_is_cut(browsed_page: Any, address: str, heading: str) -> None:
    """The lists hold runs and tasks whose names are hostile."""
    go(browsed_page, address, heading)
    for width in (1024, 1440):
        browsed_page.set_viewport_size({"width": width, "height": 1000})
        browsed_page.wait_for_function("width => document.documentElement.clientWidth === width", arg=width)
        frames = browsed_page.evaluate(FRAMES)
        assert frames
        assert [frame for frame in frames if frame[1] > 0] == [], width
    if address == "/groups":
        browsed_page.evaluate(ADD_COLUMNS)
        assert [frame for frame in browsed_page.evaluate(FRAMES) if frame[1] > 0] == [], "long headings wrap"
    elif address == "/episodes":
        names = browsed_page.locator("td.text small").first
        names.evaluate("(names) => { names.textContent = 'house-3/00d0fvkpd3j93, rollout 1, round 234, version 567'; }")
        assert names.evaluate("(names) => names.scrollWidth <= names.clientWidth"), "a task gives its width to names"


def test_on_a_narrow_screen_the_list_scrolls_and_not_the_page(browsed_page: Any) -> None:
    browsed_page.set_viewport_size({"width": 480, "height": 900})
    go(browsed_page, "/episodes", "Episodes")
    assert browsed_page.evaluate("document.documentElement.scrollWidth <= 480")
    words = browsed_page.locator("td.excerpt .lines").first
    assert words.bounding_box()["height"] < 60, "two lines of a long text"


def test_the_ids_of_a_row_lead_to_the_episode_and_to_its_group(browsed_page: Any, browsed_lake: Lake) -> None:
    go(browsed_page, f"/episodes?run={RUN}", "Episodes")
    episode, group = browsed_page.locator("tbody tr").first.locator("td.id a").all()
    texts = episode.inner_text(), group.inner_text()
    group.click()
    expect(browsed_page.get_by_role("heading", name="Group").first).to_be_visible()
    assert f"/group?group={texts[1]}" in browsed_page.url
    browsed_page.go_back()
    expect(browsed_page.locator("tbody tr").first).to_be_visible()
    browsed_page.locator("tbody tr").first.locator("td.id a").first.click()
    browsed_page.wait_for_url("**/episode?**")
    assert f"episode={texts[0]}" in browsed_page.url
    assert "list=" in browsed_page.url, "previous and next stay in the list"
