"""Where every token row lies: the scalar columns of `tokens`, with file and row, and nothing of the tokens themselves.

Selection, planning and refusals work on this frame; the stream uses `file` and `row` to fetch tokens later. Reading
scalars only keeps planning fast at any size.

The age of the policy that took a step is counted in versions behind the newest of its collecting run.

A version is the number of updates that the weights had seen. It is compared inside a collecting run only: another run's
count starts anew. Weights may change inside an action; the oldest version counts. Where tokens do not say, the step
does, then the episode, whose version is the one it began with.
"""

from collections.abc import Callable, Sequence

import numpy as np
import polars as pl

from lake import ids
from lake.errors import ContractError
from lake.read.parquet import collected
from lake.read.snapshot import Snapshot
from lake.tables import TOKENS

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


def read_token_rows(snapshot: Snapshot, episode_ids: pl.Series, columns: Sequence[str] = SCALARS) -> pl.DataFrame:
    """The token rows of some episodes (int64 [E]), without their tokens.

    Returns:
        One row per (episode, encoding, step), sorted by these: the columns, `file` (index into
        `snapshot.files("tokens")`) and `row` (index inside the file).
    """
    files = snapshot.files("tokens")
    if not files:
        empty = collected(snapshot.scan("tokens").select(columns).head(0))
        return empty.with_columns(file=pl.lit(0, pl.Int32), row=pl.lit(0, pl.Int64))
    ends = np.cumsum([file.rows for file in files])
    starts = ends - [file.rows for file in files]
    scan = pl.scan_parquet(
        [file.path for file in files],
        row_index_name="position",
        missing_columns="insert",
        extra_columns="ignore",
        schema=TOKENS.polars(),
        storage_options=snapshot.objects.polars_options or None,
    )
    dead = sorted(frozenset[int]().union(*(file.dead for file in files)))
    if dead:
        scan = scan.filter(~pl.col("write_id").is_in(dead))
    wanted = pl.col("episode_id").is_in(episode_ids.implode())
    frame = collected(scan.select("position", *columns).filter(wanted))
    position_N = frame["position"].to_numpy().astype(np.int64)
    file_N = np.searchsorted(ends, position_N, side="right")
    frame = frame.drop("position").with_columns(
        pl.Series("file", file_N, pl.Int32), pl.Series("row", position_N - starts[file_N], pl.Int64)
    )
    # Two jobs that rendered the same episode at the same time left equal rows: the first counts.
    frame = frame.sort("episode_id", "encoding_id", "step_index", "write_id")
    is_new = pl.any_horizontal(
        pl.col(n).ne_missing(pl.col(n).shift(1)) for n in ("episode_id", "encoding_id", "step_index")
    )
    return frame.filter(is_new)


def choose_encoding(
    rows: pl.DataFrame, provenance: str, own: Callable[[], int] | None
) -> tuple[pl.DataFrame, int | None]:
    """The rows that are trained on: those of the model's own encoding, else of the only other one there is.

    Args:
        provenance: engine or rendered.
        own: gives the encoding_id that the model's tokenizer and template have under this provenance; asked only where
            there are several; None if it is not known.

    Returns:
        Its rows and its encoding_id (None if there are no such rows).

    Raises:
        ContractError: several encodings, and none is known to be the model's.
    """
    rows = rows.filter(pl.col("provenance") == provenance)
    found = rows.group_by("encoding_id").agg(pl.col("episode_id").n_unique()).sort("encoding_id")
    if found.height > 1:
        if own is not None and own() in found["encoding_id"]:
            return rows.filter(pl.col("encoding_id") == own()), own()
        listed = ", ".join(f"{ids.to_text(encoding)} ({episodes} episodes)" for encoding, episodes in found.rows())
        raise ContractError(
            f"table `tokens`: the selected episodes come in {found.height} encodings, none known to be the model's: "
            f"{listed}. One run trains on one: narrow --where, for example by run_id or policy"
        )
    return rows, int(found["encoding_id"][0]) if found.height else None


_SPANS = pl.List(pl.List(pl.Int64))
"""[[version, first token, last token], ...]."""
_KEYS = ["episode_id", "step_index"]


def staleness(snapshot: Snapshot, members: pl.DataFrame) -> pl.Series:
    """Versions behind.

    Args:
        members: token rows, with policy_version and version_spans.

    Returns:
        Int64 [M], 0 for the newest version among the members of the same collecting run; NULL where none is known.
    """
    spans = pl.col("version_spans").str.json_decode(_SPANS).list.eval(pl.element().list.first())
    rows = members.select(
        *_KEYS,
        version=pl.min_horizontal("policy_version", spans.list.min()),
        newest=pl.max_horizontal("policy_version", spans.list.max()),
    )
    episode_ids = rows["episode_id"].unique().implode()
    if rows["version"].null_count():
        steps = snapshot.scan("steps").filter(
            pl.col("episode_id").is_in(episode_ids) & pl.col("policy_version").is_not_null()
        )
        of_step = collected(steps.select(*_KEYS, of_step="policy_version"))
        rows = rows.join(of_step, on=_KEYS, how="left", maintain_order="left")
        rows = rows.with_columns(version=pl.coalesce("version", "of_step"))
    episodes = snapshot.scan("episodes").filter(pl.col("episode_id").is_in(episode_ids))
    of_episode = collected(episodes.select("episode_id", "run_id", of_episode="policy_version"))
    rows = rows.join(of_episode, on="episode_id", how="left", maintain_order="left")
    version = pl.coalesce("version", "of_episode")
    newest = pl.max_horizontal("newest", version).max().over("run_id")
    return rows.select(staleness=newest - version)["staleness"].cast(pl.Int64)
