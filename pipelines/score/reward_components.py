"""The scores that a reward is made of: which version of each scorer, which episodes are new, which rows count."""

from dataclasses import dataclass

import polars as pl

from lake import ids
from lake.errors import ContractError, UsageError
from lake.judgements.scores import current_versions
from lake.read.parquet import collected
from lake.read.snapshot import Snapshot
from pipelines.score.reward_definition import Component, RewardDefinition

_SCORER = ["scorer", "scorer_version"]


@dataclass(frozen=True)
class Resolved:
    """A reward's components with their versions."""

    definition: RewardDefinition
    versions: dict[str, str]
    """alias -> version."""
    newest: pl.DataFrame
    """scorer, scorer_version, episode_id, job_id, sequence: the newest succeeded job of each version and episode."""

    @property
    def spelled(self) -> dict[str, str]:
        """Alias -> scorer@version."""
        return {part.alias: f"{part.scorer_name}@{self.versions[part.alias]}" for part in self.definition.components}

    @property
    def version(self) -> str:
        """Version of the reward."""
        return self.definition.versioned(self.versions)


def resolve(snapshot: Snapshot, definition: RewardDefinition) -> Resolved:
    """Find the version of each component: the one asked for, or the one that is current.

    UsageError if a scorer, or that version of it, has scored nothing; or if the reward's name is a scorer's.
    """
    jobs = _succeeded(snapshot)
    _require_free(snapshot, definition.name, jobs)
    names = sorted({component.scorer_name for component in definition.components})
    rows = snapshot.scan("scores").filter(pl.col("scorer").is_in(names))
    newest = collected(
        rows.join(jobs.lazy(), on="job_id")
        .group_by(*_SCORER, "episode_id")
        .agg(pl.col("job_id", "sequence").sort_by("sequence", "job_id").last())
    )
    of_scorers = current_versions(snapshot)
    known: set[tuple[str, str]] = {(name, version) for name, version in newest.select(_SCORER).unique().iter_rows()}
    versions = {}
    for component in definition.components:
        version = component.version or of_scorers.get(component.scorer_name)
        if version is None or (component.scorer_name, version) not in known:
            raise _unscored(snapshot, component, known)
        versions[component.alias] = version
    wanted = {(part.scorer_name, versions[part.alias]) for part in definition.components}
    chosen = pl.DataFrame(sorted(wanted), schema=_SCORER, orient="row")
    return Resolved(definition, versions, newest.join(chosen, on=_SCORER, how="semi"))


def outdated(snapshot: Snapshot, resolved: Resolved, series_id: int, episodes: pl.DataFrame) -> pl.DataFrame:
    """Those of some episodes whose components were scored after the reward's newest job had read them.

    A job sees exactly the terminal rows below the version of `jobs` that it read, and every terminal row carries the
    version that it was appended to (`sequence`): comparing the two needs no clock and misses no race.
    """
    jobs = snapshot.scan("jobs").filter(pl.col("event") == "started", pl.col("series_id") == series_id)
    seen = pl.col("input_snapshot").str.json_path_match("$.jobs").cast(pl.Int64)
    rows = snapshot.scan("scores").filter(pl.col("series_id") == series_id).select("episode_id", "job_id").unique()
    done = collected(
        rows.join(jobs.select("job_id", seen=seen), on="job_id").group_by("episode_id").agg(pl.col("seen").max())
    )
    changed = resolved.newest.group_by("episode_id").agg(pl.col("sequence").max())
    return (
        episodes.join(done, on="episode_id", how="left", maintain_order="left")
        .join(changed, on="episode_id", how="left", maintain_order="left")
        .filter(pl.col("seen").is_null() | (pl.col("sequence") >= pl.col("seen")).fill_null(False))
        .select(episodes.columns)
    )


def component_rows(snapshot: Snapshot, resolved: Resolved, episodes: pl.DataFrame) -> pl.DataFrame:
    """Scores of the components side by side, of episodes (episode_id, group_id, run_id) that fit in memory.

    episode_id, step_index and, for each component, its alias (float64) and `error of <alias>` (NULL where known): a row
    per episode, and at level `both` a row per step that a component scored. Sorted.
    """
    definition = resolved.definition
    scores = _rows(snapshot, resolved, episodes)
    keys = episodes.select("episode_id").sort("episode_id").with_columns(step_index=pl.lit(None, pl.Int32))
    frames = [_beside(keys, scores, resolved, of_steps=False)]
    if definition.level == "both":
        at_steps = pl.concat(
            _of(scores, part, resolved).filter(pl.col("step_index").is_not_null()).select("episode_id", "step_index")
            for part in definition.components
            if part.of == "same"
        )
        frames.append(_beside(at_steps.unique(), scores, resolved, of_steps=True))
    return pl.concat(frames).sort("episode_id", "step_index", nulls_last=False)


def _beside(keys: pl.DataFrame, scores: pl.DataFrame, resolved: Resolved, *, of_steps: bool) -> pl.DataFrame:
    """Keys with the scores of every component."""
    for part in resolved.definition.components:
        same_step = of_steps and part.of == "same"
        on = ["episode_id", "step_index"] if same_step else ["episode_id"]
        found = _of(scores, part, resolved).filter(
            pl.col("step_index").is_not_null() if same_step else pl.col("step_index").is_null()
        )
        found = found.select(*on, pl.col("value").alias(part.alias), why=pl.coalesce("error", "reason"))
        _require_once(found, on, resolved.spelled[part.alias])
        missing = pl.lit(f"no score of {resolved.spelled[part.alias]}")
        error = pl.when(pl.col(part.alias).is_null()).then(pl.coalesce("why", missing))
        keys = (
            keys.join(found, on=on, how="left", maintain_order="left")
            .with_columns(error.alias(error_of(part.alias)))
            .drop("why")
        )
    return keys


def _require_once(found: pl.DataFrame, on: list[str], component: str) -> None:
    if (twice := found.filter(pl.struct(on).is_duplicated())).height:
        row = twice.row(0, named=True)
        msg = (
            f"table `scores`: one job wrote {component} of episode {ids.to_text(row['episode_id'])}, step "
            f"{row.get('step_index')}, more than once; score the episode again with --force"
        )
        raise ContractError(msg)


def error_of(alias: str) -> str:
    """Column with the reason why a component is unknown."""
    return f"error of {alias}"


def _of(scores: pl.DataFrame, part: Component, resolved: Resolved) -> pl.DataFrame:
    version = resolved.versions[part.alias]
    return scores.filter(pl.col("scorer") == part.scorer_name, pl.col("scorer_version") == version)


def _rows(snapshot: Snapshot, resolved: Resolved, episodes: pl.DataFrame) -> pl.DataFrame:
    """Rows of the components' newest jobs."""
    groups = episodes.get_column("group_id")
    newest = resolved.newest.join(episodes.select("episode_id"), on="episode_id", how="semi")
    rows = snapshot.scan("scores").filter(
        pl.col("run_id").is_in(episodes.get_column("run_id").unique().to_list()),
        pl.col("group_id").is_between(groups.min(), groups.max()),
        pl.col("scorer").is_in(newest.get_column("scorer").unique().to_list()),
    )
    keys = [*_SCORER, "episode_id", "job_id"]
    wanted = rows.join(newest.select(keys).lazy(), on=keys, how="semi")
    return collected(wanted.select(*_SCORER, "episode_id", "step_index", "value", "reason", "error"))


def _succeeded(snapshot: Snapshot) -> pl.DataFrame:
    """job_id, kind and sequence of succeeded jobs; those of before sequences were written come first."""
    jobs = snapshot.scan("jobs").filter(pl.col("event") == "succeeded")
    return collected(jobs.group_by("job_id").agg(pl.col("kind").first(), pl.col("sequence").fill_null(-1).max()))


def _require_free(snapshot: Snapshot, name: str, jobs: pl.DataFrame) -> None:
    """Check that no scorer writes under the reward's name."""
    rows = snapshot.scan("scores").filter(pl.col("scorer") == name).select(pl.col("job_id").unique())
    kinds = collected(rows.join(jobs.lazy(), on="job_id")).get_column("kind").unique().to_list()
    if others := sorted(set(kinds) - {"reward"}):
        msg = f"`scores` holds rows of {name!r} from jobs of kind {', '.join(others)}; call the reward something else"
        raise UsageError(msg)


def _unscored(snapshot: Snapshot, component: Component, known: set[tuple[str, str]]) -> UsageError:
    versions = sorted(version for name, version in known if name == component.scorer_name)
    if versions:
        msg = f"no scores of {component.scorer!r}; its versions in this lake: {', '.join(versions)}"
        return UsageError(msg)
    names = collected(snapshot.scan("scores").select(pl.col("scorer").unique())).get_column("scorer").sort().to_list()
    msg = (
        f"no scores of {component.scorer!r}; this lake has {', '.join(names) or 'no scores at all'}. "
        f"Score first: `trajlake score {component.scorer_name}`"
    )
    return UsageError(msg)
