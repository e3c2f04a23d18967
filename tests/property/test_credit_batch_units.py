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
"""A snapshot that nobody reads: the episodes have the key."""
STEPS = [StepRecord(state="s", action="go")]
KEYS: dict[str, st.SearchStrategy[Any]] = {
    "word": st.sampled_from(["a", "b", "c", "d", None]),
    "flag": st.sampled_from([True, False, None]),
    "number": st.sampled_from([0.0, -0.0, 1.0, 2.0, None]),
}


def slow(episodes: list[tuple[int, Any]]) -> set[frozenset[int]]:
    """Sets of groups: merged as long as two of them have a batch in common."""
    parts = [({group}, {key} - {None}) for group, key in episodes]
    merged = True
    while merged:
        merged = False
        for one in parts:
            for other in parts:
                if one is not other and (one[0] & other[0] or one[1] & other[1]):
                    parts = [part for part in parts if part is not one and part is not other]
                    parts.append((one[0] | other[0], one[1] | other[1]))
                    merged = True
                    break
            if merged:
                break
    return {frozenset(groups) for groups, _ in parts}


@pytest.mark.parametrize("kind", KEYS)
@given(data=st.data())
def test_groups_that_batches_link_are_one_unit(kind: str, data: st.DataObject) -> None:
    episodes = data.draw(st.lists(st.tuples(st.integers(0, 7), KEYS[kind]), min_size=1, max_size=12))
    frame = pl.DataFrame(episodes, schema=["group_id", "key"], orient="row", infer_schema_length=None)
    found = find_batch_units(NOWHERE, frame, "key")
    assert sorted(found["group_id"]) == sorted({group for group, _ in episodes})
    units = {frozenset(part["group_id"]) for part in found.partition_by("unit")}
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
