"""Weights from the trainer to engines that are generating.

A push gives every engine the same weights under one version, an integer that every token sampled from then on carries
(`tokens.policy_version`, `tokens.version_spans`). One version means one set of weights, for as long as tables last.

`disk.py` writes a model folder that engines read, `lora.py` the adapters alone, `nccl.py` sends them from GPU to GPU.
`fleet.py` gives them to all engines at once, and again to one that comes back without them; `probe.py` then compares
the engine's log-probabilities with the trainer's own, which shows weights that did not arrive, arrived in part, or are
computed in another way.

This package speaks to engines by the protocol of `pipelines.collect.engines` and imports nothing else of that layer.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trainer.sync.probe import Parity


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What engines are given."""

    version: int
    folder: Path | None = None
    """A model in Hugging Face layout, or LoRA adapters as peft writes them; None: sent to them directly."""
    adapter: str | None = None
    """Name that requests will call the adapters by; None: the folder holds the model itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """What a push came to at one engine."""

    url: str
    before: int | None
    """Version that it had; None if it was never told one, or did not say."""
    after: int | None
    """Version that it has now; None if it does not say: it is gone, or broke off while it loaded."""
    seconds: float
    """Wall time of loading, the pause included."""
    parity: Parity | None = None
    """How far its log-probabilities are from the trainer's; None if that was not measured."""
    error: str | None = None
    """Why it must not be used; None if it has the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """What a push came to."""

    version: int
    deliveries: tuple[Delivery, ...]
    """One per engine, in their order."""

    @property
    def failed(self) -> tuple[Delivery, ...]:
        """Engines that do not have the weights, or must not be used with them."""
        return tuple(delivery for delivery in self.deliveries if delivery.error is not None)

    def metrics(self) -> dict[str, float]:
        """Figures for the table `metrics`: of log-probabilities the worst engine's, of time the slowest one's."""
        parities = [delivery.parity for delivery in self.deliveries if delivery.parity is not None]
        found = {"sync/seconds": max((delivery.seconds for delivery in self.deliveries), default=0.0)}
        found["sync/failed"] = float(len(self.failed))
        if parities:
            found["sync/logprob_diff_max"] = max(parity.largest for parity in parities)
            found["sync/logprob_diff_mean"] = max(parity.mean for parity in parities)
        return found


class WeightSync(Protocol):
    """A way to bring the weights of one policy to engines."""

    @property
    def version(self) -> int | None:
        """Version that was pushed last; None before the first push."""
        ...

    async def push(self, version: int) -> None:
        """Take the policy's weights as they are now and begin to bring them to the engines.

        When it returns the trainer may change its weights. Waits for the push before, if that is still under way.
        """
        ...

    async def wait(self) -> Push | None:
        """What the last push came to, once every engine has its weights or failed to; None before the first."""
        ...
