"""Packing rows into a buffer: what carries loss comes from lengths and masks, never from ids."""

import numpy as np
import torch  # noqa: TID253

from testkit.training import random_batch, sequences_of
from trainer.data.batch import PackedBatch
from trainer.data.collate import Members, Shares, TokenArrays, collate, cut, dummy

END = 0


def members(**columns: list[object]) -> Members:
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
    return Members(
        step_index_M=np.arange(size, dtype=np.int32),
        n_context_M=np.array(columns["n_context_M"], np.int64),
        n_action_M=np.array(columns["n_action_M"], np.int64),
        **values,
    )


def tokens(ids: list[int], mask: list[bool]) -> TokenArrays:
    """Rows end to end, the mask of all their action tokens, and log-probabilities -1, -2, ..."""
    return TokenArrays(np.array(ids, np.int32), np.array(mask), -np.arange(1, len(mask) + 1, dtype=np.float32))


def packed(members: Members, members_Q: list[int], tokens: TokenArrays) -> PackedBatch:
    """Laid out; every token weighs 1."""
    return collate(members, np.array(members_Q), tokens, Shares(np.ones(len(members.n_context_M), np.float32)))


def test_turns_of_a_sequence_lie_end_to_end_and_positions_restart_with_each_sequence() -> None:
    # One sequence of two turns (context 1 2, action 3 0; context 4, action 5 0), then one of one turn (6; 7 0).
    batch = packed(
        members(
            n_context_M=[2, 1, 1], n_action_M=[2, 2, 2], advantage_M=[0.5, -1.0, 2.0], temperature_M=[1.0, 0.5, 0.7]
        ),
        [2, 1],
        tokens([1, 2, 3, END, 4, 5, END, 6, 7, END], [True] * 6),
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
    batch = packed(members(n_context_M=[2], n_action_M=[3]), [1], tokens([END, END, 5, END, END], [True] * 3))
    assert batch.target_N.tolist() == [5, END, END]


def test_tokens_the_policy_did_not_sample_carry_no_loss() -> None:
    batch = packed(members(n_context_M=[1], n_action_M=[4]), [1], tokens([9, 1, 2, 3, 4], [True, False, False, True]))
    assert batch.target_N.tolist() == [1, 4]
    assert batch.behaviour_logprobs_N is not None
    assert batch.behaviour_logprobs_N.tolist() == [-1.0, -4.0]


def test_no_mask_means_that_the_policy_sampled_every_action_token() -> None:
    arguments = (
        members(n_context_M=[1, 1], n_action_M=[2, 1], trained_M=[True, False], loss_tokens_M=[2, 0]),
        [2],
    )
    full = packed(*arguments, tokens([8, 1, 2, 9, 3], [True] * 3))
    none = packed(*arguments, TokenArrays(np.array([8, 1, 2, 9, 3], np.int32), None, None))
    assert none.target_N.tolist() == full.target_N.tolist() == [1, 2]
    assert none.behaviour_logprobs_N is None


def test_cutting_gives_back_the_sequences() -> None:
    whole = random_batch([4, 2, 6, 3], temperature=0.7)
    parts = cut(whole, [1, 2, 1])
    assert [part.boundaries for part in parts] == [[0, 4], [0, 2, 8], [0, 3]]
    apart = [single for part in parts for single in sequences_of(part)]
    for found, expected in zip(apart, sequences_of(whole), strict=True):
        for name in ("input_ids_T", "position_ids_T", "predictor_N", "target_N", "advantages_N", "temperature_N"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), name


def test_untrained_turns_stay_as_context() -> None:
    batch = packed(
        members(n_context_M=[1, 1], n_action_M=[2, 2], trained_M=[False, True]),
        [2],
        tokens([8, 1, 2, 9, 3, 4], [True] * 4),
    )
    assert batch.input_ids_T.tolist() == [8, 1, 2, 9, 3, 4]
    assert batch.target_N.tolist() == [3, 4]


def test_a_turn_may_add_no_context() -> None:
    batch = packed(members(n_context_M=[1, 0], n_action_M=[1, 2]), [2], tokens([8, 1, 2, 3], [True] * 3))
    assert batch.input_ids_T.tolist() == [8, 1, 2, 3]
    assert batch.predictor_N.tolist() == [0, 1, 2]


def test_weights_steps_and_units_are_spread_over_tokens_and_cut_with_them() -> None:
    """Two sequences: turns of 2, 1 (not trained) and 1 tokens, then one of 2; the unit is the sequence."""
    shares = Shares(np.array([0.5, 0.0, 0.5, 0.25], np.float32), np.array([0, 0, 0, 1]), unit_weight=0.125)
    batch = collate(
        members(
            n_context_M=[1, 1, 1, 1],
            n_action_M=[2, 1, 1, 2],
            trained_M=[True, False, True, True],
            loss_tokens_M=[2, 0, 1, 2],
            staleness_M=[3.0, 0.0, np.nan, 1.0],
        ),
        np.array([3, 1]),
        tokens([1, 2, 3, 1, 4, 1, 5, 1, 6, 7], [True] * 6),
        shares,
    )
    assert batch.weight_N.tolist() == [0.5, 0.5, 0.5, 0.25, 0.25]
    assert batch.step_index_N is not None
    assert batch.step_index_N.tolist() == [0, 0, 2, 3, 3]
    assert batch.staleness_N is not None
    assert batch.staleness_N.nan_to_num(-1).tolist() == [3.0, 3.0, -1.0, 1.0, 1.0]
    first, second = cut(batch, [1, 1])
    for part, units, count in ((batch, [0, 0, 0, 1, 1], 2), (first, [0, 0, 0], 1), (second, [0, 0], 1)):
        assert part.unit_N is not None
        assert part.weight_U is not None
        assert part.unit_N.tolist() == units
        assert part.weight_U.tolist() == [0.125] * count
    assert second.predictor_N.tolist() == [0, 1]
    assert second.weight_N.tolist() == [0.25, 0.25]


def test_a_part_without_trained_tokens_has_no_units() -> None:
    shares = Shares(np.array([0.0, 1.0], np.float32), np.array([0, 0]))
    arguments = members(n_context_M=[1, 1], n_action_M=[1, 1], trained_M=[False, True], loss_tokens_M=[0, 1])
    batch = collate(arguments, np.array([1, 1]), tokens([1, 2, 1, 3], [True] * 2), shares)
    assert [part.unit_N.tolist() for part in cut(batch, [1, 1]) if part.unit_N is not None] == [[], [0]]
    assert [part.weight_U.tolist() for part in cut(batch, [1, 1]) if part.weight_U is not None] == [[], [1.0]]


def test_a_dummy_has_the_columns_of_its_run_and_weighs_nothing() -> None:
    like = members(n_context_M=[3], n_action_M=[4], advantage_M=[1.0], temperature_M=[0.5])
    batch = dummy(like, logprobs=True, units=True)
    assert batch.dummy
    assert (len(batch.input_ids_T), len(batch.target_N), batch.boundaries) == (2, 1, [0, 2])
    assert batch.weight_N.tolist() == [0.0]
    for name in ("advantages_N", "temperature_N", "behaviour_logprobs_N", "unit_N", "weight_U", "step_index_N"):
        assert getattr(batch, name) is not None, name
    assert batch.staleness_N is None
    plain = dummy(members(n_context_M=[3], n_action_M=[4]), logprobs=False, units=False)
    assert plain.advantages_N is plain.behaviour_logprobs_N is plain.temperature_N is plain.unit_N is None
    assert not packed(like, [1], tokens([1] * 7, [True] * 4)).dummy
