"""Groups that a batch-normalised estimator computes together: exactly those that batches link, however indirectly."""

from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lake import EpisodeRecord, StepRecord
from pipelines.credit.inputs import find_batch_units
from testkit.copies import empty_lake

NOWHERE: Any = None
"""A snapshot that no one reads: the episodes have the key."""
STEPS = [StepRecord(state="s", action="go")]
KEYS: dict[str, st.SearchStrategy[Any]] = {
    "word": st.sampled_from(["a", "b", "c", "d", None]),
    "flag": st.sampled_from([True, False, None]),
    "number": st.sampled_from([0.0, -0.0, 1.0, 2.0, None]),
}


def slow(episodes: list[tuple[int, Any]]) -> set[frozenset[int]]:
    """Sets of groups: merged as long as two of them have a batch in common."""
    units = [({group}, {key} - {None}) for group, key in episodes]
    merged = True
    while merged:
        merged = False
        for unit in units:
            for other_unit in units:
                if unit is not other_unit and (unit[0] & other_unit[0] or unit[1] & other_unit[1]):
                    units = [part for part in units if part is not unit and part is not other_unit]
                    units.append((unit[0] | other_unit[0], unit[1] | other_unit[1]))
                    merged = True
                    break
            if merged:
                break
    return {frozenset(groups) for groups, _ in units}


@pytest.mark.parametrize("kind", KEYS)
@given(data=st.data())
def test_groups_that_batches_link_are_one_unit(kind: str, data: st.DataObject) -> None:
    episodes = data.draw(st.lists(st.tuples(st.integers(0, 7), KEYS[kind]), min_size=1, max_size=12))
    frame = pl.DataFrame(episodes, schema=["group_id", "key"], orient="row", infer_schema_length=None)
    actual = find_batch_units(NOWHERE, frame, "key")
    assert sorted(actual["group_id"]) == sorted({group for group, _ in episodes})
    units = {frozenset(part["group_id"]) for part in actual.partition_by("unit")}
    assert units == slow(episodes)


def test_a_key_that_the_job_does_not_carry_is_read(tmp_path: Path) -> None:
    lk = empty_lake(tmp_path / "lake")
    records = [
        EpisodeRecord(run_id="r", task_id=task, rollout_index=0, policy_version=version, steps=STEPS)
        for task, version in (("a", 1), ("b", 1), ("c", 2), ("d", None), ("e", None))
    ]
    lk.append(records)
    episodes = lk.scan("episodes").select("episode_id", "group_id", "task_id").collect()
    units = find_batch_units(lk.snapshot(), episodes.drop("task_id"), "policy_version").join(episodes, on="group_id")
    of_tasks = dict(units.select("task_id", "unit").iter_rows())
    assert of_tasks["a"] == of_tasks["b"]
    assert len(set(of_tasks.values())) == 4, "what is in no batch stands alone"
