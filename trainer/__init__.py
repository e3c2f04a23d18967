"""Training from the lake: data, losses, optimizer loop, checkpoints, and the online loop.

Data reaches the trainer only through tables: token rows joined with one credit job's advantages at pinned versions.
`trainer.data` needs no torch; `policy`, `backends`, `losses` and `runs.loop` import it.

Nouns (docs/glossary.md has all): a *run* is one training under a name, in *stages*; its *plan* says which episodes
and tokens each optimizer step trains, its *stream* brings them as *batches* and *micro-batches*. The *behaviour
policy* sampled an action; the *proximal* and *reference* policies are those of the losses. A *round* of the loop
collects, scores, credits, trains and *syncs* the weights to engines. A *checkpoint* is weights, optimizer and
position on disk.
"""

COMMANDS = {
    "train": ("trainer.commands:train", "Train a policy from the lake."),
    "init-model": ("trainer.commands:init_model", "Make a small random model for trying things."),
    "convert-model": ("trainer.commands:convert_model", "Write a GGUF model as a Hugging Face folder."),
    "push": ("trainer.sync.command:push", "Load weights into running engines."),
    "loop": ("trainer.online.commands:loop", "Collect, score, credit, train, sync, round after round."),
    "demo": ("trainer.online.commands:demo", "Run the whole loop on a tiny policy."),
    "rescore": ("trainer.commands:rescore", "Score stored tokens with a checkpoint."),
    "eval": ("trainer.commands:evaluate_success", "Count successes, and compare two policies."),
    "ope": ("trainer.commands:ope", "Off-policy evaluation: estimate a policy from another one's episodes."),
    "evaluate": ("trainer.commands:former_evaluate", ""),
}
