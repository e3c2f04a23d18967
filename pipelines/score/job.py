"""The score job: a reward function or a built-in scorer over exactly the episodes that its version has not scored.

Scores are committed as they come, every few seconds as a job of its own: a killed run loses what came after its last
commit, and the next run goes on from there. On other executors each such job is a round of parts: see `rounds`. Two
runs at once share nothing but the table: whoever commits second finds the other's scores in the compare-and-swap of its
terminal row, and drops its own of the same episodes.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import polars as pl
from pydantic import BaseModel, ValidationError

from lake.errors import UsageError
from lake.execution.executor import Executor
from lake.lake import Lake
from lake.read.episodes import KEYS, parts
from lake.read.snapshot import Snapshot
from lake.settings import faults
from lake.write import jobs
from pipelines.score.functions import ScoreConfig, UserFunction
from pipelines.score.pending import Pending, confirm, find_pending
from pipelines.score.rounds import score_in_rounds
from pipelines.score.rows import EXAMPLES, SCHEMA, Scored, example
from pipelines.score.run import KIND, Progress, ScoreRun
from pipelines.score.scorers import SCORERS, read_inputs
from pipelines.score.scorers.protocol import Scorer
from pipelines.score.source import find_source
from pipelines.score.work import Share, Work

_EFFECTIVE = frozenset(("name", "arguments", "commit_seconds", "commit_episodes"))
"""Options of [score] that a built-in scorer heeds."""


class BuiltIn:
    """A scorer of `pipelines.score.scorers`; of the config its name and how often it commits have an effect."""

    is_grouped = is_batched = False
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

    asked = None

    def check(self, snapshot: Snapshot) -> None:
        """UsageError if an option finds nothing here."""
        self.scorer.check(snapshot)

    def score(self, snapshot: Snapshot, episodes: pl.DataFrame, share: Share | None = None) -> Iterator[Scored]:
        """Score episodes, a part at a time, in the order of the files."""
        for part in parts(episodes):
            rows = self.scorer.scores(read_inputs(snapshot, part, self.scorer.reads()))
            frame = rows.join(part.select(*KEYS), on="episode_id").with_columns(isolation=pl.lit(None, pl.String))
            scored = Scored(episodes=len(part), frames=[frame.select(*SCHEMA)])
            failed = frame.filter(pl.col("error").is_not_null())
            for episode_id, error in failed.select("episode_id", "error").head(EXAMPLES).iter_rows():
                scored.examples.append(example(episode_id, error))
            yield scored


_COUNTED = ("known", "failed", "unscored", "steps", "known_steps", "overtaken")


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
    executor: Executor | None = None,
    progress: Callable[[Progress], None] | None = None,
    notice: Callable[[str], None] = lambda _: None,
) -> ScoreReport:
    """Score the selected episodes that this version of the scorer has not scored.

    Args:
        lake: where to read and write.
        target: see `scorer_of`.
        where: SQL predicate over `episodes`; None takes all. A group-wise function gets all siblings of these.
        config: how it is run.
        retry_failed: score again those that have an error, and nothing else.
        force: score all, whether they have a score or not.
        executor: where it runs; this process unless given, with `limits.workers` processes for the function.
        progress: told after every commit, and every `commit_seconds`.
        notice: told of a node that gets no part, because isolation there is weaker than `min_level`.

    Raises:
        UsageError: no such scorer or function, wrong options, a bad predicate, a network that is not allowed, or
            `retry_failed` of a version that has scored nothing.
        DataRefusedError: no episode is selected.
        SandboxUnavailableError: this machine, or no node of the cluster, can isolate the function as asked.
        WorkerLostError: worker processes died again and again; what was committed before stays.
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
    run = ScoreRun(lake, snapshot, work, series, series_id, parameters, set(pending.jobs))
    if len(pending.episodes):
        work.check(snapshot)
        if executor is None or executor.is_here:
            run.score(pending, config, progress)
        else:
            score_in_rounds(run, pending, config, executor, progress=progress, notice=notice)
    # Asked for, and all there: what its user scored last counts, also after an edit that was taken back.
    made_current = not run.job_ids and confirm(
        lake, work.name, series["version"], kind=KIND, series=series, parameters=parameters
    )
    return _report(run, pending, made_current=made_current)


def _report(run: ScoreRun, pending: Pending, *, made_current: bool) -> ScoreReport:
    found = run.figures
    return ScoreReport(
        scorer=run.work.name,
        version=run.series["version"],
        series_id=run.series_id,
        job_ids=run.job_ids,
        selected=pending.selected,
        present=pending.present,
        failed_before=pending.failed,
        scored=run.done - found.counts["overtaken"],
        errors=dict(found.errors.most_common(EXAMPLES)),
        reasons=dict(found.reasons.most_common(EXAMPLES)),
        unmatched=found.unmatched,
        **{name: found.counts[name] for name in _COUNTED},
        answers=found.answers,
        seconds=run.seconds,
        examples=found.examples,
        printed=run.printed or run.work.printed,
        made_current=made_current,
    )
