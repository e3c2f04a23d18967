"""Tables: how numbers are written side by side, and which columns say nothing."""

import polars as pl
import pytest

from testkit.streamlit_pages import assert_sound, words
from viewer import tables


def page() -> None:
    """A table of numbers, drawn by Streamlit."""
    import polars as pl

    from viewer import tables

    frame = pl.DataFrame({"mixed": [0.5, -0.00004, 0.00004], "small": [0.00004, 0.00005, 0.0]})
    columns = {"mixed": tables.TableColumn("Mixed", kind=tables.Kind.SIGNED), "small": tables.value("Small")}
    frame, columns = (
        frame.with_columns(rollout_index=pl.Series([3, 1_372_356_748, None])),
        columns | {"rollout_index": tables.value("Rollout")},
    )
    tables.draw_table(frame, columns, label="Numbers")


def test_no_exponent_stands_among_numbers_of_three_digits() -> None:
    """Where all are small, exponents tell them apart."""
    testing = pytest.importorskip("streamlit.testing.v1")
    shown_words = words(assert_sound(testing.AppTest.from_function(page).run()))
    for cell in ("+0.500", "&gt;\N{MINUS SIGN}0.001", "&lt;+0.001", "4e\N{MINUS SIGN}05", "5e\N{MINUS SIGN}05"):
        assert f">{cell}</td>" in shown_words
    for cell in ("3", "51cc808c"):
        assert f">{cell}</td>" in shown_words, "a rollout that is a hash has a short name"


def test_columns_of_nothing_are_left_out() -> None:
    nothing = {"unknown": [None, None], "no": [False, False]}
    frame = pl.DataFrame(nothing | {"yes": [True, False], "zero": [0, 0]}, schema_overrides={"unknown": pl.Int64})
    columns = {name: tables.value(name) for name in ("unknown", "zero")}
    columns |= {name: tables.mark(name) for name in ("no", "yes")}
    assert list(tables.select_filled(frame, columns)) == ["zero", "yes"]
