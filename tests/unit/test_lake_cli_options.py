"""The options of all commands: one thing has one name, one help text and one default; each setting has one spelling."""

import importlib
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import duckdb
import pytest
from click.testing import CliRunner

from lake.cli import load_command_table, trajlake
from lake.cli.options import SettingsCommand, episodes_options
from lake.errors import UsageError
from lake.settings import models_in

MEANINGS = {
    **{"--config": 2, "--credit": 4, "--days": 2, "--device": 2, "--dry-run": 4, "--engine": 3, "--executor": 2},
    **{"--force": 3, "--format": 6, "--group-size": 2, "--groups": 2, "--lake": 4, "--limit": 2, "--memory": 2},
    **{"--memory-limit": 2, "--model": 2, "--name": 3, "--out": 6, "--port": 3, "--python": 2, "--ranks": 2},
    **{"--rounds": 2, "--rows": 2, "--run": 7, "--score": 4, "--seed": 5, "--step": 2, "--threshold": 2},
    **{"--watch": 2, "--where": 4, "--workers": 7, "--yes": 2},
}
"""Options that mean several things, with the number of pairs of help text and default. All others have one."""
MOST_OPTIONS = {"collect": 22, "train": 16, "prompts": 14, "record": 10}
"""Commands of many settings, with their maximum number of options."""


def list_commands() -> Iterator[tuple[str, click.Command]]:
    """Yield every command and subcommand with its name."""

    def walk(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
        yield name, command
        children = dict(getattr(command, "children", {}))
        if isinstance(command, click.Group):
            context = click.Context(command)
            children |= {child: command.get_command(context, child) for child in command.list_commands(context)}
        for child, subcommand in children.items():
            yield from walk(f"{name} {child}", subcommand)

    for name, (reference, text) in load_command_table().items():
        if text:
            module, _, attribute = reference.partition(":")
            yield from walk(name, getattr(importlib.import_module(module), attribute))


COMMANDS = dict(list_commands())
WITH_SETTINGS = {name: command for name, command in COMMANDS.items() if isinstance(command, SettingsCommand)}


def options_of(command: click.Command) -> list[click.Option]:
    return [parameter for parameter in command.params if isinstance(parameter, click.Option)]


def test_an_option_has_one_help_text_and_one_default() -> None:
    meanings = defaultdict(set)
    for command in COMMANDS.values():
        for option in options_of(command):
            default = option.default if isinstance(option.default, str | int | float) else None
            # Sections of the file, and examples, are those of the command.
            text = re.sub(r"\[[a-z]+\]|e\.g\. [^;]*", "", option.help or "")
            meanings[option.opts[0]].add((text, default))
    assert {name: len(pairs) for name, pairs in meanings.items() if len(pairs) > 1} == MEANINGS


def test_commands_of_many_settings_have_few_options() -> None:
    assert set(MOST_OPTIONS) == set(WITH_SETTINGS)
    for name, most in MOST_OPTIONS.items():
        assert len(options_of(COMMANDS[name])) <= most, name


def find_default(command: SettingsCommand, setting: str) -> Any:
    """Return the default of a dotted setting, None in a union. Fails where the command's class has no such field."""
    models, default = [command.model()], None
    for part in setting.split("."):
        if part == "KEY":
            return None
        fields = [model.model_fields[part] for model in models if part in model.model_fields]
        assert fields, f"{setting} is not a setting of {command.name}"
        models = [inner for field in fields for inner in models_in(field.annotation)]
        default = fields[0].default if len(fields) == 1 else None
    return default


@pytest.mark.parametrize("name", WITH_SETTINGS)
def test_every_flag_sets_a_field_and_shows_its_default(name: str) -> None:
    command = WITH_SETTINGS[name]
    by_flag = {option.opts[0]: option for option in options_of(command)}
    for setting, flag in command.flags.items():
        default = find_default(command, setting)
        help_text = by_flag[flag].help or ""
        if isinstance(default, str | int | float) and not isinstance(default, bool):
            shown = default if isinstance(default, str) else f"{default:g}"
            assert f"[default: {shown}]" in help_text, flag


@pytest.mark.parametrize("name", WITH_SETTINGS)
def test_a_former_flag_names_its_setting(name: str) -> None:
    command = WITH_SETTINGS[name]
    for flag, successor in command.former.items():
        assert flag not in {option for parameter in command.params for option in parameter.opts}
        if not successor.startswith("--"):
            find_default(command, successor.partition("=")[0])
        error = CliRunner().invoke(trajlake, [name, flag, "1"]).exception
        assert isinstance(error, UsageError)
        assert str(error).startswith(f"{flag} is now --")
        assert successor in str(error)


def test_a_flag_a_pair_and_the_file_set_the_same_field(tmp_path: Path) -> None:
    command = WITH_SETTINGS["collect"]
    model = command.model()
    silent = {option.name: () if option.multiple else None for option in options_of(command)}
    file = tmp_path / "settings.toml"
    file.write_text("[collect]\nplayer.sampling.temperature = 0.5\ngrace = 3\n")
    in_file = command.read_config(model, str(file), (), silent)
    assert in_file == command.read_config(model, None, ("player.sampling.temperature=0.5", "grace=3"), silent)
    assert in_file == command.read_config(model, None, ("grace=3",), silent | {"temperature": 0.5})
    assert command.read_config(model, str(file), ("grace=4",), silent).model_dump()["grace"] == 4
    with pytest.raises(UsageError, match=r"--temperature and --set player\.sampling\.temperature say"):
        command.read_config(model, None, ("player.sampling.temperature=1",), silent | {"temperature": 0.5})
    with pytest.raises(UsageError, match=r"no option `player\.sampling\.tempreature`; valid: temperature"):
        command.read_config(model, None, ("player.sampling.tempreature=1",), silent)


def test_the_help_lists_every_setting_without_a_flag_once() -> None:
    for name, command in WITH_SETTINGS.items():
        _, _, table = CliRunner().invoke(trajlake, [name, "-h"]).stdout.partition("\nSettings (")
        listed = re.findall(r"^  ([a-z_.0-9A-Z]+)(?:  |$)", table, re.MULTILINE)
        settings = {s for s in command.former.values() if "=" not in s and not s.startswith("--")}
        assert {setting.removesuffix(".KEY") for setting in settings if not setting.startswith("loss.")} <= set(listed)
        assert not set(listed) & set(command.flags)
        assert len(listed) == len(set(listed))


def test_run_and_where_choose_episodes_together() -> None:
    @click.command()
    @episodes_options
    def show(where: str) -> None:
        click.echo(where)

    predicate = CliRunner().invoke(show, ["--run", "a'b", "--where", "seed = 1 OR seed = 3 -- a comment"]).stdout
    episodes = "(VALUES ('a''b', 1), ('a''b', 2), ('c', 1)) AS episodes(run_id, seed)"
    assert duckdb.connect().execute(f"SELECT * FROM {episodes} WHERE {predicate}").fetchall() == [("a'b", 1)]
