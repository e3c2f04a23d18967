"""Weights from the trainer to engines that are generating.

A push loads the same weights into every engine under one version. The version is an integer that every token carries
which is sampled from then on (`tokens.policy_version`, `tokens.version_spans`). A version never names two sets of
weights.

`targets.py` loads weights into all engines at once, and again into an engine that restarted without them. Its parity
probe then compares the engine's log-probabilities with the trainer's. `folders.py` writes the model folders, or the
LoRA adapters, that engines read. `transfer.py` sends weights from GPU to GPU.

This package uses the engine protocol of `pipelines.collect.engines` and imports nothing else of that layer.
"""
