"""Writes an update's metrics outside the lake: always to a JSONL file, optionally to TensorBoard and Weights & Biases.

The lake is the record; loggers serve for watching. A logger receives only a step and its metrics.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol

from lake.errors import MissingExtraError, UsageError

LoggerName = Literal["tensorboard", "wandb"]
_MODULES: dict[LoggerName, str] = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}


class Logger(Protocol):
    """Destination of metrics."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one optimizer step."""


class JsonlLogger:
    """Appends metrics as JSON lines to a file, one per optimizer step, readable during a run.

    A new attempt first ends a line that a kill cut off, so that later lines stay separate.
    """

    def __init__(self, path: Path, attempt: int) -> None:
        self._attempt = attempt
        torn = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
        self._file = path.open("a", encoding="utf-8")
        if torn:
            self._file.write("\n")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line."""
        line: dict[str, Any] = {"step": step, "attempt": self._attempt, **metrics}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardLogger:
    """Writes metrics as TensorBoard scalars, with an event file for each attempt."""

    def __init__(self, folder: Path) -> None:
        self._writer: Any = _import_module("tensorboard").SummaryWriter(str(folder))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one scalar per metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write buffered events and close the file."""
        self._writer.close()


class WandbLogger:
    """Logs metrics to a Weights & Biases run, which a resumed run continues.

    The environment sets the other options (WANDB_MODE, WANDB_PROJECT, WANDB_API_KEY). This class never reads the API
    key. `key` is the same for every attempt of a run, and for no other run.

    Raises:
        UsageError: wandb does not start: no key, no network.
    """

    def __init__(self, folder: Path, run_id: str, key: str, config: Mapping[str, Any]) -> None:
        wandb = _import_module("wandb")
        try:
            self._run: Any = wandb.init(dir=str(folder), name=run_id, id=key, resume="allow", config=dict(config))
        except wandb.Error as error:
            reason = str(error).rstrip(".")
            raise UsageError(
                f"wandb does not start: {reason}; set WANDB_API_KEY, or WANDB_MODE=offline: the run waits for --resume"
            ) from error

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one step. For steps that a resumed run repeats, wandb keeps the first values, which are the same."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """End the run."""
        self._run.finish()


def log_metrics(loggers: Iterable[Logger], step: int, metrics: Mapping[str, float]) -> None:
    """Write the metrics of an optimizer step to all loggers."""
    for logger in loggers:
        logger.write(step, metrics)


@contextmanager
def open_loggers(
    names: Sequence[LoggerName], folder: Path, *, run_id: str, key: str, attempt: int, config: Mapping[str, Any]
) -> Iterator[list[Logger]]:
    """Open the JSONL logger of a run and the named ones, and close them at the end; `key` names the job.

    Raises:
        MissingExtraError: one of them is not installed.
    """
    with ExitStack() as stack:
        loggers: list[Logger] = [stack.enter_context(closing(JsonlLogger(folder / "metrics.jsonl", attempt)))]
        if "tensorboard" in names:
            loggers.append(stack.enter_context(closing(TensorBoardLogger(folder / "tensorboard"))))
        if "wandb" in names:
            loggers.append(stack.enter_context(closing(WandbLogger(folder, run_id, key, config))))
        yield loggers


def check_installed(names: Sequence[LoggerName]) -> None:
    """Refuse (MissingExtraError) loggers that are not installed, before the run starts."""
    for name in names:
        _import_module(name)


def _import_module(name: LoggerName) -> Any:
    try:
        return import_module(_MODULES[name])
    except ImportError as error:
        msg = f'{name} is not installed: pip install "trajlake[{name}]", or leave it out of `loggers`'
        raise MissingExtraError(msg) from error
