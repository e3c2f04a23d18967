"""The SQL page: what a SELECT gives, what it may not do, and where its rows lead."""

from pathlib import Path

import pytest

from lake import Lake, ids
from lake.locked import isolation
from testkit.lakes import build_lake
from testkit.streamlit_pages import assert_sound, column, links, open_page, show, words

pytestmark = pytest.mark.skipif(bool(isolation.missing()), reason=f"no strong isolation here: {isolation.missing()}")


@pytest.fixture
def lk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lake:
    return show(build_lake(tmp_path), monkeypatch)


def test_rows_lead_to_their_episodes_and_are_in_pages(lk: Lake) -> None:
    at = open_page("sql", q="SELECT episode_id, step_index, action AS things FROM steps ORDER BY ALL", page=2)
    expected = lk.sql("SELECT episode_id, step_index FROM steps ORDER BY ALL").rows()
    assert f"51 to {min(100, len(expected))} of {len(expected)} rows" in words(at)
    assert links(at, "answer")[0] == f"/episode?episode={ids.to_text(expected[50][0])}&step={expected[50][1]}"
    assert column(at, "answer", "step_index") == [str(step) for _, step in expected[50:100]]


def test_numbers_can_be_drawn(lk: Lake) -> None:
    at = open_page("sql", q="SELECT rollout_index, avg(num_steps) AS steps FROM episodes GROUP BY ALL", chart="true")
    assert len(at.get("vega_lite_chart")) == 1
    assert not open_page("sql", q="SELECT task_id AS things FROM episodes", chart="true").get("vega_lite_chart")


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("SELECT nonsense FROM episodes", "nonsense"),
        ("COPY episodes TO '/tmp/stolen.csv'", "SELECT"),
        ("SELECT * FROM read_csv('/etc/passwd')", "passwd"),
        ("SELECT 1; SELECT 2", "one SELECT"),
        ("SELECT range FROM range(20000)", "add LIMIT"),
    ],
)
def test_what_has_no_answer_says_why(query: str, message: str, lk: Lake) -> None:
    at = open_page("sql", q=query)
    assert at.error[0].value == "The query has no result."
    assert message in at.code[0].value


def test_a_query_is_typed_and_stands_in_the_address_then(lk: Lake) -> None:
    at = open_page("sql")
    assert "SELECT run_id" in at.text_area[0].value, "nothing is run before it is asked for"
    at.text_area[0].set_value("SELECT count(*) AS things FROM episodes")
    assert_sound(at.run())
    assert column(at, "answer", "things") == ["24"]
