"""What datasets and TRL make of exported chats: the rows that are loaded, the texts of a chat template, a step trained.

Arguments: folders of exports, each called like its format.
"""

import json
import sys
from pathlib import Path

from datasets import load_dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: TID253
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer
from trl.data_utils import apply_chat_template, is_conversational, maybe_extract_prompt, unpair_preference_dataset

TEMPLATE = """{%- if tools %}<tools>{{ tools | map(attribute='function.name') | join(',') }}</tools>{% endif -%}
{%- for message in messages %}<{{ message.role }}>{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>
{%- endfor %}</{{ message.role }}>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
TRAINERS = {
    "messages": (SFTTrainer, SFTConfig),
    "prompt-completion": (SFTTrainer, SFTConfig),
    "preference": (DPOTrainer, DPOConfig),
    "unpaired": (KTOTrainer, KTOConfig),
}


def tokenizer():
    """Characters as tokens."""
    vocabulary = {character: index for index, character in enumerate(["<pad>", "<eos>", *map(chr, range(32, 127))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="?"
    )
    fast_tokenizer.chat_template = TEMPLATE
    return fast_tokenizer


def loss(name, rows, words):
    """Of one step of training."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(words), num_key_value_heads=2, **sizes)).save_pretrained("model")
    trainer, config = TRAINERS[name]
    settings = config(
        output_dir=name, max_steps=1, per_device_train_batch_size=2, use_cpu=True, report_to=[], disable_tqdm=True,
        bf16=False, gradient_checkpointing=False,
    )  # fmt: skip
    return trainer("model", args=settings, train_dataset=rows, processing_class=words).train().training_loss


def measure_folder(name, folder, words):
    """What is found in a folder."""
    kind = "parquet" if name.endswith("-parquet") else "json"
    shape = name.removesuffix("-parquet")
    paths = [str(path) for path in sorted(folder.glob("0*"))]
    rows = load_dataset(kind, data_files=paths, split="train", cache_dir="cache")
    chats = [maybe_extract_prompt(row) for row in rows]
    figures = {
        "columns": rows.column_names,
        "features": {column: str(feature) for column, feature in rows.features.items()},
        "rows": list(rows),
        "are_conversations": all(map(is_conversational, chats)),
        "texts": [apply_chat_template(row, words) for row in chats],
        "loss": loss(shape, rows, words),
    }
    if shape == "preference":
        figures["labels"] = unpair_preference_dataset(rows.select_columns(["prompt", "chosen", "rejected"]))["label"][:]
    return figures


def main():
    """Print what is found."""
    words = tokenizer()
    print(json.dumps({path.name: measure_folder(path.name, path, words) for path in map(Path, sys.argv[1:])}))


main()
