"""Configurations from before losses owned their options are refused, with the version that reads them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lake.errors import CheckpointError, UsageError
from lake.settings import validate
from trainer.config import TrainConfig
from trainer.runs.checkpoint import STATE, State, read_state
from trainer.runs.folder import RunFolder, RunRecord

STORED: dict[str, Any] = {"model": "m", "loss": "awr", "unit": None, "awr": {"beta": 0.5, "max_weight": 20.0}}
PRESENT = TrainConfig(model="m", loss={"name": "awr", "beta": 0.5}).model_dump(mode="json")


def _run(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    record = RunRecord(
        job_id=1, run_id="r", config=config, snapshot={}, source=None, plan_hash="0" * 13, model_sha256="0"
    )
    RunFolder(folder).write(record)
    read = RunFolder(folder).read()
    assert read is not None
    return read.config


def _checkpoint(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    state = State(optimizer_step=1, epoch=0, plan_hash="0" * 13, snapshot={}, config=config)
    (folder / STATE).write_bytes(msgspec.json.encode(state))
    return read_state(folder).config


@pytest.mark.parametrize("stored_in", [_run, _checkpoint])
def test_a_stored_configuration_of_before_names_who_reads_it(
    stored_in: Callable[[Path, dict[str, Any]], dict[str, Any]], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=r"loss.*awr.*1e8a324c") as error:
        stored_in(tmp_path, STORED)
    assert str(tmp_path) in str(error.value)
    assert stored_in(tmp_path, PRESENT) == PRESENT


@pytest.mark.parametrize("section", [{"awr": {"beta": 0.5}}, {"unit": "turn"}, {"pairs": {"kind": "step"}}])
def test_a_section_of_before_in_a_file_is_no_option(section: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(section))):
        validate(TrainConfig, {"model": "m", "loss": "awr"} | section)
