"""Equal tokens: how many passes an arm makes over how much of its data.

The budget is one pass over the live groups. Other data is passed over as often as comes nearest to it, once at least;
where that is too much, whole groups are left out by a hash of the group until it fits. A token counts each time it goes
through the model that is trained, context included.
"""

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from benchmarks.ladder.arms import ARMS, Arm, Data
from benchmarks.ladder.settings import LadderSettings
from lake.lake import Lake
from trainer.config import TrainConfig
from trainer.data.plan import Plan
from trainer.data.preparation import prepare
from trainer.policy.model_files import load_tokenizer

PARTS = 1000
"""Groups are left out in parts of this size of one."""


class Share(BaseModel):
    """What of its data an arm trains on, and how often."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    where: str
    """SQL predicate over `episodes`."""
    parts: int
    """Groups kept, in thousandths."""
    passes: int
    minibatches: int
    """Optimizer steps of a pass."""
    tokens: int
    """Of all passes."""
    action_tokens: int
    episodes: int
    """Of a pass."""


def shares(
    lk: Lake, model: Path, run: str, live: str, jobs: dict[str, str], settings: LadderSettings
) -> tuple[dict[str, Share], int]:
    """What each kind of data is cut to, and the number of optimizer steps.

    Args:
        lk: the lake with the data set.
        model: any model with the policy's tokenizer.
        run: of the data set.
        live: name of the selection of live groups.
        jobs: credit jobs.
        settings: of the ladder.
    """
    first: dict[Data, Arm] = {arm.data: arm for arm in reversed(ARMS) if arm.data is not Data.NOTHING}

    def plan(data: Data, n_parts: int = PARTS) -> Plan:
        fields = training(first[data], first[data].values[:1], jobs, live)
        config = TrainConfig(model=str(model), where=where(data, run, n_parts), **fields)
        return prepare(lk, config, load_tokenizer(str(model))).plan

    once = {data: plan(data) for data in first}
    budget = once[Data.LIVE].tokens
    steps = -(-once[Data.LIVE].episodes // settings.episodes_per_step)
    plans = {}
    for data, total in once.items():
        passes = max(1, round(budget / total.tokens))
        n_parts, cut = PARTS, total
        if passes * total.tokens > budget:
            low, high = 1, PARTS
            while low < high:
                middle = (low + high + 1) // 2
                low, high = (middle, high) if passes * plan(data, middle).tokens <= budget else (low, middle - 1)
            n_parts, cut = low, plan(data, low)
        plans[data.value] = Share(
            where=where(data, run, n_parts),
            parts=n_parts,
            passes=passes,
            minibatches=max(1, round(steps / passes)),
            tokens=passes * cut.tokens,
            action_tokens=passes * cut.loss_tokens,
            episodes=cut.episodes,
        )
    return plans, steps


def where(data: Data, run: str, n_parts: int) -> str:
    """The predicate of a kind of data, cut to some of its groups."""
    texts = [f"run_id = '{run}'"]
    if data is Data.SUCCESSES:
        texts.append("env_return >= 1")
    if n_parts < PARTS:
        texts.append(f"group_id % {PARTS} < {n_parts}")
    return " AND ".join(texts)


def training(arm: Arm, value: tuple[float, ...], jobs: dict[str, str], live: str) -> dict[str, object]:
    """Fields of an arm's training run that say what it trains on and how."""
    fields: dict[str, object] = arm.options(value[0] if value else None)
    fields |= {"tokens": "engine", "threads": 1, "live_only": False}
    if arm.credit:
        fields["advantages"] = jobs[arm.credit]
    if arm.data in (Data.LIVE, Data.PAIRS):
        fields["selection"] = live
    return fields
