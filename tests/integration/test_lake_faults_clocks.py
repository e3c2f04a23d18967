"""A clock that jumps, by hours and by 40 days, back and forth, between the commits of writers, jobs and maintenance.

Nothing that decides what is visible may go by the clock: versions and write_ids do. What goes by it (a moment asked
for, retention) may be off by the jump and must still show whole episodes only.
"""

import os
import random
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest
from deltalake import DeltaTable

from lake import Lake
from lake.errors import LakeAccessError, UsageError
from pipelines.credit import GiGPO
from pipelines.credit.job import run_credit
from testkit.clocks import open_with_clock, set_clock
from testkit.fault_log import Faults, Harm, seeded
from testkit.fault_model import Truth, accounted, harm, rollouts, view, write_file
from testkit.lake_worker import compact
from testkit.processes import Worker, at_the_gate

JUMPS = [1, 5, 24, 24 * 40]
"""Hours."""


def jump(lk: Lake, rng: random.Random, faults: Faults) -> None:
    """Set the clock of everybody forth or back."""
    set_clock(lk.uri, rng.choice(JUMPS) * rng.choice([-1, 1]) * rng.random())
    faults.inject("clock jumps between two commits")


def newest_job_is_latest(lk: Lake, faults: Faults) -> None:
    """The job that ended last is the one whose result stands, no matter what the clock said when it ended."""
    newest = run_credit(lk, GiGPO(singleton="raw"), force=True).job_id
    latest = lk.sql("SELECT DISTINCT job_id FROM latest_advantages")["job_id"].to_list()
    faults.found(Harm(half_visible=int(latest != [newest])))
    assert run_credit(lk, GiGPO(singleton="raw")).skipped


def any_moment_is_whole(lk: Lake, truth: Truth, rng: random.Random, faults: Faults) -> None:
    """What the lake showed at some time, by clocks that were wrong: perhaps not what it showed, but never a half."""
    now = datetime.now(UTC)
    for _ in range(2):
        moment = now + timedelta(hours=rng.choice(JUMPS) * rng.choice([-1, 1]) * rng.random())
        # Before the lake was made, or vacuumed by a clock that was 40 days ahead: then it says so.
        with suppress(UsageError, LakeAccessError):
            faults.found(harm(view(lk.at(moment)), Truth(offered=truth.offered)))


@seeded()
def test_the_clock_jumps_between_the_commits_of_a_write(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    lk, truth = open_with_clock(tmp_path / "lake"), Truth()
    with Faults() as faults:
        for number in range(2 if seed else 1):
            records = rollouts(rng, f"round {number}", 4)
            file, _ = write_file(tmp_path / f"{number}.jsonl", records, rng)
            truth.offer(records)
            worker = Worker("ingest", lk.uri, file, "run", rng.randint(2, 4), faults="commit 0 before hold")
            at_the_gate(worker)
            while (where := worker.hear()) is not None and not where.startswith("{"):
                jump(lk, rng, faults)
                state = view(lk.snapshot())
                faults.found(harm(state, truth))
                truth.saw(state)
                if rng.random() < 0.3:
                    compact(lk)
                    lk.vacuum()
                worker.go()
            assert worker.wait() == 0, worker.error
            truth.took(records)
            faults.found(harm(view(lk.snapshot()), truth))
            jump(lk, rng, faults)
            newest_job_is_latest(lk, faults)
            any_moment_is_whole(lk, truth, rng, faults)
        accounted(lk)


@seeded()
def test_the_clock_jumps_between_jobs(tmp_path: Path, seed: int) -> None:
    """Each covers more than the one before; the newest result is shown, a stale one never again."""
    rng = random.Random(seed)
    lk = open_with_clock(tmp_path / "lake")
    with Faults() as faults:
        for number in range(4 if seed else 2):
            with lk.job(kind="collect", run_id="run") as job:
                # Siblings of the same tasks, so that a stale result would be a result for other groups.
                job.record([record for n, record in enumerate(rollouts(rng, "task", 16)) if n % 4 == number])
            jump(lk, rng, faults)
            newest_job_is_latest(lk, faults)
            steps = lk.scan("steps").select(pl.len()).collect().item()
            assert lk.sql("SELECT count(*) AS n FROM latest_advantages")["n"].to_list() == [steps]


def aged(folder: Path, days: float) -> None:
    """Let every file of a lake be that much older."""
    for file in folder.rglob("*"):
        if file.is_file():
            then = file.stat().st_mtime - days * 86400
            os.utime(file, (then, then))


@pytest.mark.slow("A snapshot named 40 days ago opens, of many commits, when every other version of then is gone.")
def test_a_snapshot_named_40_days_ago_opens(tmp_path: Path) -> None:
    """After log clean-up, compaction and vacuum; every other version of then is gone."""
    rng = random.Random(0)
    lk, truth = open_with_clock(tmp_path / "lake", -24 * 40), Truth()
    unnamed, named = 0, {}
    for number in range(12):
        records = rollouts(rng, f"round {number}", 4)
        lk.append(records, run_id="run")
        truth.took(records)
        if number == 8:
            lk.name_snapshot("then")
            named = dict(truth.stands)
        if number == 10:
            unnamed = lk.snapshot().versions["episodes"]
    aged(tmp_path / "lake", 40)
    set_clock(lk.uri, 0)
    compact(lk)
    for name in ("episodes", "steps", "tokens", "jobs"):
        table = DeltaTable(f"{lk.uri}/{name}")
        table.create_checkpoint()
        table.cleanup_metadata()
    aged(tmp_path / "lake", 8)
    set_clock(lk.uri, 24 * 8)
    assert any(done.deleted_files for done in lk.vacuum())
    again = open_with_clock(lk.uri, 24 * 8)
    assert view(again.at("then")).episodes == named
    assert again.at("then").sql("FROM steps")["episode_id"].n_unique() == len(named)
    assert view(again.snapshot()).episodes == truth.stands
    with pytest.raises(LakeAccessError, match="gone"):
        again.at(unnamed)
