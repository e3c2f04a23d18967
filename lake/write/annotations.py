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
# A score that came otherwise, from a file, is never taken back by words.
_MISSING = f"""
WITH places AS (
    SELECT DISTINCT episode_id, step_index, label FROM annotations WHERE list_contains($labels, label)
),
means AS (
    SELECT p.episode_id, p.step_index, if(p.label = '{RATING}', '{HUMAN}', '{HUMAN}.' || p.label) AS scorer,
           avg(a.value ORDER BY a.author) AS value, count(a.value) AS authors
    FROM places AS p LEFT JOIN latest_annotations AS a
        ON a.episode_id = p.episode_id AND a.step_index IS NOT DISTINCT FROM p.step_index AND a.label = p.label
    GROUP BY ALL
)
SELECT m.episode_id, m.step_index, m.scorer, m.value,
       if(m.authors > 0, format('mean of {{}} annotations', m.authors), 'all annotations were taken back') AS reason
FROM means AS m
JOIN episodes USING (episode_id)
LEFT JOIN latest_scores AS s
    ON s.scorer_version = $version AND s.episode_id = m.episode_id AND s.scorer = m.scorer
    AND s.step_index IS NOT DISTINCT FROM m.step_index
WHERE if(
    m.authors > 0,
    s.value IS DISTINCT FROM m.value,
    s.value IS NOT NULL AND starts_with(s.reason, 'mean of ')
)
"""


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
    with lake.job(kind=KIND, parameters={"labels": sorted(set(labels))}) as job:
        job.write("annotations", rows.with_columns(at=pl.lit(job.now())))
        job.counts |= {"rows_in": len(said), "rows_out": rows.height}
    _score(lake, sorted(set(labels)))
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


def _score(lake: "Lake", labels: Sequence[str]) -> None:
    """Write the scores that follow from the annotations of some labels, until they are what all authors say now.

    Of all places, and not of those that were just annotated alone: somebody else may write meanwhile, and whoever was
    killed between an annotation and its score is made up for.
    """
    params = {"labels": list(labels), "version": IMPORTED}
    while (missing := lake.snapshot().sql(_MISSING, params)).height:
        empty = pl.lit(None, pl.String)
        scores = missing.with_columns(error=empty, metrics=empty)
        typed = scores.select(pl.col(name).cast(kind) for name, kind in SCORE_COLUMNS.items())
        if not add_scores(lake, typed, version=IMPORTED, source="annotations").new:
            return
