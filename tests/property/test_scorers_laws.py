"""What no scorer may depend on: the order of the rows, and which other episodes are scored with them. To the bit."""

import json
from collections.abc import Callable
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.score.scorers import (
    AnswerQuality,
    ExactMatch,
    FormatValidity,
    FuzzyMatch,
    LengthPenalty,
    ScorerInputs,
    ToolSuccess,
)
from testkit.scorer_frames import assert_sound, inputs
from testkit.scorer_strategies import TEXTS, tool_steps

LAWS: list[Callable[[], Any]] = [
    lambda: ExactMatch(mode="contains"),
    FuzzyMatch,
    ToolSuccess,
    AnswerQuality,
    lambda: LengthPenalty(max_length=20, cache=10, unit="characters", of="steps"),
    lambda: FormatValidity(rule={"kind": "regex", "pattern": "cat"}, of="actions"),
]


@pytest.mark.parametrize("make", LAWS)
@settings(max_examples=6, deadline=None)
@given(
    rollouts=st.lists(tool_steps(), min_size=1, max_size=4), texts=st.lists(TEXTS, min_size=1), seed=st.integers(0, 99)
)
def test_neither_order_nor_company_changes_a_score(make: Any, rollouts: Any, texts: Any, seed: int) -> None:
    scorer = make()
    episodes, steps = [], []
    for number, (episode, scores_of) in enumerate(rollouts):
        episodes.append(episode | {"episode_id": number, "ground_truth": json.dumps(texts[number % len(texts)])})
        steps += [
            s | {"episode_id": number, "action": texts[(number + n) % len(texts)]} for n, s in enumerate(scores_of)
        ]
    together = inputs(scorer, episodes, steps=steps)
    scores = scorer.scores(together)
    assert_sound(scores, [episode["episode_id"] for episode in episodes])
    shuffled = ScorerInputs(
        together.episodes.sample(fraction=1.0, shuffle=True, seed=seed),
        together.steps.sample(fraction=1.0, shuffle=True, seed=seed) if together.steps.height else together.steps,
    )
    alone = [scorer.scores(inputs(scorer, [episode], steps=steps)) for episode in episodes]
    order = ["episode_id", "step_index"]
    expected = scores.sort(order)
    assert scorer.scores(shuffled).sort(order).equals(expected)
    assert pl.concat(alone).sort(order).equals(expected)
