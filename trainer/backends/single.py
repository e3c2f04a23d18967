"""The backend of one device: gradients, updates, and the weights as plain tensors."""

from collections.abc import Mapping

import torch  # noqa: TID253 - loaded by commands only when they train
from torch import Tensor  # noqa: TID253

from trainer.backends.base import PolicyBackend


class SingleDevice(PolicyBackend):
    """Trains one policy on one device.

    Args:
        policy: the model; its parameters are updated in place.
        config: AdamW's constants.
    """

    def _clip(self) -> float:
        on_gpu = self.policy.device.type == "cuda"
        return float(torch.nn.utils.clip_grad_norm_(self._trained, self._max_grad_norm, foreach=on_gpu))

    def _gathered(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(tensors)

    def _whole(self, tensor: Tensor) -> Tensor:
        return tensor

    def _placed(self, tensor: Tensor, like: Tensor) -> Tensor:
        return tensor.to(like.device)
