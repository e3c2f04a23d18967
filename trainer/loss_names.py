"""The names that `train` chooses from, for help texts: what bears them loads what a command line does not need."""

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

AGGREGATIONS = ("token_mean", "unit_mean_token_mean", "unit_mean_token_sum", "unit_mean_token_sum_norm")
"""Those of `trainer.data.aggregation.Aggregation`."""
UNITS = ("token", "turn", "sequence", "episode")
"""Those of `trainer.data.aggregation.Unit`."""
