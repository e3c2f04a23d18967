"""The doctor: every check finds what it is there for, says where, and leaves a whole lake in peace."""

import json
import os
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

import lake
from lake import EpisodeRecord, Lake, StepRecord, ids
from lake.care import doctor
from lake.care.doctor import diagnose, examine
from lake.care.maintenance import FEW_FILES
from lake.errors import LakeAccessError, NotALakeError
from lake.records import identify
from lake.tables import TABLES
from lake.write.ingest import ingest
from testkit.episodes import episode
from testkit.examples import mostly_slow


@pytest.fixture(scope="module")
def made_lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two episodes of two steps; copied before it is harmed."""
    lk = lake.open(tmp_path_factory.mktemp("doctor") / "lake", create=True)
    lk.append([episode("a"), episode("b", tokens=True)], run_id="run")
    return Path(lk.uri)


@pytest.fixture
def lk(made_lake: Path, tmp_path: Path) -> Lake:
    return lake.open(shutil.copytree(made_lake, tmp_path / "lake"))


def write(lk: Lake, name: str, frame: pl.DataFrame) -> None:
    """As a program that knows nothing of our rules."""
    data = frame.to_arrow(compat_level=pl.CompatLevel.oldest()).cast(TABLES[name].arrow())
    write_deltalake(f"{lk.uri}/{name}", data, mode="append")


def wrong(lk: Lake, verdict: str = "wrong") -> dict[str, str]:
    """What it finds, by check."""
    rows = examine(lake.open(lk.uri)).filter(pl.col("verdict") == verdict)
    return dict(rows.select("check", "detail").iter_rows())


def detail(lk: Lake, check: str) -> str:
    """What it finds wrong by the check whose name holds a text."""
    (text,) = (text for name, text in wrong(lk).items() if check in name)
    return text


def test_a_whole_lake_is_fine(lk: Lake) -> None:
    findings = examine(lk)
    assert findings.columns == ["check", "verdict", "detail"]
    assert set(findings["verdict"]) == {"fine"}
    assert findings.equals(diagnose(lk.uri))
    assert findings["check"].is_unique().all()
    space = dict(findings.select("check", "detail").iter_rows())["disk use"]
    assert "episodes 0.0 MB in 1 file" in space


def test_an_episode_without_some_of_its_steps(lk: Lake) -> None:
    row = lk.scan("episodes").head(1).collect()
    other_row = row.with_columns(episode_id=pl.lit(5), task_id=pl.lit("c"), group_id=pl.lit(6))
    write(lk, "episodes", other_row)
    assert wrong(lk) == {"steps have no gaps": f"{ids.to_text(5)} has 0 of 2 steps"}


def test_steps_without_an_episode(lk: Lake) -> None:
    write(lk, "steps", lk.scan("steps").head(1).collect().with_columns(episode_id=pl.lit(5)))
    assert len(wrong(lk)) == 1
    details = detail(lk, "step has an episode")
    assert details.startswith(ids.to_text(5))
    assert "but no episode" in details


def test_two_attempts_that_both_count(lk: Lake) -> None:
    row = lk.scan("episodes").filter(task_id="a").collect()
    steps = lk.scan("steps").filter(episode_id=row["episode_id"][0]).collect()
    write(lk, "episodes", row.with_columns(episode_id=pl.lit(5), attempt=pl.lit(1, pl.Int32)))
    write(lk, "steps", steps.with_columns(episode_id=pl.lit(5)))
    (detail,) = wrong(lk).values()
    assert detail.startswith("2 attempts of rollout 0 of group ")
    assert detail.endswith("retract all but one")


def test_what_todays_rules_would_read_otherwise_is_named_with_the_commands_that_read_it_again(
    lk: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def walk(*actions: str, file: str, **fields: Any) -> EpisodeRecord:
        record = episode(
            fields.pop("task", "s"), fields.pop("index", 0), source_uri=file, **{"source_format": "atif"} | fields
        )
        record.steps = [StepRecord(state="", action=action) for action in actions]
        return record

    check = "episodes are as today's rules read them"
    siblings = [walk("a", file="0.json"), walk("b", file="1.json", attempt=1), walk("b", "c", file="2.json", attempt=2)]
    lk.append(siblings, run_id="siblings")
    truths = [walk("a", file="1.jsonl", index=n, source_format="verl", ground_truth=n) for n in range(2)]
    for record in truths:
        record.task_id = "prompt-0"
    lk.append(truths, run_id="mixed")
    fields = {"source_format": "verl", "file": "2.jsonl"}
    failed = walk("a", status="failed", error="gone", env_return=0.0, **fields)
    lk.append(
        [failed, walk("b", index=1, extra={"loss_mask": [0]}, **fields), walk("c", index=2, **fields)], run_id="rules"
    )
    cleared = walk("a", "b", file="s.jsonl", source_format="claude_code")
    cleared.steps[1].state = "<command-name>/clear</command-name>"
    lk.append([cleared], run_id="cleared")
    copies = [walk("a", "b", file=f"{name}.jsonl", source_format="claude_code", task=name) for name in ("s", "t")]
    for record in copies:
        for step in record.steps:
            step.extra, step.started_at = {"message_id": f"m-{step.action}"}, datetime(2026, 1, 2, tzinfo=UTC)
    lk.append(copies, run_id="copies")
    names = {record.steps[0].action: identify(record, "siblings").episode_id for record in siblings[:2]}
    detail = wrong(lk, "note")[check]
    by_run = {run: detail.partition(f" of run {run}, ")[2].partition(" of run ")[0] for run in ("siblings", "mixed")}
    assert ids.to_text(names["a"]) in by_run["siblings"]
    assert ids.to_text(names["b"]) not in by_run["siblings"], "another reading extends it"
    assert f"`trajlake ingest 0.json 1.json 2.json --run siblings --lake {lk.uri}`" in by_run["siblings"]
    assert "retract" not in by_run["siblings"]
    assert "--where \"run_id = 'mixed'\"" in by_run["mixed"]
    assert "--run mixed-again" in by_run["mixed"]
    assert "2 episodes of run rules" in detail
    assert "1 episode of run cleared" in detail
    assert "1 episode of run copies" in detail, "one of both owns the responses"
    lk.retract([row[0] for row in lk.sql("SELECT episode_id FROM episodes WHERE run_id <> 'siblings'").iter_rows()])
    sibling = walk("a", file="0.json", run_id="siblings", index=7)
    lk.append([sibling])
    assert check not in wrong(lk, "note"), "it was read again"
    agent = {"name": "a", "version": "1"}
    steps = [{"step_id": 1, "source": "agent", "message": "a"}]
    (tmp_path / "f.json").write_text(
        json.dumps({"schema_version": "ATIF-v1.6", "session_id": "s", "agent": agent, "steps": steps})
    )
    monkeypatch.chdir(tmp_path)
    ingest(lk, "f.json", run_id="source")
    assert check not in wrong(lk, "note")
    lk.append([walk("a", file="f.json", run_id="source", index=1)])
    assert "1 episode of run source" in wrong(lk, "note")[check]


def test_a_job_that_ended_twice(lk: Lake) -> None:
    write(lk, "jobs", lk.scan("jobs").filter(event="succeeded").collect())
    (detail,) = wrong(lk).values()
    assert detail.endswith("has 2 succeeded rows")


@pytest.mark.parametrize("name", ["episodes", "steps", "tokens"])
def test_rows_of_one_key(lk: Lake, name: str) -> None:
    write(lk, name, lk.scan(name).head(1).collect())
    assert wrong(lk)[f"keys of {name} are unique"] == "2 rows of one key"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"status": pl.lit("fine")}, "column `status`, row episode_id=0000000000005: has an unknown value ('fine')"),
        ({"env_return": pl.lit(float("nan"))}, "column `env_return`, row episode_id=0000000000005: is not finite"),
    ],
    ids=["vocabulary", "number"],
)
def test_a_row_that_breaks_its_contract(lk: Lake, change: dict[str, Any], says: str) -> None:
    row = lk.scan("episodes").head(1).collect().with_columns(episode_id=pl.lit(5), **change)
    write(lk, "episodes", row)
    assert says in detail(lk, "keeps its contract")


def test_a_file_with_other_rows_than_the_log_says(lk: Lake) -> None:
    """In a file of another tool: ours bear a digest."""
    row = lk.scan("steps").head(1).collect()
    before = set((Path(lk.uri) / "steps").glob("*.parquet"))
    write(lk, "steps", row)
    (path,) = set((Path(lk.uri) / "steps").glob("*.parquet")) - before
    pl.concat([pl.read_parquet(path)] * 2).write_parquet(path)
    text = detail(lk, "there and readable")
    assert f"{path.name} of steps" in text
    assert "has 2 rows" in text
    assert "log says 1" in text


def test_damage_is_counted_and_the_first_five_are_named(lk: Lake) -> None:
    for number in range(6):
        lk.append([episode(f"more {number}")], run_id="run")
    for path in (Path(lk.uri) / "steps").glob("*.parquet"):
        path.unlink()
    text = detail(lk, "there and readable")
    assert text.count(" of steps: ") == 5
    assert "restore the files" in text


def test_unfinished_jobs_are_noted(lk: Lake) -> None:
    for kind in ("train", "train", "credit"):
        lk.job(kind=kind).__enter__()
    assert wrong(lk, "note") == {"unfinished jobs": "1 credit, 2 train: running, or killed"}


def test_many_small_files_bring_advice(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "FEW_FILES", 3)
    for number in range(3):
        lk.append([episode(f"more {number}")], run_id="run")
    detail = wrong(lk, "note")["disk use"]
    assert detail.endswith("; `trajlake compact episodes steps jobs` would speed them up")
    assert FEW_FILES == 100


def test_a_rival_package_is_named(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_installation_faults", lambda: ["`lake` comes from lake-1.0"])
    assert len(wrong(lk)) == 1
    assert detail(lk, "four packages") == "`lake` comes from lake-1.0"


def test_a_damaged_pin_is_wrong(lk: Lake) -> None:
    lk.name_snapshot("x")
    (Path(lk.uri) / "_trajlake" / "snapshots" / "x.json").write_text("{")
    assert "x.json is damaged" in wrong(lk)["named snapshots are readable"]


def test_files_of_older_versions_are_counted(lk: Lake) -> None:
    for number in range(4):
        lk.append([episode("c", number, extra={"x": os.urandom(30_000).hex()})], run_id="run")
    lk.compact("episodes")
    (idle,) = examine(lk).filter(pl.col("check") == "logs and files of older versions")["detail"]
    assert float(idle.removesuffix(" MB")) > 0.1


def test_a_lake_that_cannot_be_opened_is_told_table_by_table(lk: Lake) -> None:
    for name in ("episodes", "jobs"):
        newest = max((Path(lk.uri) / name / "_delta_log").glob("*.json"))
        newest.write_text('{"add"')
    shutil.rmtree(Path(lk.uri) / "tokens")
    findings = diagnose(lk.uri)
    (detail,) = findings.filter(pl.col("verdict") == "wrong")["detail"]
    assert "the table episodes is damaged: " in detail
    assert "the table jobs is damaged: " in detail
    assert "the table tokens is missing" in detail
    assert "steps" not in detail


def test_what_is_no_lake_at_all_stays_an_error(lk: Lake, tmp_path: Path) -> None:
    with pytest.raises(NotALakeError):
        diagnose(str(tmp_path / "nothing"))
    for name in TABLES:
        for log in (Path(lk.uri) / name / "_delta_log").glob("*.json"):
            log.write_text("{")
    with pytest.raises(LakeAccessError):
        diagnose(lk.uri)


@pytest.mark.parametrize("share", [0, 0.99], ids=["magic bytes", "footer"])
@pytest.mark.parametrize("name", mostly_slow(["steps", "tokens", "episodes"], "steps"))
def test_a_flipped_bit_is_found_wherever_it_is(lk: Lake, name: str, share: float) -> None:
    (entry,) = lk.snapshot().entries(name)
    path = Path(entry.path)
    data = bytearray(path.read_bytes())
    data[int(share * len(data))] ^= 0x10
    path.write_bytes(data)
    assert "what was written" in detail(lk, "there and readable")


@pytest.mark.parametrize("name", ["episodes", "steps", "tokens", "jobs"])
def test_a_flipped_bit_is_found_in_every_column_chunk(lk: Lake, name: str) -> None:
    """Readers would take most of them for other values: text and numbers have nothing that could tell."""
    snapshot = lk.snapshot()
    entry = snapshot.entries(name)[0]
    path = Path(entry.path)
    content = path.read_bytes()
    group = pq.ParquetFile(path).metadata.row_group(0)
    assert group.num_columns >= len(TABLES[name].columns)
    for number in range(group.num_columns):
        chunk = group.column(number)
        start = min(filter(None, (chunk.dictionary_page_offset, chunk.data_page_offset)))
        for position in (start, start + chunk.total_compressed_size // 2, start + chunk.total_compressed_size - 1):
            data = bytearray(content)
            data[position] ^= 1 << number % 8
            path.write_bytes(data)
            assert "what was written" in str(doctor._check_file(snapshot, name, entry)), chunk.path_in_schema
    path.write_bytes(content)
    assert doctor._check_file(snapshot, name, entry) is None


@pytest.mark.parametrize(
    ("state", "name"),
    [
        ("empty", "steps"),
        ("missing", "episodes"),
        ("missing", "retractions"),
        pytest.param("empty", "episodes", marks=pytest.mark.slow),
        pytest.param("empty", "jobs", marks=pytest.mark.slow),
        pytest.param("empty", "retractions", marks=pytest.mark.slow),
        pytest.param("missing", "steps", marks=pytest.mark.slow),
        pytest.param("missing", "jobs", marks=pytest.mark.slow),
    ],
)
def test_a_log_that_lacks_a_commit(lk: Lake, name: str, state: str) -> None:
    """What a power cut may leave."""
    (episode_id, _) = lk.scan("episodes").collect()["episode_id"]
    lk.retract([episode_id])
    lk.append([episode("c")], run_id="run")
    entry = Path(lk.uri) / name / "_delta_log" / f"{1:020d}.json"
    entry.unlink()
    if state == "empty":
        entry.touch()
    details = " ".join(diagnose(lk.uri).filter(pl.col("verdict") == "wrong")["detail"])
    says = (f"commit 1 of `{name}` is {state}", f"table {name} is damaged", "jobs retracted 1 episode")
    assert any(text in details for text in says)


def test_a_newest_commit_that_is_gone_is_missed(lk: Lake) -> None:
    """Nothing in the log tells; what jobs say they recorded does."""
    lk.append([episode("c")], run_id="run")
    log = Path(lk.uri) / "episodes" / "_delta_log"
    max(log.glob("*.json")).unlink()
    text = detail(lk, "jobs recorded")
    assert "recorded 3 episodes" in text
    assert "lake knows 2" in text
