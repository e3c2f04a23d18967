"""The funnel with several selections and with drops of single steps, against a slow, obvious reading."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lake import Lake
from lake.records import EpisodeRecord, StepRecord
from testkit.copies import empty_lake
from testkit.examples import examples
from testkit.judged_lake import Row, row_keys

Said = dict[tuple[int, int | None], str | None]
"""(episode, step or None) -> the filter that dropped it; None: kept."""
ACTIVE = 3
"""Active steps of an episode; a fourth one is padding."""


def new_lake(folder: Path, episodes: int = 4) -> Lake:
    lk = empty_lake(folder)
    steps = [StepRecord(state=f"s{n}", action="go", is_active=n < ACTIVE) for n in range(ACTIVE + 1)]
    lk.append([EpisodeRecord(task_id="t", rollout_index=n, steps=steps) for n in range(episodes)], run_id="run")
    return lk


def select(lk: Lake, drops: Said, name: str) -> None:
    episodes = lk.sql("SELECT * FROM episodes ORDER BY rollout_index").to_dicts()
    rows = [
        row_keys(episodes[e]) | {"step_index": step, "kept": dropped is None, "filter": dropped, "selection": name}
        for (e, step), dropped in drops.items()
    ]
    with lk.job(kind="select", parameters={"name": name}) as job:
        job.write(
            "selections",
            pl.DataFrame(
                rows, infer_schema_length=None, schema_overrides={"step_index": pl.Int32, "filter": pl.String}
            ),
        )


def selected(lk: Lake) -> Row:
    return lk.sql("SELECT * FROM funnel WHERE stage = 'selected'").row(0, named=True)


def obvious(episodes: int, selections: Sequence[Said]) -> Row:
    """For each episode the last selection that says anything of it, step by step."""
    steps, missing = 0, Counter[str]()
    step_reasons = Counter[str]()
    for e in range(episodes):
        speaking = [drops for drops in selections if any(episode == e for episode, _ in drops)]
        newest = speaking[-1] if speaking else {}
        dropped = newest.get((e, None))
        lost = {s: newest[e, s] for s in range(ACTIVE) if newest.get((e, s)) is not None}
        if dropped is not None:
            missing[dropped] += 1
        elif len(lost) == ACTIVE:
            missing[min(filter(None, lost.values()))] += 1
        else:
            steps += ACTIVE - len(lost)
            step_reasons.update(filter(None, lost.values()))
    return {"missing": sum(missing.values()), "steps": steps, "reasons": missing, "step_reasons": step_reasons}


def check(row: Row, expected: Row) -> None:
    assert (row["missing"], row["steps"]) == (expected["missing"], expected["steps"])
    assert {entry["reason"]: entry["episodes"] for entry in row["reasons"]} == expected["reasons"]
    assert {entry["reason"]: entry["steps"] for entry in row["step_reasons"]} == expected["step_reasons"]
    for counts in ([e["episodes"] for e in row["reasons"]], [e["steps"] for e in row["step_reasons"]]):
        assert counts == sorted(counts, reverse=True)


FILTERS = st.sampled_from(["length", "status", "dead_groups"])


@st.composite
def sayings(draw: st.DrawFn) -> Said:
    """What a job that saw some of four episodes says: whole drops, and drops of steps (the padding among them)."""
    drops: Said = {}
    for e in draw(st.sets(st.integers(0, 3), min_size=1)):
        drops[e, None] = draw(st.none() | FILTERS)
        if drops[e, None] is None:
            drops |= {(e, s): draw(FILTERS) for s in draw(st.sets(st.integers(0, ACTIVE)))}
    return drops


@settings(max_examples=examples(8))
@given(st.lists(sayings(), max_size=3))
def test_the_newest_selection_that_saw_an_episode_counts(tmp_path_factory: Any, selections: list[Said]) -> None:
    lk = new_lake(tmp_path_factory.mktemp("funnel"))
    for number, drops in enumerate(selections):
        select(lk, drops, f"selection {number}")
    check(selected(lk), obvious(4, selections))


def test_a_later_selection_of_some_siblings_does_not_bring_the_others_back(tmp_path: Path) -> None:
    """Two selections of one group: the second one saw only episode 3."""
    lk = new_lake(tmp_path)
    first: Said = {(0, None): "length", (1, None): "length", (2, None): None, (3, None): "status"}
    select(lk, first, "clean")
    select(lk, {(3, None): None}, "fresh")
    row = selected(lk)
    assert (row["episodes"], row["missing"]) == (2, 2)
    assert row["reasons"] == [{"reason": "length", "episodes": 2}]


def test_single_steps_are_missing_with_their_reason(tmp_path: Path) -> None:
    lk = new_lake(tmp_path)
    select(lk, {(0, None): None, (0, 1): "length", (1, None): None, (1, 0): "length", (1, 2): "over_long"}, "steps")
    row = selected(lk)
    assert (row["episodes"], row["steps"], row["missing"]) == (4, 4 * ACTIVE - 3, 0)
    assert row["step_reasons"] == [{"reason": "length", "steps": 2}, {"reason": "over_long", "steps": 1}]
    stages_after = lk.sql("SELECT * FROM funnel WHERE stage <> 'selected'")
    assert stages_after["step_reasons"].list.len().sum() == 0


def test_dropped_padding_takes_nothing_away(tmp_path: Path) -> None:
    lk = new_lake(tmp_path, episodes=1)
    select(lk, {(0, None): None, (0, ACTIVE): "length"}, "padding")
    assert (selected(lk)["steps"], selected(lk)["step_reasons"]) == (ACTIVE, [])


def test_an_episode_without_a_step_left_is_not_selected(tmp_path: Path) -> None:
    lk = new_lake(tmp_path, episodes=2)
    select(lk, {(0, None): None} | {(0, s): "length" for s in range(ACTIVE)}, "nothing left")
    row = selected(lk)
    assert (row["episodes"], row["steps"], row["reasons"]) == (1, ACTIVE, [{"reason": "length", "episodes": 1}])


def test_a_clock_that_went_back_does_not_make_an_old_selection_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Terminal rows are numbered: what was written last counts, no matter which time it claims."""
    from datetime import UTC, datetime

    lk = new_lake(tmp_path, episodes=1)
    select(lk, {(0, None): "length"}, "first")
    monkeypatch.setattr(lk._store, "clock", lambda: datetime(2001, 1, 1, tzinfo=UTC))
    select(lk, {(0, None): None}, "second")
    assert lk.sql("FROM job_runs").filter(kind="select")["ended_at"].n_unique() == 2
    assert selected(lk)["missing"] == 0
