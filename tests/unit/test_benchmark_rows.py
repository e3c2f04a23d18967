"""The rows of docs/benchmarks.md: what `python benchmarks` measures again or drops, and what the page says of them."""

import importlib
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from benchmarks.measurement import Machine, Row, read_row

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
from pathlib import Path
with Path(__file__).with_name("calls").open("a") as calls:
    calls.write(sys.argv[1] + " ")
if sys.argv[1] == "bad":
    sys.exit(3)
Path(sys.argv[-1]).write_text(sys.argv[2].replace("'", '"'))
"""
MEASURED = "{'job':'j','size':'s','seconds':2,'clock':'wall','throughput':4,'unit':'MB/s','peak_gb':0.5,"
MEASURED += "'baseline':'b','baseline_seconds':1,'ratio':2.00004}"
MACHINE = Machine("a processor", 2, 24, "3.11.7")


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The runner with two rows of its own, on a machine that does nothing else."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    module = importlib.import_module("benchmarks.__main__")
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "bench_any.py").write_text(SCRIPT)
    rows = {name: module.Benchmark("bench_any", f"{name} {MEASURED}", name) for name in ("bad", "good")}
    for name, stand_in in (("ROOT", tmp_path), ("FOLDER", tmp_path / "rows"), ("ROWS", rows)):
        monkeypatch.setattr(module, name, stand_in)
    monkeypatch.setattr(module, "busy_seconds", lambda: 0.0)
    monkeypatch.setattr(module, "SAMPLE_SECONDS", 0.001)
    return module


def test_a_failing_row_is_removed_and_the_next_is_measured(
    runner: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    runner.FOLDER.mkdir()
    row = Row(
        **msgspec.json.decode(MEASURED.replace("'", '"')),
        command="an earlier one",
        machine=MACHINE,
        date="2026-11-01",
        commit="0",
        other_cores=0.0,
    )
    (runner.FOLDER / "bad.json").write_bytes(msgspec.json.encode(row))
    assert runner.main([]) == 1
    assert "bad: exit status 3" in capsys.readouterr().err
    measured = read_row(runner.FOLDER / "good.json")
    assert read_row(runner.FOLDER / "bad.json") is None
    assert measured is not None
    assert (measured.ratio, measured.command) == (2.0, f"python benchmarks/bench_any.py good {MEASURED}")


def test_a_row_is_measured_again_for_another_machine_after_other_load_or_on_request(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def times() -> int:
        runner.main(["good", *arguments])
        return len((runner.ROOT / "benchmarks" / "calls").read_text().split())

    arguments: list[str] = []
    assert [times(), times()] == [1, 1]
    arguments = ["--again"]
    assert times() == 2
    arguments = []
    with monkeypatch.context() as busy:
        busy.setattr(runner, "busy_seconds", count(0, 1000).__next__)
        (runner.FOLDER / "good.json").unlink()
        assert times() == 3
    assert [times(), times()] == [4, 4]
    monkeypatch.setattr(runner, "describe_machine", lambda: MACHINE)
    assert times() == 5


def test_the_page_names_missed_aims_absent_rows_and_other_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs" / "generate")
    page = importlib.import_module("benchmarks_page")
    measured = msgspec.json.decode(MEASURED.replace("'", '"'))
    run = {"command": "c", "machine": MACHINE, "date": "2026-11-01", "commit": "0"}
    slow = Row(**measured, **run, other_cores=1.5, waits_ms={"a call": 20.0}, aims={"ratio": 1.5, "a call": 30.0})
    fast = Row(**measured, **run, other_cores=0.0, aims={"peak_gb": 1.0})
    monkeypatch.setattr(page, "read_rows", lambda: {"ingest": slow, "credit": fast})
    text = page.benchmarks_page()
    table = [line.split(" | ") for line in text.splitlines() if line.startswith("| j | ")]
    assert [(cells[5], cells[7].strip(" |")) for cells in table] == [("2", "**no**"), ("2", "yes")]
    assert "* j: ratio 1.5; measured ratio 2\n" in text
    assert "1.5 cores busy around 1 rows" in " ".join(text.split())
    assert "Not measured: formats, " in text
    for name, (_, draw) in page.PICTURES.items():
        assert draw().count("<rect ") == (1 if "waits" in name else 2)
        assert ('class="missed"' in draw()) == ("ratios" in name)
