"""Built-in scorers, with formula and source in each class's docstring; `SCORERS` lists them by name."""

import polars as pl

from lake.read.parquet import collect_rows
from lake.read.snapshot import Snapshot
from lake.tables import TABLES
from lake.tables.columns import Type
from lake.write.rows import inline_blobs
from pipelines.score.scorers.answers import AnswerQuality, ExactMatch, FuzzyMatch, RubricTerms
from pipelines.score.scorers.coordination import Coordination, Restart, Voting
from pipelines.score.scorers.forms import FormatValidity, LengthPenalty
from pipelines.score.scorers.protocol import Scorer, ScorerColumns, ScorerInputs
from pipelines.score.scorers.step_rewards import EnvReturn, KlInReward
from pipelines.score.scorers.tool_success import ToolSuccess


def read_inputs(snapshot: Snapshot, episodes: pl.Series | pl.DataFrame, columns: ScorerColumns) -> ScorerInputs:
    """Return all rows of some episodes with the columns that a scorer reads, including externally stored payloads.

    Memory grows with the number of episodes: pass them in batches, as ids (int64 [E]), or as rows with episode_id,
    run_id and group_id. Files are sorted by run and group, so rows of neighbours let the scan skip other files.
    LakeAccessError if a file of the lake is missing or damaged.
    """
    frame = episodes.to_frame("episode_id") if isinstance(episodes, pl.Series) else episodes
    condition = pl.col("episode_id").is_in(frame.get_column("episode_id").unique().sort().implode())
    if "run_id" in frame.columns and frame.height:
        condition &= pl.col("run_id").is_in(frame.get_column("run_id").unique().to_list())
    if "group_id" in frame.columns and frame.height:
        groups = frame.get_column("group_id")
        condition &= pl.col("group_id").is_between(groups.min(), groups.max())
    frames = {}
    for name, names in columns.tables().items():
        rows = collect_rows(snapshot.scan(name).filter(condition).select(names))
        texts = [column.name for column in TABLES[name].columns if column.type is Type.JSON and column.name in names]
        frames[name] = inline_blobs(snapshot, rows, texts) if texts and name in ("episodes", "steps") else rows
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
        LengthPenalty,
        KlInReward,
    )
}
"""Scorer classes by name."""
