"""The page of the metrics that a training step writes, from `trainer.runs.metrics.METRICS`."""

from trainer.runs.metrics import METRICS


def metrics_page() -> str:
    """Every name with its meaning."""
    intro = """# Metrics

What `trajlake train` writes for each optimizer step, where the loss has it: one line in `metrics.jsonl`, one row per
value in the table `metrics` (view `run_metrics`), TensorBoard and Weights & Biases under the same names. A metric that
has nothing to measure is left out, never 0. Means are over the trained tokens of the whole optimizer step, over all
micro-batches and ranks, unless a line says otherwise. What your own `evaluate` returns stands beside these.

| metric | meaning |
| --- | --- |
"""
    return intro + "".join(f"| `{name}` | {meaning} |\n" for name, meaning in METRICS.items())
