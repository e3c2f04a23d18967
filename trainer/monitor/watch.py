"""What is looked at after every update: speed and alarms."""

import torch  # noqa: TID253 - loaded by commands only when they train

from trainer.config import TrainConfig
from trainer.monitor.alarms import Alarms
from trainer.monitor.throughput import model_shape, peak_operations
from trainer.policy.model import Policy
from trainer.runs.loop import StepReport


class Watch:
    """Adds tokens_per_second, mfu (where the device's peak is known) and alarms to an update's metrics.

    Args:
        config: of the run.
        policy: the model that is trained.
        devices: how many train it; seconds and tokens are those of all.
        alarms: as they stand.
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
