"""Playing: groups for the data set, and success of a checkpoint on given starts. Always sampled at temperature 1."""

from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.ladder.settings import LadderSettings
from lake.records import EpisodeRecord
from pipelines.collect import GroupConfig, collect_groups
from pipelines.collect.environments.house import House, HouseConfig, Split
from pipelines.collect.factory import load_model
from pipelines.collect.policies import Policy
from pipelines.collect.policies.transformers_policy import SamplingConfig, TransformersPolicy

MAX_ACTION_TOKENS = 4


def houses(settings: LadderSettings, split: Split) -> Callable[[], House]:
    """Makes houses."""
    config = HouseConfig(rooms=settings.rooms, horizon=settings.horizon, split=split)
    return lambda: House(config)


def policy_of(model: Path, name: str) -> TransformersPolicy:
    """A checkpoint as a policy."""
    sampling = SamplingConfig(max_action_tokens=MAX_ACTION_TOKENS)
    return TransformersPolicy(*load_model(str(model)), name=name, version=0, sampling=sampling)


def rollouts(
    settings: LadderSettings,
    policy: Policy,
    seeds_P: Sequence[int],
    *,
    split: Split,
    siblings: int,
    run_seed: int,
    number: int = 0,
) -> list[EpisodeRecord]:
    """Groups of siblings, one after the other."""
    groups = collect_groups(
        houses(settings, split),
        policy,
        seeds_P,
        config=GroupConfig(group_size=siblings),
        run_seed=run_seed,
        collection_round=number,
    )
    return [record for group in groups for record in group]


def successes(settings: LadderSettings, model: Path, seeds_P: Sequence[int], *, split: Split, run_seed: int) -> int:
    """On how many starts a checkpoint reaches the goal, one rollout each."""
    played = rollouts(settings, policy_of(model, "arm"), seeds_P, split=split, siblings=1, run_seed=run_seed)
    return sum(record.env_return == 1.0 for record in played)
