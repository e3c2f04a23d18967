"""The optimizer loop: stream, forward and backward pass, update, report. Offline and online training run it.

Most losses compute nothing before the gradient of an optimizer step. A reference policy is frozen, so its
log-probabilities are those of any pass. The proximal policy of a decoupled loss has the weights of some optimizer steps
ago (`trainer.losses.policy`); its copy replaces the weights for a pass. A loss with statistics (z0 of kto,
batch-normalised weights) first sees every micro-batch of the step without gradient, under the weights at its start. Its
sums are added over micro-batches and ranks.

`train_round` is the update phase on the rollouts of one round, for a loop that holds the model. It takes the same
selection, plan, stream and loop as an offline run, without checkpoints. The caller decides when to write the returned
rows, and how the weights are used.

The weights in `batches` are those that the stream hands to the loss (`trainer.data.stream.compute_weights`), so
readers need not know how a loss is averaged. Losses on preferences weigh units and no single tokens: theirs stay NULL.
`lake.read.training` defines the names of metrics.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import numpy as np
import numpy.typing as npt
import polars as pl
from torch import Tensor  # noqa: TID253

from lake.errors import UsageError
from lake.judgements.credit import Credit
from lake.judgements.scores import ENV_RETURN, read_episode_scores
from lake.progress import track
from lake.read.parquet import collect_rows
from lake.read.snapshot import Snapshot
from trainer.backends.base import FrozenPolicy, PolicyBackend, SingleDevice, loss_rows
from trainer.backends.ranks import report_once
from trainer.config import TrainConfig
from trainer.data.batch import PackedBatch, compute_starts, expand_ranges
from trainer.data.plan import OptimizerStep, Plan
from trainer.data.refusals import find_refusals, refuse
from trainer.data.selection import TrainingSelection, select
from trainer.data.stream import Stream, compute_weights
from trainer.losses import Loss
from trainer.losses.policy import CorrectedLoss
from trainer.policy.model import check_vocabulary
from trainer.runs.factories import learning_rate, make_reference


def build_batch_rows(plan: Plan, steps: Iterable[OptimizerStep]) -> pl.DataFrame:
    """Return rows for the table `batches`: one for each episode, or side of a pair, of some optimizer steps."""
    return pl.concat([_build_step_rows(plan, step) for step in steps])


def _build_step_rows(plan: Plan, step: OptimizerStep) -> pl.DataFrame:
    rows = plan.list_consumed(step)
    if plan.sign_M is not None:
        empty = {"loss_weight": pl.lit(None, pl.Float64), "token_weights": pl.lit(None, pl.List(pl.Float32))}
        return rows.with_columns(**empty)
    first_E = plan.sequence_starts_E[step.episodes_E]
    sequences_E = plan.sequence_starts_E[step.episodes_E + 1] - first_E
    sequences_Q = expand_ranges(first_E, sequences_E)
    members_M, members_Q = plan.list_members(sequences_Q)
    weight_M = compute_weights(plan, step, sequences_Q).weight_M
    entry_M = np.repeat(np.repeat(np.arange(rows.height), sequences_E), members_Q)
    trained_M = plan.trained_M[members_M]
    step_M = plan.members["step_index"].to_numpy()[members_M]
    # Steps of an entry lie from its first trained one to its last; those between that carry no loss weigh 0.
    first_step_E = rows["first_step"].to_numpy()
    spans_E = rows["last_step"].to_numpy() - first_step_E + 1
    at_M = compute_starts(spans_E)[entry_M] + step_M - first_step_E[entry_M]
    weights = np.zeros(int(spans_E.sum()), np.float32)
    weights[at_M[trained_M]] = weight_M[trained_M]
    mass_M = weight_M.astype(np.float64) * plan.loss_tokens_M[members_M]
    lists = pl.DataFrame({"entry": np.repeat(np.arange(rows.height), spans_E), "weights": weights})
    return rows.with_columns(
        loss_weight=pl.Series(np.bincount(entry_M, mass_M, rows.height)),
        token_weights=lists.group_by("entry", maintain_order=True).all()["weights"],
    )


class EpisodeFigures:
    """Figures of the episodes of an optimizer step: the score that credit used, the return, and the number of turns."""

    def __init__(self, snapshot: Snapshot, plan: Plan) -> None:
        ids_E = pl.DataFrame({"episode_id": plan.episode_ids_E})
        rows = snapshot.scan("episodes").select("episode_id", ENV_RETURN, "num_steps")
        scores = collect_rows(rows.filter(pl.col("episode_id").is_in(ids_E["episode_id"].unique().implode())))
        score = ENV_RETURN if plan.source is None else find_credited_score(plan.source)
        figures = {"reward": ENV_RETURN, "episode_turns": "num_steps"}
        if score != ENV_RETURN:
            figures = {"reward": "score", "env_return": ENV_RETURN, "episode_turns": "num_steps"}
            scores = scores.join(_scores(snapshot, score), on="episode_id", how="left")
        figures_by_episode = ids_E.join(scores, on="episode_id", how="left", maintain_order="left")
        self._values_E = {
            name: figures_by_episode[column].cast(pl.Float64).fill_null(float("nan")).to_numpy()
            for name, column in figures.items()
        }
        """Figures by metric, float64 [E]; NaN where unknown."""
        if "advantage" in plan.members.columns:
            self._values_E["episode_advantage"] = _advantages_E(plan)

    def means(self, step: OptimizerStep) -> dict[str, float]:
        """Return the mean of each figure over the step's episodes that have it; leave out figures that none has."""
        means = {}
        for name, values_E in self._values_E.items():
            step_E = values_E[step.episodes_E]
            step_E = step_E[~np.isnan(step_E)]
            if len(step_E):
                means[name] = float(step_E.mean())
        return means


def _advantages_E(plan: Plan) -> npt.NDArray[np.float64]:
    """Return the mean advantage of each episode's trained steps, float64 [E]; NaN where none is trained."""
    first_E = plan.member_starts_Q[plan.sequence_starts_E[:-1]]
    advantage_M = plan.members.select("advantage").to_series().cast(pl.Float64).to_numpy()
    sums_E = np.add.reduceat(np.where(plan.trained_M, advantage_M, 0.0), first_E)
    trained_E = np.add.reduceat(plan.trained_M.astype(np.int64), first_E)
    means_E = np.full(len(first_E), np.nan)
    np.divide(sums_E, trained_E, out=means_E, where=trained_E > 0)
    return means_E


def find_credited_score(credit: Credit) -> str:
    """Return the name and version of the episode score that advantages were computed from."""
    version = credit.parameters.get("scorer_versions", {}).get(credit.score)
    return credit.score if version is None or "@" in credit.score else f"{credit.score}@{version}"


def _scores(snapshot: Snapshot, score: str) -> pl.DataFrame:
    """Return scores of episodes; none where they were erased, as a run does not fail for figures that it only shows."""
    try:
        return read_episode_scores(snapshot, score)
    except UsageError:
        return pl.DataFrame(schema={"episode_id": pl.Int64, "score": pl.Float64})


TOTALS = frozenset({"loss", "pairs", "desirable", "undesirable", "value_loss", "value_target"})
"""Sums that are reported without averaging."""


def compute_metrics(sums: Mapping[str, float], denominator: int) -> dict[str, float]:
    """Compute metrics from sums over an optimizer step with `denominator` trained tokens.

    `x` becomes its mean over the trained tokens, unless it is one of `TOTALS`. `x_squared` with `x` becomes `x_ess`,
    the effective sample size (sum w)^2 / sum w^2 / n (Kish). `x/y` becomes `x`, the sum divided by the sum y; it is
    left out where y is 0. The moments of a value head become `explained_variance`.
    """
    metrics, sums = {}, dict(sums)
    if "value_power" in sums:
        variance = sums.pop("value_power") - sums["value_target"] ** 2
        unexplained = sums["value_loss"] - sums.pop("value_error") ** 2
        if variance > 0:
            metrics["explained_variance"] = 1 - unexplained / variance
    for name, value in sums.items():
        metric, _, over = name.partition("/")
        if over:
            if sums[over] > 0:
                metrics[metric] = value / sums[over]
        elif name.endswith("_squared"):
            base = name.removesuffix("_squared")
            metrics[f"{base}_ess"] = sums[base] ** 2 / value / denominator if value > 0 else 0.0
        else:
            metrics[name] = value if name in TOTALS else value / denominator
    return metrics


def build_metric_rows(rows: list[tuple[int, dict[str, float]]]) -> pl.DataFrame:
    """Return rows for the table `metrics` (step, name, value, at) from pairs of a step and its metrics."""
    now = datetime.now(UTC)
    flat = [(step, name, value, now) for step, metrics in rows for name, value in metrics.items()]
    schema = pl.Schema({"step": pl.Int64(), "name": pl.String(), "value": pl.Float64(), "at": pl.Datetime("us", "UTC")})
    return pl.DataFrame(flat, schema=schema, orient="row")


PROXIMAL_EVERY = 4
"""Default number of optimizer steps of a proximal policy: AReaL cuts a batch into as many."""


def find_proximal_period(loss: Loss, config: TrainConfig, plan: Plan) -> int:
    """Return the number of optimizer steps for which the proximal policy stays; 1 where the loss has none.

    The plan's epochs are the periods where `config.minibatches` cuts them.
    """
    if not loss.needs.proximal_logprobs:
        return 1
    if isinstance(loss, CorrectedLoss) and loss.correction.proximal_every is not None:
        return loss.correction.proximal_every
    return PROXIMAL_EVERY if config.minibatches is None else sum(step.epoch == 0 for step in plan.steps)


def fill_batches(
    backend: PolicyBackend,
    reference: FrozenPolicy | None,
    loss: Loss,
    batches: Sequence[PackedBatch],
    *,
    proximal: bool = False,
) -> tuple[list[PackedBatch], Mapping[str, float]]:
    """Move this rank's micro-batches, dummies included, to the policy's device, and fill in what the loss needs.

    Also returns the sums of `loss.prepare` over all ranks. With `proximal`, the proximal policy is the copy that the
    backend keeps, instead of the present policy.

    Raises:
        ContractError: the backend keeps no copy.
    """
    filled = [batch.to(backend.policy.device) for batch in batches]
    if reference is not None:
        filled = [replace(batch, reference_logprobs_N=reference.logprobs(batch)) for batch in filled]
    if proximal:
        with backend.use_proximal():
            filled = [replace(batch, proximal_logprobs_N=backend.logprobs(batch)) for batch in filled]
    if not loss.needs.statistics:
        return filled, {}
    # Dummies too: across ranks all must make the same passes.
    passed = [(batch, backend.logprobs(batch)) for batch in filled]
    rows = [loss_rows(batch, loss, logprobs_N, None) for batch, logprobs_N in passed if not batch.dummy]
    sums = loss.prepare(rows) if rows else {}
    return filled, backend.ranks.sum_over_ranks({name: float(value) for name, value in sums.items()})


@dataclass(frozen=True, slots=True)
class StepReport:
    """An update after it was done."""

    step: OptimizerStep
    """The data that it consumed."""
    metrics: dict[str, float]
    """Names of `lake.read.training.METRICS`."""
    alarms: list[str] = field(default_factory=list)
    """A sentence for each alarm that starts with it, and one if it was skipped."""


def run_steps(
    backend: PolicyBackend,
    snapshot: Snapshot,
    plan: Plan,
    config: TrainConfig,
    *,
    peak: float,
    first: int = 0,
    reference: FrozenPolicy | None = None,
) -> Generator[StepReport, None, None]:
    """Train a plan from optimizer step `first` on; yield a report after each update.

    Args:
        backend: the policy and its optimizer. Each rank runs its own micro-batches; all get the same reports.
        reference: frozen policy of losses that need one; None loads the configuration's.

    Raises:
        ContractError: a token id outside the vocabulary of the model or of the reference, a gradient that is not
            finite, or a first step inside the period of a proximal policy that the backend does not keep.
    """
    loss = config.loss
    if loss.needs.reference_logprobs and reference is None:
        reference = make_reference(config, backend.ranks)
    vocabulary = min(scoring.vocabulary for scoring in (backend, reference) if scoring is not None)
    total, period, figures = len(plan.steps), find_proximal_period(loss, config, plan), EpisodeFigures(snapshot, plan)
    with Stream(snapshot, plan, loss.needs, config, rank=backend.rank, world_size=backend.world_size) as stream:
        began = time.perf_counter()
        for step, batches in stream.steps(first):
            for batch in batches:
                check_vocabulary(batch, vocabulary)
            begins, ends = step.index % period == 0, (step.index + 1) % period == 0 or step.index + 1 == total
            if begins and not ends:
                backend.keep_proximal()
            sums = _gradient(backend, reference, loss, batches, proximal=not begins)
            rate, scale = learning_rate(step.index, total, peak, config.schedule), backend.loss_scale
            with report_once():
                norm = backend.optim_step(rate)
            if ends:
                backend.drop_proximal()
            alarms = []
            if not math.isfinite(norm) and scale is not None and backend.loss_scale is not None:
                fall = f"the loss scale falls from {scale:.10g} to {backend.loss_scale:.10g}"
                alarms.append(f"skipped: its gradient is not finite in float16; {fall}")
            now = time.perf_counter()
            metrics = _figures(step, sums, norm, scale) | {
                "learning_rate": rate,
                "action_tokens": step.loss_tokens,
                "tokens": step.tokens,
                "micro_batches": len(batches) * backend.world_size,
                "seconds": now - began,
            }
            began = now
            yield StepReport(step, metrics | figures.means(step), alarms)


def _figures(step: OptimizerStep, sums: Mapping[str, float], norm: float, scale: float | None) -> dict[str, float]:
    """Return the metrics of an update from its sums, the norm of its gradient and its loss scale, if they are finite.

    Only a skipped update has a norm that is not finite. Its sums mean nothing where float16 overflowed in the forward
    pass.
    """
    is_skipped, figures = not math.isfinite(norm), {}
    if not is_skipped or all(map(math.isfinite, sums.values())):
        figures = compute_metrics(sums, step.loss_tokens)
        figures["episode_logprob"] = sums["logprob"] / len(step.episodes_E)
    if not is_skipped:
        figures["grad_norm"] = norm
    if scale is not None:
        figures |= {"loss_scale": scale, "skipped_updates": float(is_skipped)}
    return figures


def _gradient(
    backend: PolicyBackend,
    reference: FrozenPolicy | None,
    loss: Loss,
    batches: Sequence[PackedBatch],
    *,
    proximal: bool,
) -> dict[str, float]:
    """Add the gradient of an optimizer step; return the sums behind its metrics over all ranks."""
    sums: defaultdict[str, list[Tensor]] = defaultdict(list)
    filled, statistics = fill_batches(backend, reference, loss, batches, proximal=proximal)
    for batch in filled:
        for name, value in backend.forward_backward(batch, loss, statistics).items():
            sums[name].append(value)
    return backend.ranks.sum_over_ranks({name: math.fsum(map(float, values)) for name, values in sums.items()})


@dataclass(frozen=True, slots=True)
class Update:
    """An update phase after it was done."""

    selection: TrainingSelection
    """The data that were trained on, and those left out."""
    reports: list[StepReport]
    """Reports, one per optimizer step."""
    batches: pl.DataFrame
    """Rows for the table `batches`."""
    metrics: pl.DataFrame
    """Rows for the table `metrics`."""


def describe_update(report: StepReport) -> str:
    """Return a text on the loss of an update."""
    if "loss" not in report.metrics:
        return "skipped, and its loss is not finite"
    went = f"loss {report.metrics['loss']:.4f}"
    if "logprob" in report.metrics:
        went += f", log-probability {report.metrics['logprob']:.3f} per trained token"
    return went


def train_round(
    backend: SingleDevice,
    snapshot: Snapshot,
    source: Credit | None,
    config: TrainConfig,
    *,
    learning_rate: float,
    first_step: int = 0,
    own_encoding: int | None = None,
    reference: FrozenPolicy | None = None,
    on_step: Callable[[StepReport, int], object] | None = None,
) -> Update:
    """Train on the episodes of `config.where`: `config.epochs` passes of `config.minibatches` optimizer steps.

    Args:
        backend: the policy and its optimizer, which keep their state between phases.
        source: credit that gives the advantages; None for losses without.
        config: loss, where, epochs, minibatches. `seed` decides the order of the episodes; each phase needs another.
        learning_rate: peak of `config.schedule` over this phase.
        first_step: number of the first optimizer step in the rows.
        own_encoding: encoding_id of the model's tokens, if the episodes come in several.
        reference: see `run_steps`.
        on_step: called with each report and the number of updates, before the next update.

    Raises:
        DataRefusedError: nothing to train on, or data that cannot support the loss.
    """
    loss = config.loss
    selection = select(
        snapshot,
        config,
        loss.needs,
        source=source,
        own_encoding=None if own_encoding is None else lambda: own_encoding,
    )
    refuse(find_refusals(snapshot, selection.members, loss))
    plan = Plan(selection, config)
    reports = []
    with track("train", len(plan.steps), "updates") as stage:
        for report in run_steps(backend, snapshot, plan, config, peak=learning_rate, reference=reference):
            reports.append(report)
            stage.update(len(reports), note=describe_update(report))
            if on_step is not None:
                on_step(report, len(plan.steps))
    metrics = build_metric_rows([(report.step.index + first_step, report.metrics) for report in reports])
    batches = build_batch_rows(plan, [report.step for report in reports]).with_columns(
        pl.col("optimizer_step") + first_step
    )
    return Update(selection, reports, batches, metrics)
