"""Laws of every anchor definition: the definition itself as a slow oracle, and what must not change a key.

1. Rows share a key exactly where the oracle's labels are equal (inside a task group for similarity).
2. Keys do not depend on the order of the input rows, on the other groups of the batch, or on whether hashes are stored.
3. JSON: equal values have equal forms, different values different ones, and a form is its own.
"""

import json
import re
from collections.abc import Callable, Hashable
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lake.ids import text_hash
from pipelines.credit.anchors import (
    Anchors,
    CanonicalJson,
    Chain,
    ChosenColumns,
    ExactText,
    LastStates,
    NoErrors,
    SimilarText,
    Substitutions,
    ToolResults,
)
from pipelines.credit.anchors.definitions import Substitution, canonicalise_json
from testkit.anchor_keys import (
    Row,
    keys_of,
    labelled,
    naive_history,
    naive_json,
    naive_similar,
    partition,
    steps_frame,
)
from testkit.examples import examples

STATES = ["", "a 1", "a 22", "b 1", "Error: a 1", "abcdefgh", "abcdefgi"]
STATES += ['{"x": 1, "t": 2}', '{"t":3,"x":1.0}', "[1]", "[1.0 ]"]
NUMBERS = Substitutions(substitutions=(Substitution(pattern="[0-9]+", replacement="#"),))


# Built once: to build a strategy costs more than to draw from it.
A_FEW, LENGTHS = st.integers(1, 3), st.integers(1, 4)
MAYBE_STATES = st.none() | st.sampled_from(STATES)
ROLES = st.sampled_from(["tool", "user", None])
ERRORS = st.sampled_from([True, False, None])
AGENTS = st.sampled_from(["x", "y", None])


@st.composite
def step_rows(draw: st.DrawFn) -> list[Row]:
    """Sorted rows of some groups with every column a definition reads, and the hash of the state."""
    rows = []
    for group in range(draw(A_FEW)):
        for sibling in range(draw(A_FEW)):
            for step in range(draw(LENGTHS)):
                state = draw(MAYBE_STATES)
                rows.append(
                    {
                        "group_id": group,
                        "episode_id": 10 * group + sibling,
                        "step_index": step,
                        "state": state,
                        "state_hash": None if state is None else text_hash(state),
                        "state_role": draw(ROLES),
                        "state_is_error": draw(ERRORS),
                        "agent_id": draw(AGENTS),
                    }
                )
    return rows


def numbers_alike(text: str) -> str:
    return re.sub("[0-9]+", "#", text)


def json_value(text: str) -> Hashable:
    try:
        return ("json", naive_json(text, ["t"]))
    except ValueError:
        return ("text", text)


def only(rows: list[Row], labels: list[Any], keep: Callable[[Row], bool]) -> list[Any]:
    return [label if keep(row) else None for row, label in zip(rows, labels, strict=True)]


def is_tool(row: Row) -> bool:
    return row["state_role"] == "tool"


def chained(rows: list[Row]) -> list[Any]:
    """The oracle of the chain below."""
    labels = labelled(rows, lambda text: None if text.startswith("Error") else numbers_alike(text))
    return naive_history(rows, only(rows, labels, is_tool), 2, "keep")


def agents(rows: list[Row]) -> list[Any]:
    has_state = [row["state"] is not None and row["agent_id"] is not None for row in rows]
    return [(row["state"], row["agent_id"]) if k else None for row, k in zip(rows, has_state, strict=True)]


ORACLES: list[tuple[Anchors, Callable[[list[Row]], list[Any]]]] = [
    (ExactText(), lambda rows: labelled(rows, str)),
    (NUMBERS, lambda rows: labelled(rows, numbers_alike)),
    (CanonicalJson(drop=("t",)), lambda rows: labelled(rows, json_value)),
    (ToolResults(), lambda rows: only(rows, labelled(rows, str), is_tool)),
    (NoErrors(), lambda rows: only(rows, labelled(rows, str), lambda row: row["state_is_error"] is not True)),
    (NoErrors(pattern="^Error"), lambda rows: labelled(rows, lambda t: None if t.startswith("Error") else t)),
    (ChosenColumns(names=("state", "agent_id")), agents),
    (ChosenColumns(names=("agent_id",), nulls="value"), lambda rows: [("agent", row["agent_id"]) for row in rows]),
    (LastStates(k=2), lambda rows: naive_history(rows, labelled(rows, str), 2, "keep")),
    (SimilarText(threshold=0.8), lambda rows: naive_similar(rows, 0.8)),
    (Chain(steps=(NoErrors(pattern="^Error"), NUMBERS, ToolResults(), LastStates(k=2))), chained),
]
NAMES = [f"{n}-{definition.kind}" for n, (definition, _) in enumerate(ORACLES)]


@pytest.mark.parametrize(("definition", "oracle"), ORACLES, ids=NAMES)
@settings(deadline=None, max_examples=examples(25))
@given(rows=step_rows())
def test_keys_are_shared_where_the_definition_says(
    definition: Anchors, oracle: Callable[[list[Row]], list[Any]], rows: list[Row]
) -> None:
    keys = keys_of(definition, steps_frame(rows))
    assert all(key is None or 0 <= key < 2**63 for key in keys)
    labels = oracle(rows)
    if definition.kind == "similarity":  # clusters of two groups may have the same first text, and then the same key
        groups = [row["group_id"] for row in rows]
        keys = [None if key is None else (group, key) for group, key in zip(groups, keys, strict=True)]
        labels = [None if label is None else (group, label) for group, label in zip(groups, labels, strict=True)]
    assert partition(keys) == partition(labels)


@pytest.mark.parametrize("definition", [definition for definition, _ in ORACLES], ids=NAMES)
@settings(deadline=None, max_examples=examples(20))
@given(rows=step_rows(), data=st.data())
def test_keys_do_not_depend_on_order_company_or_stored_hashes(
    definition: Anchors, rows: list[Row], data: st.DataObject
) -> None:
    frame = steps_frame(rows)
    expected = keys_of(definition, frame)
    shuffled = frame[data.draw(st.permutations(range(len(rows))))]
    assert keys_of(definition, shuffled) == expected
    assert keys_of(definition, frame.drop("state_hash")) == expected
    first = frame.filter(pl.col("group_id") == 0)
    assert keys_of(definition, first) == expected[: first.height]


NUMBER = st.integers(-20, 20) | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBER | st.text('aé"\\', max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=2), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def spelled(draw: st.DrawFn, value: Any) -> str:
    """JSON text of a value, in one of many spellings."""
    if isinstance(value, dict):
        fields = draw(st.permutations(list(value)))
        gap = draw(st.sampled_from(["", " ", "\n"]))
        return "{" + f"{gap},{gap}".join(f"{json.dumps(k)}{gap}:{draw(spelled(value[k]))}" for k in fields) + "}"
    if isinstance(value, list):
        return "[" + ",".join(draw(spelled(item)) for item in value) + draw(st.sampled_from(["]", " ]"]))
    if isinstance(value, int) and not isinstance(value, bool):
        return draw(st.sampled_from([str(value), f"{value}.0", f"{value}e0", f"{value}0E-1" if value else "0E-1"]))
    return json.dumps(value, ensure_ascii=draw(st.booleans()))


@settings(deadline=None, max_examples=examples(80))
@given(st.data(), JSON)
def test_equal_json_values_have_one_form(data: st.DataObject, value: Any) -> None:
    first, second = data.draw(spelled(value)), data.draw(spelled(value))
    form = canonicalise_json(first)
    assert form is not None
    assert form == canonicalise_json(second)
    assert canonicalise_json(form) == form
    assert form.isascii()


@settings(deadline=None, max_examples=examples(80))
@given(JSON, JSON, st.sampled_from([(), ("a",), ("$.a",), ("$.*.b", "c")]))
def test_forms_are_equal_exactly_where_values_are(first: Any, second: Any, drop: tuple[str, ...]) -> None:
    names = frozenset(field for field in drop if field[0] != "$")
    paths = [tuple(field[2:].split(".")) for field in drop if field[0] == "$"]
    texts = [json.dumps(value) for value in (first, second)]
    forms = [canonicalise_json(text, names, paths) for text in texts]
    assert (forms[0] == forms[1]) == (naive_json(texts[0], drop) == naive_json(texts[1], drop))


@settings(deadline=None, max_examples=examples(80))
@given(st.text('{}[]",:0123eE.-tfn \\', max_size=8))
def test_json_is_what_the_standard_library_says(text: str) -> None:
    try:
        naive_json(text)
    except ValueError:
        assert canonicalise_json(text) is None
    else:
        assert canonicalise_json(text) is not None


def test_keys_are_the_same_on_every_machine() -> None:
    """Numbers computed once and written down: a change here orphans every stored key."""
    rows = [{"state": state, "agent_id": "a"} for state in ("a 1", '{"b":1.50,"a":null}')]
    frame = steps_frame(rows)
    definitions: list[Anchors] = [
        ExactText(),
        NUMBERS,
        CanonicalJson(),
        ChosenColumns(names=("state", "agent_id", "step_index")),
        LastStates(k=2),
        SimilarText(),
    ]
    assert [keys_of(definition, frame) for definition in definitions] == WRITTEN_DOWN


WRITTEN_DOWN = [
    [2776472607179660922, 1127312573591181387],
    [5401001353403574870, 672749317765342251],
    [2776472607179660922, 750487446549931468],
    [7691130264128701349, 7055203728340039446],
    [6064094394925850116, 3781483802218226583],
    [2776472607179660922, 1127312573591181387],
]
