"""Chosen columns: agreement in value and type, fields inside JSON, and what may not be chosen."""

from datetime import UTC, datetime

import numpy as np
import polars as pl
import pytest
from pydantic import ValidationError

from lake.errors import ContractError
from lake.ids import key_hash, text_hash
from pipelines.credit import GiGPO
from pipelines.credit.anchors import ChosenColumns
from pipelines.credit.anchors.definitions import DECIDED_LATER
from testkit.anchor_keys import batch_of, keys_of, partition, steps_frame


def test_the_key_is_the_hash_of_the_values() -> None:
    rows = [{"agent_id": "a", "state_is_error": True}, {"agent_id": "b", "state_is_error": False}]
    keys = keys_of(ChosenColumns(names=("agent_id", "state_is_error")), steps_frame(rows))
    assert keys == [key_hash("a", True), key_hash("b", False)]


def test_the_order_of_columns_counts_and_repetition_does_not() -> None:
    rows = steps_frame([{"agent_id": "x", "state_role": "y"}, {"agent_id": "y", "state_role": "x"}])
    first = keys_of(ChosenColumns(names=("agent_id", "state_role")), rows)
    second = keys_of(ChosenColumns(names=("state_role", "agent_id")), rows)
    assert first == second[::-1]
    assert keys_of(ChosenColumns(names=("agent_id", "state_role", "agent_id")), rows) == first


def test_state_stands_for_the_text_and_joins_with_other_columns() -> None:
    rows = [{"state": s, "agent_id": a} for s, a in [("hall", "a"), ("hall", "b"), ("hall", "a"), (None, "a")]]
    definition = ChosenColumns(names=("state", "agent_id"))
    keys = keys_of(definition, steps_frame(rows))
    hall = text_hash("hall")
    assert keys == [key_hash(hall, "a"), key_hash(hall, "b"), key_hash(hall, "a"), None]
    hashed = steps_frame([row | {"state_hash": row["state"] and hall} for row in rows])
    assert keys_of(definition, hashed) == keys
    assert definition.columns(hashed.columns) == ("state_hash", "agent_id"), "no text is read where the hash is stored"


def test_a_null_is_unknown_or_a_value() -> None:
    rows = steps_frame([{"agent_id": None}, {"agent_id": "a"}, {"agent_id": None}])
    assert partition(keys_of(ChosenColumns(names=("agent_id",)), rows)) == [None, 0, None]
    assert partition(keys_of(ChosenColumns(names=("agent_id",), nulls="value"), rows)) == [0, 1, 0]


def test_an_unknown_state_stays_unknown() -> None:
    rows = steps_frame([{"state": None, "agent_id": None}, {"state": "s", "agent_id": None}])
    assert partition(keys_of(ChosenColumns(names=("state", "agent_id"), nulls="value"), rows)) == [None, 0]


def test_step_index_gives_one_anchor_per_step() -> None:
    rows = [{"episode_id": e, "step_index": n, "state": f"{e}{n}"} for e in (1, 2) for n in range(3)]
    definition = ChosenColumns(names=("step_index",))
    assert definition.columns(["state", "state_hash"]) == ("step_index",)
    assert partition(keys_of(definition, steps_frame(rows))) == [0, 1, 2, 0, 1, 2]


def test_columns_that_are_not_chosen_change_nothing() -> None:
    """Not even an unknown state, which the frame of another definition's batch may hold."""
    rows = steps_frame([{"agent_id": "a", "state": None}, {"agent_id": "a", "state": "s"}])
    definition = ChosenColumns(names=("agent_id",))
    batch = batch_of(ChosenColumns(names=("agent_id", "state")), rows)
    assert partition(definition.keys(batch, np.array([True, True])).to_list()) == [0, 0]


def test_numbers_and_texts_stay_apart() -> None:
    numbers = steps_frame([{}]).with_columns(seed=pl.lit(1, pl.Int64))
    words = numbers.with_columns(seed=pl.lit("1"))
    floats = numbers.with_columns(seed=pl.lit(1.0))
    keys = [keys_of(ChosenColumns(names=("seed",)), frame)[0] for frame in (numbers, words, floats)]
    assert keys == [key_hash(1), key_hash("1"), key_hash(1.0)]
    assert len(set(keys)) == 3


def test_a_field_inside_a_json_column() -> None:
    """The tool that answered: the name in the last message of the context."""
    contexts = [
        '[{"role":"user"},{"role":"tool","name":"search"}]',
        '[{"role":"tool","name":"search","content":"other"}]',
        '[{"role":"tool","name":"book"}]',
        '[{"role":"user","content":"hi"}]',
        "no json",
        None,
    ]
    rows = steps_frame([{"context": context} for context in contexts])
    definition = ChosenColumns(names=("context:$[-1].name",))
    assert definition.columns(["context", "state_hash"]) == ("context",)
    assert keys_of(definition, rows) == [key_hash("search"), key_hash("search"), key_hash("book"), None, None, None]


def test_a_path_needs_text() -> None:
    frame = steps_frame([{}]).with_columns(extra=pl.lit(1))
    with pytest.raises(ContractError, match="needs JSON text"):
        keys_of(ChosenColumns(names=("extra:$.a",)), frame)


@pytest.mark.parametrize("value", [datetime(2026, 1, 1, tzinfo=UTC), [1], b"x"])
def test_types_that_have_no_hash_are_refused(value: object) -> None:
    frame = steps_frame([{}]).with_columns(pl.Series("odd", [value]))
    with pytest.raises(ContractError, match="valid: text, integers"):
        keys_of(ChosenColumns(names=("odd",)), frame)


@pytest.mark.parametrize("name", sorted(DECIDED_LATER))
def test_what_happened_after_the_decision_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="only after the decision"):
        ChosenColumns(names=(name,))
    with pytest.raises(ValidationError, match="only after the decision"):
        ChosenColumns(names=(f"{name}:$.a",))


@pytest.mark.parametrize("name", ["", "context:", "context:name", ":$.a"])
def test_names_that_are_none_are_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="is not a column"):
        ChosenColumns(names=(name,))


def test_the_hash_of_the_state_is_chosen_by_its_name() -> None:
    with pytest.raises(ValidationError, match="write 'state'"):
        ChosenColumns(names=("state_hash",))


def test_an_estimator_asks_for_the_chosen_columns() -> None:
    config = GiGPO(anchors={"kind": "columns", "names": ["agent_id", "context:$[-1].name"]})
    assert config.input_needs(["state", "state_hash", "agent_id", "context"]).anchor_columns == ("agent_id", "context")
    steps = steps_frame([{"agent_id": "a"}]).with_columns(episode_score=pl.lit(1.0), reward=pl.lit(0.0))
    with pytest.raises(ContractError, match="column context is missing"):
        config.advantages(steps.lazy())
