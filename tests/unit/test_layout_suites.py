"""What keeps the suites small and sharp: budgets of files, wording in a golden file, the slow manifest, the mutants."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import run_mutants
import run_slow
from run_slow import SlowTest
from testkit import file_budgets, wording
from testkit.file_budgets import Budgets, budgets, excesses, tree_seconds

TESTS = Path(__file__).resolve().parents[1]

# ---------------------------------------------------------------- budgets

ALLOWED = Budgets({"folders": {"unit": 5}, "files": {"unit/test_large.py": 20}})


def test_a_file_over_its_budget_is_named_with_both_figures() -> None:
    ((_, sentence),) = excesses({"unit/test_a.py": 5.1, "unit/test_b.py": 4.9}, ALLOWED)
    assert "tests/unit/test_a.py" in sentence
    assert "5.1 CPU seconds" in sentence
    assert "budget is 5." in sentence


def test_a_line_of_a_file_counts_more_than_its_folder_and_other_folders_are_free() -> None:
    assert excesses({"unit/test_large.py": 19, "elsewhere/test_c.py": 1e9}, ALLOWED) == []
    assert len(excesses({"unit/test_large.py": 21}, ALLOWED)) == 1


def test_a_slow_moment_is_taken_out_of_what_a_test_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_budgets, "slowness", lambda: 2.5)
    measured: Any = file_budgets._Measured()
    measured._meter = SimpleNamespace(lap=lambda: (12.5, 13.0))
    report = SimpleNamespace(user_properties=[])
    phase = measured.pytest_runtest_makereport()
    next(phase)
    with pytest.raises(StopIteration):
        phase.send(report)
    assert report.user_properties == [("cost", (12.5, 13.0, 5.0))]


def test_every_line_is_of_a_file_that_exists_and_every_folder_has_a_budget() -> None:
    assert [file for file in budgets().files if not (TESTS / file).exists()] == []
    assert {path.parent.name for path in TESTS.rglob("test_*.py")} == set(budgets().folders)


def test_contributing_states_the_budget_of_every_folder() -> None:
    table = (TESTS.parent / "CONTRIBUTING.md").read_text("utf-8")
    for folder, seconds in budgets().folders.items():
        assert f"| `tests/{folder}` | {seconds} |" in table


@pytest.mark.parametrize(
    ("seconds", "status"), [(7, pytest.ExitCode.OK), (1e6, pytest.ExitCode.TESTS_FAILED)], ids=["over", "far over"]
)
def test_a_run_in_which_a_file_far_exceeds_its_budget_fails(
    seconds: float, status: pytest.ExitCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_budgets, "budgets", lambda: ALLOWED)
    report: Any = file_budgets._Report(SimpleNamespace(getoption=lambda name: None))
    cost = SimpleNamespace(
        user_properties=[("cost", (seconds, 1.0, seconds))], nodeid="tests/unit/test_a.py::t", when="call"
    )
    report.pytest_runtest_logreport(cost)
    session = SimpleNamespace(exitstatus=pytest.ExitCode.OK)
    report.pytest_sessionfinish(session)
    assert session.exitstatus == status


def test_a_file_pays_for_the_processes_that_it_starts() -> None:
    code = "import time; began = time.process_time()\nwhile time.process_time() - began < 0.2: pass\nprint(), input()"
    before = tree_seconds(os.getpid())
    with subprocess.Popen([sys.executable, "-Sc", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        alive = tree_seconds(os.getpid())
        child.communicate(b"\n")
    assert alive - before >= 0.15
    assert tree_seconds(os.getpid()) >= alive


# ---------------------------------------------------------------- wording


@pytest.mark.parametrize(
    ("golden", "fault"), [({}, "does not have"), ({"a": ["other"]}, "changed"), ({"a": ["it is TMP"]}, "")]
)
def test_a_message_that_is_not_the_golden_one_fails(golden: dict[str, list[str]], fault: str, tmp_path: Path) -> None:
    messages = wording.Messages("a", golden, tmp_path)
    if fault:
        with pytest.raises(AssertionError, match=fault):
            messages.compare(f"it is {tmp_path}")
    else:
        assert messages.compare(f"it is {tmp_path}") == f"it is {tmp_path}"


def test_what_varies_is_left_out(tmp_path: Path) -> None:
    messages = wording.Messages("a", None, tmp_path)
    messages.compare(ValueError("job 17 at http://127.0.0.1:4711/x"), JOB=17)
    assert messages.shown == ["job JOB at http://127.0.0.1:PORT/x"]


def test_every_golden_wording_is_of_a_test_that_exists() -> None:
    golden = json.loads(wording.GOLDEN.read_text("utf-8"))
    assert [test for test in golden if not wording.is_defined(test)] == [], "run `make golden`"


# ---------------------------------------------------------------- the slow suite


def test_the_manifest_comes_back_as_it_was_written(tmp_path: Path) -> None:
    tests = {"unit/test_a.py::test_b": SlowTest('It says "no".', 3), "c": SlowTest("d", 1, "2026-01-02", "passed", 1.5)}
    run_slow.write_manifest(tests, tmp_path / "slow.toml")
    assert run_slow.read_manifest(tmp_path / "slow.toml") == tests


def test_the_tests_that_were_not_run_for_the_longest_time_come_first_and_fit() -> None:
    manifest = {
        "new": SlowTest("", 1),
        "old": SlowTest("", 1, "2026-01-01", "passed", 30.0),
        "older": SlowTest("", 1, "2025-01-01", "passed", 500.0),
        "recent": SlowTest("", 1, "2026-03-01", "passed", 40.0),
    }
    assert run_slow.planned(manifest, minutes=3) == ["new", "old"]
    assert run_slow.planned(manifest, minutes=60) == ["new", "older", "old", "recent"]
    assert run_slow.planned(manifest, minutes=60, keyword="ol") == ["older", "old"]


def test_a_test_that_is_no_longer_slow_leaves_and_runs_are_remembered() -> None:
    manifest = {"gone": SlowTest("", 1), "stays": SlowTest("before", 1, "2026-01-01", "passed", 3.0)}
    tests = {"stays": SlowTest("now", 2), "new": SlowTest("", 1)}
    assert run_slow.synchronised(manifest, tests) == {
        "stays": SlowTest("now", 2, "2026-01-01", "passed", 3.0),
        "new": SlowTest("", 1),
    }


# ---------------------------------------------------------------- mutants


def test_every_mutant_fits_its_file_and_names_its_tests() -> None:
    mutants = run_mutants.read_mutants()
    assert run_mutants.faults(mutants) == []
    assert len([mutant for mutant in mutants if not mutant.equivalent]) >= 60


def test_a_mutant_that_fits_no_longer_is_named(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("a = 1\na = 1\n")
    mutant = run_mutants.Mutant("twice", "code.py", "a = 1", "a = 2", ("test_a.py",))
    assert [fault.partition(":")[0] for fault in run_mutants.faults([mutant, mutant], tmp_path)] == ["twice"] * 5
