"""Help texts of commands with many options, in sections."""

from collections.abc import Mapping, Sequence
from typing import Any

import click


class SectionedCommand(click.Command):
    """A command whose help lists its options under headings.

    Args:
        sections: heading -> names of its options' parameters. Options that stand in none come last.
        given: of `click.Command`.
    """

    def __init__(self, *, sections: Mapping[str, Sequence[str]], **given: Any) -> None:
        super().__init__(**given)
        self.sections = sections

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, section by section."""
        left = {parameter.name: parameter for parameter in self.get_params(ctx)}
        for heading, names in self.sections.items():
            self._write(heading, [left.pop(name) for name in names], ctx, formatter)
        self._write("Options", list(left.values()), ctx, formatter)

    @staticmethod
    def _write(
        heading: str, parameters: Sequence[click.Parameter], ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        records = [record for parameter in parameters if (record := parameter.get_help_record(ctx)) is not None]
        with formatter.section(heading):
            formatter.write_dl(records)
