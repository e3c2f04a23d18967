"""Which tools fail: calls of tools, and whether what came back is an error text.

What is known of a call is the state after it (`steps.state_is_error`), which is the last thing that came back. So of a
step that makes several calls the last one counts, and a call counts where a later step tells how it went: not the last
one of an episode, and not where nobody looked.
"""

import polars as pl

from viewer.queries import Params, Reads, in_spans
from viewer.queries.compare import Side
from viewer.queries.runs import Axis

SAMPLE = 20_000
"""Episodes, drawn by a hash of their ids, whose calls are read; where there are fewer, all are."""


def calls(where: str = "true") -> str:
    """SQL of calls: episode_id, tool, failed.

    Args:
        where: a condition on the step that made the call, `s`, and the one after it, `n`.
    """
    paths = ("function.name", "name")
    names = ", ".join(f"json_extract_string(s.tool_calls, '$[#-1].{path}')" for path in paths)
    return f"""
        SELECT s.episode_id, coalesce({names}) AS tool, n.state_is_error AS failed
        FROM steps AS s JOIN steps AS n ON n.episode_id = s.episode_id AND n.step_index = s.step_index + 1
        WHERE s.tool_calls <> '[]' AND n.state_is_error IS NOT NULL AND {where}
        """


def over(lake: Reads, run: str, axis: Axis) -> pl.DataFrame:
    """Tools of a run along an axis: x, last, tool, calls, failed (how many of them), share; by x, then tool.

    Of a run with more than `SAMPLE` episodes the calls of so many; of a long axis, x and last are the ends of a span.
    """
    mine = f"SELECT episode_id, {axis} AS x FROM episodes WHERE run_id = $run AND {axis} IS NOT NULL"
    found = in_spans(_shares(lake, mine, {"run": run}, "x, tool", "s.run_id = $run AND n.run_id = $run"))
    sums = found.group_by("x", "last", "tool").agg(pl.col("calls", "failed").sum()).sort("x", "tool")
    return sums.with_columns(share=pl.col("failed") / pl.col("calls"))


def of(lake: Reads, side: Side) -> pl.DataFrame:
    """Tools of a set of episodes: tool, calls, failed, share; of more than `SAMPLE` episodes the calls of so many."""
    mine, params = side.episodes(lake)
    where = "true" if side.run is None else "s.run_id = $run AND n.run_id = $run"
    return _shares(lake, f"SELECT episode_id FROM ({mine})", params, "tool", where)


def compared(one: pl.DataFrame, other: pl.DataFrame) -> pl.DataFrame:
    """Tools of two sets (`of`), those that began to fail most first.

    tool, a_calls, a_share, b_calls, b_share, difference (b_share - a_share; NULL if one side never calls it).
    """
    a, b = (
        frame.select("tool", *(pl.col(name).alias(f"{side}_{name}") for name in ("calls", "share")))
        for side, frame in zip("ab", (one, other), strict=True)
    )
    return (
        a.join(b, on="tool", how="full", coalesce=True)
        .with_columns(difference=pl.col("b_share") - pl.col("a_share"))
        .sort(["difference", "b_share", "tool"], descending=[True, True, False], nulls_last=True)
    )


def summed(over_rounds: pl.DataFrame) -> pl.DataFrame:
    """Tools of a whole run, those that failed most first: tool, calls, failed, share, first (x that has a failure).

    Args:
        over_rounds: of `over`.
    """
    calls_, failed = pl.col("calls").sum(), pl.col("failed").sum()
    first = pl.col("x").filter(pl.col("failed") > 0).min()
    found = over_rounds.group_by("tool").agg(calls_, failed, (failed / calls_).alias("share"), first.alias("first"))
    return found.sort(["failed", "calls", "tool"], descending=[True, True, False])


def _shares(lake: Reads, mine: str, params: Params, by: str, where: str) -> pl.DataFrame:
    query = f"""
        WITH drawn AS MATERIALIZED ({mine} ORDER BY hash(episode_id) LIMIT {SAMPLE})
        SELECT {by}, count(*) AS calls, count(*) FILTER (failed) AS failed, avg(failed::INT) AS share
        FROM drawn JOIN ({calls(where)}) USING (episode_id)
        WHERE tool IS NOT NULL GROUP BY {by} ORDER BY {by}
        """
    return lake.sql(query, params or None)
