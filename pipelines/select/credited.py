"""Episodes as a credit job saw them: its groups, and whether those have a signal."""

import polars as pl

from lake.errors import DataRefusedError
from lake.judgements.credit import Credit
from lake.snapshot import Snapshot
from pipelines.credit.flags import STATE
from pipelines.select.facts import CREDIT_STATE


def with_credit(snapshot: Snapshot, episodes: pl.DataFrame, credit: Credit) -> pl.DataFrame:
    """Those of the episodes that a credit job covered, with its group_id and the group's `credit_state`.

    Args:
        snapshot: where to read.
        episodes: rows with episode_id and group_id, which is replaced.
        credit: whose advantages.

    Raises:
        DataRefusedError: it covered none of them.
    """
    rows = f"FROM {credit.rows}"
    groups = snapshot.sql(
        f"SELECT e.episode_id, e.group_id, g.state AS {CREDIT_STATE}"
        f" FROM (SELECT episode_id, max(group_id) AS group_id {rows} GROUP BY episode_id) AS e"
        f" JOIN (SELECT group_id, {STATE} AS state {rows} GROUP BY group_id) AS g USING (group_id)"
    )
    covered = episodes.drop("group_id").join(groups, on="episode_id", how="inner").sort("episode_id")
    if covered.is_empty():
        msg = f"{credit.title} covered none of the {episodes.height} selected episodes; choose another --credit"
        raise DataRefusedError(msg)
    return covered
