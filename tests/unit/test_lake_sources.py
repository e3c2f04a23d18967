"""What a person names, as files: folders, globs, `-`, pipes, links; each file once, called the same on every machine.

Buckets are in tests/integration/test_lake_ingest_s3.py.
"""

import gzip
import io
import os
import threading
from pathlib import Path, PurePath

import pytest

from lake.errors import FormatError, UsageError
from lake.formats.registry import FORMATS
from lake.write.ingest import ingest
from lake.write.sources import COMPARED, Argument, File, locate_arguments, name_run, plan_ingest
from testkit.copies import empty_lake
from testkit.episodes import episode, line, write_lines


def locate(*names: str | Path, stdin: bytes = b"") -> list[Argument]:
    with locate_arguments([str(name) for name in names], io.BytesIO(stdin)) as arguments:
        return arguments


def called(*names: str | Path) -> list[list[str]]:
    """The names of the files of each argument."""
    return [[file.name for file in argument.files] for argument in locate(*names)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files in folders of two levels, and things that are not files."""
    root = tmp_path / "logs"
    (root / "b" / "deep").mkdir(parents=True)
    for name in ("z.jsonl", "b/a.jsonl", "b/deep/with space.jsonl", "a.jsonl"):
        write_lines(root / name, [episode(name)])
    return root


# ---------------------------------------------------------------- folders


def test_files_of_a_folder_are_called_by_their_path_below_it_in_the_order_of_names(folder: Path) -> None:
    (argument,) = locate(folder)
    assert [file.name for file in argument.files] == ["a.jsonl", "z.jsonl", "b/a.jsonl", "b/deep/with space.jsonl"]
    assert [file.location.parent.name for file in argument.files] == ["logs", "logs", "b", "deep"]
    assert argument.source == "logs"


def test_a_folder_is_called_the_same_however_it_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for written in (".", "./", f"{folder}/", "../logs", str(folder / "b" / "..")):
        (argument,) = locate(written)
        assert argument.source == "logs"
        assert argument.files[0].location.parts[-2:] == ("logs", "a.jsonl")
        assert argument.files[0].name == "a.jsonl"


def test_names_that_are_not_utf8_and_names_with_line_ends_are_files_like_others(tmp_path: Path) -> None:
    folder = tmp_path / "odd"
    folder.mkdir()
    for name in (b"new\nline.jsonl", b"\xff\xfe.jsonl"):
        Path(os.fsdecode(os.fsencode(folder) + b"/" + name)).write_bytes(line(episode("t")))
    assert called(folder) == [["new\nline.jsonl", "\\udcff\\udcfe.jsonl"]]
    report = ingest(empty_lake(tmp_path / "lake"), folder)
    assert (report.new, report.rejected) == (2, 0)
    assert report.runs == {"new\nline", "\\udcff\\udcfe"}


def test_a_lake_inside_the_folder_is_not_read(folder: Path, tmp_path: Path) -> None:
    lk = empty_lake(folder / "lake")
    lk.append([episode("mine")], run_id="run")
    lk.name_snapshot("named")
    before = [["a.jsonl", "z.jsonl", "b/a.jsonl", "b/deep/with space.jsonl"]]
    assert called(folder) == before
    assert called(f"{folder}/**") == [sorted(before[0])]
    assert locate(folder)[0].left_out == {}
    assert ingest(lk, folder).new == 4


def test_what_is_hidden_or_still_being_written_is_left_alone(folder: Path) -> None:
    for name in (".DS_Store", ".#a.jsonl", "c.jsonl.tmp", "c.jsonl.part", "c.jsonl~"):
        (folder / name).write_bytes(line(episode("t")))
    for inner in (".git", ".ipynb_checkpoints", "node_modules", "venv"):
        (folder / inner).mkdir()
        write_lines(folder / inner / "x.jsonl", [episode("t")])
    everything = [["a.jsonl", "z.jsonl", "b/a.jsonl", "b/deep/with space.jsonl"]]
    assert called(folder) == everything
    assert called(f"{folder}/*/*.jsonl", f"{folder}/*.jsonl*") == [["b/a.jsonl"], ["a.jsonl", "z.jsonl"]]
    assert called(folder / ".#a.jsonl") == [[".#a.jsonl"]], "who names it means it"


def test_what_is_no_file_is_told(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "self").symlink_to("self")
    (folder / "b" / "up").symlink_to("..")
    left_out = locate(folder)[0].left_out
    assert set(left_out) == {"dangling", "pipe", "self", "b/up"}
    assert left_out["pipe"].startswith("is not a regular")
    assert left_out["b/up"].startswith("is a link to ")
    report = plan_ingest(locate(folder)[0]).report
    assert report.skipped == left_out


def test_a_folder_that_cannot_be_listed_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who runs the tests may be root, who can list all: the refusal is a stand-in's."""
    scandir = os.scandir

    def refused(path: str) -> object:
        if Path(path).name == "b":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    (argument,) = locate(folder)
    assert [file.name for file in argument.files] == ["a.jsonl", "z.jsonl"]
    assert argument.left_out == {"b": "cannot be read: Permission denied"}


def test_folders_may_lie_as_deep_as_paths_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    below = "d/" * 1100
    path = Path("deep", below, "f.jsonl")
    for end in range(0, len(below) + 1, 200):
        Path("deep", below[:end]).mkdir(parents=True)
    write_lines(path, [episode("t")])
    try:
        assert called("deep") == called("deep/**/*.jsonl") == called("deep/**") == [[f"{below}f.jsonl"]]
    finally:
        path.unlink()
        os.removedirs(path.parent)  # what deletes old folders of tests does not go so deep


def test_a_path_that_cannot_be_looked_at_is_for_its_reader_to_tell(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 300)
    with pytest.raises(FormatError, match="x: File name too long"):
        plan_ingest(locate(path)[0])


def test_a_folder_of_nothing_is_refused_with_what_there_was(tmp_path: Path) -> None:
    folder = tmp_path / "none"
    folder.mkdir()
    with pytest.raises(FormatError, match=r"none is a folder without"):
        locate(folder)
    os.mkfifo(folder / "pipe")
    with pytest.raises(FormatError, match="pipe is not a regular"):
        locate(folder)


def test_a_link_to_a_folder_is_followed_where_it_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    assert called(tmp_path / "link")[0][0] == "a.jsonl"
    assert locate(tmp_path / "link")[0].source == "logs"


# ---------------------------------------------------------------- globs


def test_a_glob_names_files_by_their_path_below_its_fixed_part(folder: Path) -> None:
    assert called(f"{folder}/*.jsonl", f"{folder}/b/**/*.jsonl") == [
        ["a.jsonl", "z.jsonl"],
        ["a.jsonl", "deep/with space.jsonl"],
    ]
    (argument,) = locate(f"{folder}/*.jsonl")
    assert argument.source == "*.jsonl"


def test_a_glob_that_matches_folders_reads_them_and_each_file_once(folder: Path) -> None:
    (argument,) = locate(f"{folder}/**")
    assert [file.name for file in argument.files] == ["a.jsonl", "b/a.jsonl", "b/deep/with space.jsonl", "z.jsonl"]
    (argument,) = locate(f"{folder}/?")
    assert [file.name for file in argument.files] == ["b/a.jsonl", "b/deep/with space.jsonl"]


def test_a_glob_ends_where_links_lead_back(folder: Path) -> None:
    for name in ("up", "upper"):
        (folder / "b" / name).symlink_to("..")
    assert called(f"{folder}/**/*.jsonl") == [["a.jsonl", "b/a.jsonl", "b/deep/with space.jsonl", "z.jsonl"]]


def test_a_glob_without_a_match_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"no file matches '.*\*\.jsonl'"):
        locate(f"{tmp_path}/*.jsonl")


def test_a_file_whose_name_looks_like_a_glob_is_itself(tmp_path: Path) -> None:
    write_lines(tmp_path / "a[1]*.jsonl", [episode("t")])
    write_lines(tmp_path / "a1.jsonl", [episode("t")])
    assert called(tmp_path / "a[1]*.jsonl") == [["a[1]*.jsonl"]]


# ---------------------------------------------------------------- each file once


def test_a_file_that_is_named_twice_is_read_once(folder: Path) -> None:
    again = folder / "b" / ".." / "a.jsonl"
    assert called(folder / "a.jsonl", again, folder, f"{folder}/*.jsonl") == [
        ["a.jsonl"],
        [],
        ["z.jsonl", "b/a.jsonl", "b/deep/with space.jsonl"],
        [],
    ]


def test_a_link_that_leads_out_of_a_folder_is_followed_on_request_alone(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "private.jsonl").write_bytes(line(episode("private")))
    (folder / "out.jsonl").symlink_to(tmp_path / "private.jsonl")
    (folder / "round.jsonl").symlink_to(folder / "b" / ".." / ".." / "private.jsonl")
    for name in (folder, folder / "*.jsonl", tmp_path / "log*"):
        (argument,) = locate(name)
        assert not {"out.jsonl", "round.jsonl", "logs/out.jsonl"} & {file.name for file in argument.files}
        assert sum(path.endswith(("out.jsonl", "round.jsonl")) for path in argument.left_out) == 2
        with locate_arguments([str(name)], io.BytesIO(), follow_links=True) as (argument,):
            assert sum(file.path.name == "out.jsonl" for file in argument.files) == 1
    assert [file.name for file in locate(folder / "out.jsonl")[0].files] == ["out.jsonl"], "it was named itself"


def test_of_a_file_and_links_to_it_the_file_is_read(folder: Path) -> None:
    (folder / "0.jsonl").symlink_to("z.jsonl")
    os.link(folder / "z.jsonl", folder / "zz.jsonl")
    assert called(folder)[0][:2] == ["a.jsonl", "z.jsonl"]
    assert called(folder / "0.jsonl") == [["0.jsonl"]]


def test_nothing_is_planned_for_an_argument_whose_files_were_named_before(folder: Path) -> None:
    _, second = locate(folder, folder / "a.jsonl")
    assert plan_ingest(second).files == []
    assert second.source == "a.jsonl"


# ---------------------------------------------------------------- what a plan calls its runs


def test_the_job_of_a_folder_names_no_run_and_its_records_those_of_their_files(folder: Path, tmp_path: Path) -> None:
    lk = empty_lake(tmp_path / "lake")
    report = ingest(lk, folder)
    assert report.run_id is None
    assert report.runs == {"a", "z", "b/a", "b/deep/with space"}
    assert lk.sql("FROM episodes")["source_uri"].unique().sort().to_list() == [
        "a.jsonl",
        "b/a.jsonl",
        "b/deep/with space.jsonl",
        "z.jsonl",
    ]
    assert str(tmp_path) not in lk.scan("jobs").collect().write_json()


def test_a_file_is_present_however_it_is_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lk = empty_lake(tmp_path / "lake")
    write_lines(folder / "w1" / "results.jsonl", [episode("t", n) for n in range(20)])
    write_lines(folder / "w2" / "results.jsonl", [episode("t", n) for n in range(3)])
    assert ingest(lk, folder).new == 27
    monkeypatch.chdir(folder / "w1")
    for named in ("results.jsonl", folder / "b" / "a.jsonl", folder / "b", folder / "b/deep/with space.jsonl", folder):
        report = ingest(lk, named)
        assert (report.new, report.rejected) == (0, 0), named
        assert report.present == report.records > 0
    assert lk.sql("FROM episodes")["run_id"].unique().sort().to_list() == [
        "a", "b/a", "b/deep/with space", "w1/results", "w2/results", "z"
    ]  # fmt: skip


def test_a_file_goes_on_in_the_run_that_its_first_records_are_in(tmp_path: Path) -> None:
    lk = empty_lake(tmp_path / "lake")
    same = [episode("t", n) for n in range(COMPARED)]
    ingest(lk, write_lines(tmp_path / "one" / "a.jsonl", same), run_id="mine")
    assert ingest(lk, write_lines(tmp_path / "a.jsonl", [*same, episode("u")])).runs == {"mine"}
    changed_lines = [*same[:-1], episode("t", COMPARED - 1, steps=5)]
    assert ingest(lk, write_lines(tmp_path / "b.jsonl", changed_lines)).runs == {"b"}, "one of them is not the same"
    assert ingest(lk, tmp_path / "a.jsonl", run_id="copy").runs == {"copy"}, "a person decides"


@pytest.mark.parametrize(
    ("name", "folder", "run"),
    [
        ("jsonl", "x/gpt-4o-airline.json.gz", "gpt-4o-airline"),
        ("jsonl", "x/results.jsonl", "x/results"),
        ("messages", "x/train_00003-of-00010.parquet", "x/train_00003-of-00010"),
        ("messages", "stdin", "stdin"),
        ("verl", "runs/ppo/7.jsonl", "ppo"),
        ("art", "models/m1/trajectories/train/0005.parquet", "m1"),
        ("swe_agent", "runs/gpt/django-1/django-1.traj", "gpt"),
        ("swe_agent", "runs/gpt/django-1.traj", "gpt"),
        ("mini_swe_agent", "runs/gpt/django-1/django-1.traj.json", "gpt"),
        ("massgen_traces", "p/rl_data/traces/20251201/agent_a/id.json", "rl_data"),
        ("massgen_logs", "p/logs/log_20251201_120000/turn_1/attempt_2/coordination_events.json", "logs"),
        ("openhands", "p/conversations/0a1b/events/3.json", "conversations"),
        ("otlp", "traces/monday/trace.json", "monday"),
    ],
)
def test_a_run_is_called_by_where_its_files_lie(name: str, folder: str, run: str) -> None:
    path = PurePath("/" if "/" in folder else "", folder)
    assert name_run(File(Path(path), path.name, path), FORMATS[name]) == run


def test_a_reject_is_one_however_many_files_there_are_beside_it(folder: Path, tmp_path: Path) -> None:
    lk = empty_lake(tmp_path / "lake")
    write_lines(folder / "m.jsonl", [b"nonsense\n", episode("good")])
    assert ingest(lk, folder).rejected == 1
    write_lines(folder / "0.jsonl", [episode("first now")])
    assert ingest(lk, folder).rejected == 1
    assert ingest(lk, f"{folder}/**").rejected == 1
    assert lk.sql("SELECT source_uri, position FROM rejects").rows() == [("m.jsonl", 1)]


def test_files_that_hold_no_trajectories_are_left_out_and_all_of_them_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "notes.txt").write_text("hello")
    (folder / "empty.jsonl").touch()
    report = ingest(empty_lake(tmp_path / "lake"), folder)
    assert report.skipped.keys() == {"notes.txt", "empty.jsonl"}
    assert report.skipped["empty.jsonl"].startswith("is empty; ")
    assert (report.files, report.new) == (4, 4)
    only = tmp_path / "only"
    only.mkdir()
    for name in ("a.txt", "b.txt"):
        (only / name).write_text("hello")
    with pytest.raises(FormatError, match=r"only holds no trajectories: a.txt has no known format.*\(and 1 more"):
        plan_ingest(locate(only)[0])


# ---------------------------------------------------------------- - and pipes


def test_standard_input_and_a_packed_pipe_are_read_to_their_end(tmp_path: Path) -> None:
    lk = empty_lake(tmp_path / "lake")
    pipe = tmp_path / "fed.jsonl.gz"
    os.mkfifo(pipe)
    data = line(episode("from a pipe"))
    writer = threading.Thread(target=lambda: pipe.write_bytes(gzip.compress(data)))
    writer.start()
    assert ingest(lk, pipe).new == 1
    writer.join()
    with locate_arguments(["-"], io.BytesIO(line(episode("from stdin")))) as (argument,):
        planned = plan_ingest(argument)
        assert planned.report.run_id == "stdin"
        spooled = argument.files[0].path
        assert spooled.read_bytes() == line(episode("from stdin"))
    assert not spooled.parent.exists(), "what was spooled is deleted"
    assert lk.sql("SELECT run_id, source_uri FROM episodes").rows() == [("fed", "fed.jsonl.gz")]


def test_standard_input_is_empty_the_second_time() -> None:
    with locate_arguments(["-", "-"], io.BytesIO(line(episode()))) as (first, second):
        plan_ingest(first)
        with pytest.raises(FormatError, match=r"^- is empty"):
            plan_ingest(second)


def test_a_name_that_is_empty_is_refused() -> None:
    """It would be the working directory: what an unset variable of a script names."""
    with pytest.raises(UsageError, match="file is empty"):
        locate("")
