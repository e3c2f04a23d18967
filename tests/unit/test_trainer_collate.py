"""Packing rows into a buffer: what carries loss comes from lengths and masks, never from ids."""

import numpy as np
import torch  # noqa: TID253 - a script that does nothing without it

from trainer.data.batch import PackedBatch
from trainer.data.collate import MemberColumns, MemberWeights, TokenArrays, collate, make_dummy

END = 0


def members(**columns: list[object]) -> MemberColumns:
    size = len(columns["n_context_M"])
    values = {
        "trained_M": np.array(columns.get("trained_M", [True] * size), bool),
        "loss_tokens_M": np.array(columns.get("loss_tokens_M", columns["n_action_M"]), np.int64),
        **{
            name: np.array(columns[name], np.float32)
            for name in ("advantage_M", "temperature_M", "staleness_M")
            if name in columns
        },
    }
    if "step_index_M" in columns:
        values["step_index_M"] = np.array(columns["step_index_M"], np.int32)
    return MemberColumns(
        n_context_M=np.array(columns["n_context_M"], np.int64),
        n_action_M=np.array(columns["n_action_M"], np.int64),
        **values,
    )


def tokens(members: MemberColumns, ids: list[int], mask: list[bool] | None) -> TokenArrays:
    """Out of rows end to end, the mask of all their action tokens, and log-probabilities -1, -2, ..."""
    ids_left, pieces = list(ids), []
    for count in np.stack([members.n_context_M, members.n_action_M], axis=1).ravel().tolist():
        pieces.append(ids_left[:count])
        del ids_left[:count]
    assert not ids_left
    context_C, action_A = (np.array([i for part in pieces[kind::2] for i in part], np.int32) for kind in (0, 1))
    logprobs_A = -np.arange(1, len(action_A) + 1, dtype=np.float32)
    return TokenArrays(context_C, action_A, None if mask is None else np.array(mask), logprobs_A)


def packed(members: MemberColumns, members_Q: list[int], ids: list[int], mask: list[bool] | None) -> PackedBatch:
    """Laid out in one micro-batch; every token weighs 1."""
    shares = MemberWeights(np.ones(len(members.n_context_M), np.float32))
    (batch,) = collate(members, np.array(members_Q), tokens(members, ids, mask), shares, [len(members_Q)])
    return batch


def test_turns_of_a_sequence_lie_end_to_end_and_positions_restart_with_each_sequence() -> None:
    # One sequence of two turns (context 1 2, action 3 0; context 4, action 5 0), then one of one turn (6; 7 0).
    batch = packed(
        members(
            n_context_M=[2, 1, 1], n_action_M=[2, 2, 2], advantage_M=[0.5, -1.0, 2.0], temperature_M=[1.0, 0.5, 0.7]
        ),
        [2, 1],
        [1, 2, 3, END, 4, 5, END, 6, 7, END],
        [True] * 6,
    )
    assert batch.input_ids_T.tolist() == [1, 2, 3, END, 4, 5, END, 6, 7, END]
    assert batch.position_ids_T.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2]
    assert batch.boundaries == [0, 7, 10]
    assert batch.predictor_N.tolist() == [1, 2, 4, 5, 7, 8]
    assert batch.target_N.tolist() == [3, END, 5, END, 7, END]
    assert batch.advantages_N is not None
    assert batch.advantages_N.tolist() == [0.5, 0.5, -1.0, -1.0, 2.0, 2.0]
    assert batch.temperature_N is not None
    torch.testing.assert_close(batch.temperature_N, torch.tensor([1.0, 1.0, 0.5, 0.5, 0.7, 0.7]))
    assert batch.behaviour_logprobs_N is not None
    assert batch.behaviour_logprobs_N.tolist() == [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]


def test_the_end_token_is_trained_although_padding_shares_its_id() -> None:
    batch = packed(members(n_context_M=[2], n_action_M=[3]), [1], [END, END, 5, END, END], [True] * 3)
    assert batch.target_N.tolist() == [5, END, END]


def test_tokens_the_policy_did_not_sample_carry_no_loss() -> None:
    arguments = members(n_context_M=[1], n_action_M=[4], loss_tokens_M=[2])
    batch = packed(arguments, [1], [9, 1, 2, 3, 4], [True, False, False, True])
    assert batch.target_N.tolist() == [1, 4]
    assert batch.behaviour_logprobs_N is not None
    assert batch.behaviour_logprobs_N.tolist() == [-1.0, -4.0]


def test_no_mask_means_that_the_policy_sampled_every_action_token() -> None:
    arguments = members(n_context_M=[1, 1], n_action_M=[2, 1], trained_M=[True, False], loss_tokens_M=[2, 0])
    full, none = (packed(arguments, [2], [8, 1, 2, 9, 3], mask) for mask in ([True] * 3, None))
    assert none.target_N.tolist() == full.target_N.tolist() == [1, 2]
    assert none.behaviour_logprobs_N is not None
    assert none.behaviour_logprobs_N.tolist() == [-1.0, -2.0]


def test_micro_batches_hold_the_sequences_and_count_from_their_own_beginning() -> None:
    """Sequences of 3, 2 and 4 tokens in two micro-batches."""
    arguments = members(n_context_M=[1, 1, 2], n_action_M=[2, 1, 2], advantage_M=[0.5, -1.0, 2.0])
    shares = MemberWeights(np.array([0.5, 0.25, 1.0], np.float32))
    laid_out = tokens(arguments, [8, 1, 2, 9, 3, 6, 7, 4, 5], [True] * 5)
    first, second = collate(arguments, np.array([1, 1, 1]), laid_out, shares, [2, 1])
    assert (first.boundaries, second.boundaries) == ([0, 3, 5], [0, 4])
    assert (first.input_ids_T.tolist(), second.input_ids_T.tolist()) == ([8, 1, 2, 9, 3], [6, 7, 4, 5])
    assert (first.position_ids_T.tolist(), second.position_ids_T.tolist()) == ([0, 1, 2, 0, 1], [0, 1, 2, 3])
    assert (first.predictor_N.tolist(), second.predictor_N.tolist()) == ([0, 1, 3], [1, 2])
    assert (first.target_N.tolist(), second.target_N.tolist()) == ([1, 2, 3], [4, 5])
    assert (first.weight_N.tolist(), second.weight_N.tolist()) == ([0.5, 0.5, 0.25], [1.0, 1.0])
    for batch, advantages, logprobs in (
        (first, [0.5, 0.5, -1.0], [-1.0, -2.0, -3.0]),
        (second, [2.0] * 2, [-4.0, -5.0]),
    ):
        assert batch.advantages_N is not None
        assert batch.behaviour_logprobs_N is not None
        assert batch.advantages_N.tolist() == advantages
        assert batch.behaviour_logprobs_N.tolist() == logprobs
        assert batch.step_index_N is None, "not asked for"


def test_untrained_turns_stay_as_context() -> None:
    batch = packed(
        members(n_context_M=[1, 1], n_action_M=[2, 2], trained_M=[False, True], loss_tokens_M=[0, 2]),
        [2],
        [8, 1, 2, 9, 3, 4],
        [True] * 4,
    )
    assert batch.input_ids_T.tolist() == [8, 1, 2, 9, 3, 4]
    assert batch.target_N.tolist() == [3, 4]


def test_a_turn_may_add_no_context() -> None:
    batch = packed(members(n_context_M=[1, 0], n_action_M=[1, 2]), [2], [8, 1, 2, 3], [True] * 3)
    assert batch.input_ids_T.tolist() == [8, 1, 2, 3]
    assert batch.predictor_N.tolist() == [0, 1, 2]


def test_weights_steps_and_units_are_spread_over_tokens_of_each_micro_batch() -> None:
    """Two sequences: turns of 2, 1 (not trained) and 1 tokens, then one of 2; the unit is the sequence."""
    shares = MemberWeights(np.array([0.5, 0.0, 0.5, 0.25], np.float32), np.array([0, 0, 0, 1]), unit_weight=0.125)
    arguments = members(
        n_context_M=[1, 1, 1, 1],
        n_action_M=[2, 1, 1, 2],
        trained_M=[True, False, True, True],
        loss_tokens_M=[2, 0, 1, 2],
        staleness_M=[3.0, 0.0, np.nan, 1.0],
        step_index_M=[0, 1, 2, 0],
    )
    laid_out = tokens(arguments, [1, 2, 3, 1, 4, 1, 5, 1, 6, 7], [True] * 6)
    (joint,) = collate(arguments, np.array([3, 1]), laid_out, shares, [2])
    assert joint.weight_N.tolist() == [0.5, 0.5, 0.5, 0.25, 0.25]
    assert joint.step_index_N is not None
    assert joint.step_index_N.tolist() == [0, 0, 2, 0, 0]
    assert joint.staleness_N is not None
    assert joint.staleness_N.nan_to_num(-1).tolist() == [3.0, 3.0, -1.0, 1.0, 1.0]
    first, second = collate(arguments, np.array([3, 1]), laid_out, shares, [1, 1])
    for batch, units, count in ((joint, [0, 0, 0, 1, 1], 2), (first, [0, 0, 0], 1), (second, [0, 0], 1)):
        assert batch.unit_N is not None
        assert batch.weight_U is not None
        assert batch.unit_N.tolist() == units
        assert batch.weight_U.tolist() == [0.125] * count
    assert second.predictor_N.tolist() == [0, 1]
    assert second.weight_N.tolist() == [0.25, 0.25]


def test_pairs_and_signs_are_dealt_out_with_their_units() -> None:
    """Four sequences, two pairs, a pair in each micro-batch."""
    arguments = members(n_context_M=[1] * 4, n_action_M=[1, 2, 1, 1])
    shares = MemberWeights(
        np.ones(4, np.float32),
        np.arange(4),
        unit_weight=0.5,
        pair_U=np.array([0, 0, 1, 1]),
        sign_U=np.array([1, -1, -1, 1], np.float32),
    )
    laid_out = tokens(arguments, [1, 2, 1, 2, 3, 1, 4, 1, 5], None)
    first, second = collate(arguments, np.ones(4, np.int64), laid_out, shares, [2, 2])
    for batch, units, signs in ((first, [0, 1, 1], [1.0, -1.0]), (second, [0, 1], [-1.0, 1.0])):
        assert batch.unit_N is not None
        assert batch.pair_U is not None
        assert batch.sign_U is not None
        assert batch.unit_N.tolist() == units
        assert batch.pair_U.tolist() == [0, 0]
        assert batch.sign_U.tolist() == signs


def test_a_micro_batch_without_trained_tokens_has_no_units() -> None:
    shares = MemberWeights(np.array([0.0, 1.0], np.float32), np.array([0, 0]))
    arguments = members(n_context_M=[1, 1], n_action_M=[1, 1], trained_M=[False, True], loss_tokens_M=[0, 1])
    separate = collate(arguments, np.array([1, 1]), tokens(arguments, [1, 2, 1, 3], [True] * 2), shares, [1, 1])
    assert [part.unit_N.tolist() for part in separate if part.unit_N is not None] == [[], [0]]
    assert [part.weight_U.tolist() for part in separate if part.weight_U is not None] == [[], [1.0]]


def test_a_dummy_has_the_columns_of_its_run_and_weighs_nothing() -> None:
    like = members(n_context_M=[3], n_action_M=[4], advantage_M=[1.0], temperature_M=[0.5], step_index_M=[2])
    batch = make_dummy(like, logprobs=True, units=True)
    assert batch.dummy
    assert (len(batch.input_ids_T), len(batch.target_N), batch.boundaries) == (2, 1, [0, 2])
    assert batch.weight_N.tolist() == [0.0]
    for name in ("advantages_N", "temperature_N", "behaviour_logprobs_N", "unit_N", "weight_U", "step_index_N"):
        assert getattr(batch, name) is not None, name
    assert batch.staleness_N is None
    plain = make_dummy(members(n_context_M=[3], n_action_M=[4]), logprobs=False, units=False)
    assert (
        plain.advantages_N
        is plain.behaviour_logprobs_N
        is plain.temperature_N
        is plain.unit_N
        is plain.step_index_N
        is None
    )
    assert not packed(like, [1], [1] * 7, [True] * 4).dummy
