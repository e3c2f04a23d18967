"""Monitors training: alarms, tokens per second, share of the device's peak (MFU), validation on held-out episodes.

Floating point operations of a forward and backward pass exclude those that checkpointing repeats (Chowdhery et al.
2022, arXiv 2204.02311, appendix B):

    6 * body parameters * tokens  +  6 * layers * width * sum over sequences of length^2  +  6 * head * trained tokens

Body parameters are those of matrices except the embedding. Attention is causal, so half of the square counts. The LM
head runs at trained tokens only.

Validation measures the mean negative log-likelihood of the held-out episodes' action tokens. It exists for every loss,
and it rises when a policy leaves the data. Stopping is a pure function of the measurements so far, which the checkpoint
stores. A resumed run therefore stops where an uninterrupted one does.
"""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch  # noqa: TID253 - a script that does nothing without it

from lake.judgements.credit import Credit
from lake.read.snapshot import Snapshot
from trainer.config import AlarmConfig, TrainConfig, ValidationConfig
from trainer.data.stream import Stream
from trainer.losses import Needs
from trainer.policy.model import PackedPolicy
from trainer.runs.loop import StepReport

if TYPE_CHECKING:
    from trainer.backends.base import PolicyBackend
    from trainer.data.plan import Plan

_SHARED = """
SELECT count(*) FILTER (anchor_episodes > 1) AS shared, count(*) AS steps FROM {rows} WHERE anchor_key IS NOT NULL
"""


_LOW = 0.1
"""Nats below which an entropy has no multiple: it is noise of a nearly deterministic policy."""
_PATIENCE = 8
"""Updates, without the first of each plan, after which a policy that did not move is reported."""
_DATA_ALARMS = frozenset({"dead_groups", "shared_anchors"})
"""Alarms about the data of an update, and not about the update."""


@dataclass(slots=True)
class Alarms:
    """Alarms that are active, from update to update: signs that usually precede a failed run.

    Signs in an update: the policy's entropy collapses, or rises again; few tokens dominate the weights or ratios (low
    effective sample size); the policy jumps away from the rollouts, or does not move. Signs in the data, before a run's
    first update and in each round of a loop: most groups have no signal, few steps share their anchor state. An alarm
    is reported when it starts, and again only after the figure has recovered. An update's row counts the active ones.
    """

    config: AlarmConfig
    """Thresholds."""
    figures: dict[str, float] = field(default_factory=dict)
    """Figures of the updates so far that the next ones are compared with, by name."""
    active: set[str] = field(default_factory=set)
    """Names of the alarms that were active at the last update."""

    def check(self, metrics: Mapping[str, float], index: int = 0) -> list[str]:
        """Check the metrics of an update (those of `METRICS`); return a sentence for each alarm that starts here.

        `index` is the update's number in its plan: the ratios of number 0 are those before the plan's first change.
        """
        config, entropy, alarms = self.config, metrics.get("entropy"), {}
        if entropy is not None:
            first = self.figures.setdefault("first_entropy", entropy)
            # A comparison with NaN is false: an entropy that is none leaves the lowest as it is.
            lowest = self.figures["lowest_entropy"] = min(self.figures.get("lowest_entropy", math.inf), entropy)
            least = max(config.entropy or 0.0, (config.entropy_share or 0.0) * first)
            if least > 0 and not entropy >= least:
                alarms["entropy"] = (
                    f"entropy {entropy:.3g} nats, below {least:.3g}: the policy collapses onto single tokens; "
                    "lower --lr, add an entropy bonus or a KL term"
                )
            if config.entropy_rise is not None and entropy > config.entropy_rise * max(lowest, _LOW):
                alarms["entropy_rise"] = (
                    f"entropy {entropy:.3g} nats, more than {config.entropy_rise:g} times the lowest so far "
                    f"({lowest:.3g}): the policy is pushed away from what it did; lower --lr or the entropy bonus, or "
                    "let episodes weigh alike (loss grpo)"
                )
        if "outside_half_two" in metrics:
            alarms |= self._check_ratios(metrics["outside_half_two"], metrics["log_ratio_abs"], index)
        floor = config.effective_sample_size
        for name, value in sorted(metrics.items()):
            if floor is not None and name.endswith("_ess") and value < floor:
                alarms[name] = (
                    f"{name} {value:.3g}, below {floor:g}: a few tokens dominate the update; raise beta, truncate the "
                    "weights, or train on fresher data"
                )
        return self._start(alarms, self.active - _DATA_ALARMS)

    def check_data(
        self, snapshot: Snapshot, credit: Credit | None, dead_groups: int | None, groups: int | None
    ) -> list[str]:
        """Check the data of the next updates; return a sentence for each alarm that starts here.

        `credit` is None for losses without advantages, and a number of groups is None if it is unknown.
        """
        limit, fewest, alarms = self.config.dead_groups, self.config.shared_anchors, {}
        if limit is not None and groups and dead_groups is not None and dead_groups / groups > limit:
            alarms["dead_groups"] = (
                f"{dead_groups} of {groups} groups are dead (above {limit:.0%}): their siblings all scored the same; "
                "collect harder or easier tasks, score more finely, or start from weights that solve some of the tasks"
            )
        if fewest is not None and credit is not None:
            shared, steps = snapshot.sql(_SHARED.format(rows=credit.rows)).row(0)
            if steps and shared / steps < fewest:
                alarms["shared_anchors"] = (
                    f"{shared / steps:.1%} of the steps share their anchor state with a sibling (below {fewest:.0%}): "
                    "step advantages vanish; `trajlake anchors` compares other definitions"
                )
        return self._start(alarms, self.active & _DATA_ALARMS)

    def _start(self, alarms: Mapping[str, str], replaced: Set[str]) -> list[str]:
        """Make `alarms` active instead of `replaced`; return the sentences of those that were not active."""
        started = [sentence for name, sentence in alarms.items() if name not in self.active]
        self.active = (self.active - replaced) | set(alarms)
        return started

    def _check_ratios(self, outside: float, change: float, index: int) -> dict[str, str]:
        """Check the share of tokens outside [0.5, 2] and the mean |log ratio|; return sentences of active alarms."""
        jump, standstill, figures, alarms = self.config.policy_jump, self.config.policy_standstill, self.figures, {}
        if index == 0:
            figures["first_outside"] = outside
        else:
            figures["follow_ups"] = figures.get("follow_ups", 0) + 1
            figures["largest_change"] = max(figures.get("largest_change", 0.0), change)
        first, count = figures.get("first_outside", 0.0), figures.get("follow_ups", 0)
        if jump is not None and outside - first > jump:
            alarms["policy_jump"] = (
                f"{outside:.0%} of the tokens have a ratio outside [0.5, 2], after {first:.0%} at the first update on "
                f"the rollouts, a rise above {jump:.0%}: few updates replace the policy; lower --lr to a third, or do "
                "fewer updates on the same rollouts"
            )
        if standstill is not None and count >= _PATIENCE and figures["largest_change"] < standstill:
            alarms["policy_standstill"] = (
                f"mean |log ratio| at most {figures['largest_change']:.2g} nats in {count:.0f} updates, below "
                f"{standstill:g}: the policy does not move; raise --lr tenfold"
            )
        return alarms


_PEAKS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}
"""Dense bfloat16 operations per second, from the vendors' data sheets, by a part of the device's name."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes that determine the arithmetic per token."""

    body: int
    """Parameters in matrices, without embedding and LM head."""
    head: int
    """Parameters of the LM head."""
    layers: int
    width: int
    """Heads times head dimension."""

    def update_operations(self, *, tokens: int, squared_lengths: int, loss_tokens: int) -> float:
        """Return floating point operations of an optimizer step; squared_lengths is the sum over its sequences."""
        attention = 6.0 * self.layers * self.width * squared_lengths
        return 6.0 * self.body * tokens + attention + 6.0 * self.head * loss_tokens


def measure_shape(policy: "PackedPolicy") -> ModelShape:
    """Return the shape of a policy's model."""
    config = policy.model.config
    embedding = policy.model.get_input_embeddings().weight
    head = policy.model.get_output_embeddings().weight
    matrices = sum(p.numel() for p in policy.model.parameters() if p.ndim >= 2 and p is not embedding and p is not head)
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    return ModelShape(matrices, head.numel(), config.num_hidden_layers, width)


def find_peak_operations(device_name: str) -> float | None:
    """Return peak operations per second of a device; None if unknown (for example a CPU)."""
    return next((peak for part, peak in _PEAKS.items() if part in device_name), None)


class UpdateMonitor:
    """Adds tokens_per_second, mfu (if the device's peak is known) and alarms to an update's metrics.

    Seconds and tokens are totals over all devices that train.
    """

    def __init__(self, config: TrainConfig, policy: PackedPolicy, devices: int, alarms: Alarms) -> None:
        self._shape = measure_shape(policy)
        device = torch.cuda.get_device_name(policy.device) if policy.device.type == "cuda" else "cpu"
        self._peak = find_peak_operations(device) if config.peak_tflops is None else config.peak_tflops * 1e12
        self._devices = devices
        self._alarms = alarms

    def observe(self, report: StepReport) -> None:
        """Complete the metrics of an update, and its alarms: a sentence for each that starts with it."""
        step, metrics = report.step, report.metrics
        seconds = metrics["seconds"]
        if seconds > 0:
            metrics["tokens_per_second"] = step.tokens / seconds
            if self._peak is not None:
                operations = self._shape.update_operations(
                    tokens=step.tokens, squared_lengths=step.squared_lengths, loss_tokens=step.loss_tokens
                )
                metrics["mfu"] = operations / seconds / (self._peak * self._devices)
        report.alarms.extend(self._alarms.check(metrics, step.index))
        metrics["alarms"] = float(len(self._alarms.active))


Measurement = tuple[int, float]
"""Number of updates before it, negative log-likelihood in nats per token."""


def find_best(history: Sequence[Measurement], min_improvement: float = 0.0) -> Measurement | None:
    """Return the measurement that later ones have to beat; None before the first.

    A measurement replaces the best before it if it is lower by more than `min_improvement`; NaN never does.
    """
    winner: Measurement | None = None
    for step, value in history:
        if not math.isnan(value) and (winner is None or value < winner[1] - min_improvement):
            winner = (step, value)
    return winner


def find_best_step(history: Sequence[Measurement], config: ValidationConfig | None) -> int | None:
    """Return the number of updates at the best measurement; None without one."""
    winner = None if config is None else find_best(history, config.min_improvement)
    return None if winner is None else winner[0]


def should_stop(history: Sequence[Measurement], patience: int | None, min_improvement: float) -> bool:
    """Return whether `patience` measurements in a row brought no improvement; never if it is None."""
    winner = find_best(history, min_improvement)
    stale = len(history) if winner is None else sum(step > winner[0] for step, _ in history)
    return patience is not None and stale >= patience


def negative_log_likelihood(backend: "PolicyBackend", snapshot: Snapshot, plan: "Plan", config: "TrainConfig") -> float:
    """Return the mean negative log-likelihood, in nats, of a plan's trained tokens at temperature 1."""
    total = 0.0
    with Stream(snapshot, plan, Needs(), config, rank=backend.rank, world_size=backend.world_size) as stream:
        for _, batches in stream.steps():
            total -= math.fsum(float(backend.logprobs(batch).sum()) for batch in batches if not batch.dummy)
    return backend.ranks.sum_over_ranks({"nll": total})["nll"] / plan.loss_tokens
