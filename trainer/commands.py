"""The trainer's commands: where each lives, and its line in `trajlake -h`."""

COMMANDS = {
    "train": ("trainer.commands_train:train", "Train a policy from the lake."),
    "init-model": ("trainer.commands_model:init_model", "Make a small random model for trying things."),
    "convert-model": ("trainer.commands_model:convert_model", "Write a GGUF model as a Hugging Face folder."),
    "demo": ("trainer.online.commands:demo", "Run the whole loop on a tiny policy."),
    "rescore": ("trainer.evaluation.commands_rescore:rescore", "Score stored tokens with a checkpoint."),
    "evaluate": ("trainer.evaluation.commands_evaluate:evaluate", "Estimate a policy from another one's episodes."),
    "eval": ("trainer.evaluation.commands_eval:evaluate_success", "Count successes, and compare two policies."),
}
