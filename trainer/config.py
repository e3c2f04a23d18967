"""The configuration of a training run as one frozen document.

The resolved copy is stored in the job's row and in every checkpoint, so a run can be repeated from its record. Command
line options win over the section `[trainer]` of a TOML file, which wins over the defaults below.
"""

import os
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from lake.settings import FrozenModel
from trainer.losses import AnyLoss


class ValidationConfig(FrozenModel):
    """Held-out episodes, and the decisions by their measurements."""

    where: str
    """SQL predicate over `episodes` to hold out; it wins over `where`."""
    every: int = Field(10, ge=1)
    """Optimizer steps between measurements; 1 measures after each update."""
    patience: int | None = Field(None, ge=1)
    """Number of measurements in a row without improvement that stops the run. None never stops early."""
    min_improvement: float = Field(0.0, ge=0)
    """Smallest improvement that counts, in nats per token."""
    export: bool = False
    """Export the best weights instead of the last: every improvement then writes a checkpoint."""


class AlarmConfig(FrozenModel):
    """Thresholds. None switches an alarm off."""

    entropy: float | None = Field(0.02, ge=0)
    """Mean entropy, in nats, below which the policy has collapsed."""
    entropy_share: float | None = Field(0.2, gt=0, lt=1)
    """Lowest mean entropy, as a share of the entropy at the run's first update."""
    entropy_rise: float | None = Field(2.0, gt=1)
    """Highest mean entropy, as a multiple of the run's lowest so far; a lowest below 0.1 nats counts as 0.1."""
    policy_jump: float | None = Field(0.15, gt=0, lt=1)
    """Highest rise of the share of tokens whose ratio is outside [0.5, 2], since the first update on the rollouts."""
    policy_standstill: float | None = Field(0.005, gt=0)
    """Lowest mean |log ratio|, in nats, that one of several updates on the same rollouts has to reach."""
    effective_sample_size: float | None = Field(0.1, gt=0, lt=1)
    """Lowest effective sample size of weights or ratios, as a share of the tokens."""
    dead_groups: float | None = Field(0.8, gt=0, le=1)
    """Share of dead groups above which the alarm is raised."""
    shared_anchors: float | None = Field(0.05, gt=0, lt=1)
    """Share of steps that share their anchor state with a sibling, below which A_S is zero nearly everywhere."""


Dtype = Literal["float32", "bfloat16", "float16"]


class LoRAConfig(FrozenModel):
    """Low-rank adapters (Hu et al. 2021, arXiv 2106.09685) through peft, without dropout."""

    rank: int = Field(16, ge=1)
    """Rank of the adapters."""
    alpha: float = Field(32.0, gt=0)
    """The adapters' output is scaled by alpha / rank."""
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Names of the linear layers that get adapters, for example q_proj; all-linear: all but the LM head."""


class ValueConfig(FrozenModel):
    """A value head: a linear layer on the last hidden state of each step's prompt, which starts at 0.

    Its target is the lambda-return of the credit: `a_step` of `gae`, plus the value that `gae` subtracted. The head is
    in checkpoints and not in exported models.
    """

    coefficient: float = Field(0.5, gt=0)
    """Weight of the mean squared error of the values, which is added to the loss."""
    detach: bool = False
    """Train the head alone by that error, and not the model below it."""


class LossScaleConfig(FrozenModel):
    """The loss scale of dtype float16; see `trainer.backends.base`. An overflow halves it."""

    initial: float = Field(65536.0, gt=0, le=1e30)
    """The scale at the first update."""
    growth_interval: int = Field(2000, ge=1)
    """Updates in a row without overflow after which the scale is doubled."""
    max_consecutive_skips: int = Field(20, ge=1)
    """Number of skipped updates in a row that stops the run."""


class OptimizerConfig(FrozenModel):
    """AdamW."""

    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(1e-8, gt=0)
    """Added to the denominator."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay, for matrices only: never for biases and norms."""
    moments: Literal["float32", "bfloat16", "8bit"] = "float32"
    """Type in which both moments are stored: 8, 4 or 2.03 bytes for each trained weight. bfloat16 and 8bit take less
    memory, and are computed in float32; 8bit is for one device (`trainer.backends.optimizer`)."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    loss_scale: LossScaleConfig = LossScaleConfig()
    """Loss scale of dtype float16, which keeps small gradients above zero."""


class ScheduleConfig(FrozenModel):
    """The learning rate over the run; see `trainer.runs.factories`."""

    shape: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the learning rate's decay after the warm-up."""
    warmup_fraction: float = Field(0.05, ge=0, lt=1)
    """Share of the optimizer steps during which the learning rate rises linearly from 0."""
    final_fraction: float = Field(0.1, ge=0, le=1)
    """Last learning rate, as a share of its peak (not for constant)."""


class MixtureSource(FrozenModel):
    """A source of episodes, and its share of an epoch."""

    weight: float = Field(gt=0)
    """Share of an epoch's episodes, relative to the other sources' weights."""
    where: str | None = None
    """SQL predicate over `episodes`; None takes them all."""
    run: str | None = None
    """Only episodes of this run_id."""
    selection: str | None = None
    """Only episodes of this selection: a select job, or a selection's name."""

    @property
    def predicate(self) -> str | None:
        """Return `where` and `run` as one SQL predicate over `episodes`."""
        conditions = [] if self.where is None else [f"(\n{self.where}\n)"]
        if self.run is not None:
            conditions.append("run_id = '" + self.run.replace("'", "''") + "'")
        return " AND ".join(conditions) or None

    def describe(self) -> str:
        """Return a text on the source for messages."""
        named = {"where": self.where, "run": self.run, "selection": self.selection}
        return ", ".join(f"{name} {value}" for name, value in named.items() if value is not None) or "everything"


MACHINE = (
    *("attention", "dtype", "kernels", "gradient_checkpointing", "device", "peak_tflops"),
    *("threads", "read_threads", "prefetch", "cache_bytes", "disk_cache_bytes"),
)
"""Fields about where and how fast a run computes; every stage takes those of [trainer]."""


_GPU_NODES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Device files of drivers: NVIDIA's on Linux and under WSL, and AMD's."""


def choose_device(device: str) -> str:
    """Return the torch device that a setting means; auto is cuda where torch can use a GPU, else cpu.

    torch is imported only on machines with a GPU's driver.
    """
    if device != "auto":
        return device
    if not any(os.path.exists(node) for node in _GPU_NODES):  # noqa: PTH110 - also device files that cannot be read
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


class TrainConfig(FrozenModel):
    """One training run."""

    model: str
    """Folder of the model in Hugging Face layout, with its tokenizer; or a .gguf file."""
    loss: AnyLoss
    """Loss to optimise and its options, which docs/reference/config.md lists under each loss: a table of its `name` and
    its options, or the name alone. docs/guides/losses.md says which loss suits which purpose."""
    attention: Literal["auto", "sdpa", "flex", "flash"] = "auto"
    """Implementation of attention over packed sequences; auto: flash on a GPU of compute capability 8.0 or
    above with a 16-bit dtype, else sdpa."""
    dtype: Dtype = "float32"
    """Type of matrix products. With bfloat16 and float16 the trained weights, gradients and log-sum-exp stay float32;
    on a GPU a copy of the weights, cast once per optimizer step, and the activations have 16 bits. float16 is for GPUs
    without bfloat16, and scales the loss (optimizer.loss_scale)."""
    kernels: Literal["auto", "eager", "compile", "liger"] = "auto"
    """Kernels of layers and head: transformers' own (eager), compiled by torch, or Liger's (extra trajlake[gpu]); auto:
    compile on a GPU, else eager."""
    gradient_checkpointing: bool | Literal["selective"] = False
    """Compute parts of each layer again in the backward pass, for less memory. true: keep the layer's inputs alone, a
    third slower. selective: keep matrix products and attention, too."""
    lora: LoRAConfig | None = None
    """Train low-rank adapters instead of the weights; needs the extra trajlake[lora]."""
    value: ValueConfig | None = None
    """Train a value head (a critic) with the policy, for the estimator gae; None: no critic."""
    reference: str | None = None
    """Reference model, for losses that need reference log-probabilities; None: the model before the first update."""
    where: str | None = None
    """SQL predicate over `episodes`; None takes them all."""
    selection: str | None = None
    """Select job (13 characters or their beginning), or a selection's name, which means its newest job. Only its
    episodes are trained on. None leaves the table `selections` unread."""
    mixture: tuple[MixtureSource, ...] = ()
    """Sources with weights; an epoch draws episodes of each in proportion (`trainer.data.plan`). An episode
    belongs to the first source that has it; an episode without a source is left out. `where` and `selection` hold for
    all sources. Empty: no mixture."""
    max_staleness: int | None = Field(None, ge=0)
    """Largest staleness of a step, in policy versions behind the newest selected one of its collecting run
    (`trainer.data.token_rows`). None: no limit."""
    unknown_staleness: Literal["keep", "drop"] = "keep"
    """How max_staleness treats steps whose policy version is unknown."""
    advantages: str | None = None
    """An estimator's name, or the id of a credit series or job, or its beginning; None takes the current
    credit, which is the result of the last `trajlake credit`."""
    live_only: bool | None = None
    """Leave out dead groups, whose siblings all scored the same. None: where the loss uses advantages."""
    tokens: Literal["auto", "engine", "rendered"] = "auto"
    """Token rows to train on. engine: exact ids of the inference engine. rendered: texts tokenised with this model's
    chat template. auto: engine where the selected episodes have such rows, else rendered."""
    epochs: int = Field(1, ge=1)
    """Number of passes over the selected episodes, each in a different order."""
    episodes_per_step: int = Field(8, ge=1)
    """Episodes an optimizer step consumes at most; an epoch's steps are of equal size within one episode. A pair
    counts as two, also one of steps."""
    minibatches: int | None = Field(None, ge=1)
    """Optimizer steps an epoch is cut into, instead of episodes_per_step."""
    token_budget: Annotated[int, Field(ge=1)] | Literal["auto"] = 8192
    """Tokens of one forward and backward pass. Changes memory and speed, not the result beyond rounding. auto: as many
    as fit into a GPU's memory; 8192 on a CPU."""
    max_length: int | None = Field(None, ge=2)
    """Longest sequence in tokens; a longer one is cut at the last step that fits. None fits the data: the longest of
    the selected episodes' sequences, at most what the model was made for (max_position_embeddings)."""
    learning_rate: float | None = Field(None, gt=0, le=1e30)
    """Peak learning rate; None chooses it from the loss and the number of parameters (`peak_learning_rate`)."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW's constants."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning rate over the steps."""
    seed: int = Field(0, ge=0)
    """Decides the order of the episodes."""
    checkpoint_every: int = Field(50, ge=1)
    """Optimizer steps between checkpoints; one more is written at the end."""
    keep_last: int | None = Field(None, ge=1)
    """Number of checkpoints that stay on disk, in addition to the best one of a validated run; None keeps all."""
    validation: ValidationConfig | None = None
    """Measure held-out episodes while training, and stop early."""
    alarms: AlarmConfig = AlarmConfig()
    """Thresholds of warnings about the policy (it collapses, jumps or stands still) and about data without signal."""
    loggers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Destinations of metrics in addition to the lake and metrics.jsonl; each needs an extra."""
    device: str = Field("auto", validate_default=True)
    """Torch device; auto: cuda on a machine with a GPU that torch can use, else cpu."""
    peak_tflops: float | None = Field(None, gt=0)
    """Peak arithmetic of the device in 1e12 operations per second, for the metric mfu; None knows common GPUs."""
    threads: int | None = Field(None, ge=1)
    """Torch threads; None: one for each 4 million parameters of a model on the CPU, at most torch's own number. Exact
    repetition needs the same number."""
    read_threads: int = Field(2, ge=1)
    """Threads that decode Parquet."""
    prefetch: int = Field(2, ge=1)
    """Optimizer steps prepared ahead."""
    cache_bytes: int = Field(1 << 30, ge=0)
    """Memory for tokens, in bytes. Data that do not fit are read in windows of as many optimizer steps as half of the
    memory holds, each row group once a window; the other half is for reading ahead of the model."""
    disk_cache_bytes: int = Field(8 << 30, ge=0)
    """Disk cache of a lake in a bucket, in bytes, which the processes of a machine share, so that later passes need not
    fetch data again; below `~/.cache/trajlake/files`, or `TRAJLAKE_CACHE`. 0 disables it."""

    @field_validator("device")
    @classmethod
    def _choose_device(cls, device: str) -> str:
        return choose_device(device)

    @model_validator(mode="after")
    def _check_value(self) -> Self:
        if self.value is not None and not self.loss.needs.advantages:
            raise ValueError(
                f"[trainer.value] has no effect with the loss {self.loss.name}, which reads no advantages: leave it "
                f"out, or choose ppo"
            )
        return self

    @property
    def micro_batch_tokens(self) -> int:
        """Return `token_budget`, which `trainer.data.preparation.fit_token_budget` has fitted to the device."""
        assert self.token_budget != "auto", "token_budget is not fitted to the device yet"
        return self.token_budget

    @property
    def fitted_length(self) -> int:
        """Return `max_length`, which `trainer.data.selection.select` has fitted to the data."""
        assert self.max_length is not None, "max_length is not fitted to the data yet"
        return self.max_length
