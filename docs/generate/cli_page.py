"""The page of commands, from their help texts."""

from collections.abc import Iterator

import click

from lake.cli import trajlake

HELP_WIDTH = 100
_COMPLETION = """The Tab key completes commands, options and their values once the shell has read this line, for example
from `~/.bashrc`; for zsh write `zsh_source`, for fish `_TRAJLAKE_COMPLETE=fish_source trajlake | source`:

```bash
eval "$(_TRAJLAKE_COMPLETE=bash_source trajlake)"
```
"""


def cli_page() -> str:
    """Every command with its help text."""
    parent = click.Context(trajlake, info_name="trajlake", terminal_width=HELP_WIDTH, **trajlake.context_settings)
    sections = [f"# Commands\n\n```text\n{trajlake.get_help(parent)}\n```\n", _COMPLETION]
    for name in trajlake.list_commands(parent):
        command = trajlake.get_command(parent, name)
        if command is not None:
            sections += _command_sections(command, name, parent)
    return "\n".join(sections)


def _command_sections(command: click.Command, name: str, parent: click.Context) -> Iterator[str]:
    context = click.Context(command, info_name=name, parent=parent)
    yield f"## {context.command_path}\n\n```text\n{command.get_help(context)}\n```\n"
    children: dict[str, click.Command | None] = dict(getattr(command, "children", {}))
    if isinstance(command, click.Group):
        children |= {child: command.get_command(context, child) for child in command.list_commands(context)}
    for child, found in children.items():
        if found is not None:
            yield from _command_sections(found, f"{name} {child}", parent)
