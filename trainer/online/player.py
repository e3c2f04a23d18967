"""The instance of a policy that plays: the trainer's own computes packed attention and cannot generate."""

from pathlib import Path
from typing import Any

import torch  # noqa: TID253 - loaded by commands only when they train
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase  # noqa: TID253

from trainer.policy.model_files import load_tokenizer


class Player:
    """A model that generates, and its tokenizer.

    Args:
        folder: the policy in Hugging Face layout.
    """

    def __init__(self, folder: Path) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        model.train(mode=False)
        self.model = model
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(folder)

    def load(self, trained: Any) -> None:
        """Take over the weights of the instance that is trained."""
        self.model.load_state_dict(trained.state_dict())
