"""How episodes went: by the return that the environment recorded, or by what a scorer says of them.

A choice of outcome (`score`) is `env_return`, the name of a scorer, or None for each run's own: `env_return` where an
episode of the run has one, else the scorer that has values for most of its episodes. Lists, rates and orders read
`judged` instead of `episodes`, which turns a choice into SQL: its column `outcome` is NULL where it is not known.
"""

from lake.judgements.scores import ENV_RETURN, current_rows, current_scorers
from viewer.queries import Params, Reads

_RETURNS = f"(SELECT *, {ENV_RETURN} AS outcome FROM episodes)"


def judged(lake: Reads, score: str | None, run: str | None = None) -> tuple[str, Params]:
    """A table expression, `episodes` with the column `outcome`, and the parameters that a query with it takes.

    Args:
        run: the one that the query is about, if it is about one: its own outcome alone is then looked up.
    """
    if run is not None:
        score = of_run(lake, run, score)
    if score == ENV_RETURN:
        return _RETURNS, {}
    if score is not None:
        return _joined(lake, "s.value", "scorer = $score"), {"score": score}
    found = own(lake)
    if not found:
        return _RETURNS, {}
    chosen = "(run_id, scorer) IN (SELECT (unnest($own_runs::VARCHAR[]), unnest($own_scorers::VARCHAR[])))"
    params: Params = {"own_runs": list(found), "own_scorers": list(found.values())}
    return _joined(lake, f"coalesce(e.{ENV_RETURN}, s.value)", chosen), params


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


def _joined(lake: Reads, outcome: str, condition: str) -> str:
    scores = f"SELECT episode_id, value FROM {current_rows(lake)} WHERE step_index IS NULL AND {condition}"
    return f"(SELECT e.*, {outcome} AS outcome FROM episodes AS e LEFT JOIN ({scores}) AS s USING (episode_id))"


def of_run(lake: Reads, run: str, score: str | None) -> str:
    """What a choice means for a run."""
    return score or own(lake).get(run, ENV_RETURN)


def own(lake: Reads) -> dict[str, str]:
    """The scorer that stands for each run without any return; runs that no scorer scored are left out."""
    bare = "SELECT run_id FROM episodes GROUP BY run_id HAVING count(env_return) = 0"
    runs = lake.sql(bare)["run_id"].to_list()
    if not runs:
        return {}
    query = f"""
        SELECT run_id, scorer FROM {current_rows(lake)}
        WHERE step_index IS NULL AND value IS NOT NULL AND run_id IN (SELECT unnest($runs))
        GROUP BY run_id, scorer
        QUALIFY row_number() OVER (PARTITION BY run_id ORDER BY count(*) DESC, scorer) = 1
        """
    return dict(lake.sql(query, {"runs": runs}).iter_rows())


def names(lake: Reads) -> list[str]:
    """What can be chosen: `env_return`, then the scorers of episodes in alphabetical order."""
    found = current_scorers(lake).filter("of_episodes")["scorer"]
    return [ENV_RETURN, *(name for name in found if name != ENV_RETURN)]
