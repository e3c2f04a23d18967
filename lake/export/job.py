"""Export: chosen episodes out of a lake, in a format that others read; streaming, in shards, resumable.

The rows are in the order of run, group and episode, whatever the files of the lake look like, and nothing of them
depends on the machine or the time: the same export twice is the same bytes. A shard is a number of episodes; it is
written beside its place and renamed when it is whole, and `_export.json` says which are. A killed export is run again:
it goes on from the first missing shard, on the snapshot that it began with. What was retracted meanwhile is not
exported: the export begins again.

`manifest.json` says what was exported: the snapshot, the jobs whose advantages and selection were used, what every
shard holds, and what the format had no place for.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import IO, Any

import msgspec
import polars as pl

from lake import ids
from lake.errors import DataRefusedError, LakeAccessError, UsageError
from lake.export.target import Choices, Credit, Exported, Losses, Row, Target
from lake.judgements.credit import Credit as Series
from lake.judgements.credit import find_credit, jobs_of
from lake.judgements.predicates import select_where
from lake.judgements.selections import Kept, read_kept
from lake.lake import Lake
from lake.read.episodes import KEYS, parts, read_episodes
from lake.write.jobs import package_version

SHARD_EPISODES = 10_000
STEPS_A_PART = 1024
STATE = "_export.json"
MANIFEST = "manifest.json"
NO_CREDIT = "none"
_ROWS_A_BATCH = 512
_SUFFIXES = {"jsonl": ".jsonl", "parquet": ".parquet"}
_NOT_HELD = {
    "tokens": "SELECT count(*) FROM tokens WHERE provenance = 'engine' AND episode_id IN (SELECT unnest($ids))",
    "spans": "SELECT count(*) FROM spans WHERE episode_id IN (SELECT unnest($ids))",
}
_CREDIT = "episode_id, step_index, advantage, a_episode, a_step, return_to_go, anchor_key"


class Request(msgspec.Struct, frozen=True):
    """What a person asks for."""

    target: Target
    out: Path
    """A file (one shard), or a folder."""
    where: str | None = None
    selection: str | None = None
    run_id: str | None = None
    credit: str | None = None
    """Whose advantages: an estimator, series or job; None: the current one, if there is any; `none`: nobody's."""
    choices: Choices = Choices()
    shard_episodes: int = SHARD_EPISODES


class Shard(msgspec.Struct):
    """A finished file; of a tree, the files of some episodes together."""

    name: str
    episodes: int
    rows: int
    bytes: int
    sha256: str


class Manifest(msgspec.Struct):
    """What was exported."""

    format: str
    package_version: str
    snapshot: dict[str, int]
    where: str | None
    selection: str | None
    run_id: str | None
    choices: dict[str, Any]
    jobs: dict[str, Any]
    """The credit series and its jobs, and the select job; by name, as people see ids."""
    episodes: int
    steps: int
    rows: int
    left_out: dict[str, int]
    """What the format has no place for, or what no row could be made of."""
    shards: list[Shard]


class _State(msgspec.Struct):
    """What a killed export left: where to go on."""

    fingerprint: str
    snapshot: dict[str, int]
    shards: list[Shard] = []
    left_out: dict[str, int] = {}


def export(lake: Lake, request: Request, progress: Callable[[int, int], None] = lambda *_: None) -> Manifest:
    """Write the chosen episodes; `progress` hears of episodes written and chosen, after every shard.

    Raises:
        UsageError: a bad predicate, no such selection or credit, a place that holds something else.
        DataRefusedError: nothing is chosen, or the format needs advantages and there are none.
        LakeAccessError: the lake cannot be read, or the place cannot be written to.
    """
    place = _Place(request)
    state = place.state()
    run = _Run(lake, request, state)
    if state is None or state.fingerprint != run.fingerprint:
        place.clear(state)
        state = _State(run.fingerprint, run.snapshot.versions)
        run = _Run(lake, request, state)
        place.save(state)
    done = sum(shard.episodes for shard in state.shards)
    progress(done, run.episodes.height)
    for number, shard in enumerate(run.shards):
        if number < len(state.shards):
            continue
        losses = Losses()
        written = place.write(number, run.rows(shard, losses), shard.height)
        state.shards.append(written)
        state.left_out = dict(Counter(state.left_out) + losses.counts)
        place.save(state)
        done += shard.height
        progress(done, run.episodes.height)
    manifest = run.manifest(state)
    place.finish(manifest)
    return manifest


class _Run:
    """What is exported, on one snapshot."""

    def __init__(self, lake: Lake, request: Request, state: _State | None) -> None:
        self.request = request
        self.snapshot = lake.at(state.snapshot) if state else lake.snapshot()
        self._retracted = lake.snapshot().retracted if state else self.snapshot.retracted
        self.kept: Kept | None = None if request.selection is None else read_kept(self.snapshot, request.selection)
        self.series = self._series()
        self.episodes = self._chosen()

    def _series(self) -> Series | None:
        wanted = self.request.credit
        if wanted == NO_CREDIT:
            return None
        try:
            return find_credit(self.snapshot, wanted)
        except DataRefusedError:
            if wanted is not None or self.request.choices.pairs == "anchors":
                raise
            return None

    def _chosen(self) -> pl.DataFrame:
        request = self.request
        found = select_where(self.snapshot, (*KEYS, "num_steps"), request.where, empty=True)
        if request.run_id is not None:
            found = found.filter(run_id=request.run_id)
        if self.kept is not None:
            found = found.join(self.kept.episodes, on="episode_id", how="semi")
        found = found.filter(~pl.col("episode_id").is_in(self._retracted.implode()))
        if found.is_empty():
            runs = self.snapshot.sql("SELECT DISTINCT run_id FROM episodes ORDER BY 1 LIMIT 5").to_series()
            raise DataRefusedError(f"no episode is chosen; runs of the lake: {', '.join(runs) or 'none'}")
        return found.sort(*KEYS)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of what is asked for and of the episodes that it means."""
        request = self.request
        asked = msgspec.json.encode(
            [
                request.target.name,
                request.where,
                request.choices,
                request.shard_episodes,
                self.kept and self.kept.job_id,
                self.series and [self.series.series_id, *jobs_of(self.snapshot, self.series)],
                package_version(),
            ]
        )
        chosen = self.episodes["episode_id"].to_numpy().astype("<i8", order="C").tobytes()
        return hashlib.sha256(asked + chosen).hexdigest()

    @cached_property
    def shards(self) -> list[pl.DataFrame]:
        """The episodes of each shard, groups whole."""
        return list(parts(self.episodes, steps=1 << 62, most=self.request.shard_episodes))

    def rows(self, shard: pl.DataFrame, losses: Losses) -> Iterator[Row]:
        """The rows of a shard, in order."""
        target = self.request.target
        for what, query in _NOT_HELD.items():
            if what not in target.holds and self.snapshot.files(what):
                losses.add(what, self.snapshot.sql(query, {"ids": shard["episode_id"].to_list()}).item())
        dropped = self._dropped(shard)
        for part in parts(shard, steps=STEPS_A_PART):
            credit = self._credit(part)
            found = read_episodes(self.snapshot, part, tokens="tokens" in target.holds, spans="spans" in target.holds)
            for _, siblings in groupby(found, key=lambda episode: episode.group_id):
                group = [
                    Exported(one, credit.get(one.episode_id, {}), dropped.get(one.episode_id, frozenset()))
                    for one in siblings
                ]
                yield from target.convert(group, self.request.choices, losses)

    def _credit(self, part: pl.DataFrame) -> dict[int, dict[int, Credit]]:
        found: dict[int, dict[int, Credit]] = {}
        if self.series is None:
            return found
        query = f"SELECT {_CREDIT} FROM {self.series.rows} WHERE episode_id IN (SELECT unnest($ids))"
        for episode_id, step_index, *values in self.snapshot.sql(query, {"ids": part["episode_id"].to_list()}).rows():
            found.setdefault(episode_id, {})[step_index] = Credit(*values)
        return found

    def _dropped(self, shard: pl.DataFrame) -> dict[int, frozenset[int]]:
        if self.kept is None or self.kept.dropped_steps.is_empty():
            return {}
        steps = self.kept.dropped_steps.join(shard, on="episode_id", how="semi")
        grouped = steps.group_by("episode_id").agg("step_index")
        return {episode_id: frozenset(indices) for episode_id, indices in grouped.iter_rows()}

    def manifest(self, state: _State) -> Manifest:
        """What was exported, in words and figures."""
        request = self.request
        jobs: dict[str, Any] = {}
        if self.series is not None:
            of_series = [ids.to_text(job) for job in jobs_of(self.snapshot, self.series)]
            series = ids.to_text(self.series.series_id)
            jobs["credit"] = {"estimator": self.series.estimator, "series": series, "jobs": of_series}
        if self.kept is not None:
            jobs["selection"] = {"name": self.kept.name, "job": ids.to_text(self.kept.job_id)}
        return Manifest(
            format=request.target.name,
            package_version=package_version(),
            snapshot=dict(self.snapshot.versions),
            where=request.where,
            selection=request.selection,
            run_id=request.run_id,
            choices=msgspec.to_builtins(request.choices),
            jobs=jobs,
            episodes=self.episodes.height,
            steps=int(self.episodes["num_steps"].sum()),
            rows=sum(shard.rows for shard in state.shards),
            left_out=dict(sorted(state.left_out.items())),
            shards=state.shards,
        )


class _Place:
    """Where an export goes: one file, or a folder of shards or of a tree."""

    def __init__(self, request: Request) -> None:
        self._target = request.target
        self._out = request.out
        suffix = _SUFFIXES.get(self._target.container)
        self._is_file = suffix is not None and request.out.suffix == suffix
        if self._is_file and request.shard_episodes != SHARD_EPISODES:
            raise UsageError(f"{request.out} is one file; shards need a folder: --out FOLDER")
        if not self._is_file and request.out.is_file():
            valid = f"a folder, or a file that ends in {suffix}" if suffix else "a folder"
            raise UsageError(f"{request.out} is a file; {request.target.name} is written to {valid}")
        self._folder = request.out.parent if self._is_file else request.out
        self._of_file = f"{request.out.name}." if self._is_file else ""

    @property
    def _state_path(self) -> Path:
        return self._folder / f"{self._of_file}{STATE}"

    @property
    def _manifest_path(self) -> Path:
        return self._folder / f"{self._of_file}{MANIFEST}"

    def state(self) -> _State | None:
        """What a killed export left here; None if there was none. Raises UsageError: something else is here."""
        try:
            return msgspec.json.decode(self._state_path.read_bytes(), type=_State)
        except FileNotFoundError:
            pass
        except (msgspec.MsgspecError, OSError) as error:
            raise LakeAccessError(f"{self._state_path}: {error}; delete it to begin again") from error
        taken = self._out.exists() if self._is_file else self._out.is_dir() and any(self._out.iterdir())
        if taken:
            what = "file" if self._is_file else "or an empty folder"
            raise UsageError(f"{self._out} is there already; name a new {what}")
        return None

    def clear(self, state: _State | None) -> None:
        """Remove what an export of something else left."""
        for shard in state.shards if state else ():
            (self._folder / shard.name).unlink(missing_ok=True)

    def save(self, state: _State) -> None:
        """Note what is done."""
        with _writing(self._folder):
            _replace(self._state_path, msgspec.json.format(msgspec.json.encode(state)))

    def finish(self, manifest: Manifest) -> None:
        """The export is whole."""
        with _writing(self._folder):
            if self._target.finish is not None:
                self._target.finish(self._folder)
            _replace(self._manifest_path, msgspec.json.format(msgspec.json.encode(manifest)))
            self._state_path.unlink(missing_ok=True)

    def write(self, number: int, rows: Iterable[Row], episodes: int) -> Shard:
        """Write one shard under its name, once it is whole."""
        container = self._target.container
        with _writing(self._folder):
            if container == "tree":
                return _write_tree(self._folder, rows, episodes, f"{number:05d}")
            name = self._out.name if self._is_file else f"{number:05d}{_SUFFIXES[container]}"
            staging = self._folder / f"{name}.part"
            try:
                count = (
                    _write_lines(staging, rows) if container == "jsonl" else _write_parquet(staging, rows, self._target)
                )
                shard = Shard(name, episodes, count, staging.stat().st_size, _sha256(staging))
                staging.replace(self._folder / name)
            finally:
                staging.unlink(missing_ok=True)
        return shard


def _write_lines(path: Path, rows: Iterable[Row]) -> int:
    count = 0
    encoder, buffer = msgspec.json.Encoder(), bytearray()
    with path.open("wb") as file:
        for row in rows:
            encoder.encode_into(row, buffer)
            buffer += b"\n"
            file.write(buffer)
            count += 1
        _sync(file)
    return count


def _write_parquet(path: Path, rows: Iterable[Row], target: Target) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    assert target.schema is not None
    schema, count, batch = target.schema(), 0, []
    with path.open("wb") as file:
        with pq.ParquetWriter(file, schema, compression="zstd") as writer:
            for row in rows:
                batch.append(row)
                count += 1
                if len(batch) == _ROWS_A_BATCH:
                    writer.write_table(pa.Table.from_pylist(batch, schema))
                    batch.clear()
            writer.write_table(pa.Table.from_pylist(batch, schema))
        _sync(file)
    return count


def _write_tree(folder: Path, rows: Iterable[Row], episodes: int, name: str) -> Shard:
    """Files of a tree; what a killed export left of the same ones is written over."""
    count = size = 0
    digest = hashlib.sha256()
    for row in rows:
        data = row["text"].encode()
        path = folder / row["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, data)
        count += 1
        size += len(data)
        digest.update(row["path"].encode() + b"\0" + data)
    return Shard(name, episodes, count, size, digest.hexdigest())


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        what = error.strerror or error
        place = error.filename or folder
        raise LakeAccessError(f"{place}: {what}; what is written so far is kept: run it again") from error


def _replace(path: Path, data: bytes) -> None:
    staging = path.with_name(f"{path.name}.part")
    with staging.open("wb") as file:
        file.write(data)
        _sync(file)
    staging.replace(path)


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
