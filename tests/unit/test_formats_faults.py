"""Of records that are not taken the first is named, however a source is read: by ingest, in parts, by a preview."""

from pathlib import Path

from click.testing import CliRunner

import lake
from lake.cli import trajlake
from lake.write.ingest import ingest
from lake.write.sources import Report

LINES = b'{"task_id": "a", "steps": [{"state": "", "action": ""}]}\n' + b"first\n" + b"second\n"


def test_a_report_names_the_first_record_that_was_not_taken(tmp_path: Path) -> None:
    source = tmp_path / "f.jsonl"
    source.write_bytes(LINES)
    for batch in (1, 10):
        report = ingest(lake.open(tmp_path / f"lake{batch}", create=True), source, batch_size=batch)
        assert report.rejected == 2
        assert report.first_fault is not None
        assert report.first_fault[1] == 2


def test_reports_of_parts_together_name_the_fault_of_the_first_part() -> None:
    report = Report("f.jsonl", "jsonl", "f")
    for fault in (None, ("f.jsonl", 2, "one"), None, ("f.jsonl", 5, "two")):
        report.add(Report("f.jsonl", "jsonl", "f", first_fault=fault))
    assert report.first_fault == ("f.jsonl", 2, "one")


def test_a_preview_names_the_first_fault_of_a_reason(tmp_path: Path) -> None:
    (tmp_path / "f.jsonl").write_bytes(LINES)
    done = CliRunner().invoke(
        trajlake, ["ingest", str(tmp_path / "f.jsonl"), "--dry-run", "--lake", str(tmp_path / "L")]
    )
    assert done.exit_code == 0, done.output
    assert "2 malformed, first f.jsonl, record 2" in done.output
