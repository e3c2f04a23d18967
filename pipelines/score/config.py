"""How a function is run over a lake: [score] in a TOML file, or flags of `trajlake score`."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from lake.settings import NAME
from pipelines.score.reward_function import StepIndex
from pipelines.score.sandbox.contract import SandboxLimits

NETWORK_SECONDS = 300.0
"""Wall-clock seconds of one call of a function that asks over the network, unless it declares a `timeout`."""


class ScoreConfig(BaseModel):
    """Options of a score run."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str | None = Field(None, pattern=NAME, max_length=200)
    """Name under which the scores are kept; the function's own unless given."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the function beside those that the lake gives, or options of a built-in scorer."""
    step_index: StepIndex | None = None
    """What step outputs count: `step` numbers, `message` indices, or `auto`, whichever fits; unless given, what the
    function declares."""
    default_step_reward: float | None = None
    """Reward of steps that the function gave none; without it they have no row."""
    batch_size: int = Field(64, ge=1)
    """Rollouts in one call of a batch-wise function. Siblings stay together where they fit."""
    allow_network: bool = False
    """Consent: functions that require the network may run without a sandbox. Read them first."""
    concurrency: int = Field(8, ge=1, le=256)
    """Calls in flight at once, of functions that require the network; one that declares its own counts instead."""
    environment: tuple[str, ...] = ("OPENAI_API_KEY", "OPENAI_BASE_URL")
    """Names of environment variables that functions which require the network are given, if they are set."""
    commit_seconds: float = Field(15.0, gt=0)
    """Scores are committed at least so often; a kill loses what came after the last commit, and nothing else."""
    commit_episodes: int = Field(4096, ge=1)
    """Scores are committed at the latest after so many episodes."""
    limits: SandboxLimits = Field(default_factory=SandboxLimits)
    """What the sandbox allows."""
