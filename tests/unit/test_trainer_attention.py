"""Packed attention and the architectures it serves: the same hidden states and gradients as transformers' own."""

from itertools import pairwise
from typing import Any

import pytest
import torch  # noqa: TID253
import transformers  # noqa: TID253

from lake.errors import UsageError
from testkit.training import random_batch, sequences_of
from trainer.attention import packed_attention
from trainer.model import Policy

SHAPE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 0,
}
ARCHITECTURES = ["Llama", "Qwen2", "Qwen3", "Mistral", "Olmo2", "SmolLM3", "Phi3"]


def model_of(name: str, **shape: Any) -> Any:
    config = getattr(transformers, f"{name}Config")(**(SHAPE | shape))
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def plain_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention of one sequence, written out; [heads, T, dimension]."""
    groups = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    scores = query @ key.transpose(1, 2) / query.shape[-1] ** 0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, float("-inf")).softmax(-1) @ value


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_it_is_causal_attention_inside_each_sequence(key_heads: int) -> None:
    generator = torch.Generator().manual_seed(1)
    boundaries = [0, 5, 6, 14]
    query, key, value = (
        torch.randn(1, heads, 14, 8, generator=generator, requires_grad=True) for heads in (4, key_heads, key_heads)
    )
    found, _ = packed_attention(torch.nn.Module(), query, key, value, None, boundaries=boundaries, scaling=8**-0.5)
    parts = [plain_attention(query[0, :, a:b], key[0, :, a:b], value[0, :, a:b]) for a, b in pairwise(boundaries)]
    expected = torch.cat(parts, dim=1).transpose(0, 1)[None]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    weights = torch.randn(found.shape, generator=generator)
    ours = torch.autograd.grad((found * weights).sum(), (query, key, value))
    theirs = torch.autograd.grad((expected * weights).sum(), (query, key, value))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"boundaries": None}, "boundaries"),
        ({"dropout": 0.1}, "dropout"),
        ({"attention_mask": torch.ones(1, 4)}, "mask"),
        ({"softcap": 30.0}, "soft-capped"),
        ({"s_aux": torch.ones(4)}, "sinks"),
        ({"sliding_window": 3}, "4 tokens exceeds the attention window 3"),
    ],
)
def test_what_it_does_not_do_is_refused(options: dict[str, Any], words: str) -> None:
    tensor = torch.zeros(1, 4, 4, 8)
    arguments: dict[str, Any] = {"attention_mask": None, "boundaries": [0, 4]} | options
    with pytest.raises(UsageError, match=words):
        packed_attention(torch.nn.Module(), tensor, tensor, tensor, **arguments)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_scores_packed_sequences_as_single_ones(name: str) -> None:
    """Against the untouched model: one sequence at a time, transformers' own attention and full logits."""
    batch = random_batch([9, 3, 14])
    logprobs_N, _ = Policy(model_of(name)).logprobs(batch)
    untouched = model_of(name)
    expected = []
    for part in sequences_of(batch):
        with torch.no_grad():
            logits_TV = untouched(input_ids=part.input_ids_T[None], use_cache=False).logits[0].float()
        expected.append(logits_TV.log_softmax(-1)[part.predictor_N, part.target_N])
    torch.testing.assert_close(logprobs_N.detach(), torch.cat(expected), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_an_architecture_has_the_gradients_of_single_sequences(name: str) -> None:
    batch = random_batch([9, 3, 14])
    policy = Policy(model_of(name))
    policy.logprobs(batch)[0].sum().backward()
    untouched = model_of(name)
    for part in sequences_of(batch):
        logits_TV = untouched(input_ids=part.input_ids_T[None], use_cache=False).logits[0].float()
        logits_TV.log_softmax(-1)[part.predictor_N, part.target_N].sum().backward()
    others = dict(untouched.named_parameters())
    for parameter_name, parameter in policy.model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, others[parameter_name].grad, atol=1e-4, rtol=1e-3, msg=parameter_name
        )


@pytest.mark.parametrize("name", ["Gemma2", "Cohere", "Granite"])
def test_an_architecture_that_changes_its_logits_is_refused(name: str) -> None:
    altered = {"Granite": {"logits_scaling": 8.0}, "Cohere": {"logit_scale": 0.0625}}.get(name, {})
    with pytest.raises(UsageError, match="changes its logits"):
        Policy(model_of(name, head_dim=8, **altered) if name == "Gemma2" else model_of(name, **altered))
