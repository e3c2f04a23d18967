"""Retraction: a retry replaces its predecessor in one commit, people take episodes back, old snapshots still show them.

At no moment does a reader see two attempts of one rollout.
"""

import shutil
import threading
from collections.abc import Sequence
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import lake
from lake import EpisodeRecord, Lake, Snapshot, ids
from lake.care import removal
from lake.errors import UsageError
from lake.read.parquet import select_in_force
from lake.read.query_pruning import get_planner
from lake.read.query_views import read_views
from lake.tables import TABLES
from lake.write.jobs import write_retractions
from testkit.copies import empty_lake
from testkit.episodes import assert_same, assert_whole, contents, episode
from testkit.examples import mostly_slow
from testkit.full_lake import full_lake


@pytest.fixture
def lk(tmp_path: Path) -> Lake:
    return empty_lake(tmp_path / "lake")


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lake with rows in every table; copied before it is written to."""
    return Path(full_lake(tmp_path_factory.mktemp("full") / "lake").uri)


ORDERS = mostly_slow(permutations(range(3)), (0, 1, 2), (2, 1, 0), (1, 2, 0))
"""Of three attempts at one rollout."""


def attempt(number: int, index: int = 0, **fields: Any) -> EpisodeRecord:
    return episode("task", index, steps=1 + number, attempt=number, tokens=True, **fields)


def visible(snapshot: Snapshot) -> list[int]:
    """Attempts of rollout 0 that readers see; every rollout has one at most, with its steps and tokens."""
    assert_whole(snapshot)
    frame = snapshot.scan("episodes").collect()
    assert not frame.select("group_id", "rollout_index", "agent_id").is_duplicated().any()
    in_sql = snapshot.sql("SELECT attempt FROM episodes WHERE rollout_index = 0")["attempt"].to_list()
    assert in_sql == frame.filter(pl.col("rollout_index") == 0)["attempt"].to_list()
    return in_sql


# ---------------------------------------------------------------- retries


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_whatever_order_attempts_arrive_in_the_highest_so_far_is_visible(lk: Lake, order: Sequence[int]) -> None:
    for arrived, number in enumerate(order, 1):
        assert lk.append([attempt(number)], run_id="run").new == 1
        assert visible(lk.snapshot()) == [max(order[:arrived])]
    assert lk.snapshot().scan_all("episodes").collect().height == 3
    rows = lk.scan("retractions").collect()
    assert set(rows["kind"]) == {"superseded"}
    assert len(rows) == 2
    chain = {row["episode_id"]: row["superseded_by"] for row in rows.iter_rows(named=True)}
    assert not chain.keys() & set(lk.scan("episodes").collect()["episode_id"])


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_attempts_of_one_batch(lk: Lake, order: Sequence[int]) -> None:
    assert lk.append([attempt(number) for number in order], run_id="run").new == 3
    assert visible(lk.snapshot()) == [2]


def test_only_the_same_rollout_of_the_same_agent_and_group_is_replaced(lk: Lake) -> None:
    changes = [
        attempt(1, index=1),
        attempt(1, agent_id="other"),
        attempt(1, seed=5),
        attempt(1, collection_round=1),
        attempt(1, run_id="another"),
    ]
    lk.append([attempt(0)], run_id="run")
    lk.append(changes, run_id="run")
    assert lk.scan("episodes").collect()["attempt"].sort().to_list() == [0, *[1] * len(changes)]
    assert lk.snapshot().retracted.is_empty()


def test_a_reader_between_any_two_commits_sees_one_attempt(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    lk.append([attempt(0)], run_id="run")
    reader, states = lake.open(lk.uri), []
    commit = lk._store._commit

    def watched(*args: Any, **options: Any) -> None:
        states.append(visible(reader.snapshot()))
        commit(*args, **options)
        states.append(visible(reader.snapshot()))

    monkeypatch.setattr(lk._store, "_commit", watched)
    lk.append([attempt(1)], run_id="run")
    assert states[0] == [0]
    assert states[-1] == [1]
    assert sum(before != after for before, after in pairwise(states)) == 1


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_an_attempt_that_another_process_brings_during_the_write_is_taken_into_account(
    lk: Lake, order: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is there; the second's children are committed; the third comes; then the second's episode."""
    first, second, third = order
    reader = lake.open(lk.uri)
    lk.append([attempt(first)], run_id="run")
    commit = lk._store.append_episodes

    def meanwhile(*args: Any, **options: Any) -> None:
        monkeypatch.undo()
        reader.append([attempt(third)], run_id="run")
        assert visible(reader.snapshot()) == [max(first, third)]
        commit(*args, **options)

    monkeypatch.setattr(lk._store, "append_episodes", meanwhile)
    lk.append([attempt(second)], run_id="run")
    assert visible(lk.snapshot()) == [2]
    assert lk.snapshot().scan_all("episodes").collect().height == 3


def test_threads_that_race_attempts_of_many_rollouts_leave_the_highest_of_each(lk: Lake) -> None:
    orders = list(permutations(range(3)))
    barrier, errors = threading.Barrier(3), []

    def work(position: int) -> None:
        try:
            mine = lake.open(lk.uri)
            barrier.wait()
            for start in (0, 3):
                batch = [attempt(orders[index][position], index) for index in range(start, start + 3)]
                mine.append(batch, run_id="run")
                visible(mine.snapshot())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(position,)) for position in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert visible(lk.snapshot()) == [2]
    assert lk.scan("episodes").collect()["attempt"].to_list() == [2] * 6


def test_a_replay_of_a_replaced_attempt_is_present_and_stays_replaced(lk: Lake) -> None:
    lk.append([attempt(0)], run_id="run")
    lk.append([attempt(1)], run_id="run")
    counts = lake.open(lk.uri).append([attempt(0), attempt(1)], run_id="run")
    assert (counts.new, counts.present) == (0, 2)
    assert visible(lk.snapshot()) == [1]


# ---------------------------------------------------------------- by hand


def rows_of(snapshot: Snapshot, episode_id: int) -> dict[str, tuple[int, int]]:
    """Rows of an episode by table, counted by scan and by SQL."""
    rows_by_table = {}
    for name, table in TABLES.items():
        if "episode_id" in table.names:
            scanned = snapshot.scan(name).filter(pl.col("episode_id") == episode_id).collect().height
            query = f"SELECT count(*) AS n FROM {name} WHERE episode_id = ?"
            rows_by_table[name] = (scanned, int(snapshot.sql(query, [episode_id]).item()))
    return rows_by_table


def test_a_retracted_episode_is_gone_from_scan_and_sql_of_every_table_and_view(full: Path, tmp_path: Path) -> None:
    lk = lake.open(shutil.copytree(full, tmp_path / "lake"))
    before = lk.snapshot()
    (episode_id,) = before.scan("annotations").head(1).collect()["episode_id"]
    rows_shown = rows_of(before, episode_id)
    hiding = {name for name, table in TABLES.items() if table.hides_retracted}
    assert {name for name, counts in rows_shown.items() if counts[0]} >= hiding, "the episode has rows everywhere"

    assert lk.retract([episode_id], "it read the answer") == 1

    after = lk.snapshot()
    now = rows_of(after, episode_id)
    assert {name: now[name] for name in hiding} == dict.fromkeys(hiding, (0, 0))
    assert now["batches"] == rows_shown["batches"], "lineage keeps saying what was trained on"
    with after.session() as session:
        for view in read_views():
            columns = [name for name, _ in get_planner().columns(view)]
            if "episode_id" in columns and view not in ("step_seen", "trained_batches", "current_retractions"):
                query = f"SELECT count(*) AS n FROM {view} WHERE episode_id = ?"
                assert session.query(query, [episode_id]).item() == 0, view
    (row,) = after.scan("retractions").filter(pl.col("episode_id") == episode_id).collect().rows(named=True)
    assert (row["kind"], row["reason"], row["superseded_by"]) == ("retracted", "it read the answer", None)
    assert rows_of(lake.open(lk.uri).at(before.versions), episode_id) == rows_shown
    assert assert_whole(after) == assert_whole(before) - 1


# ---------------------------------------------------------------- the way back


def test_a_restored_episode_is_as_it_was_everywhere_and_old_snapshots_stay(full: Path, tmp_path: Path) -> None:
    lk = lake.open(shutil.copytree(full, tmp_path / "lake"))
    before = lk.snapshot()
    (episode_id,) = before.scan("annotations").head(1).collect()["episode_id"]
    lk.retract([episode_id], "a mistake")
    hidden = lk.snapshot()
    assert lk.restore([episode_id], "it was none") == 1
    after = lk.snapshot()
    changed = {"jobs", "retractions"}
    rows = {name: counts for name, counts in rows_of(after, episode_id).items() if name not in changed}
    assert rows == {name: counts for name, counts in rows_of(before, episode_id).items() if name not in changed}
    for view in ("trajectory", "step_ledger", "current_scores", "latest_advantages"):
        query = f"SELECT * FROM {view} WHERE episode_id = ? ORDER BY ALL"
        assert after.sql(query, [episode_id]).equals(before.sql(query, [episode_id])), view
    assert after.sql("SELECT * FROM current_retractions WHERE episode_id = ?", [episode_id]).is_empty()
    kinds = after.scan("retractions").filter(pl.col("episode_id") == episode_id).sort("at").collect()
    assert kinds["kind"].to_list() == ["retracted", "restored"]
    assert kinds["restores"].to_list() == [None, kinds["write_id"][:1].to_list()]
    assert episode_id in lake.open(lk.uri).at(hidden.versions).retracted
    assert lk.restore([episode_id]) == 0
    assert lk.snapshot().versions == after.versions, "nothing to do, nothing written"


def test_what_is_restored_can_be_retracted_again_and_survives_compaction(lk: Lake) -> None:
    lk.append([episode("a"), episode("b")], run_id="run")
    everything = lk.scan("episodes").collect()["episode_id"].to_list()
    for _ in range(2):
        assert lk.retract(everything) == 2
        assert visible(lk.snapshot()) == []
        assert lk.restore(everything) == 2
        lk.compact("retractions")
        assert visible(lk.snapshot()) == [0, 0]


def test_a_retraction_that_comes_during_a_restoration_holds(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    lk.append([episode("a")], run_id="run")
    (episode_id,) = lk.scan("episodes").collect()["episode_id"]
    other_lake, job = lake.open(lk.uri), lk.job

    def again() -> None:
        with other_lake.job(kind="retract") as writing:
            write_retractions(writing, [episode_id], "retracted", "by another process")

    def meanwhile(**fields: Any) -> Any:
        again()
        return job(**fields)

    lk.retract([episode_id])
    again()
    monkeypatch.setattr(lk, "job", meanwhile)
    assert lk.restore([episode_id]) == 1
    monkeypatch.undo()
    assert visible(lk.snapshot()) == []
    assert lk.sql("SELECT reason FROM current_retractions")["reason"].to_list() == ["by another process"]
    assert lk.restore([episode_id]) == 1, "of two retractions at once both are taken back"
    assert visible(lk.snapshot()) == [0]


def test_a_replaced_attempt_stays_replaced_whatever_is_restored(lk: Lake) -> None:
    lk.append([attempt(0)], run_id="run")
    (first,) = lk.scan("episodes").collect()["episode_id"]
    lk.retract([first])
    lk.append([attempt(1)], run_id="run")
    versions = lk.snapshot().versions
    choice = removal.restore(lk, [first], None)
    assert (choice.changed, choice.replaced, choice.job_id) == ((), (first,), None)
    assert lk.snapshot().versions == versions
    assert visible(lk.snapshot()) == [1]
    (second,) = lk.scan("episodes").collect()["episode_id"]
    lk.retract([second])
    assert lk.restore([first, second]) == 1
    assert visible(lk.snapshot()) == [1]


def test_what_was_forgotten_cannot_be_restored(lk: Lake) -> None:
    lk.append([episode("a"), episode("b")], run_id="run")
    first_id, second_id = lk.scan("episodes").collect()["episode_id"]
    lk.retract([first_id, second_id])
    lk.forget([first_id])
    versions = lk.snapshot().versions
    with pytest.raises(UsageError, match=f"{ids.to_text(first_id)} was erased"):
        lk.restore([first_id, second_id])
    assert lk.snapshot().versions == versions
    assert lk.restore([second_id]) == 1


def test_a_restoration_takes_back_no_other_kind_of_row() -> None:
    """No matter which write attempts it names: what a retry replaced, and what was erased, stays hidden."""
    kinds = ["superseded", "forgotten", "retracted", "restored", "restored"]
    restores = [None, None, None, [1, 2, 3], []]
    rows = pl.DataFrame({"episode_id": [1] * 5, "write_id": [1, 2, 3, 4, 5], "kind": kinds, "restores": restores})
    assert set(select_in_force(rows.lazy()).collect()["kind"]) == {"superseded", "forgotten"}
    elsewhere = rows.with_columns(episode_id=pl.when(pl.col("kind") == "restored").then(2).otherwise(1).cast(pl.Int64))
    assert select_in_force(elsewhere.lazy()).collect().height == 3


def test_the_episodes_beside_it_do_not_change(full: Path, tmp_path: Path) -> None:
    lk = lake.open(shutil.copytree(full, tmp_path / "lake"))
    before = lk.snapshot()
    (episode_id,) = before.scan("annotations").head(1).collect()["episode_id"]
    lk.retract([episode_id])
    frames = {
        name: frame.filter(pl.col("episode_id") != episode_id)
        for name, frame in contents(before, ("episodes", "steps", "tokens", "scores", "advantages")).items()
    }
    assert_same(contents(lk.snapshot(), tuple(frames)), frames)


def test_retracting_counts_what_was_visible(lk: Lake) -> None:
    lk.append([episode("a"), episode("b"), attempt(0), attempt(1)], run_id="run")
    everything = lk.snapshot().scan_all("episodes").sort("task_id", "attempt").collect()["episode_id"].to_list()
    a, b, replaced, _ = everything
    assert lk.retract([a, a]) == 1
    versions = lk.snapshot().versions
    assert lk.retract([a, replaced]) == 0
    assert lk.snapshot().versions == versions, "nothing to do, nothing written"
    assert lk.retract([a, b]) == 1
    assert lk.scan("episodes").collect()["attempt"].to_list() == [1]


@pytest.mark.parametrize(
    ("ids", "says"),
    [([], "no episodes are named"), ([1, 2, 3, 4], "the lake holds no episode 0000000000001, .*more.; nothing was")],
)
@pytest.mark.parametrize("operation", ["retract", "restore", "forget"])
def test_ids_that_are_not_there_change_nothing(lk: Lake, operation: str, ids: list[int], says: str) -> None:
    lk.append([episode()], run_id="run")
    episode_ids = lk.scan("episodes").collect()["episode_id"].to_list()
    before = lk.snapshot()
    with pytest.raises(UsageError, match=says):
        getattr(lk, operation)(ids + (episode_ids if ids else []))
    after = lk.snapshot()
    assert {name for name in TABLES if after.versions[name] != before.versions[name]} <= {"jobs"}
    assert_same(contents(after), contents(before))
    assert after.retracted.is_empty()


def test_a_retracted_episode_does_not_come_back_by_ingesting_it_again(lk: Lake) -> None:
    lk.append([episode("a"), episode("b")], run_id="run")
    (episode_id, _) = lk.scan("episodes").sort("task_id").collect()["episode_id"]
    lk.retract([episode_id])
    counts = lake.open(lk.uri).append([episode("a"), episode("b")], run_id="run")
    assert (counts.new, counts.present) == (0, 2)
    assert lk.scan("episodes").collect()["task_id"].to_list() == ["b"]


def test_compaction_keeps_what_is_retracted_and_what_old_snapshots_show(lk: Lake) -> None:
    for number in range(3):
        lk.append([attempt(number)], run_id="run")
    lk.append([episode("a")], run_id="run")
    old = lk.snapshot()
    lk.retract(lk.scan("episodes").filter(pl.col("task_id") == "a").collect()["episode_id"].to_list())
    for name in TABLES:
        lk.compact(name)
    assert visible(lk.snapshot()) == [2]
    assert sorted(lk.at(old.versions).scan("episodes").collect()["task_id"]) == ["a", "task"]
    assert lk.append([attempt(3)], run_id="run").new == 1
    assert visible(lk.snapshot()) == [3]


def test_ids_may_come_as_people_see_them_and_as_a_column(tmp_path: Path) -> None:
    lk = empty_lake(tmp_path / "lake")
    lk.append([episode("t", n) for n in range(4)], run_id="run")
    numbers = lk.scan("episodes").collect()["episode_id"]
    assert lk.retract(numbers.head(2)) == 2
    assert lk.retract([ids.to_text(numbers[2]), numbers[2]]) == 1
    for wrong in ("0s9c3ahcetq4h", ["no id"], [2**80], [-1], [1.5], [True], 7):
        with pytest.raises(UsageError):
            lk.retract(wrong)  # type: ignore[arg-type]
    assert lk.scan("episodes").collect().height == 1
