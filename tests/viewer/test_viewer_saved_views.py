"""Saved views: kept with the lake for anyone who shares it; what follows one is one of our pages, no matter what was
saved."""

import re
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lake import Lake
from lake.care.saved_views import MAX_ADDRESS_LENGTH, drop_view, read_saved_views, save_view
from lake.errors import UsageError
from testkit.lakes import build_lake
from testkit.streamlit_pages import assert_sound, open_page, show, words
from viewer.components import sanitize_address
from viewer.navigation import PARAMETERS, PATHS
from viewer.server import READ_ONLY

HOSTILE = "<img src=x onerror=alert(1)> ![x](http://evil.example/x.png)"


@pytest.fixture
def lk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lake:
    return show(build_lake(tmp_path), monkeypatch)


def test_the_last_view_of_a_name_counts_until_it_is_dropped(lk: Lake) -> None:
    objects = lk.snapshot().objects
    for name, address in (("b", "/episodes?run=a"), ("A", "/sql"), (" b ", "/groups")):
        save_view(objects, name, address, "ann")
    assert [(view.name, view.address, view.author) for view in read_saved_views(objects)] == [
        ("A", "/sql", "ann"),
        ("b", "/groups", "ann"),
    ]
    drop_view(objects, "b")
    assert [view.name for view in read_saved_views(objects)] == ["A"]
    for name in ("", "x" * 81, "a\nb"):
        with pytest.raises(UsageError, match="name of a view"):
            save_view(objects, name, "/", "ann")
    with pytest.raises(UsageError, match="no view 'b'"):
        drop_view(objects, "b")
    with pytest.raises(UsageError, match="at most 16,000"):
        save_view(objects, "long", "/sql?q=" + "x" * MAX_ADDRESS_LENGTH, "ann")
    objects.put("_trajlake/views/damaged.json", b"{")
    assert [view.name for view in read_saved_views(objects)] == ["A"], "a damaged one stops nobody"


def test_a_page_is_saved_with_its_filter_and_opened_by_a_link(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    at = open_page("groups", task="m*", sort="-mean_steps", page=2, opened="x")
    at.session_state["views"] = True
    assert_sound(at.run())
    at.text_input(key="view-name").set_value(HOSTILE)
    next(button for button in at.button if button.label == "Save this page").click()
    assert_sound(at.run())
    (view,) = read_saved_views(lk.snapshot().objects)
    assert view.address == "/groups?task=m%2A&sort=-mean_steps", "where the reader was is left out"
    assert 'href="/groups?task=m%2A&amp;sort=-mean_steps"' in words(at)
    assert "&lt;img src=x" in words(at)
    monkeypatch.setenv(READ_ONLY, "1")
    at = open_page("runs")
    at.session_state["views"] = True
    assert_sound(at.run())
    assert HOSTILE[:4] not in words(at)
    assert not [button for button in at.button if button.label == "Save this page"]


@given(st.text() | st.sampled_from(sorted(PATHS)).flatmap(lambda path: st.text().map(lambda rest: f"{path}?{rest}")))
@example("javascript:alert(1)")
@example("//evil.example/sql?q=1")
@example("http://evil.example/episodes")
@example("/download?list=")
@example("/episodes?run=%22%3E%3Cscript%3E&onload=x#javascript:")
@example("http://[")
def test_only_our_pages_and_their_parameters_are_followed(address: str) -> None:
    sanitized = sanitize_address(address)
    if sanitized is not None:
        parts_of_url = urlsplit(sanitized)
        assert (parts_of_url.scheme, parts_of_url.netloc, parts_of_url.fragment) == ("", "", "")
        assert parts_of_url.path in PATHS
        assert set(parse_qs(parts_of_url.query)) <= PARAMETERS
        assert re.fullmatch(r"[/\w.%&=+~*-]+(\?[\w.%&=+~*-]*)?", sanitized, re.ASCII)


def test_the_guide_names_every_parameter_that_pages_have() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "viewer.md").read_text()
    named = set(re.findall(r"[?&](\w+)=", "".join(re.findall(r"`(/\w*\?[^`]*)`", guide))))
    assert named | {"as_of", "opened", "list"} == PARAMETERS
