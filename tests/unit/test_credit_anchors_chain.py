"""Chains: stages in order, what they read, and orders that cannot be meant."""

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from lake.ids import key_hash, text_hash
from pipelines.credit.anchors import (
    Anchors,
    CanonicalJson,
    Chain,
    ChosenColumns,
    ExactText,
    LastStates,
    NoErrors,
    SimilarText,
    StateFunction,
    Substitutions,
    ToolResults,
)
from pipelines.credit.anchors.definitions import Substitution
from testkit.anchor_keys import keys_of, partition, steps_frame, texts
from testkit.shared import CHECKOUT

DIGITS = Substitutions(substitutions=(Substitution(pattern="[0-9]+", replacement="0"),))
PRESENT = ["state", "state_hash", "state_role", "state_is_error", "agent_id"]
EVERY: list[Anchors] = [
    CanonicalJson(drop=("id",), otherwise="unknown"),
    Chain(steps=(DIGITS, ToolResults(), LastStates(k=3))),
    ChosenColumns(names=("agent_id", "state"), nulls="value"),
    ExactText(),
    LastStates(k=4, short="unknown"),
    NoErrors(pattern="^Error"),
    SimilarText(threshold=0.9),
    DIGITS,
    ToolResults(roles=("tool", "function")),
    StateFunction(source="a.py:f", version="0123456789abc", workers=2),
]


def test_stages_work_on_what_the_one_before_left() -> None:
    chain = Chain(steps=(Substitutions(substitutions=(Substitution(pattern="^> "),)), CanonicalJson()))
    frame = steps_frame(texts('> {"a": 1.0}', '{"a":1}', "> text"))
    assert keys_of(chain, frame) == [text_hash('{"a":1}'), text_hash('{"a":1}'), text_hash("text")]


def test_the_order_of_text_stages_counts() -> None:
    frame = steps_frame(texts("[10]"))
    assert keys_of(Chain(steps=(CanonicalJson(), DIGITS)), frame) == [text_hash("[0e0]")]
    assert keys_of(Chain(steps=(DIGITS, CanonicalJson())), frame) == [text_hash("[0]")]


def test_a_pattern_of_errors_sees_the_text_as_it_is_by_then() -> None:
    strip = Substitutions(substitutions=(Substitution(pattern="^Error: "),))
    frame = steps_frame(texts("Error: a", "a"))
    assert partition(keys_of(Chain(steps=(NoErrors(pattern="^Error"), strip)), frame)) == [None, 0]
    assert partition(keys_of(Chain(steps=(strip, NoErrors(pattern="^Error"))), frame)) == [0, 0]


def test_text_then_filter_then_key() -> None:
    rows = [
        {"state": "room 1", "state_role": "tool"},
        {"state": "room 2", "state_role": "user"},
        {"state": "room 3", "state_role": "tool"},
        {"state": "room 4", "state_role": "tool"},
    ]
    chain = Chain(steps=(DIGITS, ToolResults(), LastStates(k=2)))
    assert partition(keys_of(chain, steps_frame(rows))) == [0, None, None, 1]


def test_a_filter_after_the_windows_takes_only_rows_out() -> None:
    rows = [{"state": s, "state_role": r} for s, r in [("a", "tool"), ("b", "user"), ("c", "tool"), ("b", "user")]]
    before = Chain(steps=(ToolResults(), LastStates(k=2)))
    after = Chain(steps=(LastStates(k=2), ToolResults()))
    assert partition(keys_of(before, steps_frame(rows))) == [0, None, None, None]
    assert partition(keys_of(after, steps_frame(rows))) == [0, None, 1, None]


def test_columns_join_the_state_as_the_chain_has_it() -> None:
    rows = [{"state": f"turn {n}", "agent_id": agent} for n, agent in enumerate("aba")]
    chain = Chain(steps=(DIGITS, ChosenColumns(names=("state", "agent_id"))))
    zero = text_hash("turn 0")
    assert keys_of(chain, steps_frame(rows)) == [key_hash(zero, "a"), key_hash(zero, "b"), key_hash(zero, "a")]


def test_similar_after_substitution() -> None:
    frame = steps_frame(texts("abcdefghij 1", "abcdefghij 22222222222222", "zzz"))
    assert partition(keys_of(SimilarText(threshold=0.9), frame)) == [0, 1, 2]
    assert partition(keys_of(Chain(steps=(DIGITS, SimilarText(threshold=0.9))), frame)) == [0, 0, 1]


def test_filters_before_columns_that_leave_the_state_out() -> None:
    rows = [{"agent_id": "a", "state_role": role} for role in ("tool", "user", "tool")]
    chain = Chain(steps=(ToolResults(), ChosenColumns(names=("agent_id",))))
    assert chain.columns(PRESENT) == ("state_role", "agent_id")
    assert partition(keys_of(chain, steps_frame(rows))) == [0, None, 0]


@pytest.mark.parametrize(
    "definition", [definition for definition in EVERY if not isinstance(definition, Chain | StateFunction)]
)
def test_a_chain_of_one_is_that_one(definition: Anchors) -> None:
    rows = [
        {"episode_id": e, "step_index": n, "state": s, "state_role": "tool", "state_is_error": False, "agent_id": "a"}
        for e in range(2)
        for n, s in enumerate(['{"id":1}', "Error: x 1", "Error: x 2", "abc 12", "abc 12"])
    ]
    frame = steps_frame(rows)
    assert keys_of(Chain(steps=(definition,)), frame) == keys_of(definition, frame)


@pytest.mark.parametrize(
    ("definition", "read"),
    [
        (ExactText(), ("state_hash",)),
        (DIGITS, ("state_hash", "state")),
        (CanonicalJson(), ("state_hash", "state")),
        (SimilarText(), ("state_hash", "state")),
        (StateFunction(source="a.py:f"), ("state_hash", "state")),
        (LastStates(), ("state_hash",)),
        (ToolResults(), ("state_hash", "state_role")),
        (NoErrors(), ("state_hash", "state_is_error")),
        (ChosenColumns(names=("agent_id",)), ("agent_id",)),
        (Chain(steps=(NoErrors(), ToolResults())), ("state_hash", "state_is_error", "state_role")),
        (Chain(steps=(NoErrors(), DIGITS, LastStates())), ("state_hash", "state", "state_is_error")),
    ],
)
def test_no_more_is_read_than_needed(definition: Anchors, read: tuple[str, ...]) -> None:
    assert definition.columns(PRESENT) == read
    without_hash = tuple(dict.fromkeys("state" if name == "state_hash" else name for name in read))
    assert definition.columns([name for name in PRESENT if name != "state_hash"]) == without_hash


@pytest.mark.parametrize(
    ("steps", "fault"),
    [
        ((), "at least 1"),
        ((LastStates(), DIGITS), "substitutions reads texts, and last_states before it leaves only keys"),
        ((SimilarText(), CanonicalJson()), "Put it before similarity"),
        ((ChosenColumns(names=("state",)), NoErrors(pattern="x")), "no_errors reads texts, and columns"),
        ((DIGITS, ChosenColumns(names=("agent_id",))), "so substitutions before it has no effect"),
        ((LastStates(), ChosenColumns(names=("agent_id",))), 'Add "state" to its names'),
        ((Chain(steps=(DIGITS,)),), "chain"),
    ],
)
def test_orders_that_cannot_be_meant_are_refused(steps: tuple[Anchors, ...], fault: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Chain.model_validate({"steps": [step.model_dump() for step in steps]})
    assert fault in str(caught.value)


class Holder(BaseModel):
    anchors: Anchors


@pytest.mark.parametrize("definition", EVERY)
def test_json_round_trip(definition: Anchors) -> None:
    holder = Holder(anchors=definition)
    assert Holder.model_validate_json(holder.model_dump_json()) == holder
    assert TypeAdapter(Anchors).validate_python(definition.model_dump(mode="json")) == definition
    assert hash(definition) == hash(definition.model_copy())


@pytest.mark.parametrize("definition", EVERY)
def test_definitions_are_frozen_and_closed(definition: Anchors) -> None:
    with pytest.raises(ValidationError, match="frozen"):
        definition.kind = "other"
    with pytest.raises(ValidationError, match="extra"):
        type(definition).model_validate(definition.model_dump() | {"surprise": 1})


@pytest.mark.parametrize("definition", EVERY[:-1])
def test_what_holds_no_code_is_pinned_already(definition: Anchors) -> None:
    assert definition.pin_version() == definition


def test_every_definition_is_in_the_page() -> None:
    page = (CHECKOUT / "docs" / "guides" / "which-anchor.md").read_text("utf-8")
    for definition in EVERY:
        assert f"`{definition.kind}`" in page
