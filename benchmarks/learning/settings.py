"""The study: environments, sizes, seeds and budgets, fixed before anything is compared (docs/learning.md)."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from benchmarks.learning.arms import ARMS, Arm
from trainer.config import ScheduleConfig, TrainConfig

TUNING_SEEDS = (100, 101)
"""Seeds of the runs that choose learning rates and open the gate: none of the seeds that are compared."""
GATE = 0.20
"""What every arm must gain over its start, as a share of the held-out starts, for an environment to be compared."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Regime(_Frozen):
    """Sizes of model, start and updates, as in docs/learning.md. An environment changes some, and a pilot others."""

    layers: int = Field(2, ge=1)
    heads: int = Field(3, ge=1)
    """Of 32 dimensions each: the width of the model is 96."""
    traces: int = Field(800, ge=1)
    """Episodes of the noisy script that are cloned."""
    noise: float = Field(0.7, ge=0, le=1)
    """Share of the script's actions that are random."""
    clone_epochs: int = Field(4, ge=1)
    """Passes over the traces."""
    clone_rate: float = Field(3e-3, gt=0)
    """Learning rate of cloning."""
    groups: int = Field(16, ge=1)
    """Worlds of a round."""
    group_size: int = Field(8, ge=1)
    """Siblings of a world."""
    minibatches: int = Field(4, ge=1)
    """Updates of a round."""
    entropy: float = Field(0.02, ge=0)
    """Coefficient of the entropy bonus."""
    weighs: Literal["tokens", "episodes"] = "tokens"
    """What has equal weight in the mean of a loss."""
    schedule: Literal["constant", "linear"] = "constant"
    tokens: int = Field(600_000, ge=1)
    """Budget of a run: collected tokens, prompts and answers; the round that reaches it is its last."""
    held_out: int = Field(200, ge=1)
    """Rollouts of the final weights on worlds of another split, one rollout each."""
    cold_temperature: float | None = Field(None, gt=0)
    """Temperature at which the final weights also play these worlds; None: they do not."""

    def training(self, model: str, learning_rate: float, seed: int, arm: Arm) -> TrainConfig:
        """Return the updates of a run.

        Args:
            model: folder of the start weights.
            learning_rate: learning rate of AdamW.
            seed: seed of the order of episodes.
            arm: its loss gets the regime's entropy bonus, if it has one.
        """
        loss = dict(arm.loss)
        if loss["name"] == "ppo":
            loss |= {"entropy_coefficient": self.entropy}
        if self.weighs == "episodes":
            loss |= {"unit": "episode", "aggregation": "unit_mean_token_mean"}
        return TrainConfig.model_validate(
            {
                "model": model,
                "loss": loss,
                "where": arm.where,
                "tokens": "engine",
                "minibatches": self.minibatches,
                "token_budget": 8192,
                "learning_rate": learning_rate,
                "schedule": ScheduleConfig(shape=self.schedule, warmup_fraction=0.0),
                "seed": seed,
                "threads": 1,
                "keep_last": 1,
                **arm.trainer,
            }
        )


class Environment(_Frozen):
    """An environment of the study and what differs there from the regime."""

    name: str
    """Name in `worlds.PUZZLES`."""
    label: str
    changes: dict[str, Any] = {}
    """Fields of the regime."""

    @property
    def env(self) -> str:
        """Return its name for `--env`."""
        return f"benchmarks.learning.worlds:{self.name.replace('-', '_')}"

    def regime(self, changes: dict[str, Any]) -> Regime:
        """Return the regime with the environment's changes and others."""
        return Regime.model_validate({**self.changes, **changes})


ENVIRONMENTS = {
    environment.name: environment
    for environment in (
        Environment(name="taxi", label="Taxi", changes={"noise": 0.5}),
        Environment(name="door-key", label="MiniGrid DoorKey 6x6", changes={"noise": 0.4, "tokens": 800_000}),
        Environment(name="frozen-lake", label="FrozenLake 8x8", changes={"noise": 0.3, "traces": 1500}),
        Environment(name="slippery-lake", label="FrozenLake 5x5, slippery", changes={"noise": 0.4, "traces": 1500}),
        Environment(name="sokoban-1", label="Sokoban 6x6, one box", changes={"noise": 0.3, "traces": 1500}),
        Environment(name="sokoban-2", label="Sokoban 6x6, two boxes", changes={"noise": 0.2, "traces": 1500}),
        Environment(name="key-corridor", label="MiniGrid KeyCorridor S3R2", changes={"noise": 0.5}),
    )
}
"""By name, in the order of the study."""


class StudyPlan(_Frozen):
    """What is run on each environment. The defaults are those of docs/learning.md."""

    environments: tuple[str, ...] = ("taxi", "door-key", "frozen-lake", "slippery-lake")
    """Those that pilots showed to learn; the others are candidates."""
    arms: tuple[str, ...] = tuple(arm.name for arm in ARMS)
    rates: tuple[float, ...] = (3e-4, 1e-3, 3e-3)
    """Learning rates that are tried for each arm."""
    added_rates: dict[str, tuple[float, ...]] = {"taxi": (1e-4,), "door-key": (1e-4,)}
    """By environment: rates that were tried after the comparison. They are shown, and choose nothing."""
    seeds: int = Field(10, ge=1, le=20)
    """Paired seeds that are compared."""
    repeated: dict[str, tuple[str, ...]] = {"taxi": ("gigpo", "rloo")}
    """By environment: arms that are run again on all seeds and also measured cold. They are shown, and test nothing."""
    cold_temperature: float = 0.01
    """Temperature of the second measure of those runs."""
    gate: float = GATE
    changes: dict[str, Any] = {}
    """Fields of the regime, for all runs."""


SMALL = StudyPlan(
    arms=("grpo", "gigpo", "gae", "bc-exp"),
    rates=(1e-3,),
    added_rates={},
    repeated={},
    seeds=2,
    gate=-1.0,
    changes={
        "traces": 40,
        "clone_epochs": 1,
        "groups": 2,
        "group_size": 4,
        "minibatches": 2,
        "tokens": 1,
        "held_out": 4,
    },
)
"""Shows that everything works together; its figures mean nothing."""
