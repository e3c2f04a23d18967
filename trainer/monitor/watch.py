"""What is looked at after every update: alarms, tokens per second, and the share of the device's peak (MFU).

Floating point operations of a forward and backward pass, counted as those that the update needs, not those that
checkpointing repeats (Chowdhery et al. 2022, arXiv 2204.02311, appendix B):

    6 * body parameters * tokens  +  6 * layers * width * sum over sequences of length^2  +  6 * head * trained tokens

Body parameters are those of matrices except the embedding; attention is causal, so half of the square counts; the LM
head runs at trained tokens only.
"""

from dataclasses import dataclass

import torch  # noqa: TID253 - loaded by commands only when they train

from trainer.config import TrainConfig
from trainer.monitor.alarms import Alarms
from trainer.policy.model import Policy
from trainer.runs.loop import StepReport

_PEAKS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}
"""Dense bfloat16 operations per second, from the vendors' data sheets, by a part of the device's name."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes that decide how much arithmetic a token costs."""

    body: int
    """Parameters in matrices, without embedding and LM head."""
    head: int
    """Parameters of the LM head."""
    layers: int
    width: int
    """Heads times head dimension."""

    def update_operations(self, *, tokens: int, squared_lengths: int, loss_tokens: int) -> float:
        """Floating point operations of an optimizer step.

        Args:
            squared_lengths: sum of the squares of their lengths.
        """
        attention = 6.0 * self.layers * self.width * squared_lengths
        return 6.0 * self.body * tokens + attention + 6.0 * self.head * loss_tokens


def model_shape(policy: "Policy") -> ModelShape:
    """The shape of a policy's model."""
    config = policy.model.config
    embedding = policy.model.get_input_embeddings().weight
    head = policy.model.get_output_embeddings().weight
    matrices = sum(p.numel() for p in policy.model.parameters() if p.ndim >= 2 and p is not embedding and p is not head)
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    return ModelShape(matrices, head.numel(), config.num_hidden_layers, width)


def peak_operations(device_name: str) -> float | None:
    """Peak operations per second of a device; None if it is not known (a CPU, say)."""
    return next((peak for part, peak in _PEAKS.items() if part in device_name), None)


class Watch:
    """Adds tokens_per_second, mfu (where the device's peak is known) and alarms to an update's metrics.

    Args:
        devices: how many train it; seconds and tokens are those of all.
    """

    def __init__(self, config: TrainConfig, policy: Policy, devices: int, alarms: Alarms) -> None:
        self._shape = model_shape(policy)
        self._peak = peak_operations(_device_name(policy.device))
        if config.peak_tflops is not None:
            self._peak = config.peak_tflops * 1e12
        self._devices = devices
        self._alarms = alarms

    def look(self, report: StepReport) -> None:
        """Complete the metrics of an update, and its alarms: a sentence for each that begins with it."""
        step, metrics = report.step, report.metrics
        seconds = metrics["seconds"]
        if seconds > 0:
            metrics["tokens_per_second"] = step.tokens / seconds
            if self._peak is not None:
                operations = self._shape.update_operations(
                    tokens=step.tokens, squared_lengths=step.squared_lengths, loss_tokens=step.loss_tokens
                )
                metrics["mfu"] = operations / seconds / (self._peak * self._devices)
        report.alarms.extend(self._alarms.check(metrics))
        metrics["alarms"] = float(len(self._alarms.standing))


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
