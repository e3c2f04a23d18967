"""Traps between the lake and the gradient: other tokens of the same text, groups and units that should not count."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch  # noqa: TID253 - a script that does nothing without it

from lake import Lake
from lake.judgements.credit import find_credit
from lake.records import EpisodeRecord, StepRecord, TokensRecord
from testkit.lakes import add_credit
from testkit.training import SAMPLING, config, gradients, random_backend, token_episodes, token_lake, token_step
from trainer.config import TrainConfig
from trainer.data.plan import Plan
from trainer.data.preparation import prepare
from trainer.data.selection import select
from trainer.data.stream import Stream
from trainer.policy.tiny_model import CHAT_TEMPLATE, build_tokenizer


def planned(lk: Lake, settings: TrainConfig) -> tuple[Plan, list[list[Any]]]:
    """The plan and its batches, a list for each optimizer step."""
    snapshot, needs = lk.snapshot(), settings.loss.needs
    source = find_credit(snapshot, None) if needs.advantages else None
    plan = Plan(select(snapshot, settings, needs, source=source), settings)
    with Stream(snapshot, plan, needs, settings) as stream:
        return plan, [batches for _, batches in stream.steps()]


def gradient_of(lk: Lake, settings: TrainConfig) -> dict[str, torch.Tensor]:
    """Of the first optimizer step."""
    _, steps = planned(lk, settings)
    backend = random_backend()
    for batch in steps[0]:
        backend.forward_backward(batch, settings.loss)
    return gradients(backend)


def test_what_was_sampled_is_trained_and_not_what_its_text_would_be_encoded_as(tmp_path: Path) -> None:
    """Decoding and encoding again is not the identity: the engine sampled a word in two pieces."""
    tokenizer = build_tokenizer(["garden " * 20], 300)
    usual = tokenizer.encode("garden", add_special_tokens=False)
    pieces = [token for letter in ("gar", "den") for token in tokenizer.encode(letter, add_special_tokens=False)]
    assert tokenizer.decode(pieces) == tokenizer.decode(usual) == "garden"
    assert pieces != usual
    logprobs = [-float(n) for n in range(1, len(pieces) + 1)]
    tokens = [
        TokensRecord(context_ids=usual, action_ids=pieces, action_logprobs=logprobs, **SAMPLING),
        TokensRecord(context_ids=usual, action_ids=usual, action_logprobs=[-1.0] * len(usual), **SAMPLING),
    ]
    steps = [StepRecord(state="s", action="garden", reward=0.0, tokens=each) for each in tokens]
    episodes = [EpisodeRecord(task_id="t", steps=steps, rollout_index=n, env_return=float(n)) for n in range(2)]
    lk = token_lake(tmp_path, episodes)
    add_credit(lk)
    _, ((batch,),) = planned(lk, config("ppo", minibatches=1))
    sequence = [*usual, *pieces, *usual, *usual]
    assert batch.input_ids_T.tolist() == sequence * 2
    assert batch.target_N.tolist() == [*pieces, *usual] * 2
    assert batch.behaviour_logprobs_N is not None
    assert batch.behaviour_logprobs_N.tolist() == [*logprobs, *[-1.0] * len(usual)] * 2


@pytest.mark.parametrize("aggregation", ["unit_mean_token_mean", "unit_mean_token_sum"])
def test_an_episode_without_a_trained_token_is_no_unit(tmp_path: Path, aggregation: str) -> None:
    """It must not enter the number that means over episodes are divided by."""
    rng = np.random.default_rng(0)
    episodes = [EpisodeRecord(task_id=f"t{n}", steps=[token_step(rng, 4, 3)], env_return=1.0) for n in range(2)]
    masked = [
        token_step(rng, 4, 3, step={"trainable": False}),
        token_step(rng, 4, 3, action_mask=[False] * 3),
        token_step(rng, 4, 3, step={"is_active": False}),
    ]
    alone = token_lake(tmp_path / "alone", episodes)
    joint_lake = token_lake(
        tmp_path / "both", [*episodes, EpisodeRecord(task_id="masked", steps=masked, env_return=1.0)]
    )
    settings = config("sft", minibatches=1, options={"aggregation": aggregation, "unit": "episode"})
    plan, _ = planned(joint_lake, settings)
    assert plan.steps[0].units == 2
    actual, expected = gradient_of(joint_lake, settings), gradient_of(alone, settings)
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, atol=1e-7, rtol=1e-5, msg=name)


def test_regularisers_do_not_push_where_advantages_say_nothing(tmp_path: Path) -> None:
    """In a dead group every advantage is 0; an entropy bonus alone would still move the policy on its tokens."""
    episodes = token_episodes(tasks=2)
    mixed, joint_lake = token_lake(tmp_path / "mixed", episodes[:4]), token_lake(tmp_path / "both", episodes)
    for lk in (mixed, joint_lake):
        add_credit(lk)
    pushed = {"minibatches": 1, "options": {"entropy_coefficient": 0.5}}
    actual, expected = gradient_of(joint_lake, config("ppo", **pushed)), gradient_of(mixed, config("ppo", **pushed))
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, atol=1e-7, rtol=1e-5, msg=name)
    all_groups = gradient_of(joint_lake, config("ppo", live_only=False, **pushed))
    assert any(not torch.allclose(all_groups[name], gradient, atol=1e-5) for name, gradient in expected.items())


@pytest.mark.parametrize(("unknown", "is_reported"), [({"top_p": None}, True), ({"top_k": None}, True), ({}, False)])
def test_sampling_that_may_have_been_truncated_is_taken_on_trust_and_told(
    tmp_path: Path, unknown: dict[str, Any], is_reported: bool
) -> None:
    """Servers have their own defaults: a record that does not say top_p may hide one."""
    rng = np.random.default_rng(0)
    episodes = [
        EpisodeRecord(task_id="t", steps=[token_step(rng, 3, 2, **unknown)], rollout_index=n, env_return=float(n))
        for n in range(2)
    ]
    lk = token_lake(tmp_path, episodes)
    add_credit(lk)
    tokenizer = build_tokenizer(["a b c"], 300)
    notes = prepare(lk, config("ppo"), tokenizer).notes
    assert any("2 of 2 steps" in note and "top_p or top_k" in note for note in notes) == is_reported
    assert not any("top_p" in note for note in prepare(lk, config("awr"), tokenizer).notes)


def test_text_of_agents_that_take_turns_becomes_a_sequence_each(tmp_path: Path) -> None:
    """From the lake's columns: who decided, and what a limit cut off."""
    agents = ["planner", "searcher", "planner", "searcher"]
    steps = [
        StepRecord(
            state=f"for {agent}", action=f"by {agent}", agent_id=agent, finish_reason="length" if at == 3 else None
        )
        for at, agent in enumerate(agents)
    ]
    lk = token_lake(tmp_path, [EpisodeRecord(task_id="t", steps=steps, env_return=1.0)])
    tokenizer = build_tokenizer(["for planner", "by searcher"], 300)
    tokenizer.chat_template = CHAT_TEMPLATE
    prepared = prepare(lk, config("sft"), tokenizer)
    assert prepared.notes == ["rendered: 1 rendered, 0 present"]
    members = prepared.selection.members.sort("sequence", "step_index")
    assert members.select("sequence", "step_index").rows() == [(0, 0), (0, 2), (1, 1), (1, 3)]
    with Stream(prepared.snapshot, prepared.plan, config("sft").loss.needs, config("sft")) as stream:
        ((_, (batch,)),) = stream.steps()
    texts = [tokenizer.decode(batch.input_ids_T[a:b]) for a, b in pairwise(batch.boundaries)]
    assert {agent for agent in agents if all(agent in text for text in texts)} == set(), "nobody sees the other's words"
    learned = tokenizer.decode(batch.target_N)
    assert learned.count("by planner<|im_end|>") == 2
    assert learned.count("by searcher<|im_end|>") == 1
    assert learned.count("by searcher") == 2, "cut off: learned without its end"
