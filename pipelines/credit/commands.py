"""Command `credit`: advantages over a lake, one command per estimator, and what is done with finished jobs.

The names come from the registry, so listing them imports no estimator.
"""

from importlib import import_module

import click

VERBS = {"compare": ("pipelines.credit.commands_compare:compare", "Compare two credit jobs.")}
"""Name -> command and its line of help, beside the estimators."""


class CreditGroup(click.Group):
    """Estimators and verbs in one space of names."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Estimators, then verbs."""
        from pipelines.credit.estimators import ESTIMATORS

        return [*sorted(ESTIMATORS), *VERBS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        """The command of an estimator or a verb; UsageError if it is neither, or refused, with the reason."""
        if cmd_name in VERBS:
            module, _, attribute = VERBS[cmd_name][0].partition(":")
            command: click.Command = getattr(import_module(module), attribute)
            return command
        from pipelines.credit.commands_estimator import estimator_command
        from pipelines.credit.estimators import estimator_class

        return estimator_command(estimator_class(cmd_name))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Estimators with the first line of their docstring, and verbs."""
        from pipelines.credit.estimators import ESTIMATORS, one_line

        with formatter.section("Estimators"):
            formatter.write_dl([(name, one_line(name)) for name in sorted(ESTIMATORS)])
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in VERBS.items()])


@click.group(cls=CreditGroup, subcommand_metavar="ESTIMATOR|COMMAND [OPTIONS]")
def credit() -> None:
    """Compute advantages with an estimator and write them to the table `advantages`.

    Only groups whose episodes, scores or parameters changed since the series' last job are computed.
    `trajlake credit ESTIMATOR -h` lists an estimator's options.
    """
