"""Plans of made-up episodes: nothing is read, only lengths and what is trained."""

from typing import Any

import polars as pl
from hypothesis import strategies as st

from testkit.training import config
from trainer.data.plan import Plan
from trainer.data.selection import TrainingSelection

Turn = tuple[int, bool]
"""Tokens of the action, and whether it is trained."""
Episodes = dict[int, list[list[Turn]]]
"""Episode id -> its sequences; each ends with a trained turn."""

SCHEMA = {
    "episode_id": pl.Int64,
    "sequence": pl.Int32,
    "step_index": pl.Int32,
    "n_context": pl.Int32,
    "n_action": pl.Int32,
    "end": pl.Int64,
    "trained": pl.Boolean,
    "loss_tokens": pl.Int64,
    "advantage": pl.Float64,
}

_TURNS = st.tuples(st.integers(1, 20), st.booleans())
_SEQUENCES = st.lists(_TURNS, min_size=1, max_size=3).map(lambda turns: [*turns[:-1], (turns[-1][0], True)])
EPISODES: st.SearchStrategy[Episodes] = st.dictionaries(
    st.integers(0, 2**63 - 1), st.lists(_SEQUENCES, min_size=1, max_size=3), min_size=1, max_size=12
)


def selection_of(episodes: Episodes) -> TrainingSelection:
    """The episodes as judged rows; each turn has one token of context."""
    rows = []
    for episode in sorted(episodes):
        for sequence, turns in enumerate(episodes[episode]):
            end = 0
            for step, (length, trained) in enumerate(turns):
                end += 1 + length
                loss_tokens = length if trained else 0
                rows.append((episode, sequence, step, 1, length, end, trained, loss_tokens, 0.5 * step))
    return TrainingSelection(
        members=pl.DataFrame(rows, schema=SCHEMA, orient="row"),
        drops=pl.DataFrame(),
        episodes=len(episodes),
        provenance="engine",
        encoding_id=1,
        source=None,
        groups=None,
        dead_groups=None,
        max_length=8192,
    )


def plan_of(episodes: Episodes, **fields: Any) -> Plan:
    """Their plan."""
    return Plan(selection_of(episodes), config(**fields))


def episode_of(plan: Plan, sequence: int) -> int:
    """The episode that a sequence of the plan belongs to."""
    position = int((plan.sequence_starts_E <= sequence).sum()) - 1
    return int(plan.episode_ids_E[position])
