"""Jobs over tables: collect rollouts, score them, give credit, select, evaluate.

Imports the lake and no other layer; torch and transformers are imported inside the functions that need them.
"""

COMMANDS = {
    "collect": ("pipelines.collect.commands:collect", "Collect rollouts of an environment or an agent into a lake."),
    "serve": ("pipelines.collect.engines.serve_command:serve", "Serve a model by vLLM, for collecting."),
    "template": ("pipelines.collect.template_command:template", "Write an environment or an agent to begin with."),
    "prompts": ("pipelines.prompts.commands:prompts", "Propose, test and rank system prompts."),
    "score": ("pipelines.score.commands:score", "Score episodes with a reward function or a built-in scorer."),
    "credit": ("pipelines.credit.commands:credit", "Compute advantages over a lake."),
    "compare": ("pipelines.credit.commands:compare", "Compare the advantages of two credit jobs."),
    "anchors": ("pipelines.credit.anchors.command:anchors", "Measure which steps share a state, by definition."),
    "group": ("pipelines.groupings.commands:group", "Form other groups than those that were collected."),
    "select": ("pipelines.select.commands:select", "Choose what is trained on, each drop with its reason."),
    "estimate": (
        "pipelines.estimate.command:estimate",
        "Say what a lake of a given size will take.",
    ),
}
