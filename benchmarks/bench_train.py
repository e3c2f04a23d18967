"""A training step on the CPU against TRL's trainers: the same tokens, model, optimizer and dtype, one intra-op thread.

    python benchmarks/bench_train.py [--steps 5] [--repeat 2] [--workload rows turns]

    rows    episodes of one turn: 32 to 512 tokens of context, 16 to 256 of action; 16 episodes an optimizer step
    turns   episodes of 12 turns, each 40 to 80 tokens of context and 8 to 16 of action; 4 episodes an optimizer step

The lake's tokens are streamed, packed and trained by `trainer.runs.loop.run_steps`. TRL 1.16 gets the same sequences in
the same order: SFTTrainer with padded batches of several sizes, without padding, and packed; for the episodes of 12
turns also as one row per turn, its context repeated, which is what a data set of prompts and completions holds. Data
preparation is left out on both sides; the first optimizer steps are not counted. Seconds of the processor stand beside
the clock's, because a machine's load disturbs them less. Gradients are compared on the first optimizer step: mean NLL
over action tokens, and the DAPO loss of GRPOTrainer. Each measurement is a process of its own; the kinds alternate.
Prints Markdown for docs/benchmarks.md; without TRL, where it cannot be installed, this project's figures alone.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import peers  # noqa: E402
from training_rows import WORKLOADS, Workload, configuration, export, make_lake, make_model  # noqa: E402

WARM = 2
"""Optimizer steps that are not counted."""


def run_ours(folder: Path, workload: Workload) -> dict[str, Any]:
    """Train every step; seconds of each."""
    import time

    import torch

    import lake
    from trainer.data.plan import Plan
    from trainer.data.selection import select
    from trainer.losses import Needs
    from trainer.runs.factories import make_backend
    from trainer.runs.loop import run_steps

    torch.set_num_threads(1)
    config = configuration(folder, workload)
    backend = make_backend(config)
    snapshot = lake.open(folder / "lake").snapshot()
    plan = Plan(select(snapshot, config, Needs()), config)
    wall, cpu, losses = [time.perf_counter()], [time.process_time()], []
    for report in run_steps(backend, snapshot, plan, config, peak=1e-4):
        wall.append(time.perf_counter())
        cpu.append(time.process_time())
        losses.append(report.metrics["loss"])
    return {"wall": np.diff(wall).tolist(), "cpu": np.diff(cpu).tolist(), "loss": statistics.mean(losses)}


def in_process(command: Sequence[str | Path]) -> dict[str, Any]:
    """What a process printed as the last line of its output, as JSON; its own errors show where it fails."""
    done = subprocess.run(list(map(str, command)), env=peers.environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def peer_command(task: str, folder: Path, kind: str) -> list[str | Path]:
    """The command of a run of TRL."""
    script = Path(__file__).with_name("peer_trl.py")
    tokens = folder / f"{kind}.safetensors"
    return [peers.python_of("trl"), script, task, "--model", folder / "model", "--tokens", tokens]


def ours(task: str, folder: Path, workload: str) -> dict[str, Any]:
    """A run of this project."""
    return in_process([sys.executable, __file__, "--task", task, "--workload", workload, "--folder", folder])


def compare_gradients(folder: Path, losses: dict[str, float]) -> None:
    """Print how far the gradients of the first optimizer step are from TRL's."""
    from safetensors.torch import load_file

    print("\n| loss | TRL | loss here | loss of TRL | largest gradient | largest difference | relative (norm) |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    runs: tuple[tuple[str, str, str, list[str]], ...] = (
        ("sft", "SFTTrainer, padded", "sft", ["--layout", "padded", "--rows", "4"]),
        ("sft", "SFTTrainer, padding-free", "sft", ["--layout", "padding_free", "--rows", "4"]),
        ("dapo", "GRPOTrainer, loss dapo", "grpo", []),
    )
    for loss, name, task, extra in runs:
        path = folder / "theirs.safetensors"
        command = [*peer_command(task, folder, "sequence"), "--gradients", path, *extra]
        found = in_process(command)
        mine, theirs = load_file(folder / f"ours_{loss}.safetensors"), load_file(path)
        if mine.keys() != theirs.keys():
            sys.exit(f"gradients of other parameters: {sorted(mine.keys() ^ theirs.keys())}")
        largest = max(g.abs().max().item() for g in theirs.values())
        apart = max((mine[key] - theirs[key]).abs().max().item() for key in mine)
        square = math.fsum((mine[key] - theirs[key]).double().square().sum().item() for key in mine)
        norm = math.fsum(g.double().square().sum().item() for g in theirs.values())
        relative = math.sqrt(square / norm)
        figures = f"{losses[loss]:.6f} | {found['loss']:.6f} | {largest:.3g} | {apart:.2g} | {relative:.2g}"
        print(f"| {loss} | {name} | {figures} |")


def measure(folder: Path, name: str, repeat: int, *, with_peer: bool) -> None:
    """Print the table of one workload."""
    workload = WORKLOADS[name]
    exported = ours("export", folder, name)
    kinds: list[tuple[str, ...]] = [("ours",), *(workload.peers if with_peer else ())]
    runs: dict[tuple[str, ...], list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for _ in range(repeat):
        for kind in kinds:
            if kind == ("ours",):
                runs[kind].append(ours("ours", folder, name))
            else:
                unit, layout, rows = kind
                extra = ["--layout", layout, "--rows", rows]
                runs[kind].append(in_process([*peer_command("sft", folder, unit), *extra]))

    def rate(run: dict[str, Any], clock: str) -> float:
        tokens: int = exported["tokens"]
        seconds: list[float] = run[clock]
        return tokens / len(seconds) / statistics.mean(seconds[WARM:])

    speed = {
        kind: {clock: statistics.median(rate(run, clock) for run in found) for clock in ("wall", "cpu")}
        for kind, found in runs.items()
    }
    episodes = exported["tokens"] / (workload.episodes * len(runs[("ours",)][0]["wall"]))
    print(f"\n{name}: {episodes:,.0f} tokens an episode, {workload.episodes} episodes an optimizer step")
    print("\n| trainer | tokens/s | episodes/s | ours / this | of processor time |")
    print("| --- | --- | --- | --- | --- |")
    for kind, found in speed.items():
        told = "ours" if kind == ("ours",) else described(*kind)
        ratios = [speed[("ours",)][clock] / found[clock] for clock in ("wall", "cpu")]
        print(f"| {told} | {found['wall']:,.0f} | {found['wall'] / episodes:.2f} | {ratios[0]:.2f} | {ratios[1]:.2f} |")
    if with_peer:
        compare_gradients(folder, exported["losses"])


def described(unit: str, layout: str, rows: str) -> str:
    """How TRL was run, in words."""
    batch = {"padded": f"batches of {rows}, padded", "padding_free": f"batches of {rows}, padding-free"}
    return f"TRL, a row per {unit}, {batch.get(layout, 'packed to 2,048')}"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5, help=f"optimizer steps, the first {WARM} not counted")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--workload", nargs="*", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--task", choices=("ours", "export"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        task = {"ours": run_ours, "export": export}[options.task]
        print(json.dumps(task(options.folder, WORKLOADS[options.workload[0]])))
        return
    with_peer = True
    try:
        peers.python_of("trl")
    except peers.PeerError as error:
        print(f"TRL is left out: {error}", file=sys.stderr)
        with_peer = False
    for name in options.workload:
        with tempfile.TemporaryDirectory() as folder:
            make_model(Path(folder, "model"))
            make_lake(Path(folder, "lake"), WORKLOADS[name], options.steps)
            measure(Path(folder), name, options.repeat, with_peer=with_peer)


if __name__ == "__main__":
    main()
