"""Snapshots: fixed versions of all tables, reopened at will, the same for Polars and for SQL."""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from deltalake import DeltaTable
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lake
from lake import Lake, Snapshot
from lake.errors import ContractError, LakeAccessError, NotALakeError
from lake.tables import TABLES
from testkit.copies import empty_lake
from testkit.episodes import assert_same, assert_whole, contents, episode
from testkit.examples import examples
from testkit.full_lake import add_round, full_lake


@pytest.fixture(scope="module")
def lk(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Every table has rows; nothing here writes to it."""
    return full_lake(tmp_path_factory.mktemp("full") / "lake")


@pytest.fixture
def empty(tmp_path: Path) -> Lake:
    return empty_lake(tmp_path / "lake")


def everything(snapshot: Snapshot) -> dict[str, pl.DataFrame]:
    """All visible rows of all tables, private columns too."""
    return {name: snapshot.scan(name).collect().sort("write_id", *table.key) for name, table in TABLES.items()}


# ---------------------------------------------------------------- what a snapshot shows


def test_scan_and_sql_show_the_same_rows(lk: Lake) -> None:
    snapshot = lk.snapshot()
    with snapshot.session() as session:
        for name, table in TABLES.items():
            scanned = snapshot.scan(name).collect().sort("write_id", *table.key)
            queried = session.query(f'SELECT * FROM "{name}"').cast(dict(scanned.schema)).sort("write_id", *table.key)
            assert scanned.height > 0
            assert queried.equals(scanned), name


@pytest.mark.parametrize("filled", [True, False], ids=["with rows", "without rows"])
def test_scan_and_sql_have_the_columns_of_the_spec(lk: Lake, empty: Lake, filled: bool) -> None:
    snapshot = (lk if filled else empty).snapshot()
    with snapshot.session() as session:
        for name, table in TABLES.items():
            assert snapshot.scan(name).collect_schema() == table.polars(), name
            assert snapshot.scan(name).collect().schema == table.polars(), name
            described = session.query(f'DESCRIBE "{name}"').select("column_name", "column_type")
            assert dict(described.iter_rows()) == {c.name: c.sql_type for c in table.columns}, name


def test_an_empty_lake_has_every_table_and_no_rows(empty: Lake) -> None:
    snapshot = empty.snapshot()
    assert set(snapshot.versions) == set(TABLES)
    assert {frame.height for frame in everything(snapshot).values()} == {0}
    assert snapshot.size("steps") == (0, 0, 0)


def test_the_rows_of_a_failed_job_do_not_exist(lk: Lake) -> None:
    """Three rounds of three episodes that count; the judging job of the second failed."""
    snapshot = lk.snapshot()
    heights = {name: snapshot.scan(name).collect().height for name in TABLES}
    assert (heights["advantages"], heights["scores"]) == (8, 8)
    assert heights["tokens"] == 12 + 8, "what the engine recorded, and what the jobs that succeeded rendered"
    assert len(snapshot.dead_write_ids) == 13
    assert (heights["episodes"], heights["batches"], heights["checkpoints"]) == (9, 3, 3)


def test_the_same_reject_twice_is_one_row(empty: Lake) -> None:
    for _ in range(3):
        with empty.job(kind="ingest", run_id="run") as job:
            job.record([episode(steps=0)])
    assert empty.scan("rejects").collect().height == 1
    assert empty.sql("SELECT count(*) AS n FROM rejects").item() == 1
    with empty.job(kind="ingest", run_id="other") as job:
        job.record([episode(steps=0)])
    assert sorted(empty.scan("rejects").collect()["run_id"]) == ["other", "run"], "a reject belongs to its run"


def test_files_and_size_speak_of_the_same_files(lk: Lake) -> None:
    snapshot = lk.snapshot()
    for name in TABLES:
        files = snapshot.files(name)
        assert all(Path(file.path).is_file() and not file.dead for file in files)
        rows = sum(pl.scan_parquet(file.path).select(pl.len()).collect().item() for file in files)
        sizes = sum(Path(file.path).stat().st_size for file in files)
        assert snapshot.size(name) == (len(files), rows, sizes)


# ---------------------------------------------------------------- time travel


def test_stored_versions_show_what_they_showed(tmp_path: Path) -> None:
    lk = empty_lake(tmp_path / "lake")
    snapshots = []
    for number in range(2):
        add_round(lk, number, fail=number == 1)
        snapshots.append((json.loads(json.dumps(lk.snapshot().versions)), everything(lk.snapshot())))
    for name in TABLES:
        DeltaTable(f"{lk.uri}/{name}").optimize.compact()
    again = lake.open(lk.uri)
    for versions, rows in snapshots:
        snapshot = again.at(versions)
        assert snapshot.versions == versions
        assert_same(everything(snapshot), rows)
        with snapshot.session() as session:
            for name, frame in rows.items():
                assert session.query(f"SELECT count(*) AS n FROM {name}").item() == frame.height
    assert_same(everything(lk.snapshot()), snapshots[-1][1])


def test_a_snapshot_does_not_move(tmp_path: Path) -> None:
    lk = full_lake(tmp_path / "lake")
    snapshot = lk.snapshot()
    before = everything(snapshot)
    add_round(lk, 3)
    assert_same(everything(snapshot), before)
    assert snapshot.sql("SELECT count(*) AS n FROM episodes").item() == 9


def test_a_version_before_the_jobs_end_does_not_show_its_judgements(tmp_path: Path) -> None:
    """Rows are accepted by the terminal row in the snapshot, not by the one that came later."""
    lk = empty_lake(tmp_path / "lake")
    add_round(lk, 0)
    versions = lk.snapshot().versions
    before = lk.at(versions | {"jobs": versions["jobs"] - 3})
    assert before.scan("advantages").collect().is_empty()
    assert before.sql("SELECT count(*) AS n FROM scores").item() == 0
    assert assert_whole(before) == 3, "episodes need no job's word"


def test_it_prints_as_the_mapping_it_is(empty: Lake) -> None:
    snapshot = empty.snapshot()
    assert json.loads(repr(snapshot).removeprefix("Snapshot(").removesuffix(")")) == snapshot.versions


def test_tables_that_a_stored_mapping_does_not_name_are_empty(lk: Lake) -> None:
    """A mapping from before a table was invented."""
    versions = lk.snapshot().versions
    old = lk.at({name: version for name, version in versions.items() if name != "scores"})
    assert old.versions["scores"] == -1
    assert old.scan("scores").collect().is_empty()
    assert old.scan("advantages").collect().height == 8


@pytest.mark.parametrize("version", [-2, "3", 1.0, None])
def test_a_version_that_can_be_none_is_refused(empty: Lake, version: Any) -> None:
    if version is None:
        assert empty.at({}).versions["episodes"] == -1
        return
    with pytest.raises(ContractError, match="`episodes` has no version"):
        empty.at({"episodes": version})


def test_a_version_that_is_not_there_is_named_with_the_newest(empty: Lake) -> None:
    with pytest.raises(LakeAccessError, match=r"table `episodes` of .* has no version 99; its newest is 0$"):
        empty.at({"episodes": 99})


def test_a_table_that_does_not_exist_is_refused(empty: Lake) -> None:
    for call in (empty.scan, empty.snapshot().files, empty.snapshot().size):
        with pytest.raises(ContractError, match="there is no table `step`; the tables are episodes, steps"):
            call("step")
    with pytest.raises(ContractError, match=r"unknown tables \['step'\]"):
        empty.at({"step": 0})


# ---------------------------------------------------------------- pruning and streaming


@pytest.fixture
def runs(tmp_path: Path) -> Lake:
    """Five runs, each in its own files."""
    lk = empty_lake(tmp_path / "runs")
    for n in range(5):
        lk.append([episode("t", n)], run_id=f"run {n}")
    return lk


@pytest.mark.parametrize(
    "condition",
    [
        pl.col("run_id") == "run 3",
        pl.col("run_id").is_in(["run 3"]),
        (pl.col("run_id") > "run 2") & (pl.col("run_id") < "run 4") & (pl.col("reward") >= 0),
    ],
)
def test_a_filter_on_a_key_opens_only_files_that_can_match(runs: Lake, condition: pl.Expr) -> None:
    """The others may as well be gone."""
    expected = runs.scan("steps").filter(condition).collect()
    assert expected.height == 2
    snapshot = runs.snapshot()
    for file in snapshot.files("steps"):
        if file.ranges["run_id"][0] != "run 3":
            Path(file.path).unlink()
    assert_same({"steps": snapshot.scan("steps").filter(condition).collect()}, {"steps": expected})


@given(low=st.integers(-1, 6), high=st.integers(-1, 6), reward=st.floats(0, 1))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(30), deadline=None)
def test_pruning_never_changes_the_rows(runs: Lake, low: int, high: int, reward: float) -> None:
    snapshot = runs.snapshot()
    condition = pl.col("run_id").is_between(pl.lit(f"run {low}"), pl.lit(f"run {high}")) & (pl.col("reward") >= reward)
    pruned = snapshot.scan("steps").filter(condition).collect()
    plain = pl.concat([pl.read_parquet(file.path) for file in snapshot.files("steps")]).filter(condition)
    assert pruned.sort("episode_id", "step_index").equals(plain.sort("episode_id", "step_index"))


def test_a_stream_gives_the_rows_of_sql_in_batches(runs: Lake) -> None:
    query = "SELECT episode_id, step_index FROM steps ORDER BY ALL"
    reader = runs.snapshot().stream(query, rows=3)
    batches = list(reader)
    assert len(batches) > 1
    assert pl.from_arrow(batches).rows() == runs.sql(query).rows()
    assert runs.stream("SELECT $n AS n", {"n": 7}).read_all().to_pylist() == [{"n": 7}]


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize("create", [False, True])
def test_a_lake_that_has_lost_a_table_is_refused(tmp_path: Path, create: bool) -> None:
    """Without its retractions, say, what was retracted would be back. Writers do not make it anew either."""
    lk = full_lake(tmp_path / "lake")
    for name in ("episodes", "steps", "retractions") if create else TABLES:
        folder = Path(lk.uri) / name
        folder.rename(tmp_path / name)
        expected = NotALakeError if name == "episodes" and not create else LakeAccessError
        with pytest.raises(expected, match="`episodes`" if name == "episodes" else f"table `{name}` of .* is missing"):
            lake.open(lk.uri, create=create)
        assert not folder.exists()
        (tmp_path / name).rename(folder)
    assert_same(contents(lake.open(lk.uri).snapshot()), contents(lk.snapshot()))


def test_a_table_without_its_log_is_lost_and_one_that_was_never_written_is_not(tmp_path: Path) -> None:
    lk = empty_lake(tmp_path / "lake")
    lk.append([episode()], run_id="run")
    assert lake.open(lk.uri).scan("scores").collect().is_empty()
    shutil.rmtree(Path(lk.uri) / "steps" / "_delta_log")
    with pytest.raises(LakeAccessError, match=r"table `steps` of .* is missing"):
        lake.open(lk.uri)


@pytest.mark.parametrize("name", ["jobs", "episodes"])
def test_a_missing_file_is_an_error_that_says_who_can_tell_more(tmp_path: Path, name: str) -> None:
    lk = full_lake(tmp_path / "lake")
    for path in (Path(lk.uri) / name).glob("*.parquet"):
        path.unlink()
    again = lake.open(lk.uri)
    job = again.job(kind="collect", run_id="run")
    act = {"jobs": lambda: again.scan("advantages"), "episodes": lambda: job.record([episode("new")])}[name]
    with pytest.raises(LakeAccessError, match=r"cannot be read.*trajlake doctor"):
        act()


# ---------------------------------------------------------------- fingerprints


def fingerprint(snapshot: Snapshot, **inputs: Any) -> int:
    return snapshot.fingerprint(snapshot.scan("episodes").select("episode_id", "write_id").collect(), **inputs)


def test_a_fingerprint_survives_compaction_and_reopening(tmp_path: Path) -> None:
    lk = full_lake(tmp_path / "lake")
    before = fingerprint(lk.snapshot(), source="a")
    DeltaTable(f"{lk.uri}/episodes").optimize.compact()
    assert fingerprint(lake.open(lk.uri).snapshot(), source="a") == before


def test_a_fingerprint_moves_with_its_episodes_and_its_inputs(tmp_path: Path) -> None:
    lk = empty_lake(tmp_path / "lake")
    fingerprints = {fingerprint(lk.snapshot()), fingerprint(lk.snapshot(), a="x"), fingerprint(lk.snapshot(), a="y")}
    fingerprints |= {
        fingerprint(lk.snapshot(), b="x"),
        fingerprint(lk.snapshot(), a=None),
        fingerprint(lk.snapshot(), a=0),
    }
    with lk.job(kind="collect", run_id="run") as job:
        job.record([episode()])
    fingerprints.add(fingerprint(lk.snapshot()))
    assert len(fingerprints) == 7


@given(rows=st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1)), max_size=8), data=st.data())
def test_a_fingerprint_is_of_a_set(rows: list[tuple[int, int]], data: st.DataObject, lk: Lake) -> None:
    schema = {"episode_id": pl.Int64, "write_id": pl.Int64}
    snapshot = lk.snapshot()
    shuffled = data.draw(st.permutations(rows + rows[:3]))
    first, two = (pl.DataFrame(part, schema=schema, orient="row") for part in (rows, shuffled))
    assert snapshot.fingerprint(first) == snapshot.fingerprint(two)
    swapped = first.select(pl.col("write_id").alias("episode_id"), pl.col("episode_id").alias("write_id"))
    if set(swapped.iter_rows()) != set(rows):
        assert snapshot.fingerprint(swapped) != snapshot.fingerprint(first)


def test_contents_of_a_pinned_snapshot_do_not_need_its_writer(tmp_path: Path) -> None:
    lk = full_lake(tmp_path / "lake")
    expected = contents(lk.snapshot())
    moved = shutil.copytree(lk.uri, tmp_path / "moved")
    assert_same(contents(lake.open(moved).at(lk.snapshot().versions)), expected)


def test_a_snapshot_travels_by_address_and_versions(tmp_path: Path) -> None:
    """To worker processes: of one lake, and of several that are read as one."""
    first, second = (empty_lake(tmp_path / name) for name in ("first", "second"))
    first.append([episode()], run_id="a")
    second.append([episode(), episode(index=1)], run_id="b")
    joined = lake.open([first.uri, second.uri])
    sent = [pickle.dumps(lk.snapshot()) for lk in (first, joined)]
    first.append([episode(index=2)], run_id="a")
    counts = [pickle.loads(content).sql("SELECT count(*) FROM episodes").item() for content in sent]
    assert counts == [1, 3]
    again = [pickle.loads(sent[0]) for _ in range(2)]
    assert again[0] is again[1], "a process opens it once for all its parts"
