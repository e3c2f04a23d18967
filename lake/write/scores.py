"""Scores that nobody computes here: those that came with their episodes, and those that arrive after them.

They are judgements like those of our own scorers, in the same table, under the scorer's name and a version that says
where they come from: `recorded` (their episode's source had them) or `imported` (a file of them came later). The table
is append-only and the newest job of an episode counts as a whole, so what an episode had from the scorer before is
written again beside what is new; a score that is there already is not written twice.
"""

from typing import TYPE_CHECKING

import msgspec
import polars as pl

from lake.read.snapshot import Snapshot
from lake.write.claims import Commit, commit_unclaimed
from lake.write.rows import SCORE_COLUMNS
from lake.write.secret_columns import without_keys_in

if TYPE_CHECKING:
    from lake.lake import Lake

RECORDED = "recorded"
IMPORTED = "imported"
KIND = "score"
_TOLD = ("value", "reason", "error", "metrics")


class Added(msgspec.Struct):
    """What became of scores."""

    new: int = 0
    present: int = 0


def add_scores(lake: "Lake", rows: pl.DataFrame, *, version: str, source: str) -> Added:
    """Write scores of episodes that the lake holds, each once; rows of others are left out.

    Args:
        rows: columns of `ScoreRows`. Of several rows of an episode or step and scorer the last counts.
        version: of all these scorers.
        source: where they come from, for the job's row.

    Raises:
        ConflictError: other processes scored the same episodes again and again.
    """
    if rows.is_empty():
        return Added()
    rows = without_keys_in("scores", rows)  # they are compared with what is stored
    episode_ids = rows["episode_id"].unique()
    snapshot = lake.snapshot()
    before = _told(snapshot, episode_ids, version)
    last = _key(rows).unique("key", keep="last", maintain_order=True)
    # An export has imported scores beside their episodes: they come back as what they were.
    known = pl.concat([before, _told(snapshot, episode_ids, IMPORTED)]) if version == RECORDED else before
    fresh = last.join(_key(known), on=["key", *_TOLD], how="anti", nulls_equal=True)
    present = rows.height - fresh.height
    if fresh.is_empty():
        return Added(present=present)
    # The newest job of an episode and scorer counts as a whole: what stays as it was is written with what is new.
    touched = fresh.select("episode_id", "scorer").unique()
    kept = _key(before).join(touched, on=["episode_id", "scorer"], how="semi").join(fresh, on="key", how="anti")
    whole = pl.concat([fresh, kept.select(fresh.columns)])
    names = lake.snapshot().scan("episodes").filter(pl.col("episode_id").is_in(episode_ids.implode()))
    named = whole.join(names.select("episode_id", "group_id", "run_id").collect(), on="episode_id").drop("key")
    scorers = sorted(named["scorer"].unique())

    def claimed(now: Snapshot) -> pl.DataFrame:
        """What others have said meanwhile of the same."""
        said = _key(_told(now, episode_ids, version)).join(
            _key(before), on=["key", *_TOLD], how="anti", nulls_equal=True
        )
        return said.select("episode_id", "scorer").unique()

    def made(left: pl.DataFrame, _: pl.Series) -> Commit:
        rows = left.sort("run_id", "group_id", "episode_id", "step_index", nulls_last=False)
        return Commit(
            {"scores": rows.with_columns(scorer_version=pl.lit(version), isolation=pl.lit(None, pl.String))},
            {"rows_in": left["episode_id"].n_unique(), "rows_out": left.height},
        )

    committed = commit_unclaimed(
        lake,
        named,
        claimed=claimed,
        made=made,
        refusal=f"another process has written scores of the same episodes ({', '.join(scorers[:3])}) meanwhile",
        kind=KIND,
        series={"scores": version},
        parameters={"scorers": scorers, "version": version, "source": source},
    )
    written = committed.kept.select("episode_id", "scorer").unique()
    new = fresh.join(written, on=["episode_id", "scorer"], how="semi").height
    # What another process said of the same comes first; ours is put beside it.
    overtaken = fresh.join(written, on=["episode_id", "scorer"], how="anti").select(*SCORE_COLUMNS)
    here = overtaken.join(names.select("episode_id").collect(), on="episode_id", how="semi")
    more = add_scores(lake, here, version=version, source=source)
    return Added(new=new + more.new, present=present + more.present)


def _told(snapshot: Snapshot, episode_ids: pl.Series, version: str) -> pl.DataFrame:
    """The scores of some episodes under a version that count."""
    query = f"""
        SELECT {", ".join(SCORE_COLUMNS)} FROM latest_scores
        WHERE scorer_version = $version AND episode_id IN (SELECT unnest($ids))
        """
    found = snapshot.sql(query, {"version": version, "ids": episode_ids.to_list()})
    return found.cast(dict(SCORE_COLUMNS.items()))


def _key(rows: pl.DataFrame) -> pl.DataFrame:
    """With `key`: the episode, the step (-1 for the whole) and the scorer as one value."""
    step = pl.col("step_index").cast(pl.Int64).fill_null(-1)
    return rows.with_columns(key=pl.struct(pl.col("episode_id"), step.alias("step"), pl.col("scorer")))
