"""The offline ladder end to end: data set, knobs, every arm and seed, a stop in between, and the page."""

import json
from pathlib import Path

import pytest

from benchmarks.ladder import arms, budget, ladder, report
from benchmarks.ladder.arms import Data
from benchmarks.ladder.data import RUN, DataSet, lake_of
from benchmarks.ladder.ladder import run_ladder
from benchmarks.ladder.report import BEGIN, END, finished, write_report
from benchmarks.ladder.results import Results, Task
from benchmarks.ladder.runs import run_task
from benchmarks.ladder.settings import SMALL

ARMS = tuple(arm for arm in arms.ARMS if arm.name not in ("awr-0.5", "awr-step", "awr-discounted"))
"""One of each kind and all that the declared comparisons need; the others differ in a credit job."""


class Stopped(Exception):
    """As Ctrl-C would."""


def stop_at(number: int) -> "list[str]":
    class Lines(list[str]):
        def append(self, line: str) -> None:
            super().append(line)
            if line.startswith(f"{number}/"):
                raise Stopped

    return Lines()


def runs(out: Path) -> list[Task]:
    """Tasks of the file in order, with those that stand there twice."""
    return [Task(**json.loads(line)["task"]) for line in (out / "results.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_small_ladder_runs_stops_goes_on_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arms, "RATES", (1e-3,))
    monkeypatch.setattr(arms, "BETAS", (1.0,))
    for module in (budget, ladder, report):
        monkeypatch.setattr(module, "ARMS", ARMS)
    out, page = tmp_path / "ladder", tmp_path / "page.md"
    with pytest.raises(Stopped):
        run_ladder(out, SMALL, processes=1, say=stop_at(2).append)
    before = runs(out)
    assert len(before) == 2
    page.write_text(f"Before.\n\n{BEGIN}\nof last time\n{END}\n\nAfter.\n")
    with pytest.raises(ValueError, match=r"runs are missing"):
        write_report(out, SMALL, page)

    results = run_ladder(out, SMALL, processes=1, say=[].append)
    done = runs(out)
    trained = len(ARMS) - 1
    tuned = sum(bool(arm.knob) for arm in ARMS)
    assert done[:2] == before
    assert len(done) == len(set(done)) == tuned + len(ARMS) * SMALL.seeds
    assert not any((out / "runs").iterdir()), "the weights of a run that was measured are not kept"

    data = DataSet.model_validate_json((out / "data.json").read_text())
    compared = finished(out, SMALL).compared
    for arm in ARMS:
        for result in compared[arm.name]:
            share = data.shares.get(arm.data.value)
            expected = (0, 0) if share is None else (share.tokens, share.action_tokens)
            assert (result.tokens, result.action_tokens) == expected
    assert compared["bc"][0].tokens == compared["bc-exp"][0].tokens
    assert {compared[arm.name][0].tokens for arm in ARMS if arm.data is Data.LIVE} == {data.shares["live"].tokens}

    lk = lake_of(out)
    worlds = lk.sql("SELECT split, count(DISTINCT task_id) FROM episodes WHERE run_id = ? GROUP BY 1", [RUN])
    assert worlds.rows() == [("train", SMALL.starts * len(SMALL.noises))]
    jobs = lk.sql("SELECT count(*) FROM job_runs WHERE kind = 'train' AND status = 'succeeded'").item()
    assert jobs == len(SMALL.noises) + SMALL.seeds + SMALL.tuning_seeds + tuned + trained * SMALL.seeds

    again = run_task(out, data, done[-1])
    last_done = results.of[done[-1]]
    assert (again.successes, again.tokens) == (last_done.successes, last_done.tokens)
    assert Results(out / "results.jsonl").of == results.of

    write_report(out, SMALL, page)
    text = page.read_text()
    assert text.startswith("Before.\n")
    assert text.endswith("After.\n")
    assert "of last time" not in text
    assert all(arm.label in text for arm in ARMS)
    figures = json.loads(page.with_suffix(".json").read_text())
    assert list(figures) == [arm.name for arm in ARMS]
    assert figures["bc"]["successes_by_seed"] == [result.successes for result in compared["bc"]]
