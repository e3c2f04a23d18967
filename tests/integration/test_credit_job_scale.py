"""Slow: credit over 100M steps, in its own process, in bounded memory.

States are hashes without texts, as in a lake whose texts stay elsewhere; the lake is generated in place by the
benchmarks' generator. About 8 GB of disk.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lake

ROOT = Path(__file__).parents[2]
STEPS = 100_000_000
PEAK_GB = 4.0
MAKE = "import sys; sys.path[:0] = sys.argv[3:]; from synthetic import steps_lake; from pathlib import Path; "
MAKE += "steps_lake(Path(sys.argv[1]), int(sys.argv[2]), text=False)"


@pytest.mark.slow
def test_100_million_steps_take_less_than_4_gb(tmp_path: Path) -> None:
    if shutil.disk_usage(tmp_path).free < 16 << 30:
        pytest.skip("needs 16 GB of free disk")
    path = tmp_path / "lake"
    benchmarks = ROOT / "benchmarks"
    subprocess.run([sys.executable, "-c", MAKE, str(path), str(STEPS), str(benchmarks), str(ROOT)], check=True)
    command = [sys.executable, str(benchmarks / "bench_credit.py"), "--task", "credit_all", "--lake", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["peak_gb"] < PEAK_GB
    counted = lake.open(path).sql("SELECT count(*) AS steps, count(DISTINCT group_id) AS groups FROM advantages")
    assert counted.rows() == [(STEPS, STEPS // 20 // 8)]
    shutil.rmtree(path)
