"""What a run would do (--plan): what is trained, what is dropped and why, how batches are filled, how long it takes.

Large plans are judged by some of their optimizer steps, evenly spread. The time comes from an earlier job of the same
kind, or from timing this model for a moment.
"""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory

import numpy as np
import polars as pl

from lake import ids
from lake import open as open_lake
from lake.documents import json_object
from lake.lake import Lake
from lake.read.parquet import collected
from lake.read.snapshot import Snapshot
from lake.settings import value_at
from trainer.config import TrainConfig
from trainer.data.plan.plan import OptimizerStep, Plan
from trainer.data.plan.preparation import Prepared, prepare
from trainer.data.select.selection import Selection
from trainer.former_layout import renewed_record
from trainer.losses.sft import SFT
from trainer.policy.model_folder import stored_parameters
from trainer.runs.offline import check_model, make_deterministic
from trainer.runs.progress import counted
from trainer.runs.runs import SPEED


@contextmanager
def preview(lk: Lake, config: TrainConfig) -> Iterator[Prepared]:
    """A run as it would start, for a look at its plan: nothing is written into the lake, and no weights are loaded.

    Texts that the lake has no tokens of are tokenised into a temporary folder, which goes when the block ends.

    Raises:
        UsageError, DataRefusedError: as for `train`, but what the data refuse is in the plan's `refusals`.
    """
    check_model(config)
    with TemporaryDirectory(prefix="trajlake-plan-") as folder:
        yield prepare(lk, config, scratch=open_lake(Path(folder) / "lake", create=True))


_JUDGED = 100
"""Optimizer steps that are looked at."""


@dataclass(frozen=True, slots=True)
class PackingFigures:
    """Means over the optimizer steps that were looked at."""

    micro_batches: float
    """Micro-batches of an optimizer step on one rank."""
    most: int
    """The same, at most."""
    fill: float
    """Share of the token budget that is used; above 1 where atoms are longer than it."""


def judged_steps(plan: Plan) -> list[OptimizerStep]:
    """Evenly spread optimizer steps of a plan, all of a small one."""
    return plan.steps[:: -(-len(plan.steps) // _JUDGED)]


def packing_figures(plan: Plan) -> PackingFigures:
    """How a plan fills its micro-batches."""
    steps = judged_steps(plan)
    counts = [len(plan.micro_batches(step)[0]) for step in steps]
    tokens = sum(step.tokens for step in steps)
    return PackingFigures(fmean(counts), max(counts), tokens / (sum(counts) * plan.config.token_budget))


def balance(plan: Plan, ranks: int) -> float:
    """How evenly ranks are loaded: the share of their time that they work, were a round as long as its costliest part.

    That is the sum of all squared sequence lengths over `ranks` times the sum of each round's largest; 1 is perfect.
    """
    worked = waited = 0
    for step in judged_steps(plan):
        dealt = plan.micro_batches(step, ranks)
        costs = [[int((plan.tokens_Q[items].astype(np.int64) ** 2).sum()) for items in bins] for bins in dealt]
        worked += step.squared_lengths
        waited += ranks * sum(max(of_round) for of_round in zip(*costs, strict=True))
    return worked / waited


_RANKS = (2, 4, 8)
"""Numbers of ranks whose balance is shown."""

Row = tuple[str, str, str | None]


def plan_rows(prepared: Prepared, *, epochs: int, seconds: float | None, how: str) -> pl.DataFrame:
    """One row per figure: item, value, note (text; or NULL). Seconds are estimated, `how` says by what."""
    plan, selection = prepared.plan, prepared.selection
    too_long = selection.too_long
    longest = "max_length" if too_long is None else too_long.describe(selection.max_length)
    rows: list[Row] = [
        ("episodes selected", f"{selection.episodes:,}", None),
        ("episodes trained", f"{plan.episodes:,}", None),
        ("sequences", f"{plan.sequences:,}", "per epoch"),
        ("tokens", f"{plan.tokens:,}", "per epoch, context included"),
        ("action tokens", f"{plan.loss_tokens:,}", "per epoch; they carry the loss"),
        ("token source", selection.provenance, None),
        ("longest sequence", f"{selection.max_length:,}", longest),
        ("epochs", str(epochs), None),
        ("optimizer steps", str(len(plan.steps)), None),
        *_packing(plan),
    ]
    if selection.groups is not None:
        rows.append(("groups", f"{selection.groups:,}", f"{selection.dead_groups:,} of them dead"))
    rows += [(f"preferences: {name}", f"{number:,}", note) for name, number, note in selection.findings]
    rows += _mixture(plan)
    rows += _staleness(plan, selection)
    for row in selection.drops.iter_rows(named=True):
        tokens = "" if row["tokens"] is None else f", {counted(row['tokens'], 'action token')}"
        where = f"in {counted(row['episodes'], 'episode')}{tokens}"
        rows.append((f"dropped: {row['reason']}", counted(row["steps"], "step"), where))
    rows += [(f"refused: {r.reason}", counted(r.steps, "step"), r.message) for r in prepared.refusals]
    rows.append(("estimated seconds", "unknown" if seconds is None else f"{seconds:.3g}", how))
    return pl.DataFrame(rows, schema=["item", "value", "note"], orient="row")


def _packing(plan: Plan) -> list[Row]:
    """How the loss is averaged, what stays together, how full and how even micro-batches are."""
    figures = packing_figures(plan)
    shares = ", ".join(f"{ranks}: {balance(plan, ranks):.0%}" for ranks in _RANKS)
    return [
        ("loss average", plan.weighting.describe(), "how the losses of an optimizer step's tokens are averaged"),
        ("kept together", str(plan.weighting.atom), "what is never split over micro-batches or ranks"),
        ("micro-batches", f"{figures.micro_batches:.1f}", f"per optimizer step, at most {figures.most}"),
        ("packing", f"{figures.fill:.0%}", f"of the token budget of {plan.config.token_budget:,} used"),
        ("balance by ranks", shares, "share of the time that ranks would work, by squared sequence lengths"),
    ]


def _mixture(plan: Plan) -> list[Row]:
    """What an epoch draws of each source."""
    if plan.source_E is None:
        return []
    drawn: Counter[int] = Counter()
    for step in plan.steps:
        if step.epoch == 0:
            drawn.update(plan.source_E[step.episodes_E].tolist())
    held = Counter(plan.source_E.tolist())
    rows: list[Row] = []
    for number, source in enumerate(plan.config.mixture):
        draws = f"{counted(drawn[number], 'draw')} per epoch of {counted(held[number], 'episode')}"
        share = f"{drawn[number] / len(plan.source_E):.1%}"
        rows.append((f"mixture: {source.describe()}", share, f"{draws}, weight {source.weight:g}"))
    return rows


def _staleness(plan: Plan, selection: Selection) -> list[Row]:
    """How old the trained steps are, where that is known."""
    behind = selection.members.filter(pl.col("trained"))["staleness"]
    known = behind.drop_nulls().to_list()
    if not known:
        return []
    limit = "no limit" if plan.config.max_staleness is None else f"at most {plan.config.max_staleness}"
    unknown = f", {counted(behind.null_count(), 'step')} of unknown version" if behind.null_count() else ""
    note = f"policy versions behind the newest, median {median(known):g}; {limit}{unknown}"
    return [("staleness", f"{min(known)} to {max(known)}", note)]


_TIMED_TOKENS = 2048


def estimate_seconds(snapshot: Snapshot, plan: Plan, config: TrainConfig, *, measure: bool) -> tuple[float | None, str]:
    """Seconds of training (without start-up and checkpoints) that a plan will take, and in words how that is known.

    From earlier jobs, None where none tells; with `measure` from a timed pass of the loaded model.
    """
    tokens = plan.tokens * config.epochs
    if measure:
        speed = _timed_speed(plan, config)
        return tokens / speed, f"one timed pass of this model: {speed:,.0f} tokens/s"
    if (earlier := _earlier_speed(snapshot, config)) is not None:
        job_id, speed = earlier
        return tokens / speed, f"speed of job {ids.to_text(job_id)}: {speed:,.0f} tokens/s"
    return None, "no earlier run of this loss with a model of this size; --measure loads the model and times it"


def _earlier_speed(snapshot: Snapshot, config: TrainConfig) -> tuple[int, float] | None:
    """Speed of the newest finished run of a model of this size, with this loss and device."""
    size = stored_parameters(Path(config.model))
    jobs = snapshot.scan("jobs").filter((pl.col("kind") == "train") & (pl.col("event") == "succeeded"))
    rows = collected(jobs.sort("at", descending=True).select("job_id", "parameters", "counts"))
    for job_id, parameters, counts in rows.iter_rows():
        was, figures = renewed_record(json_object(parameters)), json_object(counts)
        alike = value_at(was, "loss.name") == config.loss.name and was.get("device") == config.device
        alike &= config.threads in (None, was.get("threads"))
        alike &= was.get("model") == config.model if size is None else figures.get("parameters") == size
        if alike and figures.get(SPEED):
            return job_id, float(figures[SPEED])
    return None


def _timed_speed(plan: Plan, config: TrainConfig) -> float:
    """Tokens per second of one forward and backward pass over sequences of the plan's mean length.

    The time of a loss is that of the model, so it is timed with the plainest. A backward pass takes about twice a
    forward pass; losses with a reference or a first pass have one more of these each.
    """
    import torch

    from trainer.backends.base import SingleDevice
    from trainer.data.stream.batch import PackedBatch
    from trainer.policy.model import policy_of

    make_deterministic(config)
    needs = config.loss.needs
    passes = 1 + (needs.reference_logprobs + bool(needs.statistics)) / 3
    length = max(2, min(_TIMED_TOKENS, plan.tokens // plan.sequences))
    count = max(1, _TIMED_TOKENS // length)
    share = plan.loss_tokens / plan.tokens
    total = length * count
    boundaries = list(range(0, total + 1, length))
    inner = torch.arange(total)[torch.arange(total) % length > 0]
    target_at = inner[:: max(1, round(1 / share))]
    batch = PackedBatch(
        input_ids_T=torch.zeros(total, dtype=torch.int64),
        position_ids_T=torch.arange(total) % length,
        boundaries=boundaries,
        predictor_N=target_at - 1,
        target_N=torch.zeros(len(target_at), dtype=torch.int64),
        weight_N=torch.full((len(target_at),), 1 / len(target_at)),
    )
    backend = SingleDevice(policy_of(config), config.optimizer)
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        backend.forward_backward(batch, SFT())
        seconds.append(time.perf_counter() - began)
    return total / min(seconds) / passes
