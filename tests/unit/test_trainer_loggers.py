"""Loggers: lines that survive a kill, TensorBoard's own reader, a clear word where an extra is missing."""

import json
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lake.errors import MissingExtraError, UsageError
from trainer.loggers import JsonlLogger, check_installed, open_loggers


class WandbError(Exception):
    """As wandb's own."""


RUN: dict[str, Any] = {"run_id": "r", "key": "0abc", "attempt": 2, "config": {"loss": "sft"}}


def test_a_line_cut_off_by_a_kill_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 0, "attempt": 0, "loss": 1.0}\n{"step": 1, "att')
    with closing(JsonlLogger(path, attempt=1)) as log:
        log.write(1, {"loss": 2.0})
    lines = path.read_text().splitlines()
    assert json.loads(lines[0])["step"] == 0
    assert json.loads(lines[2]) == {"step": 1, "attempt": 1, "loss": 2.0}


def test_lines_can_be_read_while_a_run_goes_on(tmp_path: Path) -> None:
    with closing(JsonlLogger(tmp_path / "m.jsonl", attempt=0)) as log:
        log.write(0, {"loss": 1.0})
        assert json.loads((tmp_path / "m.jsonl").read_text()) == {"step": 0, "attempt": 0, "loss": 1.0}


def test_the_jsonl_file_is_always_written(tmp_path: Path) -> None:
    with open_loggers((), tmp_path, **RUN) as loggers:
        assert len(loggers) == 1
        loggers[0].write(3, {"loss": 0.5})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 3, "attempt": 2, "loss": 0.5}


def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with open_loggers(("tensorboard",), tmp_path, **RUN) as loggers:
        for logger in loggers:
            logger.write(0, {"loss": 1.5, "entropy": 0.25})
            logger.write(1, {"loss": 1.0, "entropy": 0.5})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(0, 1.5), (1, 1.0)]
    assert [(e.step, e.value) for e in events.Scalars("entropy")] == [(0, 0.25), (1, 0.5)]


def test_wandb_gets_the_same_id_for_every_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service itself cannot be reached from a test: what it is given is looked at where it would take over."""
    settings: dict[str, Any] = {}
    logged: list[tuple[int, dict[str, float]]] = []
    run = SimpleNamespace(
        log=lambda metrics, step: logged.append((step, metrics)), finish=lambda: settings.update(end=1)
    )

    def init(**arguments: Any) -> SimpleNamespace:
        settings.update(arguments)
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Error=WandbError))
    with open_loggers(("wandb",), tmp_path, **RUN) as loggers:
        loggers[1].write(7, {"loss": 2.0})
    assert (settings["id"], settings["resume"], settings["name"], settings["end"]) == ("0abc", "allow", "r", 1)
    assert settings["config"] == {"loss": "sft"}
    assert logged == [(7, {"loss": 2.0})]


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_a_missing_extra_names_the_install_line(name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, {"tensorboard": "torch.utils.tensorboard"}.get(name, name), None)
    with pytest.raises(MissingExtraError, match="is not installed"):
        check_installed((name,))
    with (
        pytest.raises(MissingExtraError, match=rf'pip install "trajlake\[{name}\]"'),
        open_loggers((name,), tmp_path, **RUN),
    ):
        pass


def test_a_wandb_that_does_not_start_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**arguments: Any) -> None:
        msg = "No API key configured. Use `wandb login` to log in."
        raise WandbError(msg)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Error=WandbError))
    loggers = open_loggers(("wandb",), tmp_path, **RUN)
    with pytest.raises(UsageError, match=r"No API key .* WANDB_MODE=offline"), loggers:
        pass
