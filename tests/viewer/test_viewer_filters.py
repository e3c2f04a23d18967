"""A filter survives the trip through an address, and an address that was tampered with does no harm."""

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lake import Lake, ids
from lake.tables import STATUSES
from testkit.streamlit_pages import open_page, show
from viewer.filters import build_parameters, pack_filter, unpack_filter
from viewer.navigation import PARAMETERS, Page, href, parse_finite, parse_whole_number
from viewer.queries import Sort
from viewer.queries.episodes import FACETS, FIELDS, ORDERS, EpisodeFilter

text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
an_id = st.integers(0, 2**63 - 1)
a_count = st.integers(0, 10**9)
value = st.floats(allow_nan=False, allow_infinity=False)
filters = st.builds(
    EpisodeFilter,
    run=st.none() | text,
    task=st.none() | text,
    status=st.lists(st.sampled_from(STATUSES), unique=True).map(tuple),
    group=st.none() | an_id,
    score=st.none() | text,
    low=st.none() | value,
    high=st.none() | value,
    unscored=st.booleans(),
    text=st.none() | text,
    collection_round=st.none() | a_count,
    policy_version=st.none() | a_count,
    update=st.none() | st.tuples(an_id, a_count),
    unlabelled=st.none() | st.tuples(text, st.none() | text),
    sql=text,
    about=st.none() | text,
    **{facet: st.none() | text for facet in FACETS},
    **{f"{name}_{end}": st.none() | a_count for name in ("steps", "round", "version") for end in ("from", "to")},
)


orders = st.none() | st.builds(Sort, st.sampled_from(sorted(ORDERS)), st.booleans())


def test_the_table_has_one_row_for_each_field_and_each_parameter() -> None:
    assert [row.name for row in FIELDS] == [column.name for column in fields(EpisodeFilter)]
    names = [parameter.name for row in FIELDS for parameter in row.parameters]
    assert len(names) == len(set(names))
    assert set(names) <= PARAMETERS


@given(filters, orders)
def test_a_filter_comes_back_from_its_address(condition: EpisodeFilter, order: Sort | None) -> None:
    assert unpack_filter(pack_filter(condition, order)) == (condition, order)


@given(st.text())
def test_any_address_gives_a_filter(garbage: str) -> None:
    condition, order = unpack_filter(garbage)
    assert isinstance(condition, EpisodeFilter)
    assert order is None or order.column in ORDERS


@pytest.mark.parametrize(
    "address",
    [
        "group=zzz",
        "min=nan&max=inf",
        "round=-1",
        "job=0000000000000",
        "update=7",
        "status=won",
        "sort=DROP TABLE",
        "by=ann",
        "",
    ],
)
def test_what_makes_no_sense_filters_nothing(address: str) -> None:
    assert unpack_filter(address) == (EpisodeFilter(), None)


def test_nothing_filtered_is_nothing_carried() -> None:
    assert pack_filter(EpisodeFilter()) is None
    assert build_parameters(EpisodeFilter()) == {}
    assert unpack_filter(None) == (EpisodeFilter(), None)


def test_ids_are_written_as_people_see_them() -> None:
    condition = EpisodeFilter(group=5, update=(7, 3), status=("failed", "aborted"))
    assert build_parameters(condition, Sort("outcome", descending=True)) == {
        "group": ids.to_text(5),
        "job": ids.to_text(7),
        "update": "3",
        "sort": "-outcome",
        "status": ["failed", "aborted"],
    }


def test_parameters_that_are_not_set_are_left_out_but_0_is_not() -> None:
    assert href(Page.EPISODE, a=None, b="", step=0, run="x y") == "/episode?step=0&run=x+y"
    assert href(Page.RUNS) == "/"
    assert href(Page.EPISODES, status=["failed", "aborted"]) == "/episodes?status=failed&status=aborted"


@pytest.mark.parametrize(
    ("given_text", "number"),
    [("0", 0), ("17", 17), ("-1", None), ("1.5", None), ("\u0663", None), ("9" * 19, None), (None, None)],
)
def test_whole_numbers(given_text: str | None, number: int | None) -> None:
    assert parse_whole_number(given_text) == number


@pytest.mark.parametrize(
    ("given_text", "number"), [("0.5", 0.5), ("nan", None), ("-inf", None), ("x", None), (None, None)]
)
def test_finite_numbers(given_text: str | None, number: float | None) -> None:
    assert parse_finite(given_text) == number


@pytest.mark.parametrize(
    ("name", "address", "message"),
    [
        ("episodes", {"run": "nope"}, "no run `nope`"),
        ("episodes", {"score": "bogus"}, "No scorer `bogus` scored"),
        ("episodes", {"group": "nope"}, "`nope` is not an id"),
        ("groups", {"run": "nope"}, "no run `nope`"),
        ("groups", {"score": "nobody"}, "No scorer `nobody` scored"),
    ],
)
def test_a_name_that_the_lake_lacks_is_said_above_the_list_not_in_filters(
    shared_lake: Lake, monkeypatch: pytest.MonkeyPatch, name: str, address: dict[str, str], message: str
) -> None:
    show(shared_lake, monkeypatch)
    at = open_page(name, **address)
    (warning,) = at.warning
    assert message in warning.value
    assert any(child is warning for child in at.main.children.values()), "a popover may be closed"
