"""The trained model as an ordinary Hugging Face folder, whatever it was trained on.

With LoRA the folder holds the merged model, and `adapter/` the adapters alone, for engines that load them.
"""

from pathlib import Path

from trainer.atomic import atomic_folder
from trainer.backends.base import PolicyBackend
from trainer.config import TrainConfig
from trainer.policy.lora import merged, save_adapters
from trainer.policy.model_files import load_tokenizer


def export_model(backend: PolicyBackend, config: TrainConfig, folder: Path) -> None:
    """Write the model and its tokenizer; across ranks every one calls it, and rank 0 writes.

    Args:
        backend: the trained policy.
        config: the run: where the tokenizer is, and the adapters' options.
        folder: where to; replaced if there is one.
    """
    weights = backend.get_all_weights()
    adapters = {} if config.lora is None else backend.get_weights()
    if backend.rank == 0:
        model = backend.policy.model
        everything = {name: weights[first] for name, first in backend.policy.tied_names().items()}
        with atomic_folder(folder) as partial:
            model.save_pretrained(partial, state_dict=merged(everything, model) if adapters else everything)
            load_tokenizer(config.model).save_pretrained(partial)
            if config.lora is not None:
                save_adapters(partial / "adapter", adapters, config.lora, base=config.model)
    backend.ranks.wait()
