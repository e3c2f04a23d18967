"""Which token rows form one training sequence.

A row whose prefix is NULL opens a sequence; a row that extends the sequence's last row continues it, so an append-only
episode is one sequence with several action spans. A row that extends an earlier step forks: a new sequence that repeats
the path to that step as context. Every action carries loss in exactly one sequence, the first that holds it.
"""

from typing import Any, NoReturn

import polars as pl

from lake import ids
from lake.errors import ContractError


def link_sequences(rows: pl.DataFrame) -> pl.DataFrame:
    """Token rows arranged in sequences.

    Args:
        rows: token rows of one encoding, sorted by episode_id and step_index.

    Returns:
        Members of sequences, sorted by episode, sequence, step: the columns of `rows`, `sequence` (0, 1, ... within the
        episode), `repeated` (the row stands in an earlier sequence already) and `end` (tokens of the sequence up to and
        including this row).

    Raises:
        ContractError: a row extends a step that has no tokens, or its prefix_length is not where that step ends.
    """
    prefix = pl.col("prefix_step_index")
    previous = pl.col("step_index").shift(1).over("episode_id")
    rows = rows.with_columns(
        end=(pl.col("prefix_length") + pl.col("n_context") + pl.col("n_action")).cast(pl.Int64),
        linear=(prefix.is_null() | (prefix == previous)).fill_null(value=False),
    )
    branched = rows.group_by("episode_id").agg(pl.col("linear").all()).filter(~pl.col("linear"))["episode_id"]
    is_branched = pl.col("episode_id").is_in(branched.implode())
    members = rows.filter(~is_branched).with_columns(
        sequence=(prefix.is_null().cum_sum().over("episode_id") - 1).cast(pl.Int32), repeated=pl.lit(value=False)
    )
    if len(branched):
        trees = [_branches(part) for part in rows.filter(is_branched).partition_by("episode_id")]
        members = pl.concat([members, *trees])
    members = members.drop("linear").sort("episode_id", "sequence", "step_index")
    _check_lengths(members)
    return members


def _branches(rows: pl.DataFrame) -> pl.DataFrame:
    """The sequences of one episode whose steps form a tree."""
    numbers = {step: number for number, step in enumerate(rows["step_index"].to_list())}
    paths: list[list[int]] = []
    home: dict[int, int] = {}
    for step, prefix in rows.select("step_index", "prefix_step_index").iter_rows():
        if prefix is None:
            paths.append([step])
            home[step] = len(paths) - 1
            continue
        if prefix not in home:
            _refuse(rows.row(numbers[step], named=True), f"extends step {prefix}, which has no tokens before it")
        trunk = paths[home[prefix]]
        if trunk[-1] == prefix:
            trunk.append(step)
            home[step] = home[prefix]
        else:
            paths.append([*trunk[: trunk.index(prefix) + 1], step])
            home[step] = len(paths) - 1
    parts = [
        rows[[numbers[step] for step in path]].with_columns(
            pl.lit(sequence, pl.Int32).alias("sequence"),
            pl.Series("repeated", [home[step] != sequence for step in path]),
        )
        for sequence, path in enumerate(paths)
    ]
    return pl.concat(parts)


def _check_lengths(members: pl.DataFrame) -> None:
    """Each row must begin where the row before it in its sequence ends."""
    before = pl.col("end").shift(1).over("episode_id", "sequence").fill_null(0)
    bad = members.with_columns(before=before).filter(pl.col("prefix_length") != pl.col("before"))
    if bad.height:
        row = bad.row(0, named=True)
        _refuse(row, f"has prefix_length {row['prefix_length']}, but its prefix ends at {row['before']}")


def _refuse(row: dict[str, Any], fault: str) -> NoReturn:
    msg = (
        f"table `tokens`, row episode_id={ids.to_text(row['episode_id'])}, step_index={row['step_index']}: "
        f"{fault}; record the episode again"
    )
    raise ContractError(msg)
