"""A lake of format 1 that four writers of today open at once, some of them killed while they bring it up to date.

What it showed it still shows, what they bring is added once, and anyone who comes next finishes what was started.
"""

import random
import shutil
import time
from pathlib import Path

import lake
from lake.write.ingest import ingest
from testkit.fault_log import Faults, seeded
from testkit.fault_model import Truth, accounted, harm, rollouts, view, write_file
from testkit.processes import Worker, at_the_gate

FORMAT_1 = Path(__file__).resolve().parents[1] / "golden" / "lakes" / "format_1" / "lake"


@seeded()
def test_writers_that_migrate_a_lake_at_once_killed_and_run_again(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    shutil.copytree(FORMAT_1, tmp_path / "lake")
    old = view(lake.open(tmp_path / "lake").snapshot())
    truth = Truth({name: {text} for name, text in old.episodes.items()}, dict(old.episodes))
    sent, workers, files = [], [], []
    for number in range(4):
        records = rollouts(rng, f"new {number}", 6)
        sent += records
        truth.offer(records)
        files.append(write_file(tmp_path / f"{number}.jsonl", records, rng)[0])
        workers.append(Worker("ingest", tmp_path / "lake", files[-1], "run", 3))
    with Faults() as faults:
        at_the_gate(*workers)
        for worker in rng.sample(workers, 2):
            time.sleep(rng.random() * 0.3)
            worker.kill()
        killed = [worker.wait() for worker in workers].count(-9)
        faults.inject("kill -9 of one of four writers that migrate a lake of format 1", killed)
        lk = lake.open(tmp_path / "lake")
        state = view(lk.snapshot())
        faults.found(harm(state, truth))
        truth.saw(state)
        for file in files:
            ingest(lk, file, run_id="run")
        truth.took(sent)
        faults.found(harm(view(lk.snapshot()), truth))
        accounted(lk)
