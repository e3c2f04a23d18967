"""Between every two commits of a write: a snapshot taken there is whole, and a job run there counts nothing wrongly.

A writer is held before each of its commits. In each gap a snapshot is taken, and an incremental job (credit)
is run by another process of the same lake. Afterwards the snapshots show what they showed, reopened by their versions,
and the job, run again, covers every step of every episode once.
"""

import random
from pathlib import Path

import pytest

import lake
from lake import Lake
from lake.errors import DataRefusedError
from pipelines.credit import GiGPO
from pipelines.credit.job import run_credit
from testkit.episodes import assert_same, contents
from testkit.examples import mostly_slow
from testkit.fault_log import Faults, seeded
from testkit.fault_model import Truth, harm, rollouts, view, write_file
from testkit.processes import Worker, at_the_gate


def credit_in_the_gap(lk: Lake) -> int:
    """Run the job on what is visible now; how many steps its series covers: all of the episodes it saw, each once."""
    before = lk.snapshot()
    try:
        report = run_credit(lk, GiGPO())
    except DataRefusedError:
        assert before.scan("episodes").collect().is_empty()
        return 0
    rows = lk.sql("SELECT episode_id, step_index FROM latest_advantages WHERE series_id = ?", [report.series_id])
    steps = before.scan("steps").select("episode_id", "step_index").collect()
    assert rows.sort(rows.columns).equals(steps.sort(steps.columns))
    return rows.height


@seeded()
def test_a_snapshot_and_a_job_between_every_two_commits(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    lk, truth = lake.open(tmp_path / "lake", create=True), Truth()
    records = rollouts(rng, "task", 5)
    file, _ = write_file(tmp_path / "file.jsonl", records, rng)
    truth.offer(records)
    worker = Worker("ingest", lk.uri, file, "run", rng.randint(2, 4), faults="commit 0 before hold")
    at_the_gate(worker)
    snapshots, covered = [], [0]
    with Faults() as faults:
        # The report is the line after the last gap.
        while (where := worker.hear()) is not None and not where.startswith("{"):
            snapshot = lk.snapshot()
            state = view(snapshot)
            faults.found(harm(state, truth))
            truth.saw(state)
            snapshots.append((snapshot.versions, contents(snapshot)))
            faults.inject("snapshot between two commits of a write")
            covered.append(credit_in_the_gap(lk))
            faults.inject("job run between two commits of a write")
            worker.go()
        assert worker.wait() == 0, worker.error
        assert covered == sorted(covered), "no job ever sees less than one before it"
        truth.took(records)
        faults.found(harm(view(lk.snapshot()), truth))
        assert credit_in_the_gap(lk) == sum(len(record.steps) for record in records)
        for versions, expected_state in snapshots:
            assert_same(contents(lk.at(versions)), expected_state)


@pytest.mark.parametrize("point", mostly_slow(["commit:advantages", "commit:jobs"], "commit:jobs"))
def test_a_reader_in_the_gap_of_a_job_sees_none_of_its_rows(tmp_path: Path, point: str) -> None:
    """Judgements are committed, the terminal row is not: they do not exist; the same job run next to it is complete."""
    lk = lake.open(tmp_path / "lake", create=True)
    with lk.job(kind="collect", run_id="run") as job:
        job.record(rollouts(random.Random(1), "task", 8))
    number = 1 if point == "commit:advantages" else 2
    side = "after" if point == "commit:advantages" else "before"
    worker = Worker("credit", lk.uri, faults=f"{point} {number} {side} hold")
    at_the_gate(worker)
    assert worker.hear() == f"{side} {point}"
    with Faults() as faults:
        faults.inject("snapshot between a job's rows and its terminal row")
        assert lk.scan("advantages").collect().is_empty()
        assert credit_in_the_gap(lk) == lk.scan("steps").collect().height
        worker.go()
        worker.finish()
        per_job = lk.sql("SELECT job_id, count(*) AS n FROM advantages GROUP BY job_id")
        assert per_job["n"].to_list() == [lk.scan("steps").collect().height] * 2
        latest = lk.sql("SELECT episode_id, step_index FROM latest_advantages")
        assert not latest.is_duplicated().any()
