"""The pipelines' commands: where each lives, and its line in `trajlake -h`."""

COMMANDS = {
    "score": ("pipelines.score.commands:score", "Score episodes with a reward function or a built-in scorer."),
    "credit": ("pipelines.credit.commands:credit", "Compute advantages over a lake."),
    "compare": ("pipelines.credit.commands_compare:compare", "Compare the advantages of two credit jobs."),
    "anchors": ("pipelines.credit.commands_anchors:anchors", "Measure which steps share a state, by definition."),
    "group": ("pipelines.groupings.commands:group", "Form other groups than those that were collected."),
    "select": ("pipelines.select.commands:select", "Choose what is trained on, each drop with its reason."),
}
