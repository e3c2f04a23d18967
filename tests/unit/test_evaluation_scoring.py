"""Parts of a selection that are scored together."""

from dataclasses import replace

import polars as pl

from testkit import plans
from trainer.evaluation.scoring import CHUNK_TOKENS, split_chunks


def test_chunks_are_as_long_as_they_may_be_where_32_bits_do_not_hold_all_tokens() -> None:
    """Polars' sum of an int32 column is int32: 4.3 billion tokens are 5 million to it."""
    number, tokens = 43_000, 100_000
    rows = {"episode_id": range(number), "file": 0, "row": range(number), "n_context": tokens, "n_action": 0}
    members = pl.DataFrame(rows, schema_overrides={"n_context": pl.Int32, "n_action": pl.Int32})
    first = next(split_chunks(replace(plans.selection_of({1: [[(1, True)]]}), members=members)))
    assert first.members["n_context"].sum() == CHUNK_TOKENS[1]
