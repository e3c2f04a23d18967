"""What a reward is made of: weighted components or one SQL expression over them, from TOML.

The expression is text from a file, so DuckDB's own parser takes it apart before it is run, and only what an arithmetic
formula needs is let through: constants, the components' names, comparisons, CASE, and a list of functions. What is run
then sees one table in memory: no file, no network, no setting can be reached.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, Self

import duckdb
import msgspec
import polars as pl
from pydantic import BaseModel, Field, model_validator

from lake import ids
from lake.errors import UsageError
from lake.judgements.predicates import parsed_expression
from lake.settings import from_file, validated
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

    UsageError if it is not one expression, uses what it may not, names another column, or gives no number.
    """

    def __init__(self, text: str, names: Sequence[str]) -> None:
        self.text = text
        self._names = tuple(names)
        with _connection() as connection:
            _check(connection, text, self._names)
            unknown = pl.DataFrame(
                {name: [None] for name in self._names}, schema=dict.fromkeys(self._names, pl.Float64)
            )
            try:
                kind = str(_run(connection, f"SELECT typeof(({text}\n)) FROM components", unknown).fetchall()[0][0])
            except duckdb.Error as error:
                raise _refused(text, " ".join(str(error).split())) from error
            if kind not in _NUMBERS and not kind.startswith("DECIMAL"):
                raise _refused(text, f"it gives {kind}, not a number")

    def values(self, components: pl.DataFrame) -> pl.Series:
        """Its value in every row, float64, from Float64 components; NULL where SQL says so, or it has none."""
        placed = components.select(self._names).with_row_index("place")
        query = f"SELECT place, TRY(CAST(({self.text}\n) AS DOUBLE)) AS value FROM components"
        with _connection() as connection:
            found = pl.DataFrame(_run(connection, query, placed).to_arrow_table())
        return found.sort("place").get_column("value").cast(pl.Float64)


def _connection() -> duckdb.DuckDBPyConnection:
    """A connection that reaches nothing but what is registered in it."""
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


def _run(connection: duckdb.DuckDBPyConnection, query: str, frame: pl.DataFrame) -> duckdb.DuckDBPyRelation:
    connection.register("components", frame.to_arrow())
    return connection.sql(query)


def _check(connection: duckdb.DuckDBPyConnection, text: str, names: Sequence[str]) -> None:
    if len(text) > MOST_CHARACTERS:
        raise _refused(text, f"it has {len(text):,} characters; valid: at most {MOST_CHARACTERS:,}")
    known = {name.lower() for name in names}
    for part in _parts(_parsed(connection, text)):
        kind = part["class"]
        if kind not in _CLASSES:
            raise _refused(text, f"it uses {kind}, which no formula over scores needs")
        if kind == "FUNCTION" and (part["function_name"].lower() not in FUNCTIONS or part.get("schema")):
            raise _refused(text, f"it uses {part['function_name']!r}; valid: {' '.join(sorted(FUNCTIONS))}")
        if kind == "COLUMN_REF" and (len(part["column_names"]) > 1 or part["column_names"][0].lower() not in known):
            name = ".".join(part["column_names"])
            raise _refused(text, f"it names {name!r}; valid: the components {', '.join(names)}")


def _parsed(connection: duckdb.DuckDBPyConnection, text: str) -> dict[str, Any]:
    """The expression's tree, if the text is one expression and nothing else."""
    try:
        tree = parsed_expression(connection, text)
    except ValueError as error:
        raise _refused(text, str(error)) from error
    if tree is None:
        raise _refused(text, "it is more than one expression")
    return tree


def _parts(tree: Any) -> Iterator[dict[str, Any]]:
    stack = [tree]
    while stack:
        part = stack.pop()
        if isinstance(part, dict):
            if "class" in part:
                yield part
            stack += part.values()
        elif isinstance(part, list):
            stack += part


def _refused(text: str, why: str) -> UsageError:
    shown = text if len(text) <= 120 else f"{text[:117]}..."
    return UsageError(f"sql {shown!r}: {why}. Write one numeric expression over the components' scores")


_RESERVED = frozenset(("episode_id", "step_index", "value", "place"))


class Component(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """One scorer's share of a reward."""

    scorer: str = Field(min_length=1)
    """Name in `scores.scorer`, or name@version; without a version, the one that was written last."""
    weight: float = Field(1.0, strict=True)
    """Factor in the weighted sum; `sql` weighs by itself."""
    name: str = Field(default="", pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$")
    """How `sql` and the metrics call it; empty: the scorer's name, where that is a word."""
    of: Literal["same", "episode"] = "same"
    """At steps: the scorer's value of the step, or of its whole episode."""

    @model_validator(mode="before")
    @classmethod
    def _bare(cls, value: Any) -> Any:
        """A text is a scorer of weight 1."""
        return {"scorer": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _named(self) -> Self:
        if self.scorer.startswith("@") or self.scorer.endswith("@"):
            msg = f"{self.scorer!r} is no scorer; write NAME or NAME@VERSION"
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
        """The version that was asked for."""
        return self.scorer.rpartition("@")[2] if "@" in self.scorer else None

    @property
    def alias(self) -> str:
        """How `sql` and the metrics call it."""
        return self.name or self.scorer_name


class RewardDefinition(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """A reward: sum of weight * score over the components, or an expression over their scores.

    With `on_null = "renormalise"` the weights of the known components are scaled up to the sum of all weights:
    sum over known of w v * (sum of w / sum over known of w). Without any known component it stays unknown.
    """

    name: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*$", max_length=200)
    """Its name, in TOML and in `scores.scorer`."""
    components: tuple[Component, ...] = Field(min_length=1)
    """The scores that it is made of."""
    sql: str | None = None
    """SQL expression over the components' names instead of the weighted sum, for example `-power(one - other, 2)`."""
    on_null: Literal["null", "renormalise"] = "null"
    """An unknown component makes the sum unknown, or is left out with its weight."""
    level: Literal["episode", "both"] = "episode"
    """What gets a reward: every episode, or these and the steps that a component scored."""

    @model_validator(mode="after")
    def _sound(self) -> Self:
        aliases = [component.alias for component in self.components]
        if len({alias.lower() for alias in aliases}) < len(aliases):
            msg = f"components {aliases} are not told apart by their names; give each a `name` (case does not count)"
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
            msg = "`sql` weighs the components, and says what becomes of unknown ones (coalesce), by itself"
            raise ValueError(msg)
        if faulty := [alias for alias in aliases if not alias.isidentifier() or alias.lower() in _RESERVED]:
            msg = f"`sql` cannot name the components {faulty}; give each a `name` of letters, digits and _"
            raise ValueError(msg)
        try:
            Expression(sql, aliases)
        except UsageError as error:
            raise ValueError(str(error)) from error

    def versioned(self, versions: dict[str, str]) -> str:
        """Version of the reward: hash of its definition and its components' versions (by alias), as 13 characters."""
        definition = msgspec.json.encode(self.model_dump(mode="json"), order="deterministic").decode()
        resolved = [versions[component.alias] for component in self.components]
        return ids.to_text(ids.key_hash("reward", definition, *resolved))


def load_reward(path: str, name: str) -> RewardDefinition:
    """The reward [reward.NAME] of a TOML file; UsageError without such a file or section, or for a wrong definition."""
    rewards = from_file(path, ("reward",))
    if name in rewards and not isinstance(rewards[name], dict):
        msg = f"{path}: {name} = {rewards[name]!r:.60} is no reward; write a section [reward.{name}] with `components`"
        raise UsageError(msg)
    if name not in rewards:
        sections = sorted(each for each, found in rewards.items() if isinstance(found, dict))
        valid = ", ".join(sections) or "none; write [reward.NAME] with `components`"
        msg = f"{path} has no reward {name!r}; it has {valid}"
        raise UsageError(msg)
    return validated(RewardDefinition, {"name": name} | rewards[name], f"{path}, [reward.{name}]: ")


def rubric_agreement(
    name: str = "rubric_agreement",
    *,
    generated: str = "generated_rubric",
    true: str = "true_rubric",
    distance: Literal["squared", "absolute"] = "squared",
    terms: str | None = None,
    terms_weight: float = 0.1,
) -> RewardDefinition:
    """The reward of a policy that writes rubrics: -(g - t)^2 or -|g - t|, plus what its rubric looks like.

    g and t are scores of the same outputs under the generated and the true rubric, by two scorers (LLM judges, say).

    `generated` and `true` are scorers, or scorer@version, that apply the two rubrics; `terms` is one of quality,
    efficiency and coverage (`rubric_terms`), None leaves them out.
    """
    agreement = "-power(generated - true_score, 2)" if distance == "squared" else "-abs(generated - true_score)"
    components = [Component(scorer=generated, name="generated"), Component(scorer=true, name="true_score")]
    if terms is not None:
        components.append(Component(scorer=terms, name="terms"))
        agreement += f" + {terms_weight!r} * terms"
    return RewardDefinition(name=name, components=tuple(components), sql=agreement)
