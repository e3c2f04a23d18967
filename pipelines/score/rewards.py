"""Rewards: one number from the scores of several scorers, written to `scores` under the reward's name.

A reward is a weighted sum of components or one SQL expression over them, defined in TOML. The components' scores stay
unchanged. The version of a reward is the hash of its definition and of its components' versions; its metrics are the
components' values. A run computes only episodes whose components changed since the reward's last job.

The expression is text from a file. DuckDB's parser parses it first, and only the elements of arithmetic formulas are
accepted: constants, component names, comparisons, CASE, and a list of functions. The query then sees one table in
memory; it cannot reach files, the network or settings.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, Literal, Self

import duckdb
import msgspec
import polars as pl
from pydantic import BaseModel, Field, model_validator

from lake import ids
from lake.errors import ContractError, UsageError
from lake.judgements.scores import read_current_versions
from lake.judgements.selections import parse_expression, select_where
from lake.lake import Lake
from lake.read.episodes import KEYS
from lake.read.parquet import collect_rows
from lake.read.snapshot import Snapshot
from lake.settings import read_section, validate
from lake.write import jobs
from lake.write.jobs import Job
from pipelines.score.job import confirm_version
from pipelines.score.rows import EXAMPLES
from pipelines.score.scorers import SCORERS

OPERATORS = ("+", "-", "*", "/", "//", "%", "**", "^")
ROUNDING = ("abs", "ceil", "ceiling", "floor", "round", "sign", "trunc", "greatest", "least")
CURVES = ("cos", "exp", "ln", "log", "log10", "log2", "pow", "power", "sin", "sqrt", "tanh")
CHOICES = ("coalesce", "if", "ifnull", "isfinite", "isinf", "isnan", "nullif")
FUNCTIONS = frozenset((*OPERATORS, *ROUNDING, *CURVES, *CHOICES))
"""Functions and operators that an expression may use."""
MOST_CHARACTERS = 4_000
_CLASSES = frozenset(("BETWEEN", "CASE", "COLUMN_REF", "COMPARISON", "CONJUNCTION", "CONSTANT", "FUNCTION", "OPERATOR"))
_NUMBERS = frozenset(("BOOLEAN", "TINYINT", "SMALLINT", "INTEGER", "BIGINT", "FLOAT", "DOUBLE"))


class Expression:
    """A checked expression over the components `names`.

    UsageError if it is not one expression, uses a forbidden element or an unknown column, or is not numeric.
    """

    def __init__(self, text: str, names: Sequence[str]) -> None:
        self.text = text
        self._names = tuple(names)
        with _connect() as connection:
            _require_formula(connection, text, self._names)
            unknown = pl.DataFrame(
                {name: [None] for name in self._names}, schema=dict.fromkeys(self._names, pl.Float64)
            )
            try:
                kind = str(_query(connection, f"SELECT typeof(({text}\n)) FROM components", unknown).fetchall()[0][0])
            except duckdb.Error as error:
                raise _make_sql_error(text, " ".join(str(error).split())) from error
            if kind not in _NUMBERS and not kind.startswith("DECIMAL"):
                raise _make_sql_error(text, f"it gives {kind}, not a number")

    def values(self, components: pl.DataFrame) -> pl.Series:
        """Return the value of every row, float64, from Float64 components; NULL where SQL gives NULL or fails."""
        numbered = components.select(self._names).with_row_index("place")
        query = f"SELECT place, TRY(CAST(({self.text}\n) AS DOUBLE)) AS value FROM components"
        with _connect() as connection:
            rows = pl.DataFrame(_query(connection, query, numbered).to_arrow_table())
        return rows.sort("place").get_column("value").cast(pl.Float64)


def _connect() -> duckdb.DuckDBPyConnection:
    """Return a connection that reaches only the frames registered in it."""
    settings: dict[str, str | bool | int | float | list[str]] = {
        "enable_external_access": False,
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
        "allow_community_extensions": False,
        "python_enable_replacements": False,
        "temp_directory": "",
    }
    connection = duckdb.connect(":memory:", config=settings)
    connection.execute("SET lock_configuration = true")
    return connection


def _query(connection: duckdb.DuckDBPyConnection, query: str, frame: pl.DataFrame) -> duckdb.DuckDBPyRelation:
    connection.register("components", frame.to_arrow())
    return connection.sql(query)


def _require_formula(connection: duckdb.DuckDBPyConnection, text: str, names: Sequence[str]) -> None:
    if len(text) > MOST_CHARACTERS:
        raise _make_sql_error(text, f"it has {len(text):,} characters; valid: at most {MOST_CHARACTERS:,}")
    try:
        tree = parse_expression(connection, text)
    except ValueError as error:
        raise _make_sql_error(text, str(error)) from error
    if tree is None:
        raise _make_sql_error(text, "it is more than one expression")
    components = {name.lower() for name in names}
    for node in _walk_nodes(tree):
        kind = node["class"]
        if kind not in _CLASSES:
            raise _make_sql_error(text, f"it uses {kind}, which no formula over scores needs")
        if kind == "FUNCTION" and (node["function_name"].lower() not in FUNCTIONS or node.get("schema")):
            raise _make_sql_error(text, f"it uses {node['function_name']!r}; valid: {' '.join(sorted(FUNCTIONS))}")
        columns = node["column_names"] if kind == "COLUMN_REF" else ()
        if columns and (len(columns) > 1 or columns[0].lower() not in components):
            name = ".".join(columns)
            raise _make_sql_error(text, f"it names {name!r}; valid: the components {', '.join(names)}")


def _walk_nodes(tree: Any) -> Iterator[dict[str, Any]]:
    stack = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            if "class" in node:
                yield node
            stack += node.values()
        elif isinstance(node, list):
            stack += node


def _make_sql_error(text: str, why: str) -> UsageError:
    quoted = text if len(text) <= 120 else f"{text[:117]}..."
    return UsageError(f"sql {quoted!r}: {why}. Write one numeric expression over the components' scores")


_RESERVED = frozenset(("episode_id", "step_index", "value", "place"))


class Component(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """One scorer's contribution to a reward."""

    scorer: str = Field(min_length=1)
    """Name in `scores.scorer`, or name@version; without a version, the one that was written last."""
    weight: float = Field(1.0, strict=True)
    """Factor in the weighted sum; not used with `sql`."""
    name: str = Field(default="", pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$")
    """Name in `sql` and in the metrics; empty: the scorer's name, where that is a word."""
    of: Literal["same", "episode"] = "same"
    """At steps: the scorer's value of the step, or of its whole episode."""

    @model_validator(mode="before")
    @classmethod
    def _read_text(cls, field: Any) -> Any:
        """Read a text as a scorer of weight 1."""
        return {"scorer": field} if isinstance(field, str) else field

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if self.scorer.startswith("@") or self.scorer.endswith("@"):
            msg = f"{self.scorer!r} is not a scorer; write NAME or NAME@VERSION"
            raise ValueError(msg)
        if self.name.lower() in _RESERVED:
            msg = f"a component cannot be called {self.name!r}; choose another name"
            raise ValueError(msg)
        return self

    @property
    def scorer_name(self) -> str:
        """The scorer without its version."""
        return self.scorer.rpartition("@")[0] or self.scorer

    @property
    def version(self) -> str | None:
        """The requested version."""
        return self.scorer.rpartition("@")[2] if "@" in self.scorer else None

    @property
    def alias(self) -> str:
        """Name in `sql` and in the metrics."""
        return self.name or self.scorer_name


class RewardDefinition(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """A reward: sum of weight * score over the components, or an expression over their scores.

    With `on_null = "renormalise"` the weights of the known components are scaled up to the sum of all weights:
    sum over known of w v * (sum of w / sum over known of w). Without any known component the reward is unknown.
    """

    name: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*$", max_length=200)
    """Name in TOML and in `scores.scorer`."""
    components: tuple[Component, ...] = Field(min_length=1)
    """Scores that the reward combines."""
    sql: str | None = None
    """SQL expression over the components' names instead of the weighted sum, for example `-power(one - other, 2)`."""
    on_null: Literal["null", "renormalise"] = "null"
    """An unknown component makes the sum unknown, or is left out with its weight."""
    level: Literal["episode", "both"] = "episode"
    """Rewards for every episode, or for episodes and the steps that a component scored."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        aliases = [component.alias for component in self.components]
        if len({alias.lower() for alias in aliases}) < len(aliases):
            msg = f"components {aliases} have equal names; give each a different `name` (case does not count)"
            raise ValueError(msg)
        if self.name in SCORERS:
            msg = f"{self.name!r} is the name of a built-in scorer; call the reward something else"
            raise ValueError(msg)
        if self.name in [component.scorer_name for component in self.components]:
            msg = f"{self.name!r} would be a component of itself"
            raise ValueError(msg)
        if self.level == "both" and all(component.of == "episode" for component in self.components):
            msg = 'level is "both", but no component scores steps: one of them needs of = "same"'
            raise ValueError(msg)
        if self.sql is None:
            self._check_weights()
        else:
            self._check_sql(aliases, self.sql)
        return self

    def _check_weights(self) -> None:
        weights = [component.weight for component in self.components]
        if 0.0 in weights:
            msg = "a component of weight 0 changes nothing, unless it is unknown; leave it out"
            raise ValueError(msg)
        if self.on_null == "renormalise" and min(weights) < 0.0:
            msg = 'on_null = "renormalise" needs positive weights: others could cancel out'
            raise ValueError(msg)

    def _check_sql(self, aliases: list[str], sql: str) -> None:
        if any(component.weight != 1.0 for component in self.components) or self.on_null != "null":
            msg = "`sql` sets the weights and handles unknown components (coalesce); leave out `weight` and `on_null`"
            raise ValueError(msg)
        if faulty := [alias for alias in aliases if not alias.isidentifier() or alias.lower() in _RESERVED]:
            msg = f"`sql` cannot name the components {faulty}; give each a `name` of letters, digits and _"
            raise ValueError(msg)
        try:
            Expression(sql, aliases)
        except UsageError as error:
            raise ValueError(str(error)) from error

    def hash_versions(self, versions: dict[str, str]) -> str:
        """Return the reward's version: hash of its definition and its components' versions, as 13 characters."""
        definition = msgspec.json.encode(self.model_dump(mode="json"), order="deterministic").decode()
        resolved = [versions[component.alias] for component in self.components]
        return ids.to_text(ids.key_hash("reward", definition, *resolved))


def load_reward(path: str, name: str) -> RewardDefinition:
    """Return the reward [reward.NAME] of a TOML file. UsageError if it is missing or its definition is wrong."""
    rewards = read_section(path, ("reward",))
    if name in rewards and not isinstance(rewards[name], dict):
        msg = (
            f"{path}: {name} = {rewards[name]!r:.60} is not a reward; write a section [reward.{name}] with `components`"
        )
        raise UsageError(msg)
    if name not in rewards:
        sections = sorted(section for section, fields in rewards.items() if isinstance(fields, dict))
        valid = ", ".join(sections) or "none; write [reward.NAME] with `components`"
        msg = f"{path} has no reward {name!r}; it has {valid}"
        raise UsageError(msg)
    return validate(RewardDefinition, {"name": name} | rewards[name], f"{path}, [reward.{name}]: ")


def make_rubric_agreement(
    name: str = "rubric_agreement",
    *,
    generated: str = "generated_rubric",
    true: str = "true_rubric",
    distance: Literal["squared", "absolute"] = "squared",
    terms: str | None = None,
    terms_weight: float = 0.1,
) -> RewardDefinition:
    """Return the reward of a policy that writes rubrics: -(g - t)^2 or -|g - t|, plus terms of the rubric itself.

    g and t are scores of the same outputs under the generated and the true rubric, by two scorers (LLM judges, say).

    `generated` and `true` are scorers, or scorer@version, that apply the two rubrics. `terms` is a scorer of quality,
    efficiency and coverage (`rubric_terms`); None leaves the terms out.
    """
    agreement = "-power(generated - true_score, 2)" if distance == "squared" else "-abs(generated - true_score)"
    components = [Component(scorer=generated, name="generated"), Component(scorer=true, name="true_score")]
    if terms is not None:
        components.append(Component(scorer=terms, name="terms"))
        agreement += f" + {terms_weight!r} * terms"
    return RewardDefinition(name=name, components=tuple(components), sql=agreement)


_SCORER = ["scorer", "scorer_version"]


@dataclass(frozen=True)
class ResolvedReward:
    """A reward's components with their versions."""

    definition: RewardDefinition
    versions: dict[str, str]
    """alias -> version."""
    newest: pl.DataFrame
    """scorer, scorer_version, episode_id, job_id, sequence: the newest succeeded job of each version and episode."""

    @property
    def components(self) -> dict[str, str]:
        """Alias -> scorer@version."""
        return {part.alias: f"{part.scorer_name}@{self.versions[part.alias]}" for part in self.definition.components}

    @property
    def version(self) -> str:
        """Version of the reward."""
        return self.definition.hash_versions(self.versions)


def resolve_versions(snapshot: Snapshot, definition: RewardDefinition) -> ResolvedReward:
    """Find each component's requested or current version.

    UsageError if a component has no scores, or another kind of job uses the reward's name.
    """
    # Old jobs have no sequence; they come first.
    succeeded = snapshot.scan("jobs").filter(pl.col("event") == "succeeded").group_by("job_id")
    jobs = collect_rows(succeeded.agg(pl.col("kind").first(), pl.col("sequence").fill_null(-1).max()))
    named_rows = snapshot.scan("scores").filter(pl.col("scorer") == definition.name).select(pl.col("job_id").unique())
    kinds = collect_rows(named_rows.join(jobs.lazy(), on="job_id")).get_column("kind").unique().to_list()
    if other_kinds := sorted(set(kinds) - {"reward"}):
        msg = (
            f"`scores` holds rows of {definition.name!r} from jobs of kind {', '.join(other_kinds)}; "
            "call the reward something else"
        )
        raise UsageError(msg)
    names = sorted({component.scorer_name for component in definition.components})
    rows = snapshot.scan("scores").filter(pl.col("scorer").is_in(names))
    newest = collect_rows(
        rows.join(jobs.lazy(), on="job_id")
        .group_by(*_SCORER, "episode_id")
        .agg(pl.col("job_id", "sequence").sort_by("sequence", "job_id").last())
    )
    current = read_current_versions(snapshot)
    scored: set[tuple[str, str]] = {(name, version) for name, version in newest.select(_SCORER).unique().iter_rows()}
    versions = {}
    for component in definition.components:
        version = component.version or current.get(component.scorer_name)
        if version is None or (component.scorer_name, version) not in scored:
            raise _make_unscored_error(snapshot, component, scored)
        versions[component.alias] = version
    pairs = {(component.scorer_name, versions[component.alias]) for component in definition.components}
    used = pl.DataFrame(sorted(pairs), schema=_SCORER, orient="row")
    return ResolvedReward(definition, versions, newest.join(used, on=_SCORER, how="semi"))


def _make_unscored_error(snapshot: Snapshot, component: Component, scored: set[tuple[str, str]]) -> UsageError:
    versions = sorted(version for name, version in scored if name == component.scorer_name)
    if versions:
        msg = f"no scores of {component.scorer!r}; its versions in this lake: {', '.join(versions)}"
        return UsageError(msg)
    names = (
        collect_rows(snapshot.scan("scores").select(pl.col("scorer").unique())).get_column("scorer").sort().to_list()
    )
    msg = (
        f"no scores of {component.scorer!r}; this lake has {', '.join(names) or 'no scores at all'}. "
        f"Score first: `trajlake score {component.scorer_name}`"
    )
    return UsageError(msg)


def find_outdated(snapshot: Snapshot, resolved: ResolvedReward, series_id: int, episodes: pl.DataFrame) -> pl.DataFrame:
    """Return the episodes whose components were scored after the reward's newest job read them.

    A job reads exactly the terminal rows below its version of `jobs`. Every terminal row carries the version that it
    was appended to (`sequence`). So a comparison of the two needs no clock and misses no race.
    """
    jobs = snapshot.scan("jobs").filter(pl.col("event") == "started", pl.col("series_id") == series_id)
    read_version = pl.col("input_snapshot").str.json_path_match("$.jobs").cast(pl.Int64)
    rows = snapshot.scan("scores").filter(pl.col("series_id") == series_id).select("episode_id", "job_id").unique()
    done = collect_rows(
        rows.join(jobs.select("job_id", read_version=read_version), on="job_id")
        .group_by("episode_id")
        .agg(pl.col("read_version").max())
    )
    changed = resolved.newest.group_by("episode_id").agg(pl.col("sequence").max())
    is_newer = (pl.col("sequence") >= pl.col("read_version")).fill_null(False)
    return (
        episodes.join(done, on="episode_id", how="left", maintain_order="left")
        .join(changed, on="episode_id", how="left", maintain_order="left")
        .filter(pl.col("read_version").is_null() | is_newer)
        .select(episodes.columns)
    )


def read_component_rows(snapshot: Snapshot, resolved: ResolvedReward, episodes: pl.DataFrame) -> pl.DataFrame:
    """Return the components' scores side by side, for episodes (episode_id, group_id, run_id) that fit in memory.

    Columns: episode_id, step_index and, for each component, its alias (float64) and `error of <alias>` (NULL for a
    known score). A row per episode, and at level `both` a row per step that a component scored. Sorted.
    """
    definition = resolved.definition
    groups = episodes.get_column("group_id")
    newest = resolved.newest.join(episodes.select("episode_id"), on="episode_id", how="semi")
    rows = snapshot.scan("scores").filter(
        pl.col("run_id").is_in(episodes.get_column("run_id").unique().to_list()),
        pl.col("group_id").is_between(groups.min(), groups.max()),
        pl.col("scorer").is_in(newest.get_column("scorer").unique().to_list()),
    )
    job_keys = [*_SCORER, "episode_id", "job_id"]
    rows = rows.join(newest.select(job_keys).lazy(), on=job_keys, how="semi")
    scores = collect_rows(rows.select(*_SCORER, "episode_id", "step_index", "value", "reason", "error"))
    keys = episodes.select("episode_id").sort("episode_id").with_columns(step_index=pl.lit(None, pl.Int32))
    frames = [_join_components(keys, scores, resolved, of_steps=False)]
    if definition.level == "both":
        at_steps = pl.concat(
            _select_component(scores, component, resolved)
            .filter(pl.col("step_index").is_not_null())
            .select("episode_id", "step_index")
            for component in definition.components
            if component.of == "same"
        )
        frames.append(_join_components(at_steps.unique(), scores, resolved, of_steps=True))
    return pl.concat(frames).sort("episode_id", "step_index", nulls_last=False)


def _join_components(
    keys: pl.DataFrame, scores: pl.DataFrame, resolved: ResolvedReward, *, of_steps: bool
) -> pl.DataFrame:
    for component in resolved.definition.components:
        alias = component.alias
        same_step = of_steps and component.of == "same"
        on = ["episode_id", "step_index"] if same_step else ["episode_id"]
        is_step = pl.col("step_index").is_not_null()
        rows = _select_component(scores, component, resolved).filter(is_step if same_step else ~is_step)
        rows = rows.select(*on, pl.col("value").alias(alias), why=pl.coalesce("error", "reason"))
        if (duplicates := rows.filter(pl.struct(on).is_duplicated())).height:
            row = duplicates.row(0, named=True)
            msg = (
                f"table `scores`: one job wrote {resolved.components[alias]} of episode "
                f"{ids.to_text(row['episode_id'])}, step {row.get('step_index')}, more than once; score the episode "
                "again with --force"
            )
            raise ContractError(msg)
        missing = pl.lit(f"no score of {resolved.components[alias]}")
        error = pl.when(pl.col(alias).is_null()).then(pl.coalesce("why", missing))
        keys = (
            keys.join(rows, on=on, how="left", maintain_order="left")
            .with_columns(error.alias(name_error_column(alias)))
            .drop("why")
        )
    return keys


def name_error_column(alias: str) -> str:
    """Return the name of the column with the reason why a component is unknown."""
    return f"error of {alias}"


def _select_component(scores: pl.DataFrame, component: Component, resolved: ResolvedReward) -> pl.DataFrame:
    version = resolved.versions[component.alias]
    return scores.filter(pl.col("scorer") == component.scorer_name, pl.col("scorer_version") == version)


def compute_rewards(components: pl.DataFrame, definition: RewardDefinition) -> pl.DataFrame:
    """Return the rewards of rows: value, reason, error and metrics (as in `scores`), in the order of the rows.

    `components` comes from `read_component_rows`; it may be any frame with a Float64 column of each component's name,
    and optionally `error of NAME`. If an unknown component prevents a reward, `reason` names it. If a formula over
    known components gives no number, `error` says so.
    """
    aliases = [component.alias for component in definition.components]
    errors = {
        alias: pl.col(name_error_column(alias))
        if name_error_column(alias) in components.columns
        else pl.lit(None, pl.String)
        for alias in aliases
    }
    unknown = pl.concat_list(
        pl.when(pl.col(alias).is_null()).then(
            pl.concat_str(pl.lit(alias), pl.lit(" ("), pl.coalesce(errors[alias], pl.lit("NULL")), pl.lit(")"))
        )
        for alias in aliases
    ).list.drop_nulls()
    unknown_text = unknown.list.join("; ")
    if definition.sql is None:
        rewards = components.with_columns(value=_sum_weighted(definition))
    else:
        rewards = components.with_columns(value=Expression(definition.sql, aliases).values(components))
    finite = pl.col("value").is_finite().fill_null(False)
    is_missing = unknown.list.len() > 0
    is_partial = is_missing & pl.lit(definition.on_null == "renormalise")
    return rewards.with_columns(
        # Store minus zero as zero: readers would show it as a different number.
        value=pl.when(finite).then(pl.when(pl.col("value") == 0.0).then(0.0).otherwise("value")),
        reason=pl.when(finite & is_partial)
        .then(pl.format("renormalised without {}", unknown_text))
        .when(~finite & is_missing)
        .then(pl.format("unknown: {}", unknown_text)),
        error=pl.when(~finite & ~is_missing).then(pl.lit("the formula gives no finite number")),
        metrics=pl.struct(aliases).struct.json_encode(),
    ).drop(*aliases, *(name_error_column(alias) for alias in aliases), strict=False)


def _sum_weighted(definition: RewardDefinition) -> pl.Expr:
    """Return the weighted sum, added in the order of the components."""
    terms = [(component.weight, pl.col(component.alias)) for component in definition.components]
    if definition.on_null == "null":
        return reduce(add, (weight * score for weight, score in terms))
    total = sum(weight for weight, _ in terms)
    present = reduce(add, (weight * score.is_not_null().cast(pl.Float64) for weight, score in terms))
    weighted = reduce(add, (weight * score.fill_null(0.0) for weight, score in terms))
    complete = pl.all_horizontal(score.is_not_null() for _, score in terms)
    return pl.when(complete).then(weighted).when(present > 0.0).then(weighted * (total / present))


KIND = "reward"
EPISODES_A_PART = 50_000
"""Episodes to compute at once."""


class RewardReport(BaseModel, frozen=True):
    """Report of a reward job."""

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
    """Selected episodes."""
    unchanged: int
    """Selected episodes whose reward is up to date."""
    rows: int = 0
    """Rows written, for episodes and for steps."""
    with_reward: int = 0
    """Computed episodes with a reward."""
    unknown: int = 0
    """Computed episodes without a reward."""
    known_steps: int = 0
    """Scored steps with a reward."""
    unknown_steps: int = 0
    """Scored steps without a reward."""
    made_current: bool = False
    """Nothing was written and another version was current: this version is current again."""
    reasons: dict[str, int] = Field(default_factory=dict)
    """The most frequent reasons of unknown rewards with their numbers of episodes, most frequent first."""


def run_reward(
    lake: Lake, definition: RewardDefinition, *, where: str | None = None, force: bool = False
) -> RewardReport:
    """Compute a reward and write it to `scores` under its name; `force`: also where no component changed.

    Raises:
        UsageError: a bad predicate over `episodes`, or a component without scores.
        DataRefusedError: no episode is selected.
        ContractError: a score job wrote a component of an episode or step twice.
    """
    snapshot = lake.snapshot()
    episodes = select_where(snapshot, (*KEYS, "write_id"), where).sort(KEYS)
    resolved = resolve_versions(snapshot, definition)
    series = {"reward": definition.name, "version": resolved.version}
    code = (sys.modules[__name__],)
    series_id = jobs.hash_series(KIND, series, code)
    pending = episodes if force else find_outdated(snapshot, resolved, series_id, episodes)
    report = RewardReport(
        job_id=None,
        series_id=series_id,
        version=resolved.version,
        components=resolved.components,
        skipped=pending.is_empty(),
        episodes=episodes.height,
        unchanged=episodes.height - pending.height,
    )
    parameters = series | {
        "definition": definition.model_dump(mode="json"),
        "components": resolved.components,
        "where": where,
    }
    if pending.is_empty():
        made_current = confirm_version(
            lake, definition.name, resolved.version, kind=KIND, series=series, code=code, parameters=parameters
        )
        return report.model_copy(update={"made_current": made_current})
    fingerprint = snapshot.fingerprint(pending, reward=resolved.version, scores=_hash_scores(resolved, pending))
    job = lake.job(
        kind=KIND,
        parameters=parameters | {"force": force},
        series=series,
        code=code,
        fingerprint=fingerprint,
        snapshot=snapshot,
    )
    with job:
        sizes, reasons = _write_rewards(job, snapshot, resolved, pending)
        job.counts |= {
            "rows_in": episodes.height,
            "rows_out": sizes.total(),
            "unchanged": report.unchanged,
            "known": sizes[False, True],
            "known_steps": sizes[True, True],
        }
    return report.model_copy(
        update={
            "job_id": job.job_id,
            "rows": sizes.total(),
            "with_reward": sizes[False, True],
            "unknown": sizes[False, False],
            "known_steps": sizes[True, True],
            "unknown_steps": sizes[True, False],
            "reasons": dict(reasons.most_common(EXAMPLES)),
        }
    )


def _write_rewards(
    job: Job, snapshot: Snapshot, resolved: ResolvedReward, episodes: pl.DataFrame
) -> tuple[Counter[tuple[bool, bool]], Counter[str]]:
    """Compute and write rewards, a part of the episodes at a time.

    Return the numbers of rows by (of a step, with a reward), and the reasons of unknown episodes with their numbers.
    """
    sizes: Counter[tuple[bool, bool]] = Counter()
    reasons: Counter[str] = Counter()
    is_step, has_reward = pl.col("step_index").is_not_null(), pl.col("value").is_not_null()
    for part in episodes.iter_slices(EPISODES_A_PART):
        rewards = compute_rewards(read_component_rows(snapshot, resolved, part), resolved.definition)
        rows = rewards.join(part.select(KEYS), on="episode_id", how="left", maintain_order="left").with_columns(
            scorer=pl.lit(resolved.definition.name), scorer_version=pl.lit(resolved.version)
        )
        job.write("scores", rows.sort("run_id", "group_id", "episode_id", "step_index", nulls_last=False))
        row_counts = rows.group_by(is_step.alias("step"), has_reward.alias("known")).len()
        sizes.update({(of_step, is_known): count for of_step, is_known, count in row_counts.iter_rows()})
        why = rows.filter(~is_step & ~has_reward).group_by(pl.coalesce("error", "reason"), maintain_order=True).len()
        reasons.update(dict(why.iter_rows()))
    return sizes, reasons


def _hash_scores(resolved: ResolvedReward, episodes: pl.DataFrame) -> int:
    used = resolved.newest.join(episodes.select("episode_id"), on="episode_id", how="semi").sort(
        "scorer", "scorer_version", "episode_id"
    )
    versions = ",".join(f"{name}@{version}" for name, version in sorted(resolved.components.items()))
    pairs_E2 = used.select("episode_id", "job_id").to_numpy()
    return ids.key_hash(versions, ids.bytes_hash(pairs_E2.astype("<i8", order="C").tobytes()))
