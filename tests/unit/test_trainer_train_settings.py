"""Settings of `trajlake train`: a file, then --set, then flags; what nobody would hear is refused."""

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from pydantic import BaseModel

from lake.cli import trajlake
from lake.errors import UsageError
from lake.faults import models_in
from lake.settings import merged
from trainer.commands_train import train
from trainer.config import TrainConfig
from trainer.data.aggregation import Aggregation, Unit
from trainer.loss_names import AGGREGATIONS, LOSS_NAMES, UNITS
from trainer.losses import LOSSES
from trainer.runs.stages import read_stages
from trainer.train_settings import configured, flag_of, given_settings, read_settings

STAGES = """
[trainer]
model = "m"
epochs = 2
[trainer.awr]
beta = 0.5
[trainer.validation]
where = "task_id = 'a'"
every = 5
[[trainer.stages]]
name = "sft"
loss = "sft"
[[trainer.stages]]
name = "rl"
loss = "awr"
[trainer.stages.awr]
max_weight = 5.0
[trainer.stages.validation]
patience = 2
"""


def in_file(folder: Path, text: str) -> str:
    file = folder / "run.toml"
    file.write_text(text)
    return str(file)


def stages_of(folder: Path, text: str, *pairs: str) -> dict[str, TrainConfig]:
    stages = read_stages(read_settings(in_file(folder, text), given_settings(pairs, {})))
    return {stage.name: stage.config for stage in stages}


def test_the_names_of_the_help_text_are_those_of_the_code() -> None:
    assert list(LOSSES) == list(LOSS_NAMES)
    assert list(Aggregation) == list(AGGREGATIONS)
    assert list(Unit) == list(UNITS)


def fields(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Every field that can be set, dotted."""
    found = []
    for name, field in model.model_fields.items():
        found.append(f"{prefix}{name}")
        for inner in models_in(field.annotation):
            found += [] if "tuple" in str(field.annotation) else fields(inner, f"{prefix}{name}.")
    return found


@pytest.mark.parametrize("field", fields(TrainConfig))
def test_set_reaches_every_field(field: str) -> None:
    """The value that a field has by default, spelled on a command line, is the value that it gets."""
    base: Any = TrainConfig(model="m", loss="sft", lora={}, validation={"where": "w"})
    value = base.model_dump(mode="json")
    for name in field.split("."):
        value = value[name]
    text = value if isinstance(value, str) else json.dumps(value)
    given = given_settings((f"{field}={text}",), {})
    settings = merged({"model": "m", "loss": "sft", "lora": {}, "validation": {"where": "w"}}, given)
    assert TrainConfig.model_validate(settings) == base


def test_flags_come_last_and_the_file_first(tmp_path: Path) -> None:
    file = in_file(tmp_path, '[trainer]\nmodel = "m"\nloss = "awr"\nepochs = 5\nseed = 1\n[trainer.awr]\nbeta = 0.5\n')
    given = given_settings(("epochs=4", "awr.max_weight=3"), {"seed": 2, "validation.where": "a"})
    config = configured(read_settings(file, given))
    assert (config.epochs, config.seed, config.awr.beta, config.awr.max_weight) == (4, 2, 0.5, 3.0)
    assert config.validation is not None
    assert config.validation.where == "a"


@pytest.mark.parametrize(
    ("pairs", "flags", "fault"),
    [
        (("epochs=4",), {"epochs": 3}, "--epochs and --set epochs say the same thing twice"),
        (("validation.where=a",), {"validation.where": "b"}, "--validate and --set validation.where say"),
        (("learning_rate=1",), {"learning_rate": 1.0}, "--lr and --set learning_rate say"),
        (("epochs",), {}, "is no setting"),
    ],
)
def test_what_is_said_twice_or_not_at_all_is_refused(pairs: tuple[str, ...], flags: dict[str, Any], fault: str) -> None:
    with pytest.raises(UsageError, match=fault):
        given_settings(pairs, flags)


def test_every_flag_has_its_name() -> None:
    flags = {flag for option in train.params for flag in option.opts}
    named = {"model", "learning_rate", "validation.where", "live_only", "max_staleness", "unit", "aggregation"}
    assert {flag_of(field) for field in named} <= flags


def test_stages_take_what_they_do_not_set_also_inside_a_section(tmp_path: Path) -> None:
    found = stages_of(tmp_path, STAGES)
    assert found["rl"].awr.model_dump() == {"beta": 0.5, "max_weight": 5.0}
    assert found["sft"].awr == found["sft"].awr.__class__(), "a section of a later stage's loss is left out of this one"
    for name, patience in (("sft", None), ("rl", 2)):
        validation = found[name].validation
        assert validation is not None
        assert (validation.where, validation.every, validation.patience) == ("task_id = 'a'", 5, patience)


@pytest.mark.parametrize(
    ("pair", "fault"),
    [
        ("ppo.clip_low=0.1", "stage sft: `ppo` has no effect: the loss is sft"),
        ("pairs.threshold=1", "`pairs` has no effect"),
        ("loss=sft", "of no effect on the command line: loss; every stage of .* sets it for itself"),
        ("epoch=1", "stage sft: there is no option `epoch`; valid: epochs"),
    ],
)
def test_what_no_stage_hears_is_refused(tmp_path: Path, pair: str, fault: str) -> None:
    with pytest.raises(UsageError, match=fault):
        stages_of(tmp_path, STAGES, pair)


def test_what_a_stage_sets_and_its_loss_never_reads_is_refused(tmp_path: Path) -> None:
    text = STAGES.replace('loss = "sft"', 'loss = "sft"\nawr = { beta = 0.1 }')
    with pytest.raises(UsageError, match="stage sft: `awr` has no effect"):
        stages_of(tmp_path, text)


def test_an_option_that_no_stage_reads_is_refused_though_its_section_is_read(tmp_path: Path) -> None:
    text = (
        '[trainer]\nmodel = "m"\n[trainer.pairs]\nthreshold = 1.0\n'
        '[[trainer.stages]]\nname = "a"\nloss = "sft"\n[[trainer.stages]]\nname = "b"\nloss = "dpo"\n'
    )
    with pytest.raises(UsageError, match=r"`pairs.threshold` has no effect: dpo compares pairs|`pairs` has no effect"):
        stages_of(tmp_path, text)
    assert stages_of(tmp_path, text.replace("threshold = 1.0", "margin = 1.0"))["b"].pairs.margin == 1.0


def test_help_has_every_option_in_a_section_once() -> None:
    text = CliRunner().invoke(trajlake, ["train", "-h"]).stdout
    headings = [line.rstrip(":") for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["Run", "Model", "Data", "Loss", "Course", "Options"]
    for option in train.params:
        assert isinstance(option, click.Option)
        assert text.count(f"  {option.opts[0]} ") == 1, option.opts[0]
    assert text.partition("\nOptions:")[2].count("\n  -") == 1, "only --help stands in no section"
