"""A version that has nothing left to score, and whose user wants it nevertheless: it becomes the current one again.

Which version of a scorer counts is decided by what ran last (view `scorer_versions`). Whoever takes an edit of a
function back and scores with it finds everything scored already: no row is written, but a job that says which version
it confirms. It is one row of `jobs`, written in one commit, and a run that finds its version current writes none.
"""

from typing import Any

from lake.lake import Lake
from lake.snapshot import Snapshot

_RIVAL = """
SELECT c.scorer_version
FROM scorer_versions AS c JOIN scorer_versions AS v ON v.scorer = c.scorer AND v.scorer_version = $version
WHERE c.scorer = $scorer AND c.is_current AND c.scorer_version <> $version
"""


def current_versions(snapshot: Snapshot) -> dict[str, str]:
    """Scorer or reward -> the version of it that counts."""
    return dict(snapshot.sql("SELECT scorer, scorer_version FROM scorer_versions WHERE is_current").iter_rows())


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
    if snapshot.sql(_RIVAL, {"scorer": scorer, "version": version}).is_empty():
        return False
    told = job.pop("parameters") | {"confirms": f"{scorer}@{version}"}
    with lake.job(parameters=told, snapshot=snapshot, **job) as written:
        written.counts |= {"rows_in": 0, "rows_out": 0}
    return True
