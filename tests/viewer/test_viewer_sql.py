"""The SQL page: what a SELECT gives, what it may not do, and where its rows lead."""

import polars as pl
import pytest

from lake import Lake, ids
from lake.errors import QueryError
from lake.locked import isolation
from testkit.lakes import build_lake
from testkit.streamlit_pages import assert_sound, column, links, open_page, show, words
from viewer import reader
from viewer.navigation import Page, href
from viewer.queries import Sort, annotations, episodes, sql
from viewer.queries.episodes import EpisodeFilter
from viewer.reader import Reader

pytestmark = pytest.mark.skipif(
    bool(isolation.find_missing_layers()), reason=f"no strong isolation here: {isolation.find_missing_layers()}"
)


@pytest.fixture(scope="module")
def whole_lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    return build_lake(tmp_path_factory.mktemp("sql"))


@pytest.fixture
def lk(whole_lake: Lake, monkeypatch: pytest.MonkeyPatch) -> Lake:
    """The usual content, shown; tests only read it."""
    return show(whole_lake, monkeypatch)


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
        pytest.param("SELECT nonsense FROM episodes", "nonsense", marks=pytest.mark.slow),
        ("COPY episodes TO '/tmp/stolen.csv'", "SELECT"),
        pytest.param("SELECT * FROM read_csv('/etc/passwd')", "passwd", marks=pytest.mark.slow),
        pytest.param("SELECT 1; SELECT 2", "one SELECT", marks=pytest.mark.slow),
        ("SELECT range FROM range(20000)", "add LIMIT"),
    ],
)
def test_what_has_no_answer_says_why(query: str, message: str, lk: Lake) -> None:
    at = open_page("sql", q=query)
    assert "no result" in at.error[0].value
    assert message in at.code[0].value


def test_a_query_is_typed_and_stands_in_the_address_then(lk: Lake) -> None:
    at = open_page("sql")
    assert "SELECT run_id" in at.text_area[0].value, "nothing is run before it is asked for"
    at.text_area[0].set_value("SELECT count(*) AS things FROM episodes")
    assert_sound(at.run())
    assert column(at, "answer", "things") == ["24"]


def test_a_fault_is_shown_where_it_is(lk: Lake) -> None:
    """Of syntax DuckDB says where; of a name that it does not know, the only mention is."""
    at = open_page("sql", q="SELECT run_id,\n  nonsense\nFROM episodes")
    assert "line 2, character 3:\n  nonsense\n  ^" in at.code[0].value
    at = open_page("sql", q="SELECT run_id\nFROM episodes\n WHERE x y z")
    assert "line 3, character 10:\n WHERE x y z\n         ^" in at.code[0].value
    long = "1, " * 100
    at = open_page("sql", q=f"SELECT {long} x y z")
    assert f"character {len('SELECT ' + long) + 6}:" in at.code[0].value


def test_queries_of_the_session_come_back_by_a_link(lk: Lake) -> None:
    at = open_page("sql", q="SELECT 1 AS things")
    at.text_area[0].set_value("SELECT 2 AS things")
    assert_sound(at.run())
    assert 'href="?q=SELECT+1+AS+things"' in words(at)
    at.query_params["q"] = "SELECT 1 AS things"
    assert_sound(at.run())
    assert at.text_area[0].value == "SELECT 1 AS things", "the field follows the address"


# ---------------------------------------------------------------- the episodes that a query names

QUERY = "SELECT episode_id, num_steps FROM episodes WHERE task_id = 'mixed' ORDER BY ALL DESC"


def test_the_episodes_of_a_query_are_a_list_in_its_order(lk: Lake) -> None:
    expected = lk.sql("SELECT DISTINCT episode_id FROM episodes WHERE task_id = 'mixed' ORDER BY 1 DESC")["episode_id"]
    expected = expected.to_list()
    at = open_page("sql", q=QUERY)
    assert f"[Open as list: {len(expected)} episodes]({href(Page.EPISODES, sql=QUERY)})" in words(at)
    at = open_page("episodes", sql=QUERY)
    assert column(at, "episodes", "episode_id") == [ids.to_text(episode_id) for episode_id in expected]
    assert "sql: SELECT episode_id" in words(at), "a chip that takes the query off"

    snap, condition = Reader(lk.snapshot()), EpisodeFilter(sql=QUERY)
    position_found = episodes.find_position(snap, condition, None, expected[2])
    assert position_found is not None
    assert (position_found.position, position_found.previous, position_found.next) == (3, expected[1], expected[3])
    both_conditions = EpisodeFilter(sql=QUERY, low=0.5, unlabelled=("rating", "ann"))
    some = episodes.list_episodes(snap, both_conditions, Sort("rollout_index")).to_list()
    assert 0 < len(some) < len(expected)
    assert set(some) <= set(expected)
    assert annotations.read_queue(snap, both_conditions, None).unlabelled == len(some)
    assert (
        episodes.count_facet_values(snap, "error", condition).total
        == episodes.count_facet_values(snap, "error", EpisodeFilter(task="mixed")).total
    )
    assert episodes.build_predicate(snap, EpisodeFilter(sql="SELECT 1::BIGINT AS episode_id")) == "episode_id IN (NULL)"


def test_ids_as_people_see_them_name_episodes_too(lk: Lake) -> None:
    snap = Reader(lk.snapshot())
    query = "SELECT id_text(episode_id) AS episode_id FROM episodes ORDER BY rollout_index DESC, episode_id LIMIT 5"
    texts = lk.sql(query)["episode_id"].to_list()
    assert [ids.to_text(episode_id) for episode_id in sql.list_named_episodes(snap, query)["episode_id"]] == texts


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("SELECT run_id FROM episodes", "column `episode_id`"),
        pytest.param("SELECT episode_id FROM read_parquet('/etc/passwd')", "passwd", marks=pytest.mark.slow),
        ("SELECT 1 AS episode_id) UNION ALL (SELECT 2", "syntax error"),
    ],
)
def test_a_query_that_names_no_episodes_is_refused(query: str, message: str, lk: Lake) -> None:
    with pytest.raises(QueryError, match=message):
        sql.list_named_episodes(Reader(lk.snapshot()), query)


def test_an_address_whose_query_has_no_episodes_does_no_harm(lk: Lake) -> None:
    """On the list, and on the page of an episode of such a list or queue."""
    query = "COPY episodes TO '/tmp/stolen.csv'"
    at = open_page("episodes", sql=query)
    assert "list has no result" in at.warning[0].value
    assert "SELECT" in at.code[0].value
    episode_id = lk.sql("SELECT min(episode_id) FROM episodes").item()
    at = open_page("episode", episode=episode_id, list=f"sql={query}&unlabelled=rating&by=ann")
    assert "list of this address" in words(at)
    assert "queue of this address" in at.warning[0].value


def test_answers_are_kept_and_few_run_at_once(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    queries: list[str] = []

    class Counting(reader.LockedReader):
        def sql(self, query: str, params: object = None) -> pl.DataFrame:
            queries.append(query)
            free = reader._locked_slots.acquire(blocking=False) and reader._locked_slots.acquire(blocking=False)
            assert not free, "a query that runs takes one of two places"
            reader._locked_slots.release()
            return pl.DataFrame({"n": [len(queries)]})

    monkeypatch.setattr(reader, "LockedReader", Counting)
    answers = reader.Reader(lk.snapshot())
    assert [answers.locked("a")["n"][0], answers.locked("a")["n"][0], answers.locked("b")["n"][0]] == [1, 1, 2]
