"""The demo's policy from nothing: a word-level tokenizer and a tiny randomly initialised Llama.

The vocabulary holds the environment's words and three markers and nothing else: an entry that no text uses would be
sampled now and then, and masking it would make the behaviour distribution differ from the one the trainer recomputes.
The chat template is append-only: rendering a longer conversation extends the rendering of a shorter one token by
token. The shape is one that vLLM serves on a CPU too (head_dim 32). It is Llama's and not Qwen2's because for the
latter transformers ignores the saved tokenizer and builds a byte-level one. The initializer range is 0.1: at this
width the usual 0.02 starts so close to zero that the warm start fails.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

USER, ASSISTANT, END = "<|user|>", "<|assistant|>", "<|end|>"
MARKERS = (USER, ASSISTANT, END)
CHAT_TEMPLATE = f"""
{{%- for message in messages -%}}
{{%- if message['role'] == 'assistant' -%}}{ASSISTANT}{{{{ message['content'] }}}}{END}
{{%- else -%}}{USER}{{{{ message['content'] }}}}
{{%- endif -%}}
{{%- endfor -%}}
{{%- if add_generation_prompt -%}}{ASSISTANT}{{%- endif -%}}
""".strip()


class TinyPolicyConfig(BaseModel):
    """Shape of the demo's model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_layers: int = Field(default=2, ge=1)
    """Transformer blocks."""
    num_heads: int = Field(default=2, ge=1)
    """Query heads; the model is num_heads * head_dim wide."""
    num_kv_heads: int = Field(default=1, ge=1)
    """Key and value heads."""
    head_dim: int = Field(default=32, ge=1)
    """Width of a head: one that inference engines know (32, 64, ...)."""
    intermediate_size: int = Field(default=128, ge=1)
    """Width of the feed-forward layer."""
    initializer_range: float = Field(default=0.1, gt=0)
    """Standard deviation of the initial weights."""
    rope_theta: float = Field(default=1000.0, gt=0)
    """Base of the rotary position encoding."""
    max_positions: int = Field(default=1024, ge=1)
    """Longest sequence in tokens."""


def build_tokenizer(words: Sequence[str]) -> "PreTrainedTokenizerFast":
    """A word-level tokenizer of exactly these words and the three markers; any other word is an error.

    Padding, where a caller needs it, is the end marker: masks come from lengths, never from ids.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    entries = [*MARKERS, *sorted(set(words) - set(MARKERS))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(entries)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(MARKERS))
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token=END, pad_token=END, additional_special_tokens=[USER, ASSISTANT]
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(tokenizer: "PreTrainedTokenizerFast", config: TinyPolicyConfig, seed: int) -> "LlamaForCausalLM":
    """A randomly initialised Llama in float32; the same seed gives the same weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.num_heads * config.head_dim,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        max_position_embeddings=config.max_positions,
        initializer_range=config.initializer_range,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # Parameters are float32 unless torch's default says otherwise.
        return LlamaForCausalLM(shape)  # type: ignore[no-untyped-call]


def save_policy(folder: Path, words: Sequence[str], config: TinyPolicyConfig, seed: int) -> None:
    """Write a fresh policy as an ordinary Hugging Face folder."""
    tokenizer = build_tokenizer(words)
    build_model(tokenizer, config, seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
