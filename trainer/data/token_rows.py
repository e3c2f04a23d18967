"""Token rows of the selected episodes: their positions in files, the encoding that is trained, and their staleness.

Selection, planning and refusals use only the scalar columns of `tokens`, which keeps planning fast at any size. The
stream uses `file` and `row` to fetch tokens later.

Rows come in portions, so that memory holds few steps as wide rows at a time. A portion is a range of episode ids with a
certain number of steps. Most decisions about a step depend only on its episode, so portions are processed one by one.
Ids are hashes, so each file has rows of every portion. A table is therefore read once, in batches whose rows are split
by portion. Between stages, a column with a single value is stored as that value. Examples are the encoding, often the
temperature, and columns that were not recorded.

Staleness counts policy versions behind the newest version of the collecting run. A version is the number of updates
that the weights had seen; each run counts from 0. Weights may change inside an action; the oldest version counts. If
the tokens have no version, the step's counts, then the episode's, which is the version at its start.

Axes: `_E` selected episodes, `_N` rows of a table.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl

from lake import ids
from lake.errors import ContractError
from lake.read.parquet import DataFile, collect_rows, failed_read_error
from lake.read.snapshot import Snapshot
from lake.tables import TOKENS

PORTION = 1 << 18
"""Steps of a portion, excess steps of its last episode aside; rows of a batch."""


class Portions:
    """The selected episodes, cut into portions.

    Args:
        episodes: episode_id and num_steps, sorted by episode_id, each once.
    """

    def __init__(self, episodes: pl.DataFrame) -> None:
        self._ids_E = episodes["episode_id"].to_numpy()
        steps_E = episodes["num_steps"].to_numpy().astype(np.int64)
        portion_E = (np.cumsum(steps_E) - steps_E) // PORTION
        firsts = np.flatnonzero(np.diff(portion_E, prepend=-1))
        self.episodes = [episodes[low:high] for low, high in pairwise([0, *firsts[1:].tolist(), len(portion_E)])]
        """The episodes of each portion; at least one portion."""
        self._later_ids = self._ids_E[firsts[1:]]
        """First id of each portion but the first."""

    def group_files(self, files: Sequence[DataFile]) -> list[tuple[list[DataFile], int]]:
        """Return groups of neighbouring files to read at once, each with the number of rows before it.

        Polars reads as many files ahead as it has threads, and ignores their size. One portion needs one group.
        """
        groups: list[tuple[list[DataFile], int]] = [([], 0)]
        before = rows = 0
        for file in files:
            if rows and rows + file.rows > PORTION and len(self.episodes) > 1:
                groups.append(([], before))
                rows = 0
            groups[-1][0].append(file)
            before, rows = before + file.rows, rows + file.rows
        return groups

    def read(self, frames: Sequence[pl.LazyFrame]) -> Iterator[pl.DataFrame]:
        """Yield the rows of the selected episodes, portion by portion; raise LakeAccessError if a file cannot be read.

        Args:
            frames: rows of a lake's files with a column episode_id, in the same columns; read one after the other.
        """
        if len(self.episodes) == 1:
            # A filter by ids needs little memory for few ids, but for many it would exceed their rows.
            mine = pl.col("episode_id").is_in(self.episodes[0]["episode_id"].implode())
            yield pl.concat(collect_rows(frame.filter(mine)) for frame in frames)
            return
        pieces: list[list[pl.DataFrame]] = [[] for _ in self.episodes]
        for frame in frames:
            for batch in _read_batches(frame):
                for number, piece in enumerate(self.split(batch)):
                    if piece.height:
                        pieces[number].append(compact(piece))
        empty = pl.DataFrame(schema=frames[0].collect_schema())
        for number, batches in enumerate(pieces):
            pieces[number] = []
            yield pl.concat(batches) if batches else empty

    def split(self, rows: pl.DataFrame) -> list[pl.DataFrame]:
        """Split rows by portion; rows of episodes that are not selected are dropped."""
        ids_N = rows["episode_id"].to_numpy()
        order_N = np.argsort(ids_N, kind="stable")
        sorted_N = ids_N[order_N]
        # With sorted ids the search walks once through the memory of all ids.
        nearest_N = np.minimum(np.searchsorted(self._ids_E, sorted_N), len(self._ids_E) - 1)
        is_mine_N = self._ids_E[nearest_N] == sorted_N
        mine = order_N[is_mine_N]
        edges = np.searchsorted(sorted_N[is_mine_N], self._later_ids).tolist()
        return [rows[mine[low:high]] for low, high in pairwise([0, *edges, len(mine)])]


def _read_batches(frame: pl.LazyFrame) -> Iterator[pl.DataFrame]:
    """Yield the rows of a frame in order, in batches of about `PORTION` rows, with few batches in memory."""
    try:
        yield from frame.collect_batches(chunk_size=PORTION)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise failed_read_error(frame, error) from error


def compact(frame: pl.DataFrame) -> pl.DataFrame:
    """Return the same rows with constant columns stored as one value."""
    return frame.with_columns(_make_literals(_find_constants(frame), frame.schema))


def filter_rows(frame: pl.DataFrame, condition: pl.Expr) -> pl.DataFrame:
    """Return the rows that satisfy a condition; the same frame, without a copy, if all do."""
    satisfies = frame.select(condition.fill_null(value=False)).to_series()
    return frame if satisfies.all() else frame.filter(satisfies)


def concat_portions(portions: list[pl.DataFrame]) -> pl.DataFrame:
    """Concatenate portions column by column, each column in one piece of memory, and empty the portions on the way."""
    nonempty = [part for part in portions if part.height] or portions[:1]
    if len(nonempty) == 1:
        return compact(nonempty[0].rechunk())
    schema, constants = nonempty[0].schema, [_find_constants(part) for part in nonempty]
    shared = {name: value for name, value in constants[0].items() if all((name, value) in c.items() for c in constants)}
    columns = []
    for name in schema:
        mine = [part.select(name) for part in nonempty]
        for part in nonempty:
            part.drop_in_place(name)
        if name not in shared:
            columns.append(pl.concat(mine, rechunk=True))
    return pl.concat(columns, how="horizontal").with_columns(_make_literals(shared, schema)).select(schema.names())


def _find_constants(frame: pl.DataFrame) -> dict[str, Any]:
    """Return the value of each constant column. Constants are equal bit for bit, so 0.0 and NaN do not qualify."""
    if frame.is_empty():
        return {}
    # Expressions do not expand a column that is stored as one value; `frame[name]` would, permanently.
    values = frame.select(pl.all().first()).row(0, named=True)
    is_alike = frame.select(pl.all().eq_missing(pl.all().first()).all()).row(0, named=True)
    unsure = [name for name, value in values.items() if isinstance(value, float) and not abs(value) > 0]
    return {name: value for name, value in values.items() if is_alike[name] and name not in unsure}


def _make_literals(values: Mapping[str, Any], schema: Mapping[str, pl.DataType]) -> list[pl.Expr]:
    return [pl.lit(value, schema[name]).alias(name) for name, value in values.items()]


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
    """Yield the token rows of each portion, without their tokens.

    There is one row per (episode, encoding, step), sorted by these. Its columns are `SCALARS` except write_id, `file`
    (index into `snapshot.files("tokens")`) and `row` (index inside the file).
    """
    files = snapshot.files("tokens")
    if not files:
        empty = collect_rows(snapshot.scan("tokens").select(SCALARS).head(0)).drop("write_id")
        empty = empty.with_columns(file=pl.lit(0, pl.Int32), row=pl.lit(0, pl.Int32))
        yield from [empty] * len(portions.episodes)
        return
    ends = np.cumsum([file.rows for file in files])
    starts = ends - [file.rows for file in files]
    for frame in portions.read([_scan(snapshot, *group) for group in portions.group_files(files)]):
        position_N = frame["position"].to_numpy().astype(np.int64)
        file_N = np.searchsorted(ends, position_N, side="right")
        token_rows = frame.drop("position").with_columns(
            pl.Series("file", file_N, pl.Int32), pl.Series("row", position_N - starts[file_N], pl.Int32)
        )
        # Two jobs that render an episode at the same time write equal rows; the first counts.
        token_rows = token_rows.sort("episode_id", "encoding_id", "step_index", "write_id")
        is_new = pl.any_horizontal(
            pl.col(n).ne_missing(pl.col(n).shift(1)) for n in ("episode_id", "encoding_id", "step_index")
        )
        yield compact(filter_rows(token_rows, is_new).drop("write_id"))


def _scan(snapshot: Snapshot, files: Sequence[DataFile], before: int) -> pl.LazyFrame:
    """Scan the scalars of files, without rows of dead writes, with `position`, which counts from `before`."""
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
    rows: Sequence[pl.DataFrame], provenance: str, find_model_encoding: Callable[[], int] | None
) -> tuple[list[pl.DataFrame], int | None]:
    """Return the rows that are trained, and their encoding_id: the model's, or the only other one, if any.

    Args:
        rows: rows of each portion.
        find_model_encoding: returns the encoding_id of the model's tokenizer and template under this provenance
            (engine or rendered); called only if there are several encodings; None if it is unknown.

    Raises:
        ContractError: several encodings, and none is known to be the model's.
    """
    candidates = [filter_rows(part, pl.col("provenance") == provenance) for part in rows]
    counts = pl.concat(part.group_by("encoding_id").agg(pl.col("episode_id").n_unique()) for part in candidates)
    encodings = counts.group_by("encoding_id").agg(pl.col("episode_id").sum()).sort("encoding_id")
    if encodings.height > 1:
        if find_model_encoding is not None and (encoding_id := find_model_encoding()) in encodings["encoding_id"]:
            return [filter_rows(part, pl.col("encoding_id") == encoding_id) for part in candidates], encoding_id
        names = ", ".join(f"{ids.to_text(encoding)} ({episodes} episodes)" for encoding, episodes in encodings.rows())
        raise ContractError(
            f"table `tokens`: the selected episodes have {encodings.height} encodings, none known to be the model's: "
            f"{names}. A run trains on one: narrow --where, for example by run_id or policy"
        )
    return candidates, int(encodings["encoding_id"][0]) if encodings.height else None


_SPANS = pl.List(pl.List(pl.Int64))
"""Format of version_spans: [[version, first token, last token], ...]."""
_KEYS = ["episode_id", "step_index"]


def add_staleness(snapshot: Snapshot, portions: Portions, rows: Sequence[pl.DataFrame]) -> list[pl.DataFrame]:
    """Replace the policy versions in the rows of each portion by `staleness`.

    Staleness is int64: versions behind the newest of all rows of the same collecting run; NULL where none is known.
    """
    # Oldest and newest version of each row's tokens, NULL where not recorded.
    spans = pl.col("version_spans").str.json_decode(_SPANS).list.eval(pl.element().list.first())
    oldest = pl.min_horizontal("policy_version", spans.list.min())
    newest = pl.max_horizontal("policy_version", spans.list.max())
    versions_of_portions = [compact(part.select(*_KEYS, version=oldest, newest=newest)) for part in rows]
    if any(part["version"].null_count() for part in versions_of_portions):
        steps = snapshot.scan("steps").filter(pl.col("policy_version").is_not_null())
        of_steps = portions.read([steps.select(*_KEYS, of_step="policy_version")])
        for number, of_step in enumerate(of_steps):
            part = versions_of_portions[number].join(of_step, on=_KEYS, how="left", maintain_order="left")
            versions_of_portions[number] = compact(
                part.with_columns(version=pl.coalesce("version", "of_step")).drop("of_step")
            )
    episodes = snapshot.scan("episodes").select("episode_id", "run_id", of_episode="policy_version")
    for number, of_episode in enumerate(portions.read([episodes])):
        part = versions_of_portions[number].join(of_episode, on="episode_id", how="left", maintain_order="left")
        version = pl.coalesce("version", "of_episode")
        newest = pl.max_horizontal("newest", version)
        versions_of_portions[number] = compact(part.select("run_id", version=version, newest=newest))
    runs = pl.concat(part.group_by("run_id").agg(pl.col("newest").max()) for part in versions_of_portions)
    runs = runs.group_by("run_id").agg(of_run=pl.col("newest").max())
    with_versions = []
    for part, versions in zip(rows, versions_of_portions, strict=True):
        of_run = versions.join(runs, on="run_id", how="left", nulls_equal=True, maintain_order="left")
        stale = of_run.select(staleness=pl.col("of_run") - pl.col("version")).cast(pl.Int64)
        with_versions.append(compact(part.drop("policy_version", "version_spans").hstack(stale)))
    return with_versions
