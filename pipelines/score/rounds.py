"""Scoring on an executor: rounds of parts, each round a job.

A round hands out parts (whole groups) until its time is up, `commit_seconds`, and so does each part with its calls:
what it has not scored by then is left for the next round. Parts write their rows; the round's terminal row accepts all
of them at once. So a killed driver loses one round, and a killed worker its part, which runs again.

Isolation is tried on every node before anything runs. A node that cannot give `min_level` gets no part; the others
score each at its own level, and the weakest of them is what the scores say.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from lake.errors import SandboxUnavailableError
from lake.execution.executor import Executor
from lake.read.episodes import EPISODES_A_PART, parts
from lake.read.snapshot import Snapshot
from lake.write.parted import run_parts, until
from lake.write.parts import JobPart, Written
from pipelines.score.figures import Figures
from pipelines.score.functions import ScoreConfig
from pipelines.score.pending import Pending
from pipelines.score.rows import Scored
from pipelines.score.run import ORDER, Progress, ScoreRun, named
from pipelines.score.sandbox.contract import Level
from pipelines.score.sandbox.levels import level_here, weaker
from pipelines.score.work import Share, Work

_PARTS_A_WORKER = 4
"""Of a run that is small: so many that workers end at about the same time."""


@dataclass(frozen=True, slots=True)
class Task:
    """What the parts of a round share."""

    work: Work
    series: Mapping[str, Any]
    seconds: float
    """After which a part begins no more calls."""
    level: Level | None
    snapshot: Snapshot
    part: JobPart


@dataclass(frozen=True, slots=True)
class ScoredPart:
    """What a part wrote and found."""

    written: tuple[Written, ...]
    done: pl.Series
    """episode_id of those that were scored."""
    left: pl.DataFrame
    """Rows of the part that were not: its time was up."""
    figures: Figures
    printed: str


def score_part(item: tuple[Task, pl.DataFrame]) -> ScoredPart:
    """Score the episodes of a part in a worker process, and write the rows."""
    task, episodes = item
    share = Share(time.monotonic() + task.seconds, task.level)
    found = [scored for scored in task.work.score(task.snapshot, episodes, share) if scored.episodes]
    figures = Figures()
    for scored in found:
        figures.take(scored)
    scores = pl.concat([scored.frame() for scored in (Scored(), *found)]).sort(*ORDER, nulls_last=False)
    answers = [frame for scored in found for frame in scored.responses]
    done = scores["episode_id"].unique()
    figures.commit(scores, len(done), sum(scored.answers for scored in found))
    written = [task.part.write("scores", named(scores, task.series))]
    written += [task.part.write("responses", pl.concat(answers))] if answers else []
    left = episodes.filter(~pl.col("episode_id").is_in(done.implode())) if share.stopped else episodes.clear()
    return ScoredPart(tuple(one for one in written if one is not None), done, left, figures, task.work.printed)


def score_in_rounds(
    run: ScoreRun,
    pending: Pending,
    config: ScoreConfig,
    executor: Executor,
    *,
    progress: Callable[[Progress], None] | None,
    notice: Callable[[str], None],
) -> None:
    """Score what is pending, round after round.

    Raises:
        SandboxUnavailableError: no node can isolate the function as asked.
        WorkerLostError: worker processes died again and again.
        ConflictError: see `ScoreRun`.
    """
    level, without = _tried(run.work, executor, notice)
    todo = deque(_parts(run.work, pending.episodes, executor))
    seconds = config.commit_seconds

    def handed(part: JobPart) -> Iterator[tuple[Task, pl.DataFrame]]:
        task = Task(run.work, run.series, seconds, level, run.snapshot, part)
        yield from ((task, episodes) for episodes in until(seconds, todo))

    while todo:
        _round(run, handed, todo, executor, without)
        if progress is not None:
            progress(run.progress(pending))


def _round(
    run: ScoreRun,
    handed: Callable[[JobPart], Iterator[tuple[Task, pl.DataFrame]]],
    todo: deque[pl.DataFrame],
    executor: Executor,
    without: set[str],
) -> None:
    """One round: a job that all its parts are accepted with. What they leave goes back to `todo`."""

    def told(result: ScoredPart) -> None:
        run.done += len(result.done)
        run.printed = result.printed or run.printed
        if len(result.left):
            todo.append(result.left)

    def asked(results: list[ScoredPart]) -> pl.DataFrame:
        return pl.concat([result.done for result in results]).to_frame()

    parted = run_parts(
        run.lake,
        executor,
        score_part,
        handed,
        claimed=lambda now, keys: run.claimed(now, keys["episode_id"]),
        keys=asked,
        counts=_counts,
        check=run.require_current,
        told=told,
        refusal=run.refusal,
        without=without,
        **run.of_job,
    )
    is_committed = parted.job_id is not None
    for result in parted.results:
        run.figures.merge(result.figures, is_committed=is_committed)
    run.own(parted.job_id)
    if not is_committed:
        rows = parted.left.get("scores")
        answers = sum(result.figures.answers for result in parted.results)
        if rows is not None:
            run.commit_rows(rows, parted.left.get("responses"), answers)


def _counts(results: list[ScoredPart]) -> Counter[str]:
    """Of a round; what there is none of is said, too."""
    found = Counter[str]()
    for result in results:
        found.update(result.figures.counts)
    return found


def _parts(work: Work, episodes: pl.DataFrame, executor: Executor) -> Iterator[pl.DataFrame]:
    """Whole groups. What a batch-wise function judges together is the same wherever it runs, so its parts are, too."""
    if work.is_batched:
        return parts(episodes)
    few = -(-len(episodes) // (_PARTS_A_WORKER * executor.workers))
    return parts(episodes, most=min(EPISODES_A_PART, few))


def _tried(work: Work, executor: Executor, notice: Callable[[str], None]) -> tuple[Level | None, set[str]]:
    """The weakest isolation of the nodes that may run the function, and the ids of those that may not."""
    if work.asked is None:
        return None, set()
    tried = executor.on_nodes(level_here, work.asked)
    refused = [node for node in tried if node.result[0] is None]
    why = [f"node {node.name} gets no part: {node.result[1]}" for node in refused]
    if len(refused) == len(tried):
        raise SandboxUnavailableError("; ".join(why))
    for line in why:
        notice(line)
    level: Level | None = None
    for node in tried:
        level = weaker(node.result[0], level) if node.result[0] is not None else level
    return level, {node.node_id for node in refused}
