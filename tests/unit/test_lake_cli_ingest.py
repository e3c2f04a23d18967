"""The command `ingest`: how it ends and what it says meanwhile. What it prints on success is in test_lake_cli.py."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import lake
from lake import ingest as ingest_module
from lake.commands_write import ingest
from testkit.episodes import episode, write_lines

BAD = [b"{}\n", b"nonsense\n"]


def run(folder: Path, *files: Path | str, size: int = 512) -> Result:
    args = [*map(str, files), "--lake", str(folder / "lake"), "--batch-size", str(size)]
    return CliRunner().invoke(ingest, args, catch_exceptions=False)


def test_a_file_of_rejects_alone_fails(tmp_path: Path) -> None:
    bad = write_lines(tmp_path / "bad.jsonl", BAD)
    done = run(tmp_path, bad)
    assert done.exit_code == 1
    assert f"{bad}: 0 episodes, 0 steps, 2 rejects (0 already present) in run bad" in done.stdout
    assert "2 of 2 records were rejected; see: trajlake sql" in done.stderr
    assert lake.open(tmp_path / "lake").sql("SELECT count(*) AS n FROM rejects").item() == 2


def test_one_record_that_was_taken_or_is_present_is_enough(tmp_path: Path) -> None:
    bad = write_lines(tmp_path / "bad.jsonl", BAD)
    good = write_lines(tmp_path / "good.jsonl", [episode()])
    assert run(tmp_path, bad, good).exit_code == 0
    assert run(tmp_path, good, bad).exit_code == 0, "already present is taken"
    assert run(tmp_path, write_lines(tmp_path / "mixed.jsonl", [*BAD, episode()])).exit_code == 0


def test_an_empty_array_is_no_failure(tmp_path: Path) -> None:
    path = tmp_path / "none.json"
    path.write_text("[]", "utf-8")
    done = run(tmp_path, path)
    assert done.exit_code == 0
    assert "0 episodes, 0 steps, 0 rejects" in done.stdout


def test_a_blank_task_is_a_reject(tmp_path: Path) -> None:
    assert run(tmp_path, write_lines(tmp_path / "f.jsonl", [episode(" "), episode("a")])).exit_code == 0
    rejects = lake.open(tmp_path / "lake").scan("rejects").select("position", "reason", "message").collect()
    assert rejects.row(0) == (1, "invalid", "`task_id` is ' '; valid: a name that is not blank")
    assert rejects.height == 1


def test_progress_goes_to_stderr_and_names_records_and_megabytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lines(tmp_path / "f.jsonl", [episode("t", n, extra={"x": "y" * 700_000}) for n in range(3)])
    assert "MB" not in run(tmp_path, path).output
    monkeypatch.setattr(ingest_module, "PROGRESS_SECONDS", 0.0)
    done = run(tmp_path, path, size=2)
    assert done.stderr.splitlines() == [f"{path}: 2 records, 1 of 2 MB", f"{path}: 3 records, 2 of 2 MB"]
    assert done.stdout.count("\n") == 1
