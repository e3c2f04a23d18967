"""Configurations by purpose, as functions: what a researcher would set for a method, and nothing else.

Each returns a TrainConfig (or the stages of one run), which `trainer.runs.offline.train` (or `train_stages` in
`trainer.runs.stages`) takes. Keyword arguments set any other field.
"""

from typing import Any

from trainer.config import TrainConfig
from trainer.runs.stages import Stage


def sft(model: str, **fields: Any) -> TrainConfig:
    """The likelihood of the recorded actions.

    Args:
        model: model folder.
        fields: of `TrainConfig`.
    """
    return TrainConfig(**({"model": model, "loss": "sft"} | fields))


def filtered_bc(model: str, threshold: float = 1.0, **fields: Any) -> TrainConfig:
    """Behaviour cloning of the episodes whose return reaches a threshold (RFT, arXiv 2308.01825).

    Args:
        model: model folder.
        threshold: lowest `env_return` that is imitated.
        fields: of `TrainConfig`; `where` is combined with the threshold.
    """
    reached = f"env_return >= {float(threshold)!r}"
    where = fields.pop("where", None)
    return sft(model, where=f"({where}) AND {reached}" if where else reached, **fields)


def awr(model: str, beta: float = 1.0, **fields: Any) -> TrainConfig:
    """Advantage-weighted regression on live groups (arXiv 1910.00177).

    Args:
        model: model folder.
        beta: temperature of the weights, in standard deviations of the advantages.
        fields: of `TrainConfig`.
    """
    return TrainConfig(**({"model": model, "loss": "awr", "awr": {"beta": beta}} | fields))


def sft_then_rl(model: str, rl: TrainConfig, *, where: str = "env_return > 0", **fields: Any) -> list[Stage]:
    """Imitate what succeeded, then learn from advantages, starting from those weights.

    Args:
        model: model folder of the first stage.
        rl: the second stage; its `model` is not used.
        where: episodes of the first stage.
        fields: of the first stage's `TrainConfig`.
    """
    first = sft(model, where=where, **fields)
    return [Stage("sft", first, follows=False), Stage("rl", rl, follows=True)]
