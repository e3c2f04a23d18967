"""The settings of `trajlake record`: the section [record] of a settings file."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from lake.settings import FrozenModel


class RecordConfig(FrozenModel):
    """A recording proxy."""

    run: str = "live"
    """Run name for calls that do not set one."""
    port: int = Field(8484, ge=0, le=65535)
    """Port to listen on (0 picks a free port)."""
    host: str = "127.0.0.1"
    """Address to listen on; addresses other than localhost require a token."""
    durable: bool = False
    """Return each answer only after its call is on disk. A crash then loses no call that a client saw completed."""
    spool: Path | None = None
    """Folder for recordings that are not in the lake yet; None: below TRAJLAKE_SPOOL or the state folder."""
    spool_size: int = Field(1024, ge=8)
    """Maximum spool size in MB."""
    on_full: Literal["refuse", "drop"] = "refuse"
    """Action when the spool is full: reject calls, or forward them without recording."""
    idle: float = Field(600.0, ge=1)
    """Idle time after which an episode ends, in seconds."""
    unfinished: Literal["continue", "drop"] = "continue"
    """Episodes that are open when the proxy ends or crashes: later calls add to them, or they are discarded and can be
    played again."""
    timeout: float = Field(600.0, ge=1)
    """Timeout for an upstream response that stalls, in seconds."""
    ask: Literal["auto", "always", "never"] = "auto"
    """Request token ids and log-probabilities from the engine; auto: only from vLLM and SGLang."""
    logprobs_mode: Literal["processed", "raw"] | None = None
    """Log-probability mode of the engine; None: as vLLM reports with VLLM_SERVER_DEV_MODE=1. If it is unknown, losses
    with importance ratios refuse temperatures other than 1."""
    max_body: int = Field(64, ge=1)
    """Maximum request size in MB."""
    max_answer: int = Field(256, ge=1)
    """Maximum answer size in MB; longer answers are cut."""
    max_answers: int = Field(512, ge=1)
    """Maximum total size of concurrent answers in MB; above it, the longest is cut."""
    max_connections: int = Field(4096, ge=1)
    """Maximum number of open connections; more are refused."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.durable and self.on_full == "drop":
            raise ValueError(
                "`durable` cannot be combined with `on_full` drop: it records every answered call, and drop skips some"
            )
        if 2 * self.max_body > self.spool_size:
            raise ValueError(
                f"`spool_size` is {self.spool_size} MB; valid: at least twice `max_body`, which is {self.max_body} MB"
            )
        return self
