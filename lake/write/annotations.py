"""Annotations: what people say of episodes and steps, and the scores that follow from their numbers.

An annotation is a label with a number, words or both, by an author, of an episode or of one of its steps. They are only
ever added: of one author, place and label the last counts (view `latest_annotations`), and one with neither number nor
words takes the label back.

Numbers are scores, too, so that credit and selections can go by what people say: the label `rating` is the scorer
`human`, any other label L the scorer `human.L`; the score of an episode or step is the mean over its authors, and NULL
once all have taken theirs back. Like other scores that are given and not computed they have the version `imported`.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import polars as pl

from lake import ids
from lake.errors import UsageError
from lake.read.snapshot import Snapshot
from lake.records import printable
from lake.write.rows import SCORE_COLUMNS
from lake.write.scores import IMPORTED, add_scores

if TYPE_CHECKING:
    from lake.lake import Lake

RATING = "rating"
HUMAN = "human"
KIND = "annotate"
LONGEST = 200
"""Characters of a label or an author."""
_PLACE = ["episode_id", "step_index", "label"]


class Annotation(msgspec.Struct, frozen=True, kw_only=True):
    """What is said."""

    episode_id: int
    label: str = RATING
    step_index: int | None = None
    """None: the whole episode."""
    value: float | None = None
    text: str | None = None
    """None in both: the author takes the label back."""


def annotate(lake: "Lake", said: Sequence[Annotation], author: str) -> int:
    """Write annotations of one author, and the scores that follow; how many annotations.

    Raises:
        UsageError: no such episode or step, no label or author, or an infinite number; nothing is written.
    """
    author = _name(author, "an author")
    labels = [_name(one.label, "a label") for one in said]
    snapshot = lake.snapshot()
    places = _places(snapshot, said)
    rows = places.with_columns(
        label=pl.Series(labels, dtype=pl.String),
        value=pl.Series([one.value for one in said], dtype=pl.Float64),
        text=pl.Series([None if one.text is None else printable(one.text) for one in said], dtype=pl.String),
        author=pl.lit(author),
        annotation_id=pl.Series([ids.fresh_id() for _ in said], dtype=pl.Int64),
    )
    rows = rows.unique(_PLACE, keep="last", maintain_order=True)
    with lake.job(kind=KIND, parameters={"author": author, "labels": sorted(set(labels))}) as job:
        job.write("annotations", rows.with_columns(at=pl.lit(job.now())))
        job.counts |= {"rows_in": len(said), "rows_out": rows.height}
    _score(lake, rows)
    return rows.height


def _name(text: str, what: str) -> str:
    name = printable(text.strip())
    if not name or len(name) > LONGEST or "@" in name or not name.isprintable():
        raise UsageError(
            f"{text!r} is no name of {what}; valid: 1 to {LONGEST} printable characters without @, on one line"
        )
    return name


def _places(snapshot: Snapshot, said: Sequence[Annotation]) -> pl.DataFrame:
    """Episode, group, run and step of each annotation, in order."""
    wanted = pl.DataFrame(
        [(one.episode_id, one.step_index) for one in said],
        schema={"episode_id": pl.Int64, "step_index": pl.Int32},
        orient="row",
    )
    known = snapshot.scan("episodes").filter(pl.col("episode_id").is_in(wanted["episode_id"].implode()))
    columns = ["episode_id", "group_id", "run_id", "num_steps"]
    found = wanted.join(known.select(columns).collect(), on="episode_id", how="left", maintain_order="left")
    for one, steps in zip(said, found["num_steps"], strict=True):
        name = ids.to_text(one.episode_id)
        if steps is None:
            raise UsageError(f"the lake holds no episode {name} that readers see; nothing was written")
        if one.step_index is not None and not 0 <= one.step_index < steps:
            raise UsageError(f"episode {name} has {steps} steps, counted from 0, and no step {one.step_index}")
        if one.value is not None and not math.isfinite(one.value):
            raise UsageError(f"{one.value} is no number that can be averaged; give a finite one")
    return found.drop("num_steps")


def _score(lake: "Lake", rows: pl.DataFrame) -> None:
    """Write the scores of the places that were annotated, from what all authors say of them now."""
    snapshot = lake.snapshot()
    wanted = rows.select(_PLACE).unique()
    of_these = {"ids": wanted["episode_id"].unique().to_list()}
    told = snapshot.sql(
        "SELECT episode_id, step_index, label, value FROM latest_annotations "
        "WHERE value IS NOT NULL AND episode_id IN (SELECT unnest($ids))",
        of_these,
    )
    means = (
        wanted.join(told, on=_PLACE, how="left", nulls_equal=True)
        .group_by(_PLACE)
        .agg(value=pl.col("value").mean(), authors=pl.col("value").count())
    )
    scored = snapshot.sql(
        "SELECT DISTINCT episode_id, step_index, scorer FROM latest_scores "
        "WHERE scorer_version = $version AND episode_id IN (SELECT unnest($ids))",
        of_these | {"version": IMPORTED},
    )
    reason = pl.format("mean of {} annotations", "authors")
    scores = means.select(
        *("episode_id", "step_index", "value", "authors"),
        scorer=pl.when(pl.col("label") == RATING).then(pl.lit(HUMAN)).otherwise(pl.format(f"{HUMAN}.{{}}", "label")),
        reason=pl.when(pl.col("authors") > 0).then(reason).otherwise(pl.lit("all annotations were taken back")),
        error=pl.lit(None, pl.String),
        metrics=pl.lit(None, pl.String),
    )
    # What has words alone, and never had a number, is no score.
    had = scores.join(scored, on=["episode_id", "step_index", "scorer"], how="semi", nulls_equal=True)
    scores = pl.concat([scores.filter(pl.col("authors") > 0), had.filter(pl.col("authors") == 0)])
    typed = scores.select(pl.col(name).cast(kind) for name, kind in SCORE_COLUMNS.items())
    add_scores(lake, typed, version=IMPORTED, source="annotations")
