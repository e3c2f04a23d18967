"""Which groups a credit job has to compute: those whose input differs from the one of their newest rows.

Every job leaves one row per group in `credit_groups`, with the hash of the group's input. The newest row of each group
of the series is what the next job compares with: exact whatever happened between, whether episodes came, were retracted
or scored again (and back), and whatever compaction did to the files. No step is read for it. A group that has no
episodes any more gets a row that says so, and its advantages no longer count (`latest_advantages`); a job that was told
to look at some groups only removes none.

A group's hash covers its members as written (episode_id, write_id: facts never change under them), their scores to the
bit, whose step scores are their rewards, and what is looked for in it (`checks`). It depends on neither order, files
nor machine, and survives compaction. The estimator, its options and its code make the series: the code is that of the
estimator's modules and of whatever of this package they import, found by reading the imports.

Axes: `_E` episodes, `_P` groups.
"""

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import numpy as np
import numpy.typing as npt
import polars as pl

from lake import ids
from lake.ids import splitmix64
from lake.read.parquet import collected
from lake.read.snapshot import Snapshot
from lake.tables import TABLES
from pipelines.credit.health.diagnosis import DIAGNOSED, CreditDiagnosis, diagnose
from pipelines.credit.inputs.batch import Segments
from pipelines.credit.inputs.episodes import SPARE

_PACKAGE = "pipelines.credit"
_IMPORT = re.compile(
    r"^[ \t]*(?:import[ \t]+(?P<whole>[^\n#]+)"
    r"|from[ \t]+(?P<source>[\w.]+)[ \t]+import[ \t]+(?P<names>\([^)]*\)|[^\n#]+))",
    re.MULTILINE,
)
"""An import statement. Parsing every module would take a tenth of a small job's time."""
_COMMENT = re.compile(r"#[^\n]*")


def deciding_modules(*roots: ModuleType) -> tuple[ModuleType, ...]:
    """The given modules and every module of `pipelines.credit` that they import, directly, inside functions or not."""
    found: dict[str, ModuleType] = {}
    waiting = list(roots)
    while waiting:
        module = waiting.pop()
        if module.__name__ not in found:
            found[module.__name__] = module
            waiting += [import_module(name) for name in _imported(module)]
    return tuple(found[name] for name in sorted(found))


def _imported(module: ModuleType) -> Iterator[str]:
    for found in _IMPORT.finditer(inspect.getsource(module)):
        source = found["source"]
        if source is not None and not source.startswith(_PACKAGE.partition(".")[0]):
            continue
        listed = _COMMENT.sub("", found["whole"] or found["names"]).strip("()\n ")
        names = [name.split()[0] for name in listed.split(",") if name.strip()]
        if source is not None:
            names = [whole if _is_module(whole := f"{source}.{name}") else source for name in names]
        yield from (name for name in names if name.startswith(f"{_PACKAGE}."))


@cache
def _is_module(name: str) -> bool:
    """Whether a dotted name of this package is a module, not something in one."""
    if not name.startswith(f"{_PACKAGE}."):
        return False
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


_FACTS = ("episode_id", "write_id")
_NOT_INPUTS = ("group_id", "collected_group_id", "run_id", "status", "num_steps", SPARE)
"""Columns of selected episodes that follow from the facts, and the group itself."""
Words = npt.NDArray[np.uint64]


def group_fingerprints(episodes: pl.DataFrame, *, of_batch: bool = False, checks: int = 0) -> pl.DataFrame:
    """Hash of each group's input: group_id, input_fingerprint (63 bits), episodes, steps; sorted by group_id.

    Args:
        episodes: rows of `select_episodes`, sorted by (group_id, episode_id).
        of_batch: every group depends on all of them, as under a batch-normalised estimator.
        checks: hash of what the job looks for in a group beside its advantages: other checks are another answer.
    """
    groups = Segments.of(episodes, "group_id")
    hash_E = np.zeros(episodes.height, np.uint64)
    for column in (*_FACTS, *sorted(set(episodes.columns) - {*_FACTS, *_NOT_INPUTS})):
        hash_E = splitmix64(hash_E ^ _words(episodes[column]))
    # A sum wraps around, and does not ask in which order siblings stand.
    hash_P = splitmix64(np.add.reduceat(hash_E, groups.starts_K) + groups.lengths_K.astype(np.uint64))
    hash_P = splitmix64(hash_P ^ np.uint64(checks)) if checks else hash_P
    group_P = episodes["group_id"].gather(groups.starts_K)
    if of_batch:
        total = np.array([splitmix64(hash_P ^ _words(group_P)).sum(dtype=np.uint64)])
        hash_P = splitmix64(hash_P ^ splitmix64(total))
    return pl.DataFrame(
        {
            "group_id": group_P,
            "input_fingerprint": (hash_P & np.uint64(ids.MASK)).astype(np.int64),
            "episodes": groups.lengths_K,
            "steps": np.add.reduceat(episodes["num_steps"].to_numpy().astype(np.int64), groups.starts_K),
        }
    )


def total_fingerprint(groups: pl.DataFrame, **inputs: str | None) -> int:
    """Hash of a whole job's input: `group_fingerprints`, and everything else by name, such as the filter's text."""
    pairs_P2 = groups.select("group_id", "input_fingerprint").to_numpy()
    facts = ids.bytes_hash(pairs_P2.astype("<i8", order="C").tobytes())
    return ids.key_hash("credit", facts, *(part for name in sorted(inputs) for part in (name, inputs[name])))


def _words(column: pl.Series) -> Words:
    """A column's values as 64 bits each; NULL is a value of its own."""
    floats = column.dtype.is_float()
    # Adding 0.0 makes -0.0 the 0.0 it equals.
    values = (column.fill_null(0).to_numpy() + 0.0).view(np.uint64) if floats else column.fill_null(0).to_numpy()
    return splitmix64(values.astype(np.uint64)) ^ (column.is_null().to_numpy().astype(np.uint64) * _NULL)


_NULL = np.uint64(0xA0761D6478BD642F)


_COLUMNS = ("group_id", "run_id", "job_id", "input_fingerprint")

_JOBS = """
SELECT job_id FROM job_runs WHERE series_id = ? AND status = 'succeeded'
ORDER BY ended_order(sequence, ended_at, job_id)
"""


@dataclass(frozen=True, slots=True)
class Changes:
    """What a job of a series has to do."""

    changed: pl.DataFrame
    """Groups to compute: group_id, input_fingerprint, episodes, steps."""
    kept: pl.DataFrame
    """Rows of `credit_groups` of the other groups, as `newest_groups` reads them."""
    removed: pl.DataFrame
    """group_id and run_id of groups that have no episodes any more."""

    @property
    def nothing(self) -> bool:
        """Whether every group is unchanged."""
        return self.changed.is_empty() and self.removed.is_empty()


def find_changes(
    snapshot: Snapshot, series_id: int, groups: pl.DataFrame, *, partial: bool = False, force: bool = False
) -> Changes:
    """Compare `group_fingerprints` with what the series holds; `partial`: they are some of its groups."""
    newest = newest_groups(snapshot, series_id, groups["group_id"] if partial else None)
    same = newest.join(groups, on=["group_id", "input_fingerprint"], how="semi")
    if force:
        same = same.clear()
    removed = newest.filter(pl.col("episodes") > 0).join(groups, on="group_id", how="anti")
    if partial:
        removed = removed.clear()
    return Changes(
        changed=groups.join(same, on="group_id", how="anti", maintain_order="left"),
        kept=same,
        removed=removed.select("group_id", "run_id").sort("group_id"),
    )


def newest_groups(snapshot: Snapshot, series_id: int, among: pl.Series | None = None) -> pl.DataFrame:
    """The newest row of each group of a series: what comparing and diagnosing need, and when its job ended.

    `among`: of these groups only.
    """
    rows = snapshot.scan("credit_groups").filter(pl.col("series_id") == series_id)
    if among is not None:
        rows = rows.filter(pl.col("group_id").is_in(among.implode()))
    rows = rows.select(*_COLUMNS, *DIAGNOSED)
    # By the order in which jobs ended, whatever the clocks said: its one rule is SQL.
    jobs = snapshot.sql(_JOBS, [series_id]).with_row_index("ended").lazy()
    newest_last = rows.join(jobs, on="job_id").sort("ended")
    return collected(newest_last.unique("group_id", keep="last"))


def empty_rows(groups: pl.DataFrame) -> pl.DataFrame:
    """Rows of `credit_groups` that say of groups that they have no episodes any more."""
    counts = [
        column.name
        for column in TABLES["credit_groups"].columns
        if column.required and column.name not in ("group_id", "job_id", "series_id", "write_id", "is_dead", "findings")
    ]
    return groups.with_columns(
        pl.lit(value=False).alias("is_dead"), pl.lit("").alias("findings"), *(pl.lit(0).alias(name) for name in counts)
    )


def summary_of(groups: pl.DataFrame) -> CreditDiagnosis:
    """The figures of a job, from one row of `credit_groups` for each of its groups."""
    return diagnose(groups.lazy().filter(pl.col("steps") > 0))
