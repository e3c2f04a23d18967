"""Architectures of transformers at a tiny size, for what must hold of each."""

from typing import Any

import torch  # noqa: TID253 - a script that does nothing without it
import transformers  # noqa: TID253

_SHAPE = {
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
_MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
_OPTIONS: dict[str, dict[str, Any]] = {
    "GPT2": {"n_embd": 32, "n_head": 4, "n_layer": 2},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "Qwen3": {"head_dim": 8},
    "Mistral": {"sliding_window": 4},
    "Cohere2": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "Gemma3Text": {"head_dim": 8, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "Gemma2": {"head_dim": 8, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "Granite": {"logits_scaling": 8.0},
    "Cohere": {"logit_scale": 0.25},
    "Qwen3Moe": _MIXTURE | {"num_experts": 4},
    "Mixtral": {"num_local_experts": 4},
    "GptOss": {"head_dim": 8, "num_local_experts": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "Mamba": {"state_size": 4},
    "Bloom": {"n_head": 4, "n_layer": 2},
}
_NAMES = {"Gemma3Text": "Gemma3ForCausalLM", "GPT2": "GPT2LMHeadModel"}
SERVED = [
    "Llama",
    "Qwen2",
    "Qwen3",
    "Qwen3Moe",
    "Mistral",
    "Mixtral",
    "Olmo2",
    "SmolLM3",
    "Phi",
    "Phi3",
    "GPT2",
    "GPTNeoX",
    "OPT",
    "Starcoder2",
    "Gemma",
    "Gemma3Text",
    "Granite",
    "Cohere",
    "Cohere2",
]
"""Architectures that train packed on any device; docs/guides/models.md lists them."""


def model_of(name: str, **shape: Any) -> Any:
    """A random model whose weights are wide enough that a wrong attention shows."""
    config = getattr(transformers, f"{name}Config")(**(_SHAPE | _OPTIONS.get(name, {}) | shape))
    torch.manual_seed(0)
    model = getattr(transformers, _NAMES.get(name, f"{name}ForCausalLM"))(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model
