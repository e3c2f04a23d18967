"""Everything that a lent GPU can say about training, with one command, in at most 8 minutes.

    python benchmarks/gpu.py [CASE ...] [--minutes 8] [--json FILE] [--more]
    python benchmarks/gpu.py --trial        tiny models on a CPU: the test of this script

    SIZE KERNELS   updates of a model's shape, sft and dapo, 4 micro-batches of 16,384 packed tokens, or one with
                   recomputation: tokens/s, MFU, share of element-wise kernels in the device's time, peak memory and
                   what `--plan` says
    gradients      every loss under each of `kernels`, against a float64 oracle
    lake           `train` from a lake: first update, speed against a bare loop, repetition, resumption
    trl            TRL's SFTTrainer on the same episodes, a row per episode; `trl turns`: a row per turn

Models have random weights, episodes random tokens (8 turns of 64 to 384 tokens of context and 32 to 128 of action);
nothing is downloaded. Tokens per second and MFU count each token of an episode once. All cases run in one process, with
torch's settings as `train` has them; a case that kills it, or breaks CUDA, costs a second process. What fails is a row
that says why, and the others follow. Prints a Markdown table. The JSON file also has card, versions, date, and each
figure that misses its aim; it is written after every row. Those that say most come first: with cold kernels not all fit
into the time, and --more adds to the file what it lacks.
"""

import argparse
import gc
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]

from gpu_cases import (  # noqa: E402
    SHAPES,
    WARM,
    Row,
    measure_gradients,
    measure_lake,
    measure_trl,
    measure_updates,
    name_device,
)

KERNELS = ("compile", "eager", "liger")
MARK = "@gpu "
"""Begins the lines by which the measuring process talks to the one that started it."""
AIMS: tuple[tuple[str, str, float, float], ...] = (
    ("0.5b compile", "mfu", 0.35, 1.0),
    ("1.5b compile", "mfu", 0.45, 1.0),
    ("* compile", "elementwise", 0.0, 0.3),
    ("* *", "peak_of_plan", 0.9, 1.1),
    ("gradients", "float32_error", 0.0, 1e-5),
    ("gradients", "bfloat16_error", 0.0, 1e-2),
    ("lake", "first_update_seconds", 0.0, 10.0),
    ("lake", "of_bare_loop", 0.95, 2.0),
)
"""Case, figure, and the least and the most that it should be."""


# ---------------------------------------------------------------- all cases


def list_cases(options: argparse.Namespace) -> dict[str, Callable[[], Iterator[Row]]]:
    """All cases by name, those that say most first."""
    kinds, first = list(options.kernels), options.kernels[0]
    sizes = ("tiny", "tiny-lora") if options.trial else ("0.5b", "1.5b", "4b", "8b")
    usable = [name for name in ("eager", *kinds) if name != "liger" or importlib.util.find_spec("liger_kernel")]
    peers = {
        name: partial(measure_trl, options, SHAPES[sizes[0]], per_turn=per_turn)
        for name, per_turn in (("trl", False), ("trl turns", True))
    }
    updates = {
        f"{size} {name}": partial(measure_updates, options, size, name)
        for name in kinds
        for size in sizes
        if name == first or not SHAPES[size].adapters
    }
    main_size = f"{sizes[0]} {first}"
    return {
        main_size: updates[main_size],
        f"{sizes[1]} {first}": updates[f"{sizes[1]} {first}"],
        "lake": partial(measure_lake, options, first),
        "trl": peers["trl"],
        "gradients": partial(measure_gradients, options, list(dict.fromkeys(usable))),
        **updates,
        f"{main_size} unrepeatable": partial(measure_updates, options, sizes[0], first, repeatable=False),
        **peers,
    }


def run_cases(options: argparse.Namespace, names: Sequence[str]) -> None:
    """Measure cases in this process, and print each row as a line for the process that started it."""
    import torch

    from trainer.config import TrainConfig
    from trainer.runs.offline import make_deterministic

    def tell(**message: Any) -> None:
        print(f"{MARK}{json.dumps(message)}", flush=True)

    cases = list_cases(options)
    make_deterministic(TrainConfig(model="random", loss="sft", device=options.device))
    for name in names:
        tell(begins=name)
        try:
            for row in cases[name]():
                tell(row={"case": name} | row)
        except Exception as error:
            lines = str(error).strip().splitlines()
            fault = f"{type(error).__name__}: {lines[0] if lines else ''}"
            tell(row={"case": name, "what": "", "fault": fault[:300]})
            # After an error of CUDA other than a lack of memory, the process cannot compute.
            if "CUDA error" in str(error):
                tell(ends=name)
                sys.exit(1)
        tell(ends=name)
        torch._dynamo.reset()
        gc.collect()
        if options.device.startswith("cuda"):
            torch.cuda.empty_cache()


def collect_rows(
    names: Sequence[str], build_command: Callable[[Sequence[str]], list[str]], deadline: float
) -> Iterator[Row]:
    """Yield the rows of cases that another process measures; start another one where it dies.

    Args:
        names: the cases.
        build_command: command of a process that runs some cases.
        deadline: when to end it, by the monotonic clock.
    """
    remaining = list(names)
    while remaining and time.monotonic() < deadline:
        before, running = len(remaining), None
        with subprocess.Popen(build_command(remaining), stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            timer = threading.Timer(deadline - time.monotonic(), process.kill)
            timer.start()
            for line in process.stdout:
                if not line.startswith(MARK):
                    continue
                message = json.loads(line.removeprefix(MARK))
                if "row" in message:
                    yield message["row"]
                elif "begins" in message:
                    running = message["begins"]
                    remaining.remove(running)
                else:
                    running = None
            status = process.wait()
            timer.cancel()
        if running is not None:
            why = "no time left" if time.monotonic() >= deadline else f"the process ended with status {status}"
            yield {"case": running, "what": "", "fault": why}
        if len(remaining) == before:  # it ends before its first case, and would again
            yield {"case": remaining.pop(0), "what": "", "fault": f"the process ended with status {status}"}
    yield from ({"case": name, "what": "", "fault": "not run: no time left"} for name in remaining)


def find_missed(rows: Sequence[Row]) -> list[str]:
    """A text for each figure outside its aim."""
    return [
        f"{row['case']} {row['what']}: {figure} {row[figure]:.3g}, aim {low:g} to {high:g}"
        for row in rows
        for case, figure, low, high in AIMS
        if fnmatch(row["case"], case) and figure in row and not low <= row[figure] <= high
    ]


def describe_machine(options: argparse.Namespace) -> Row:
    """Card, versions and date."""
    import torch

    packages = ("trajlake", "torch", "triton", "transformers", "liger-kernel", "trl", "flash-attn", "peft")
    versions = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return {
        "device": name_device(options.device),
        "cores": os.cpu_count(),
        "versions": versions,
        "commit": commit.stdout.strip() or None,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "tokens": options.tokens,
    }


COLUMNS = {
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "mfu": ("MFU", "{:.1%}"),
    "elementwise": ("element-wise", "{:.0%}"),
    "peak_gib": ("peak, GiB", "{:.1f}"),
    "planned_gib": ("planned, GiB", "{:.1f}"),
}
"""Figure: heading and format of its column. Others stand in the last column."""


def format_row(row: Row) -> str:
    """One line of the table."""
    cells = [row["case"], row["what"]]
    cells += [form.format(row[figure]) if figure in row else "" for figure, (_, form) in COLUMNS.items()]
    further = [
        f"{name} {figure:.3g}" for name, figure in row.items() if isinstance(figure, float) and name not in COLUMNS
    ]
    cells.append("; ".join([*further, *(row[name] for name in ("note", "fault") if name in row)]).replace("|", "/"))
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", nargs="*", help="names of cases; all by default")
    parser.add_argument("--trial", action="store_true", help="tiny models on a CPU, to see that the script works")
    parser.add_argument("--minutes", type=float, default=8.0, help="Minutes after which no case starts or resumes")
    parser.add_argument("--kernels", nargs="*", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--tokens", type=int, help="of a micro-batch; 16,384 by default")
    parser.add_argument("--micro-batches", type=int, help="of an optimizer step, about; 4 by default")
    parser.add_argument("--steps", type=int, default=3, help=f"optimizer steps that count, after {WARM} that do not")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "gpu.json")
    parser.add_argument("--more", action="store_true", help="keep the figures in the JSON file, and measure the others")
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.device = "cpu" if options.trial else "cuda"
    options.tokens = options.tokens or (512 if options.trial else 16_384)
    options.micro_batches = options.micro_batches or (1 if options.trial else 4)
    if options.run:
        run_cases(options, options.case)
        return
    import torch

    if not options.trial and not torch.cuda.is_available():
        sys.exit("torch sees no GPU here; --trial shows that the script works")
    cases = list(list_cases(options))
    if unknown := [name for name in options.case if name not in cases]:
        sys.exit(f"no case is called {', '.join(unknown)}; there are {', '.join(cases)}")
    arguments, began = sys.argv[1:], time.monotonic()
    flags = [word for word in arguments if word not in options.case]

    def build_command(names: Sequence[str]) -> list[str]:
        return [sys.executable, __file__, *names, *flags, "--run"]

    record, rows = describe_machine(options), []
    if options.more and options.json.exists():
        rows = [row for row in json.loads(options.json.read_text())["rows"] if "fault" not in row]
    measured = {row["case"] for row in rows}
    names = [name for name in options.case or cases if name not in measured]
    for row in collect_rows(names, build_command, began + 60 * options.minutes):
        rows.append(row)
        print(format_row(row), file=sys.stderr, flush=True)
        missed = [] if options.trial else find_missed(rows)
        text = json.dumps(record | {"seconds": time.monotonic() - began, "missed": missed, "rows": rows}, indent=1)
        options.json.write_text(f"{text}\n")
    print(f"{record['device']}, {options.tokens:,} tokens a micro-batch, {record['versions']}\n")
    print(f"| case | what | {' | '.join(heading for heading, _ in COLUMNS.values())} | further |")
    print(f"| --- | --- | {' | '.join('---' for _ in COLUMNS)} | --- |")
    print("\n".join(map(format_row, rows)))
    if not options.trial and (missed := find_missed(rows)):
        print("\nMissed:\n" + "\n".join(f"* {text}" for text in missed))
    if faults := [row["case"] for row in rows if "fault" in row]:
        sys.exit(f"\nwithout figures: {', '.join(faults)}")


if __name__ == "__main__":
    main()
