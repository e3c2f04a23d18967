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
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from typing import Any

import msgspec
import polars as pl

from lake import ids
from lake.errors import ConflictError, DataRefusedError
from lake.execution.executor import Executor
from lake.execution.held import held
from lake.execution.local import LocalExecutor
from lake.export import target
from lake.export.place import Place
from lake.export.request import Manifest, Request, Shard, State
from lake.export.target import FROM_ELSEWHERE, Credit, Exported, Losses, Row
from lake.joined import JoinedLake
from lake.judgements.credit import Credit as Series
from lake.judgements.credit import find_credit, jobs_of
from lake.judgements.predicates import select_where
from lake.judgements.scores import ENV_RETURN, episode_scores, find_score, scorers_with_values
from lake.judgements.selections import Kept, read_kept
from lake.lake import Lake
from lake.read.episodes import KEYS, Episode, parts, read_episodes, read_scores
from lake.read.joined_snapshot import JoinedSnapshot
from lake.read.snapshot import Snapshot
from lake.records import ScoreRecord
from lake.storage.store import Store
from lake.write.jobs import package_version

STEPS_A_PART = (1024, 32768)
"""Least and most. A part decodes whole row groups, in a lake that is not compacted those of most files: many small
parts take long."""
BYTES_A_PART = 8 << 20
"""Of files, which hold a tenth of what their rows take in memory, or less."""
NO_CREDIT = "none"
_NOT_HELD = {
    "tokens": "SELECT count(*) FROM tokens WHERE provenance = 'engine' AND episode_id IN (SELECT unnest($ids))",
    "spans": "SELECT count(*) FROM spans WHERE episode_id IN (SELECT unnest($ids))",
}
_COUNTED = "SELECT count(advantage) FROM {rows} WHERE episode_id IN (SELECT unnest($ids))"
_RESCORED = f"SELECT count(*) FROM scorer_versions WHERE scorer_version IN {FROM_ELSEWHERE!r} AND NOT is_current"
_CREDIT = "episode_id, step_index, advantage, a_episode, a_step, return_to_go, anchor_key"


def export(
    lake: Lake,
    request: Request,
    progress: Callable[[int, int], None] = lambda *_: None,
    *,
    executor: Executor | None = None,
) -> Manifest:
    """Write the chosen episodes; `progress` hears of episodes written and chosen, after every shard.

    Args:
        executor: where shards are written; every node must have the folder. This process, one after another, unless
            given.

    Raises:
        UsageError: a bad predicate, no such selection or credit, a place that holds something else; an executor for a
            format that is a tree of files, or a node that does not have the folder.
        WorkerLostError: worker processes died again and again; run it again, and it goes on from there.
        DataRefusedError: nothing is chosen, or the format needs advantages and there are none.
        LakeAccessError: the lake cannot be read, or the place cannot be written to.
    """
    place = Place(request)
    found = place.state()
    # What is refused is refused before anything is made.
    run = _Run(lake, request, found)
    with place.held():
        state = place.state()
        if state != found:
            run = _Run(lake, request, state)
        if state is None or state.fingerprint != run.fingerprint:
            run = run if state is None else _Run(lake, request, None)
            begun = State(request.asked, run.fingerprint, run.snapshot.versions)
            place.begin(begun, state)
            state = begun
        return _written(place, run, state, progress, executor or LocalExecutor(1))


@dataclass(frozen=True, slots=True)
class Part:
    """One shard, for a process that may run elsewhere."""

    snapshot: Snapshot
    target: str
    """Its name: formats hold functions, which do not travel."""
    asked: tuple[Any, ...]
    """The other fields of the request."""
    state: State
    """How the export began."""
    number: int


def write_shard(part: Part) -> tuple[Shard, Losses]:
    """Write one shard; what it holds depends on the snapshot alone, so it may be written again over itself."""
    key = (part.snapshot.root, part.state.fingerprint)
    request = Request(target(part.target), *part.asked)
    run = held("export", key, lambda: _Run(_lake_of(part.snapshot), request, part.state))
    if run.fingerprint != part.state.fingerprint:
        raise ConflictError("episodes were retracted while they were exported; run it again: it begins anew")
    return _one_shard(Place(request), run, part.number)


def _lake_of(snapshot: Snapshot) -> Lake:
    """The lake that a snapshot is of, or the lakes."""
    if isinstance(snapshot, JoinedSnapshot):
        return JoinedLake([_lake_of(member) for member in snapshot.members])
    return Lake(Store(snapshot.objects))


def _one_shard(place: Place, run: "_Run", number: int) -> tuple[Shard, Losses]:
    shard, losses = run.shards[number], Losses()
    return place.write(number, run.rows(shard, losses), shard.height), losses


def _written(
    place: Place, run: "_Run", state: State, progress: Callable[[int, int], None], executor: Executor
) -> Manifest:
    """Write the shards that are not there yet."""
    done = sum(shard.episodes for shard in state.shards)
    progress(done, run.episodes.height)
    todo = range(len(state.shards), len(run.shards))
    begun = State(state.asked, state.fingerprint, state.snapshot)
    written: Iterator[tuple[Shard, Losses]]
    if executor.is_here:
        written = executor.map(partial(_one_shard, place, run), todo)
    else:
        place.require_shards()
        named = run.request.target.name, msgspec.structs.astuple(run.request)[1:]
        written = executor.map(write_shard, (Part(run.snapshot, *named, begun, number) for number in todo))
    for shard, found in written:
        place.require(shard)
        losses = Losses(Counter(state.left_out), dict(state.names))
        losses.update(found)
        state.shards.append(shard)
        state.left_out, state.names = dict(losses.counts), losses.names
        place.save(state)
        done += shard.episodes
        progress(done, run.episodes.height)
    manifest = run.manifest(state)
    place.finish(manifest)
    return manifest


class _Run:
    """What is exported, on one snapshot."""

    def __init__(self, lake: Lake, request: Request, state: State | None) -> None:
        self.request = request
        newest = lake.snapshot()
        # What a vacuum has taken the files of is begun anew, as what is asked anew: the fingerprint is another.
        goes_on = state is not None and state.asked == request.asked and lake.missing(state.snapshot) is None
        self.snapshot = lake.at(state.snapshot) if state is not None and goes_on else newest
        self._retracted = newest.retracted
        self.kept: Kept | None = None if request.selection is None else read_kept(self.snapshot, request.selection)
        self.series = self._series()
        self.episodes = self._chosen()
        named = ENV_RETURN if request.credit == NO_CREDIT else None
        self.score = find_score(self.snapshot, request.choices.score or named, credit=self.series)
        self.choices = replace(request.choices, score=self.score.name)
        self._values = self._scored()

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

    def _scored(self) -> dict[int, float]:
        """What a scorer whose score counts says of the chosen episodes; empty of `env_return`, which records have.

        Raises:
            UsageError: a score was named, or rows are made by it, and no such scorer scored an episode.
            DataRefusedError: rows are made by it, and no chosen episode has one.
        """
        target, score = self.request.target, self.score.name
        is_used = target.goes_by_score and self.request.choices.pairs == "siblings"
        is_named = self.request.choices.score is not None
        is_known = score == ENV_RETURN or self.score.version is not None
        if not (is_used or is_named or target.has_score) or (score == ENV_RETURN and not is_used):
            return {}
        if not (is_known or is_used or is_named):
            return {}
        found = episode_scores(self.snapshot, score).join(self.episodes, on="episode_id", how="semi").drop_nulls()
        if is_used and found.is_empty():
            scorers = (ENV_RETURN, *scorers_with_values(self.snapshot, self.episodes["episode_id"]))
            others = [f"--score {name}" for name in scorers if name != score]
            advice = f"; valid: {', '.join(others)}" if others else "; nobody has scored them"
            raise DataRefusedError(f"{target.name} goes by a score, and no chosen episode has one of {score!r}{advice}")
        return {} if score == ENV_RETURN else dict(found.select("episode_id", "score").iter_rows())

    @cached_property
    def fingerprint(self) -> str:
        """Hash of what is asked for and of the episodes that it means."""
        used = [
            self.request.asked,
            self.kept and self.kept.job_id,
            [self.score.name, self.score.version],
            self.series and [self.series.series_id, *jobs_of(self.snapshot, self.series)],
            self.snapshot.versions,
        ]
        chosen = self.episodes["episode_id"].to_numpy().astype("<i8", order="C").tobytes()
        return hashlib.sha256(msgspec.json.encode(used) + chosen).hexdigest()

    @cached_property
    def shards(self) -> list[pl.DataFrame]:
        """The episodes of each shard, groups whole; one file is one shard."""
        if self.request.is_one_file:
            return [self.episodes]
        return list(parts(self.episodes, steps=1 << 62, most=self.request.shard_episodes))

    def rows(self, shard: pl.DataFrame, losses: Losses) -> Iterator[Row]:
        """The rows of a shard, in order."""
        target = self.request.target
        missing = {
            what: query for what, query in _NOT_HELD.items() if what not in target.holds and self.snapshot.files(what)
        }
        if self.series is not None and "advantages" not in target.holds:
            missing["advantages"] = _COUNTED.format(rows=self.series.rows)
        for what, query in missing.items():
            losses.add(what, self.snapshot.sql(query, {"ids": shard["episode_id"].to_list()}).item())
        dropped = self._dropped(shard)
        for part in parts(shard, steps=self._steps_a_part, most=shard.height):
            credit, came_with = self._credit(part), self._came_with(part)
            found = read_episodes(self.snapshot, part, tokens="tokens" in target.holds, spans="spans" in target.holds)
            for _, siblings in groupby(found, key=lambda episode: episode.group_id):
                group = [
                    Exported(
                        one,
                        credit.get(one.episode_id, {}),
                        dropped.get(one.episode_id, frozenset()),
                        came_with.get(one.episode_id, []) if self._is_rescored else _from_elsewhere(one),
                        one.record.env_return if self.score.name == ENV_RETURN else self._values.get(one.episode_id),
                    )
                    for one in siblings
                ]
                yield from target.convert(group, self.choices, losses)

    @cached_property
    def _steps_a_part(self) -> int:
        """As many as memory has room for, by the size of the lake's files; payloads in `blobs` may be of any size."""
        least, most = STEPS_A_PART
        if self.snapshot.files("blobs"):
            return least
        held = ("episodes", "steps", *(name for name in _NOT_HELD if name in self.request.target.holds))
        size = sum(file.bytes for name in held for file in self.snapshot.files(name))
        rows = sum(file.rows for file in self.snapshot.files("steps"))
        return max(least, min(most, BYTES_A_PART * rows // max(size, 1)))

    def _credit(self, part: pl.DataFrame) -> dict[int, dict[int, Credit]]:
        found: dict[int, dict[int, Credit]] = {}
        if self.series is None or "advantages" not in self.request.target.holds:
            return found
        query = f"SELECT {_CREDIT} FROM {self.series.rows} WHERE episode_id IN (SELECT unnest($ids))"
        for episode_id, step_index, *values in self.snapshot.sql(query, {"ids": part["episode_id"].to_list()}).rows():
            found.setdefault(episode_id, {})[step_index] = Credit(*values)
        return found

    @cached_property
    def _is_rescored(self) -> bool:
        """Whether scorers have run here under names that scores of elsewhere have."""
        return bool(self.snapshot.files("scores")) and bool(self.snapshot.sql(_RESCORED).item())

    def _came_with(self, part: pl.DataFrame) -> dict[int, list[tuple[str, ScoreRecord]]]:
        """The scores of elsewhere, where the current ones are not all of them; of two of a place the imported one."""
        if not self._is_rescored:
            return {}
        found = read_scores(self.snapshot, part, all_versions=True)
        kept: dict[int, list[tuple[str, ScoreRecord]]] = {}
        for episode_id, scores in found.items():
            places = {
                (score.step_index, score.scorer): (version, score)
                for wanted in FROM_ELSEWHERE
                for version, score in scores
                if version == wanted
            }
            kept[episode_id] = list(places.values())
        return kept

    def _dropped(self, shard: pl.DataFrame) -> dict[int, frozenset[int]]:
        if self.kept is None or self.kept.dropped_steps.is_empty():
            return {}
        steps = self.kept.dropped_steps.join(shard, on="episode_id", how="semi")
        grouped = steps.group_by("episode_id").agg("step_index")
        return {episode_id: frozenset(indices) for episode_id, indices in grouped.iter_rows()}

    def manifest(self, state: State) -> Manifest:
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
            choices=msgspec.to_builtins(self.choices),
            score=self.score.title if request.target.has_score else None,
            jobs=jobs,
            episodes=self.episodes.height,
            steps=int(self.episodes["num_steps"].sum()),
            rows=sum(shard.rows for shard in state.shards),
            left_out=dict(sorted(state.left_out.items())),
            names=dict(sorted(state.names.items())),
            shards=state.shards,
        )


def _from_elsewhere(episode: Episode) -> list[tuple[str, ScoreRecord]]:
    return [found for found in episode.scores if found[0] in FROM_ELSEWHERE]
