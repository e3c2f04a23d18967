"""Token rows of the selected episodes: where each lies, which encoding is trained on, and how old its policy was.

Selection, planning and refusals work on the scalar columns of `tokens`, which keeps planning fast at any size; the
stream uses `file` and `row` to fetch tokens later. Rows come in portions (`trainer.data.select.portions`).

Staleness is counted in policy versions behind the newest of the collecting run; a version is the number of updates that
the weights had seen, and another run's count starts anew. Weights may change inside an action; the oldest version
counts. Where tokens do not say, the step does, then the episode, whose version is the one it began with.

Axes: `_N` rows.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import polars as pl

from lake import ids
from lake.errors import ContractError
from lake.read.parquet import collected
from lake.read.snapshot import Snapshot
from lake.read.visibility import DataFile
from lake.tables import TOKENS
from trainer.data.select.portions import Portions, compact, only

SCALARS = (
    "episode_id",
    "step_index",
    "encoding_id",
    "write_id",
    "provenance",
    "n_context",
    "n_action",
    "n_trained",
    "has_logprobs",
    "prefix_step_index",
    "prefix_length",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "logprobs_mode",
    "policy_version",
    "version_spans",
)


def read_token_rows(snapshot: Snapshot, portions: Portions) -> Iterator[pl.DataFrame]:
    """The token rows of each portion, without their tokens.

    There is one row per (episode, encoding, step), sorted by these: `SCALARS` but for write_id, `file` (index into
    `snapshot.files("tokens")`) and `row` (index inside the file).
    """
    files = snapshot.files("tokens")
    if not files:
        empty = collected(snapshot.scan("tokens").select(SCALARS).head(0))
        yield from [empty.drop("write_id").with_columns(file=pl.lit(0, pl.Int32), row=pl.lit(0, pl.Int32))] * len(
            portions.episodes
        )
        return
    ends = np.cumsum([file.rows for file in files])
    starts = ends - [file.rows for file in files]
    for frame in portions.read([_scan(snapshot, *group) for group in portions.groups(files)]):
        position_N = frame["position"].to_numpy().astype(np.int64)
        file_N = np.searchsorted(ends, position_N, side="right")
        placed = frame.drop("position").with_columns(
            pl.Series("file", file_N, pl.Int32), pl.Series("row", position_N - starts[file_N], pl.Int32)
        )
        # Two jobs that rendered the same episode at the same time left equal rows: the first counts.
        placed = placed.sort("episode_id", "encoding_id", "step_index", "write_id")
        is_new = pl.any_horizontal(
            pl.col(n).ne_missing(pl.col(n).shift(1)) for n in ("episode_id", "encoding_id", "step_index")
        )
        yield compact(only(placed, is_new).drop("write_id"))


def _scan(snapshot: Snapshot, files: Sequence[DataFile], before: int) -> pl.LazyFrame:
    """Scalars of the rows of some files, without those of dead writes, and their `position` after so many others."""
    scan = pl.scan_parquet(
        [file.path for file in files],
        row_index_name="position",
        row_index_offset=before,
        missing_columns="insert",
        extra_columns="ignore",
        schema=TOKENS.polars(),
        storage_options=snapshot.objects.polars_options or None,
    )
    dead = sorted(frozenset[int]().union(*(file.dead for file in files)))
    if dead:
        scan = scan.filter(~pl.col("write_id").is_in(dead))
    return scan.select("position", *SCALARS)


def choose_encoding(
    rows: Sequence[pl.DataFrame], provenance: str, own: Callable[[], int] | None
) -> tuple[list[pl.DataFrame], int | None]:
    """The rows that are trained on, and their encoding_id: the model's own, else the only other one there is, if any.

    Args:
        rows: of each portion.
        own: gives the encoding_id that the model's tokenizer and template have under this provenance (engine or
            rendered); asked only where there are several; None if it is not known.

    Raises:
        ContractError: several encodings, and none is known to be the model's.
    """
    right = [only(part, pl.col("provenance") == provenance) for part in rows]
    counted = pl.concat(part.group_by("encoding_id").agg(pl.col("episode_id").n_unique()) for part in right)
    found = counted.group_by("encoding_id").agg(pl.col("episode_id").sum()).sort("encoding_id")
    if found.height > 1:
        if own is not None and own() in found["encoding_id"]:
            return [only(part, pl.col("encoding_id") == own()) for part in right], own()
        listed = ", ".join(f"{ids.to_text(encoding)} ({episodes} episodes)" for encoding, episodes in found.rows())
        raise ContractError(
            f"table `tokens`: the selected episodes come in {found.height} encodings, none known to be the model's: "
            f"{listed}. One run trains on one: narrow --where, for example by run_id or policy"
        )
    return right, int(found["encoding_id"][0]) if found.height else None


_SPANS = pl.List(pl.List(pl.Int64))
"""[[version, first token, last token], ...]."""
_KEYS = ["episode_id", "step_index"]


def with_staleness(snapshot: Snapshot, portions: Portions, rows: Sequence[pl.DataFrame]) -> list[pl.DataFrame]:
    """The rows of each portion with `staleness`, in place of what tells their policy versions.

    Int64: versions behind the newest among all rows of the same collecting run; NULL where none is known.
    """
    known = [_recorded_versions(part) for part in rows]
    if any(part["version"].null_count() for part in known):
        steps = snapshot.scan("steps").filter(pl.col("policy_version").is_not_null())
        of_steps = portions.read([steps.select(*_KEYS, of_step="policy_version")])
        for number, of_step in enumerate(of_steps):
            part = known[number].join(of_step, on=_KEYS, how="left", maintain_order="left")
            known[number] = compact(part.with_columns(version=pl.coalesce("version", "of_step")).drop("of_step"))
    episodes = snapshot.scan("episodes").select("episode_id", "run_id", of_episode="policy_version")
    for number, of_episode in enumerate(portions.read([episodes])):
        part = known[number].join(of_episode, on="episode_id", how="left", maintain_order="left")
        version = pl.coalesce("version", "of_episode")
        newest = pl.max_horizontal("newest", version)
        known[number] = compact(part.select("run_id", version=version, newest=newest))
    runs = pl.concat(part.group_by("run_id").agg(pl.col("newest").max()) for part in known)
    runs = runs.group_by("run_id").agg(of_run=pl.col("newest").max())
    found = []
    for part, versions in zip(rows, known, strict=True):
        of_run = versions.join(runs, on="run_id", how="left", nulls_equal=True, maintain_order="left")
        stale = of_run.select(staleness=pl.col("of_run") - pl.col("version")).cast(pl.Int64)
        found.append(compact(part.drop("policy_version", "version_spans").hstack(stale)))
    return found


def _recorded_versions(rows: pl.DataFrame) -> pl.DataFrame:
    """`_KEYS`, and what each row's tokens say: oldest and newest policy version, NULL where they do not."""
    spans = pl.col("version_spans").str.json_decode(_SPANS).list.eval(pl.element().list.first())
    return compact(
        rows.select(
            *_KEYS,
            version=pl.min_horizontal("policy_version", spans.list.min()),
            newest=pl.max_horizontal("policy_version", spans.list.max()),
        )
    )
