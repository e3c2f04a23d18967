"""Offline runs as tests start them, and how one presses Ctrl-C in the middle."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lake import Lake
from trainer.config import TrainConfig
from trainer.runs.folder import RunFolder
from trainer.runs.offline import resume, train


def configured(model: Path, loss: str = "sft", options: Mapping[str, Any] | None = None, **fields: Any) -> TrainConfig:
    """A short run; the options are the loss's."""
    defaults: dict[str, Any] = {"episodes_per_step": 6, "epochs": 2, "checkpoint_every": 3, "threads": 1}
    return TrainConfig(model=str(model), loss={"name": loss, **(options or {})}, **(defaults | fields))


class Interrupted(KeyboardInterrupt):
    """Ctrl-C at a chosen step."""


def interrupted(lk: Lake, config: TrainConfig, out: Path, after: int) -> None:
    """Start (or resume) a run and press Ctrl-C after some updates."""
    done = 0

    def stop(*_: object) -> None:
        nonlocal done
        done += 1
        if done == after:
            raise Interrupted

    is_new = RunFolder(out).read() is None
    run = partial(train, lk, config, out, run_id="r") if is_new else partial(resume, lk, out)
    with pytest.raises(Interrupted):
        run(on_step=stop)
