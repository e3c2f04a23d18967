"""The script for a lent GPU, on a CPU: what it says, what a fault costs, the same tokens for peers, and the pack."""

import importlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch  # noqa: TID253 - a script that does nothing without it

from trainer.monitor import measure_shape
from trainer.policy.model import PackedPolicy

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a script of the benchmarks."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


def test_the_gpu_script_says_all_on_a_cpu_and_a_case_that_fails_is_a_row(tmp_path: Path) -> None:
    command: list[str | Path] = [sys.executable, BENCHMARKS / "gpu.py", "--trial", "--kernels", "eager", "liger"]
    command += ["--json", tmp_path / "gpu.json", "--steps", "1"]
    cases = ("tiny eager", "tiny liger", "gradients", "lake", "tiny-lora eager")
    done = subprocess.run([*command, *cases], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    record = json.loads((tmp_path / "gpu.json").read_text())
    assert record["versions"]["torch"] == torch.__version__
    rows = {(row["case"], row["what"]): row for row in record["rows"]}
    assert list(rows) == [
        *(("tiny eager", loss) for loss in ("sft", "dapo")),
        ("tiny liger", ""),
        *(("gradients", f"eager, {dtype}") for dtype in ("float32", "bfloat16")),
        *(("lake", what) for what in ("first update", "train", "repetition", "resumption")),
        *(("tiny-lora eager", loss) for loss in ("sft", "dapo")),
    ]
    assert [row["case"] for row in record["rows"] if "fault" in row] == ["tiny liger"]
    assert "needs a GPU" in rows["tiny liger", ""]["fault"]
    for case in ("tiny eager", "tiny-lora eager"):
        row = rows[case, "dapo"]
        assert row["tokens_per_second"] > 0
        assert row["products"] + row["attention"] + row["elementwise"] == pytest.approx(1)
    assert rows["gradients", "eager, float32"]["float32_error"] < 1e-5
    assert rows["gradients", "eager, bfloat16"]["bfloat16_error"] < 2e-2
    assert rows["lake", "repetition"]["weights_error"] == rows["lake", "resumption"]["weights_error"] == 0
    assert done.stdout.count("\n| ") == len(rows) + 2


def test_a_case_that_kills_its_process_costs_its_own_figures_alone(benchmark: Any) -> None:
    script = benchmark("gpu")
    lines = f"""
import json, os, sys
def tell(**message): print({script.MARK!r} + json.dumps(message), flush=True)
for name in sys.argv[1:]:
    tell(begins=name)
    if name == "b": os.kill(os.getpid(), 9)
    tell(row={{"case": name, "what": ""}})
    tell(ends=name)
"""
    started = []

    def build_command(names: Sequence[str]) -> list[str]:
        started.append(list(names))
        return [sys.executable, "-c", lines, *names]

    rows = list(script.collect_rows(["a", "b", "c"], build_command, time.monotonic() + 60))
    assert started == [["a", "b", "c"], ["c"]]
    assert [(row["case"], "fault" in row) for row in rows] == [("a", False), ("b", True), ("c", False)]
    late = list(script.collect_rows(["a"], build_command, time.monotonic() - 1))
    assert [row["fault"] for row in late] == ["not run: no time left"]


def test_figures_outside_their_aims_are_named(benchmark: Any) -> None:
    rows = [
        {"case": "1.5b compile", "what": "sft", "mfu": 0.44, "elementwise": 0.29, "peak_of_plan": 1.2},
        {"case": "lake", "what": "train", "of_bare_loop": 0.96},
    ]
    missed = benchmark("gpu").find_missed(rows)
    assert [text.split(" ", 4)[3] for text in missed] == ["mfu", "peak_of_plan"]


def test_the_operations_of_an_update_are_those_of_its_tokens(benchmark: Any) -> None:
    cases = benchmark("gpu_cases")
    shape = measure_shape(PackedPolicy(cases.make_model(cases.TINY, "cpu")))
    episodes = cases.make_episodes(512, 512)
    lengths = episodes.lengths_E
    # One layer: projections of queries and results, of keys and values (2 heads of 32 for queries as for keys), MLP.
    body = 2 * (2 * 64 * 64 + 2 * 64 * 64 + 3 * 64 * 128)
    attention = 6 * 2 * 64 * sum(length**2 for length in lengths)
    expected = 6 * body * sum(lengths) + attention + 6 * 512 * 64 * episodes.trained
    assert cases.update_operations(shape, episodes) == expected


def test_a_pack_is_parts_that_unpack_to_the_same_files(benchmark: Any, tmp_path: Path) -> None:
    script = benchmark("gpu_pack")
    site, out, folder = tmp_path / "site", tmp_path / "pack", tmp_path / "there"
    (site / "trainer").mkdir(parents=True)
    (site / "trainer" / "__init__.py").write_text("")
    (site / "trainer" / "config.py").write_text("")
    noise = np.random.default_rng(0).bytes(5000)
    (site / "noise.bin").write_bytes(noise)
    parts = script.write_parts(site, out, ["torch==0.1"], size=2000)
    assert len(parts) > 2
    assert max(part.stat().st_size for part in parts) == 2000
    command = ["bash", str(out / "install.sh"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (folder / "noise.bin").read_bytes() == noise
    assert "torch: " in done.stdout
    parts[1].write_bytes(b"damaged")
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0


def test_both_sides_of_the_gpu_script_get_the_same_tokens(benchmark: Any) -> None:
    script = benchmark("gpu_cases")
    episodes = script.make_episodes(12_000, 512)
    batches = script.make_batches(episodes, 6_000, pinned=False)
    assert len(batches) > 1
    assert all(batch.boundaries[-1] <= 6_000 for batch in batches)
    assert sum(float(batch.weight_N.sum()) for batch in batches) == pytest.approx(1, rel=1e-4)
    packed = []
    for batch in batches:
        labels_T = torch.full((batch.boundaries[-1],), -100)
        labels_T[batch.predictor_N + 1] = batch.target_N
        for low, high in zip(batch.boundaries[:-1], batch.boundaries[1:], strict=True):
            packed.append((batch.input_ids_T[low:high].tolist(), labels_T[low:high].tolist()))
    rows = [(row["input_ids"], row["labels"]) for row in script.make_rows(episodes, per_turn=False)]
    assert sorted(packed) == sorted(rows)


def test_rows_per_turn_train_each_token_once(benchmark: Any) -> None:
    script = benchmark("gpu_cases")
    episodes = script.make_episodes(6_000, 512)
    episode_rows, turns = (script.make_rows(episodes, per_turn=per_turn) for per_turn in (False, True))
    assert len(turns) == script.TURNS * len(episode_rows)
    for number, row in enumerate(episode_rows):
        mine = turns[script.TURNS * number : script.TURNS * (number + 1)]
        assert all(part["input_ids"] == row["input_ids"][: len(part["input_ids"])] for part in mine)
        stacked = np.full((len(mine), len(row["labels"])), -100)
        for at, part in enumerate(mine):
            stacked[at, : len(part["labels"])] = part["labels"]
        assert stacked.max(axis=0).tolist() == row["labels"]
        assert ((stacked != -100).sum(axis=0) <= 1).all()
