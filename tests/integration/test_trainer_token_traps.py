"""Traps of token histories: each action is learned exactly once, in the context it was taken in, no matter what comes
again.

Each test writes down by hand which sequences there are and which of their tokens carry loss, and compares the gradient
of the whole chain (lake, selection, plan, stream, model, loss) with that of full logits over these sequences.
"""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl
import pytest
import torch  # noqa: TID253 - a script that does nothing without it

from lake import Lake
from lake.errors import ContractError
from lake.records import EpisodeRecord, StepRecord
from testkit.training import config, gradients, random_backend, random_model, token_lake, token_step
from trainer.data.plan import Plan
from trainer.data.selection import TrainingSelection, select
from trainer.data.stream import Stream
from trainer.losses import LOSSES

SFT = LOSSES["sft"]()

Sequence = list[tuple[StepRecord, bool]]
"""Steps whose tokens lie end to end, and whether each one's action carries loss."""


def trained(lk: Lake, **fields: Any) -> tuple[TrainingSelection, dict[str, torch.Tensor]]:
    """What was selected, and the gradient of one optimizer step over it."""
    snapshot, settings = lk.snapshot(), config(minibatches=1, **fields)
    selection = select(snapshot, settings, SFT.needs)
    plan = Plan(selection, settings)
    backend = random_backend()
    with Stream(snapshot, plan, SFT.needs, settings) as stream:
        ((_, batches),) = stream.steps()
    for batch in batches:
        backend.forward_backward(batch, SFT)
    return selection, gradients(backend)


def by_hand(*sequences: Sequence) -> dict[str, torch.Tensor]:
    """The gradient of the mean negative log-likelihood of the actions that carry loss."""
    model = random_model()
    losses = []
    for sequence in sequences:
        ids: list[int] = []
        targets = []
        for step, carries in sequence:
            tokens = step.tokens
            assert tokens is not None
            ids += tokens.context_ids
            targets += [(len(ids) - 1 + n, token) for n, token in enumerate(tokens.action_ids) if carries]
            ids += tokens.action_ids
        logprobs = model(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
        losses += [-logprobs[at, token] for at, token in targets]
    torch.stack(losses).mean().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, atol=1e-5, rtol=1e-3, msg=name)


def steps(count: int, seed: int = 0, **tokens: Any) -> list[StepRecord]:
    rng = np.random.default_rng(seed)
    return [token_step(rng, 4, 3, **tokens) for _ in range(count)]


def one_episode(folder: Path, records: list[StepRecord], **fields: Any) -> Lake:
    return token_lake(folder, [EpisodeRecord(task_id="t", steps=records, env_return=1.0, **fields)])


def test_interleaved_sub_agents_are_a_sequence_each(tmp_path: Path) -> None:
    """Two agents take turns; each one's call extends its own last call, not the call before it."""
    a0, b0, a1, b1, a2 = steps(5)
    for step, prefix in ((b0, None), (a1, 0), (b1, 1), (a2, 2)):
        assert step.tokens is not None
        step.tokens.prefix_step_index = prefix
    selection, sequences = trained(one_episode(tmp_path, [a0, b0, a1, b1, a2]))
    rows = selection.members.select("sequence", "step_index", "trained").rows()
    assert rows == [(0, 0, True), (0, 2, True), (0, 4, True), (1, 1, True), (1, 3, True)]
    assert_same(sequences, by_hand([(a0, True), (a1, True), (a2, True)], [(b0, True), (b1, True)]))


def test_a_sub_agent_that_starts_from_its_parents_context_repeats_it_without_loss(tmp_path: Path) -> None:
    """A fork: the sub-agent's first call extends step 0, as does the parent's next one."""
    a0, b0, a1, b1 = steps(4)
    for step, prefix in ((b0, 0), (a1, 0), (b1, 1)):
        assert step.tokens is not None
        step.tokens.prefix_step_index = prefix
    selection, sequences = trained(one_episode(tmp_path, [a0, b0, a1, b1]))
    assert selection.members["loss_tokens"].sum() == 4 * 3, "each action once"
    assert_same(sequences, by_hand([(a0, True), (b0, True), (b1, True)], [(a0, False), (a1, True)]))


def test_stripped_thinking_opens_a_sequence_and_the_repeated_action_is_context(tmp_path: Path) -> None:
    """The template removes the reasoning of earlier turns: turn 1's prompt holds what is left of turn 0's action."""
    first, second = steps(2)
    assert first.tokens is not None
    assert second.tokens is not None
    second.tokens.prefix_step_index = None
    second.tokens.context_ids = [*first.tokens.context_ids, *first.tokens.action_ids[1:], *second.tokens.context_ids]
    selection, sequences = trained(one_episode(tmp_path, [first, second]))
    assert selection.members.select("sequence", "loss_tokens").rows() == [(0, 3), (1, 3)]
    assert_same(sequences, by_hand([(first, True)], [(second, True)]))


def test_copied_context_is_never_trained(tmp_path: Path) -> None:
    """A continuation repeats the steps of an earlier episode; only what is new carries loss."""
    old, new = steps(2), steps(1, seed=1)
    copies = [msgspec.structs.replace(step, is_copied_context=True) for step in old]
    episodes = [
        EpisodeRecord(task_id="t", rollout_index=0, steps=old, env_return=1.0),
        EpisodeRecord(task_id="t", rollout_index=1, steps=[*copies, *new], env_return=1.0, relation="continuation"),
    ]
    selection, sequences = trained(token_lake(tmp_path, episodes))
    assert dict(selection.drops.select("reason", "steps").iter_rows()) == {"copied_context": 2}
    continued: Sequence = [(step, False) for step in copies] + [(step, True) for step in new]
    assert_same(sequences, by_hand([(step, True) for step in old], continued))


def test_copied_context_alone_is_not_trained_at_all(tmp_path: Path) -> None:
    """Also where the episode that it was copied from is not selected."""
    (old,), (new,) = steps(1), steps(1, seed=1)
    old.is_copied_context = True
    selection, sequences = trained(one_episode(tmp_path, [old, new]))
    assert selection.members.filter(pl.col("trained"))["step_index"].to_list() == [1]
    assert_same(sequences, by_hand([(old, False), (new, True)]))


@pytest.fixture
def twice(tmp_path: Path) -> tuple[Lake, list[StepRecord], list[StepRecord]]:
    """One episode as the engine's tokens, and the same steps as other tokens, rendered."""
    engine, rendered = steps(2), steps(2, seed=7)
    lk = one_episode(tmp_path, engine)
    rows = lk.scan("tokens").drop("write_id").sort("step_index").collect()
    other_tokens = [step.tokens for step in rendered if step.tokens is not None]
    rows = rows.with_columns(
        pl.Series("context_ids", [tokens.context_ids for tokens in other_tokens], rows.schema["context_ids"]),
        pl.Series("action_ids", [tokens.action_ids for tokens in other_tokens], rows.schema["action_ids"]),
        encoding_id=pl.lit(9, pl.Int64),
        provenance=pl.lit("rendered"),
        action_logprobs=pl.lit(None, rows.schema["action_logprobs"]),
        has_logprobs=pl.lit(value=False),
    )
    with lk.job(kind="render") as job:
        job.write("tokens", rows)
    return lk, engine, rendered


@pytest.mark.parametrize("tokens", ["auto", "engine", "rendered"])
def test_of_two_encodings_of_an_episode_one_is_trained(
    twice: tuple[Lake, list[StepRecord], list[StepRecord]], tokens: str
) -> None:
    lk, engine, rendered = twice
    assert lk.scan("tokens").collect().height == 4
    selection, sequences = trained(lk, tokens=tokens)
    assert selection.provenance == ("rendered" if tokens == "rendered" else "engine")
    assert selection.members.height == 2
    assert_same(sequences, by_hand([(step, True) for step in (rendered if tokens == "rendered" else engine)]))


def test_two_encodings_of_one_provenance_are_not_mixed(
    twice: tuple[Lake, list[StepRecord], list[StepRecord]],
) -> None:
    """Rendered with two tokenizers, and neither known to be the model's."""
    lk = twice[0]
    again = lk.scan("tokens").filter(pl.col("encoding_id") == 9).drop("write_id").collect()
    with lk.job(kind="render") as job:
        job.write("tokens", again.with_columns(encoding_id=pl.lit(10, pl.Int64)))
    with pytest.raises(ContractError, match=r"have 2 encodings"):
        trained(lk, tokens="rendered")
    selection = select(lk.snapshot(), config(tokens="rendered"), SFT.needs, own_encoding=lambda: 10)
    assert set(selection.members["encoding_id"]) == {10}
