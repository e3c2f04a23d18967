"""SECTION.KEY=VALUE pairs as nested settings, and settings over settings."""

from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

from lake.errors import UsageError
from lake.settings import leaves, merge, parse_typed_pairs, validate, value_at


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")

    rate: float = 1.0
    names: tuple[str, ...] | Literal["all"] = "all"


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid")

    count: int | None = 1
    on: bool = False
    text: str | None = None
    inner: Inner = Inner()
    maybe: Inner | None = None
    several: tuple[Inner, ...] = ()


@pytest.mark.parametrize(
    ("pair", "settings"),
    [
        ("count=3", {"count": 3}),
        ("count=null", {"count": None}),
        (" count =3", {"count": 3}),
        ("on=true", {"on": True}),
        ("on=yes", {"on": "yes"}),
        ("text=env_return > 0", {"text": "env_return > 0"}),
        ("text=env_return = 1", {"text": "env_return = 1"}),
        ("text=3", {"text": "3"}),
        ("text=true", {"text": "true"}),
        ("text=", {"text": ""}),
        ("inner.rate=1e-3", {"inner": {"rate": 1e-3}}),
        ("inner.names=all", {"inner": {"names": "all"}}),
        ("inner.names=q", {"inner": {"names": ["q"]}}),
        ("inner.names=q|v", {"inner": {"names": ["q", "v"]}}),
        ('inner.names=["q|v"]', {"inner": {"names": ["q|v"]}}),
        ("maybe.rate=2", {"maybe": {"rate": 2}}),
        ('maybe={"rate": 2}', {"maybe": {"rate": 2}}),
        ('several=[{"rate": 2}]', {"several": [{"rate": 2}]}),
    ],
)
def test_a_value_is_what_its_field_takes(pair: str, settings: dict[str, Any]) -> None:
    assert parse_typed_pairs([pair], Outer) == settings
    validate(Outer, settings)


def test_pairs_of_one_section_come_together_and_the_last_word_counts() -> None:
    settings = parse_typed_pairs(["inner.rate=1", "count=1", "inner.names=q", "count=2"], Outer)
    assert settings == {"inner": {"rate": 1, "names": ["q"]}, "count": 2}


@pytest.mark.parametrize("pair", ["count", "=3", "inner.=3", ".rate=3", "inner..rate=3"])
def test_a_pair_that_is_none_is_told(pair: str) -> None:
    with pytest.raises(UsageError, match=r"is not a setting; .* SECTION\.KEY=VALUE"):
        parse_typed_pairs([pair], Outer)


@pytest.mark.parametrize(
    ("pair", "fault"),
    [
        ("count=x", "`count` is 'x'; valid: a whole number"),
        ("cuont=1", "there is no option `cuont`; valid: count"),
        ("inner.rat=1", "there is no option `inner.rat`; valid: rate"),
        ("count.deep=1", "`count` is {'deep': 1}; valid: a whole number"),
        ("inner=3", "`inner` is 3; valid: keys with values"),
        ("several=a|b", "`several.0` is 'a'; valid: keys with values"),
        ("several=3", "`several` is 3; valid: a list"),
    ],
)
def test_what_no_field_takes_is_told_by_validation(pair: str, fault: str) -> None:
    with pytest.raises(UsageError) as error:
        validate(Outer, parse_typed_pairs([pair], Outer))
    assert str(error.value).startswith(fault)


def test_a_part_of_what_is_set_already_is_refused() -> None:
    with pytest.raises(UsageError, match="`count` is set already, as 3"):
        parse_typed_pairs(["count=3", "count.deep=1"], Outer)


def test_sections_are_merged_and_everything_else_is_replaced() -> None:
    below = {"a": {"b": 1, "c": [1, 2]}, "d": 4, "e": {"f": 1}}
    above = {"a": {"c": [3]}, "d": {"x": 1}, "e": None}
    assert merge(below, above) == {"a": {"b": 1, "c": [3]}, "d": {"x": 1}, "e": None}
    assert below == {"a": {"b": 1, "c": [1, 2]}, "d": 4, "e": {"f": 1}}, "neither is changed"


NESTED = st.recursive(
    st.integers(), lambda inner: st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3), max_leaves=8
)
SETTINGS = st.dictionaries(st.sampled_from("abc"), NESTED, max_size=3)


@given(below=SETTINGS, above=SETTINGS)
def test_every_value_above_holds_and_those_below_where_nothing_is_above(
    below: dict[str, Any], above: dict[str, Any]
) -> None:
    merged = merge(below, above)
    assert all(value_at(merged, name) == value_at(above, name) for name in leaves(above))
    for name in leaves(below):
        prefixes = [name.rsplit(".", cut)[0] for cut in range(name.count(".") + 1)]
        hidden = any(value_at(above, path) is not None for path in [name]) or any(
            not isinstance(value_at(above, prefix), dict | None) for prefix in prefixes
        )
        assert hidden or value_at(merged, name) == value_at(below, name)
    assert set(leaves(merged)) <= set(leaves(below)) | set(leaves(above))
    assert merge(merged, above) == merged
