"""The vectorised collator against a slow one that walks token by token."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from testkit.training import sequences_of
from trainer.data.batch import PackedBatch
from trainer.data.collate import MemberColumns, MemberWeights, TokenArrays, collate

Turn = dict[str, Any]


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    """One token row: context, action with mask and log-probabilities, and whether it is trained."""
    context = draw(st.lists(st.integers(0, 5), max_size=4))
    action = draw(st.lists(st.integers(0, 5), max_size=4))
    return {
        "context": context,
        "action": action,
        "mask": draw(st.lists(st.booleans(), min_size=len(action), max_size=len(action))),
        "trained": draw(st.booleans()),
        "advantage": draw(st.sampled_from([-1.5, 0.0, 2.0])),
        "temperature": draw(st.sampled_from([0.5, 1.0])),
        "weight": draw(st.sampled_from([0.25, 1.0])),
        "step": draw(st.integers(0, 3)),
    }


def opening(turn: Turn) -> Turn:
    """A first turn: at least one token of context, so that something predicts the action."""
    return turn | {"context": turn["context"] or [5]}


SEQUENCES = st.lists(
    st.lists(turns(), min_size=1, max_size=4).map(lambda ts: [opening(ts[0]), *ts[1:]]), min_size=1, max_size=5
)


def packed(sequences: list[list[Turn]], *, all_masked: bool = False) -> PackedBatch:
    """In one micro-batch."""
    (batch,) = laid_out(sequences, [len(sequences)], all_masked=all_masked)
    return batch


def laid_out(sequences: list[list[Turn]], counts: list[int], *, all_masked: bool = False) -> list[PackedBatch]:
    """In micro-batches of so many sequences."""
    flat = [turn for sequence in sequences for turn in sequence]
    masks = [[True] * len(turn["action"]) if all_masked else turn["mask"] for turn in flat]
    members = MemberColumns(
        n_context_M=np.array([len(turn["context"]) for turn in flat]),
        n_action_M=np.array([len(turn["action"]) for turn in flat]),
        trained_M=np.array([turn["trained"] for turn in flat]),
        loss_tokens_M=np.array([sum(mask) * turn["trained"] for turn, mask in zip(flat, masks, strict=True)]),
        advantage_M=np.array([turn["advantage"] for turn in flat], np.float32),
        temperature_M=np.array([turn["temperature"] for turn in flat], np.float32),
        step_index_M=np.array([turn["step"] for turn in flat], np.int32),
    )
    shares = MemberWeights(np.array([turn["weight"] for turn in flat], np.float32))
    actions = sum(len(turn["action"]) for turn in flat)
    tokens = TokenArrays(
        context_C=np.array([token for turn in flat for token in turn["context"]], np.int32),
        action_A=np.array([token for turn in flat for token in turn["action"]], np.int32),
        mask_A=None if all_masked else np.array([flag for mask in masks for flag in mask], bool),
        logprobs_A=-np.arange(actions, dtype=np.float32),
    )
    return collate(members, np.array([len(sequence) for sequence in sequences]), tokens, shares, counts)


def expected_rows(sequences: list[list[Turn]], *, all_masked: bool = False) -> tuple[list[int], list[int], list[Any]]:
    """Ids, positions, and what `rows_of` gives of each trained token."""
    ids: list[int] = []
    positions: list[int] = []
    rows = []
    number = 0
    for sequence in sequences:
        position = 0
        for turn in sequence:
            for token in turn["context"]:
                ids.append(token)
                positions.append(position)
                position += 1
            for token, flag in zip(turn["action"], turn["mask"], strict=True):
                if turn["trained"] and (flag or all_masked):
                    weights_of_token = (turn["advantage"], turn["temperature"], turn["weight"], turn["step"])
                    rows.append((len(ids) - 1, token, -float(number), *weights_of_token))
                ids.append(token)
                positions.append(position)
                position += 1
                number += 1
    return ids, positions, rows


def rows_of(batch: PackedBatch) -> list[Any]:
    """Predictor, target, log-probability, advantage, temperature, weight and step of each trained token."""
    columns = (
        batch.predictor_N,
        batch.target_N,
        batch.behaviour_logprobs_N,
        batch.advantages_N,
        batch.temperature_N,
        batch.weight_N,
        batch.step_index_N,
    )
    return list(zip(*(column.tolist() for column in columns if column is not None), strict=True))


@given(SEQUENCES, st.booleans())
def test_it_equals_walking_token_by_token(sequences: list[list[Turn]], all_masked: bool) -> None:
    batch = packed(sequences, all_masked=all_masked)
    ids, positions, rows = expected_rows(sequences, all_masked=all_masked)
    assert batch.input_ids_T.tolist() == ids
    assert batch.position_ids_T.tolist() == positions
    assert rows_of(batch) == rows
    ends = [sum(len(turn["context"]) + len(turn["action"]) for turn in sequence) for sequence in sequences]
    assert batch.boundaries == [0, *np.cumsum(ends).tolist()]


@given(SEQUENCES, st.data())
def test_cut_anywhere_it_holds_the_same_sequences(sequences: list[list[Turn]], data: st.DataObject) -> None:
    counts: list[int] = []
    while sum(counts) < len(sequences):
        counts.append(data.draw(st.integers(1, len(sequences) - sum(counts))))
    apart = [single for part in laid_out(sequences, counts) for single in sequences_of(part)]
    assert len(apart) == len(sequences)
    for single, sequence in zip(apart, sequences, strict=True):
        ids, positions, _ = expected_rows([sequence])
        assert single.input_ids_T.tolist() == ids
        assert single.position_ids_T.tolist() == positions
        alone = rows_of(packed([sequence]))
        assert [row[:2] + row[3:] for row in rows_of(single)] == [row[:2] + row[3:] for row in alone]
