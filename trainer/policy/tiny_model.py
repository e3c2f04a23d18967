"""A small random model for trying things, with a tokenizer trained on the lake's own texts.

A Llama of some 200,000 parameters, written as an ordinary Hugging Face folder. Inference engines serve its shape (head
dimension 32). It is not a Qwen2, for which transformers ignores the saved tokenizer's rules, so that a folder would
encode text differently from what was trained. The chat template is ChatML with reasoning and tool calls, and
append-only: a longer conversation extends the rendering of a shorter one. It writes tool calls key by key, since
engines pass their keys in different orders. The same lake, sizes and seed give the same folder.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from lake.errors import DataRefusedError, UsageError
from lake.read.parquet import collect_rows
from lake.read.snapshot import Snapshot
from lake.settings import FrozenModel
from lake.storage.atomic import atomic_folder
from lake.write.rows import inline_blobs
from trainer.data.render import STEP_DOCUMENTS, UnrenderableError, collect_texts, read_turns

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
HEAD_DIM = 32
CHAT_TEMPLATE = r"""{%- if tools %}<|im_start|>system
Tools: {{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>
{% endif %}{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}{% set function = call.function or call %}
{{- '\n<tool_call>{"name": ' ~ (function.name | tojson) ~ ', "arguments": ' ~ (function.arguments | tojson) }}
{{- '}</tool_call>' }}
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_STEP_COLUMNS = (
    "episode_id",
    "step_index",
    "context",
    "state",
    "state_role",
    "action",
    "reasoning",
    "tool_calls",
    "extra",
)


class TinyModelConfig(FrozenModel):
    """Sizes of the tokenizer and the model."""

    vocabulary: int = Field(2048, ge=300)
    """Number of token ids with 256 bytes and three markers; fewer if the texts yield fewer merges."""
    hidden_size: int = Field(64, ge=HEAD_DIM, multiple_of=HEAD_DIM)
    """Width; the number of heads is this divided by the head dimension of 32."""
    layers: int = Field(2, ge=1)
    """Transformer blocks."""
    max_positions: int = Field(32_768, ge=2)
    """Longest sequence the configuration allows."""
    initializer_range: float = Field(0.05, gt=0)
    """Standard deviation of the initial weights; narrow models need more than the usual 0.02."""
    seed: int = Field(0, ge=0)
    """Seed of the initial weights."""


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A model that was written."""

    folder: Path
    parameters: int
    """Number of parameters."""
    vocabulary: int
    """Number of token ids."""
    texts: int
    """Number of distinct texts that the tokenizer was trained on."""


def make_tiny_model(snapshot: Snapshot, folder: Path, config: TinyModelConfig) -> TinyModel:
    """Train a tokenizer on the lake's texts and write a random model with it.

    Raises:
        UsageError: the folder exists.
        DataRefusedError: the lake holds no text.
    """
    if folder.exists():
        raise UsageError(f"{folder} exists already; choose another --out")
    texts = sorted(set(read_texts(snapshot)))
    if not texts:
        msg = "the lake holds no texts to train a tokenizer on; ingest some first: `trajlake ingest FILE`"
        raise DataRefusedError(msg)
    tokenizer = build_tokenizer(texts, config.vocabulary)
    model = build_model(tokenizer, config)
    with atomic_folder(folder) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    return TinyModel(folder, model.num_parameters(), len(tokenizer), len(texts))


def read_texts(snapshot: Snapshot) -> Iterator[str]:
    """Yield the texts of the lake's messages with repeats, in no particular order."""
    steps = inline_blobs(snapshot, collect_rows(snapshot.scan("steps").select(_STEP_COLUMNS)), STEP_DOCUMENTS)
    steps = steps.sort("episode_id", "step_index")
    heads = collect_rows(snapshot.scan("episodes").select("episode_id", "initial_messages", "tools"))
    heads = inline_blobs(snapshot, heads, ("initial_messages", "tools"))
    head_of = {row["episode_id"]: row for row in heads.iter_rows(named=True)}
    for part in steps.partition_by("episode_id", maintain_order=True):
        head = head_of[part["episode_id"][0]]
        # Steps that cannot be rendered are not trained on.
        with suppress(UnrenderableError):
            yield from collect_texts(read_turns(head["initial_messages"], part.to_dicts()))
    yield from heads["tools"].drop_nulls().unique()


def build_tokenizer(texts: list[str], vocabulary: int) -> "PreTrainedTokenizerFast":
    """Train a byte-level BPE tokenizer of at most `vocabulary` ids, with the template above."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(tokenizer: "PreTrainedTokenizerFast", config: TinyModelConfig) -> "LlamaForCausalLM":
    """Build a randomly initialised Llama in float32; the same seed gives the same weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=2 * config.hidden_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.hidden_size // HEAD_DIM,
        num_key_value_heads=1,
        max_position_embeddings=config.max_positions,
        initializer_range=config.initializer_range,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        # Parameters are float32 unless torch's default says otherwise.
        return LlamaForCausalLM(shape)  # type: ignore[no-untyped-call]
