"""Jobs over tables: collect rollouts, score them, give credit, select, evaluate.

Imports the lake and no other layer; torch and transformers are imported inside the functions that need them.

Nouns (docs/glossary.md has all): a *rollout* is an attempt of a *player* (an *environment* with a *policy*, or an
*agent*) at a *task*; an *engine* samples from a model. A *scorer* gives *scores*; a *reward function* is a user's,
run in a *sandbox*. *Credit* turns rewards and scores into *advantages* by an *estimator*. An *anchor state* is a
state that siblings share. A *grouping* and a *selection* are stored choices of groups and of episodes to train on.
"""

COMMANDS = {
    "collect": ("pipelines.collect.commands:collect", "Collect rollouts of an environment or an agent into a lake."),
    "serve": ("pipelines.collect.commands:serve", "Serve a model with vLLM, for collecting."),
    "template": ("pipelines.collect.commands:template", "Write an environment or an agent to start from."),
    "prompts": ("pipelines.prompts.commands:prompts", "Propose, test and rank system prompts."),
    "score": ("pipelines.score.commands:score", "Score episodes with a reward function or a built-in scorer."),
    "credit": ("pipelines.credit.commands:credit", "Compute advantages over a lake."),
    "compare": ("pipelines.credit.commands:compare", "Compare the advantages of two credit jobs."),
    "anchors": ("pipelines.credit.commands:anchors", "Measure which steps share a state under anchor definitions."),
    "group": ("pipelines.groupings.commands:group", "Group episodes by another definition."),
    "select": ("pipelines.select.commands:select", "Select the episodes to train on, with a reason for each drop."),
    "estimate": (
        "pipelines.estimate.command:estimate",
        "Estimate the storage, time and cost of a lake.",
    ),
}
