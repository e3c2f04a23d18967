"""Our own JSONL: every fact of an episode, so that what is ingested from it is written as the same rows.

A line is `lake.records.EpisodeRecord`, as docs/reference/jsonl.md describes it, with the run, the format that the
episode first came from (both are part of what it is called), and the scores that came with it or were imported. Where
it was read from is not in it. What is computed in the lake (scores of
functions, advantages, selections, rendered tokens) is not a fact, and is computed again from the facts.
"""

import msgspec

from lake.export.target import Exported, Losses, Row, Target, each


def _row(exported: Exported, losses: Losses) -> Row:
    record = exported.record
    record.scores = [score for _, score in exported.came_with]
    losses.add("scores of functions", len(exported.computed))
    record.source_uri = None
    row: Row = msgspec.to_builtins(record)
    return row


TARGET = Target(
    "jsonl",
    "one episode a line, every fact; reads back as the same rows",
    "jsonl",
    each(_row),
    has_score=False,
    holds=frozenset(("tokens", "spans")),
)
