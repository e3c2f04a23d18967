"""A control for learning claims: the advantages of a credit job, shuffled among its steps.

If training on shuffled advantages does as well as on the real ones, the credit taught nothing. The shuffle is a credit
job of its own, because an advantage that no table holds cannot reach a gradient. Steps of dead groups keep theirs: a
trainer that leaves dead groups out must see the same number of steps either way.
"""

import numpy as np
import polars as pl

from lake import ids
from lake.judgements.credit import find_credit
from lake.lake import Lake
from lake.reading import collected
from pipelines.credit.flags import Flag

_VALUES = ["return_to_go", "a_episode", "a_step", "advantage"]
_STAMPS = ["job_id", "series_id", "write_id"]


def shuffle_advantages(lake: Lake, job_id: int, seed: int) -> tuple[int, int]:
    """Write a credit job whose live rows are a permutation of another's.

    Args:
        lake: where both are.
        job_id: the credit job to shuffle.
        seed: decides the permutation, together with the rows themselves.

    Returns:
        job_id and series_id of the new job.
    """
    snapshot = lake.snapshot()
    of = find_credit(snapshot, ids.to_text(job_id))
    rows = collected(snapshot.scan("advantages").filter(pl.col("job_id") == job_id).drop(_STAMPS))
    rows = rows.sort("group_id", "episode_id", "step_index")
    is_live_N = (~pl.Series(rows["flags"].str.split(",").list.contains(Flag.DEAD_GROUP.value))).to_numpy()
    live = np.flatnonzero(is_live_N)
    order_N = np.arange(rows.height)
    order_N[live] = np.random.default_rng(seed).permutation(live)
    shuffled = rows.with_columns(rows.select([*_VALUES, "defined"])[order_N])
    parameters = {"estimator": "shuffled", "of": ids.to_text(job_id), "seed": seed}
    with lake.job(
        kind="credit",
        parameters=parameters,
        # One series for all that are shuffled of one series: rounds of a loop stand beside one another, as theirs do.
        series={"estimator": "shuffled", "of": ids.to_text(of.series_id)},
        snapshot=snapshot,
    ) as job:
        job.write("advantages", shuffled)
        job.counts |= {"rows_in": rows.height, "rows_out": rows.height}
    return job.job_id, job.series_id
