"""The book of faults: what the fault tests write down, and the page made from it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from testkit.fault_log import LOG, Faults, Harm

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "fault_table.py"


def page(log: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, log], capture_output=True, text=True, check=True)


def test_faults_are_written_down_with_what_they_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log.jsonl"
    monkeypatch.setenv(LOG, str(log))
    with Faults() as faults:
        faults.inject("kill -9", 2)
        faults.found(Harm())
    with pytest.raises(AssertionError, match="lost=3"), Faults() as faults:  # noqa: PT012 - the block is what fails
        faults.inject("kill -9")
        faults.inject("disk full")
        faults.found(Harm(lost=3, half_visible=1))
    with Faults():
        pass
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["kind"], line["passed"], line["lost"]) for line in lines] == [
        ("kill -9", True, 0),
        ("kill -9", True, 0),
        ("kill -9", False, 0),
        ("disk full", False, 3),
    ]
    done = page(log)
    assert "| kill -9 | test_fault_table | 3 | 0 | 0 | 0 |" in done.stdout
    assert "| disk full | test_fault_table | 1 | 3 | 0 | 1 |" in done.stdout
    assert "| **all** |  | 4 | 3 | 0 | 1 |" in done.stdout
    assert "injected 4 faults; 1 tests failed" in done.stdout
    assert done.stderr.count("failed: ") == 1


def test_nothing_is_written_without_being_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LOG, raising=False)
    monkeypatch.chdir(tmp_path)
    with Faults() as faults:
        faults.inject("kill -9")
    assert list(tmp_path.iterdir()) == []
