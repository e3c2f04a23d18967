"""A version that has nothing left to score, and whose user wants it nevertheless: it becomes the current one again.

Which version of a scorer counts is decided by what ran last (view `scorer_versions`). Whoever takes an edit of a
function back and scores with it finds everything scored already: no row is written, but a job that says which version
it confirms. It is one row of `jobs`, written in one commit, and a run that finds its version current writes none.
"""

from typing import Any

from lake.judgements.scores import version_of
from lake.lake import Lake


def confirm(lake: Lake, scorer: str, version: str, **job: Any) -> bool:
    """Make a version current that scored something, if another is.

    Args:
        lake: where both are.
        scorer: name of a scorer or reward.
        version: of it.
        **job: arguments of `Lake.job`: kind, series, code, parameters.

    Returns:
        Whether it was done. Nothing is written if the version is current, or has no score that may be seen.
    """
    snapshot = lake.snapshot()
    current = version_of(snapshot, scorer)
    if current in (None, version) or version_of(snapshot, f"{scorer}@{version}") is None:
        return False
    told = job.pop("parameters") | {"confirms": f"{scorer}@{version}"}
    with lake.job(parameters=told, snapshot=snapshot, **job) as written:
        written.counts |= {"rows_in": 0, "rows_out": 0}
    return True
