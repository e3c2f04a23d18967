"""The names of the losses, for help texts: the losses themselves load what a command line does not need."""

LOSS_NAMES = (
    "sft",
    "awr",
    "bc_exp",
    "reinforce",
    "ppo",
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "dro",
    "dpo",
    "dmpo",
    "kto",
)
"""Those of `trainer.losses.LOSSES`, in its order."""
