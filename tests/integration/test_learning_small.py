"""The learning study end to end on a real game: killed in the middle, gone on with, and its page."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

import lake
from benchmarks.ladder.report import BEGIN, END
from benchmarks.learning.anchors import RUN, AnchorTable
from benchmarks.learning.arms import ARMS, RATES
from benchmarks.learning.results import Result
from benchmarks.learning.settings import COIN, SMALL
from testkit.consumers import with_packages

CHECKOUT = Path(__file__).parents[2]


def study(out: Path, *options: str) -> "subprocess.Popen[str]":
    """The study in its own process, with the game's package."""
    python = with_packages("textworld_express", ("textworld-express==1.1.0",))
    return subprocess.Popen(
        [str(python), "-m", "benchmarks.learning", "--out", str(out), "--game", "coin", "--small", *options],
        cwd=CHECKOUT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def files(out: Path) -> dict[str, str]:
    """What has ended."""
    return {path.name: path.read_text() for path in sorted((out / "results").glob("*.json"))}


@pytest.mark.slow
def test_a_small_study_is_killed_goes_on_and_reports(tmp_path: Path) -> None:
    if shutil.which("java") is None:
        pytest.skip("textworld-express runs in Java")
    out, page = tmp_path / "study", tmp_path / "page.md"
    first = study(out)
    deadline = time.monotonic() + 900
    while len(files(out)) < 3 and first.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGKILL)
    stdout, _ = first.communicate()
    before = files(out)
    assert len(before) >= 3, stdout

    stdout, _ = (second := study(out)).communicate(timeout=1800)
    assert second.returncode == 0, stdout
    done = files(out)
    assert {name: done[name] for name in before} == before
    assert len(done) == SMALL.seeds + len(ARMS) * (len(RATES) + SMALL.seeds)
    assert not any((out / "runs").iterdir()), "the lake of a run that was measured is not kept"
    results = [Result.model_validate_json(text) for text in done.values()]
    trained = [result for result in results if result.rounds]
    assert {len(result.rounds) for result in trained} == {1}
    assert len(trained) == len(results) - SMALL.seeds
    by_seed = {(result.task.fold, result.task.seed): result.rounds for result in trained}
    assert all(result.rounds == by_seed[result.task.fold, result.task.seed] for result in trained), (
        "all arms of a seed begin with the same rollouts"
    )

    lk = lake.open(out / COIN.name / "lake")
    assert lk.sql("SELECT min(env_return), count(*) FROM episodes WHERE run_id = 'gold'").row(0) == (1.0, SMALL.traces)
    table = AnchorTable.model_validate_json((out / "anchors" / "coin.json").read_text())
    assert table.episodes == lk.sql("SELECT count(*) FROM episodes WHERE run_id = ?", [RUN]).item()
    assert all(0 <= row.meaningful <= row.shared <= 1 for row in table.rows)

    page.write_text(f"Before.\n{BEGIN}\n{END}\nAfter.\n")
    stdout, _ = (report_study := study(out, "--report", str(page))).communicate(timeout=300)
    assert report_study.returncode == 0, stdout
    assert "2 of 2" in page.read_text()
    assert [game["name"] for game in json.loads(page.with_suffix(".json").read_text())["games"]] == ["coin"]
