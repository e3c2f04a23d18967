"""The instance of a policy that plays: the trainer's own computes packed attention and cannot generate."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase  # noqa: TID253

from trainer.policy.model_files import load_model, load_tokenizer


class Player:
    """A model that generates, and its tokenizer.

    Args:
        folder: the policy in Hugging Face layout.
    """

    def __init__(self, folder: Path) -> None:
        self.model: Any = load_model(folder).eval()
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(folder)

    def load(self, trained: Any) -> None:
        """Take over the weights of the instance that is trained."""
        self.model.load_state_dict(trained.state_dict())
