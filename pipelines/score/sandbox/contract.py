"""What goes into the sandbox and what comes out: the function, its limits, one outcome per call. Pure data."""

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, Field

Mode = Literal["pointwise", "batch", "group"]
Kind = Literal["ok", "exception", "timeout", "memory", "killed", "invalid"]
Level = Literal["strong", "bwrap", "basic", "none"]


@dataclass(frozen=True)
class FunctionSource:
    """A user's function, named but never imported in this process."""

    path: str
    """Its module's file."""
    name: str
    mode: Mode = "pointwise"
    """How it is called; a batch or group function returns a list, a pointwise one a single result."""
    adapter: str | None = None
    """A function of ours, as `module:name`, that makes what is called from what the module holds under that name; the
    worker applies it."""


class SandboxLimits(BaseModel, frozen=True, extra="forbid"):
    """What one function may use, and how strongly it must be held."""

    seconds_per_row: float = Field(10.0, gt=0)
    """Wall-clock seconds of one call, kept by the parent; a worker past it is killed. A batch or group function is one
    call for all its rollouts."""
    memory_mb: int = Field(1024, ge=256)
    """Address space of one worker in MiB, the interpreter and imported packages included (pyarrow and pandas take
    about 512)."""
    start_seconds: float = Field(30.0, gt=0)
    """Wall-clock seconds to start a worker and import the function's module."""
    rows_per_batch: int = Field(64, ge=1, le=1024)
    """Calls that one message to a worker carries."""
    recycle_rows: int = Field(100_000, ge=1)
    """Calls after which a worker is replaced by a fresh one."""
    workers: int = Field(1, ge=1, le=256)
    """Worker processes."""
    max_threads: int = Field(256, ge=1)
    """Threads that a worker may have; past it, it is killed."""
    min_level: Level = "strong"
    """The weakest isolation to accept; below it nothing runs."""
    max_level: Level = "strong"
    """The strongest isolation to use. Lower it only for a function that you trust and that needs what the sandbox takes
    away: a judge that calls a model over the network runs at `none`."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables handed to the worker on purpose; it inherits none."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one call."""

    value: Any | None
    """What the function returned, as plain JSON data: numbers, text, True/False/None, lists and dicts with text keys;
    all floats finite. EvaluateResult and other structs, dataclasses and pydantic models are dicts. A number on its own
    is a float. None unless `kind` is ok."""
    error: str | None
    """Why there is no value; None if `kind` is ok."""
    kind: Kind
    """ok; exception (the function raised, or could not be imported); timeout; memory; killed (its process died, or was
    killed for what it did); invalid (it returned what is no result, or its process sent what is no reply)."""
    seconds: float
    """Wall clock of the call, as the worker says; 0.0 where it is not known."""
