"""How episodes went: by the return that the environment recorded, or by what a scorer says of them.

A choice of outcome (`score`) is `env_return`, the name of a scorer, or None for the usual one. That is the score of
the current credit, as everywhere (`lake.judgements.scores.find_score`). Without credit it is each run's own:
`env_return` where an episode of the run has one, else the first scorer that has values for most of its episodes
(`own`). Lists, rates and orders read `judged` instead of `episodes`, which turns a choice into SQL: its column
`outcome` is NULL where it is not known.
"""

import polars as pl

from lake.judgements.scores import ENV_RETURN, current_rows, current_scorers, episode_score_rows, find_score
from viewer.queries import Params, Reads

_RETURNS = f"(SELECT *, {ENV_RETURN} AS outcome FROM episodes)"


def judged(lake: Reads, score: str | None, run: str | None = None) -> tuple[str, Params]:
    """A table expression, `episodes` with the column `outcome`, and the parameters that a query with it takes.

    Args:
        run: the one that the query is about, if it is about one: its own outcome alone is then looked up.
    """
    score = of_run(lake, run, score) if run is not None else score or of_credit(lake)
    if score == ENV_RETURN:
        return _RETURNS, {}
    if score is not None:
        return _joined("s.value", episode_score_rows(lake, score)), {}
    found = own(lake)
    if not found:
        return _RETURNS, {}
    chosen = "(run_id, scorer) IN (SELECT (unnest($own_runs::VARCHAR[]), unnest($own_scorers::VARCHAR[])))"
    params: Params = {"own_runs": list(found), "own_scorers": list(found.values())}
    scores = f"(SELECT episode_id, value FROM {current_rows(lake)} WHERE step_index IS NULL AND {chosen})"
    return _joined(f"coalesce(e.{ENV_RETURN}, s.value)", scores), params


def of_group(lake: Reads, group_id: int, score: str | None) -> tuple[str, Params]:
    """`judged` with the members of a group among its rows, as collected or as a grouping (`trajlake group`) has them.

    A credit with a grouping names groups that no episode was collected in.
    """
    relation, params = judged(lake, score)
    if lake.sql("SELECT EXISTS (SELECT 1 FROM episodes WHERE group_id = ?)", [group_id]).item():
        return relation, params
    return regrouped(relation, f"group_id = {group_id:d}"), params


def regrouped(relation: str, which: str) -> str:
    """The rows of a relation that are in groups of `groupings` for which a condition holds, with these groups."""
    members = f"SELECT DISTINCT episode_id, group_id FROM groupings WHERE {which}"
    return (
        f"(SELECT e.* REPLACE (g.group_id AS group_id) FROM {relation} AS e JOIN ({members}) AS g USING (episode_id))"
    )


def _joined(outcome: str, scores: str) -> str:
    rows = f"(SELECT episode_id, value FROM {scores})"
    return f"(SELECT e.*, {outcome} AS outcome FROM episodes AS e LEFT JOIN {rows} AS s USING (episode_id))"


def of_run(lake: Reads, run: str, score: str | None) -> str:
    """What a choice means for a run."""
    return score or of_credit(lake) or own(lake).get(run, ENV_RETURN)


def of_credit(lake: Reads) -> str | None:
    """The score of the current credit; None without credit."""
    usual = find_score(lake)
    return None if usual.estimator is None else usual.name


def own(lake: Reads) -> dict[str, str]:
    """The scorer that stands for each run without any return; runs that no scorer scored are left out.

    Of the scorers with values for more than half of a run's episodes the one whose first job began first, so that a
    score that comes later changes no outcome; if there is none, the one with values for most of them.
    """
    runs = lake.sql(
        "SELECT run_id, count(*) AS episodes FROM episodes GROUP BY run_id HAVING count(env_return) = 0 ORDER BY run_id"
    )
    if runs.is_empty():
        return {}
    query = f"""
        SELECT run_id, scorer, count(*) AS scored FROM {current_rows(lake)}
        WHERE step_index IS NULL AND value IS NOT NULL AND run_id IN (SELECT unnest($runs))
        GROUP BY run_id, scorer
        """
    counts = lake.sql(query, {"runs": runs["run_id"].to_list()})
    began = lake.sql(
        """
        SELECT scorer, min(started_at) AS began
        FROM (SELECT DISTINCT scorer, job_id FROM scores WHERE step_index IS NULL) JOIN job_runs USING (job_id)
        GROUP BY scorer
        """
    )
    found = counts.join(runs, on="run_id").join(began, on="scorer", how="left")
    found = found.with_columns(is_of_most=2 * pl.col("scored") > pl.col("episodes"))
    by = ["is_of_most", pl.when("is_of_most").then("began"), "scored", "scorer"]
    found = found.sort(by, descending=[True, False, True, False], nulls_last=True)
    return dict(found.unique("run_id", keep="first", maintain_order=True).select("run_id", "scorer").iter_rows())


def names(lake: Reads) -> list[str]:
    """What can be chosen: `env_return`, then the scorers of episodes in alphabetical order."""
    found = current_scorers(lake).filter("of_episodes")["scorer"]
    return [ENV_RETURN, *(name for name in found if name != ENV_RETURN)]
