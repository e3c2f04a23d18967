"""LoRA: small trained matrices beside frozen weights, by peft. A checkpoint holds them alone.

Adapters are put into the model in place, so that it stays the transformers model that it was. They start at no effect
(B = 0), from a seed. `merged` gives the weights of an ordinary model that computes the same.
"""

import warnings
from pathlib import Path
from typing import Any

import torch  # noqa: TID253 - loaded by commands only when they train
from torch import Tensor  # noqa: TID253

from lake.errors import UsageError
from trainer.config import LoRAConfig

ADAPTER = "default"
"""peft's name for the adapters."""


def add_adapters(model: Any, config: LoRAConfig, *, seed: int) -> None:
    """Put adapters into a model and freeze everything else.

    Raises:
        UsageError: peft is not installed, no layer has one of the names, or one is the embedding or the LM head.
    """
    peft = _peft()
    options = _peft_config(peft, config, base=None)
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    for name, module in model.named_modules():
        if any(module is end for end in ends) and name.rpartition(".")[2] in config.targets:
            msg = f"{name} cannot have adapters, only layers between embedding and LM head can: take it out of targets"
            raise UsageError(msg)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # GPT-2 keeps its matrices transposed, and peft notices by itself.
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")
        torch.manual_seed(seed)
        try:
            peft.inject_adapter_in_model(options, model)
        except ValueError as error:
            names = sorted({n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)})
            msg = f"no layer to adapt is named {config.targets}; the model's linear layers are {', '.join(names)}"
            raise UsageError(msg) from error


def merged(weights: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    """Weights of the model without adapters that computes the same: W + alpha / rank * B A.

    Takes every weight of the adapted model by name, as plain tensors; each layer of the model knows its scale and
    orientation. Names are those before the model was adapted; tensors are new where something was added.
    """
    plain = {name.replace(".base_layer.", "."): t for name, t in weights.items() if ".lora_" not in name}
    for prefix, layer in model.named_modules():
        if f"{prefix}.lora_A.{ADAPTER}.weight" not in weights:
            continue
        down, up = (weights[f"{prefix}.lora_{side}.{ADAPTER}.weight"] for side in "AB")
        change = (up.float() @ down.float()) * layer.scaling[ADAPTER]
        base = weights[f"{prefix}.base_layer.weight"]
        change = change.T if layer.fan_in_fan_out else change
        plain[f"{prefix}.weight"] = (base.float() + change).to(base.dtype)
    return plain


def save_adapters(folder: Path, weights: dict[str, Tensor], config: LoRAConfig, base: str) -> None:
    """Write adapters as a folder that peft and inference engines load; weights by name, as plain tensors."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    named = {f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": t.contiguous() for name, t in weights.items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    options = _peft_config(_peft(), config, base=base)
    options.inference_mode = True
    options.save_pretrained(str(folder))


def _peft_config(peft: Any, config: LoRAConfig, base: str | None) -> Any:
    targets = config.targets if isinstance(config.targets, str) else list(config.targets)
    return peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=targets,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )


def _peft() -> Any:
    """The package peft; a UsageError where it is not installed."""
    try:
        import peft
    except ImportError as error:
        raise UsageError('LoRA needs the package peft: pip install "trajlake[lora]"') from error
    return peft
