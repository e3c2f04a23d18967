"""Settings of `trajlake train`: a file, then --set, then flags; what no one would hear is refused."""

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from pydantic import BaseModel

from lake.cli import trajlake
from lake.errors import UsageError
from lake.settings import add_flags, models_in
from trainer.commands import train
from trainer.config import TrainConfig
from trainer.losses import LOSSES
from trainer.losses.awr import AWR
from trainer.losses.dpo import DPO
from trainer.losses.sft import SFT
from trainer.train_settings import build_config, layer_settings, parse_settings, read_settings, read_stages

STAGES = """
[trainer]
model = "m"
epochs = 2
[trainer.loss]
name = "awr"
beta = 0.5
[trainer.validation]
where = "task_id = 'a'"
every = 5
[[trainer.stages]]
name = "sft"
loss = "sft"
[[trainer.stages]]
name = "rl"
[trainer.stages.loss]
name = "awr"
max_weight = 5.0
[trainer.stages.validation]
patience = 2
"""


def in_file(folder: Path, text: str) -> str:
    file = folder / "run.toml"
    file.write_text(text)
    return str(file)


def stages_of(folder: Path, text: str, *pairs: str) -> dict[str, TrainConfig]:
    stages = read_stages(read_settings(in_file(folder, text), parse_settings(pairs)))
    return {stage.name: stage.config for stage in stages}


def fields(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Every field that can be set, dotted."""
    names = []
    for name, field in model.model_fields.items():
        names.append(f"{prefix}{name}")
        for inner in models_in(field.annotation):
            names += [] if "tuple" in str(field.annotation) else fields(inner, f"{prefix}{name}.")
    return names


FIELDS = [("ppo" if "value" in field else "sft", field) for field in fields(TrainConfig) if "loss." not in field]
FIELDS += [(name, field) for name, loss in LOSSES.items() for field in fields(loss, "loss.")]


@pytest.mark.parametrize(("loss", "field"), FIELDS)
def test_set_reaches_every_field(loss: str, field: str) -> None:
    """The value that a field has by default, spelled on a command line, is the value that it gets."""
    tables: dict[str, Any] = {"lora": {}, "validation": {"where": "w"}} | ({"value": {}} if "value" in field else {})
    base: Any = TrainConfig(model="m", loss=loss, **tables)
    value = base.model_dump(mode="json")
    for name in field.split("."):
        value = value[name]
    text = value if isinstance(value, str) else json.dumps(value)
    given = parse_settings((f"{field}={text}",))
    settings = layer_settings({"model": "m", "loss": loss, **tables}, given)
    assert TrainConfig.model_validate(settings) == base


def test_flags_come_last_and_the_file_first(tmp_path: Path) -> None:
    file = in_file(tmp_path, '[trainer]\nmodel = "m"\nepochs = 5\nseed = 1\n[trainer.loss]\nname = "awr"\nbeta = 0.5\n')
    settings = add_flags(parse_settings(("epochs=4", "loss.max_weight=3")), {"seed": 2, "where": "a"}, train.flags)
    config = build_config(read_settings(file, settings))
    assert (config.epochs, config.seed, config.loss) == (4, 2, AWR(beta=0.5, max_weight=3.0))
    assert config.where == "a"


@pytest.mark.parametrize(
    ("pairs", "flags", "fault"),
    [
        (("epochs=4",), {"epochs": 3}, "--epochs and --set epochs say the same thing twice"),
        (("learning_rate=1",), {"learning_rate": 1.0}, "--lr and --set learning_rate say"),
        (("loss=awr",), {"loss.name": "sft"}, "--loss and --set loss.name say the same thing twice"),
        (("epochs",), {}, "is not a setting"),
    ],
)
def test_what_is_said_twice_or_not_at_all_is_refused(pairs: tuple[str, ...], flags: dict[str, Any], fault: str) -> None:
    with pytest.raises(UsageError, match=fault):
        add_flags(parse_settings(pairs), flags, train.flags)


def test_stages_take_what_they_do_not_set_also_inside_a_section(tmp_path: Path) -> None:
    configs = stages_of(tmp_path, STAGES)
    assert configs["rl"].loss == AWR(beta=0.5, max_weight=5.0)
    assert configs["sft"].loss == SFT(), "another loss than that of [trainer] begins with its own defaults"
    for name, patience in (("sft", None), ("rl", 2)):
        validation = configs[name].validation
        assert validation is not None
        assert (validation.where, validation.every, validation.patience) == ("task_id = 'a'", 5, patience)


@pytest.mark.parametrize(
    ("pair", "fault"),
    [
        ("loss.clip_low=0.1", "stage rl: there is no option `loss.clip_low` of awr; valid: name, aggregation"),
        ("loss=ppo", "of no effect on the command line: loss.name; every stage of .* sets it for itself"),
        ("epoch=1", "stage sft: there is no option `epoch`; valid: epochs"),
    ],
)
def test_what_no_stage_hears_is_refused(tmp_path: Path, pair: str, fault: str) -> None:
    with pytest.raises(UsageError, match=fault):
        stages_of(tmp_path, STAGES, pair)


def test_the_command_line_sets_options_of_the_stages_that_have_the_loss(tmp_path: Path) -> None:
    configs = stages_of(tmp_path, STAGES, "loss.name=awr", "loss.beta=0.25")
    assert (configs["sft"].loss, configs["rl"].loss) == (SFT(), AWR(beta=0.25, max_weight=5.0))


def test_what_a_stage_sets_and_its_loss_does_not_have_is_refused(tmp_path: Path) -> None:
    text = STAGES.replace('loss = "sft"', 'loss = { name = "sft", beta = 0.1 }')
    with pytest.raises(UsageError, match=r"stage sft: there is no option `loss\.beta` of sft"):
        stages_of(tmp_path, text)


def test_what_a_stage_takes_from_above_and_never_reads_is_left_out(tmp_path: Path) -> None:
    configs = stages_of(tmp_path, STAGES.replace("epochs = 2", 'epochs = 2\nadvantages = "gigpo"'))
    assert (configs["sft"].advantages, configs["rl"].advantages) == (None, "gigpo")


def test_options_of_a_loss_that_no_stage_has_are_refused(tmp_path: Path) -> None:
    text = (
        '[trainer]\nmodel = "m"\n[trainer.loss]\nname = "dpo"\npairs.margin = 1.0\n'
        '[[trainer.stages]]\nname = "a"\nloss = "sft"\n[[trainer.stages]]\nname = "b"\nloss = "kto"\n'
    )
    with pytest.raises(UsageError, match=r"`loss.pairs.margin` of loss dpo"):
        stages_of(tmp_path, text)
    assert stages_of(tmp_path, text.replace("kto", "dpo"))["b"].loss == DPO(pairs={"margin": 1.0})


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({}, "--model and --loss missing"),
        ({"model": "m"}, "--loss missing"),
        ({"loss": "sft"}, "--model missing"),
        ({"model": "m", "loss": {"beta": 0.5}}, "--loss missing"),
        ({"mdel": "m", "loss": "sft"}, "there is no option `mdel`; valid: model"),
    ],
)
def test_a_run_needs_a_model_and_a_loss(settings: dict[str, Any], fault: str) -> None:
    with pytest.raises(UsageError, match=fault):
        build_config(settings)


def test_help_has_every_option_in_a_section_once() -> None:
    text = CliRunner().invoke(trajlake, ["train", "-h"]).stdout
    headings = [line.rstrip(":") for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    settings = "Settings (--set KEY=VALUE, or [trainer] in the file of --config)"
    assert headings == ["Run", "Training", "Options", settings]
    for option in train.params:
        assert isinstance(option, click.Option)
        assert text.count(f"  {option.opts[0]} ") == 1, option.opts[0]
    assert text.partition("\nOptions:")[2].count("\n  -") == 1, "only --help stands in no section"
