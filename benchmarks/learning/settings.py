"""What the study is: games, sizes, seeds and budgets, fixed before anything is compared. docs/learning.md says why."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from trainer.config import ScheduleConfig, TrainConfig
from trainer.losses.grpo import GRPOLoss

TUNING_SEED = 100
"""Seed of the runs that choose learning rates: none of the seeds that are compared."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Game(_Frozen):
    """A game of textworld-express."""

    name: str
    """As the package calls it."""
    label: str
    properties: dict[str, int]
    """Of the worlds that are drawn."""
    horizon: int
    """Actions after which an episode is cut off."""
    skipped: tuple[str, ...]
    """Actions that gold paths open with and that tell nothing which the first message does not."""

    @property
    def env(self) -> str:
        """As `--env` names it."""
        return f"textworld-express:{self.name}"

    def arguments(self, split: str) -> dict[str, Any]:
        """As `--env-arg` gives them; `split` is the package's fold."""
        return {"split": split, "max_steps": self.horizon, "show_state": True, **self.properties}


COIN = Game(
    name="coin",
    label="coin, 10 rooms with doors",
    properties={"numLocations": 10, "includeDoors": 1},
    horizon=25,
    skipped=("look around",),
)
MAP_READER = Game(
    name="mapreader",
    label="mapreader, 5 rooms",
    properties={"numLocations": 5, "maxDistanceApart": 2},
    horizon=30,
    skipped=("look around", "task"),
)
GAMES = {game.name: game for game in (COIN, MAP_READER)}


class Settings(_Frozen):
    """The defaults are those of docs/learning.md."""

    traces: int = 400
    """Gold paths that are cloned, each of another world of the fold `train`."""
    vocabulary: int = 1024
    """Token ids of a game's tokenizer, at most."""
    layers: int = 3
    heads: int = 3
    """Of 32 dimensions each: the width of the model is 96."""
    clone_epochs: int = 5
    """Passes over the traces."""
    clone_rate: float = 3e-3
    """Learning rate of cloning."""
    groups: int = 8
    """Worlds of a round."""
    group_size: int = 8
    """Siblings of a world."""
    minibatches: int = 4
    """Updates of a round."""
    tokens: int = 300_000
    """Budget of a run: collected tokens, prompts and answers; the round that reaches it is its last."""
    tuning_tokens: int = 150_000
    """The same of a run that chooses a learning rate."""
    held_out: int = Field(200, ge=1)
    """Worlds that final weights are measured on, one rollout each."""
    anchor_groups: int = 32
    """Worlds that start weights play for the table of state normalisations."""
    seeds: int = Field(8, ge=1, le=20)
    """Paired seeds that are compared."""

    def training(self, model: str, learning_rate: float, seed: int) -> TrainConfig:
        """The updates of a run."""
        return TrainConfig(
            model=model,
            loss=GRPOLoss(),
            minibatches=self.minibatches,
            learning_rate=learning_rate,
            schedule=ScheduleConfig(shape="constant", warmup_fraction=0.0),
            seed=seed,
            threads=1,
            keep_last=1,
        )


SMALL = Settings(
    traces=40,
    clone_epochs=2,
    groups=2,
    group_size=4,
    minibatches=2,
    tokens=1,
    tuning_tokens=1,
    held_out=4,
    anchor_groups=4,
    seeds=2,
)
"""Shows that everything works together; its figures mean nothing."""
