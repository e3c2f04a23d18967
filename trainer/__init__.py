"""Training from the lake: which tokens, in which order, under which loss, and what became of the weights.

Data reaches the trainer only through tables: token rows joined with one credit job's advantages at pinned versions.
Modules named after data (`selection`, `plan`, `stream`) need no torch; those named after the model import it.
"""

COMMANDS = {
    "train": ("trainer.commands_train:train", "Train a policy from the lake."),
    "init-model": ("trainer.commands_model:init_model", "Make a small random model for trying things."),
    "convert-model": ("trainer.commands_model:convert_model", "Write a GGUF model as a Hugging Face folder."),
    "demo": ("trainer.online.commands:demo", "Run the whole loop on a tiny policy."),
    "rescore": ("trainer.evaluation.commands:rescore", "Score stored tokens with a checkpoint."),
    "evaluate": ("trainer.evaluation.commands:evaluate", "Estimate a policy from another one's episodes."),
    "eval": ("trainer.evaluation.commands:evaluate_success", "Count successes, and compare two policies."),
}
