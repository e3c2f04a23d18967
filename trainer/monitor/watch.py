"""What is looked at after every update: alarms, tokens per second, and the share of the device's peak (MFU).

Floating point operations of a forward and backward pass, counted as those that the update needs, not those that
checkpointing repeats (Chowdhery et al. 2022, arXiv 2204.02311, appendix B):

    6 * body parameters * tokens  +  6 * layers * width * sum over sequences of length^2  +  6 * head * trained tokens

Body parameters are those of matrices except the embedding; attention is causal, so half of the square counts; the LM
head runs at trained tokens only.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch  # noqa: TID253 - loaded by commands only when they train

from lake.read.snapshot import Snapshot
from trainer.config import AlarmConfig, TrainConfig
from trainer.data.select.selection import Selection
from trainer.policy.model import Policy
from trainer.runs.loop import StepReport

_SHARED = """
SELECT count(*) FILTER (anchor_episodes > 1) AS shared, count(*) AS steps FROM {rows} WHERE anchor_key IS NOT NULL
"""


@dataclass(slots=True)
class Alarms:
    """Which alarms are active, from update to update: what usually precedes a ruined run, said while it happens.

    Four signs, each with a threshold: the policy's entropy collapses, the weights or ratios of an update listen to a
    few tokens only (low effective sample size), most groups have no signal, hardly a step shares its anchor state with
    a sibling. The first two are looked for after every update, the others once, in the data. An alarm is reported when
    it begins, and then not until the figure has recovered; every update's row says how many are active.
    """

    config: AlarmConfig
    """Thresholds."""
    first_entropy: float | None = None
    """Entropy at the run's first update; None before it, and for losses that do not compute it."""
    active: set[str] = field(default_factory=set)
    """Names of the alarms that were on at the last update."""

    def check(self, metrics: Mapping[str, float]) -> list[str]:
        """Look at the metrics of an update (those of `METRICS`); a sentence for each alarm that begins here."""
        if self.first_entropy is None:
            self.first_entropy = metrics.get("entropy")
        found = self._entropy(metrics) | self._sample_size(metrics)
        begun = [sentence for name, sentence in found.items() if name not in self.active]
        self.active = set(found)
        return begun

    def _entropy(self, metrics: Mapping[str, float]) -> dict[str, str]:
        entropy = metrics.get("entropy")
        if entropy is None:
            return {}
        floors = []
        if self.config.entropy is not None:
            floors.append(self.config.entropy)
        if self.config.entropy_share is not None and self.first_entropy is not None:
            floors.append(self.config.entropy_share * self.first_entropy)
        if not floors or entropy >= max(floors):
            return {}
        sentence = (
            f"entropy {entropy:.3g} nats, below {max(floors):.3g}: the policy collapses onto single tokens; "
            "lower --lr, add an entropy bonus or a KL term"
        )
        return {"entropy": sentence}

    def _sample_size(self, metrics: Mapping[str, float]) -> dict[str, str]:
        floor = self.config.effective_sample_size
        if floor is None:
            return {}
        return {
            name: f"{name} {value:.3g}, below {floor:g}: the update listens to a few tokens; raise beta, truncate the "
            "weights, or train on fresher data"
            for name, value in sorted(metrics.items())
            if name.endswith("_ess") and value < floor
        }


def data_alarms(config: AlarmConfig, snapshot: Snapshot, selection: Selection) -> list[str]:
    """What is alarming in the data before the first update, as sentences."""
    found = []
    if config.dead_groups is not None and selection.groups and selection.dead_groups is not None:
        share = selection.dead_groups / selection.groups
        if share > config.dead_groups:
            found.append(
                f"{selection.dead_groups} of {selection.groups} groups are dead (above {config.dead_groups:.0%}): "
                "their siblings all scored the same; collect harder or easier tasks, or score more finely"
            )
    if config.shared_anchors is not None and selection.source is not None:
        shared, steps = snapshot.sql(_SHARED.format(rows=selection.source.rows)).row(0)
        if steps and shared / steps < config.shared_anchors:
            found.append(
                f"{shared / steps:.1%} of the steps share their anchor state with a sibling (below "
                f"{config.shared_anchors:.0%}): step advantages vanish; `trajlake anchors` compares other definitions"
            )
    return found


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
        """Floating point operations of an optimizer step; squared_lengths is the sum over its sequences."""
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

    Seconds and tokens are those of all devices that train.
    """

    def __init__(self, config: TrainConfig, policy: Policy, devices: int, alarms: Alarms) -> None:
        self._shape = model_shape(policy)
        device = torch.cuda.get_device_name(policy.device) if policy.device.type == "cuda" else "cpu"
        self._peak = peak_operations(device) if config.peak_tflops is None else config.peak_tflops * 1e12
        self._devices = devices
        self._alarms = alarms

    def observe(self, report: StepReport) -> None:
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
        metrics["alarms"] = float(len(self._alarms.active))
