"""The learning study end to end: killed in the middle, resumed, its page, and one run again to the bit."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.ladder.report import BEGIN, END
from benchmarks.learning.results import Result
from benchmarks.learning.settings import SMALL, TUNING_SEEDS

CHECKOUT = Path(__file__).parents[2]


def start_study(out: Path, *options: str) -> "subprocess.Popen[str]":
    """Start the study in its own process group."""
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.learning", "--out", str(out), "--environment", "taxi", "--small", *options],
        cwd=CHECKOUT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def read_files(out: Path) -> dict[str, str]:
    """Read the results of the runs that have ended."""
    return {path.name: path.read_text() for path in sorted((out / "results").glob("*.json"))}


@pytest.mark.slow("a small study is killed, resumed and reported, and a run is repeated to the bit")
def test_a_small_study_is_killed_resumed_and_reported(tmp_path: Path) -> None:
    out, page = tmp_path / "study", tmp_path / "page.md"
    first = start_study(out)
    deadline = time.monotonic() + 900
    while len(read_files(out)) < 3 and first.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGKILL)
    stdout, _ = first.communicate()
    before = read_files(out)
    assert len(before) >= 3, stdout

    stdout, _ = (second := start_study(out)).communicate(timeout=1800)
    assert second.returncode == 0, stdout
    done = read_files(out)
    assert {name: done[name] for name in before} == before
    arms, seeds = len(SMALL.arms), SMALL.seeds + len(TUNING_SEEDS)
    assert len(done) == (arms + 1) * seeds
    assert not any((out / "runs").iterdir()), "the lake of a run that was measured is not kept"
    results = [Result.model_validate_json(text) for text in done.values()]
    trained = [result for result in results if result.rounds]
    assert {len(result.rounds) for result in trained} == {1}
    assert len(trained) == arms * seeds
    fields = {"tokens", "success", "steps"}
    rollouts: dict[tuple[str, int], set[str]] = {}
    for result in trained:
        collected = json.dumps([each.model_dump(include=fields) for each in result.rounds])
        rollouts.setdefault((result.task.split, result.task.seed), set()).add(collected)
    assert all(len(texts) == 1 for texts in rollouts.values()), "all arms of a seed begin with the same rollouts"

    page.write_text(f"Before.\n{BEGIN}\n{END}\nAfter.\n")
    stdout, _ = (report := start_study(out, "--report", str(page))).communicate(timeout=300)
    assert report.returncode == 0, stdout
    assert "2 of 2" in page.read_text()
    assert [each["name"] for each in json.loads(page.with_suffix(".json").read_text())["environments"]] == ["taxi"]

    again = start_study(tmp_path / "again", "--arm", "gigpo", "--seed", "1", "--rate", str(SMALL.rates[0]))
    stdout, _ = again.communicate(timeout=600)
    assert again.returncode == 0, stdout
    (repeated,) = (tmp_path / "again" / "pilots").glob("*.json")
    times = {"seconds", "cpu_seconds"}
    kept, new = (Result.model_validate_json(text) for text in (done[repeated.name], repeated.read_text()))
    assert new.model_dump(exclude=times) == kept.model_dump(exclude=times)
