"""Types of the sandbox interface: the function, its limits, and one outcome per call."""

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, Field

Mode = Literal["pointwise", "batch", "group"]
OutcomeKind = Literal["ok", "exception", "timeout", "memory", "killed", "invalid"]
Level = Literal["strong", "bwrap", "basic", "none"]


@dataclass(frozen=True)
class FunctionSource:
    """A user's function, which this process never imports."""

    path: str
    """File of its module."""
    name: str
    mode: Mode = "pointwise"
    """Calling convention: a batch or group function returns a list, a pointwise function one result."""
    adapter: str | None = None
    """A function of this project, as `module:name`, that the worker applies to the module's attribute before it calls
    the result."""


class SandboxLimits(BaseModel, frozen=True, extra="forbid"):
    """Resource limits of a function, and the isolation that it requires."""

    seconds_per_row: float = Field(10.0, gt=0)
    """Timeout of one call, in wall-clock seconds; the parent then kills the worker. A batch or group function handles
    all its rollouts in one call."""
    memory_mb: int = Field(1024, ge=256)
    """Address space of one worker in MiB, including the interpreter and imported packages (pyarrow and pandas need
    about 512)."""
    start_seconds: float = Field(30.0, gt=0)
    """Timeout to start a worker and import the function's module, in wall-clock seconds."""
    rows_per_batch: int = Field(64, ge=1, le=1024)
    """Number of calls in one message to a worker."""
    recycle_rows: int = Field(100_000, ge=1)
    """Number of calls after which a new worker replaces the old one."""
    workers: int = Field(1, ge=1, le=256)
    """Number of worker processes."""
    max_threads: int = Field(256, ge=1)
    """Maximum threads of a worker; the parent kills a worker with more."""
    min_level: Level = "strong"
    """Weakest acceptable isolation; below it nothing runs."""
    max_level: Level = "strong"
    """Strongest isolation to use. Lower it only for a function that you trust and that the sandbox would block: a judge
    that calls a model over the network runs at `none`."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the worker; it inherits none."""


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """Outcome of one call."""

    value: Any | None
    """The function's result as plain JSON data: numbers, text, True/False/None, lists and dicts with text keys; all
    floats finite. EvaluateResult and other structs, dataclasses and pydantic models are dicts. A single number is a
    float. None unless `kind` is ok."""
    error: str | None
    """Why there is no result; None if `kind` is ok."""
    kind: OutcomeKind
    """ok; exception (the function raised, or could not be imported); timeout; memory; killed (its process died, or the
    parent killed it for a violation); invalid (it returned an invalid result, or its process sent an invalid reply)."""
    seconds: float
    """Wall-clock time of the call as the worker reports it; 0.0 for unknown."""
