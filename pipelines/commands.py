"""The pipelines' commands: where each lives, and its line in `trajlake -h`."""

COMMANDS = {
    "credit": ("pipelines.credit.commands:credit", "Compute advantages over a lake."),
}
