"""The settings of a collection: the section [collect] of a settings file, and what [loop.collect] shares with it."""

from collections.abc import Mapping
from typing import Any, Self

import msgspec
from pydantic import Field, model_validator

from lake.settings import FrozenModel
from pipelines.collect.factory import PROMPTS, PlayerOptions
from pipelines.collect.manager.rounds import Keep, RunSettings
from pipelines.collect.manager.scheduler import RolloutLimits
from pipelines.collect.tasks import TaskSet, list_seed_tasks, read_tasks


class TaskConfig(FrozenModel):
    """The tasks of rollouts."""

    prompts: str | None = None
    """File of tasks, JSONL or Parquet; None takes seeds."""
    first_seed: int = Field(0, ge=0)
    """First seed."""
    tasks: int = Field(10_000, ge=1)
    """Number of seeds."""

    def task_set(self, *, are_shown: bool) -> TaskSet:
        """Return the tasks; `are_shown`: they are prompts for the policy. Raises FormatError: the file has no task."""
        if self.prompts is None:
            return list_seed_tasks(self.first_seed, self.tasks)
        return read_tasks(self.prompts, are_shown=are_shown)


class RoundConfig(TaskConfig):
    """The rollouts of a round."""

    player: PlayerOptions = PlayerOptions()
    """Environment or agent, engines, sampling. Without engines the model plays in this process. With `prompts` and no
    environment, the policy answers the prompts alone."""
    groups: int = Field(32, ge=1)
    """Number of tasks of a round."""
    group_size: int = Field(8, ge=1)
    """Rollouts of a task."""
    oversample: int = Field(0, ge=0)
    """Number of additional rollouts of a task; `keep` leaves out as many."""
    keep: Keep = "all"
    """Rollouts of an oversampled group that stay: all, the first that finish, or the best by return
    (in a loop by `loop.credit.score`)."""
    carry_over: bool = False
    """Continue surplus rollouts of `keep = "first"` in the next round, under its weights."""
    parallel: int = Field(256, ge=1)
    """Number of rollouts at the same time."""
    retries: int = Field(1, ge=0)
    """Number of attempts after a failure."""
    episode_seconds: float | None = Field(None, gt=0)
    """Longest duration of a rollout in seconds, after which it is cut off."""

    @model_validator(mode="before")
    @classmethod
    def _show_prompts(cls, settings: Any) -> Any:
        """Let the policy answer the prompts alone where the player has no environment and no agent."""
        player = settings.get("player", {}) if isinstance(settings, Mapping) else None
        if not isinstance(player, Mapping) or settings.get("prompts") is None or {"env", "agent"} & player.keys():
            return settings
        return {**settings, "player": {**player, "env": PROMPTS}}

    @model_validator(mode="after")
    def _check_siblings(self) -> Self:
        if self.keep != "all" and not self.oversample:
            raise ValueError(f'`keep = "{self.keep}"` needs `oversample`: siblings that may be left out')
        if self.carry_over and self.keep != "first":
            raise ValueError('`carry_over` needs `keep = "first"`')
        return self

    @property
    def limits(self) -> RolloutLimits:
        """Return the limits for the manager of rollouts."""
        return RolloutLimits(
            keep=self.keep,
            carry_over=self.carry_over,
            parallel=self.parallel,
            retries=self.retries,
            episode_seconds=self.episode_seconds,
        )


class CollectionConfig(RoundConfig):
    """A run of `trajlake collect`."""

    run: str = "collect"
    """Name of the run; an existing run resumes."""
    rounds: int = Field(1, ge=1)
    """Total number of rounds of the run."""
    seed: int = 0
    """Seed of the task order and the samples."""
    grace: float = Field(60.0, ge=0)
    """Seconds that rollouts may continue after Ctrl-C."""
    record_only: str | None = None
    """Function of a record, as FILE:FUNCTION. Episodes for which it is false are not recorded."""

    @property
    def limits(self) -> RolloutLimits:
        """Return the limits for the manager of rollouts."""
        return msgspec.structs.replace(super().limits, grace=self.grace)

    @property
    def run_settings(self) -> RunSettings:
        """Return name, sizes and seed of the rounds. Raises UsageError: the name is invalid."""
        return RunSettings(
            run=self.run,
            groups=self.groups,
            group_size=self.group_size,
            oversample=self.oversample,
            seed=self.seed,
        )
