"""Policies: what a model samples is what is recorded, and neither batch nor cache changes it."""

import math

import numpy as np
import pytest
import torch  # noqa: TID253 - a script that does nothing without it

from lake.errors import DataRefusedError
from lake.records import EpisodeRecord
from pipelines.collect.environments import Task
from pipelines.collect.environments.games import play
from pipelines.collect.environments.house import House, HouseConfig, HouseScript, list_vocabulary
from pipelines.collect.players import Rollout
from pipelines.collect.policies import Decision, Message, PolicyCard, Turn
from pipelines.collect.policies.rendering import ContextRenderer
from pipelines.collect.policies.transformers_policy import (
    CachedBatch,
    SamplingConfig,
    TransformersPolicy,
    sample,
)
from testkit.houses import solution, world_of
from trainer.online.demo import ASSISTANT, END, USER, TinyPolicyConfig, build_model, build_tokenizer

GLUED_TEMPLATE = (
    "{% for m in messages %}{{ '" + USER + "' if m.role == 'user' else '" + ASSISTANT + "' }}{{ m.content }}"
    "{% if m.role == 'assistant' %}" + END + "{% endif %} .{% endfor %}"
    "{% if add_generation_prompt %}" + ASSISTANT + "{% endif %}"
)
"""Like ChatML, it writes something after the end marker (here a full stop)."""


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(list_vocabulary())


@pytest.fixture(scope="module")
def model(tokenizer):
    return build_model(tokenizer, TinyPolicyConfig(), seed=0).eval()


def policy(model, tokenizer, temperature=1.0, max_action_tokens=5):
    sampling = SamplingConfig(temperature=temperature, max_action_tokens=max_action_tokens)
    return TransformersPolicy(model, tokenizer, name="tiny", version=3, sampling=sampling)


def rollouts(player, count, horizon=6) -> list[EpisodeRecord]:
    """Episodes of different lengths of text; every second one ends a step earlier."""
    houses = [House(HouseConfig(horizon=horizon - index % 2)) for index in range(count)]
    return play(houses, [Rollout(task=Task(seed=40 + i), rollout_index=i, seed=7 + i) for i in range(count)], player)


def sequence(episode) -> list[int]:
    return [token for step in episode.steps for token in step.tokens.context_ids + step.tokens.action_ids]


def recorded_logprobs(episode) -> list[float]:
    return [logprob for step in episode.steps for logprob in step.tokens.action_logprobs]


def plain_logprobs(model, episode, temperature) -> list[float]:
    """Log-probabilities of the action tokens from one forward pass over the episode's whole sequence."""
    with torch.inference_mode():
        logits_TV = model(torch.tensor([sequence(episode)]), use_cache=False).logits[0]
    logprobs_TV = (logits_TV.float() / temperature).log_softmax(-1)
    ids, at = [], 0
    for step in episode.steps:
        at += len(step.tokens.context_ids)
        for token in step.tokens.action_ids:
            ids.append(logprobs_TV[at - 1, token].item())
            at += 1
    return ids


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_recorded_logprobs_are_those_of_a_plain_forward_pass(model, tokenizer, temperature):
    for episode in rollouts(policy(model, tokenizer, temperature), 5):
        expected = plain_logprobs(model, episode, temperature)
        assert recorded_logprobs(episode) == pytest.approx(expected, abs=1e-5)
        assert all(logprob <= 0 for logprob in recorded_logprobs(episode))


def test_another_temperature_would_not_pass_for_the_recorded_one(model, tokenizer):
    episode = rollouts(policy(model, tokenizer, 0.5), 1)[0]
    assert recorded_logprobs(episode) != pytest.approx(plain_logprobs(model, episode, 1.0), abs=1e-2)


def test_a_batch_plays_what_each_rollout_plays_alone(model, tokenizer):
    batched = rollouts(policy(model, tokenizer), 6)
    for index, episode in enumerate(batched):
        house = House(HouseConfig(horizon=6 - index % 2))
        rollout = Rollout(task=Task(seed=40 + index), rollout_index=index, seed=7 + index)
        alone = play([house], [rollout], policy(model, tokenizer))[0]
        assert sequence(alone) == sequence(episode)
        assert recorded_logprobs(alone) == pytest.approx(recorded_logprobs(episode), abs=1e-5)


def test_the_cache_plays_what_full_re_encoding_plays(model, tokenizer):
    """An oracle without a cache: every token comes from a forward pass over everything before it."""
    episode = rollouts(policy(model, tokenizer), 1)[0]
    rng, tokens = np.random.default_rng(7), []
    for step in episode.steps:
        tokens += step.tokens.context_ids
        for recorded in step.tokens.action_ids:
            with torch.inference_mode():
                logprobs_V = model(torch.tensor([tokens]), use_cache=False).logits[0, -1].log_softmax(-1)
            sampled = int(np.searchsorted(np.cumsum(np.exp(logprobs_V.double().numpy())), rng.random()))
            assert sampled == recorded
            tokens.append(recorded)


def test_the_tokens_are_the_template_of_the_whole_conversation(model, tokenizer):
    for episode in rollouts(policy(model, tokenizer), 4):
        messages = list(episode.initial_messages)
        for index, step in enumerate(episode.steps):
            messages += (
                [*step.context, {"role": "assistant", "content": step.action}]
                if index
                else [{"role": "assistant", "content": step.action}]
            )
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        cut = [] if episode.steps[-1].finish_reason == "stop" else [tokenizer.eos_token_id]
        assert sequence(episode) + cut == tokenizer.encode(text, add_special_tokens=False)


def test_only_added_tokens_are_context(model, tokenizer):
    episode = rollouts(policy(model, tokenizer), 1)[0]
    for before, step in zip(episode.steps, episode.steps[1:], strict=False):
        rendered = tokenizer.encode(USER + step.state + ASSISTANT, add_special_tokens=False)
        glue = [] if before.finish_reason == "stop" else [tokenizer.eos_token_id]
        assert step.tokens.context_ids == glue + rendered


def test_an_action_ends_with_its_end_token_or_is_marked_as_cut(model, tokenizer):
    steps = [step for episode in rollouts(policy(model, tokenizer, max_action_tokens=3), 30) for step in episode.steps]
    assert {step.finish_reason for step in steps} == {"stop", "length"}
    for step in steps:
        ended = step.tokens.action_ids[-1] == tokenizer.eos_token_id
        assert ended == (step.finish_reason == "stop")
        assert tokenizer.eos_token_id not in step.tokens.action_ids[:-1]
        assert len(step.tokens.action_ids) <= 3
        assert step.action == tokenizer.decode(step.tokens.action_ids[: -1 if ended else None])


def test_a_template_that_writes_after_the_end_marker_is_followed(model):
    tokenizer = build_tokenizer(list_vocabulary())
    tokenizer.chat_template = GLUED_TEMPLATE
    steps = [step for episode in rollouts(policy(model, tokenizer), 4) for step in episode.steps[1:]]
    stop = tokenizer.convert_tokens_to_ids(".")
    for step in steps:
        assert step.tokens.context_ids[-2:] == tokenizer.convert_tokens_to_ids([".", ASSISTANT])
        assert step.tokens.context_ids[0] in (stop, tokenizer.eos_token_id)
    assert any(step.tokens.context_ids[0] == stop for step in steps)


def test_a_template_that_rewrites_generated_turns_is_refused():
    tokenizer = build_tokenizer(list_vocabulary())
    tokenizer.chat_template = "{% for m in messages %}" + USER + "{{ m.content }}{% endfor %}"
    message: Message = {"role": "user", "content": "look"}
    assert ContextRenderer(tokenizer).context([message], is_first=True) == tokenizer.encode(USER + "look")
    with pytest.raises(DataRefusedError, match="not continue a generated"):
        ContextRenderer(tokenizer).context([message], is_first=False)


def test_what_is_recorded_beside_the_tokens(model, tokenizer):
    tokens = rollouts(policy(model, tokenizer, 0.5), 1)[0].steps[0].tokens
    assert (tokens.temperature, tokens.top_p, tokens.top_k, tokens.min_p) == (0.5, 1.0, 0, 0.0)
    assert (tokens.logprobs_mode, tokens.policy_version, tokens.dtype) == ("processed", 3, "float32")
    assert tokens.engine.startswith("transformers ")
    assert len(tokens.action_logprobs) == len(tokens.action_ids)


def test_the_card_tells_policies_and_encodings_apart(model, tokenizer):
    card = policy(model, tokenizer, 0.5).card
    assert (card.name, card.version, card.sampling["temperature"], card.sampling["max_action_tokens"]) == (
        "tiny",
        3,
        0.5,
        5,
    )
    assert card.tokenizer == policy(model, build_tokenizer(list_vocabulary())).card.tokenizer
    assert card.tokenizer != policy(model, build_tokenizer([*list_vocabulary(), "garage"])).card.tokenizer
    assert card.chat_template == tokenizer.chat_template


def test_sampling_takes_each_token_for_its_share_of_the_unit_interval():
    probabilities_V = torch.tensor([0.5, 0.0, 0.125, 0.375])
    uniform_R = (np.arange(800) + 0.5) / 800
    tokens_R = sample(probabilities_V.log().expand(800, 4), uniform_R)
    assert torch.bincount(tokens_R, minlength=4).tolist() == [400, 0, 100, 300]


def test_sampling_at_the_borders_stays_in_the_vocabulary():
    logprobs_RV = torch.full((2, 5), 0.2).log()
    assert sample(logprobs_RV, np.array([0.0, math.nextafter(1.0, 0.0)])).tolist() == [0, 4]
    impossible_at_both_ends_V = torch.tensor([0.0, 0.5, 0.5, 0.0]).log().expand(2, 4)
    assert sample(impossible_at_both_ends_V, np.array([0.0, math.nextafter(1.0, 0.0)])).tolist() == [1, 2]


def test_rows_leave_the_cache_without_disturbing_the_others(model):
    undivided, part = CachedBatch(model, 3), CachedBatch(model, 3)
    chunks = [[3, 4, 5, 6], [7], [8, 9]]
    with torch.inference_mode():
        undivided.extend(chunks)
        part.extend(chunks)
        part.keep([2, 0])
        full_BV, rest_BV = undivided.extend([[1, 2], [3], [4]]), part.extend([[4], [1, 2]])
    torch.testing.assert_close(rest_BV, full_BV[[2, 0]], atol=1e-5, rtol=0)


def test_rows_without_new_tokens_keep_their_place(model):
    batch = CachedBatch(model, 2)
    with torch.inference_mode():
        batch.extend([[3, 4, 5], []])
        batch.extend([[], [6]])
        logits_BV = batch.extend([[7], [8]])
        first_V = model(torch.tensor([[3, 4, 5, 7]])).logits[0, -1]
        second_V = model(torch.tensor([[6, 8]])).logits[0, -1]
    torch.testing.assert_close(logits_BV, torch.stack([first_V, second_V]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"max_action_tokens": 0}, {"top_p": 0.9}])
def test_sampling_that_ratios_could_not_undo_is_refused(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        SamplingConfig(**fields)


def look_around(session, rollout: int, turns: int) -> list[Decision]:
    observation = House().reset(11).observation
    turn = Turn(rollout, [{"role": "user", "content": observation}], admissible=("look", "go east"))
    return [session.act([turn])[0] for _ in range(turns)]


def test_the_script_is_a_function_of_its_seed_and_not_of_its_neighbours():
    alone = look_around(HouseScript(0.7).start([5]), 0, 30)
    assert look_around(HouseScript(0.7).start([1, 5, 9]), 1, 30) == alone
    assert look_around(HouseScript(0.7).start([6]), 0, 30) != alone


def test_a_noisy_script_takes_all_admissible_actions_and_no_other():
    assert {d.action for d in look_around(HouseScript(1.0).start([0]), 0, 60)} == {"look", "go east"}
    assert HouseScript(0.7).card == PolicyCard(name="house-script", sampling={"noise": 0.7})


def test_the_flawless_script_is_nearly_as_short_as_the_solution():
    seeds = range(100)
    starts = [Rollout(task=Task(seed=seed), seed=seed) for seed in seeds]
    lengths = [len(e.steps) for e in play([House() for _ in seeds], starts, HouseScript())]
    shortest = [len(solution(world_of(seed))) for seed in seeds]
    assert all(length >= least for length, least in zip(lengths, shortest, strict=True))
    assert sum(lengths) < 1.5 * sum(shortest)
