"""Rewards: scores of several scorers made one, written to `scores` under the reward's own name.

The components stay as they are. A reward's version is the hash of its definition and of its components' versions; its
metrics are the components' values. Only episodes whose components changed since the reward's last job are computed.
"""

import sys
from collections import Counter
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import polars as pl
from pydantic import BaseModel, Field

from lake import ids
from lake.errors import ContractError, UsageError
from lake.judgements.predicates import select_where
from lake.judgements.scores import current_versions
from lake.lake import Lake
from lake.read.episodes import KEYS
from lake.read.parquet import collected
from lake.read.snapshot import Snapshot
from lake.write import jobs
from lake.write.jobs import Job
from pipelines.score import reward_definition
from pipelines.score.pending import confirm
from pipelines.score.reward_definition import Component, Expression, RewardDefinition, load_reward
from pipelines.score.rows import EXAMPLES

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
    """Find each component's version, asked for or current; UsageError if it has scored nothing, or for a taken name."""
    # Jobs of before sequences were written come first.
    succeeded = snapshot.scan("jobs").filter(pl.col("event") == "succeeded").group_by("job_id")
    jobs = collected(succeeded.agg(pl.col("kind").first(), pl.col("sequence").fill_null(-1).max()))
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


def _require_free(snapshot: Snapshot, name: str, jobs: pl.DataFrame) -> None:
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


def rewarded(components: pl.DataFrame, definition: RewardDefinition) -> pl.DataFrame:
    """Rewards of rows with the components' scores: value, reason, error and metrics (as in `scores`), in their order.

    Takes `component_rows`; or any frame with a Float64 column of each component's name, and optionally `error of NAME`.
    An unknown component that leaves no reward is its reason; a formula that gives no number of known ones is an error.
    """
    aliases = [component.alias for component in definition.components]
    errors = {
        alias: pl.col(error_of(alias)) if error_of(alias) in components.columns else pl.lit(None, pl.String)
        for alias in aliases
    }
    unknown = pl.concat_list(
        pl.when(pl.col(alias).is_null()).then(
            pl.concat_str(pl.lit(alias), pl.lit(" ("), pl.coalesce(errors[alias], pl.lit("NULL")), pl.lit(")"))
        )
        for alias in aliases
    ).list.drop_nulls()
    told = unknown.list.join("; ")
    if definition.sql is None:
        valued = components.with_columns(value=_weighted(definition))
    else:
        valued = components.with_columns(value=Expression(definition.sql, aliases).values(components))
    finite = pl.col("value").is_finite().fill_null(False)
    is_missing = unknown.list.len() > 0
    is_partial = is_missing & pl.lit(definition.on_null == "renormalise")
    return valued.with_columns(
        # Minus zero is zero: it would be shown, and stored, as another number.
        value=pl.when(finite).then(pl.when(pl.col("value") == 0.0).then(0.0).otherwise("value")),
        reason=pl.when(finite & is_partial)
        .then(pl.format("renormalised without {}", told))
        .when(~finite & is_missing)
        .then(pl.format("unknown: {}", told)),
        error=pl.when(~finite & ~is_missing).then(pl.lit("the formula gives no finite number")),
        metrics=pl.struct(aliases).struct.json_encode(),
    ).drop(*aliases, *(error_of(alias) for alias in aliases), strict=False)


def _weighted(definition: RewardDefinition) -> pl.Expr:
    """The weighted sum, added in the order of the components."""
    parts = [(part.weight, pl.col(part.alias)) for part in definition.components]
    if definition.on_null == "null":
        return reduce(add, (weight * score for weight, score in parts))
    total = sum(weight for weight, _ in parts)
    present = reduce(add, (weight * score.is_not_null().cast(pl.Float64) for weight, score in parts))
    known = reduce(add, (weight * score.fill_null(0.0) for weight, score in parts))
    complete = pl.all_horizontal(score.is_not_null() for _, score in parts)
    return pl.when(complete).then(known).when(present > 0.0).then(known * (total / present))


__all__ = ["Component", "RewardDefinition", "RewardReport", "load_reward", "rewarded", "run_reward"]

KIND = "reward"
EPISODES_A_PART = 50_000
"""Episodes that are computed at once."""


class RewardReport(BaseModel, frozen=True):
    """What a reward job did."""

    job_id: int | None
    """The job; None if there was nothing to do."""
    series_id: int
    version: str
    """Version of the reward, as in `scores.scorer_version`."""
    components: dict[str, str]
    """Name of each component -> scorer@version."""
    skipped: bool
    """No component changed: nothing was written."""
    episodes: int
    """Episodes that were asked for."""
    unchanged: int
    """Those of them whose reward stands."""
    rows: int = 0
    """Rows written, of episodes and of steps."""
    known: int = 0
    """Episodes with a reward, of those that were computed."""
    unknown: int = 0
    """Those without."""
    known_steps: int = 0
    """Steps with a reward, of those that a component scored."""
    unknown_steps: int = 0
    """Those without."""
    made_current: bool = False
    """Nothing was written, and another version was current: this one is again."""
    reasons: dict[str, int] = Field(default_factory=dict)
    """Why episodes have none: the most frequent reasons with their numbers of episodes, most frequent first."""


def run_reward(
    lake: Lake, definition: RewardDefinition, *, where: str | None = None, force: bool = False
) -> RewardReport:
    """Compose a reward and write it to `scores` under its name; `force` also where no component changed.

    Raises:
        UsageError: a bad predicate over `episodes`, or a component that has scored nothing.
        DataRefusedError: no episode is selected.
        ContractError: a score job wrote a component of an episode or step twice.
    """
    snapshot = lake.snapshot()
    episodes = select_where(snapshot, (*KEYS, "write_id"), where).sort(KEYS)
    resolved = resolve(snapshot, definition)
    series = {"reward": definition.name, "version": resolved.version}
    code = (reward_definition, sys.modules[__name__])
    series_id = jobs.series_id(KIND, series, code)
    todo = episodes if force else outdated(snapshot, resolved, series_id, episodes)
    report = RewardReport(
        job_id=None,
        series_id=series_id,
        version=resolved.version,
        components=resolved.spelled,
        skipped=todo.is_empty(),
        episodes=episodes.height,
        unchanged=episodes.height - todo.height,
    )
    plain = series | {"definition": definition.model_dump(mode="json"), "components": resolved.spelled, "where": where}
    if todo.is_empty():
        told: dict[str, Any] = {"kind": KIND, "series": series, "code": code, "parameters": plain}
        made_current = confirm(lake, definition.name, resolved.version, **told)
        return report.model_copy(update={"made_current": made_current})
    parameters = plain | {"force": force}
    fingerprint = snapshot.fingerprint(todo, reward=resolved.version, scores=_state(resolved, todo))
    job = lake.job(
        kind=KIND, parameters=parameters, series=series, code=code, fingerprint=fingerprint, snapshot=snapshot
    )
    with job:
        counts = _write(job, snapshot, resolved, todo)
        told = {name: counts[name] for name in ("known", "known_steps")}
        job.counts |= {"rows_in": episodes.height, "rows_out": counts["rows"], "unchanged": report.unchanged, **told}
    return report.model_copy(update={"job_id": job.job_id, **counts})


def _write(job: Job, snapshot: Snapshot, resolved: Resolved, todo: pl.DataFrame) -> dict[str, Any]:
    """Compute and write, a part at a time; the fields of the report that are counts."""
    sizes: Counter[tuple[bool, bool]] = Counter()  # (of a step, with a value) -> rows
    reasons: Counter[str] = Counter()
    is_step, is_known = pl.col("step_index").is_not_null(), pl.col("value").is_not_null()
    for part in todo.iter_slices(EPISODES_A_PART):
        composed = rewarded(component_rows(snapshot, resolved, part), resolved.definition)
        rows = composed.join(part.select(KEYS), on="episode_id", how="left", maintain_order="left").with_columns(
            scorer=pl.lit(resolved.definition.name), scorer_version=pl.lit(resolved.version)
        )
        job.write("scores", rows.sort("run_id", "group_id", "episode_id", "step_index", nulls_last=False))
        counted = rows.group_by(is_step.alias("step"), is_known.alias("known")).len()
        sizes.update({(step, known): count for step, known, count in counted.iter_rows()})
        why = rows.filter(~is_step & ~is_known).group_by(pl.coalesce("error", "reason"), maintain_order=True).len()
        reasons.update(dict(why.iter_rows()))
    return {
        "rows": sizes.total(),
        "known": sizes[False, True],
        "unknown": sizes[False, False],
        "known_steps": sizes[True, True],
        "unknown_steps": sizes[True, False],
        "reasons": dict(reasons.most_common(EXAMPLES)),
    }


def _state(resolved: Resolved, todo: pl.DataFrame) -> int:
    used = resolved.newest.join(todo.select("episode_id"), on="episode_id", how="semi").sort(
        "scorer", "scorer_version", "episode_id"
    )
    versions = ",".join(f"{name}@{version}" for name, version in sorted(resolved.spelled.items()))
    pairs_E2 = used.select("episode_id", "job_id").to_numpy()
    return ids.key_hash(versions, ids.bytes_hash(pairs_E2.astype("<i8", order="C").tobytes()))
