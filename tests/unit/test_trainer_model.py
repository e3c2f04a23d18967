"""Log-probabilities of a packed buffer: equal to those of separate sequences, and to decoding token by token."""

import pytest
import torch  # noqa: TID253 - a script that does nothing without it

from lake.errors import UsageError
from testkit.architectures import model_of
from testkit.training import random_batch, random_model, sequences_of
from trainer.policy import model as model_module
from trainer.policy.model import PackedPolicy, check_policy, load_policy

LENGTHS = [7, 1, 30, 2, 13]


@pytest.mark.parametrize("temperature", [None, 0.7, 1.3])
def test_packed_equals_separate(temperature: float | None) -> None:
    policy = PackedPolicy(random_model())
    batch = random_batch(LENGTHS, temperature=temperature)
    packed_N, entropy_N = policy.logprobs(batch, entropy=True)
    logprobs_of_parts = [policy.logprobs(part, entropy=True) for part in sequences_of(batch)]
    torch.testing.assert_close(packed_N, torch.cat([p[0] for p in logprobs_of_parts]), atol=1e-5, rtol=0)
    assert entropy_N is not None
    torch.testing.assert_close(
        entropy_N, torch.cat([p[1] for p in logprobs_of_parts if p[1] is not None]), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("name", ["Qwen2", "Llama", "Mistral", "Gemma3Text", "GPT2"])
def test_packed_equals_decoding_one_token_at_a_time(name: str) -> None:
    """The shift by one: the log-probability of token t comes from the logits at t - 1; windows are shorter."""
    batch = random_batch([9, 17], temperature=0.8)
    packed_N, _ = PackedPolicy(model_of(name)).logprobs(batch)
    decoder = model_of(name)
    expected = []
    for part in sequences_of(batch):
        targets = dict(zip((part.predictor_N + 1).tolist(), part.target_N.tolist(), strict=True))
        cache, logits_V = None, torch.zeros(40)
        with torch.inference_mode():
            for position, token in enumerate(part.input_ids_T.tolist()):
                if position in targets:
                    assert token == targets[position]
                    expected.append(torch.log_softmax(logits_V / 0.8, dim=-1)[token].item())
                output = decoder(input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True)
                cache, logits_V = output.past_key_values, output.logits[0, -1].float()
    torch.testing.assert_close(packed_N.detach(), torch.tensor(expected), atol=1e-4, rtol=0)


def test_one_sequence_does_not_see_another() -> None:
    policy = PackedPolicy(random_model())
    batch = random_batch([8, 8])
    before_N, _ = policy.logprobs(batch)
    batch.input_ids_T[:8] = (batch.input_ids_T[:8] + 1) % 40
    after_N, _ = policy.logprobs(batch)
    second_N = batch.predictor_N >= 8
    torch.testing.assert_close(before_N[second_N], after_N[second_N], atol=0, rtol=0)
    assert not torch.allclose(before_N[~second_N], after_N[~second_N])


def test_chunked_head_gives_the_same_values_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = random_batch(LENGTHS, temperature=0.9)
    results = []
    for elements in (model_module.HEAD_ELEMENTS, 3 * 40):
        monkeypatch.setattr(model_module, "HEAD_ELEMENTS", elements)
        policy = PackedPolicy(random_model())
        logprobs_N, entropy_N = policy.logprobs(batch, entropy=True)
        assert entropy_N is not None
        (logprobs_N.sum() + 0.3 * entropy_N.sum()).backward()
        grads = torch.cat([p.grad.flatten() for p in policy.model.parameters()])
        results.append((logprobs_N.detach(), entropy_N.detach(), grads))
    for undivided, chunked in zip(*results, strict=True):
        torch.testing.assert_close(chunked, undivided, atol=2e-5, rtol=1e-5)


def test_entropy_is_that_of_the_distribution() -> None:
    policy = PackedPolicy(random_model())
    batch = random_batch([12], temperature=0.6)
    _, entropy_N = policy.logprobs(batch, entropy=True)
    with torch.no_grad():
        logits_TV = random_model()(input_ids=batch.input_ids_T[None]).logits[0].float() / 0.6
    expected_N = torch.distributions.Categorical(logits=logits_TV[batch.predictor_N]).entropy()
    assert entropy_N is not None
    torch.testing.assert_close(entropy_N, expected_N, atol=1e-5, rtol=1e-5)


def test_logprobs_are_never_above_zero() -> None:
    certain = random_model()
    certain.get_output_embeddings().weight.data *= 1000
    logprobs_N, _ = PackedPolicy(certain).logprobs(random_batch([40]))
    assert logprobs_N.max() <= 0


def test_generating_with_the_trained_instance_is_refused() -> None:
    policy = PackedPolicy(random_model())
    with pytest.raises(UsageError, match="use another one"):
        policy.model(input_ids=torch.tensor([[1, 2, 3]]))


def test_a_model_whose_packed_scores_are_others_is_refused() -> None:
    """Nothing that an architecture does on its own goes unnoticed: here, logits that are shifted behind the head."""
    odd = random_model()
    policy = PackedPolicy(odd)
    check_policy(policy)
    odd.get_output_embeddings().register_forward_hook(lambda *call: call[-1] * (2.0 if call[-1].ndim == 3 else 1.0))
    with pytest.raises(UsageError, match=r"Qwen2ForCausalLM with sdpa attention scores packed .* choose another"):
        check_policy(policy)


def test_the_check_leaves_the_model_as_it_was() -> None:
    policy = PackedPolicy(random_model())
    torch.manual_seed(5)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    check_policy(policy)
    assert torch.equal(torch.rand(3), drawn)
    assert all(p.grad is None for p in policy.model.parameters())
    policy.logprobs(random_batch([4]))


def test_sixteen_bit_products_leave_float32_behind() -> None:
    """Autocast: weights, gradients and log-probabilities are float32, and close to those of float32 products."""
    batch = random_batch(LENGTHS)
    exact_N, _ = PackedPolicy(random_model()).logprobs(batch)
    policy = PackedPolicy(random_model(), dtype="bfloat16")
    check_policy(policy)
    narrow_N, entropy_N = policy.logprobs(batch, entropy=True)
    assert entropy_N is not None
    assert narrow_N.dtype == entropy_N.dtype == torch.float32
    assert 0 < (narrow_N - exact_N).abs().mean() < 0.1
    narrow_N.sum().backward()  # type: ignore[no-untyped-call]
    assert {p.grad.dtype for p in policy.model.parameters()} == {torch.float32}


def test_gradient_checkpointing_changes_nothing_but_memory() -> None:
    batch = random_batch(LENGTHS)
    results, saved = [], []
    for recompute in (False, True):
        policy = PackedPolicy(random_model(), gradient_checkpointing=recompute)
        kept_positions = [0]

        def pack(tensor: torch.Tensor, kept_positions: list[int] = kept_positions) -> torch.Tensor:
            kept_positions[0] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            logprobs_N, _ = policy.logprobs(batch)
        logprobs_N.sum().backward()  # type: ignore[no-untyped-call]
        results.append(torch.cat([p.grad.flatten() for p in policy.model.parameters()]))
        saved.append(kept_positions[0])
    assert torch.equal(*results)
    assert saved[1] < saved[0] / 2
    assert not policy.model.training


def test_a_folder_without_a_model_says_what_to_do(tmp_path: object) -> None:
    with pytest.raises(UsageError, match="trajlake init-model"):
        load_policy(str(tmp_path))


def test_tied_weights_count_once() -> None:
    policy = PackedPolicy(random_model())
    assert policy.num_parameters == sum(p.numel() for p in policy.model.parameters())
    assert policy.vocabulary == 40
