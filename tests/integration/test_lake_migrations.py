"""Lakes of older formats: read as they are, migrated by the first write, never half way for a reader.

The lake in tests/golden/lakes/format_1 was written by a package of format 1; rows.json holds what that one showed.
"""

import json
import shutil
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from deltalake import DeltaTable

import lake
from lake import EpisodeRecord, Lake, StepRecord
from lake.cli import main
from lake.errors import LakeAccessError, LakeVersionError, NotALakeError
from lake.storage.store import FORMAT_KEY, migrate
from lake.tables import FORMAT_VERSION, TABLES
from testkit.episodes import assert_whole, episode
from testkit.examples import mostly_slow
from testkit.processes import Worker, at_the_gate

FORMAT_1 = Path(__file__).resolve().parents[1] / "golden" / "lakes" / "format_1"
NEW_TABLES = {
    "spans",
    "blobs",
    "retractions",
    "groupings",
    "selections",
    "ratios",
    "annotations",
    "credit_groups",
    "responses",
}
NEW_COLUMNS = {
    "episodes": {"tokenizer", "chat_template", "blob_ids", "cost"},
    "steps": {"prompt_tokens", "completion_tokens", "cost"},
    "rejects": {"episode_id"},
    "jobs": {"sequence"},
    "batches": {"loss_weight", "token_weights"},
}


class KilledError(Exception):
    """Stands for the death of a process."""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A copy of the old lake."""
    return Path(shutil.copytree(FORMAT_1 / "lake", tmp_path / "lake"))


def assert_shows_what_it_showed(snapshot: lake.Snapshot) -> None:
    """Exactly the rows of rows.json; columns that are younger are NULL, tables that are younger are empty."""
    rows = json.loads((FORMAT_1 / "rows.json").read_text("utf-8"))
    assert set(rows) == set(TABLES) - NEW_TABLES
    for name, table in TABLES.items():
        frame = snapshot.scan(name).collect()
        assert frame.schema == table.polars()
        assert same(snapshot.sql(f"SELECT * FROM {name}"), frame)
        new = NEW_COLUMNS.get(name, set())
        assert all(frame[column].null_count() == frame.height for column in new)
        assert spelled(frame.drop(new)) == sorted(map(canonical, rows.get(name, []))), name


def same(first: pl.DataFrame, second: pl.DataFrame) -> bool:
    return spelled(first) == spelled(second)


def spelled(frame: pl.DataFrame) -> list[str]:
    return sorted(canonical(row) for row in frame.iter_rows(named=True))


def canonical(row: dict[str, Any]) -> str:
    def plain(value: Any) -> str:
        assert isinstance(value, datetime), value
        return value.isoformat()

    return json.dumps(row, sort_keys=True, default=plain)


def formats(folder: Path) -> dict[str, int]:
    """Table -> the format version it names; tables that are not there are left out."""
    tables = [name for name in TABLES if (folder / name).exists()]
    return {name: int(DeltaTable(folder / name).metadata().configuration[FORMAT_KEY]) for name in tables}


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_lake_of_format_1_shows_what_it_showed_and_stays_as_it_is(old: Path) -> None:
    before = tree(old)
    assert_shows_what_it_showed(lake.open(old).snapshot())
    assert lake.open(old).sql("FROM job_runs").height == 9
    assert lake.open(old).snapshot().retracted.is_empty()
    assert tree(old) == before, "reading writes nothing"
    assert set(formats(old).values()) == {1}


def test_the_first_write_migrates_and_nothing_that_was_there_changes(old: Path) -> None:
    lk = lake.open(old)
    before = lk.snapshot()
    assert lk.append([episode("new", tokens=True)], run_id="new").new == 1
    assert formats(old) == dict.fromkeys(set(TABLES) - NEW_TABLES, FORMAT_VERSION)
    assert_shows_what_it_showed(before)
    assert_shows_what_it_showed(lake.open(old).at(before.versions))
    now = lake.open(old).snapshot()
    assert assert_whole(now) == 7
    assert lk.append([EpisodeRecord(task_id="t", steps=[StepRecord(state=None, action="a")])], run_id="new").new == 1
    lk.retract(lk.scan("episodes").collect()["episode_id"].head(1))
    assert set(formats(old)) - (set(TABLES) - NEW_TABLES) == {"retractions"}, "made by the first write to it"
    for name in formats(old):
        schema = DeltaTable(old / name).schema()
        assert [(f.name, f.nullable) for f in sorted(schema.fields, key=lambda f: f.name)] == sorted(
            (c.name, not c.required) for c in TABLES[name].columns
        ), name
        assert {field.name for field in schema.fields} == set(TABLES[name].names), name
        configuration = DeltaTable(old / name).metadata().configuration
        assert configuration["delta.dataSkippingStatsColumns"].split(",") == list(TABLES[name].statistics)
    assert lk.append([episode("new", tokens=True)], run_id="new").present == 1


def test_what_only_the_new_format_can_do_works_on_rows_of_the_old_one(old: Path) -> None:
    lk = lake.open(old)
    named = lk.name_snapshot("as format 1 left it".replace(" ", "-"))
    first, second = lk.scan("episodes").collect()["episode_id"][:2]
    assert lk.retract([first], "a test") == 1
    for name in formats(old):
        lk.compact(name)
    assert assert_whole(lk.snapshot()) == 5
    assert_shows_what_it_showed(lk.at(named.name))
    lk.forget([second], "a test")
    assert assert_whole(lk.snapshot()) == 4


def test_a_replay_of_what_the_old_package_recorded_adds_nothing(old: Path) -> None:
    """Ids and content hashes are the same in every format."""
    records = [episode(f"task {number}", index, tokens=True) for number in range(3) for index in range(2)]
    counts = lake.open(old).append(records, run_id="run")
    assert (counts.new, counts.present, counts.rejected) == (0, 6, 0)


@pytest.mark.parametrize("commits", mostly_slow((0, 1, 5, 12, 13, 17), 5))
def test_a_migration_that_is_killed_can_be_read_and_is_finished_by_the_next_writer(
    old: Path, commits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each table is migrated in two commits at most; the process dies before one of them."""
    done = 0

    def dying(action: Callable[..., None]) -> Callable[..., None]:
        def act(*args: Any, **options: Any) -> None:
            nonlocal done
            if done == commits:
                raise KilledError
            done += 1
            action(*args, **options)

        return act

    alterer = type(DeltaTable(old / "episodes").alter)
    with monkeypatch.context() as patch:
        for method in ("add_columns", "drop_column_not_null", "set_table_properties"):
            patch.setattr(alterer, method, dying(getattr(alterer, method)))
        if commits < 17:
            with pytest.raises(KilledError):
                lake.open(old).append([episode("new")], run_id="new")
            assert_shows_what_it_showed(lake.open(old).snapshot())
        else:
            lake.open(old).append([episode("new")], run_id="new")
            assert done == 17, "ten tables, five of which have new columns and one two that may be NULL now"
    assert lake.open(old).append([episode("newer")], run_id="new").new == 1
    assert formats(old) == dict.fromkeys(set(TABLES) - NEW_TABLES, FORMAT_VERSION)
    assert assert_whole(lake.open(old).snapshot()) == 6 + 1 + (commits == 17)


def test_two_processes_that_migrate_at_once_both_write(old: Path) -> None:
    workers = [Worker("record", old, f"worker {number}", 2, 2) for number in range(2)]
    at_the_gate(*workers)
    for worker in workers:
        worker.finish()
    assert formats(old) == dict.fromkeys(set(TABLES) - NEW_TABLES, FORMAT_VERSION)
    assert assert_whole(lake.open(old).snapshot()) == 6 + 8
    for name in formats(old):
        fields = [field.name for field in DeltaTable(old / name).schema().fields]
        assert sorted(fields) == sorted(TABLES[name].names), "no column twice"


def test_migrating_again_does_nothing(tmp_path: Path) -> None:
    lake.open(tmp_path / "lake", create=True)
    table = TABLES["episodes"]
    assert not migrate(lambda: DeltaTable(tmp_path / "lake" / "episodes"), table)
    assert DeltaTable(tmp_path / "lake" / "episodes").version() == 0


def mark(folder: Path, table: str, version: str) -> None:
    DeltaTable(folder / table).alter.set_table_properties({FORMAT_KEY: version}, raise_if_not_exists=False)


@pytest.mark.parametrize("table", ["episodes", "jobs"])
def test_a_newer_format_is_refused_with_the_table_the_versions_and_what_to_do(
    tmp_path: Path, table: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "lake"
    lake.open(folder, create=True).append([episode()], run_id="run")
    mark(folder, table, "99")
    says = (
        f"table `{table}` of {folder} has format version 99; this trajlake reads up to {FORMAT_VERSION}. Install a "
        "newer trajlake: pip install --upgrade trajlake"
    )
    for create in (True, False):
        with pytest.raises(LakeVersionError) as caught:
            lake.open(folder, create=create)
        assert str(caught.value) == says
    monkeypatch.setattr("sys.argv", ["trajlake", "tables", "--lake", str(folder)])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err == f"trajlake: {says}\n"


def test_a_writer_that_meets_a_lake_migrated_under_it_stops(tmp_path: Path) -> None:
    """A newer package migrated the lake after this process had opened it and before its first write."""
    lake.open(tmp_path / "lake", create=True).append([episode()], run_id="run")
    lk: Lake = lake.open(tmp_path / "lake")
    mark(tmp_path / "lake", "steps", "99")
    with pytest.raises(LakeVersionError, match="table `steps`"):
        lk.append([episode("new")], run_id="run")
    assert assert_whole(lake.Snapshot(lk._store)) == 1


def test_a_table_that_a_newer_package_makes_under_a_reader_is_refused(tmp_path: Path) -> None:
    lk = lake.open(tmp_path / "lake", create=True)
    assert lk.scan("jobs").collect().is_empty()
    lake.open(tmp_path / "lake").append([episode()], run_id="run")
    mark(tmp_path / "lake", "jobs", "99")
    with pytest.raises(LakeVersionError, match="table `jobs`"):
        lk.snapshot()


def test_a_lake_of_format_1_that_has_lost_a_table_is_refused(old: Path) -> None:
    """It was made with all ten, and keeps no list of them before its first write."""
    shutil.rmtree(old / "batches")
    with pytest.raises(LakeAccessError, match=r"table `batches` of .* is missing"):
        lake.open(old)


@pytest.mark.parametrize("version", ["", "1.5"])
def test_a_format_that_is_no_number_is_not_a_lakes(tmp_path: Path, version: str) -> None:
    lake.open(tmp_path / "lake", create=True).append([episode()], run_id="run")
    mark(tmp_path / "lake", "jobs", version)
    with pytest.raises(NotALakeError, match=f"table `jobs` of .* has no {FORMAT_KEY}"):
        lake.open(tmp_path / "lake")
