"""Alarms: what usually precedes a ruined run, said while it happens.

Four signs, each with a threshold: the policy's entropy collapses, the weights or ratios of an update listen to a few
tokens only (low effective sample size), most groups have no signal, hardly a step shares its anchor state with a
sibling. The first two are looked for after every update, the others once, in the data. An alarm is told when it begins
and falls silent until the figure has recovered; every update's row says which alarms stand.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from lake.judgements.credit import Credit
from lake.read.snapshot import Snapshot
from trainer.data.select.selection import Selection
from trainer.monitor.config import AlarmConfig

_SHARED = """
SELECT count(*) FILTER (anchor_episodes > 1) AS shared, count(*) AS steps FROM {rows} WHERE anchor_key IS NOT NULL
"""


@dataclass(slots=True)
class Alarms:
    """Which alarms stand, from update to update."""

    config: AlarmConfig
    """Thresholds."""
    first_entropy: float | None = None
    """Entropy at the run's first update; None before it, and for losses that do not compute it."""
    standing: set[str] = field(default_factory=set)
    """Names of the alarms that were on at the last update."""

    def check(self, metrics: Mapping[str, float]) -> list[str]:
        """Look at an update.

        Args:
            metrics: of the update, by the names of `trainer.runs.metrics.METRICS`.

        Returns:
            A sentence for each alarm that begins here.
        """
        if self.first_entropy is None:
            self.first_entropy = metrics.get("entropy")
        found = self._entropy(metrics) | self._sample_size(metrics)
        begun = [sentence for name, sentence in found.items() if name not in self.standing]
        self.standing = set(found)
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
        shared = shared_anchor_share(snapshot, selection.source)
        if shared is not None and shared < config.shared_anchors:
            found.append(
                f"{shared:.1%} of the steps share their anchor state with a sibling (below "
                f"{config.shared_anchors:.0%}): step advantages vanish; `trajlake anchors` compares other definitions"
            )
    return found


def shared_anchor_share(snapshot: Snapshot, source: Credit) -> float | None:
    """Share of the credited steps whose anchor two or more episodes visited; None without anchors."""
    shared, steps = snapshot.sql(_SHARED.format(rows=source.rows)).row(0)
    return shared / steps if steps else None
