"""The parity probe: which tokens are scored, what the trainer says of them, and how far an engine is from that."""

from pathlib import Path

import numpy as np
import pytest
import torch  # noqa: TID253 - a script that does nothing without it
from hypothesis import given
from hypothesis import strategies as st

from testkit.training import VOCABULARY, random_model, token_episodes, token_lake
from trainer.policy.model import PackedPolicy
from trainer.sync.targets import (
    ProbeConfig,
    Reference,
    compare_logprobs,
    draw_random_sequences,
    read_newest_sequences,
    score_reference,
)


def test_the_trainers_log_probabilities_are_those_of_the_models_own_forward_pass() -> None:
    model = random_model(1)
    ids = draw_random_sequences(VOCABULARY, ProbeConfig(sequences=3))
    own_logprobs = []
    with torch.no_grad():
        for sequence in ids:
            logits_TV = model(torch.tensor([sequence])).logits[0]
            own_logprobs.append(
                logits_TV[:-1].log_softmax(-1).gather(-1, torch.tensor(sequence)[1:, None])[:, 0].numpy()
            )
    reference = score_reference(PackedPolicy(model), ids)
    assert reference.ids == ids
    for ours, expected in zip(reference.logprobs, own_logprobs, strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-5)


@given(st.lists(st.lists(st.floats(-5, 0), min_size=1, max_size=4), min_size=1, max_size=4), st.floats(-0.4, 0.4))
def test_differences_are_those_of_all_tokens(values: list[list[float]], shift: float) -> None:
    """Oracle: the differences one by one; the last token of the last sequence alone is off."""
    reference = Reference([[0] * (len(row) + 1) for row in values], [np.array(row, np.float32) for row in values])
    logprobs = [[float(np.float32(value)) for value in row] for row in values]
    logprobs[-1][-1] += shift
    parity = compare_logprobs(reference, logprobs, "float32", ProbeConfig())
    tokens = sum(map(len, values))
    assert parity.tokens == tokens
    assert parity.largest == pytest.approx(abs(shift), abs=1e-9)
    assert parity.mean == pytest.approx(abs(shift) / tokens, abs=1e-9)
    assert parity.is_met is (abs(shift) <= 1e-4)


@pytest.mark.parametrize(
    ("trainer", "engine", "limit", "of_all_tokens"),
    [
        ("float32", "float32", 1e-4, False),
        ("float32", "bfloat16", 0.1, True),
        ("bfloat16", "float32", 0.1, True),
        ("bfloat16", "bfloat16", 0.2, True),
        ("bfloat16", None, 0.2, True),
    ],
)
def test_each_side_that_rounds_widens_the_limit(
    trainer: str, engine: str | None, limit: float, of_all_tokens: bool
) -> None:
    """One of two tokens is off: by the limit where tokens count one by one, by twice that where their mean does."""
    reference = Reference([[1, 2, 3]], [np.array([-1.0, -2.0], np.float32)], trainer)
    for share, is_met in ((0.99, True), (1.01, False)):
        off = share * limit * (2 if of_all_tokens else 1)
        assert compare_logprobs(reference, [[-1.0, -2.0 + off]], engine, ProbeConfig()).is_met is is_met


def test_what_the_trainer_computes_in_is_told() -> None:
    ids = draw_random_sequences(VOCABULARY, ProbeConfig(sequences=1))
    assert score_reference(PackedPolicy(random_model(1), dtype="bfloat16"), ids).dtype == "bfloat16"
    assert score_reference(PackedPolicy(random_model(1)), ids).dtype == "float32"


def test_a_wrong_number_of_values_is_never_within_the_limit() -> None:
    reference = Reference([[1, 2, 3]], [np.array([-1.0, -2.0], np.float32)])
    assert not compare_logprobs(reference, [[-1.0]], "bfloat16", ProbeConfig()).is_met
    assert compare_logprobs(reference, [[-1.0, -2.0]], "bfloat16", ProbeConfig()).is_met


def test_the_lakes_newest_tokens_are_scored(tmp_path: Path) -> None:
    episodes = token_episodes(tasks=2, siblings=2)
    for version, episode in enumerate(episodes):
        for step in episode.steps:
            assert step.tokens is not None
            step.tokens.policy_version = version
    snapshot = token_lake(tmp_path / "lake", episodes, writes=2).snapshot()
    sequences = read_newest_sequences(snapshot, VOCABULARY, ProbeConfig(sequences=3, max_tokens=8))
    openings = [episode.steps[0].tokens for episode in reversed(episodes)]
    expected = [[*tokens.context_ids, *tokens.action_ids] for tokens in openings if tokens is not None]
    assert sequences == [ids[:8] for ids in expected[:3]]


def test_tokens_of_another_vocabulary_are_not_scored(tmp_path: Path) -> None:
    snapshot = token_lake(tmp_path / "lake").snapshot()
    assert read_newest_sequences(snapshot, VOCABULARY, ProbeConfig())
    assert all(max(ids) < 20 for ids in read_newest_sequences(snapshot, 20, ProbeConfig()))
    assert read_newest_sequences(snapshot, 1, ProbeConfig()) == []
