"""The rescore job: a checkpoint's log-probabilities of stored actions, each asked for exactly once.

What was scored is committed every few seconds, each commit a job of its own: a killed run loses what came after its
last commit, and the next one goes on from there. A series is one set of weights and one version of the code, so
two checkpoints are comparable where their series come from the same code. Two runs at once share nothing but the table:
whoever commits second finds the other's rows, and drops its own of the same actions.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import polars as pl

from lake.errors import UsageError
from lake.execution.executor import Executor
from lake.lake import Lake
from lake.read.parquet import collected
from lake.read.snapshot import Snapshot
from lake.settings import validated
from lake.write import jobs
from lake.write.claims import Commit, commit_unclaimed
from lake.write.parted import run_parts, until
from lake.write.parts import JobPart
from trainer.backends.base import tensor_digest
from trainer.config import TrainConfig
from trainer.data.plan.preparation import prepare
from trainer.data.select.selection import Selection
from trainer.evaluation.checkpoints import Place, find_checkpoint, open_policy
from trainer.evaluation.ratios import KEYS, KIND, STORED, names_of, ratio_rows
from trainer.evaluation.rescore_parts import Task, rescore_part
from trainer.evaluation.scoring import chunks, pending, score

if TYPE_CHECKING:
    from trainer.policy.model import Policy

COMMIT_SECONDS = 30.0
"""Between commits."""
EPISODES_A_STEP = 32
"""Episodes that are laid out together."""


@dataclass(frozen=True, slots=True)
class RescoreReport:
    """What a run did."""

    checkpoint: str
    """Its name in `ratios`."""
    weights_sha256: str
    series_id: int
    job_ids: list[int]
    """One per commit."""
    scored: int
    """Actions with new rows."""
    present: int
    """Actions that had theirs."""
    overtaken: int
    """Actions that another run scored meanwhile, or that were taken out of the lake."""
    drops: dict[str, int]
    """Steps that cannot be scored, by reason (`trainer.data.select.refusals.Drop`)."""
    tokens: int
    """Tokens of the new rows' actions."""
    seconds: float
    notes: list[str]
    """What a user should know."""


def rescore(
    lk: Lake,
    checkpoint: str,
    *,
    name: str | None = None,
    options: dict[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
    commit_seconds: float = COMMIT_SECONDS,
    executor: Executor | None = None,
) -> RescoreReport:
    """Score the selected actions that a checkpoint has not scored.

    Args:
        checkpoint: see `trainer.evaluation.checkpoints`.
        name: of the checkpoint in `ratios`; None names it after its folder or run.
        options: fields of TrainConfig: where, selection, tokens, token_budget, max_length, device, ...
        progress: told actions done and actions to do.
        executor: where it runs; this process unless given. Each worker process loads the checkpoint, once.

    Raises:
        UsageError: no such checkpoint, a bad predicate, or a name that other weights have.
        CheckpointError: the checkpoint is damaged or gone.
        DataRefusedError: nothing can be scored.
        ConflictError: other processes scored the same actions again and again.
        WorkerLostError: worker processes died again and again; what was committed before stays.
    """
    began = time.monotonic()
    place = find_checkpoint(lk.snapshot(), checkpoint)
    options = dict(options or {})
    policy, tokenizer_of = open_policy(place, options.get("device", "cpu"))
    digest = tensor_digest(policy.state())
    name, said = _named(lk.snapshot(), name or place.name, digest)
    fixed = {"model": tokenizer_of, "loss": "sft", "live_only": False, "episodes_per_step": EPISODES_A_STEP}
    config = validated(TrainConfig, options | fixed)
    prepared = prepare(lk, config)
    run = _Run(lk, prepared.snapshot, place, policy, name, digest, checkpoint, config)
    selection = pending(prepared.selection, run.done(prepared.snapshot))
    total = int(selection.members["trained"].sum())
    with lk.lease(prepared.snapshot, f"rescore {name}"):
        if executor is None or executor.is_here:
            scored = (rows for chunk in chunks(selection) for rows in score(policy, prepared.snapshot, chunk, config))
            steps = run.commit_all(scored, commit_seconds)
        else:
            steps = run.commit_parts(deque(chunks(selection)), executor, commit_seconds)
        for seen in steps:
            if progress is not None:
                progress(seen, total)
    judged = int(prepared.selection.members["trained"].sum())
    return RescoreReport(
        checkpoint=name,
        weights_sha256=digest,
        series_id=run.series_id,
        job_ids=run.job_ids,
        scored=run.scored,
        present=judged - total,
        overtaken=run.seen - run.scored,
        drops={row["reason"]: row["steps"] for row in prepared.selection.drops.iter_rows(named=True)},
        tokens=run.tokens,
        seconds=time.monotonic() - began,
        notes=[*said, *prepared.notes],
    )


_DECIDING = (
    "policy.attention",
    "policy.lora",
    "policy.model",
    "policy.model_files",
    "data.select.selection",
    "data.select.sequences",
    "data.select.token_rows",
    "data.stream.collate",
    "data.stream.stream",
    "evaluation.scoring",
    "evaluation.ratios",
)
"""Modules below `trainer` that decide a log-probability: the model's arithmetic, and what a token's context is."""


def _code() -> list[ModuleType]:
    """The modules whose source decides a log-probability."""
    return [import_module(f"trainer.{name}") for name in _DECIDING]


def _named(snapshot: Snapshot, name: str, digest: str) -> tuple[str, list[str]]:
    """The name of some weights in `ratios`: the one they have there, else the one they are given; and a note.

    A UsageError where the name stands for other weights, or for the recorded log-probabilities.
    """
    if name == STORED:
        msg = f"{STORED!r} means the recorded log-probabilities (`trajlake ope`); give the checkpoint another --name"
        raise UsageError(msg)
    known = names_of(snapshot)
    others = known.filter((pl.col("checkpoint") == name) & (pl.col("weights_sha256") != digest))
    if others.height:
        raise UsageError(
            f"{name!r} names other weights in `ratios` (sha256 {others['weights_sha256'][0][:12]}..., these are "
            f"{digest[:12]}...); give these another --name"
        )
    mine = known.filter(pl.col("weights_sha256") == digest)["checkpoint"].to_list()
    if not mine or mine[0] == name:
        return name, []
    return mine[0], [f"these weights are in `ratios` as {mine[0]!r} already: {name!r} is not taken"]


@dataclass
class _Run:
    """Rows on their way into the lake."""

    lk: Lake
    snapshot: Snapshot
    place: Place
    policy: "Policy"
    name: str
    digest: str
    spelled: str
    config: TrainConfig
    job_ids: list[int] = field(default_factory=list)
    seen: int = 0
    scored: int = 0
    tokens: int = 0
    _waiting: list[pl.DataFrame] = field(default_factory=list)

    @property
    def _series(self) -> dict[str, Any]:
        return {"weights_sha256": self.digest, "dtype": "float32"}

    @cached_property
    def series_id(self) -> int:
        """Of all jobs that score with these weights and this code."""
        return jobs.series_id(KIND, self._series, _code())

    def done(self, snapshot: Snapshot) -> pl.DataFrame:
        """`KEYS` of what the series has scored."""
        return collected(snapshot.scan("ratios").filter(pl.col("series_id") == self.series_id).select(KEYS))

    def commit_all(self, scored: Iterable[pl.DataFrame], seconds: float) -> Iterator[int]:
        """Commit scored actions as they come, after so many seconds at most; yields the number seen so far."""
        committed = time.monotonic()
        for rows in scored:
            self._waiting.append(rows)
            self.seen += rows.height
            if time.monotonic() - committed >= seconds:
                self.commit()
                committed = time.monotonic()
            yield self.seen
        self.commit()

    def commit_parts(self, todo: deque[Selection], executor: Executor, seconds: float) -> Iterator[int]:
        """Score chunks on an executor, in rounds that are a job each; yields the number seen so far."""

        def handed(part: JobPart) -> Iterator[tuple[Task, Selection]]:
            task = Task(self.place, self.digest, self.name, self.config, self.snapshot, part)
            for chunk in until(seconds, todo):
                given.append(chunk.members.filter("trained").select(KEYS))
                yield task, chunk

        while todo:
            given: list[pl.DataFrame] = []
            parted = run_parts(
                self.lk,
                executor,
                rescore_part,
                handed,
                claimed=lambda now, _: self.done(now),
                keys=partial(_keys_of, given),
                counts=lambda results: _counts(
                    sum(result.rows for result in results), sum(result.tokens for result in results)
                ),
                refusal=self._refusal,
                **self._of_job,
            )
            rows = sum(result.rows for result in parted.results)
            self.seen += rows
            if parted.job_id is not None:
                self.scored += rows
                self.tokens += sum(result.tokens for result in parted.results)
                self.job_ids.append(parted.job_id)
            elif "ratios" in parted.left:
                self._commit_rows(parted.left["ratios"])
            yield self.seen

    def commit(self) -> None:
        """Make what waits visible; see `_commit_rows`."""
        if self._waiting:
            rows = ratio_rows(self.snapshot, pl.concat(self._waiting), self.name, self.place.policy_version)
            self._waiting = []
            self._commit_rows(rows)

    @property
    def _refusal(self) -> str:
        return f"another run has scored the same actions with {self.name} meanwhile"

    @property
    def _of_job(self) -> dict[str, Any]:
        parameters = self._series | {
            "checkpoint": self.name,
            "spelled": self.spelled,
            "path": str(self.place.path),
            "config": self.config.model_dump(mode="json"),
        }
        of_series = {"series": self._series, "code": _code()}
        return {"kind": KIND, "parameters": parameters, "snapshot": self.snapshot} | of_series

    def _commit_rows(self, rows: pl.DataFrame) -> None:
        """Make rows visible, without what another run has scored or someone has taken out meanwhile.

        A ConflictError if that happens again and again.
        """
        kept, job_id = commit_unclaimed(
            self.lk, rows, claimed=self.done, made=_written, refusal=self._refusal, **self._of_job
        )
        self.scored += kept.height
        self.tokens += int(kept["n_action"].sum())
        if job_id is not None:
            self.job_ids.append(job_id)


def _written(rows: pl.DataFrame, _: pl.Series) -> Commit:
    return Commit({"ratios": rows}, _counts(rows.height, int(rows["n_action"].sum())))


def _keys_of(given: list[pl.DataFrame], _: object) -> pl.DataFrame:
    return pl.concat(given)


def _counts(rows: int, tokens: int) -> dict[str, int]:
    return {"rows_in": rows, "rows_out": rows, "tokens": tokens}
