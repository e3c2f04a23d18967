"""Anchor definitions: which steps are in the same place, and how a definition is written down."""

import polars as pl
import pytest
from pydantic import BaseModel, ValidationError

from lake.ids import text_hash
from pipelines.credit import Anchors, ExactText, GiGPO, SimilarText
from testkit.credit_strategies import frame


class Holder(BaseModel):
    anchors: Anchors


def keys(config: GiGPO, states: list[str | None], **columns: list[object]) -> list[int | None]:
    steps = frame([{"episode_id": 0, "group_id": 0, "step_index": i, "state": s} for i, s in enumerate(states)])
    steps = steps.drop("state_hash").with_columns(pl.Series(name, values) for name, values in columns.items())
    return config.advantages(steps.with_columns(episode_score=1.0).lazy()).collect()["anchor_key"].to_list()


def test_exact_keys_are_the_lakes_hash_of_the_text() -> None:
    states = ["start", "Start", "start ", "", "süß 🗝", None, "start"]
    assert keys(GiGPO(), states) == [None if state is None else text_hash(state) for state in states]


def test_a_stored_hash_is_used_as_it_is() -> None:
    hashes = [5, -7, None]
    assert keys(GiGPO(), ["a", "b", "c"], state_hash=hashes) == hashes


def test_text_is_not_needed_where_the_hash_is_stored() -> None:
    steps = frame([{"episode_id": 0, "group_id": 0, "step_index": 0, "state_hash": 3}]).drop("state")
    assert GiGPO(episode_source="sum_rewards").advantages(steps.lazy()).collect()["anchor_key"].to_list() == [3]


def test_similar_keys_are_the_hash_of_the_first_member() -> None:
    config = GiGPO(anchors=SimilarText(threshold=0.9))
    states = ["who wrote Hamlet?", None, "who wrote hamlet ?", "another thing"]
    first, other_hash = text_hash(states[0]), text_hash(states[3])
    assert keys(config, states) == [first, None, first, other_hash]


def test_similar_texts_of_different_task_groups_stay_apart() -> None:
    rows = [
        {"episode_id": group, "group_id": group, "step_index": 0, "state": state, "episode_score": 1.0}
        for group, state in enumerate(["abcdefghij", "abcdefghijk"])
    ]
    actual = GiGPO(anchors=SimilarText(threshold=0.9)).advantages(frame(rows).lazy()).collect()
    assert actual["anchor_key"].to_list() == [text_hash("abcdefghij"), text_hash("abcdefghijk")]


def test_an_excluded_episode_opens_no_cluster() -> None:
    rows = [
        {"episode_id": e, "group_id": 0, "step_index": 0, "state": state, "status": status}
        for e, (state, status) in enumerate([("abcdefghijkl", "aborted"), ("abcdefghij", "completed")])
    ]
    actual = GiGPO(anchors=SimilarText(threshold=0.9), episode_source="sum_rewards").advantages(frame(rows).lazy())
    assert actual.collect()["anchor_key"].to_list() == [None, text_hash("abcdefghij")]


@pytest.mark.parametrize(
    ("anchors", "written"),
    [
        (ExactText(), '{"anchors":{"kind":"exact"}}'),
        (SimilarText(threshold=0.9), '{"anchors":{"kind":"similarity","threshold":0.9}}'),
    ],
)
def test_json_round_trip(anchors: Anchors, written: str) -> None:
    holder = Holder(anchors=anchors)
    assert holder.model_dump_json() == written
    assert Holder.model_validate_json(written) == holder


@pytest.mark.parametrize(
    "anchors", [{"kind": "nearest"}, {"kind": "exact", "threshold": 1}, {"kind": "similarity", "threshold": 0}, "exact"]
)
def test_unknown_definitions_are_refused(anchors: object) -> None:
    with pytest.raises(ValidationError, match="anchors"):
        Holder.model_validate({"anchors": anchors})
