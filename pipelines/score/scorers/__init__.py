"""Built-in scorers: one small file each, formula and source in the docstring; `SCORERS` lists them by name."""

import polars as pl

from lake.read.parquet import collected
from lake.read.snapshot import Snapshot
from lake.tables import TABLES
from lake.tables.columns import Type
from lake.write.rows import inlined
from pipelines.score.scorers.answer_quality import AnswerQuality
from pipelines.score.scorers.coordination import Coordination, Voting
from pipelines.score.scorers.env_return import EnvReturn
from pipelines.score.scorers.format_validity import FormatValidity
from pipelines.score.scorers.kl_in_reward import KlInReward
from pipelines.score.scorers.length import Length
from pipelines.score.scorers.matching import ExactMatch, FuzzyMatch
from pipelines.score.scorers.protocol import Columns, Scorer, ScorerInputs
from pipelines.score.scorers.restart import Restart
from pipelines.score.scorers.rubric_terms import RubricTerms
from pipelines.score.scorers.tool_success import ToolSuccess


def read_inputs(snapshot: Snapshot, episodes: pl.Series | pl.DataFrame, columns: Columns) -> ScorerInputs:
    """All rows of some episodes with the columns that a scorer reads, big payloads put back.

    Memory grows with the episodes given: pass them in batches, as ids (int64 [E]), or as rows with episode_id, run_id
    and group_id. Files are sorted by run and group, so with these all others are skipped if a batch holds neighbours.
    LakeAccessError if a file of the lake is missing or damaged.
    """
    frame = episodes.to_frame("episode_id") if isinstance(episodes, pl.Series) else episodes
    wanted = pl.col("episode_id").is_in(frame.get_column("episode_id").unique().sort().implode())
    if "run_id" in frame.columns and frame.height:
        wanted &= pl.col("run_id").is_in(frame.get_column("run_id").unique().to_list())
    if "group_id" in frame.columns and frame.height:
        groups = frame.get_column("group_id")
        wanted &= pl.col("group_id").is_between(groups.min(), groups.max())
    frames = {}
    for name, names in columns.tables().items():
        rows = collected(snapshot.scan(name).filter(wanted).select(names))
        texts = [column.name for column in TABLES[name].columns if column.type is Type.JSON and column.name in names]
        frames[name] = inlined(snapshot, rows, texts) if texts and name in ("episodes", "steps") else rows
    return ScorerInputs(**frames)


SCORERS: dict[str, type[Scorer]] = {
    scorer.name: scorer
    for scorer in (
        EnvReturn,
        ExactMatch,
        FuzzyMatch,
        ToolSuccess,
        AnswerQuality,
        Coordination,
        Voting,
        Restart,
        RubricTerms,
        FormatValidity,
        Length,
        KlInReward,
    )
}
"""Scorer classes by name."""
