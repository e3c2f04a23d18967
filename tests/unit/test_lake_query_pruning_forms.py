"""DuckDB prints conditions as `lake.read.query_pruning` parses them: each printed form makes a query read fewer files.

No answer depends on this, so only the number of files shows that a new DuckDB prints another form.
"""

import duckdb
import pytest

import lake
from lake import Lake, ids
from lake.read import query_pruning
from lake.read.query_pruning import Condition, get_planner
from testkit.episodes import episode

RUNS = 6


@pytest.fixture(scope="module")
def lk(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """One file of `steps` for each of the runs `run 0` to `run 5`."""
    lk = lake.open(tmp_path_factory.mktemp("pruning") / "lake", create=True)
    for number in range(RUNS):
        with lk.job(kind="collect", run_id=f"run {number}") as job:
            job.record([episode("task", index) for index in range(2)])
    return lk


def bound_files(lk: Lake, query: str) -> int:
    """Files of `steps` that a session binds for a query."""
    with lk.snapshot().session() as session:
        session.query(query)
        return len(session._views.tables["steps"].paths or ())


@pytest.mark.parametrize(
    ("condition", "files"),
    [
        ("run_id = 'run 3'", 1),
        ("run_id IN ('run 1', 'run 4')", 2),
        ("run_id BETWEEN 'run 1' AND 'run 3'", 3),
        ("run_id >= 'run 4'", 2),
        ("run_id <= 'run 1'", 2),
        ("run_id > 'run 4'", 2),  # an open bound is taken for a closed one
        ("run_id < 'run 1'", 2),
        ("run_id = 'run 3' AND step_index = 0", 1),
    ],
)
def test_each_form_of_a_condition_on_texts_leaves_files_out(
    lk: Lake, monkeypatch: pytest.MonkeyPatch, condition: str, files: int
) -> None:
    monkeypatch.setattr(query_pruning, "FEW_FILES", 0)
    assert len(lk.snapshot().files("steps")) == RUNS
    assert bound_files(lk, f"SELECT count(*) FROM steps WHERE {condition}") == files, duckdb.__version__


@pytest.mark.parametrize(
    "condition", ["group_id = {0}", "group_id IN ({0}, {1})", "group_id = id('{text}')", "episode_id = {episode}"]
)
def test_each_form_of_a_condition_on_ids_leaves_files_out(
    lk: Lake, monkeypatch: pytest.MonkeyPatch, condition: str
) -> None:
    monkeypatch.setattr(query_pruning, "FEW_FILES", 0)
    rows = lk.sql("SELECT group_id, min(episode_id) AS episode FROM episodes GROUP BY 1 ORDER BY 1").rows()
    (first, episode_id), (second, _) = rows[:2]
    text = condition.format(first, second, text=ids.to_text(first), episode=episode_id)
    assert 1 <= bound_files(lk, f"SELECT count(*) FROM steps WHERE {text}") <= 2, duckdb.__version__


def test_a_condition_reaches_the_table_through_views_and_joins(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query_pruning, "FEW_FILES", 0)
    join = "SELECT count(*) FROM steps JOIN episodes USING (episode_id) WHERE steps.run_id = 'run 2'"
    assert bound_files(lk, join) == 1, duckdb.__version__
    assert bound_files(lk, "SELECT count(*) FROM trajectory WHERE run_id = 'run 2'") == 1, duckdb.__version__


@pytest.mark.parametrize(
    ("condition", "parsed"),
    [
        ("episode_id = 7", Condition("episode_id", frozenset((7,)))),
        ("episode_id = -7", Condition("episode_id", frozenset((-7,)))),
        ("run_id = 'it''s'", Condition("run_id", frozenset(("it's",)))),
        ("episode_id IN (3, 5)", Condition("episode_id", frozenset((3, 5)))),
        ("episode_id BETWEEN 3 AND 5", Condition("episode_id", low=3, high=5)),
        ("episode_id >= 3", Condition("episode_id", low=3)),
        ("episode_id < 5", Condition("episode_id", high=5)),
    ],
)
def test_the_plan_has_the_condition_and_the_columns(condition: str, parsed: Condition) -> None:
    plan = get_planner().plan(f"SELECT state FROM steps WHERE {condition}")
    assert [parsed in scan for scan in plan.scans["steps"]] == [True], duckdb.__version__
    assert plan.columns["steps"] >= {"state", parsed.column}
    assert plan.columns["steps"].isdisjoint({"action", "context", "reward"}), "columns that the query does not read"


def test_without_parsed_conditions_every_file_is_bound(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query_pruning, "FEW_FILES", 0)
    monkeypatch.setattr(query_pruning, "parse_condition", lambda _text: None)
    assert bound_files(lk, "SELECT count(*) FROM steps WHERE run_id = 'run 3'") == RUNS
