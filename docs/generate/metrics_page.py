"""The page of the metrics, from `lake.read.training.METRICS`."""

from lake.read.training import METRICS, ROUND_METRICS


def metrics_page() -> str:
    """Every name with its meaning."""
    intro = """# Metrics

What `trajlake train` writes for each optimizer step, where the loss has it: one line in `metrics.jsonl`, one row per
value in the table `metrics` (view `run_metrics`), TensorBoard and Weights & Biases under the same names. A metric that
has nothing to measure is left out, never 0. Means are over the trained tokens of the whole optimizer step, over all
micro-batches and ranks, unless a line says otherwise. The metrics of your own `evaluate` are added to these.

| metric | meaning |
| --- | --- |
"""
    return f"""{intro}{_rows(METRICS)}
`trajlake loop` writes these for each round, under its own job, and a push for each version:

| metric | meaning |
| --- | --- |
{_rows(ROUND_METRICS)}"""


def _rows(names: dict[str, str]) -> str:
    return "".join(f"| `{name}` | {meaning} |\n" for name, meaning in names.items())
