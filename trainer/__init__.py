"""Training from the lake: which tokens, in which order, under which loss, and what became of the weights.

Data reaches the trainer only through tables: token rows joined with one credit job's advantages at pinned versions.
Modules named after data (`selection`, `plan`, `stream`) need no torch; those named after the model import it.
"""

COMMANDS = {
    "train": ("trainer.commands_train:train", "Train a policy from the lake."),
    "init-model": ("trainer.commands:init_model", "Make a small random model for trying things."),
    "convert-model": ("trainer.commands:convert_model", "Write a GGUF model as a Hugging Face folder."),
    "push": ("trainer.sync.command:push", "Load weights into running engines."),
    "loop": ("trainer.online.command:loop", "Collect, score, credit, train, sync, round after round."),
    "demo": ("trainer.online.demo_command:demo", "Run the whole loop on a tiny policy."),
    "rescore": ("trainer.commands:rescore", "Score stored tokens with a checkpoint."),
    "eval": ("trainer.commands:evaluate_success", "Count successes, and compare two policies."),
    "ope": ("trainer.commands:ope", "Off-policy evaluation: estimate a policy from another one's episodes."),
    "evaluate": ("trainer.commands:former_evaluate", ""),
}
