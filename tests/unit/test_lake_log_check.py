"""Logs that are damaged, or that lead elsewhere: refused when a snapshot is opened, with table, version and file."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from deltalake import DeltaTable

import lake
from lake import Lake, ids
from lake.care.doctor import diagnose
from lake.errors import LakeAccessError
from testkit.command_line import Cli, runner
from testkit.copies import copied, empty_lake
from testkit.episodes import assert_whole, episode
from testkit.examples import mostly_slow
from testkit.full_lake import advantages
from testkit.wording import Wording

DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "blank": lambda _: b"\n\n",
    "cut in a line": lambda text: text[: len(text) // 2],
    "cut between lines": lambda text: text.splitlines(keepends=True)[0],
    "zeros": lambda text: b"\0" * len(text),
    "zeros at its end": lambda text: text[:-200] + b"\0" * 200,
    "not UTF-8": lambda _: b"\xff\xfe",
    "no object": lambda _: b"12\n",
    "no action": lambda _: b"{}\n",
}
"""What was committed -> what is left of its entry in the log."""
OUTSIDE = {
    "up": "../../victim/{file}",
    "up, encoded": "%2e%2e/%2e%2e/victim/{file}",
    "up, slashes encoded": "..%2F..%2Fvictim/{file}",
    "up, encoded twice": "%252e%252e/%252e%252e/victim/{file}",
    "up from a folder": "a/../../../victim/{file}",
    "absolute": "{root}/victim/{file}",
    "file URI": "file://{root}/victim/{file}",
    "bucket": "s3://bucket/{file}",
    "pattern": "*.parquet",
    "pattern, encoded": "%2A.parquet",
    "same file twice": "./{file}",
    "folder": "..",
}


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    return runner(monkeypatch, capsys)


@pytest.fixture
def lk(tmp_path: Path) -> Lake:
    """Two commits of episodes."""

    def make(template: Path) -> None:
        lk = empty_lake(template)
        for task in "ab":
            lk.append([episode(task, tokens=True)], run_id="run")

    return copied("two commits", make, tmp_path / "lake")


def entry(lk: Lake, name: str, version: int = 2) -> Path:
    return Path(lk.uri) / name / "_delta_log" / f"{version:020d}.json"


def renamed(path: Path, to: str) -> None:
    """Let a commit name its file otherwise."""
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    for line in lines:
        if "add" in line:
            line["add"]["path"] = to
    path.write_text("\n".join(map(json.dumps, lines)))


# ---------------------------------------------------------------- damaged entries


DAMAGED = [("steps", damage) for damage in DAMAGE] + [("episodes", "cut in a line"), ("jobs", "zeros")]


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *DAMAGED,
        *(
            pytest.param(name, damage, marks=pytest.mark.slow)
            for name in ("episodes", "jobs")
            for damage in DAMAGE
            if (name, damage) not in DAMAGED
        ),
    ],
)
def test_a_damaged_newest_commit_is_refused_with_table_version_and_file(lk: Lake, name: str, damage: str) -> None:
    path = max(entry(lk, name).parent.glob("*.json"))
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    with pytest.raises(LakeAccessError) as error:
        lake.open(lk.uri).snapshot()
    assert f"table `{name}` of {lk.uri} cannot be read: commit {int(path.stem)} of `{name}` is " in str(error.value)
    assert f"({path})" in str(error.value)
    assert "`trajlake doctor`" in str(error.value)


def test_a_commit_that_arrives_damaged_is_refused_by_readers_that_are_open(lk: Lake) -> None:
    reader, path = lake.open(lk.uri), entry(lk, "steps", 3)
    assert assert_whole(reader.snapshot()) == 2
    lk.append([episode("c")], run_id="run")
    path.write_bytes(b"")
    with pytest.raises(LakeAccessError, match="commit 3 of `steps` is empty"):
        reader.snapshot()


def test_a_commit_in_the_middle_and_one_that_is_gone_are_refused_too(lk: Lake) -> None:
    entry(lk, "steps", 1).write_bytes(b"")
    with pytest.raises(LakeAccessError, match="commit 1 of `steps` is empty"):
        lake.open(lk.uri).snapshot()
    entry(lk, "steps", 1).unlink()
    with pytest.raises(LakeAccessError, match="commit 1 of `steps` is missing"):
        lake.open(lk.uri).snapshot()


def test_versions_before_the_damage_and_commits_in_a_checkpoint_are_read(lk: Lake) -> None:
    before = lk.snapshot().versions
    lk.append([episode("c")], run_id="run")
    after = lk.snapshot().versions
    entry(lk, "steps", 3).write_bytes(b"")
    store = lk._store.__class__(lk._store.objects)
    assert assert_whole(lake.Snapshot(store, before)) == 2
    with pytest.raises(LakeAccessError, match="commit 3 of `steps` is empty"):
        lake.Snapshot(store, after)
    entry(lk, "steps", 3).unlink()
    DeltaTable(f"{lk.uri}/steps").create_checkpoint()
    entry(lk, "steps", 1).write_bytes(b"")
    assert assert_whole(lake.Snapshot(lk._store.__class__(lk._store.objects), before)) == 2


@pytest.mark.parametrize(
    "command",
    [("sql", "SELECT count(*) FROM steps"), ("sql", "SELECT 1", "--locked"), ("credit", "gigpo"), ("tables",)],
)
def test_every_command_refuses_in_one_line_and_the_doctor_names_every_table(
    cli: Cli, lk: Lake, command: tuple[str, ...]
) -> None:
    for name in ("steps", "tokens"):
        entry(lk, name).write_bytes(b"")
    assert "commit 2 of `" in cli(*command, "--lake", lk.uri).fault
    doctor_command = cli("doctor", "--lake", lk.uri, "--format", "json")
    assert doctor_command.code == 1
    (wrong,) = [check["detail"] for check in json.loads(doctor_command.out) if check["verdict"] == "wrong"]
    assert "commit 2 of `steps` is empty" in wrong
    assert "commit 2 of `tokens` is empty" in wrong


# ---------------------------------------------------------------- commits that left no trace


def lost(lk: Lake, name: str) -> Lake:
    """The lake without the newest commit of a table, opened again."""
    max((Path(lk.uri) / name / "_delta_log").glob("*.json")).unlink()
    again: Lake = lake.open(lk.uri)
    return again


@pytest.mark.parametrize("compacted", [False, True])
def test_steps_that_are_accepted_and_gone_are_told_by_every_reader(cli: Cli, lk: Lake, compacted: bool) -> None:
    lk.append([episode("c")], run_id="run")
    damage = lost(lk, "steps")
    if compacted:
        for name in ("steps", "episodes"):
            damage.compact(name)
    damage.append([episode("d")], run_id="run")  # which takes the lost commit's number
    says = "lacks 2 steps of 1 episode: "
    for read in (lambda: damage.scan("steps"), lambda: damage.sql("SELECT count(*) FROM trajectory")):
        with pytest.raises(LakeAccessError, match=f"table `steps` of .* at version . {says}.*run run, task c"):
            read()
    for command in (("sql", "FROM steps"), ("sql", "FROM steps", "--locked"), ("credit", "gigpo")):
        assert says in cli(*command, "--lake", lk.uri).fault
    assert says in " ".join(diagnose(lk.uri)["detail"])
    assert damage.sql("SELECT count(*) FROM episodes").item() == 4
    damage.retract(damage.scan("episodes").filter(task_id="c").collect()["episode_id"].to_list())
    assert assert_whole(lake.open(lk.uri).snapshot()) == 3


def test_a_whole_lake_opens_no_file_to_find_that_out(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lake.Snapshot, "_look", lambda *_: pytest.fail("a file was opened"))
    assert assert_whole(lk.snapshot()) == 2


def test_rows_of_a_job_that_are_gone_are_warned_of_until_it_is_run_again(
    lk: Lake, caplog: pytest.LogCaptureFixture, wording: Wording
) -> None:
    def judge(target: Lake) -> int:
        with target.job(kind="judge", fingerprint=1) as job:
            job.write("advantages", advantages(target.scan("steps").collect(), 1.0))
        return job.job_id

    first = judge(lk)
    series = int(lk.scan("jobs").filter(kind="judge").collect()["series_id"][0])
    assert lk.find_job("judge", series, 1) == first
    lk.scan("advantages")
    assert caplog.messages == []
    damage = lost(lk, "advantages")
    damage.scan("advantages")
    (warned,) = caplog.messages
    assert f"the judge job {ids.to_text(first)} " in wording(warned, JOB=ids.to_text(first))
    assert "1 of its writes" in warned
    assert f"judge job {ids.to_text(first)} has lost 1 of its writes" in " ".join(diagnose(lk.uri)["detail"])
    assert damage.find_job("judge", series, 1) is None, "its result is not there to be reused"
    second = judge(damage)
    caplog.clear()
    again = lake.open(lk.uri)
    assert again.find_job("judge", series, 1) == second
    again.scan("advantages")
    assert caplog.messages == []


def test_what_was_forgotten_is_not_lost(lk: Lake, caplog: pytest.LogCaptureFixture) -> None:
    steps = lk.scan("steps").collect()
    with lk.job(kind="judge") as job:
        job.write("advantages", advantages(steps[:2], 1.0))
    lk.forget(steps["episode_id"][:2].unique().to_list())
    for again in (lk, lake.open(lk.uri)):
        again.scan("advantages")
        assert assert_whole(again.snapshot()) == 1
    assert caplog.messages == []


# ---------------------------------------------------------------- names that lead elsewhere


def lead_elsewhere(lk: Lake, location: str) -> None:
    """Let the newest commit of steps name a file outside of the table."""
    path = entry(lk, "steps")
    file = next(line["add"]["path"] for line in map(json.loads, path.read_bytes().splitlines()) if "add" in line)
    root = Path(lk.uri).parent
    shutil.copytree(Path(lk.uri) / "steps", root / "victim")
    renamed(path, OUTSIDE[location].format(file=file, root=root))


@pytest.mark.parametrize("location", OUTSIDE)
def test_a_file_outside_the_table_is_refused(lk: Lake, location: str) -> None:
    lead_elsewhere(lk, location)
    with pytest.raises(LakeAccessError, match=r"table `steps` of .* at version 2 names '.*'"):
        lake.open(lk.uri).snapshot()


@pytest.mark.parametrize("location", mostly_slow(OUTSIDE, "up, encoded", "absolute"))
def test_a_file_outside_the_table_is_refused_and_nothing_of_it_is_told(cli: Cli, lk: Lake, location: str) -> None:
    lead_elsewhere(lk, location)
    for command in (("sql", "SELECT state FROM steps", "--locked"), ("credit", "gigpo"), ("tables",)):
        fault = cli(*command, "--lake", lk.uri).fault
        assert "at version 2 names" in fault
        assert "PAR1" not in fault
        assert "sees" not in fault
    assert "at version 2 names" in " ".join(diagnose(lk.uri)["detail"])


def test_links_out_of_the_table_are_refused(lk: Lake, tmp_path: Path) -> None:
    file = Path(lk.snapshot().entries("steps")[0].path)
    moved = shutil.move(file, tmp_path / file.name)
    file.symlink_to(moved)
    with pytest.raises(LakeAccessError, match=rf"names '{file.name}'.* not a file"):
        lake.open(lk.uri).snapshot()
    file.unlink()
    shutil.move(moved, file)
    assert assert_whole(lake.open(lk.uri).snapshot()) == 2
    shutil.move(file.parent, tmp_path / "elsewhere")
    file.parent.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LakeAccessError, match=r"table `steps` of .* not a file"):
        lake.open(lk.uri).snapshot()


def test_a_lake_that_is_reached_through_a_link_is_read(lk: Lake, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(lk.uri)
    assert assert_whole(lake.open(tmp_path / "link").snapshot()) == 2


def test_a_commit_of_a_writer_that_is_read_by_itself_is_refused_too(lk: Lake) -> None:
    """What a running writer reads of others' commits goes by single entries, not by a listing."""
    assert lk.append([episode("a", tokens=True)], run_id="run").present == 1
    lake.open(lk.uri).append([episode("c")], run_id="run")
    renamed(entry(lk, "episodes", 3), "../victim.parquet")
    with pytest.raises(LakeAccessError, match=r"table `episodes` of .* at version 3 names '\.\./victim.parquet'"):
        lk.append([episode("d")], run_id="run")


def test_deletion_vectors_are_refused(lk: Lake) -> None:
    """No reader here applies them: deleted rows would be shown."""
    DeltaTable(f"{lk.uri}/steps").alter.set_table_properties({"delta.enableDeletionVectors": "true"})
    with pytest.raises(LakeAccessError, match=r"table `steps` of .* version 3 .*deletion vectors"):
        lake.open(lk.uri).snapshot()


def test_mapped_columns_are_refused(lk: Lake) -> None:
    """Files would be read under names that the table does not have."""
    lines = map(json.loads, entry(lk, "steps", 0).read_bytes().splitlines())
    settings = next(line for line in lines if "metaData" in line)
    settings["metaData"]["configuration"]["delta.columnMapping.mode"] = "name"
    entry(lk, "steps", 3).write_text(json.dumps(settings))
    with pytest.raises(LakeAccessError):
        lake.open(lk.uri).snapshot()
