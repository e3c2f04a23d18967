"""JSON in one spelling: what counts as the same value, what is left out, and what is no JSON."""

import json

import pytest
from pydantic import ValidationError

from lake.ids import text_hash
from pipelines.credit.anchors import CanonicalJson
from pipelines.credit.anchors.definitions import DEEPEST, canonicalise_json
from testkit.anchor_keys import keys_of, partition, steps_frame, texts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"b": 1, "a": [1.0, 1e0, 10E-1]}', '{"a":[1,1,1],"b":1}'),
        ("[]", "[]"),
        (" {} ", "{}"),
        ("true", "true"),
        ("null", "null"),
        ('"a\\u0062\\/"', '"ab/"'),
        ('"\\ud800"', '"\\ud800"'),
        ('"s\u00fc\u00df"', '"s\\u00fc\\u00df"'),
        ('{"a": 1, "a": 2}', '{"a":2}'),
        ("0", "0"),
        ("-0.000", "0"),
        ("0e99", "0"),
        ("1200", "12e2"),
        ("12e2", "12e2"),
        ("0.10", "1e-1"),
        ("-1.5e-3", "-15e-4"),
        ("1e400", "1e400"),
        ("9007199254740993", "9007199254740993"),
        ("0.1000000000000000055511151231257827", "1000000000000000055511151231257827e-34"),
    ],
)
def test_canonical_forms(text: str, expected: str) -> None:
    assert canonicalise_json(text) == expected
    assert canonicalise_json(expected) == expected, "a canonical form is its own"


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "Error: no",
        "{",
        "[1,]",
        "{'a': 1}",
        "NaN",
        "-Infinity",
        "[NaN]",
        "01",
        "1.",
        '"\n"',
        "1 2",
        "1e" + "9" * 5000,
    ],
)
def test_what_is_no_json(text: str) -> None:
    assert canonicalise_json(text) is None


def test_the_limit_of_nesting_is_the_same_everywhere() -> None:
    assert canonicalise_json("[" * DEEPEST + "]" * DEEPEST) == "[" * DEEPEST + "]" * DEEPEST
    assert canonicalise_json("[" * (DEEPEST + 2) + "]" * (DEEPEST + 2)) is None
    assert canonicalise_json("[" * 100_000 + "]" * 100_000) is None


def test_numbers_too_fine_for_a_float_stay_apart() -> None:
    first, second = "9007199254740992", "9007199254740993"
    assert float(first) == float(second)
    assert canonicalise_json(first) != canonicalise_json(second)
    assert canonicalise_json("0.1") != canonicalise_json("0.1000000000000000055511151231257827")


def test_a_number_is_no_text_and_true_is_no_number() -> None:
    spellings = [canonicalise_json(text) for text in ("1", '"1"', "true", '"true"', "null", '"null"')]
    assert len(set(spellings)) == 6


def test_dropped_keys_and_paths() -> None:
    text = json.dumps({"id": 7, "meta": {"id": 8, "at": 1}, "rows": [{"id": 9, "at": 2, "v": 3}, [4, 5]], "at": 6})
    assert canonicalise_json(text, frozenset({"id"})) == '{"at":6,"meta":{"at":1},"rows":[{"at":2,"v":3},[4,5]]}'
    assert canonicalise_json(text, paths=[("at",), ("meta", "id")]) == (
        '{"id":7,"meta":{"at":1},"rows":[{"at":2,"id":9,"v":3},[4,5]]}'
    )
    assert canonicalise_json(text, paths=[("rows", "*", "at"), ("rows", "1", "0")]) == (
        '{"at":6,"id":7,"meta":{"at":1,"id":8},"rows":[{"id":9,"v":3},[5]]}'
    )
    assert canonicalise_json(text, paths=[("*",)]) == "{}"
    assert canonicalise_json("[1,2,3]", paths=[("1",)]) == "[1,3]"
    assert canonicalise_json("7", paths=[("1",)]) == "7"


def test_equal_values_share_a_key_whatever_their_spelling() -> None:
    states = ['{"a":1,"b":[2.50]}', '{ "b" : [2.5], "a": 1.0 }', '{"a":1,"b":[2]}', "not json", " not json", None]
    assert partition(keys_of(CanonicalJson(), steps_frame(texts(*states)))) == [0, 0, 1, 2, 3, None]


def test_other_text_counts_by_itself_or_is_unknown() -> None:
    rows = steps_frame(texts("Error: no", "[1 ]", "[1]"))
    assert keys_of(CanonicalJson(), rows) == [text_hash("Error: no"), text_hash("[1]"), text_hash("[1]")]
    assert keys_of(CanonicalJson(otherwise="unknown"), rows) == [None, text_hash("[1]"), text_hash("[1]")]


def test_dropping_joins_results_that_differ_in_a_timestamp() -> None:
    states = [
        '{"rows":[{"v":1,"ts":5}],"took":0.1}',
        '{"rows":[{"v":1,"ts":6}],"took":0.2}',
        '{"rows":[{"v":2,"ts":6}]}',
    ]
    frame = steps_frame(texts(*states))
    assert partition(keys_of(CanonicalJson(), frame)) == [0, 1, 2]
    assert partition(keys_of(CanonicalJson(drop=("ts", "$.took")), frame)) == [0, 0, 1]
    assert partition(keys_of(CanonicalJson(drop=("$.rows.*.ts",)), frame)) == [0, 1, 2]
    assert partition(keys_of(CanonicalJson(drop=("$.rows.0.ts", "took")), frame)) == [0, 0, 1]


@pytest.mark.parametrize("field", ["", "$", "$a", "$.", "$.a.", "$.a..b"])
def test_fields_that_are_none_are_refused(field: str) -> None:
    with pytest.raises(ValidationError, match="is not a field"):
        CanonicalJson(drop=(field,))
