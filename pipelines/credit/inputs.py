"""Input of a credit job: its episodes with their scores, the groups that changed, and ranges that fit into memory.

Episodes. A job has one source of scores: the return that the environment reported, or the values of a scorer or reward
in `scores`. An episode without a value has NULL, never 0. The job uses one version of a scorer, which
`lake.judgements.scores` chooses. One query reads the versions and scores that the job needs, and each range reads the
values of its steps. The job warns of a scorer without a value for any selected episode, with the reasons: usually its
function failed on all rows.

Changed groups. Each job leaves one row per group in `credit_groups` with the hash of the group's input. The next job of
the series compares hashes and reads no step for it, so new, retracted and rescored episodes and compaction are all
covered. A group that has lost all episodes gets a row without any, and its advantages stop counting
(`latest_advantages`). A job over some groups only removes none. A group's hash covers its members as written
(episode_id, write_id: facts never change under them), their scores to the bit, the job of their step scores, and the
checks. Order, files, machine and compaction do not change it. The estimator, its options and its code identify the
series. The code is that of the estimator's modules and of the modules of this package that they import.

Ranges. A range is a number of whole groups that are read, computed and written together. Ranges follow the data files
(the files of a commit, or a stretch of a compacted file), so a range reads few files. A group is never split, and
neither is a normalisation batch. A range fills its memory budget, or holds one longer group or batch. The memory of a
step is a measured constant plus its texts, whose length comes from a sample of the lake. `arrange_steps` needs no join
and no sort: files are sorted by episode and step, so it looks up each run of an episode's rows once.

Axes: `_N` rows, `_R` runs of rows of one episode, `_E` episodes, `_P` groups.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Literal, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

from lake import ids
from lake.errors import DataRefusedError, UsageError
from lake.ids import splitmix64
from lake.judgements.scores import (
    ENV_RETURN,
    NamedScores,
    find_other_versions,
    read_named_scores,
    read_reasons,
)
from lake.judgements.selections import read_grouping, select_where
from lake.read.episode_text import fit_line
from lake.read.parquet import DataFile, collect_rows, scan_pruned
from lake.read.snapshot import Snapshot
from lake.read.text_table import count_noun
from lake.tables import TABLES
from pipelines.credit.estimators import needs_siblings, suggest_for_lone_episodes
from pipelines.credit.estimators.protocol import ALL, Estimator
from pipelines.credit.health import DIAGNOSED, IntegrityConfig, hash_decisions
from pipelines.credit.steps import COMPONENT, InputNeeds, Ints, Segments

ENV_REWARD = "env_reward"
REWARD_JOB = "reward_job"
"""Column: the job whose step scores are the episode's rewards."""
VALUE_JOB = "value_job"
"""Column: the job whose step scores are the episode's values."""
SPARE = "spare"
"""Column: planned siblings of the episode's round beyond the group size, without the left-out ones."""
_STEP_COLUMNS = ("episode_id", "step_index", "reward", "is_active", "is_action_valid")
_COLUMNS = ("episode_id", "group_id", "run_id", "collection_round", "status", "write_id", "num_steps", "env_return")

SiblingChoice: TypeAlias = Literal["kept", "all"]


@dataclass(frozen=True, slots=True)
class Sources:
    """Sources of a credit job's episodes and scores."""

    where: str | None = None
    """SQL predicate over `episodes` that selects the episodes of the series; None takes all."""
    only: str | None = None
    """SQL predicate over `episodes`: update the whole groups with such an episode; None takes all groups."""
    score: str = ENV_RETURN
    """Episode score: `env_return`, or the name of a scorer or reward, optionally with @VERSION."""
    rewards: str = ENV_REWARD
    """Step rewards: `env_reward` (as recorded), or a step scorer or reward, optionally with @VERSION."""
    grouping: str | None = None
    """Name of a grouping in `groupings`; None takes the collected groups."""
    siblings: SiblingChoice = "kept"
    """Compared episodes of an oversampled group: those that its collection kept, or all."""


@dataclass(frozen=True, slots=True)
class CreditConfig:
    """Configuration of a credit job, with everything decided that the estimator leaves open."""

    sources: Sources
    estimator: Estimator
    """The estimator with the version of its anchors."""
    needs: InputNeeds
    step_columns: tuple[str, ...]
    """Columns of `steps` to read."""
    episode_columns: tuple[str, ...]
    """Columns of `episodes` to read for the estimator."""
    code: tuple[ModuleType, ...]
    """Modules whose source decides the numbers."""
    integrity: IntegrityConfig
    purity: bool
    """Whether to read the actions and error marks of shared anchors."""

    @property
    def batch_key(self) -> str | None:
        """Column whose equal values are normalised together; None: each group alone."""
        return getattr(self.estimator, "batch_key", None)

    @classmethod
    def resolve(cls, estimator: Estimator, sources: Sources, integrity: IntegrityConfig, *, purity: bool) -> Self:
        """Pin the version of the anchors, and find columns and code; UsageError for an unknown column.

        A name in both tables means the step's column, unless the estimator lists it under `episode_columns`.
        """
        if anchors := getattr(estimator, "anchors", None):
            estimator = estimator.model_copy(update={"anchors": anchors.pin_version()})
        in_steps, in_episodes = TABLES["steps"].names, TABLES["episodes"].names
        needs = estimator.input_needs(list(dict.fromkeys((*in_steps, *in_episodes))))
        names = dict.fromkeys((*needs.step_columns, *needs.anchor_columns))
        of_steps = [name for name in names if name in in_steps and name not in needs.episode_columns]
        of_episodes = [*(name for name in names if name not in of_steps), *needs.episode_columns]
        if unknown := [name for name in of_episodes if name not in in_episodes]:
            msg = f"{estimator.name}: no column {', '.join(unknown)}; valid: {', '.join(in_episodes)}"
            raise UsageError(msg)
        return cls(
            sources=sources,
            estimator=estimator,
            needs=needs,
            step_columns=tuple(dict.fromkeys((*_STEP_COLUMNS, "state_hash", *of_steps))),
            episode_columns=tuple(n for n in dict.fromkeys(of_episodes) if n not in (*_STEP_COLUMNS, "group_id")),
            code=find_deciding_modules(*type(estimator).code()),
            integrity=integrity,
            purity=purity,
        )

    @property
    def checks(self) -> int:
        """Hash of the checks and diagnostics."""
        return ids.key_hash("checks", self.integrity.model_dump_json(exclude={"examples"}), self.purity)


@dataclass(frozen=True, slots=True)
class CreditInputs:
    """Inputs of a credit job, read once from one snapshot."""

    snapshot: Snapshot
    episodes: pl.DataFrame
    """One row per episode, sorted by (group_id, episode_id): episode_id, group_id (the job's), collected_group_id,
    run_id, status, write_id, num_steps, episode_score, a float64 column `score_<name>` per component (a scorer or
    reward that the estimator weights), `reward_job` where step rewards come from a scorer, `value_job` and
    `final_value_estimate` where values do, and `spare` where some round was oversampled."""
    groups: pl.DataFrame
    """Result of `hash_groups`."""
    scorer_versions: dict[str, str]
    """Version of each scorer or reward, by its name in the sources; unknown names are absent."""
    scores: pl.DataFrame | None
    """`episode_id` and `score` of all episodes that the job's scorer scored; None under `env_return`."""


def read_inputs(snapshot: Snapshot, config: CreditConfig, notice: Callable[[str], None] | None) -> CreditInputs:
    """Select a job's episodes with their scores, hash the groups, and pass warnings about the scores to `notice`.

    Raises:
        UsageError: a bad predicate, a scorer that scored nothing, an unknown grouping.
        DataRefusedError: no episode is selected, or the estimator compares siblings and no group has two.
    """
    sources, components = config.sources, config.needs.components
    episodes = _select_episodes(snapshot, sources)
    critic = config.needs.values
    names = dict.fromkeys((sources.score, sources.rewards, *components, critic or ENV_REWARD))
    scorers = [name for name in names if name not in (ENV_RETURN, ENV_REWARD)]
    # A scorer may have the name env_return too.
    namesakes = [ENV_RETURN] if sources.score == ENV_RETURN and notice is not None else []
    scores = read_named_scores(snapshot, [*scorers, *namesakes])
    columns = {"episode_score": sources.score} | {COMPONENT + name: name for name in components}
    for column, name in columns.items():
        if name == ENV_RETURN:
            episodes = episodes.with_columns(pl.col("env_return").alias(column))
        else:
            values = scores.of_episodes(name).rename({"score": column})
            episodes = episodes.join(values, on="episode_id", how="left")
    step_values = None
    if sources.rewards != ENV_REWARD:
        step_scores = scores.of_steps(sources.rewards).rename({"job_id": REWARD_JOB})
        episodes = episodes.join(step_scores, on="episode_id", how="left")
        step_values = int(episodes["step_values"].sum())
    if critic is not None:
        jobs = scores.of_steps(critic).select("episode_id", pl.col("job_id").alias(VALUE_JOB))
        finals = scores.episodes[critic].select("episode_id", pl.col("score").alias("final_value_estimate"))
        episodes = episodes.join(jobs.join(finals, on="episode_id"), on="episode_id", how="left")
    episodes = episodes.drop("env_return", "step_values", strict=False).sort("group_id", "episode_id")
    group_count = episodes["group_id"].n_unique()
    if group_count == episodes.height and needs_siblings(config.estimator):
        raise DataRefusedError(
            f"none of {count_noun(group_count, 'group')} holds two episodes, and {config.estimator.name} compares "
            "siblings: every advantage would be 0. Collect several episodes of a task (`trajlake collect --group-size "
            "8`), compare by other groups (`trajlake group -h`, --grouping), or use "
            f"{suggest_for_lone_episodes(config.estimator)}"
        )
    groups = hash_groups(episodes, of_batch=config.batch_key is not None, checks=config.checks)
    if notice is not None:
        if version := scores.versions.get(ENV_RETURN) if namesakes else None:
            notice(
                f"--score {ENV_RETURN} is what the environment recorded in `episodes`; `scores` holds a scorer of that "
                f"name as well: --score {ENV_RETURN}@{version} takes it"
            )
        without_values = [name for name in components if episodes[COMPONENT + name].count() == 0]
        if episodes["episode_score"].count() == 0:
            without_values.append(sources.score)
        if step_values == 0:
            without_values.append(sources.rewards)
        for name in dict.fromkeys(name for name in without_values if name in scorers and name in scores.versions):
            notice(_describe_empty_scores(snapshot, episodes, scores, name))
    return CreditInputs(
        snapshot,
        episodes,
        groups,
        scorer_versions={name: scores.versions[name] for name in scorers if name in scores.versions},
        scores=None if sources.score == ENV_RETURN else scores.of_episodes(sources.score),
    )


def _select_episodes(snapshot: Snapshot, sources: Sources) -> pl.DataFrame:
    """Select a job's episodes with their groups and `env_return`."""
    only, collected_groups = None, None
    if sources.only is not None:
        only = select_where(snapshot, ("episode_id", "group_id"), sources.only, "only")
        # A grouping may join siblings of several collected groups.
        collected_groups = only["group_id"].unique() if sources.grouping is None else None
    episodes = select_where(snapshot, _COLUMNS, sources.where, groups=collected_groups)
    episodes = _select_siblings(snapshot, sources, episodes).with_columns(collected_group_id="group_id")
    if sources.grouping is not None:
        groups = read_grouping(snapshot, sources.grouping).select("episode_id", "group_id")
        episodes = episodes.drop("group_id").join(groups, on="episode_id")
        if episodes.is_empty():
            msg = (
                f"no selected episode is in the grouping {sources.grouping!r}; leave --where out, or run "
                "`trajlake group` again"
            )
            raise DataRefusedError(msg)
    if only is not None:
        groups = episodes.join(only, on="episode_id", how="semi").select(pl.col("group_id").unique())
        episodes = episodes.join(groups, on="group_id", how="semi", maintain_order="left")
    return episodes


def _select_siblings(snapshot: Snapshot, sources: Sources, episodes: pl.DataFrame) -> pl.DataFrame:
    """Drop left-out siblings and add `spare`; DataRefusedError if no episode remains."""
    rounds = snapshot.sql("SELECT run_id, collection_round, spare FROM oversampled_rounds")
    if rounds.is_empty():
        return episodes.drop("collection_round")
    keys = ["run_id", "collection_round"]
    episodes = episodes.join(rounds, on=keys, how="left", maintain_order="left").drop(keys[1])
    if sources.siblings == "all":
        return episodes
    left_out = snapshot.sql("SELECT episode_id FROM left_out_siblings")["episode_id"]
    is_left_out = pl.col("episode_id").is_in(left_out.implode())
    of_group = is_left_out.sum().cast(pl.Int64).over("group_id")
    episodes_kept = episodes.with_columns((pl.col(SPARE) - of_group).clip(lower_bound=0)).filter(~is_left_out)
    if episodes_kept.is_empty():
        raise DataRefusedError(
            f"the collection kept none of {count_noun(episodes.height, 'chosen episode')}: see the view "
            "`left_out_siblings`; --siblings all compares them"
        )
    return episodes_kept


def _describe_empty_scores(snapshot: Snapshot, episodes: pl.DataFrame, scores: NamedScores, name: str) -> str:
    """Describe a scorer or reward without a value for any selected episode."""
    scorer, version = name.partition("@")[0], scores.versions[name]
    reasons = read_reasons(snapshot, scorer, version).join(episodes, on="episode_id", how="semi")
    causes = reasons.drop_nulls("why")["why"].value_counts(sort=True).sort("count", "why", descending=[True, False])
    message = f"{scorer}@{version} has no value for any of the {episodes.height} chosen episodes"
    if reasons.is_empty():
        message += ", which it has not scored"
    elif causes.height:
        why, count = causes.row(0)
        message += f", most often ({count}) because: {fit_line(why)}"
    alternatives = ", ".join(f"{scorer}@{label}" for label in find_other_versions(snapshot, scorer, version))
    return f"{message}. {f'Other versions: {alternatives}' if alternatives else 'There is no other version'}"


def suggest_scores(snapshot: Snapshot, episodes: pl.DataFrame) -> Iterator[str]:
    """Yield a line if scorers have values for episodes without a score, with their names, most values first."""
    query = "SELECT scorer, episode_id FROM current_scores WHERE step_index IS NULL AND value IS NOT NULL"
    # The scores of a failed episode are no measurement (`lake.formats.base.rules`).
    is_finished = pl.col("status").is_in(["completed", "truncated"])
    unscored_episodes = episodes.filter(pl.col("episode_score").is_null() & is_finished)
    scorers = snapshot.sql(query).join(unscored_episodes, on="episode_id", how="semi").group_by("scorer").len()
    if scorers.height:
        names = scorers.sort("len", "scorer", descending=[True, False])["scorer"]
        options = " or ".join(f"--score {name}" for name in names)
        yield f"There are recorded scores for episodes without one: {options}"


MEMORY_GB = 2.0
"""Default memory budget in GB."""
_BYTES_PER_STEP = 400
"""Peak of a range in bytes per step, without texts: inputs, intermediate arrays, rows, and the encoded file."""
_COPIES_OF_TEXT = 3
"""Copies of a text: as read, in canonical order, and normalised."""
_SAMPLE = 2_000


def estimate_bytes_per_step(snapshot: Snapshot, columns: Sequence[str]) -> float:
    """Estimate the peak bytes of a step that holds these columns of `steps`; hashed texts take none."""
    texts = [name for name in columns if TABLES["steps"].polars()[name] == pl.String]
    sample = collect_rows(snapshot.scan("steps").select(texts or "episode_id").head(_SAMPLE))
    wide = sum(int(sample[name].str.len_bytes().sum()) for name in texts) / max(1, sample.height)
    return _BYTES_PER_STEP + _COPIES_OF_TEXT * wide


def compute_budget_rows(step_bytes: float, memory_gb: float, workers: int) -> int:
    """Return the steps of a range such that `workers` ranges at once stay within a budget in GB (10^9 bytes).

    The budget excludes the memory of the process itself. UsageError for a budget that is not positive.
    """
    if not memory_gb > 0:
        msg = f"a memory budget of {memory_gb} GB is not positive; the default is {MEMORY_GB}"
        raise UsageError(msg)
    return max(1, int(memory_gb * 1e9 / workers / step_bytes))


_WRITTEN_TOGETHER = ("episodes", "steps")
"""Tables whose rows of an episode have the write_id of the episode."""
_FEWEST_ROWS = 200_000
"""Minimum steps of a range: each range writes a file."""


@dataclass(frozen=True, slots=True)
class Range:
    """Whole groups, and the files that hold them."""

    episodes: pl.DataFrame
    """Rows of `CreditInputs.episodes`, sorted by (group_id, episode_id)."""
    files: dict[str, tuple[DataFile, ...]]
    """Table -> data files that may hold rows of these episodes."""


def compute_rows_per_range(steps: int, budget_rows: int, workers: int) -> int:
    """Return the steps of a range: about two ranges a worker, so that writing overlaps with computing."""
    return max(1, min(budget_rows, max(_FEWEST_ROWS, -(-steps // (2 * workers)))))


def cut_ranges(
    config: CreditConfig,
    inputs: CreditInputs,
    groups: pl.DataFrame,
    workers: int,
    memory_gb: float,
    notice: Callable[[str], None] | None,
) -> Iterator[Range]:
    """Yield the ranges of some groups; pass a warning of a group or batch beyond the memory to `notice`."""
    episodes = inputs.episodes.join(groups, on="group_id", how="semi", maintain_order="left")
    if episodes.is_empty():
        return
    key = config.batch_key
    step_bytes = estimate_bytes_per_step(inputs.snapshot, config.step_columns)
    budget = compute_budget_rows(step_bytes, memory_gb, workers)
    steps = int(episodes["num_steps"].sum())
    rows = None if key == ALL else compute_rows_per_range(steps, budget, workers)
    units = None if key in (None, ALL) else find_batch_units(inputs.snapshot, episodes, key)
    judgements = () if config.sources.rewards == ENV_REWARD and config.needs.values is None else ("scores",)
    longest = steps
    if rows is not None:
        unit_rows = episodes.with_columns(unit="group_id") if units is None else episodes.join(units, on="group_id")
        longest = int(unit_rows.group_by("unit").agg(pl.col("num_steps").cast(pl.Int64).sum())["num_steps"].max() or 0)  # type: ignore[arg-type]
    if longest > budget and notice is not None:
        unit = "group" if key is None else "batch"
        notice(
            f"the largest {unit} has {longest:,} steps and is computed whole: about {longest * step_bytes / 1e9:.2g} "
            f"GB, more than the {memory_gb / workers:.2g} GB that --memory-limit leaves each worker. If the machine "
            f"has less, give fewer --workers, or take a smaller {unit}"
        )
    yield from plan_ranges(inputs.snapshot, episodes, rows, judgements, units)


def plan_ranges(
    snapshot: Snapshot,
    episodes: pl.DataFrame,
    rows: int | None,
    judgements: Sequence[str] = (),
    units: pl.DataFrame | None = None,
) -> list[Range]:
    """Cut a job's groups into ranges.

    Args:
        snapshot: where the files are.
        episodes: rows of `CreditInputs.episodes` to compute, sorted by (group_id, episode_id).
        rows: steps of a range; None makes one range of everything.
        judgements: further tables that ranges read, in addition to `episodes` and `steps`.
        units: group_id and unit: groups of one unit are computed together; None computes each group separately.
    """
    files = {name: _TableFiles(snapshot.files(name), by_write=True) for name in _WRITTEN_TOGETHER}
    files |= {name: _TableFiles(snapshot.files(name), by_write=False) for name in judgements}
    if rows is None:
        return [Range(episodes, {name: table_files.find_files(episodes) for name, table_files in files.items()})]
    homes = episodes.with_columns(home=files["steps"].find_homes(episodes))
    homes = homes.with_columns(unit="group_id") if units is None else homes.join(units, on="group_id")
    together = homes.group_by("unit").agg(
        pl.col("num_steps").sum(), pl.col("home", "run_id", "collected_group_id").min()
    )
    range_numbers = together.sort("home", "run_id", "collected_group_id", "unit").select(
        "unit", number=(pl.col("num_steps").cum_sum() - pl.col("num_steps")) // rows
    )
    of_groups = homes.select("group_id", "unit").unique().join(range_numbers, on="unit").drop("unit")
    of_episodes = episodes.join(of_groups, on="group_id", maintain_order="left")
    by_number = of_episodes.partition_by("number", as_dict=True, include_key=False)
    return [
        Range(part, {name: table_files.find_files(part) for name, table_files in files.items()})
        for _, part in sorted(by_number.items(), key=lambda item: item[0])
    ]


def find_batch_units(snapshot: Snapshot, episodes: pl.DataFrame, batch_key: str) -> pl.DataFrame:
    """Find the groups that must be computed together: group_id and unit, one row per group.

    Groups with episodes of one batch share a unit. Units are the connected components of the graph whose nodes are
    batches and whose edges are groups with episodes of several batches.
    """
    if batch_key not in episodes.columns:
        keys = collect_rows(snapshot.scan("episodes").select("episode_id", batch_key))
        episodes = episodes.select("group_id", "episode_id").join(keys, on="episode_id", how="left")
    # A batch's number is its first row: this works for keys of any type.
    rows = episodes.select("group_id", key=pl.col(batch_key)).with_row_index("row")
    number = pl.when(pl.col("key").is_not_null()).then(pl.col("row").min().over("key"))
    of_groups = rows.select("group_id", number.cast(pl.Int64).alias("batch")).unique()
    first = of_groups.group_by("group_id").agg(pl.col("batch").min().alias("first"))
    links = of_groups.join(first, on="group_id").filter(pl.col("batch") != pl.col("first")).select("first", "batch")
    heads = _find_heads(links.unique().rows())
    head_of_batch = pl.DataFrame(list(heads.items()), schema={"first": pl.Int64, "head": pl.Int64}, orient="row")
    units = first.join(head_of_batch, on="first", how="left").with_row_index("place")
    alone = -1 - pl.col("place").cast(pl.Int64)  # no episode of the group is in a batch
    return units.select("group_id", unit=pl.coalesce("head", "first", alone))


def _find_heads(links: list[tuple[int, int]]) -> dict[int, int]:
    """Return the representative batch of each linked batch's component (union-find)."""
    above: dict[int, int] = {}

    def head(batch: int) -> int:
        while above.setdefault(batch, batch) != batch:
            above[batch] = above[above[batch]]
            batch = above[batch]
        return batch

    for first, second in links:
        above[head(first)] = head(second)
    return {batch: head(batch) for batch in list(above)}


class _TableFiles:
    """Index of a table's data files by the episodes in them; `by_write`: files share their episodes' write_id."""

    def __init__(self, files: Sequence[DataFile], *, by_write: bool) -> None:
        def sort_key(file: DataFile) -> tuple[str, int, str]:
            (run, _), (group, _) = (file.ranges.get(name, (None, None)) for name in ("run_id", "group_id"))
            return (run or "", group or 0, file.path)

        ordered = sorted(files, key=sort_key)
        self._single = [file for file in ordered if by_write and file.write_id is not None]
        self._mixed = [file for file in ordered if not (by_write and file.write_id is not None)]
        homes = pl.DataFrame(
            {"write_id": [file.write_id for file in self._single], "home": range(len(self._single))},
            schema={"write_id": pl.Int64, "home": pl.Int64},
        )
        self._homes = homes.unique("write_id", keep="first")

    def find_homes(self, episodes: pl.DataFrame) -> pl.Series:
        """Return the number of the file of each episode's commit; compacted files come last."""
        matches = episodes.select("write_id").join(self._homes, on="write_id", how="left", maintain_order="left")
        return matches["home"].fill_null(len(self._single))

    def find_files(self, episodes: pl.DataFrame) -> tuple[DataFile, ...]:
        """Return the files that may hold rows of these episodes."""
        write_ids = set(episodes["write_id"].unique().to_list())
        single = [file for file in self._single if file.write_id in write_ids]
        write_ids_found = pl.Series([file.write_id for file in single], dtype=pl.Int64)
        elsewhere = episodes.filter(~pl.col("write_id").is_in(write_ids_found.implode()))
        if elsewhere.is_empty() or not self._mixed:
            return tuple(single)
        ends = elsewhere.group_by("run_id").agg(
            pl.col("collected_group_id").min().alias("low"), pl.col("collected_group_id").max().alias("high")
        )
        stretches = ends.rows()
        return (*single, *(file for file in self._mixed if any(_overlaps(file, *ends) for ends in stretches)))


def _overlaps(file: DataFile, run: str, low: int, high: int) -> bool:
    """Return whether a file may hold rows of groups `low` to `high` of a run; unknown ranges allow all."""
    first_run, last_run = file.ranges.get("run_id", (None, None))
    first, last = file.ranges.get("group_id", (None, None))
    return (
        (first_run is None or first_run <= run)
        and (last_run is None or run <= last_run)
        and (first is None or first <= high)
        and (last is None or low <= last)
    )


def read_rows(
    name: str,
    files: Sequence[DataFile],
    options: Mapping[str, Any],
    columns: Sequence[str | pl.Expr],
    episodes: pl.DataFrame,
    keep: pl.Expr | None = None,
) -> pl.DataFrame:
    """Read the rows of the episodes' groups in file order; rows of other episodes may be among them.

    An expression in `columns` replaces a text while it is read. `options` are Polars' storage options.
    """
    rows = scan_pruned(files, TABLES[name], options)
    if name != "steps" or sum(file.rows for file in files) > episodes["num_steps"].sum():
        groups = episodes["collected_group_id"].unique()
        rows = rows.filter(pl.col("group_id").is_between(groups.min(), groups.max()))
        rows = rows.filter(pl.col("group_id").is_in(groups.implode()))
    if keep is not None:
        rows = rows.filter(keep)
    if name in _WRITTEN_TOGETHER and len({file.hidden_set for file in files}) > 1:
        # Several lakes may hold an episode: the first one's rows count (`lake.read.joined_snapshot`).
        written = ["episode_id", "write_id"]
        rows = rows.join(episodes.lazy().select(written), on=written, how="semi", maintain_order="left")
    return collect_rows(rows.select(columns))


def arrange_steps(steps: pl.DataFrame, episodes: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
    """Return the episodes' steps in canonical order, with `group_id` and `columns` of the episodes; drop other steps.

    Steps come in file order, episodes sorted by (group_id, episode_id).
    """
    ids_N = steps["episode_id"].to_numpy()
    starts_R = np.flatnonzero(np.append(True, ids_N[1:] != ids_N[:-1])) if len(ids_N) else np.zeros(0, np.int64)
    lengths_R = np.diff(starts_R, append=len(ids_N))
    # The rank is the position of the run's episode; -1 for other episodes.
    ids_R, ids_E = ids_N[starts_R], episodes["episode_id"].to_numpy()
    sorter_E = np.argsort(ids_E)
    rank_R: Ints = sorter_E[np.minimum(np.searchsorted(ids_E, ids_R, sorter=sorter_E), len(ids_E) - 1)]
    rank_R[ids_E[rank_R] != ids_R] = -1
    if (rank_R < 0).any() or (np.diff(rank_R) <= 0).any():
        order_R = np.lexsort((steps["step_index"].to_numpy()[starts_R], rank_R))
        order_R = order_R[rank_R[order_R] >= 0]
        starts_R, lengths_R, rank_R = starts_R[order_R], lengths_R[order_R], rank_R[order_R]
        before_R = np.cumsum(lengths_R) - lengths_R
        steps = steps[np.arange(lengths_R.sum()) + np.repeat(starts_R - before_R, lengths_R)]
    rank_N = np.repeat(rank_R, lengths_R).astype(np.uint32)
    index_N = steps["step_index"].to_numpy()
    if ((index_N[1:] < index_N[:-1]) & (rank_N[1:] == rank_N[:-1])).any():  # possible under z-ordering
        order_N = np.lexsort((index_N, rank_N))
        steps, rank_N = steps[order_N], rank_N[order_N]
    return steps.with_columns(episodes[name].gather(rank_N).alias(name) for name in ("group_id", *columns))


def measure_episodes(steps: pl.DataFrame) -> pl.DataFrame:
    """Measure the step numbers, the first state and the decisions of each episode that has steps.

    Takes the result of `arrange_steps` with state_hash, and `taken` and `is_active` if actions were read. Columns:
    episode_id, count, first and last step_index, distinct (step indices), first_state (hash; NULL without a step 0),
    and with `taken` those of `health.hash_decisions`.
    """
    index_N, ids_N = steps["step_index"].to_numpy(), steps["episode_id"].to_numpy()
    opens_N = np.ones(len(ids_N), np.bool_)
    opens_N[1:] = ids_N[1:] != ids_N[:-1]
    episodes = Segments.opening_at(opens_N)
    new_N = opens_N.copy()
    new_N[1:] |= index_N[1:] != index_N[:-1]
    first_E = index_N[episodes.starts_K]
    hash_E = steps["state_hash"].gather(episodes.starts_K)
    figures = pl.DataFrame(
        {
            "episode_id": ids_N[episodes.starts_K],
            "count": episodes.lengths_K,
            "first": first_E,
            "last": index_N[episodes.last_K],
            "distinct": episodes.count(new_N),
            "first_state": hash_E.set(pl.Series(first_E != 0, dtype=pl.Boolean), None),
        }
    )
    if "taken" not in steps.columns:
        return figures
    active_N = steps["is_active"].fill_null(value=True)
    active = steps if active_N.all() else steps.filter(active_N)
    decisions = hash_decisions(active)
    if active is steps:
        return figures.with_columns(decisions["decisions"])
    return figures.join(decisions, on="episode_id", how="left", maintain_order="left")


_PACKAGE = "pipelines.credit"
_IMPORT = re.compile(
    r"^[ \t]*(?:import[ \t]+(?P<whole>[^\n#]+)"
    r"|from[ \t]+(?P<source>[\w.]+)[ \t]+import[ \t]+(?P<names>\([^)]*\)|[^\n#]+))",
    re.MULTILINE,
)
"""Import statements. Parsing every module would take a tenth of a small job's time."""
_COMMENT = re.compile(r"#[^\n]*")


def find_deciding_modules(*roots: ModuleType) -> tuple[ModuleType, ...]:
    """Return the modules and all modules of `pipelines.credit` that they import, also inside functions, recursively."""
    modules: dict[str, ModuleType] = {}
    waiting = list(roots)
    while waiting:
        module = waiting.pop()
        if module.__name__ not in modules:
            modules[module.__name__] = module
            waiting += [import_module(name) for name in _iterate_imports(module)]
    return tuple(modules[name] for name in sorted(modules))


def _iterate_imports(module: ModuleType) -> Iterator[str]:
    for statement in _IMPORT.finditer(inspect.getsource(module)):
        source = statement["source"]
        if source is not None and not source.startswith(_PACKAGE.partition(".")[0]):
            continue
        imports = _COMMENT.sub("", statement["whole"] or statement["names"]).strip("()\n ")
        names = [name.split()[0] for name in imports.split(",") if name.strip()]
        if source is not None:
            names = [dotted if _is_module(dotted := f"{source}.{name}") else source for name in names]
        yield from (name for name in names if name.startswith(f"{_PACKAGE}."))


@cache
def _is_module(name: str) -> bool:
    """Return whether a dotted name is a module of this package."""
    if not name.startswith(f"{_PACKAGE}."):
        return False
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


_FACTS = ("episode_id", "write_id")
_NOT_INPUTS = ("group_id", "collected_group_id", "run_id", "status", "num_steps", SPARE)
"""Columns of selected episodes that follow from `_FACTS`, and the group."""
Words = npt.NDArray[np.uint64]


def hash_groups(episodes: pl.DataFrame, *, of_batch: bool = False, checks: int = 0) -> pl.DataFrame:
    """Hash the input of each group: group_id, input_fingerprint (63 bits), episodes, steps; sorted by group_id.

    Args:
        episodes: rows of `CreditInputs.episodes`, sorted by (group_id, episode_id).
        of_batch: each group depends on all groups, as under a batch-normalised estimator.
        checks: hash of the job's checks and diagnostics.
    """
    groups = Segments.of(episodes, "group_id")
    hash_E = np.zeros(episodes.height, np.uint64)
    for column in (*_FACTS, *sorted(set(episodes.columns) - {*_FACTS, *_NOT_INPUTS})):
        hash_E = splitmix64(hash_E ^ _to_words(episodes[column]))
    # The sum wraps around and does not depend on the order of siblings.
    hash_P = splitmix64(np.add.reduceat(hash_E, groups.starts_K) + groups.lengths_K.astype(np.uint64))
    hash_P = splitmix64(hash_P ^ np.uint64(checks)) if checks else hash_P
    group_P = episodes["group_id"].gather(groups.starts_K)
    if of_batch:
        total = np.array([splitmix64(hash_P ^ _to_words(group_P)).sum(dtype=np.uint64)])
        hash_P = splitmix64(hash_P ^ splitmix64(total))
    return pl.DataFrame(
        {
            "group_id": group_P,
            "input_fingerprint": (hash_P & np.uint64(ids.MASK)).astype(np.int64),
            "episodes": groups.lengths_K,
            "steps": np.add.reduceat(episodes["num_steps"].to_numpy().astype(np.int64), groups.starts_K),
        }
    )


def hash_inputs(groups: pl.DataFrame, **inputs: str | None) -> int:
    """Hash a job's input: the result of `hash_groups`, and further inputs by name, such as the filter."""
    pairs_P2 = groups.select("group_id", "input_fingerprint").to_numpy()
    facts = ids.bytes_hash(pairs_P2.astype("<i8", order="C").tobytes())
    return ids.key_hash("credit", facts, *(part for name in sorted(inputs) for part in (name, inputs[name])))


def _to_words(column: pl.Series) -> Words:
    """Return 64 bits per value; NULL differs from all values."""
    floats = column.dtype.is_float()
    # Adding 0.0 makes -0.0 the 0.0 it equals.
    values = (column.fill_null(0).to_numpy() + 0.0).view(np.uint64) if floats else column.fill_null(0).to_numpy()
    return splitmix64(values.astype(np.uint64)) ^ (column.is_null().to_numpy().astype(np.uint64) * _NULL)


_NULL = np.uint64(0xA0761D6478BD642F)


_GROUP_COLUMNS = ("group_id", "run_id", "job_id", "input_fingerprint")

_JOBS = """
SELECT job_id FROM job_runs WHERE series_id = ? AND status = 'succeeded'
ORDER BY ended_order(sequence, ended_at, job_id)
"""


@dataclass(frozen=True, slots=True)
class GroupChanges:
    """Groups of a series by what a job has to do."""

    changed: pl.DataFrame
    """Groups to compute: group_id, input_fingerprint, episodes, steps."""
    unchanged: pl.DataFrame
    """Rows of the unchanged groups in `credit_groups`, as in `read_newest_groups`."""
    removed: pl.DataFrame
    """Groups that have lost all episodes: group_id, run_id."""

    @property
    def is_empty(self) -> bool:
        """Return whether all groups are unchanged."""
        return self.changed.is_empty() and self.removed.is_empty()


def find_changes(
    snapshot: Snapshot, series_id: int, groups: pl.DataFrame, *, partial: bool = False, force: bool = False
) -> GroupChanges:
    """Compare the result of `hash_groups` with the series; `partial`: these are some of its groups."""
    newest = read_newest_groups(snapshot, series_id, groups["group_id"] if partial else None)
    same = newest.join(groups, on=["group_id", "input_fingerprint"], how="semi")
    if force:
        same = same.clear()
    removed = newest.filter(pl.col("episodes") > 0).join(groups, on="group_id", how="anti")
    if partial:
        removed = removed.clear()
    return GroupChanges(
        changed=groups.join(same, on="group_id", how="anti", maintain_order="left"),
        unchanged=same,
        removed=removed.select("group_id", "run_id").sort("group_id"),
    )


def read_newest_groups(snapshot: Snapshot, series_id: int, among: pl.Series | None = None) -> pl.DataFrame:
    """Read the newest row of each group of a series: input hash, `DIAGNOSED` figures, and the rank of its job's end.

    `among` restricts the groups.
    """
    rows = snapshot.scan("credit_groups").filter(pl.col("series_id") == series_id)
    if among is not None:
        rows = rows.filter(pl.col("group_id").is_in(among.implode()))
    rows = rows.select(*_GROUP_COLUMNS, *DIAGNOSED)
    # The SQL macro `ended_order` defines the order of jobs, independent of clocks.
    jobs = snapshot.sql(_JOBS, [series_id]).with_row_index("ended").lazy()
    newest_last = rows.join(jobs, on="job_id").sort("ended")
    return collect_rows(newest_last.unique("group_id", keep="last"))


def make_empty_rows(groups: pl.DataFrame) -> pl.DataFrame:
    """Make rows of `credit_groups` for groups that have lost all episodes."""
    counts = [
        column.name
        for column in TABLES["credit_groups"].columns
        if column.required and column.name not in ("group_id", "job_id", "series_id", "write_id", "is_dead", "findings")
    ]
    return groups.with_columns(
        pl.lit(value=False).alias("is_dead"), pl.lit("").alias("findings"), *(pl.lit(0).alias(name) for name in counts)
    )
