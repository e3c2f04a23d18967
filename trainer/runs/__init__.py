"""A run from its configuration to its weights: the loop, checkpoints, resuming, stages, repetition."""
