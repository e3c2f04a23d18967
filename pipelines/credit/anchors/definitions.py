"""Anchor definitions: frozen configurations, stored with the job, that give each step a key.

A definition is also a stage: `apply` changes the states, so a chain of definitions is a definition. Text stages replace
texts, filters make some states unknown, and key stages decide the key and drop the texts. Texts are long and repeat, so
rows hold a code (the stored `state_hash` if present), and a table holds each code's text once.

Substitutions and patterns use the regex crate of Rust through Polars, in time linear in the text. It therefore has no
look-around and no back-references, and refuses an expression that compiles to more than 10 MB.

A filter excludes states: they lose their key, and A_S is exactly 0 there.

The JSON form of a tool result ignores order and spelling: sorted keys, no spaces, without dropped fields, and with
exact numbers. 1, 1.0, 1e0 and 10e-1 are equal, and so are 0.1 and 0.10. No number becomes a float, so different numbers
stay different (under RFC 8785 they may not).

Axes: `_N` rows in canonical order, `_V` distinct texts.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NoReturn, Self, TypeAlias

import numpy as np
import polars as pl
from polars.exceptions import ComputeError
from pydantic import BaseModel, Field, model_validator

from lake.errors import ContractError, UsageError
from lake.ids import bytes_hash, key_hash
from pipelines.credit.steps import Bools, Segments, StepBatch


@dataclass(frozen=True, slots=True)
class States:
    """State of each row after some stages. NULL is an unknown or excluded state, which has no anchor."""

    batch: StepBatch
    included_N: Bools
    """Rows of compared episodes."""
    codes_N: pl.Series
    """Int64, equal for equal states: a code of `texts_V`, or the key if there are no texts."""
    texts_V: pl.DataFrame | None
    """Columns `code` (distinct) and `text`; None if no definition reads texts, or a stage decided the key."""

    @classmethod
    def of(cls, batch: StepBatch, included_N: Bools, *, reads_state: bool, reads_text: bool) -> Self:
        """Return the states of the table `steps`; without `reads_state` all rows have one known state."""
        frame, texts_V = batch.frame, None
        if not reads_state:
            codes_N = pl.repeat(0, frame.height, dtype=pl.Int64, eager=True)
        elif "state_hash" in frame.columns:
            codes_N = frame["state_hash"].cast(pl.Int64)
            if reads_text:
                codes_N = _fill_in_hashes(codes_N, frame["state"])
                rows = pl.DataFrame({"code": codes_N, "text": frame["state"]})
                texts_V = rows.drop_nulls().unique("code", keep="first")
        else:
            texts_V = frame.select(pl.col("state").drop_nulls().unique().alias("text")).with_row_index("code")
            texts_V = texts_V.with_columns(pl.col("code").cast(pl.Int64))
            codes_N = _look_up(frame["state"], texts_V["text"], texts_V["code"])
        return cls(batch, included_N, codes_N, texts_V)

    def map_texts(self, rewrite: Callable[[pl.Series], pl.Series]) -> Self:
        """Replace each distinct text by a function of String series, whose NULL makes the state unknown."""
        texts_V = self.texts()
        return replace(self, texts_V=texts_V.with_columns(rewrite(texts_V["text"]).alias("text")))

    def mask(self, mask_N: pl.Series) -> Self:
        """Exclude the rows where the mask is false or NULL."""
        rows = pl.DataFrame({"code": self.codes_N, "mask": mask_N})
        return replace(self, codes_N=rows.select(pl.when("mask").then("code")).to_series())

    def with_keys(self, keys_N: pl.Series) -> Self:
        """Set the keys and drop the texts."""
        return replace(self, codes_N=keys_N, texts_V=None)

    def texts(self) -> pl.DataFrame:
        """Return the table of texts, in which two codes may have one text."""
        if self.texts_V is None:
            msg = "no texts: a definition that reads texts must set `reads`, and come before those that make a key"
            raise RuntimeError(msg)
        return self.texts_V

    def keys(self) -> pl.Series:
        """Return each row's key (Int64 `anchor_key`): the hash of its text, or that of `with_keys`; NULL if unknown."""
        if self.texts_V is None:
            return self.codes_N.alias("anchor_key")
        keys_V = hash_texts(self.texts_V["text"])
        return _look_up(self.codes_N, self.texts_V["code"], keys_V).alias("anchor_key")


def hash_texts(texts_V: pl.Series) -> pl.Series:
    """Hash each distinct text once to 63 bits (`lake.ids.text_hash`); NULL stays NULL."""
    distinct = texts_V.drop_nulls().unique()
    hashes = pl.Series("hash", map(bytes_hash, distinct.cast(pl.Binary)), dtype=pl.Int64)
    return _look_up(texts_V, distinct, hashes)


def map_distinct(texts_V: pl.Series, function: Callable[[list[str]], list[str | None]]) -> pl.Series:
    """Apply a Python function to the list of distinct texts; None and NULL mean an unknown state."""
    distinct = texts_V.drop_nulls().unique(maintain_order=True)
    return _look_up(texts_V, distinct, pl.Series("found", function(distinct.to_list()), dtype=pl.String))


def _fill_in_hashes(codes_N: pl.Series, texts_N: pl.Series) -> pl.Series:
    """Fill in missing stored hashes with the hashes of the texts."""
    missing_N = codes_N.is_null() & texts_N.is_not_null()
    if not missing_N.any():
        return codes_N
    rows = pl.DataFrame({"code": codes_N, "text": texts_N, "missing": missing_N})
    text_hashes = hash_texts(rows.select(pl.when("missing").then("text")).to_series())
    return rows.select(pl.coalesce("code", text_hashes).alias("code")).to_series()


def _look_up(queries: pl.Series, keys: pl.Series, values: pl.Series) -> pl.Series:
    """Return the value of each key; NULL for an absent key. `keys` are distinct."""
    table = pl.DataFrame({"key": keys, "value": values})
    matches = queries.alias("key").to_frame().join(table, on="key", how="left", maintain_order="left")
    return matches["value"]


Reads: TypeAlias = Literal["nothing", "state", "text"]


class Definition(BaseModel, ABC, frozen=True, extra="forbid"):
    """Base of all anchor definitions. JSON: an object with its `kind` and its options."""

    kind: str
    """Name of the definition."""
    makes_key: ClassVar[bool] = False
    """Whether this is a key stage: no later stage can read texts."""
    reads: ClassVar[Reads] = "nothing"
    """Input of the stage, unless its options decide it."""

    @property
    def reads_text(self) -> bool:
        """Return whether the stage reads the texts of states."""
        return self.reads == "text"

    @property
    def reads_state(self) -> bool:
        """Return whether the stage's result depends on the state."""
        return self.reads_text or self.reads == "state"

    @property
    def _needs_state(self) -> bool:
        """Return whether the definition alone reads the state: without a key stage the state is the key."""
        return self.reads_state or not self.makes_key

    @abstractmethod
    def apply(self, states: States) -> States:
        """Return the states after this stage."""

    def inputs(self) -> tuple[str, ...]:
        """Return the columns that the stage reads in addition to the state."""
        return ()

    def columns(self, present: list[str]) -> tuple[str, ...]:
        """Return the input columns of `steps` or `episodes`; a present hash replaces the text."""
        state: tuple[str, ...] = ()
        if self._needs_state:
            hashed = "state_hash" in present
            state = ("state_hash",) * hashed + ("state",) * (self.reads_text or not hashed)
        return tuple(dict.fromkeys((*state, *self.inputs())))

    def keys(self, batch: StepBatch, included_N: Bools) -> pl.Series:
        """Return each row's key (Int64, 63 bits, equal on all machines); NULL for an unknown or excluded state.

        Rows are in canonical order and have `columns()`. `included_N` marks the rows of compared episodes.
        """
        states = States.of(batch, included_N, reads_state=self._needs_state, reads_text=self.reads_text)
        return self.apply(states).keys()

    def pin_version(self) -> Self:
        """Return the definition that a job stores, with all that decides its keys."""
        return self


class ExactText(Definition):
    """Two steps share an anchor if their state texts are equal, character for character.

    The key is the stored `state_hash` if present, so no text is read.
    """

    kind: Literal["exact"] = "exact"

    reads: ClassVar[Reads] = "state"

    def apply(self, states: States) -> States:
        """Return the states unchanged."""
        return states


SYNTAX = (
    "Valid is the syntax of Rust's regex crate: classes, groups, repetitions, alternatives, ^ $ \\b, flags such as "
    "(?i) (?m) (?s); no look-around, no back-references"
)
_REFERENCE = re.compile(r"\$(?:\$|\{(?P<braced>[^}]*)\}|(?P<bare>[0-9A-Za-z_]+))")


def check_pattern(pattern: str) -> list[str]:
    """Return the names and numbers of a pattern's groups, `0` included; ValueError for an invalid pattern."""
    try:
        probe = pl.DataFrame({"text": [""]}).select(pl.col("text").str.extract_groups(pattern))
    except ComputeError as error:
        fault = str(error).partition("\n\nThis error occurred")[0]
        msg = f"{pattern!r} is not a valid regular expression: {fault}. {SYNTAX}"
        raise ValueError(msg) from error
    dtype = probe.schema["text"]
    fields = [field.name for field in dtype.fields] if isinstance(dtype, pl.Struct) else []
    # A named group has a number too.
    return ["0", *fields, *(str(number) for number in range(1, len(fields) + 1))]


class Substitution(BaseModel, frozen=True, extra="forbid"):
    """A pattern and its replacement."""

    pattern: str = Field(min_length=1)
    """Regular expression; all its matches are replaced, left to right, without overlap."""
    replacement: str = ""
    """Replacement of a match. `$1`, `${1}`, `$name`, `${name}`: match of a group; `$$`: a dollar sign."""

    @model_validator(mode="after")
    def _check_pattern(self) -> Self:
        groups = check_pattern(self.pattern)
        for reference in _REFERENCE.finditer(self.replacement):
            name = reference["braced"] if reference["braced"] is not None else reference["bare"]
            if name is not None and name not in groups:
                msg = (
                    f"replacement {self.replacement!r} refers to group {name!r}, which {self.pattern!r} does not have "
                    f"(groups: {', '.join(dict.fromkeys(groups))}). Write ${{1}}x for group 1 and an x, $$ for a dollar"
                )
                raise ValueError(msg)
        return self


class Substitutions(Definition):
    """Substitutions in the state text, applied one after the other."""

    kind: Literal["substitutions"] = "substitutions"
    substitutions: tuple[Substitution, ...] = Field(min_length=1)
    """Substitutions, in order."""
    reads: ClassVar[Reads] = "text"

    def apply(self, states: States) -> States:
        """Rewrite each distinct text."""
        return states.map_texts(self.rewrite)

    def rewrite(self, texts_V: pl.Series) -> pl.Series:
        """Apply all substitutions to the texts; NULL stays NULL."""
        expression = pl.col("text")
        for substitution in self.substitutions:
            expression = expression.str.replace_all(substitution.pattern, substitution.replacement)
        # The streaming engine processes parts of the column in parallel.
        return texts_V.alias("text").to_frame().lazy().select(expression).collect(engine="streaming")["text"]


class ToolResults(Definition):
    """Only tool results are states: users' messages differ in wording, tool results do not."""

    kind: Literal["tool_results"] = "tool_results"
    roles: tuple[str, ...] = Field(default=("tool",), min_length=1)
    """Values of `state_role` that are states. A NULL role is not."""

    def inputs(self) -> tuple[str, ...]:
        """Return the column of roles."""
        return ("state_role",)

    def apply(self, states: States) -> States:
        """Exclude the other roles."""
        return states.mask(states.batch.frame["state_role"].is_in(self.roles))


class NoErrors(Definition):
    """Error texts are not states: "You can't see any such thing." occurs in many situations.

    Without a pattern the mark `state_is_error` decides; a NULL mark is not an error.
    """

    kind: Literal["no_errors"] = "no_errors"
    pattern: str | None = Field(default=None, min_length=1)
    """Regular expression, as for substitutions; a text with a match is an error. None: the stored mark."""

    @model_validator(mode="after")
    def _check_pattern(self) -> Self:
        if self.pattern is not None:
            check_pattern(self.pattern)
        return self

    @property
    def reads_text(self) -> bool:
        """Return whether a pattern searches the texts."""
        return self.pattern is not None

    def inputs(self) -> tuple[str, ...]:
        """Return the column of marks, unless there is a pattern."""
        return () if self.reads_text else ("state_is_error",)

    def apply(self, states: States) -> States:
        """Exclude the error texts."""
        if self.pattern is None:
            is_error_N = states.batch.frame["state_is_error"].cast(pl.Boolean).fill_null(value=False)
            return states.mask(~is_error_N)
        pattern = self.pattern
        return states.map_texts(
            lambda texts_V: pl.select(pl.when(~texts_V.str.contains(pattern)).then(texts_V)).to_series()
        )


DEEPEST = 100
"""Levels of nesting above which a text is not JSON, equal on all machines."""

Paths = Sequence[tuple[str, ...]]


class _Number(str):
    __slots__ = ()


def canonicalise_json(text: str, names: frozenset[str] = frozenset(), paths: Paths = ()) -> str | None:
    """Return the canonical form of a JSON text, in ASCII; the last of equal keys of an object counts.

    None if the text is not JSON (NaN and Infinity are not), or has more than 100 levels.

    `names` are keys to drop everywhere, `paths` fields to drop, as keys from the root. In a path `*` matches any key
    and any list item, and a number matches one list item.
    """
    try:
        value = json.loads(text, parse_int=_parse_number, parse_float=_parse_number, parse_constant=_refuse_constant)
        return _write_canonical(value, names, paths, 0)
    except (ValueError, RecursionError):
        return None


def _refuse_constant(constant: str) -> NoReturn:
    msg = f"{constant} is not JSON"
    raise ValueError(msg)


def _parse_number(text: str) -> _Number:
    """Return the digits without zeros at both ends, and the power of ten."""
    sign = "-" if text.startswith("-") else ""
    mantissa, _, exponent = text.removeprefix("-").lower().partition("e")
    integer, _, fraction = mantissa.partition(".")
    digits = (integer + fraction).lstrip("0")
    if not digits:
        return _Number("0")
    significant = digits.rstrip("0")
    power = int(exponent or "0") - len(fraction) + len(digits) - len(significant)
    return _Number(f"{sign}{significant}e{power}" if power else sign + significant)


def _write_canonical(value: Any, names: frozenset[str], paths: Paths, depth: int) -> str:
    if depth > DEEPEST:
        msg = "nested too deeply"
        raise ValueError(msg)
    if isinstance(value, _Number):
        return value
    if isinstance(value, dict):
        fields = ((key, value[key], _follow_paths(paths, key)) for key in sorted(value) if key not in names)
        fields_text = (
            f"{json.dumps(key)}:{_write_canonical(field, names, inner, depth + 1)}"
            for key, field, inner in fields
            if () not in inner
        )
        return "{" + ",".join(fields_text) + "}"
    if isinstance(value, list):
        items = ((item, _follow_paths(paths, str(index)) if paths else paths) for index, item in enumerate(value))
        return (
            "["
            + ",".join(_write_canonical(item, names, inner, depth + 1) for item, inner in items if () not in inner)
            + "]"
        )
    return json.dumps(value)


def _follow_paths(paths: Paths, step: str) -> Paths:
    """Return the remainders of the paths that start with a key or list item."""
    return [path[1:] for path in paths if path[0] in ("*", step)]


class CanonicalJson(Definition):
    """Two steps share an anchor if their states are equal JSON values, ignoring key order, spaces and 1 or 1.0."""

    kind: Literal["json"] = "json"
    drop: tuple[str, ...] = Field(default=())
    """Fields to drop: `name` everywhere, or `$.a.b` at one path (`*`: any key or list item)."""
    otherwise: Literal["text", "unknown"] = "text"
    """Key of a state that is not JSON: its exact text, or unknown."""

    @model_validator(mode="after")
    def _check_drop(self) -> Self:
        for field in self.drop:
            if not field or (field.startswith("$") and (field[1:2] != "." or "" in field[2:].split("."))):
                msg = f"drop: {field!r} is not a field. Write a key, or a path such as $.meta.time or $.rows.*.id"
                raise ValueError(msg)
        return self

    reads: ClassVar[Reads] = "text"

    def apply(self, states: States) -> States:
        """Replace each distinct text by its canonical form."""
        return states.map_texts(lambda texts_V: map_distinct(texts_V, self._canonicalise))

    def _canonicalise(self, texts: list[str]) -> list[str | None]:
        names = frozenset(field for field in self.drop if not field.startswith("$"))
        paths = [tuple(field[2:].split(".")) for field in self.drop if field.startswith("$")]
        forms = (canonicalise_json(text, names, paths) for text in texts)
        if self.otherwise == "unknown":
            return list(forms)
        return [text if form is None else form for text, form in zip(texts, forms, strict=True)]


class StateFunction(Definition):
    """Two steps share an anchor if a user's function returns the same text: `def fn(text: str) -> str | None`.

    The function must depend on the text alone. It runs once per distinct state, in a sandboxed worker process without
    network and files. None makes the state unknown.
    """

    kind: Literal["function"] = "function"
    source: str
    """Location of the function: `module.py:name`."""
    version: str | None = Field(default=None)
    """Hash of its source and of its imports from its folder. A job fills it in; a given hash must match."""
    on_error: Literal["refuse", "unknown"] = "refuse"
    """Effect of a state on which the function fails: it stops the job, or is unknown."""
    seconds_per_text: float = Field(default=10.0, gt=0.0)
    """Timeout for one text, in seconds."""
    memory_mb: int = Field(default=1024, ge=256)
    """Memory of a worker, in MB."""
    workers: int = Field(default=1, ge=1, le=256)
    """Number of worker processes."""
    min_level: Literal["strong", "bwrap", "basic", "none"] = "strong"
    """Minimum isolation; with less, the function does not run."""

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        file, colon, name = self.source.rpartition(":")
        if not (colon and file.endswith(".py") and name.isidentifier()):
            msg = f"source {self.source!r} is not a function; write module.py:name"
            raise ValueError(msg)
        return self

    reads: ClassVar[Reads] = "text"

    def pin_version(self) -> Self:
        """Set the current version of the source; UsageError if it is absent or differs from `version`."""
        from pipelines.score.functions import find_source

        version = find_source(self.source).hash
        if self.version not in (None, version):
            msg = (
                f"anchor function {self.source} has version {version}, but the definition has {self.version}: its code "
                "has changed. Restore it, or omit version to use the current code"
            )
            raise UsageError(msg)
        return self.model_copy(update={"version": version})

    def apply(self, states: States) -> States:
        """Apply the function to each distinct text.

        Raises:
            SandboxUnavailableError: this machine has no isolation of `min_level`.
            ContractError: the function failed on a text, or returned neither text nor None.
            UsageError: as in `pin_version`.
        """
        self.pin_version()
        return states.map_texts(lambda texts_V: map_distinct(texts_V, self._call))

    def _call(self, texts: list[str]) -> list[str | None]:
        from pipelines.score.sandbox.contract import CallOutcome, FunctionSource, SandboxLimits
        from pipelines.score.sandbox.pool import Sandbox

        def text_of(text: str, outcome: CallOutcome) -> str | None:
            if outcome.kind == "ok" and (outcome.value is None or isinstance(outcome.value, str)):
                return outcome.value
            if outcome.kind == "ok":
                fault = f"it returned {type(outcome.value).__name__}; valid: text, or None for an unknown state"
            elif self.on_error == "unknown":
                return None
            else:
                fault = f"{outcome.kind}: {outcome.error}"
            msg = f"anchor function {self.source} on state {text[:200]!r}: {fault}"
            raise ContractError(msg)

        limits = SandboxLimits(
            seconds_per_row=self.seconds_per_text,
            memory_mb=self.memory_mb,
            workers=self.workers,
            min_level=self.min_level,
        )
        file, _, name = self.source.rpartition(":")
        batches = [texts[at : at + limits.rows_per_batch] for at in range(0, len(texts), limits.rows_per_batch)]
        with Sandbox(FunctionSource(file, name), limits) as sandbox:
            outcomes = sandbox.map([{"text": text} for text in batch] for batch in batches)
            return [
                text_of(text, outcome)
                for batch, batch_outcomes in zip(batches, outcomes, strict=True)
                for text, outcome in zip(batch, batch_outcomes, strict=True)
            ]


STATE = "state"
"""Name of the state at this stage: in a chain, the result of the stages before."""
OF_THE_ACTION = ("action", "reasoning", "tool_calls", "is_action_valid", "is_active", "finish_reason", "latency")
OF_THE_OUTCOME = (
    *("reward", "status", "terminated", "stop_reason", "error", "env_return", "episode_score", "num_steps"),
    *("completion_tokens", "final_observation", "final_value_estimate", "ended_at"),
)
DECIDED_LATER = frozenset((*OF_THE_ACTION, *OF_THE_OUTCOME))
"""Columns decided after the policy saw the state: as anchors they would compare outcomes."""


class ChosenColumns(Definition):
    """Two steps share an anchor if all chosen columns agree in value and type.

    A name is a column of `steps` or `episodes` (`steps` wins if both have it), such as `step_index`, `state_role` or
    `agent_id`; `state`; or a field of a JSON column as `column:path` with a JSONPath, such as `context:$[-1].name`, the
    name of the tool that answered last.
    """

    kind: Literal["columns"] = "columns"
    names: tuple[str, ...] = Field(min_length=1)
    """Columns, except those of the action and its outcome."""
    nulls: Literal["unknown", "value"] = "unknown"
    """Meaning of a NULL in a chosen column: unknown state, or a value. An unknown `state` stays unknown."""
    makes_key: ClassVar[bool] = True

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        for column in self.names:
            name, _, path = column.partition(":")
            if name in DECIDED_LATER:
                msg = f"names: {name!r} is known only after the decision; an anchor is what the policy saw before it"
                raise ValueError(msg)
            if name == "state_hash":
                msg = "names: write 'state' for the state; its stored hash is used where there is one"
                raise ValueError(msg)
            if not name or (":" in column and not path.startswith("$")):
                msg = f"names: {column!r} is not a column. Write a name, or name:$.path for a field of a JSON column"
                raise ValueError(msg)
        return self

    @property
    def reads_state(self) -> bool:
        """Return whether `state` is among the columns."""
        return STATE in self.names

    def inputs(self) -> tuple[str, ...]:
        """Return the columns without `state`."""
        return tuple(dict.fromkeys(name.partition(":")[0] for name in self.names if name != STATE))

    def apply(self, states: States) -> States:
        """Hash the tuples of values."""
        values_N = pl.DataFrame([self._column(states, name).alias(name) for name in dict.fromkeys(self.names)])
        required = values_N.columns if self.nulls == "unknown" else [STATE] * self.reads_state
        known_N = states.codes_N.is_not_null()
        for name in required:
            known_N &= values_N[name].is_not_null()
        distinct = values_N.filter(known_N).unique()
        keys = pl.Series("key", [key_hash(*values) for values in distinct.iter_rows()], dtype=pl.Int64)
        matches = values_N.join(
            distinct.with_columns(keys), on=values_N.columns, how="left", nulls_equal=True, maintain_order="left"
        )
        return states.with_keys(matches["key"]).mask(known_N)

    @staticmethod
    def _column(states: States, column: str) -> pl.Series:
        """Return one column's values; ContractError for a type that cannot be hashed."""
        if column == STATE:
            return states.keys()
        name, _, path = column.partition(":")
        values = states.batch.frame[name]
        if path:
            if values.dtype != pl.String:
                msg = f"anchors: column {name} has type {values.dtype}; a path needs JSON text"
                raise ContractError(msg)
            return values.str.json_path_match(path)
        if not (values.dtype.is_integer() or values.dtype.is_float() or values.dtype in (pl.String, pl.Boolean)):
            msg = f"anchors: column {name} has type {values.dtype}; valid: text, integers, floats, booleans"
            raise ContractError(msg)
        return values


class LastStates(Definition):
    """Two steps share an anchor if their last k states are equal, in order: this one and the k - 1 before it.

    These are the groups of HGPO (arXiv 2602.22817). A window stays within its episode. With `short="keep"` the first
    k - 1 steps of an episode use shorter windows, so they compare only with the first steps of siblings; with `unknown`
    they have no key. A window with an unknown state has no key. In a chain the states are the results of the stages
    before.
    """

    kind: Literal["last_states"] = "last_states"
    k: int = Field(default=2, ge=1, le=64)
    """Number of states; 1: the state alone."""
    short: Literal["keep", "unknown"] = "keep"
    """Key of the first k - 1 steps of an episode: that of a shorter window, or none."""
    makes_key: ClassVar[bool] = True
    reads: ClassVar[Reads] = "state"

    def apply(self, states: States) -> States:
        """Hash the windows."""
        keys_N = hash_history(states.keys(), states.batch.episodes, self.k)
        if self.short == "unknown":
            is_whole_N = _count_positions(states.batch.episodes) >= self.k - 1
            return states.with_keys(keys_N).mask(pl.Series(is_whole_N))
        return states.with_keys(keys_N)


def hash_history(keys_N: pl.Series, episodes: Segments, k: int) -> pl.Series:
    """Hash the last k keys of each row's episode, fewer at its start: Int64, NULL if any of them is NULL.

    For k = 1 the result is the keys; else the hash of the window's keys, 8 bytes each, little-endian, oldest first.
    """
    if k == 1:
        return keys_N
    values_N = keys_N.fill_null(0).to_numpy()
    unknown_N = keys_N.is_null().to_numpy()
    position_N = _count_positions(episodes)
    window_N = np.zeros((len(values_N), k), "<i8")
    holes_N = np.zeros(len(values_N), np.bool_)
    for back in range(k):
        rows = np.flatnonzero(position_N >= back)
        window_N[rows, k - 1 - back] = values_N[rows - back]
        holes_N[rows] |= unknown_N[rows - back]
    columns = {f"key_{at}": window_N[:, at] for at in range(k)} | {"length": np.minimum(position_N + 1, k)}
    windows = pl.DataFrame(columns)
    distinct = windows.filter(pl.Series(~holes_N)).unique()
    window_bytes = np.ascontiguousarray(distinct.drop("length").to_numpy().astype("<i8")).tobytes()
    ends = zip(range(8 * k, len(window_bytes) + 1, 8 * k), distinct["length"], strict=True)
    hashes = [bytes_hash(window_bytes[end - 8 * length : end]) for end, length in ends]
    table = distinct.with_columns(key=pl.Series(hashes, dtype=pl.Int64))
    keys = windows.join(table, on=windows.columns, how="left", maintain_order="left")["key"]
    return pl.select(pl.when(pl.Series(~holes_N)).then(keys).alias("anchor_key")).to_series()


def _count_positions(episodes: Segments) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.arange(int(episodes.lengths_K.sum())) - episodes.spread(episodes.starts_K.astype(np.int64))
