"""Checks of models: above all that the policy scores packed sequences as the model itself scores single ones.

Architectures differ in what they do with positions, windows, caches and logits; some (state-space layers, convolutions)
carry state from one packed sequence into the next whatever the positions say. Three short sequences show it.
"""

from typing import TYPE_CHECKING

import torch  # noqa: TID253 - loaded by commands only when they train
from torch import Tensor  # noqa: TID253

from lake.errors import ContractError, UsageError
from trainer.data.stream.batch import PackedBatch

if TYPE_CHECKING:
    from trainer.policy.model import Policy

_LENGTHS = (6, 3, 9)
EXACT, NARROW = 1e-4, 0.1
"""Tolerances in nats: of the largest difference in float32, of the mean difference in 16-bit floats."""


def check_policy(policy: "Policy") -> None:
    """Compare packed log-probabilities with those of transformers' own forward pass, one sequence at a time.

    Raises:
        UsageError: they differ, or the model cannot be run packed.
    """
    batch = _small_batch(policy.vocabulary).to(policy.device)
    with torch.no_grad():
        packed_N, _ = policy.logprobs(batch)
        expected_N = _own_logprobs(policy, batch)
    difference_N = (packed_N - expected_N).abs()
    exact = policy.dtype == "float32" and policy.model.dtype == torch.float32
    found, limit = (difference_N.max().item(), EXACT) if exact else (difference_N.mean().item(), NARROW)
    if not found <= limit:
        raise UsageError(
            f"{type(policy.model).__name__} with {policy.attention} attention scores packed sequences differently from "
            f"single ones: {found:.3g} nats, at most {limit} will do; choose another attention, or another model"
        )


def check_device(device: str) -> None:
    """Whether torch can use a device.

    Raises:
        UsageError: it cannot.
    """
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0][:60]
        msg = f"device {device!r} cannot be used ({reason}); valid are cpu and, with a GPU and its PyTorch, cuda"
        raise UsageError(msg) from error


def check_vocabulary(batch: PackedBatch, vocabulary: int) -> None:
    """Whether a model has an embedding for every token of a batch on the CPU.

    Raises:
        ContractError: it has not.
    """
    highest = int(batch.input_ids_T.max())
    if highest >= vocabulary:
        raise ContractError(
            f"table `tokens` holds token id {highest}, and the model knows ids below {vocabulary}: the tokens were "
            f"made with another tokenizer; choose the model they came from, or --tokens rendered"
        )


def _small_batch(vocabulary: int) -> PackedBatch:
    """Random sequences of which every token but the first carries loss."""
    generator = torch.Generator().manual_seed(0)
    ids_T = torch.randint(0, vocabulary, (sum(_LENGTHS),), generator=generator)
    positions_T = torch.cat([torch.arange(length) for length in _LENGTHS])
    target_at = torch.nonzero(positions_T > 0).squeeze(-1)
    return PackedBatch(
        input_ids_T=ids_T,
        position_ids_T=positions_T,
        boundaries=[0, *torch.tensor(_LENGTHS).cumsum(0).tolist()],
        predictor_N=target_at - 1,
        target_N=ids_T[target_at],
        weight_N=torch.ones(len(target_at)),
    )


def _own_logprobs(policy: "Policy", batch: PackedBatch) -> Tensor:
    """The same log-probabilities by the model's own forward pass and attention."""
    model, used = policy.model, policy.model.config._attn_implementation
    model.set_attn_implementation("eager")
    parts = []
    autocast = policy.scorer.autocast
    with torch.autocast(policy.device.type, autocast, enabled=autocast is not None):
        for ids_T in torch.split_with_sizes(batch.input_ids_T, _LENGTHS):
            logits_TV = model(input_ids=ids_T[None], use_cache=False).logits[0].float()
            parts.append(logits_TV[:-1].log_softmax(-1).gather(-1, ids_T[1:, None]).squeeze(-1))
    model.set_attn_implementation(used)
    return torch.cat(parts)
