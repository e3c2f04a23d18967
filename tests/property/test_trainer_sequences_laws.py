"""Arbitrary trees of steps become sequences that hold every path, with each action trained once."""

from typing import Any

import polars as pl
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.sequences import link_sequences

SCHEMA = {
    "episode_id": pl.Int64,
    "step_index": pl.Int32,
    "n_context": pl.Int32,
    "n_action": pl.Int32,
    "prefix_step_index": pl.Int32,
    "prefix_length": pl.Int32,
}


@st.composite
def trees(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Rows of up to three episodes; each step extends nothing, the step before, or any earlier one."""
    rows = []
    for episode in range(draw(st.integers(1, 3))):
        ends: dict[int, int] = {}
        for step in range(draw(st.integers(1, 7))):
            earlier = sorted(ends)
            choices = st.just(None) if not earlier else st.none() | st.just(earlier[-1]) | st.sampled_from(earlier)
            prefix = draw(choices)
            context, action = draw(st.integers(0, 5)), draw(st.integers(0, 4))
            length = 0 if prefix is None else ends[prefix]
            ends[step] = length + context + action
            rows.append(
                {
                    "episode_id": episode,
                    "step_index": step,
                    "n_context": context,
                    "n_action": action,
                    "prefix_step_index": prefix,
                    "prefix_length": length,
                }
            )
    return rows


def path_to(rows: dict[int, dict[str, Any]], step: int) -> list[int]:
    """Steps from the opening of the sequence to a step, following prefixes."""
    path = [step]
    while (prefix := rows[path[0]]["prefix_step_index"]) is not None:
        path.insert(0, prefix)
    return path


@given(trees())
def test_every_sequence_is_a_path_and_every_step_is_fresh_exactly_once(rows: list[dict[str, Any]]) -> None:
    members = link_sequences(pl.DataFrame(rows, schema=SCHEMA))
    fresh = members.filter(~pl.col("repeated")).select("episode_id", "step_index").sort("episode_id", "step_index")
    assert fresh.rows() == [(row["episode_id"], row["step_index"]) for row in rows]
    for part in members.partition_by("episode_id", "sequence"):
        mine = {row["step_index"]: row for row in rows if row["episode_id"] == part["episode_id"][0]}
        steps = part["step_index"].to_list()
        assert steps == path_to(mine, steps[-1])
        ends = [mine[s]["prefix_length"] + mine[s]["n_context"] + mine[s]["n_action"] for s in steps]
        assert part["end"].to_list() == ends


@given(trees())
def test_no_sequence_is_the_beginning_of_another(rows: list[dict[str, Any]]) -> None:
    members = link_sequences(pl.DataFrame(rows, schema=SCHEMA))
    paths = [
        (part["episode_id"][0], part["step_index"].to_list()) for part in members.partition_by("episode_id", "sequence")
    ]
    for episode, path in paths:
        longer = [other_path for e, other_path in paths if e == episode and len(other_path) > len(path)]
        assert all(other_path[: len(path)] != path for other_path in longer)


@given(trees())
def test_the_repeated_part_of_a_sequence_is_its_beginning(rows: list[dict[str, Any]]) -> None:
    for part in link_sequences(pl.DataFrame(rows, schema=SCHEMA)).partition_by("episode_id", "sequence"):
        flags = part["repeated"].to_list()
        assert flags == sorted(flags, reverse=True)
        assert not flags[-1]
