"""Scores that no one computes here: those that came with their episodes, and those that a file or a frame brings later.

Each is written once, no matter what is read again, in which pieces, and by how many at once; the newest counts.
"""

import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lake
from lake import EpisodeRecord, Lake, ids
from lake.errors import FormatError, UsageError
from lake.export import find_target
from lake.export.job import ExportRequest, export
from lake.records import ScoreRecord
from lake.write import ingest as ingest_module
from lake.write import score_import
from lake.write import scores as scores_module
from lake.write.ingest import ingest
from lake.write.score_import import ScoresReport, import_file
from lake.write.scores import add_scores
from testkit.command_line import Cli, runner
from testkit.copies import copied, empty_lake
from testkit.episodes import episode, write_lines
from testkit.examples import examples
from testkit.wording import Wording

Row = dict[str, Any]
TASKS = ("007", "a", "b", "c")


def with_episodes(folder: Path) -> Lake:
    """Four tasks of two rollouts each, two or three steps long."""

    def make(template: Path) -> None:
        records = [episode(task, index, steps=2 + index) for task in TASKS for index in range(2)]
        lake.open(template, create=True).append(records, run_id="run")

    return copied("episodes to be scored", make, folder)


@pytest.fixture
def lk(tmp_path: Path) -> Lake:
    return with_episodes(tmp_path / "lake")


@pytest.fixture(scope="module")
def unwritten(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """For what is refused before anything is written."""
    return with_episodes(tmp_path_factory.mktemp("shared") / "lake")


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    return runner(monkeypatch, capsys)


def checked(report: ScoresReport) -> ScoresReport:
    assert report.rows == report.new + report.present + report.unmatched + report.invalid
    return report


def read_scores(
    lk: Lake, columns: str = "task_id, rollout_index, step_index, scorer, value, reason, s.error"
) -> list[Any]:
    """The scores that count."""
    return lk.sql(f"SELECT {columns} FROM current_scores AS s JOIN episodes USING (episode_id) ORDER BY ALL").rows()


def written(lk: Lake) -> int:
    """Rows that were ever written."""
    return int(lk.sql("SELECT count(*) FROM scores").item())


def outcome(report: ScoresReport) -> tuple[int, int, int, int]:
    return report.new, report.present, report.unmatched, report.invalid


def add(lk: Lake, *rows: Row, name: str | None = "human") -> ScoresReport:
    return checked(lk.add_scores(pl.DataFrame(rows, infer_schema_length=None), name=name))


# ---------------------------------------------------------------- once


def test_the_same_again_adds_nothing_and_what_has_changed_takes_the_place_of_the_former(lk: Lake) -> None:
    values = dict(zip(TASKS, (0.0, 1.0, 0.5, 1.0), strict=True))
    rows = [{"task_id": task, "rollout_index": 0, "value": value} for task, value in values.items()]
    assert outcome(add(lk, *rows)) == (4, 0, 0, 0)
    assert outcome(add(lk, *rows)) == (0, 4, 0, 0)
    assert written(lk) == 4
    rows[1]["value"] = 0.25
    assert outcome(add(lk, *rows[:2])) == (1, 1, 0, 0)
    assert [(row[0], row[4]) for row in read_scores(lk)] == [("007", 0.0), ("a", 0.25), ("b", 0.5), ("c", 1.0)]
    assert written(lk) == 5, "what was there before stays"


def test_scores_of_other_steps_of_the_episode_stay(lk: Lake) -> None:
    add(lk, {"task_id": "a", "rollout_index": 0, "step_index": 0, "value": 0.1})
    add(lk, {"task_id": "a", "rollout_index": 0, "step_index": 1, "value": 0.2})
    add(lk, {"task_id": "a", "rollout_index": 0, "step_index": None, "value": 0.3, "reason": "all of it"})
    add(lk, {"task_id": "a", "rollout_index": 0, "step_index": 0, "value": 0.4})
    assert [(row[2], row[4], row[5]) for row in read_scores(lk)] == [
        (0, 0.4, None),
        (1, 0.2, None),
        (None, 0.3, "all of it"),
    ]


def test_null_is_not_zero(lk: Lake) -> None:
    rows = [
        {"task_id": "a", "rollout_index": 0, "value": None, "reason": "unclear", "error": None},
        {"task_id": "a", "rollout_index": 1, "value": 0.0, "reason": None, "error": None},
        {"task_id": "b", "rollout_index": 0, "value": float("nan"), "reason": None, "error": "asleep"},
        {"task_id": "c", "rollout_index": 0, "value": None, "reason": None, "error": None},
    ]
    assert outcome(add(lk, *rows)) == (3, 0, 0, 1)
    assert [row[4:] for row in read_scores(lk)] == [(None, "unclear", None), (0.0, None, None), (None, None, "asleep")]
    assert outcome(add(lk, rows[1] | {"value": None, "reason": "taken back"})) == (1, 0, 0, 0)
    assert read_scores(lk)[1][4] is None


def test_scores_of_several_scorers_are_kept_apart(lk: Lake) -> None:
    rows = [{"task_id": "a", "rollout_index": 0, "scorer": name, "value": 1.0} for name in ("x", "y")]
    assert outcome(add(lk, *rows, name=None)) == (2, 0, 0, 0)
    assert outcome(add(lk, *rows, name="one name for all")) == (1, 1, 0, 0), "two rows that say the same"
    assert [row[3] for row in read_scores(lk)] == ["one name for all", "x", "y"]


ROWS = st.lists(
    st.tuples(st.sampled_from(TASKS), st.integers(0, 1), st.sampled_from([None, 0, 1]), st.sampled_from(["x", "y"])),
    unique=True,
    min_size=1,
    max_size=8,
)


@settings(max_examples=examples(8))
@given(data=st.data(), keys=ROWS)
def test_scores_of_any_split_into_imports_end_the_same(
    data: st.DataObject, keys: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    names = ("task_id", "rollout_index", "step_index", "scorer")
    values = data.draw(st.lists(st.sampled_from([None, 0.0, 0.5]), min_size=len(keys), max_size=len(keys)))
    schema = {"task_id": pl.String, "rollout_index": pl.Int64, "step_index": pl.Int64, "scorer": pl.String}
    rows = pl.DataFrame([dict(zip(names, key, strict=True)) for key in keys], schema=schema).with_columns(
        value=pl.Series(values, dtype=pl.Float64), reason=pl.lit("because")
    )
    folder = tmp_path_factory.mktemp("any")
    lake_whole, lake_in_parts = with_episodes(folder / "whole"), with_episodes(folder / "parts")
    assert checked(lake_whole.add_scores(rows)).new == rows.height
    rows_left = rows.sample(fraction=1.0, shuffle=True, seed=len(keys))
    while rows_left.height:
        size = data.draw(st.integers(1, rows_left.height))
        again = data.draw(st.integers(0, rows.height))
        # Overlaps: some that are there already come again.
        checked(lake_in_parts.add_scores(pl.concat([rows_left[:size], rows[:again]]).unique(maintain_order=True)))
        rows_left = rows_left[size:]
    assert read_scores(lake_in_parts) == read_scores(lake_whole)


# ---------------------------------------------------------------- which episode


def test_an_episode_is_named_by_its_id_as_people_see_it_or_as_an_integer(lk: Lake, tmp_path: Path) -> None:
    episode_ids = lk.sql("SELECT episode_id FROM episodes ORDER BY task_id, rollout_index")["episode_id"].to_list()
    assert outcome(add(lk, {"episode_id": episode_ids[0], "value": 1})) == (1, 0, 0, 0)
    assert outcome(add(lk, {"episode_id": ids.to_text(episode_ids[0]).upper(), "value": 1})) == (0, 1, 0, 0)
    path = tmp_path / "s.csv"
    path.write_text(f"episode_id,value\n{episode_ids[0]},1\n {ids.to_text(episode_ids[1])},1\n")
    assert outcome(import_file(lk, path, name="human")) == (1, 1, 0, 0)


def test_what_names_no_episode_or_several_is_reported_and_kept(lk: Lake, wording: Wording) -> None:
    rows = [
        {"task_id": "a", "rollout_index": 0, "episode_id": None, "step_index": None, "value": 1.0},
        {"task_id": "z", "rollout_index": 0, "episode_id": None, "step_index": None, "value": 1.0},
        {"task_id": "a", "rollout_index": 0, "episode_id": "no id", "step_index": None, "value": 1.0},
        {"task_id": None, "rollout_index": None, "episode_id": None, "step_index": None, "value": 1.0},
        {"task_id": "a", "rollout_index": 1, "episode_id": None, "step_index": 2, "value": 1.0},
        {"task_id": "a", "rollout_index": 1, "episode_id": None, "step_index": 3, "value": 1.0},
        {"task_id": "a", "rollout_index": 1, "episode_id": None, "step_index": -1, "value": 1.0},
    ]
    report = add(lk, *rows)
    assert outcome(report) == (2, 0, 5, 0)
    example = wording(report.examples[0])
    assert example.startswith(
        'row 1 ({"task_id":"z","rollout_index":0,"episode_id":null,"step_index":null,"value":1.0}): '
    )
    rejects = lk.sql("SELECT position, reason, message FROM rejects ORDER BY position").rows()
    assert [(position, reason) for position, reason, _ in rejects] == [(n, "unmatched") for n in (1, 2, 3, 5, 6)]
    assert "3 steps" in wording(rejects[3][2])
    add(lk, *rows)
    assert lk.sql("SELECT count(*) FROM rejects").item() == 5, "the same again is not told again"


def test_a_key_that_fits_several_is_told_to_be_too_short(lk: Lake, wording: Wording) -> None:
    report = add(lk, {"task_id": "a", "value": 1.0})
    assert outcome(report) == (0, 0, 1, 0)
    assert "2 episodes" in wording(report.examples[0])
    lk.append([episode("a", 0, seed=seed) for seed in (1, 2)], run_id="seeds")
    rows = [{"task_id": "a", "rollout_index": 0, "run_id": "seeds", "seed": seed, "value": seed} for seed in (1, 2)]
    assert outcome(add(lk, *rows)) == (2, 0, 0, 0)


def test_a_column_that_is_empty_tells_nothing_apart(lk: Lake, tmp_path: Path) -> None:
    path = tmp_path / "s.csv"
    path.write_text("run_id,task_id,rollout_index,agent_id,collection_round,value\n,a,0,,,1\n,a,1,,,0\n")
    assert outcome(import_file(lk, path, name="human")) == (2, 0, 0, 0)


def test_an_id_that_is_none_does_not_fall_back_on_the_run(tmp_path: Path) -> None:
    lk = empty_lake(tmp_path / "lake")
    lk.append([episode("only")], run_id="run")
    assert outcome(add(lk, {"episode_id": "nonsense", "run_id": "run", "value": 1.0})) == (0, 0, 1, 0)


def test_episodes_that_are_hidden_have_no_scores(lk: Lake) -> None:
    (hidden,) = lk.sql("SELECT episode_id FROM episodes WHERE task_id = 'a' AND rollout_index = 0")["episode_id"]
    lk.retract([hidden])
    assert outcome(add(lk, {"task_id": "a", "rollout_index": 0, "value": 1.0})) == (0, 0, 1, 0)
    assert outcome(add(lk, {"episode_id": hidden, "value": 1.0})) == (0, 0, 1, 0)


# ---------------------------------------------------------------- rows that say nothing, or too much


def test_rows_that_contradict_one_another_are_refused_and_those_that_agree_are_one(lk: Lake, wording: Wording) -> None:
    def row(task: str, value: float, step: int | None = None) -> Row:
        return {"task_id": task, "rollout_index": 0, "step_index": step, "value": value}

    report = add(lk, row("a", 1.0), row("a", 1.0), row("b", 1.0), row("b", 0.0), row("a", 0.5, step=1))
    assert outcome(report) == (2, 1, 0, 2)
    assert [(r[0], r[2]) for r in read_scores(lk)] == [("a", 1), ("a", None)]
    (reject,) = lk.sql("SELECT DISTINCT reason, message FROM rejects").rows()
    assert reject[0] == "invalid"
    wording(reject[1])


def test_a_row_that_says_nothing_is_invalid(lk: Lake, wording: Wording) -> None:
    wrong: list[Row] = [
        {"value": None},
        {"value": float("inf")},
        *({"value": 1.0, "scorer": name} for name in (" ", None, "me@home")),
    ]
    keys = [{"task_id": task, "rollout_index": index, "scorer": "human"} for task in TASKS for index in range(2)]
    report = add(lk, *(key | row for key, row in zip(keys, wrong, strict=False)), name=None)
    assert outcome(report) == (0, 0, 0, len(wrong))
    messages = lk.sql("SELECT message FROM rejects ORDER BY position")["message"].to_list()
    for row, message in zip(wrong, messages, strict=True):
        assert ("scorer" if "scorer" in row else "value") in wording(message)


WRONG_CELLS = [
    *(("value", cell, "a number, a truth value") for cell in ("good", "1_000", [1], {"score": 1})),
    *(("step_index", cell, "a whole number") for cell in (0.5, "first", "1_0", True)),
    ("rollout_index", 2**70, "a whole number"),
    *(("task_id", cell, "a text") for cell in (True, ["a"])),
    ("reason", {"because": 1}, "a text"),
]


def test_a_cell_of_the_wrong_type_is_told_with_its_row_and_column_and_the_other_rows_are_taken(
    lk: Lake, tmp_path: Path
) -> None:
    base: Row = {"task_id": "a", "rollout_index": 0, "value": 1.0}
    wrong = [base | {"rollout_index": 1, column: cell} for column, cell, _ in WRONG_CELLS]
    path = tmp_path / "s.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in (base, *wrong)) + "\n")
    report = import_file(lk, path, name="human")
    assert outcome(report) == (1, 0, 0, len(wrong))
    rejects = lk.sql("SELECT position, message FROM rejects ORDER BY position").rows()
    for number, (column, cell, valid) in enumerate(WRONG_CELLS):
        position, message = rejects[number]
        assert position == number + 2
        assert message.startswith(f"`{column}` is {cell!r}; ")
        assert f"valid: {valid}" in message
    assert report.examples[0].startswith("row 2 ")
    assert read_scores(lk, "task_id, value") == [("a", 1.0)]


@pytest.mark.parametrize(
    ("row", "name", "says"),
    [
        ({"task_id": "a", "value": 1}, 5, "5 is not a name of a scorer; valid: a text that is not blank and has no @"),
        ({"task_id": "a", "value": 1}, "\udcff", "is not a name of a scorer"),
        (
            {"task_id": "a", "points": 1},
            "human",
            "frame has no column of values (task_id, points); valid: value, score",
        ),
        ({"who": "a", "value": 1}, "human", "frame names no episodes (who, value); valid: a column `episode_id`"),
        ({"task_id": "a", "value": 1}, None, "who gave these scores? give --name NAME, or a column `scorer`"),
        ({"task_id": "a", "value": 1}, "a@b", "'a@b' is not a name of a scorer"),
        ({"task_id": "a", "value": 1}, " ", "' ' is not a name of a scorer"),
    ],
)
def test_columns_that_cannot_be_meant_are_refused(unwritten: Lake, row: Row, name: Any, says: str) -> None:
    with pytest.raises(UsageError) as refused:
        unwritten.add_scores(pl.DataFrame([row]), name=name)
    assert says in str(refused.value)


# ---------------------------------------------------------------- files and frames


def forms(folder: Path, rows: list[Row]) -> Iterator[Path]:
    """The same rows in every form that is read."""
    frame = pl.DataFrame(rows)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "s.csv").write_text(frame.write_csv())
    (folder / "semicolons.csv").write_text(frame.write_csv(separator=";", line_terminator="\r\n", include_bom=True))
    (folder / "s.tsv").write_text(frame.write_csv(separator="\t"))
    (folder / "quoted.csv").write_text(frame.write_csv(quote_style="always"))
    (folder / "s.jsonl").write_text(lines)
    (folder / "s.json").write_text(json.dumps(rows, indent=1))
    (folder / "no ending").write_text(lines)
    (folder / "s.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "s.csv.gz").write_bytes(gzip.compress(frame.write_csv().encode()))
    (folder / "s.csv.zst").write_bytes(pa.compress(frame.write_csv().encode(), "zstd", asbytes=True))
    (folder / "a[1]*.csv").write_text(frame.write_csv())
    frame.write_parquet(folder / "s.parquet")
    yield from sorted(path for path in folder.iterdir() if path.is_file())


def test_scores_are_the_same_from_any_form(lk: Lake, tmp_path: Path) -> None:
    rows = [
        {"task_id": "007", "rollout_index": 1, "value": 1.0, "reason": 'a, "quoted"\nreason; with\tall'},
        {"task_id": "a", "rollout_index": 0, "value": None, "reason": "none"},
    ]
    folder = tmp_path / "forms"
    folder.mkdir()
    for number, path in enumerate(forms(folder, rows)):
        report = checked(import_file(lk, path, name="human"))
        assert outcome(report) == ((0, 2, 0, 0) if number else (2, 0, 0, 0)), path.name
    assert [(row[0], row[1], row[4], row[5]) for row in read_scores(lk)] == [
        ("007", 1, 1.0, rows[0]["reason"]),
        ("a", 0, None, "none"),
    ]


def test_truth_values_are_one_and_zero_from_any_form(lk: Lake, tmp_path: Path) -> None:
    (tmp_path / "s.csv").write_text("task_id,rollout_index,value\na,0,True\na,1,FALSE\n")
    assert import_file(lk, tmp_path / "s.csv", name="human").new == 2
    rows = [{"task_id": "a", "rollout_index": n, "value": not n} for n in range(2)]
    (tmp_path / "s.json").write_text(json.dumps(rows))
    assert import_file(lk, tmp_path / "s.json", name="human").present == 2
    assert add(lk, *rows).present == 2
    assert [row[4] for row in read_scores(lk)] == [1.0, 0.0]


def test_a_frame_of_pandas_may_have_floating_point_where_a_number_is_missing(lk: Lake) -> None:
    frame = pd.DataFrame(
        {"task_id": ["a", "a", "007"], "rollout_index": [0, 1, 0], "step_index": [1, None, None], "score": [1, 0, None]}
    )
    assert frame["step_index"].dtype.kind == "f"
    assert outcome(checked(lk.add_scores(frame, name="human"))) == (2, 0, 0, 1)
    assert outcome(checked(lk.add_scores(pa.Table.from_pandas(frame), name="human"))) == (0, 2, 0, 1)
    assert [(row[0], row[2], row[4]) for row in read_scores(lk)] == [("a", 1, 1.0), ("a", None, 0.0)]


def test_lines_that_cannot_be_read_are_told_and_the_others_taken(lk: Lake, tmp_path: Path) -> None:
    good = json.dumps({"task_id": "a", "rollout_index": 0, "value": 1})
    (tmp_path / "s.jsonl").write_text(f'{good}\nnonsense\n[1]\n\n{{"task_id": "a", "val')
    report = checked(import_file(lk, tmp_path / "s.jsonl", name="human"))
    assert (outcome(report), report.rows) == ((1, 0, 0, 3), 4)
    rejects = lk.sql("SELECT position, reason FROM rejects ORDER BY 1").rows()
    assert rejects == [(2, "malformed"), (3, "invalid"), (5, "truncated")]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("missing.csv", None, "missing.csv: No such file or directory"),
        ("empty.csv", b"", "empty.csv is empty"),
        (
            "ragged.csv",
            b'task_id,value\n"a\nb",1\na,1,2\n',
            "cannot be read: line 4 has 3 fields, the header 2; put texts",
        ),
        ("open.csv", b'task_id,value\na,1\n"b,1\nc,1\n', "cannot be read: line 3 begins a row that cannot be read"),
        ("latin.csv", b"task_id,value\na,1\n\xe9,1\n", "latin.csv cannot be read: line 3 is not UTF-8; save"),
        ("twice.csv", b"task_id,value, value\na,1,2\n", "has the column 'value' 2 times; name each of them"),
        ("cut.csv.gz", gzip.compress(b"task_id,value\n" + random.Random(0).randbytes(4000))[:900], "is cut"),
        ("cut.parquet", b"PAR1 and no more", "cut.parquet cannot be read"),
        ("x.zip", b"PK\x03\x04 and no more", "holds no scores (it is a zip file)"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(
    unwritten: Lake, tmp_path: Path, cli: Cli, name: str, content: bytes | None, says: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert says in cli("score", "import", tmp_path / name, "--name", "x", "--lake", unwritten.uri).fault


@pytest.mark.parametrize("limit", [{"ROWS_LIMIT": 3}, {"BYTES_LIMIT": 40}])
def test_a_file_that_unpacks_to_too_much_is_refused(
    unwritten: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: dict[str, int]
) -> None:
    rows = [{"task_id": "a", "rollout_index": n, "value": 1.0} for n in range(4)]
    monkeypatch.setattr(score_import, *limit.popitem())
    folder = tmp_path / "forms"
    folder.mkdir()
    for path in forms(folder, rows):
        with pytest.raises(FormatError, match=r"forms/.*; split it"):
            import_file(unwritten, path, name="human")


def test_text_that_cannot_be_stored_is_a_reject_and_the_others_are_taken(lk: Lake, tmp_path: Path) -> None:
    good = json.dumps({"task_id": "a", "rollout_index": 0, "value": 1})
    (tmp_path / "s.json").write_text(f'[{{"task_id": "\\ud800", "value": 1}}, {good}]')
    report = checked(import_file(lk, tmp_path / "s.json", name="human"))
    assert outcome(report) == (1, 0, 0, 1)
    assert report.examples[0].startswith('row 0 ({"task_id": "\\ud800", "value": 1}): ')
    assert "UTF-8" in report.examples[0]


def test_a_row_that_is_not_taken_is_kept_as_it_was_written_however_deep_it_nests(lk: Lake, tmp_path: Path) -> None:
    text = f'{{"task_id":  "z", "value": 1, "more": {"[" * 900}{"]" * 900}}}'
    (tmp_path / "s.jsonl").write_text(text)
    assert outcome(import_file(lk, tmp_path / "s.jsonl", name="human")) == (0, 0, 1, 0)
    assert lk.sql("SELECT raw FROM rejects").item() == text


def test_rows_that_are_not_taken_are_written_some_at_a_time(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_import, "_REJECTS_AT_ONCE", 2)
    assert outcome(add(lk, *({"task_id": "z", "rollout_index": n, "value": 1.0} for n in range(5)))) == (0, 0, 5, 0)
    rows = lk.sql("SELECT position, raw FROM rejects ORDER BY position").rows()
    assert [(index, json.loads(raw)["rollout_index"]) for index, raw in rows] == [(n, n) for n in range(5)]
    assert lk.sql("SELECT count(DISTINCT write_id) FROM rejects").item() == 3


def test_several_files_are_refused(unwritten: Lake, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "s.csv").write_text("task_id,value\na,1\n")
    for name in (tmp_path / "in", f"{tmp_path}/in/*.csv"):
        with pytest.raises(UsageError, match="give one file"):
            import_file(unwritten, name, name="human")
    with pytest.raises(FormatError, match="no file matches"):
        import_file(unwritten, f"{tmp_path}/*.csv", name="human")


# ---------------------------------------------------------------- the command


def test_the_command_says_what_became_of_the_rows(tmp_path: Path, cli: Cli, wording: Wording) -> None:
    uri = tmp_path / "lake"
    lk = with_episodes(uri)
    path = tmp_path / "labels.csv"
    path.write_text("task_id,rollout_index,value\na,0,1\nb,0,\nz,0,1\n")
    done = cli("score", "import", path, "--name", "human", "--lake", uri)
    assert (done.code, done.out) == (
        0,
        f"{path}: 1 score of human (0 already present), 1 unmatched, 1 invalid, of 3 rows\n",
    )
    first, second, where = wording(done.err).splitlines()
    assert first.startswith('  row 1 ({"task_id":"b","rollout_index":"0","value":null}): ')
    assert second.startswith('  row 2 ({"task_id":"z","rollout_index":"0","value":"1"}): ')
    assert "`rejects`" in where
    again = cli("score", "import", path, "--name", "human", "--lake", uri)
    assert again.out.startswith(f"{path}: 0 scores of human (1 already present)")
    assert read_scores(lk, "task_id, value") == [("a", 1.0)]
    path.write_text("task_id,value\nz,1\n")
    none = cli("score", "import", path, "--name", "human", "--lake", uri)
    assert none.code == 1, "nothing at all was taken"
    assert none.out == f"{path}: 0 scores of human (0 already present), 1 unmatched, 0 invalid, of 1 row\n"


def test_nothing_that_is_kept_names_a_folder_of_this_machine(tmp_path: Path, lk: Lake) -> None:
    path = tmp_path / "labels.csv"
    path.write_text("task_id,rollout_index,value\na,0,1\nz,0,1\n")
    import_file(lk, path, name="human")
    stored = [lk.scan(name).collect().write_json() for name in ("jobs", "scores", "rejects")]
    assert not [text for text in stored if str(tmp_path) in text]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--name", "human", "import"], "`import` comes before all options: `trajlake score import FILE --name NAME"),
        (["import", "labels.csv"], "who gave these scores?"),
    ],
)
def test_a_command_that_cannot_be_meant_is_refused(
    unwritten: Lake, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, args: list[str], says: str
) -> None:
    (tmp_path / "labels.csv").write_text("task_id,value\na,1\n")
    monkeypatch.chdir(tmp_path)
    assert says in cli("score", *args, "--lake", unwritten.uri).fault


def test_import_has_a_help_of_its_own(cli: Cli) -> None:
    assert "Usage: trajlake score import [OPTIONS] FILE" in cli("score", "import", "-h").out


# ---------------------------------------------------------------- at once


def test_two_imports_at_once_write_each_score_once_and_lose_none(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one commits the same scores, and one of an episode of ours, between our look and our commit."""
    commit = scores_module.commit_unique
    reader = lake.open(lk.uri)
    rows = [{"task_id": task, "rollout_index": 0, "value": 1.0, "step_index": None} for task in TASKS]
    steps = [{"task_id": "b", "rollout_index": 0, "value": 0.5, "step_index": 1}]

    def overtaken(*args: Any, **options: Any) -> Any:
        monkeypatch.undo()
        assert add(reader, *rows[:2], *steps).new == 3
        return commit(*args, **options)

    monkeypatch.setattr(scores_module, "commit_unique", overtaken)
    assert outcome(add(lk, *rows)) == (2, 2, 0, 0)
    expected = [("007", None, 1.0), ("a", None, 1.0), ("b", 1, 0.5), ("b", None, 1.0), ("c", None, 1.0)]
    assert read_scores(lk, "task_id, step_index, value") == expected


# ---------------------------------------------------------------- scores that came with episodes


def scored(task: str, *scores: tuple[str, float | None], **fields: Any) -> EpisodeRecord:
    return episode(task, scores=[ScoreRecord(scorer=name, value=value) for name, value in scores], **fields)


def test_scores_that_came_with_episodes_are_written_once(tmp_path: Path) -> None:
    lk = empty_lake(tmp_path / "lake")
    path = write_lines(tmp_path / "f.jsonl", [scored("a", ("judge", 1.0), ("other", None)), episode("b")])
    assert (ingest(lk, path).scores, ingest(lk, path).scores) == (2, 0)
    assert read_scores(lk, "task_id, scorer, value") == [("a", "judge", 1.0), ("a", "other", None)]
    assert written(lk) == 2


def test_an_ingest_that_died_before_its_scores_is_completed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class DiedError(Exception):
        pass

    def dead(*_: Any, **__: Any) -> None:
        raise DiedError

    lk = empty_lake(tmp_path / "lake")
    path = write_lines(tmp_path / "f.jsonl", [scored(f"t{n}", ("judge", n)) for n in range(5)])
    monkeypatch.setattr(ingest_module, "add_scores", dead)
    with pytest.raises(DiedError):
        ingest(lk, path)
    monkeypatch.undo()
    assert (lk.sql("SELECT count(*) FROM episodes").item(), written(lk)) == (5, 0)
    report = ingest(lk, path)
    assert (report.new, report.present, report.scores) == (0, 5, 5)
    assert ingest(lk, path).scores == 0


def test_the_same_episodes_with_other_scores_add_only_what_is_new(tmp_path: Path) -> None:
    lk = empty_lake(tmp_path / "lake")
    path = tmp_path / "f.jsonl"
    ingest(lk, write_lines(path, [scored("a", ("judge", 1.0), ("other", 0.5)), scored("b", ("judge", 0.0))]))
    report = ingest(lk, write_lines(path, [scored("a", ("judge", 0.0), ("third", 1.0)), scored("b", ("judge", 0.0))]))
    assert (report.new, report.present, report.rejected, report.scores) == (0, 2, 0, 2)
    expected = [("a", "judge", 0.0), ("a", "other", 0.5), ("a", "third", 1.0), ("b", "judge", 0.0)]
    assert read_scores(lk, "task_id, scorer, value") == expected


def test_of_an_episode_that_is_there_twice_the_last_scores_count_in_any_batching(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lines(tmp_path / "f.jsonl", [scored("a", ("judge", value)) for value in (0.1, 0.2, 0.2, 0.3)])
    lakes = [empty_lake(tmp_path / name) for name in ("one", "other")]
    assert ingest(lakes[0], path).scores == 1
    monkeypatch.setattr(ingest_module, "BATCH_SCORES", 1)
    assert ingest(lakes[1], path, batch_size=1).scores == 3
    for lk in lakes:
        assert read_scores(lk, "value") == [(0.3,)]
        assert ingest(lk, path, batch_size=4).scores == 0
    assert written(lakes[0]) == 1


def test_scores_of_a_record_that_is_refused_are_refused_with_it(tmp_path: Path) -> None:
    lk = empty_lake(tmp_path / "lake")
    ingest(lk, write_lines(tmp_path / "f.jsonl", [scored("a", ("judge", 1.0)), scored("a", ("judge", 0.0), steps=5)]))
    assert read_scores(lk, "value") == [(1.0,)]


def test_scores_of_episodes_that_are_not_there_are_left_out(lk: Lake) -> None:
    row = {"episode_id": 5, "step_index": None, "scorer": "x", "value": 1.0, "reason": None, "error": None}
    frame = pl.DataFrame([row | {"metrics": None}], schema=scores_module.SCORE_COLUMNS)
    assert add_scores(lk, frame, version="recorded", source="nowhere").new == 0
    assert written(lk) == 0


def test_imported_scores_that_an_export_brings_back_are_there_already(lk: Lake, tmp_path: Path) -> None:
    add(lk, {"task_id": "a", "rollout_index": 0, "value": 0.5})
    export(lk, ExportRequest(find_target("jsonl"), tmp_path / "out"))
    before = written(lk)
    assert ingest(lk, tmp_path / "out").scores == 0
    assert written(lk) == before == 1
