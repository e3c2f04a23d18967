"""What `gpu.py` measures: updates of a model's shape, gradients, `train` from a lake, and TRL on the same episodes.

Axes: `_M` turns, `_E` episodes, `_T` tokens of a packed buffer, `_N` its tokens that carry loss, `_V` vocabulary.
"""

import argparse
import importlib.util
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[1])]

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.config import TrainConfig
    from trainer.data.batch import PackedBatch
    from trainer.losses.base import Loss
    from trainer.monitor import ModelShape

Row = dict[str, Any]
"""Figures by name. `case` names the case, `what` its part; `note` and `fault` are text."""


@dataclass(frozen=True)
class Shape:
    """A model with random weights, and how it is trained."""

    family: str
    """Qwen2 or Qwen3."""
    width: int
    mlp: int
    layers: int
    heads: int
    key_heads: int
    vocabulary: int = 151_936
    head_dim: int | None = None
    tied: bool = True
    recompute: bool = False
    """Compute layers again in the backward pass."""
    adapters: bool = False
    """Train LoRA adapters alone."""


TINY = Shape("Qwen2", 64, 128, 2, 2, 2, vocabulary=512)
SHAPES = {
    "0.5b": Shape("Qwen2", 896, 4864, 24, 14, 2),
    "1.5b": Shape("Qwen2", 1536, 8960, 28, 12, 2),
    "4b": Shape("Qwen3", 2560, 9728, 36, 32, 8, head_dim=128, recompute=True),
    "8b": Shape("Qwen3", 4096, 12_288, 36, 32, 8, head_dim=128, tied=False, recompute=True, adapters=True),
    "tiny": TINY,
    "tiny-lora": replace(TINY, recompute=True, adapters=True),
}
"""Shapes of Qwen2 (arXiv 2407.10671, table 1) and Qwen3 (arXiv 2505.09388, table 1), and two for trials."""
REPEATED = Shape("Qwen2", 896, 4864, 4, 14, 2, vocabulary=8192)
"""Model of repetition, resumption and gradients: layers of the 0.5b, whose checkpoints take seconds."""
LOSSES = ("sft", "dapo")
TURNS, CONTEXT, ACTION = 8, (64, 384), (32, 128)
GIB = 1 << 30
WARM = 2
"""Optimizer steps that are not counted: kernels are compiled and memory is taken."""


def name_device(device: str) -> str:
    """What the device is called."""
    import torch

    return torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.processor() or "CPU"


# ---------------------------------------------------------------- the same episodes for all


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


# ---------------------------------------------------------------- models


def make_settings(shape: Shape) -> Any:
    """The transformers configuration of a shape."""
    import transformers

    return getattr(transformers, f"{shape.family}Config")(
        hidden_size=shape.width,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        vocab_size=shape.vocabulary,
        head_dim=shape.head_dim or shape.width // shape.heads,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=32_768,
        bos_token_id=None,
        eos_token_id=0,
    )


def make_model(shape: Shape, device: str) -> Any:
    """A model with random float32 weights, made on the device; the same for the same shape."""
    import torch
    import transformers

    torch.manual_seed(0)
    with torch.device(device):
        return getattr(transformers, f"{shape.family}ForCausalLM")(make_settings(shape))


def plan_peak(shape: Shape, config: "TrainConfig", tokens: int, trained: int) -> float:
    """The peak of an update that `--plan` would say, in GiB."""
    from safetensors.torch import save_file

    from trainer.policy.memory import plan_memory

    with tempfile.TemporaryDirectory() as folder:
        make_settings(shape).save_pretrained(folder)
        # The plan reads no weights, but a folder without any is refused.
        save_file({}, Path(folder, "model.safetensors"), {"format": "pt"})
        return plan_memory(config.model_copy(update={"model": folder}), tokens, trained).peak / GIB


# ---------------------------------------------------------------- updates


class Clock:
    """Seconds between optimizer steps, and peak memory after the warm-up.

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
            if len(self.times) == WARM:
                torch.cuda.reset_peak_memory_stats()
        self.times.append(time.perf_counter())

    def figures(self, tokens: int) -> Row:
        """Tokens per second by the median optimizer step, and on a GPU the peak of its tensors in GiB."""
        import torch

        speed = tokens / statistics.median(np.diff(self.times)[WARM:].tolist())
        peak = {"peak_gib": torch.cuda.max_memory_allocated() / GIB} if self.on_gpu else {}
        return {"tokens_per_second": speed} | peak


def measure_updates(options: argparse.Namespace, size: str, kernels: Any, *, repeatable: bool = True) -> Iterator[Row]:
    """Updates by sft and dapo; without `repeatable` torch may choose kernels that do not repeat exactly."""
    import torch

    from trainer.backends.base import SingleDevice
    from trainer.config import LoRAConfig, OptimizerConfig, TrainConfig
    from trainer.monitor import find_peak_operations, measure_shape
    from trainer.policy.model import PackedPolicy

    shape = SHAPES[size]
    torch.use_deterministic_algorithms(repeatable, warn_only=True)
    # A large model needs no more tokens to keep a GPU busy, and minutes for an update with them.
    micro_batches = 1 if shape.recompute else options.micro_batches
    episodes = make_episodes(options.tokens * micro_batches, shape.vocabulary)
    batches = make_batches(episodes, options.tokens, pinned=options.device.startswith("cuda"))
    tokens = sum(episodes.lengths_E)
    config = TrainConfig(
        model="random",
        loss="sft",
        dtype="bfloat16",
        kernels=kernels,
        gradient_checkpointing=shape.recompute,
        lora=LoRAConfig() if shape.adapters else None,
    )
    policy = PackedPolicy(
        make_model(shape, options.device), dtype=config.dtype, kernels=kernels, gradient_checkpointing=shape.recompute
    )
    if config.lora is not None:
        policy.add_adapters(config.lora, seed=0)
    planned = plan_peak(shape, config, options.tokens, max(len(batch.target_N) for batch in batches))
    torch._dynamo.reset()  # the plan has compiled the layers for counting
    backend = SingleDevice(policy, OptimizerConfig())
    # Operations of frozen weights are others; no figure is better than a wrong one.
    operations = None if shape.adapters else update_operations(measure_shape(policy), episodes)
    peak_operations = find_peak_operations(name_device(options.device))
    for name in LOSSES:
        loss = TrainConfig(model="random", loss=name).loss

        def update(loss: "Loss" = loss) -> None:
            for batch in batches:
                backend.forward_backward(batch, loss)
            backend.optim_step(1e-5)

        clock = Clock(options.device)
        clock.note()
        for _ in range(WARM + options.steps):
            update()
            clock.note()
        row = clock.figures(tokens)
        if operations is not None and peak_operations is not None:
            row["mfu"] = operations / tokens * row["tokens_per_second"] / peak_operations
        if "peak_gib" in row:
            row["peak_of_plan"] = row["peak_gib"] / planned
        shares = measure_shares(update, on_gpu=clock.on_gpu)
        note = f"{policy.attention}, {len(batches)} micro-batches"
        yield {"what": name} | row | {"planned_gib": planned} | shares | {"note": note}


def update_operations(shape: "ModelShape", episodes: Episodes) -> float:
    """Operations of an update that keeps each episode one sequence."""
    lengths = episodes.lengths_E
    squared = sum(length**2 for length in lengths)
    return shape.update_operations(tokens=sum(lengths), squared_lengths=squared, loss_tokens=episodes.trained)


ATTENTION = ("flash", "fmha", "attention")
PRODUCTS = ("gemm", "nvjet", "cutlass", "xmma", "mm")
"""Parts of the names of kernels; all that match neither are element-wise, reductions and copies."""


def measure_shares(update: Callable[[], None], *, on_gpu: bool) -> Row:
    """Shares of an update's device time by the kind of the kernel; on a CPU of its operations' time."""
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
        update()
    times = dict.fromkeys(("products", "attention", "elementwise"), 0.0)
    for event in profiler.key_averages():
        # Annotations span kernels that are counted themselves.
        if (event.device_type == DeviceType.CPU) == on_gpu or getattr(event, "is_user_annotation", False):
            continue
        name = event.key.lower()
        is_attention, is_product = (any(part in name for part in parts) for parts in (ATTENTION, PRODUCTS))
        kind = "attention" if is_attention else "products" if is_product else "elementwise"
        times[kind] += event.self_device_time_total if on_gpu else event.self_cpu_time_total
    return {kind: share / max(1e-9, sum(times.values())) for kind, share in times.items()}


# ---------------------------------------------------------------- gradients


def make_loss_batch(lengths: Sequence[int], vocabulary: int) -> "PackedBatch":
    """Sequences of random tokens, half of them trained, with a value in each column that a loss may read."""
    import torch

    from trainer.data.batch import PackedBatch

    random = torch.Generator().manual_seed(0)
    positions_T = torch.cat([torch.arange(length) for length in lengths])
    sequence_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    at = torch.nonzero((positions_T > 0) & (torch.rand(sum(lengths), generator=random) < 0.5)).flatten()
    ids_T = torch.randint(0, vocabulary, (sum(lengths),), generator=random)
    return PackedBatch(
        input_ids_T=ids_T,
        position_ids_T=positions_T,
        boundaries=[0, *torch.tensor(lengths).cumsum(0).tolist()],
        predictor_N=at - 1,
        target_N=ids_T[at],
        weight_N=torch.full((len(at),), 1 / len(at)),
        unit_N=sequence_T[at],
        weight_U=torch.full((len(lengths),), 1 / len(lengths)),
        pair_U=torch.arange(len(lengths)) // 2,
        sign_U=torch.tensor([1.0 if unit % 3 else -1.0 for unit in range(len(lengths))]),
        step_index_N=(positions_T[at] // 32).int(),
        advantages_N=torch.randn(len(lengths), generator=random)[sequence_T[at]],
        staleness_N=torch.zeros(len(at)),
    )


def add_old_policies(batch: "PackedBatch", logprobs_N: "Tensor") -> "PackedBatch":
    """Put log-probabilities of other policies in, at ratios far from any clip: rounding must not decide a clip."""
    import torch

    random = torch.Generator().manual_seed(1)
    # No few of them add up to a number near 0, where a clip of whole sequences lies.
    ratios = torch.tensor([0.031, 0.127, -0.113, 0.803, -0.771])

    def shift() -> "Tensor":
        chosen_N = ratios[torch.randint(0, len(ratios), logprobs_N.shape, generator=random)]
        return logprobs_N + chosen_N.to(logprobs_N.device)

    return replace(batch, behaviour_logprobs_N=shift(), reference_logprobs_N=shift(), proximal_logprobs_N=shift())


def measure_gradients(options: argparse.Namespace, kinds: Sequence[Any]) -> Iterator[Row]:
    """Relative errors of gradients: the largest over all losses, against float64, and against eager in float32."""
    import torch

    from trainer.losses import LOSSES as ALL
    from trainer.policy.model import PackedPolicy

    shape = TINY if options.trial else REPEATED
    batch = make_loss_batch((9, 14, 30, 21) if options.trial else (300, 500, 700, 400), shape.vocabulary)
    batch = batch.to(torch.device(options.device))
    with torch.no_grad():
        logprobs_N, _ = PackedPolicy(make_model(shape, options.device), kernels="eager").logprobs(batch)
    batch = add_old_policies(batch, logprobs_N)
    exact = make_model(shape, options.device).double().eval()
    oracles = {name: compute_gradient(partial(score_exactly, exact), exact, batch, name) for name in ALL}
    del exact
    eager: dict[str, Mapping[str, Tensor]] = {}
    for dtype in ("float32", "bfloat16"):
        for kernels in kinds:
            policy = PackedPolicy(
                make_model(shape, options.device), kernels=kernels, dtype=dtype, cast=dtype != "float32"
            )
            errors, distances = {}, {}
            for name in ALL:
                gradient = compute_gradient(partial(policy.logprobs, entropy=True), policy.model, batch, name)
                errors[name] = relative_error(gradient, oracles[name])
                if dtype == "float32":
                    distances[name] = relative_error(gradient, eager.setdefault(name, gradient))
            worst = max(errors, key=lambda name: errors[name])
            row: Row = {"what": f"{kernels}, {dtype}", f"{dtype}_error": errors[worst]}
            if dtype == "float32" and kernels != kinds[0]:
                row |= {f"from_{kinds[0]}": max(distances.values())}
            yield row | {"note": f"{len(errors)} losses, worst {worst}"}


Score = Callable[["PackedBatch"], tuple["Tensor", "Tensor | None"]]


def compute_gradient(score: Score, model: Any, batch: "PackedBatch", name: str) -> "dict[str, Tensor]":
    """The gradient of a loss by parameter, in float64; statistics of the step are those of this batch."""
    from trainer.backends.base import loss_rows
    from trainer.config import TrainConfig

    loss = TrainConfig(model="random", loss=name).loss
    logprobs_N, entropy_N = score(batch)
    assert entropy_N is not None
    rows = loss_rows(batch, loss, logprobs_N.double(), entropy_N.double())
    detached = replace(rows, logprobs_N=rows.logprobs_N.detach(), entropy_N=entropy_N.detach().double())
    sums = {key: float(number) for key, number in loss.prepare([detached]).items()}
    model.zero_grad(set_to_none=True)
    loss.compute(replace(rows, statistics=sums)).total.backward()  # type: ignore[no-untyped-call]
    return {key: p.grad.double() for key, p in model.named_parameters() if p.grad is not None}


def score_exactly(model: Any, batch: "PackedBatch") -> "tuple[Tensor, Tensor]":
    """Log-probabilities and entropies by transformers' own forward pass in float64, one sequence after the other."""
    import torch

    def normalise(module: Any, hidden: "Tensor") -> "Tensor":
        scaled: Tensor = module.weight * hidden
        return scaled * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + module.variance_epsilon)

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):  # transformers' own computes in float32
            module.forward = partial(normalise, module)
    model.set_attn_implementation("eager")
    rows = [model(input_ids=batch.input_ids_T[None, low:high]).logits[0] for low, high in pairwise(batch.boundaries)]
    logprobs_NV = torch.cat(rows)[batch.predictor_N].log_softmax(-1)
    return logprobs_NV.gather(-1, batch.target_N[:, None])[:, 0], -(logprobs_NV.exp() * logprobs_NV).sum(-1)


def relative_error(tensors: "Mapping[str, Tensor]", oracle: "Mapping[str, Tensor]") -> float:
    """Norm of the difference as a share of the oracle's norm."""
    assert tensors.keys() == oracle.keys()
    squares = [
        (float((tensors[key] - oracle[key]).square().sum()), float(oracle[key].square().sum())) for key in oracle
    ]
    difference, norm = map(sum, zip(*squares, strict=True))
    return float((difference / norm) ** 0.5)


# ---------------------------------------------------------------- train, from a lake


def measure_lake(options: argparse.Namespace, kernels: str) -> Iterator[Row]:
    """The command's first update, the speed of `train` against a bare loop, a repetition, and a resumption."""
    import lake

    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        shape = TINY if options.trial else SHAPES["0.5b"]
        small = TINY if options.trial else REPEATED
        settings: Row = {
            "dtype": "bfloat16",
            "kernels": kernels,
            "device": options.device,
            "token_budget": options.tokens,
            "learning_rate": 1e-5,
            "checkpoint_every": 1000,
        }
        write_folder(folder / "model", shape, options.device)
        write_folder(folder / "small", small, options.device)
        lk = lake.open(folder / "lake", create=True)
        settings["episodes_per_step"] = record_episodes(lk, options, small.vocabulary)
        yield time_first_update(folder, settings)
        config = make_config(folder / "model", settings)
        yield compare_speed(lk, config, folder)
        yield from check_repetition(lk, make_config(folder / "small", settings | {"checkpoint_every": 2}), folder)


def make_config(model: Path, settings: Row) -> "TrainConfig":
    """The configuration of a run by sft."""
    from trainer.config import TrainConfig

    return TrainConfig(model=str(model), loss="sft", **settings)


def write_folder(folder: Path, shape: Shape, device: str) -> None:
    """A random model with a tokenizer, as a Hugging Face folder."""
    from trainer.policy.tiny_model import build_tokenizer

    make_model(shape, device).save_pretrained(folder)
    build_tokenizer(["open the door"], 300).save_pretrained(folder)


def record_episodes(lk: Any, options: argparse.Namespace, vocabulary: int) -> int:
    """Record the episodes of all optimizer steps; return the number of one step."""
    from lake.records import EpisodeRecord, StepRecord, TokensRecord

    sampling: Row = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "logprobs_mode": "processed"}
    updates, records = WARM + options.steps, []
    for seed in range(updates):
        episodes = make_episodes(options.tokens * options.micro_batches, vocabulary, seed)
        steps = [
            StepRecord(
                state="s",
                action="a",
                reward=0.0,
                tokens=TokensRecord(context_ids=context.tolist(), action_ids=action.tolist(), **sampling),
            )
            for context, action in zip(episodes.context_M, episodes.action_M, strict=True)
        ]
        records += [
            EpisodeRecord(task_id=f"{seed}-{first}", steps=steps[first : first + TURNS], env_return=1.0)
            for first in range(0, len(steps), TURNS)
        ]
    lk.append(records, run_id="synthetic")
    episodes_per_step: int = -(-len(records) // updates)
    return episodes_per_step


def time_first_update(folder: Path, settings: Row) -> Row:
    """Seconds from the command `train` to its first update."""
    command = [sys.executable, "-m", "trainer", "train", "--lake", str(folder / "lake"), "--loss", "sft"]
    command += ["--model", str(folder / "model"), "--out", str(folder / "first")]
    for name, setting in settings.items():
        command += ["--set", f"{name}={setting}"]
    metrics, began = folder / "first" / "metrics.jsonl", time.monotonic()
    root = Path(__file__).parents[1]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        while not (metrics.exists() and metrics.stat().st_size) and process.poll() is None:
            time.sleep(0.02)
        seconds = time.monotonic() - began
        process.terminate()
        lines = process.communicate()[1].decode(errors="replace").strip().splitlines()
    if not metrics.exists():
        raise RuntimeError(lines[-1] if lines else "train ended without an update")
    return {"what": "first update", "first_update_seconds": seconds, "note": "from the command"}


def compare_speed(lk: Any, config: "TrainConfig", folder: Path) -> Row:
    """Tokens per second of `train`, and as a share of a loop over batches that are in memory."""
    from trainer.data.preparation import prepare
    from trainer.data.stream import Stream
    from trainer.runs.factories import make_backend
    from trainer.runs.offline import train

    speeds: list[float] = []
    train(
        lk,
        config,
        folder / "stream",
        run_id="stream",
        on_step=lambda report, total: speeds.append(report.step.tokens / report.metrics["seconds"]),
    )
    prepared = prepare(lk, config)
    with Stream(prepared.snapshot, prepared.plan, config.loss.needs, prepared.plan.config) as stream:
        steps = list(stream.steps())
    backend, bare_speeds = make_backend(config), []
    for step, batches in steps:
        began = time.perf_counter()
        for batch in batches:
            backend.forward_backward(batch, config.loss)
        backend.optim_step(1e-5)  # waits for the norm of the gradient, and so for the device
        bare_speeds.append(step.tokens / (time.perf_counter() - began))
    ours, bare = (statistics.median(each[WARM:]) for each in (speeds, bare_speeds))
    return {"what": "train", "tokens_per_second": ours, "of_bare_loop": ours / bare}


def check_repetition(lk: Any, config: "TrainConfig", folder: Path) -> Iterator[Row]:
    """Whether a repeated run, and one that was interrupted and resumed, end with the weights of the first."""
    from trainer.runs.offline import repeat_run, resume, train

    first = train(lk, config, folder / "once", run_id="once")
    again = repeat_run(lk, "once", folder / "again", run_id="again")

    def interrupt(report: Any, total: int) -> None:
        if report.step.index + 1 == WARM + 1:
            raise KeyboardInterrupt

    try:
        train(lk, config, folder / "killed", run_id="killed", on_step=interrupt)
    except KeyboardInterrupt:
        resumed = resume(lk, folder / "killed")
    for name, run in (("repetition", again), ("resumption", resumed)):
        is_same = run.weights_sha256 == first.weights_sha256
        error = 0.0 if is_same else compare_weights(run.model, first.model)
        yield {"what": name, "weights_error": error, "note": "bit for bit" if is_same else "not bit for bit"}


def compare_weights(model: Path, oracle: Path) -> float:
    """Relative distance of the weights of two model folders."""
    from safetensors.torch import load_file

    ours, theirs = (load_file(folder / "model.safetensors") for folder in (model, oracle))
    return relative_error({k: t.double() for k, t in ours.items()}, {k: t.double() for k, t in theirs.items()})


# ---------------------------------------------------------------- TRL


def measure_trl(options: argparse.Namespace, shape: Shape, *, per_turn: bool) -> Iterator[Row]:
    """Train with TRL's SFTTrainer: a row per episode, or per turn with its context repeated."""
    import torch

    if importlib.util.find_spec("trl") is None:
        raise RuntimeError("trl is not installed")
    torch.use_deterministic_algorithms(False)
    yield {"what": "a row per turn" if per_turn else "a row per episode"} | run_trl(options, shape, per_turn=per_turn)


def run_trl(options: argparse.Namespace, shape: Shape, *, per_turn: bool) -> Row:
    """Train with TRL's SFTTrainer, without padding where flash-attn is installed, else padded."""
    from datasets import Dataset  # type: ignore[import-not-found]
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found]

    from trainer.policy.tiny_model import build_tokenizer

    episodes = make_episodes(options.tokens * options.micro_batches, shape.vocabulary)
    rows = make_rows(episodes, per_turn=per_turn)
    model = make_model(shape, options.device)
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
            gradient_checkpointing=shape.recompute,
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
    note = f"{attention}, {-(-len(rows) // together)} micro-batches"
    return clock.figures(sum(episodes.lengths_E)) | {"note": note}
