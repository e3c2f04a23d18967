"""The online loop: collect, credit, train, over and over, each through the lake.

A round records its rollouts, computes their advantages as a credit job, and updates the policy from the tables: what
the optimizer sees is what `tokens` and `advantages` hold at the round's snapshot. The next round plays the new weights.
This package is the one place where trainer and pipelines meet.

Player is the instance of a policy that plays: the trainer's own computes packed attention and cannot generate.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from transformers import PreTrainedTokenizerBase  # noqa: TID253

from lake import ids
from lake.errors import DataRefusedError
from lake.judgements.credit import find_credit
from lake.lake import Lake
from lake.read.online_runs import of_round
from lake.records import EpisodeRecord
from lake.write.jobs import Job
from pipelines.collect import GroupConfig, collect_groups, distinct_seeds
from pipelines.collect.environments.games import TextGame
from pipelines.collect.policies.transformers_policy import SamplingConfig, TransformersPolicy
from pipelines.credit import CreditSummary, GiGPO
from pipelines.credit.compare import shuffle_advantages
from pipelines.credit.job import run_credit
from trainer.backends.base import SingleDevice
from trainer.config import TrainConfig
from trainer.data.render.render import engine_encoding
from trainer.losses.ppo import PPO
from trainer.online.learner import round_config
from trainer.policy.model_files import load_model, load_tokenizer
from trainer.runs.loop import update


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
        return of_round(self.run_id, number)

    def trainer(self, model: str) -> TrainConfig:
        """What the update phases of all rounds have in common."""
        return TrainConfig(
            model=model,
            loss=self.ppo,
            tokens="engine",
            epochs=self.epochs,
            minibatches=self.minibatches,
            token_budget=self.token_budget,
            seed=self.seed,
        )

    def update_config(self, model: str, number: int) -> TrainConfig:
        """The update phase of a round, on its rollouts."""
        return round_config(self.trainer(model), self.rollouts(number), number)


class Player:
    """A model in Hugging Face layout that generates, and its tokenizer."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = load_model(folder).eval()
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(folder)

    def load(self, trained: Any) -> None:
        """Take over the weights of the instance that is trained."""
        self.model.load_state_dict(trained.state_dict())


MakeEnvironment = Callable[[], TextGame]


@dataclass(frozen=True, slots=True)
class Round:
    """What a round did."""

    number: int
    """0, 1, ..."""
    episodes: int
    """Rollouts collected."""
    success: float
    """Mean return of its rollouts, played by the weights before its update."""
    credit: CreditSummary
    """Of its credit job."""
    entropy: float | None
    """Mean entropy at the trained tokens in nats; None if there was nothing to train on."""


def run_rounds(
    lake: Lake,
    backend: SingleDevice,
    player: Player,
    make_environment: MakeEnvironment,
    config: LoopConfig,
) -> Iterator[Round]:
    """Run the loop as one training job, with a report after each round; the backend's weights are updated in place.

    `make_environment` makes a fresh environment of the training split.
    """
    parameters = config.model_dump(mode="json")
    with lake.job(kind="train", run_id=config.run_id, parameters=parameters) as job:
        updates = 0
        for number in range(config.rounds):
            player.load(backend.policy.model)
            records = play(player, make_environment, config, number)
            record_episodes(lake, records, run_id=config.run_id, parameters={"round": number} | parameters)
            report = run_credit(lake, config.credit, only=config.rollouts(number))
            credit_job = report.job_id
            if config.shuffle_advantages:
                credit_job, _ = shuffle_advantages(lake, report.job_id, config.seed * 1_000_000 + number)
            done, entropy = _update(lake, job, backend, player.tokenizer, credit_job, config, number, updates)
            updates += done
            returns = [record.env_return or 0.0 for record in records]
            yield Round(number, len(records), sum(returns) / len(returns), report.summary, entropy)
        job.counts |= {"rounds": config.rounds, "optimizer_steps": updates}


def play(player: Player, make_environment: MakeEnvironment, config: LoopConfig, number: int) -> list[EpisodeRecord]:
    """The rollouts of a round."""
    policy = TransformersPolicy(
        player.model,
        player.tokenizer,
        name=config.run_id,
        version=number,
        sampling=SamplingConfig(max_action_tokens=config.max_action_tokens),
    )
    groups = collect_groups(
        make_environment,
        policy,
        distinct_seeds(make_environment, config.first_seed(number), config.starts),
        config=config.groups,
        run_seed=config.seed,
        collection_round=number,
    )
    return [record for group in groups for record in group]


def record_episodes(lake: Lake, records: list[EpisodeRecord], *, run_id: str, parameters: dict[str, object]) -> None:
    """Record rollouts as a `collect` job."""
    with lake.job(kind="collect", run_id=run_id, parameters=parameters) as job:
        counts = job.record(records)
        job.counts |= {
            "rows_in": len(records),
            "rows_out": counts.new,
            "rows_dropped": counts.rejected,
            "already_present": counts.present,
        }


def _update(
    lake: Lake,
    job: Job,
    backend: SingleDevice,
    tokenizer: PreTrainedTokenizerBase,
    credit_job: int,
    config: LoopConfig,
    number: int,
    first_step: int,
) -> tuple[int, float | None]:
    """Train on a round's advantages and write what was consumed; updates done and mean entropy."""
    snapshot = lake.snapshot()
    try:
        done = update(
            backend,
            snapshot,
            find_credit(snapshot, ids.to_text(credit_job)),
            config.update_config(config.run_id, number),
            learning_rate=config.learning_rate * (1 - (1 - config.final_fraction) * number / config.rounds),
            first_step=first_step,
            own_encoding=engine_encoding(tokenizer),
        )
    except DataRefusedError:
        # Every group of the round is dead: nothing to learn from, and the next starts may be better.
        return 0, None
    job.write("batches", done.batches)
    job.write("metrics", done.metrics)
    entropies = [report.metrics["entropy"] for report in done.reports]
    return len(done.reports), sum(entropies) / len(entropies)
