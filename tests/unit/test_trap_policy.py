"""Traps of the model: dropout that slips in, masks and caches that join packed sequences, weights that changed."""

from typing import Any

import pytest
import torch  # noqa: TID253 - a script that does nothing without it

from pipelines.collect.environments import Task
from pipelines.collect.environments.games import play
from pipelines.collect.environments.house import House, HouseConfig, list_vocabulary
from pipelines.collect.players import Rollout
from pipelines.collect.policies.transformers_policy import TransformersPolicy
from testkit.architectures import model_of
from testkit.training import random_backend, random_batch, random_model
from trainer.backends.base import SingleDevice
from trainer.config import OptimizerConfig
from trainer.losses import LOSSES
from trainer.online.demo import TinyPolicyConfig, build_model, build_tokenizer
from trainer.policy.model import PackedPolicy

DROPOUT: dict[str, dict[str, float]] = {
    "GPT2": {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5},
    "OPT": {"dropout": 0.5, "attention_dropout": 0.5},
    "Qwen2": {"attention_dropout": 0.5},
    "Phi": {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attention_dropout": 0.5},
}


@pytest.mark.parametrize("name", DROPOUT)
def test_a_models_dropout_never_acts(name: str) -> None:
    """Not in the first update, not after one, and not in the gradient: it is that of a model without dropout."""
    batch = random_batch([9, 5])
    backends = [
        SingleDevice(PackedPolicy(model_of(name, **options)), OptimizerConfig())
        for options in (DROPOUT[name], dict.fromkeys(DROPOUT[name], 0.0))
    ]
    for backend in backends:
        for _ in range(2):
            backend.forward_backward(batch, LOSSES["sft"]())
            backend.optim_step(1e-2)
    with_dropout, without = (backend.logprobs(batch) for backend in backends)
    assert torch.equal(with_dropout, without)


@pytest.mark.parametrize("fields", [{}, {"gradient_checkpointing": True}])
def test_a_packed_buffer_goes_in_with_positions_and_without_mask_or_cache(fields: dict[str, Any]) -> None:
    """A mask of ones, or the cache that models keep by default, would let sequences see each other."""
    model = random_model()
    policy = PackedPolicy(model, **fields)
    rows: list[dict[str, Any]] = []
    model.base_model.register_forward_pre_hook(lambda *call: rows.append(call[-1]), with_kwargs=True)
    policy.logprobs(random_batch([3, 1, 4]))[0].sum().backward()  # type: ignore[no-untyped-call]
    assert [(call["attention_mask"], call["use_cache"]) for call in rows] == [(None, False)] * len(rows)
    assert [call["position_ids"].tolist() for call in rows] == [[[0, 1, 2, 0, 0, 1, 2, 3]]] * len(rows)
    assert rows


def test_attention_never_compares_tokens_of_different_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call a sequence, of its own length and without a mask: no T x T array, for any length of the buffer."""
    from trainer.policy import attention

    real, calls = attention.scaled_dot_product_attention, []

    def spy(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        calls.append((query.shape[2], key.shape[2], options["attn_mask"]))
        result: torch.Tensor = real(query, key, value, **options)
        return result

    monkeypatch.setattr(attention, "scaled_dot_product_attention", spy)
    PackedPolicy(random_model()).logprobs(random_batch([30, 1, 12]))
    assert calls == [(30, 30, None), (1, 1, None), (12, 12, None)] * 2, "two layers"


def test_nothing_is_remembered_of_the_weights_before_an_update() -> None:
    """Keys and values of a cached prompt, under the old weights, would be a stale prefix cache."""
    tokenizer = build_tokenizer(list_vocabulary())

    def policy(seed: int) -> TransformersPolicy:
        model = build_model(tokenizer, TinyPolicyConfig(), seed=seed).eval()
        return TransformersPolicy(model, tokenizer, name="tiny", version=seed)

    def played(player: TransformersPolicy) -> tuple[list[int], list[float]]:
        """The prompt, and the log-probabilities of what was sampled."""
        (episode,) = play([House(HouseConfig(horizon=3))], [Rollout(task=Task(seed=4), seed=7)], player)
        tokens = [step.tokens for step in episode.steps if step.tokens is not None]
        return tokens[0].context_ids, [value for token in tokens for value in token.action_logprobs or []]

    old, new = policy(0), policy(1)
    prompt, before = played(old)
    assert played(old) == (prompt, before), "the same weights, the same game"
    old.model.load_state_dict(new.model.state_dict())
    assert played(old) == played(new)
    assert played(old)[0] == prompt
    assert played(old)[1] != before


def test_the_score_of_a_probe_is_the_same_in_the_player_and_in_the_trainer_after_an_update() -> None:
    """What a weight transfer has to prove, here inside one process: plain forward pass against packed scoring."""
    backend = random_backend()
    batch = random_batch([12])
    player = random_model()
    for _ in range(2):
        backend.forward_backward(batch, LOSSES["sft"]())
        backend.optim_step(1e-2)
        player.load_state_dict(backend.policy.model.state_dict())
        with torch.inference_mode():
            logprobs_TV = player(batch.input_ids_T[None], use_cache=False).logits[0].log_softmax(-1)
        expected_N = logprobs_TV[batch.predictor_N, batch.target_N]
        torch.testing.assert_close(backend.logprobs(batch), expected_N, atol=1e-5, rtol=0)


def test_sixteen_bit_products_do_not_bend_the_entropy() -> None:
    """Logits are rounded once, by the product; sums over the vocabulary are float32, so errors do not add up."""
    batch = random_batch([200, 300])
    _, exact_N = PackedPolicy(random_model()).logprobs(batch, entropy=True)
    _, narrow_N = PackedPolicy(random_model(), dtype="bfloat16").logprobs(batch, entropy=True)
    assert exact_N is not None
    assert narrow_N is not None
    difference_N = (narrow_N - exact_N).detach()
    assert 0 < float(difference_N.abs().mean()) < 0.01
    assert abs(float(difference_N.mean())) < 0.002
