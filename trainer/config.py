"""What a training run is, as one frozen document.

The resolved copy is stored in the job's row and beside the checkpoints, so a run can be repeated from its record.
Order of precedence: the defaults below, then the `[trainer]` section of a TOML file, then command line options.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

LossName = Literal["sft", "awr", "ppo"]
Frozen = ConfigDict(frozen=True, extra="forbid")


class AWRConfig(BaseModel):
    """Advantage-weighted regression."""

    model_config = Frozen

    beta: float = Field(1.0, gt=0)
    """Temperature of the weights exp(A / beta), in standard deviations of the plan's advantages."""
    max_weight: float = Field(20.0, gt=0)
    """Upper limit of a weight."""


class PPOConfig(BaseModel):
    """Clipped policy gradient."""

    model_config = Frozen

    clip_low: float = Field(0.2, gt=0, lt=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(0.28, gt=0)
    """The ratio is clipped above at 1 + clip_high; larger than clip_low, so that rare tokens may grow (DAPO)."""
    dual_clip: float | None = Field(3.0, gt=1)
    """Bounds the loss of a negative advantage at -dual_clip * A. None switches it off."""
    entropy_coefficient: float = Field(0.0, ge=0)
    """Weight of the entropy bonus, per action token."""


class OptimizerConfig(BaseModel):
    """AdamW."""

    model_config = Frozen

    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(1e-8, gt=0)
    """Added to the denominator."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay, for matrices only: never for biases and norms."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this global norm."""


class ScheduleConfig(BaseModel):
    """The learning rate over the run; see `trainer.schedule`."""

    model_config = Frozen

    shape: Literal["cosine", "linear", "constant"] = "cosine"
    """How it falls after the warm-up."""
    warmup_fraction: float = Field(0.05, ge=0, lt=1)
    """Share of the optimizer steps during which it rises linearly from 0."""
    final_fraction: float = Field(0.1, ge=0, le=1)
    """Where it ends, as a share of its peak (not for constant)."""


class TrainConfig(BaseModel):
    """One training run."""

    model_config = Frozen

    model: str
    """Folder of the model in Hugging Face layout, with its tokenizer."""
    loss: LossName
    """sft: likelihood of the actions. awr: likelihood weighted by exp(advantage). ppo: clipped importance ratios."""
    where: str | None = None
    """SQL predicate over `episodes`; None takes them all."""
    selection: str | None = None
    """Select job (13 characters or their beginning), or a selection's name, which means its newest job: only what it
    kept is trained on. None leaves the table `selections` unread."""
    advantages: str | None = None
    """Credit job or series, as 13 characters; None takes the series of the newest succeeded credit job."""
    live_only: bool | None = None
    """Leave out dead groups, whose siblings all scored the same. None: where the loss uses advantages."""
    tokens: Literal["auto", "engine", "rendered"] = "auto"
    """Which token rows. engine: exact ids of the inference engine. rendered: texts tokenised with this model's chat
    template. auto: engine where the selected episodes have such rows, else rendered."""
    epochs: int = Field(1, ge=1)
    """Passes over the selected episodes, each in an order of its own."""
    episodes_per_step: int = Field(8, ge=1)
    """Episodes an optimizer step consumes at most; an epoch's steps are of equal size within one episode."""
    minibatches: int | None = Field(None, ge=1)
    """Optimizer steps an epoch is cut into, instead of episodes_per_step."""
    token_budget: int = Field(8192, ge=1)
    """Tokens of one forward and backward pass. Changes memory and speed, not the result beyond rounding."""
    max_length: int = Field(8192, ge=2)
    """Longest sequence in tokens; a longer one is cut at the last step that fits."""
    learning_rate: float | None = Field(None, gt=0)
    """Peak learning rate; None chooses it from the number of parameters (`trainer.schedule.default_learning_rate`)."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW's constants."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning rate over the steps."""
    awr: AWRConfig = AWRConfig()
    """Used by loss awr."""
    ppo: PPOConfig = PPOConfig()
    """Used by loss ppo."""
    seed: int = Field(0, ge=0)
    """Decides the order of the episodes."""
    checkpoint_every: int = Field(50, ge=1)
    """Optimizer steps between checkpoints; one more is written at the end."""
    device: str = "cpu"
    """Torch device."""
    threads: int | None = Field(None, ge=1)
    """Torch threads; None keeps torch's own number. Exact repetition needs the same number."""
    read_threads: int = Field(2, ge=1)
    """Threads that decode Parquet."""
    prefetch: int = Field(2, ge=1)
    """Optimizer steps prepared ahead."""
    cache_bytes: int = Field(1 << 30, ge=0)
    """Decoded row groups kept in memory."""
