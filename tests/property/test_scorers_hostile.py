"""Hostile text: huge, broken, unicode, NUL; NULLs everywhere. A scorer answers, soundly, or says why not."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lake.tables import TABLES
from lake.tables.columns import Type
from pipelines.score.scorers import SCORERS, Scorer
from testkit.scorer_frames import scored

REQUIRED: dict[str, dict[str, Any]] = {
    "format_validity": {"rule": {"kind": "tags"}},
    "length": {"max_length": 10, "unit": "words"},
    "kl_in_reward": {"checkpoint": "ref"},
}
MORE: list[Scorer] = [
    SCORERS["fuzzy_match"](measure="difflib", max_characters=200),
    SCORERS["fuzzy_match"](measure="jaccard"),
    SCORERS["exact_match"](mode="contains", numbers=True, extract=r"(?s)a(.*)b", answer="all"),
    SCORERS["tool_success"](source="spans", error_objects=True),
    SCORERS["answer_quality"](reference="ground_truth"),
    SCORERS["coordination"](quality="answer"),
    SCORERS["voting"](winner="extra"),
    SCORERS["format_validity"](rule={"kind": "json"}, of="actions"),
    SCORERS["format_validity"](rule={"kind": "regex", "pattern": r"(a+)+$", "full": True}),
    SCORERS["length"](max_length=9, of="steps"),
]
ALL = [*(scorer(**REQUIRED.get(name, {})) for name, scorer in SCORERS.items()), *MORE]
each = pytest.mark.parametrize("scorer", ALL, ids=lambda scorer: f"{scorer.name}-{scorer.version[:4]}")

NASTY = [
    "",
    "\x00",
    "a\x00b" * 50,
    "\u200b\ufeff\u202e",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467" * 20,
    "e\u0301" * 30,
    "\r\n\r\n\x85\u2028",
    "{" * 300,
    '{"a":' * 300,
    '["' + "x" * 300,
    "null",
    "NaN",
    '"\\ud800"',
    "1e99999",
    '{"role": "tool"}',
    "[null, 1, [], {}]",
    "'; DROP TABLE scores; --",
    "$(reboot)",
    "%s%n{}{0}",
    "<think>" * 99,
    "a" * 5000,
    " " * 5000,
]
KEYS = ["role", "content", "tool_call_id", "id", "function", "name", "action_type", "action_data", "voter", "voted_for"]
KEYS += ["coordination_round", "result", "error", "success", "tool_name", "should_restart", "text"]
JSONISH = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.floats(allow_nan=False), st.sampled_from(NASTY)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(KEYS),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=10,
)
TEXT = st.one_of(st.none(), st.sampled_from(NASTY), st.text(max_size=20), JSONISH.map(json.dumps))
KINDS = st.sampled_from(["tool", "coordination", "prompt", ""])


def cells(table: str, column: str) -> st.SearchStrategy[Any]:
    kind = {column.name: column.type for column in TABLES[table].columns}[column]
    if column == "kind":
        return KINDS
    if kind in (Type.TEXT, Type.WORD, Type.JSON):
        return TEXT.filter(lambda text: text is not None) if column == "action" else TEXT
    if kind is Type.BOOL:
        return st.sampled_from([None, True, False])
    if kind is Type.FLOAT:
        return st.one_of(st.none(), st.floats())
    if kind is Type.TIME:
        return st.none()
    return st.one_of(st.none(), st.integers(-3, 2**31 - 1))


@st.composite
def rollouts(draw: Any, scorer: Scorer) -> tuple[list[dict[str, Any]], dict[str, list[dict[str, Any]]]]:
    tables_read = scorer.reads().tables()
    count = draw(st.integers(1, 4))
    tables: dict[str, list[dict[str, Any]]] = {name: [] for name in tables_read}
    for episode in range(count):
        for name, columns in tables_read.items():
            for row in range(1 if name == "episodes" else draw(st.integers(0, 3))):
                keys = {"episode_id": episode, "step_index": row}
                values = {
                    c: draw(cells(name, c)) for c in columns if c not in keys or (c == "step_index" and name == "spans")
                }
                tables[name].append(keys | values)
    return tables.pop("episodes"), tables


@each
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_anything_is_scored_soundly(scorer: Scorer, data: st.DataObject) -> None:
    episodes, tables = data.draw(rollouts(scorer))
    scored(scorer, episodes, **tables)


@each
def test_a_huge_text_ends(scorer: Scorer) -> None:
    """A million characters in every text: regular expressions are linear, similarity has a limit."""
    huge = "a" * 1_000_000
    document = json.dumps([{"role": "tool", "content": huge, "function": {"name": huge}, "result": huge}])
    tables_read = scorer.reads().tables()
    tables: dict[str, list[dict[str, Any]]] = {}
    for name, columns in tables_read.items():
        types = {column.name: column.type for column in TABLES[name].columns}
        row = {c: document if types[c] is Type.JSON else huge for c in columns if types[c] in (Type.TEXT, Type.JSON)}
        tables[name] = [{"episode_id": 1, "step_index": 0, "kind": "tool", "name": "t"} | row]
    scored(scorer, tables.pop("episodes"), **tables)
