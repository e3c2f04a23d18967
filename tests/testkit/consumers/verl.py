"""verl loads exported prompts as its RLHFDataset, and collates them to a batch.

Argument: the prompts. The tokenizer is a stub: a character is a token.
"""

import json
import sys

import numpy
import torch  # noqa: TID253 - a script that does nothing without it
from omegaconf import OmegaConf
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn


class Characters:
    """A tokenizer, as far as verl asks for one."""

    def apply_chat_template(self, messages, tokenize=True, **_):
        """The texts, one after the other."""
        text = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        return [ord(character) for character in text] if tokenize else text


def plain(value):
    """As JSON has it."""
    return value.tolist() if isinstance(value, numpy.ndarray | torch.Tensor) else value


def main():
    """Print what is found."""
    config = OmegaConf.create({"cache_dir": "cache", "max_prompt_length": 500, "filter_overlong_prompts_workers": 1})
    prompts = RLHFDataset(sys.argv[1], Characters(), config)
    batch = collate_fn([prompts[index] for index in range(len(prompts))])
    print(json.dumps({name: plain(value) for name, value in batch.items()}))


main()
