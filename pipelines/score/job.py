"""The score job: a reward function or a built-in scorer over exactly the episodes that its version has not scored.

Scores are committed as they come, each range as a job of its own, every few seconds: a killed run loses what came after
its last commit, and the next run goes on from there. Two runs at once share nothing but the table: whoever commits
second finds the other's scores in the compare-and-swap of its terminal row, and drops its own of the same episodes.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import polars as pl
from pydantic import BaseModel, ValidationError

from lake.errors import ConflictError, UsageError
from lake.lake import Lake
from lake.read.episodes import KEYS, parts
from lake.read.snapshot import Snapshot
from lake.settings import faults
from lake.write import jobs
from lake.write.claims import Commit, commit_unclaimed
from pipelines.score.functions import ScoreConfig, UserFunction, Work
from pipelines.score.pending import Pending, confirm, find_pending, taken
from pipelines.score.rows import EXAMPLES, SCHEMA, Scored, example
from pipelines.score.scorers import SCORERS, read_inputs
from pipelines.score.scorers.protocol import Scorer
from pipelines.score.source import find_source

_EFFECTIVE = frozenset(("name", "arguments", "commit_seconds", "commit_episodes"))
"""Options of [score] that a built-in scorer heeds."""


class BuiltIn:
    """A scorer of `pipelines.score.scorers`; of the config its name and how often it commits have an effect."""

    is_grouped = False
    printed = ""

    def __init__(self, scorer: Scorer, config: ScoreConfig | None = None) -> None:
        self.scorer = scorer
        config = config or ScoreConfig()
        self.name = config.name or scorer.name
        idle = sorted(config.model_fields_set - _EFFECTIVE)
        self.notes: Sequence[str] = [f"{option} has no effect on a built-in scorer" for option in idle]

    @property
    def version(self) -> str:
        """Hash of its source and options, as 13 characters."""
        return self.scorer.version

    @property
    def parameters(self) -> dict[str, Any]:
        """Its options."""
        return {"builtin": self.scorer.name, "options": self.scorer.model_dump(mode="json", by_alias=True)}

    def is_current(self) -> bool:
        """It is loaded, and stays what it is."""
        return True

    def score(self, snapshot: Snapshot, episodes: pl.DataFrame) -> Iterator[Scored]:
        """Score episodes, a part at a time, in the order of the files; UsageError if an option finds nothing here."""
        self.scorer.check(snapshot)
        for part in parts(episodes):
            rows = self.scorer.scores(read_inputs(snapshot, part, self.scorer.reads()))
            frame = rows.join(part.select(*KEYS), on="episode_id").with_columns(isolation=pl.lit(None, pl.String))
            scored = Scored(episodes=len(part), frames=[frame.select(*SCHEMA)])
            failed = frame.filter(pl.col("error").is_not_null())
            for episode_id, error in failed.select("episode_id", "error").head(EXAMPLES).iter_rows():
                scored.examples.append(example(episode_id, error))
            yield scored


KIND = "score"
_ORDER = (*KEYS, "step_index")
"""Of rows in a file: as the lake's own."""
_COUNTED = ("known", "failed", "unscored", "steps", "known_steps", "overtaken")
_TEXTS = 100
"""Different errors and reasons of a commit that are counted; some functions never say the same twice."""


class ScoreReport(BaseModel, frozen=True):
    """What a score run did."""

    scorer: str
    version: str
    series_id: int
    job_ids: list[int]
    """One per commit."""
    selected: int
    """Episodes that were asked for."""
    present: int
    """Those that had their score already."""
    failed_before: int
    """Those of them with an error, or with a sibling in the same call that has one."""
    scored: int
    """Episodes with new rows."""
    known: int
    """Those of them with a score; with one of a step, where the scorer judges steps alone."""
    failed: int
    """Those of them with an error: no value, or step outputs that match no step."""
    unscored: int
    """Those without a score and without an error: there was nothing to judge."""
    errors: dict[str, int]
    """The most frequent errors of episodes, with their numbers of episodes, most frequent first."""
    reasons: dict[str, int]
    """The most frequent reasons of episodes that are unscored, alike."""
    unmatched: int
    """Step outputs that match no step."""
    steps: int
    """Rows of steps."""
    known_steps: int
    """Those of them with a value."""
    overtaken: int
    """Episodes that another run scored meanwhile, or that were taken out of the lake: their rows were dropped."""
    answers: int
    """Answers of judges that were asked anew."""
    seconds: float
    examples: list[str]
    """The first errors, each with its episode."""
    printed: str
    """The end of what the function printed."""
    made_current: bool
    """Nothing was written, and another version was current: this one is again."""

    @property
    def has_no_values(self) -> bool:
        """Episodes were scored, and neither they nor their steps have a value."""
        return self.scored > 0 and not self.known and not self.known_steps


@dataclass(frozen=True)
class Progress:
    """Where a run stands; what it has scored is committed."""

    done: int
    """Episodes scored so far."""
    total: int
    """Episodes to score."""
    failed: int
    """Those with an error."""
    seconds: float
    """Since the start."""


def scorer_of(target: str | Scorer | Work, config: ScoreConfig) -> Work:
    """What `trajlake score TARGET` runs: `module.py:function`, a built-in scorer's name, or what works as a scorer.

    UsageError if it is neither, with what is valid.
    """
    if isinstance(target, Scorer):
        return BuiltIn(target, config)
    if not isinstance(target, str):
        return target
    if ":" in target or target.endswith(".py"):
        return UserFunction(find_source(target), config)
    if target not in SCORERS:
        msg = f"{target!r} is no scorer; valid: module.py:function, or one of {', '.join(SCORERS)}"
        raise UsageError(msg)
    try:
        return BuiltIn(SCORERS[target](**config.arguments), config)
    except ValidationError as error:
        msg = f"scorer {target}: {faults(error)}. Options: {', '.join(SCORERS[target].model_fields) or 'none'}"
        raise UsageError(msg) from error


def run_score(
    lake: Lake,
    target: str | Scorer | Work,
    *,
    where: str | None = None,
    config: ScoreConfig | None = None,
    retry_failed: bool = False,
    force: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> ScoreReport:
    """Score the selected episodes that this version of the scorer has not scored.

    Args:
        lake: where to read and write.
        target: see `scorer_of`.
        where: SQL predicate over `episodes`; None takes all. A group-wise function gets all siblings of these.
        config: how it is run.
        retry_failed: score again those that have an error, and nothing else.
        force: score all, whether they have a score or not.
        progress: told after every commit, and every `commit_seconds`.

    Raises:
        UsageError: no such scorer or function, wrong options, a bad predicate, a network that is not allowed, or
            `retry_failed` of a version that has scored nothing.
        DataRefusedError: no episode is selected.
        SandboxUnavailableError: this machine cannot isolate the function as asked.
        ConflictError: the function's source changed while it ran, or other processes scored the same episodes again
            and again; run it again.
    """
    if retry_failed and force:
        msg = "retry_failed takes the failed episodes alone, force takes all: give one of them"
        raise UsageError(msg)
    config = config or ScoreConfig()
    work = scorer_of(target, config)
    snapshot = lake.snapshot()
    series = {"scorer": work.name, "version": work.version}
    series_id = jobs.series_id(KIND, series, ())
    pending = find_pending(snapshot, where, series_id, grouped=work.is_grouped, retry_failed=retry_failed, force=force)
    parameters = series | work.parameters | {"where": where}
    if retry_failed and not pending.jobs:
        msg = (
            f"{work.name}@{work.version} has scored nothing yet, so nothing of it has failed; run it without "
            "--retry-failed. Another source or another argument makes a new version"
        )
        raise UsageError(msg)
    run = _Run(lake, snapshot, work, series, series_id, parameters, set(pending.jobs))
    if len(pending.episodes):
        run.score(pending, config, progress)
    # Asked for, and all there: what its user scored last counts, also after an edit that was taken back.
    made_current = not run.job_ids and confirm(
        lake, work.name, series["version"], kind=KIND, series=series, parameters=parameters
    )
    return run.report(pending, made_current=made_current)


@dataclass
class _Run:
    """Scores on their way into the lake."""

    lake: Lake
    snapshot: Snapshot
    work: Work
    series: dict[str, Any]
    series_id: int
    parameters: dict[str, Any]
    jobs: set[int]
    """Jobs whose scores do not count as another run's: those known at the start, and our own."""
    job_ids: list[int] = field(default_factory=list)
    done: int = 0
    unmatched: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    """Of all commits, see `_counts`."""
    errors: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    answers: int = 0
    examples: list[str] = field(default_factory=list)
    waiting: int = 0
    """Episodes that are not committed yet."""
    _parts: list[Scored] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._began

    def score(self, pending: Pending, config: ScoreConfig, progress: Callable[[Progress], None] | None) -> None:
        """Score what is pending, committed by number and by time; interrupted or not, what has been scored stays."""
        committed_at = time.monotonic()
        try:
            for scored in self.work.score(self.snapshot, pending.episodes):
                self.add(scored)
                if self.waiting >= config.commit_episodes or time.monotonic() - committed_at >= config.commit_seconds:
                    self.commit()
                    committed_at = time.monotonic()
                    if progress is not None:
                        progress(Progress(self.done, len(pending.episodes), self.counts["failed"], self.seconds))
        finally:
            self.commit()

    def add(self, scored: Scored) -> None:
        """Take what was scored, which may be nothing."""
        if not scored.episodes:
            return
        self._parts.append(scored)
        self.waiting += scored.episodes
        self.done += scored.episodes
        self.unmatched += scored.unmatched
        self.examples += scored.examples[: EXAMPLES - len(self.examples)]

    def report(self, pending: Pending, *, made_current: bool) -> ScoreReport:
        """What was done."""
        return ScoreReport(
            scorer=self.work.name,
            version=self.series["version"],
            series_id=self.series_id,
            job_ids=self.job_ids,
            selected=pending.selected,
            present=pending.present,
            failed_before=pending.failed,
            scored=self.done - self.counts["overtaken"],
            errors=dict(self.errors.most_common(EXAMPLES)),
            reasons=dict(self.reasons.most_common(EXAMPLES)),
            unmatched=self.unmatched,
            **{name: self.counts[name] for name in _COUNTED},
            answers=self.answers,
            seconds=self.seconds,
            examples=self.examples,
            printed=self.work.printed,
            made_current=made_current,
        )

    def commit(self) -> None:
        """Make what was scored visible, without what another run has scored or someone has taken out meanwhile.

        ConflictError if that happens again and again, or the scorer's source has changed.
        """
        if not self._parts:
            return
        if not self.work.is_current():
            self._parts = []
            msg = (
                f"the source of {self.work.name} changed while it ran: what was not committed is dropped; run it again"
            )
            raise ConflictError(msg)
        scores = pl.concat([part.frame() for part in self._parts]).sort(*_ORDER, nulls_last=False)
        answers = [frame for part in self._parts for frame in part.responses]
        responses = pl.concat(answers) if answers else None
        episode_ids = scores["episode_id"].unique()

        def claimed(now: Snapshot) -> pl.DataFrame:
            return taken(now, self.series_id, episode_ids, frozenset(self.jobs)).to_frame()

        def made(kept: pl.DataFrame, present: pl.Series) -> Commit:
            named = kept.with_columns(scorer=pl.lit(self.work.name), scorer_version=pl.lit(self.series["version"]))
            return Commit({"scores": named} | _kept_responses(responses, present), _counts(kept, len(episode_ids)))

        refusal = f"another run has scored the same episodes with {self.work.name} meanwhile"
        job = {"kind": KIND, "parameters": self.parameters, "series": self.series, "snapshot": self.snapshot}
        kept, job_id = commit_unclaimed(self.lake, scores, claimed=claimed, made=made, refusal=refusal, **job)
        if job_id is not None:
            self.jobs.add(job_id)
            self.job_ids.append(job_id)
        self.counts.update(_counts(kept, len(episode_ids)))
        self.errors.update(_texts(kept, pl.col("error").is_not_null(), "error"))
        self.reasons.update(_texts(kept, pl.col("value").is_null() & pl.col("error").is_null(), "reason"))
        self.answers += sum(part.answers for part in self._parts)
        self._parts = []
        self.waiting = 0


def _kept_responses(responses: pl.DataFrame | None, present: pl.Series) -> dict[str, pl.DataFrame]:
    """Answers of judges; one that told something of an episode that was taken out goes for its siblings, too."""
    if responses is None:
        return {}
    gone = responses.filter(~pl.col("episode_id").is_in(present.implode()))
    return {"responses": responses.join(gone, on="request_id", how="anti")}


def _counts(scores: pl.DataFrame, asked: int) -> dict[str, int]:
    """What was committed. known: episodes with a score (of steps, for a scorer that judges steps alone)."""
    is_whole, is_known = pl.col("step_index").is_null(), pl.col("value").is_not_null()
    whole = scores.filter(is_whole)
    of_steps = scores.join(whole, on="episode_id", how="anti")
    known = pl.concat([rows.filter(is_known)["episode_id"].unique() for rows in (whole, of_steps)])
    failed = scores.filter(pl.col("error").is_not_null())["episode_id"].unique()
    episodes = scores["episode_id"].n_unique()
    return {
        "known": len(known),
        "failed": len(failed),
        "unscored": episodes - pl.concat([known, failed]).n_unique(),
        "steps": scores["step_index"].count(),
        "known_steps": scores.filter(~is_whole & is_known).height,
        "overtaken": asked - episodes,
        "rows_in": episodes,
        "rows_out": len(scores),
    }


def _texts(scores: pl.DataFrame, test: pl.Expr, column: str) -> dict[str, int]:
    """The most frequent texts of whole episodes that a test marks, with their numbers."""
    whole = scores.filter(pl.col("step_index").is_null() & test).drop_nulls(column)
    counted = whole.group_by(column, maintain_order=True).len().sort("len", descending=True, maintain_order=True)
    return dict(counted.head(_TEXTS).iter_rows())
