"""Small decisions of the pages: how a credit job is called, how bars are scaled, what a table shows."""

import json
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from streamlit.testing.v1 import AppTest  # noqa: TID253 - the viewer's tests alone

from pipelines.credit import GiGPO
from testkit.lakes import RUN, add_training, build_lake, rollout
from testkit.streamlit_pages import column, columns, links, open_page, show
from viewer.filters import describe_parameters
from viewer.queries import ListWindow
from viewer.transcript.outline import compute_scale


def test_a_credit_job_is_called_by_its_estimator_and_its_numbers() -> None:
    config = GiGPO(gamma=0.9).model_dump(mode="json")
    text = describe_parameters(
        json.dumps({"estimator": "gigpo", "config": config, "score": "env_return", "where": None})
    )
    assert text.startswith("gigpo, score env_return, gamma 0.9, invalid_action_penalty 0.1, omega 1, truncated keep")
    assert "anchors" not in text
    assert "None" not in text


@pytest.mark.parametrize("document", [None, "", "[]", "7", "not json", "[" * 100_000, '{"config": 3}'])
def test_parameters_of_any_shape_have_a_description(document: str | None) -> None:
    assert describe_parameters(document) == ""


@given(st.dictionaries(st.text(max_size=10), st.text(max_size=30) | st.floats(allow_nan=False), max_size=20))
def test_a_description_is_one_short_line(parameters: dict[str, str | float]) -> None:
    text = describe_parameters(json.dumps(parameters), limit=50)
    assert len(text) <= 50
    assert "\n" not in text


def test_the_runs_open_on_a_trained_run_rather_than_on_its_larger_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lk = show(build_lake(tmp_path, [rollout("t", index, 1.0) for index in range(2)]), monkeypatch)
    add_training(lk)
    with lk.job(kind="collect", run_id=f"{RUN}-eval") as job:
        job.record([rollout("held out", index, 1.0) for index in range(3)])
    assert open_page("runs").subheader[0].value == f"Run `{RUN}`"


def test_bars_are_scaled_by_the_largest_of_their_kind() -> None:
    credit = pl.DataFrame(
        {"advantage": [1.0, None], "a_episode": [-3.0, 0.5], "a_step": [2.0, None], "return_to_go": [0.9, -4.0]}
    )
    scale = compute_scale(credit, 1.0, rewarded=True)
    assert (scale.advantage, scale.reward) == (3.0, 4.0)


def test_bars_without_values_have_no_scale() -> None:
    names = ("advantage", "a_episode", "a_step", "return_to_go")
    for credit in (
        pl.DataFrame(),
        pl.DataFrame({name: [None] for name in names}, schema=dict.fromkeys(names, pl.Float64)),
    ):
        scale = compute_scale(credit, 0.0, rewarded=False)
        assert (scale.advantage, scale.reward) == (0.0, 0.0)


@given(st.integers(1, 10**6), st.integers(1, 500))
def test_pages_follow_one_another_without_gap(number: int, rows: int) -> None:
    window, following = ListWindow.page(number, rows), ListWindow.page(number + 1, rows)
    assert window.offset + window.limit == following.offset
    assert ListWindow.page(1, rows).offset == 0


def table_page() -> None:
    """A page with one table, for the test below."""
    import polars as pl

    from viewer import tables

    frame = pl.DataFrame(
        {"episode_id": [5, 6], "task_id": ["a\x1b[31m\n<b>", "x" * 5000], "value": [None, 0.0], "hidden": [1, 2]}
    )
    columns = {"episode_id": tables.ident("Episode"), "task_id": tables.text("Task"), "value": tables.value("Value")}
    tables.draw_table(frame, columns, label="Things", href=lambda row: f"/episode?episode={row['episode_id']}&a=<b>")


def test_a_table_shows_ids_as_text_and_cells_in_one_short_line() -> None:
    at = AppTest.from_function(table_page, default_timeout=60).run()
    assert [error.value for error in at.exception] == []
    assert columns(at, "things") == ["episode_id", "task_id", "value"], "what is not asked for is not shown"
    assert column(at, "things", "episode_id") == ["0000000000005", "0000000000006"]
    first, second = column(at, "things", "task_id")
    assert first == r"a\x1b[31m <b>"
    assert len(second) == 400
    assert column(at, "things", "value") == ["\u2013", "0"], "unknown is not 0"
    assert links(at, "things")[0] == "/episode?episode=0000000000005&a=<b>"
    assert "<b>" not in at.get("html")[0].proto.body


def pages_page() -> None:
    """A page with a pager over 60 rows, for the tests below."""
    import streamlit as st

    from viewer.components import draw_pager

    window = draw_pager(60, "things")
    st.text(f"{window.offset} {window.limit}")


@pytest.mark.parametrize(
    ("page", "shown_page", "words"),
    [
        (None, "0 25", "1 to 25 of 60 things"),
        ("3", "50 25", "51 to 60 of 60 things"),
        ("99", "50 25", "51 to 60 of 60 things"),
        ("0", "0 25", "1 to 25 of 60 things"),
        ("-1", "0 25", "1 to 25 of 60 things"),
        ("x", "0 25", "1 to 25 of 60 things"),
    ],
)
def test_the_page_of_the_address_is_shown_if_there_is_one(page: str | None, shown_page: str, words: str) -> None:
    at = AppTest.from_function(pages_page, default_timeout=60)
    if page is not None:
        at.query_params["page"] = page
    at.run()
    assert at.text[0].value == shown_page
    assert at.caption[0].value == words


def test_the_first_page_leaves_the_address_bare() -> None:
    at = AppTest.from_function(pages_page, default_timeout=60)
    at.query_params["page"] = "2"
    at.run()
    at.get("pagination")[0].set_value(1)
    at.run()
    assert "page" not in at.query_params
    assert at.text[0].value == "0 25"


def empty_page() -> None:
    """A page of a lake without rows, and a list of one, for the test below."""
    from viewer.components import draw_empty, draw_pager

    draw_empty("This lake holds nothing.", "trajlake ingest FILE --lake LAKE      # or: trajlake demo")
    draw_pager(1, "episodes in 1 group, mean outcome 1")


def test_an_empty_page_names_the_lake_and_a_list_of_one_has_no_plural(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAJLAKE_LAKE", "/data/my lake")
    at = AppTest.from_function(empty_page, default_timeout=60).run()
    assert at.code[0].value == "trajlake ingest FILE --lake '/data/my lake'      # or: trajlake demo"
    assert at.caption[0].value == "1 episode in 1 group, mean outcome 1"
