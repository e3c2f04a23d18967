"""AdamW, with weight decay on matrices only."""

from collections.abc import Iterable

import torch  # noqa: TID253 - loaded by commands only when they train

from trainer.config import OptimizerConfig


def adamw(parameters: Iterable[torch.nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101) over the parameters that are trained; its learning rate is set at each step.

    On a CPU it runs parameter by parameter: the order of its operations then never depends on how tensors are grouped.
    On a GPU it is one fused kernel.

    Args:
        parameters: of the model; frozen ones are left out.
        config: its constants.
    """
    trained = [p for p in parameters if p.requires_grad]
    decayed = [p for p in trained if p.ndim >= 2]
    plain = [p for p in trained if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=0.0,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        foreach=False,
        fused=bool(trained) and trained[0].is_cuda,
    )
