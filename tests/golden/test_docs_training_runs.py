"""The page on runs: its file is one, its table of alarms is the code's."""

import re
import tomllib
from pathlib import Path

from trainer.config import AlarmConfig
from trainer.train_settings import read_stages

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "training-runs.md").read_text(encoding="utf-8")


def test_the_file_has_two_stages() -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    first, second = read_stages(tomllib.loads(text)["trainer"])
    assert (first.name, first.config.loss.name, first.follows) == ("sft", "sft", False)
    assert (second.name, second.config.loss.name, second.follows) == ("rl", "awr", True)
    assert second.config.episodes_per_step == 16
    assert second.config.validation is not None
    assert second.config.validation.patience == 3


def test_the_defaults_of_alarms_are_told() -> None:
    fields = {name for name in AlarmConfig.model_fields if f"`alarms.{name}`" in PAGE}
    assert fields == set(AlarmConfig.model_fields)
    table = PAGE[PAGE.index("| alarm |") : PAGE.index("## Doing a run again")]
    assert all(str(field.default) in table for field in AlarmConfig.model_fields.values())
