"""Tokens per second, MFU and peak memory of training Qwen2-shaped models on one device, against TRL where it is there.

    python benchmarks/gpu_train.py [--size 0.5b 1.5b] [--loss sft dapo] [--tokens 16384] [--recompute]
    python benchmarks/gpu_train.py --device cpu --size tiny --tokens 512        (a check that the script works)

One file: it needs trajlake installed, and takes TRL into the comparison if `trl` is importable. Nothing is downloaded:
models have random weights, episodes random tokens (8 turns of 64 to 384 tokens of context and 32 to 128 of action).
Weights are float32 and matrix products bfloat16, on both sides. This project packs episodes as sequences with 8 action
spans into micro-batches; TRL's SFTTrainer gets the same episodes as one row each, and as one row per turn with its
context repeated, without padding where flash-attn is installed, else padded. Tokens per second and MFU count each token
of an episode once, so they compare what an update is worth: `trainer.monitor` says which operations. Each
measurement is a process of its own; one that does not fit says so and the others go on. Prints a Markdown table.
"""

import argparse
import importlib.util
import json
import platform
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[1])]

if TYPE_CHECKING:
    from trainer.data.batch import PackedBatch
    from trainer.monitor import ModelShape

QWEN2 = {
    "vocab_size": 151_936,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32_768,
}
SIZES: dict[str, dict[str, Any]] = {
    "tiny": QWEN2
    | {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    },
    "0.5b": QWEN2 | {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5b": QWEN2
    | {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
}
"""Shapes of Qwen2 models (arXiv 2407.10671, table 1), and one to check the script with."""
TURNS, CONTEXT, ACTION = 8, (64, 384), (32, 128)
GIB = 1 << 30
WARM = 2
"""Optimizer steps that are not counted: kernels are compiled and memory is taken."""
OURS, SEQUENCES, PER_TURN = "trajlake", "TRL, a row per episode", "TRL, a row per turn"


@dataclass(frozen=True)
class Episodes:
    """The episodes of one optimizer step. Axes: `_M` turns, `_E` episodes."""

    context_M: list[np.ndarray]
    """Ids of the context that each turn adds."""
    action_M: list[np.ndarray]
    """Ids of its action, which carries loss."""

    @property
    def lengths_E(self) -> list[int]:
        """Tokens of each episode."""
        turns = [len(ids) + len(chosen) for ids, chosen in zip(self.context_M, self.action_M, strict=True)]
        return [sum(turns[first : first + TURNS]) for first in range(0, len(turns), TURNS)]

    @property
    def trained(self) -> int:
        """Tokens that carry loss."""
        return sum(map(len, self.action_M))


def make_episodes(tokens: int, vocabulary: int, seed: int = 0) -> Episodes:
    """Episodes of 8 turns, as many as fit into so many tokens, at least one; the same for the same arguments."""
    rng = np.random.default_rng(seed)
    context_M: list[np.ndarray] = []
    action_M: list[np.ndarray] = []
    used = 0
    while True:
        turns = [
            [rng.integers(3, vocabulary, rng.integers(low, high + 1), np.int32) for low, high in (CONTEXT, ACTION)]
            for _ in range(TURNS)
        ]
        used += sum(len(ids) for turn in turns for ids in turn)
        if context_M and used > tokens:
            return Episodes(context_M, action_M)
        context_M += [turn[0] for turn in turns]
        action_M += [turn[1] for turn in turns]


def make_batches(episodes: Episodes, budget: int, *, pinned: bool) -> "list[PackedBatch]":
    """The optimizer step's micro-batches, packed and laid out as the stream does; weights for the mean over tokens."""
    from trainer.data.collate import MemberColumns, MemberWeights, TokenArrays, collate
    from trainer.data.plan import pack

    rng = np.random.default_rng(1)
    bins = pack(episodes.lengths_E, budget)
    turns = [TURNS * episode + turn for chosen in bins for episode in chosen for turn in range(TURNS)]
    context_M, action_M = ([ids_M[turn] for turn in turns] for ids_M in (episodes.context_M, episodes.action_M))
    n_action_M = np.array([len(ids) for ids in action_M])
    members = MemberColumns(
        n_context_M=np.array([len(ids) for ids in context_M]),
        n_action_M=n_action_M,
        trained_M=np.ones(len(turns), np.bool_),
        loss_tokens_M=n_action_M,
        step_index_M=np.array([turn % TURNS for turn in turns], np.int32),
        advantage_M=rng.normal(size=len(turns)).astype(np.float32),
    )
    tokens = TokenArrays(
        context_C=np.concatenate(context_M),
        action_A=np.concatenate(action_M),
        mask_A=None,
        logprobs_A=rng.uniform(-12.5, -11.5, episodes.trained).astype(np.float32),
    )
    shares = MemberWeights(np.full(len(turns), 1 / episodes.trained, np.float32))
    members_Q = np.full(len(turns) // TURNS, TURNS)
    return collate(members, members_Q, tokens, shares, [len(chosen) for chosen in bins], pinned=pinned)


def make_rows(episodes: Episodes, *, per_turn: bool) -> list[dict[str, list[int]]]:
    """The same episodes as SFTTrainer takes them: labels are -100 where a token carries no loss."""
    rows = []
    for first in range(0, len(episodes.action_M), TURNS):
        ids: list[int] = []
        labels: list[int] = []
        for turn in range(first, first + TURNS):
            if per_turn:
                labels = [-100] * len(ids)
            ids = ids + episodes.context_M[turn].tolist() + episodes.action_M[turn].tolist()
            labels = labels + [-100] * len(episodes.context_M[turn]) + episodes.action_M[turn].tolist()
            if per_turn or turn == first + TURNS - 1:
                rows.append({"input_ids": ids, "labels": labels})
    return rows


def make_model(options: argparse.Namespace, size: str) -> Any:
    """A Qwen2 with random float32 weights, made on the device; from here on the limit of memory holds."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    if options.memory_limit:
        limit_memory(options.device, options.memory_limit)
    torch.manual_seed(0)
    with torch.device(options.device):
        return Qwen2ForCausalLM(Qwen2Config(**SIZES[size]))  # type: ignore[no-untyped-call]


# ---------------------------------------------------------------- measuring, each in a process of its own


class Clock:
    """Seconds between optimizer steps, and peak memory.

    Args:
        device: torch device.
    """

    def __init__(self, device: str) -> None:
        self.on_gpu = device.startswith("cuda")
        self.times: list[float] = []

    def note(self) -> None:
        """An optimizer step ends, or the first begins."""
        import torch

        if self.on_gpu:
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())

    def figures(self) -> dict[str, float]:
        """Median seconds of an optimizer step, and GiB at most: of tensors on a GPU, of the process on a CPU."""
        import torch

        peak = (
            torch.cuda.max_memory_allocated()
            if self.on_gpu
            else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        )
        return {"seconds": statistics.median(np.diff(self.times)[WARM:].tolist()), "peak": peak / GIB}


def run_ours(options: argparse.Namespace, size: str, loss_name: str) -> dict[str, Any]:
    """Train with this project's backend."""
    from trainer.backends.base import SingleDevice
    from trainer.config import OptimizerConfig, TrainConfig
    from trainer.monitor import measure_shape
    from trainer.policy.model import PackedPolicy

    episodes = make_episodes(options.tokens * options.micro_batches, SIZES[size]["vocab_size"])
    batches = make_batches(episodes, options.tokens, pinned=options.device.startswith("cuda"))
    policy = PackedPolicy(make_model(options, size), dtype="bfloat16", gradient_checkpointing=options.recompute)
    backend = SingleDevice(policy, OptimizerConfig())
    config = TrainConfig(model="random", loss=loss_name, dtype="bfloat16")
    loss, clock = config.loss, Clock(options.device)
    clock.note()
    for _ in range(WARM + options.steps):
        for batch in batches:
            backend.forward_backward(batch, loss)
        backend.optim_step(1e-5)
        clock.note()
    told = {"operations": update_operations(measure_shape(policy), episodes), "tokens": sum(episodes.lengths_E)}
    return clock.figures() | told | {"attention": policy.attention, "micro": len(batches)}


def update_operations(shape: "ModelShape", episodes: Episodes) -> float:
    """Operations of an update that keeps each episode one sequence."""
    lengths = episodes.lengths_E
    squared = sum(length**2 for length in lengths)
    return shape.update_operations(tokens=sum(lengths), squared_lengths=squared, loss_tokens=episodes.trained)


def run_trl(options: argparse.Namespace, size: str, *, per_turn: bool) -> dict[str, Any]:
    """Train with TRL's SFTTrainer."""
    from datasets import Dataset  # type: ignore[import-not-found]
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found]

    from trainer.policy.tiny_model import build_tokenizer

    episodes = make_episodes(options.tokens * options.micro_batches, SIZES[size]["vocab_size"])
    rows = make_rows(episodes, per_turn=per_turn)
    model = make_model(options, size)
    flash = options.device.startswith("cuda") and importlib.util.find_spec("flash_attn") is not None
    attention = "flash_attention_2" if flash else "sdpa"
    model.set_attn_implementation(attention)
    lengths = [len(row["input_ids"]) for row in rows]
    together = max(1, int(options.tokens // (statistics.mean(lengths) if flash else max(lengths))))
    clock = Clock(options.device)

    class Steps(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            clock.note()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clock.note()

    steps = WARM + options.steps
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            output_dir=folder,
            use_cpu=not clock.on_gpu,
            bf16=True,
            gradient_checkpointing=options.recompute,
            per_device_train_batch_size=together,
            gradient_accumulation_steps=-(-len(rows) // together),
            padding_free=flash,
            max_length=None,
            max_steps=steps,
            learning_rate=1e-5,
            lr_scheduler_type="constant",
            logging_steps=10**6,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            train_sampling_strategy="sequential",
            dataset_kwargs={"skip_prepare_dataset": True},
        )
        SFTTrainer(
            model=model,
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=build_tokenizer(["open the door"], 300),
            callbacks=[Steps()],
        ).train()
    told = {"tokens": sum(episodes.lengths_E), "attention": attention, "micro": -(-len(rows) // together)}
    return clock.figures() | told


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One measurement, or in `fault` why there is none."""
    import torch

    size, who, loss = options.size[0], options.who, options.loss[0]
    try:
        return run_ours(options, size, loss) if who == OURS else run_trl(options, size, per_turn=who == PER_TURN)
    except (MemoryError, RuntimeError) as error:  # torch's own OutOfMemoryError is a RuntimeError
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and "allocate memory" not in str(error):
            raise
    held = f"{options.tokens:,} tokens a micro-batch"
    if options.device.startswith("cuda"):
        peak, room = torch.cuda.max_memory_reserved() / GIB, torch.cuda.mem_get_info()[1] / GIB
        held += f", {peak:.1f} of {room:.1f} GiB held"
    if options.memory_limit:
        held += f", limit {options.memory_limit:g} GiB"
    return {"fault": f"out of memory: {held}"}


def limit_memory(device: str, gib: float) -> None:
    """Let this process have only so much memory: on a GPU in all, on a CPU beyond what it holds already."""
    import torch

    if device.startswith("cuda"):
        torch.cuda.set_per_process_memory_fraction(min(1.0, gib * GIB / torch.cuda.mem_get_info()[1]))
        return
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + int(gib * GIB), resource.RLIM_INFINITY))


# ---------------------------------------------------------------- the table


def in_process(options: argparse.Namespace, size: str, who: str, loss: str) -> dict[str, Any]:
    """A measurement in a process of its own, so that its memory is its own too."""
    command = [sys.executable, __file__, "--who", who, "--size", size, "--loss", loss, "--device", options.device]
    command += ["--tokens", str(options.tokens), "--micro-batches", str(options.micro_batches)]
    command += ["--steps", str(options.steps), "--memory-limit", str(options.memory_limit)]
    command += ["--recompute"] if options.recompute else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    held = f"{options.tokens:,} tokens a micro-batch"
    if done.returncode in (-9, 137):
        return {"fault": f"out of memory (killed): {held}"}
    if options.memory_limit and done.returncode in (-signal.SIGSEGV, -signal.SIGABRT):
        # Under a limit of address space also small allocations of native code fail, and not all of it looks.
        return {"fault": f"out of memory: {held}, limit {options.memory_limit:g} GiB"}
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {"fault": f"failed: {lines[-1] if lines else f'exit status {done.returncode}'}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def device_name(device: str) -> str:
    """What the device is called."""
    import torch

    return torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.processor() or "CPU"


def print_table(options: argparse.Namespace, peak: float | None) -> int:
    """Measure and print, row by row; the number of rows that are missing."""
    with_trl = importlib.util.find_spec("trl") is not None and not options.no_peer
    whom = [(OURS, loss) for loss in options.loss]
    whom += [(SEQUENCES, "sft"), (PER_TURN, "sft")] if with_trl else []
    missing = 0
    print("\n| model | trainer | loss | attention | micro-batches | tokens/s | MFU | peak memory, GiB |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for size in options.size:
        operations = None
        for who, loss in whom:
            found = in_process(options, size, who, loss)
            if "fault" in found:
                missing += 1
                print(f"| {size} | {who} | {loss} | {found['fault']} | | | | |", flush=True)
                continue
            operations = found.get("operations", operations)
            share = operations / found["seconds"] / peak if operations and peak else None
            told = f"{found['attention']} | {found['micro']} | {found['tokens'] / found['seconds']:,.0f}"
            mfu = "-" if share is None else f"{share:.1%}"
            print(f"| {size} | {who} | {loss} | {told} | {mfu} | {found['peak']:.1f} |", flush=True)
    if not with_trl:
        print("\nTRL is not installed here (or --no-peer): nothing to compare with.")
    return missing


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", nargs="*", choices=SIZES, default=["0.5b", "1.5b"])
    parser.add_argument("--loss", nargs="*", choices=("sft", "dapo"), default=["sft", "dapo"])
    parser.add_argument("--tokens", type=int, default=16_384, help="of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=4, help="of an optimizer step, about")
    parser.add_argument("--steps", type=int, default=5, help=f"optimizer steps that count, after {WARM} that do not")
    parser.add_argument(
        "--recompute", action="store_true", help="compute layers again in the backward pass, both sides"
    )
    parser.add_argument("--peak-tflops", type=float, help="the device's peak in bfloat16; common GPUs are known")
    parser.add_argument("--memory-limit", type=float, default=0.0, help="GiB that a measurement may take; 0: all")
    parser.add_argument("--no-peer", action="store_true", help="leave TRL out")
    parser.add_argument("--who", choices=(OURS, SEQUENCES, PER_TURN), help=argparse.SUPPRESS)
    options = parser.parse_args()
    import torch

    if options.who:
        print(json.dumps(measure(options)))
        return
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        sys.exit("torch sees no GPU here; --device cpu --size tiny --tokens 512 checks that the script works")
    from trainer.monitor import find_peak_operations

    name = device_name(options.device)
    peak = options.peak_tflops * 1e12 if options.peak_tflops else find_peak_operations(name)
    print(f"{name}, torch {torch.__version__}, {options.tokens:,} tokens a micro-batch, bfloat16 products")
    if print_table(options, peak):
        sys.exit("\nSome measurements are missing; where memory ran out, try fewer --tokens, or --recompute.")


if __name__ == "__main__":
    main()
