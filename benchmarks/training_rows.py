"""What bench_train.py trains on: a small model, episodes in a lake, and the same tokens as rows for a peer.

The rows are cut out of this project's own micro-batches, so that both sides train the same tokens in the same order.

Axes: `_T` tokens of a packed buffer, `_N` its tokens that carry loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.config import TrainConfig
    from trainer.data.batch import PackedBatch

VOCABULARY, WIDTH, LAYERS = 4096, 128, 4
TURNS = 12


@dataclass(frozen=True)
class Workload:
    """Shape of the episodes."""

    turns: int
    context: tuple[int, int]
    """Least and most tokens of context of a turn."""
    action: tuple[int, int]
    """The same of action."""
    episodes: int
    """Of an optimizer step."""
    peers: tuple[tuple[str, ...], ...]
    """How TRL is run: rows of what (sequence or turn), layout, rows of a batch."""


_PADDED = tuple(("sequence", "padded", str(rows)) for rows in (1, 4, 8))
WORKLOADS = {
    "rows": Workload(
        1, (32, 512), (16, 256), 16, (*_PADDED, ("sequence", "padding_free", "4"), ("sequence", "packed", "1"))
    ),
    "turns": Workload(
        TURNS,
        (40, 80),
        (8, 16),
        4,
        (
            ("turn", "padded", "1"),
            ("turn", "padded", str(TURNS)),
            ("turn", "packed", "1"),
            *_PADDED[:2],
        ),
    ),
}


def make_model(folder: Path) -> None:
    """A random Llama of a million parameters with a tokenizer, as a Hugging Face folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from trainer.policy.tiny_model import build_tokenizer

    torch.manual_seed(0)
    tokenizer = build_tokenizer(["open the door", "take the key"], 300)
    shape = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=WIDTH // 32,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model: Any = LlamaForCausalLM(shape)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_lake(path: Path, workload: Workload, steps: int) -> None:
    """Episodes with random tokens, recorded as an engine's."""
    import lake
    from lake.records import EpisodeRecord, StepRecord, TokensRecord

    rng = np.random.default_rng(0)
    sampling: dict[str, Any] = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "logprobs_mode": "processed",
    }

    def turn() -> StepRecord:
        sizes = [int(rng.integers(low, high + 1)) for low, high in (workload.context, workload.action)]
        context_ids, action_ids = (rng.integers(3, VOCABULARY, size).tolist() for size in sizes)
        tokens = TokensRecord(context_ids=context_ids, action_ids=action_ids, **sampling)
        return StepRecord(state="s", action="a", reward=0.0, tokens=tokens)

    episodes = [
        EpisodeRecord(task_id=str(number), steps=[turn() for _ in range(workload.turns)], env_return=1.0)
        for number in range(workload.episodes * steps)
    ]
    lake.open(path, create=True).append(episodes, run_id="synthetic")


def configuration(folder: Path, workload: Workload, loss: str = "sft") -> "TrainConfig":
    """How this project trains it; the settings that TRL's trainer has too are the same there."""
    from trainer.config import ScheduleConfig, TrainConfig

    return TrainConfig(
        model=str(folder / "model"),
        loss=loss,
        episodes_per_step=workload.episodes,
        token_budget=2048,
        learning_rate=1e-4,
        schedule=ScheduleConfig(shape="constant", warmup_fraction=0.0),
        threads=1,
    )


def export(folder: Path, workload: Workload) -> dict[str, Any]:
    """Write the tokens of every optimizer step for TRL, and this project's gradients of the first one."""
    import torch
    from safetensors.torch import save_file

    import lake
    from trainer.data.plan import Plan
    from trainer.data.selection import select
    from trainer.data.stream import Stream
    from trainer.losses import Needs

    torch.set_num_threads(1)
    config = configuration(folder, workload)
    snapshot = lake.open(folder / "lake").snapshot()
    plan = Plan(select(snapshot, config, Needs()), config)
    with Stream(snapshot, plan, Needs(), config) as stream:
        steps = [batches for _, batches in stream.steps()]
    first, signals = with_signals(steps[0], config)
    losses = {name: write_gradients(first, configuration(folder, workload, name), folder) for name in ("sft", "dapo")}
    for kind, split in (("sequence", sequences_of), ("turn", turns_of)):
        rows = [[row for batch in batches for row in split(batch)] for batches in steps]
        flat = [row for step in rows for row in step]
        tensors = {
            "ids": torch.cat([ids for ids, _ in flat]).long(),
            "trained": torch.cat([trained for _, trained in flat]).to(torch.uint8),
            "lengths": torch.tensor([len(ids) for ids, _ in flat]),
            "steps": torch.tensor([len(step) for step in rows]),
        }
        save_file(tensors | (signals if kind == "sequence" else {}), folder / f"{kind}.safetensors")
    return {"tokens": plan.tokens, "losses": losses}


def sequences_of(batch: "PackedBatch") -> "list[tuple[Tensor, Tensor]]":
    """Ids of each sequence, and which of them carry loss."""
    import torch

    trained_T = torch.zeros(batch.boundaries[-1], dtype=torch.bool)
    trained_T[batch.predictor_N + 1] = True
    lengths = np.diff(batch.boundaries).tolist()
    parts = (torch.split_with_sizes(tensor, lengths) for tensor in (batch.input_ids_T, trained_T))
    return list(zip(*parts, strict=True))


def turns_of(batch: "PackedBatch") -> "list[tuple[Tensor, Tensor]]":
    """One row for each action span: all that comes before it, and the span, which alone carries loss."""
    import torch

    rows: list[tuple[Tensor, Tensor]] = []
    for ids, trained in sequences_of(batch):
        edges = torch.nonzero(torch.diff(trained.int(), append=torch.zeros(1, dtype=torch.int32)) == -1).flatten() + 1
        low = 0
        for high in edges.tolist():
            mask = trained[:high].clone()
            mask[:low] = False
            rows.append((ids[:high], mask))
            low = high
    return rows


def with_signals(batches: "Sequence[PackedBatch]", config: "TrainConfig") -> "tuple[list[PackedBatch], dict[str, Any]]":
    """The batches with advantages and behaviour log-probabilities near the policy's own, and both by token."""
    import torch

    from trainer.runs.factories import make_backend

    backend = make_backend(config)
    random = torch.Generator().manual_seed(0)
    filled: list[PackedBatch] = []
    by_token: dict[str, list[Tensor]] = {"advantages": [], "logprobs": []}
    for batch in batches:
        near_N = backend.logprobs(batch) + 0.3 * torch.randn(len(batch.target_N), generator=random)
        advantages_N = torch.randn(len(batch.target_N), generator=random)
        filled.append(replace(batch, advantages_N=advantages_N, behaviour_logprobs_N=near_N))
        for name, value_N in (("advantages", advantages_N), ("logprobs", near_N)):
            value_T = torch.zeros(batch.boundaries[-1])
            value_T[batch.predictor_N + 1] = value_N
            by_token[name].append(value_T)
    return filled, {name: torch.cat(parts) for name, parts in by_token.items()}


def write_gradients(batches: "Sequence[PackedBatch]", config: "TrainConfig", folder: Path) -> float:
    """Gradient of an optimizer step at the first weights; the loss."""
    from safetensors.torch import save_file

    from trainer.runs.factories import make_backend

    backend, loss = make_backend(config), config.loss
    total = sum(float(backend.forward_backward(batch, loss)["loss"]) for batch in batches)
    found = {name: p.grad for name, p in backend.policy.model.named_parameters() if p.grad is not None}
    save_file(found, folder / f"ours_{config.loss.name}.safetensors")
    return total
