"""Models, token episodes and slow oracles for the trainer's tests."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch  # noqa: TID253 - a script that does nothing without it
from torch import Tensor  # noqa: TID253

from lake import Lake
from lake.records import EpisodeRecord, StepRecord, TokensRecord
from testkit.copies import copied, empty_lake
from trainer.backends.base import SingleDevice
from trainer.config import OptimizerConfig, TrainConfig
from trainer.data.batch import PackedBatch
from trainer.policy.model import PackedPolicy

VOCABULARY = 40
SAMPLING: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "logprobs_mode": "processed",
}


def random_model(seed: int = 0, vocabulary: int = VOCABULARY, **shape: Any) -> Any:
    """A random Qwen2 of two layers with grouped-query attention; head dimension 8."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(Qwen2Config(vocab_size=vocabulary, **(sizes | shape))).eval()


def random_backend(seed: int = 0, **optimizer: Any) -> SingleDevice:
    """A backend on a random model."""
    return SingleDevice(PackedPolicy(random_model(seed)), OptimizerConfig(**optimizer))


def config(loss: str = "sft", options: Mapping[str, Any] | None = None, **fields: Any) -> TrainConfig:
    """A configuration whose model is never loaded; the options are the loss's."""
    return TrainConfig(**({"model": "none", "loss": {"name": loss, **(options or {})}, "learning_rate": 1e-3} | fields))


def random_batch(lengths: Sequence[int], seed: int = 0, *, temperature: float | None = None) -> PackedBatch:
    """Sequences of random tokens in which about half of the tokens carry loss (never a first one)."""
    rng = np.random.default_rng(seed)
    ids_T = torch.from_numpy(rng.integers(0, VOCABULARY, sum(lengths)))
    starts = np.cumsum([0, *lengths[:-1]])
    positions_T = torch.from_numpy(np.concatenate([np.arange(n) for n in lengths]))
    carries = rng.random(sum(lengths)) < 0.5
    carries[starts] = False
    target_at = torch.from_numpy(np.flatnonzero(carries))
    size = len(target_at)
    return PackedBatch(
        input_ids_T=ids_T,
        position_ids_T=positions_T,
        boundaries=[0, *np.cumsum(lengths).tolist()],
        predictor_N=target_at - 1,
        target_N=ids_T[target_at],
        weight_N=torch.full((size,), 1 / size),
        advantages_N=torch.from_numpy(rng.normal(size=size).astype(np.float32)),
        behaviour_logprobs_N=torch.from_numpy(rng.uniform(-4, -3, size).astype(np.float32)),
        temperature_N=None if temperature is None else torch.full((size,), temperature),
    )


def sequences_of(batch: PackedBatch) -> list[PackedBatch]:
    """The same sequences, each in its own batch."""
    batches = []
    assert batch.unit_N is None, "units are numbered by `trainer.data.collate`"
    for low, high in zip(batch.boundaries[:-1], batch.boundaries[1:], strict=True):
        mine_N = (batch.predictor_N >= low) & (batch.predictor_N < high)

        def cut(value_N: Tensor | None, mine_N: Tensor = mine_N) -> Tensor | None:
            return None if value_N is None else value_N[mine_N]

        batches.append(
            PackedBatch(
                input_ids_T=batch.input_ids_T[low:high],
                position_ids_T=batch.position_ids_T[low:high],
                boundaries=[0, high - low],
                predictor_N=batch.predictor_N[mine_N] - low,
                target_N=batch.target_N[mine_N],
                weight_N=batch.weight_N[mine_N],
                advantages_N=cut(batch.advantages_N),
                behaviour_logprobs_N=cut(batch.behaviour_logprobs_N),
                temperature_N=cut(batch.temperature_N),
                step_index_N=cut(batch.step_index_N),
            )
        )
    return batches


def gradients(backend: SingleDevice) -> dict[str, Tensor]:
    """The accumulated gradient, by parameter; cleared afterwards."""
    gradients = {name: p.grad.clone() for name, p in backend.policy.model.named_parameters() if p.grad is not None}
    backend.optimizer.zero_grad(set_to_none=True)
    return gradients


def token_step(
    rng: np.random.Generator, n_context: int, n_action: int, *, step: dict[str, Any] | None = None, **tokens: Any
) -> StepRecord:
    """A step with random tokens and log-probabilities; `tokens` and `step` override fields."""
    values: dict[str, Any] = {
        "context_ids": rng.integers(0, VOCABULARY, n_context).tolist(),
        "action_ids": rng.integers(0, VOCABULARY, n_action).tolist(),
        "action_logprobs": rng.uniform(-4, -3, n_action).round(4).tolist(),
        **SAMPLING,
    }
    fields = {"state": "s", "action": "a", "reward": 0.0, "tokens": TokensRecord(**(values | tokens))}
    return StepRecord(**(fields | (step or {})))


def token_episodes(
    tasks: int = 4, siblings: int = 4, *, seed: int = 0, max_steps: int = 4, **fields: Any
) -> list[EpisodeRecord]:
    """Episodes with engine tokens: even tasks have mixed outcomes, odd ones are dead groups."""
    rng = np.random.default_rng(seed)
    episodes = []
    for task in range(tasks):
        for sibling in range(siblings):
            steps = [
                token_step(rng, int(rng.integers(1, 9)), int(rng.integers(1, 6)))
                for _ in range(int(rng.integers(1, max_steps + 1)))
            ]
            outcome = 1.0 if task % 2 else float(sibling % 2)
            steps[-1].reward = outcome
            values: dict[str, Any] = {"task_id": f"t{task}", "rollout_index": sibling, "env_return": outcome, "seed": 1}
            episodes.append(EpisodeRecord(**(values | {"steps": steps} | fields)))
    return episodes


def token_lake(folder: Path, episodes: Sequence[EpisodeRecord] | None = None, *, writes: int = 1) -> Lake:
    """A lake of token episodes, recorded in one or several writes (files)."""
    if episodes is None and writes == 1:
        return copied("token episodes", lambda template: token_lake(template, token_episodes()), folder)
    lk = empty_lake(folder)
    episodes = token_episodes() if episodes is None else list(episodes)
    for part in np.array_split(np.arange(len(episodes)), writes):
        with lk.job(kind="collect", run_id="demo") as job:
            job.record([episodes[i] for i in part])
    return lk
