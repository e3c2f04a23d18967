"""What an online loop is, as one frozen document."""

from pydantic import BaseModel, ConfigDict, Field

from pipelines.collect import GroupConfig
from pipelines.credit import GiGPO
from trainer.config import ScheduleConfig, TrainConfig
from trainer.losses.ppo import PPO


class LoopConfig(BaseModel):
    """Rounds of collect, credit, train. The defaults are the demo's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str
    """Name of the run."""
    rounds: int = Field(default=30, ge=1, le=500)
    """How often."""
    starts: int = Field(default=32, ge=1, le=500)
    """Groups collected in a round, each from a start of its own."""
    groups: GroupConfig = GroupConfig()
    """Siblings per start, and how many rollouts are played side by side."""
    max_action_tokens: int = Field(default=4, ge=1)
    """Tokens after which an action is cut off, its end token included."""
    credit: GiGPO = GiGPO()
    """Estimator of the advantages."""
    shuffle_advantages: bool = False
    """A control: train on the round's advantages shuffled among its steps."""
    epochs: int = Field(default=1, ge=1)
    """Passes over a round's episodes."""
    minibatches: int = Field(default=4, ge=1)
    """Optimizer steps of a pass."""
    token_budget: int = Field(default=8192, ge=1)
    """Tokens of one forward and backward pass."""
    ppo: PPO = PPO(entropy_coefficient=0.02)
    """The loss. Without the entropy bonus a tiny policy collapses."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Of the first round."""
    final_fraction: float = Field(default=0.2, ge=0, le=1)
    """Share of the learning rate that the linear decay over the rounds ends at."""
    seed: int = Field(default=0, ge=0)
    """Decides starts, samples and the order of episodes."""

    def first_seed(self, number: int) -> int:
        """Where the start seeds of a round begin: far enough apart that no two rounds, nor runs, share one."""
        return self.seed * 1_000_000 + number * 1_000

    def rollouts(self, number: int) -> str:
        """The rollouts of a round, as a predicate over `episodes`."""
        quoted = self.run_id.replace("'", "''")
        return f"run_id = '{quoted}' AND collection_round = {number}"

    def learning_rate_of(self, number: int) -> float:
        """Learning rate of a round."""
        return self.learning_rate * (1 - (1 - self.final_fraction) * number / self.rounds)

    def update_config(self, model: str, number: int) -> TrainConfig:
        """The update phase of a round, on its rollouts."""
        return TrainConfig(
            model=model,
            loss=self.ppo,
            where=self.rollouts(number),
            tokens="engine",
            epochs=self.epochs,
            minibatches=self.minibatches,
            token_budget=self.token_budget,
            schedule=ScheduleConfig(shape="constant", warmup_fraction=0.0),
            seed=self.seed * 1_000_000 + number,
        )
