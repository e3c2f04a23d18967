"""The demo's policy after its warm start, and others near it, as folders that engines serve."""

from pathlib import Path

import torch  # noqa: TID253 - a script that does nothing without it

import lake
from trainer.online.demo import DemoConfig, train_warm_start
from trainer.policy.model_files import load_model, load_tokenizer


def warm_policy(folder: Path) -> Path:
    """Train it; 20 seconds."""
    lk = lake.open(folder / "demo-lake", create=True)
    return train_warm_start(lk, DemoConfig(traces=800), folder / "models", lambda _: None)


def near(policy: Path, folder: Path, seed: int) -> Path:
    """The policy with other weights, as after an update: a hundredth of noise on each."""
    model = load_model(policy)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.01)
    model.save_pretrained(folder)
    load_tokenizer(policy).save_pretrained(folder)
    return folder
