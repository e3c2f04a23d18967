"""A training step on the CPU against TRL's trainers: the same tokens, model, optimizer and dtype, one intra-op thread.

    python benchmarks/bench_train.py [--steps 5] [--repeat 2] [--workload rows turns] [--fastest]

    rows    episodes of one turn: 32 to 512 tokens of context, 16 to 256 of action; 16 episodes an optimizer step
    turns   episodes of 12 turns, each 40 to 80 tokens of context and 8 to 16 of action; 4 episodes an optimizer step

The lake's tokens are streamed, packed and trained by `trainer.runs.loop.run_steps`. TRL 1.16 gets the same sequences in
the same order: SFTTrainer with padded batches of several sizes, without padding, and packed; for the episodes of 12
turns also as one row per turn, its context repeated, which is what a data set of prompts and completions holds. Data
preparation is left out on both sides; the first optimizer steps are not counted. Seconds of the processor stand beside
the clock's, because a machine's load disturbs them less. Gradients are compared on the first optimizer step: mean NLL
over action tokens, and the DAPO loss of GRPOTrainer. Each run is a process of its own; the kinds alternate. `bare` is
a loop over the same rows, one at a time, with transformers' model and nothing else. Prints Markdown; where TRL cannot
be installed, its rows are missing. With --fastest TRL runs only in its fastest layout on a CPU, and gradients are not
compared. The measurement is against the fastest layout of TRL, and against the bare loop where TRL is missing.
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
from measurement import Measurement, add_measurement_option, write_measurement  # noqa: E402
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


def run_bare(folder: Path, _workload: Workload) -> dict[str, Any]:
    """Train the same rows by a plain loop; seconds of each step."""
    import time

    import torch
    from safetensors.torch import load_file
    from torch.nn.functional import cross_entropy
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    tensors = load_file(folder / "sequence.safetensors")
    lengths = tensors["lengths"].tolist()
    rows = zip(*(torch.split_with_sizes(tensors[name], lengths) for name in ("ids", "trained")), strict=True)
    wall, cpu, losses = [time.perf_counter()], [time.process_time()], []
    for size in tensors["steps"].tolist():
        step = [next(rows) for _ in range(size)]
        tokens = sum(int(trained_T.sum()) for _, trained_T in step)
        total = 0.0
        for ids_T, trained_T in step:
            labels_T = torch.where(trained_T.bool(), ids_T, -100)
            logits_T_V = model(input_ids=ids_T[None]).logits[0]
            loss = cross_entropy(logits_T_V[:-1], labels_T[1:], reduction="sum") / tokens
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        wall.append(time.perf_counter())
        cpu.append(time.process_time())
        losses.append(total)
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


def measure(folder: Path, name: str, repeat: int, *, with_peer: bool, fastest: bool) -> Measurement:
    """Print the table of one workload, and return its figures against the fastest of the others."""
    workload = WORKLOADS[name]
    exported = ours("export", folder, name)
    layouts = (("sequence", "padded", "1"),) if fastest else workload.peers
    kinds: list[tuple[str, ...]] = [("ours",), ("bare",), *(layouts if with_peer else ())]
    runs: dict[tuple[str, ...], list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for _ in range(repeat):
        for kind in kinds:
            if len(kind) == 1:
                runs[kind].append(ours(kind[0], folder, name))
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
        label = kind[0] if len(kind) == 1 else described(*kind)
        ratios = [speed[("ours",)][clock] / found[clock] for clock in ("wall", "cpu")]
        print(
            f"| {label} | {found['wall']:,.0f} | {found['wall'] / episodes:.2f} | {ratios[0]:.2f} | {ratios[1]:.2f} |"
        )
    if with_peer and not fastest:
        compare_gradients(folder, exported["losses"])
    peer = max(layouts if with_peer else [("bare",)], key=lambda kind: speed[kind]["cpu"])
    tokens = exported["tokens"]
    seconds, baseline_seconds = (tokens / speed[kind]["cpu"] for kind in (("ours",), peer))
    return Measurement(
        job="training, SFT",
        size=f"{tokens:,} tokens, a Llama of a million parameters",
        seconds=seconds,
        clock="CPU",
        throughput=speed[("ours",)]["cpu"],
        unit="tokens/s",
        peak_gb=None,
        baseline=described(*peer) if with_peer else "a bare loop with transformers",
        baseline_seconds=baseline_seconds,
        ratio=seconds / baseline_seconds,
        aims={"ratio": 0.67} if with_peer else {},
    )


def described(unit: str, layout: str, rows: str) -> str:
    """How TRL was run, in words."""
    padded = "one at a time" if rows == "1" else f"batches of {rows}, padded"
    batch = {"padded": padded, "padding_free": f"batches of {rows}, padding-free"}
    return f"TRL, a row per {unit}, {batch.get(layout, 'packed to 2,048')}"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5, help=f"optimizer steps, the first {WARM} not counted")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--workload", nargs="*", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--fastest", action="store_true", help="TRL in its fastest layout alone")
    add_measurement_option(parser)
    parser.add_argument("--task", choices=("ours", "bare", "export"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        task = {"ours": run_ours, "bare": run_bare, "export": export}[options.task]
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
            measurement = measure(Path(folder), name, options.repeat, with_peer=with_peer, fastest=options.fastest)
    write_measurement(options.measurement, measurement)


if __name__ == "__main__":
    main()
