"""Packed attention and the architectures it serves: the same hidden states and gradients as transformers' own."""

from itertools import pairwise
from typing import Any

import pytest
import torch  # noqa: TID253 - a script that does nothing without it

from lake.errors import UsageError
from testkit.architectures import SERVED, model_of
from testkit.examples import mostly_slow_cases
from testkit.training import random_batch, sequences_of
from trainer.policy.attention import Layout, choose_attention, flash_attention, flex_packed_attention, packed_attention
from trainer.policy.model import PackedPolicy, check_policy


def plain_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None = None, softcap: float | None = None
) -> torch.Tensor:
    """Causal attention of one sequence, written out; [heads, T, dimension]."""
    groups = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    scores = query @ key.transpose(1, 2) / query.shape[-1] ** 0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if window is not None:
        visible &= torch.ones_like(visible).triu(1 - window)
    return scores.masked_fill(~visible, float("-inf")).softmax(-1) @ value


def expected_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, boundaries: list[int], **options: Any
) -> torch.Tensor:
    """The same of a packed buffer; [1, T, heads, dimension]."""
    pieces = [
        plain_attention(query[0, :, a:b], key[0, :, a:b], value[0, :, a:b], **options) for a, b in pairwise(boundaries)
    ]
    return torch.cat(pieces, dim=1).transpose(0, 1)[None]


BOUNDARIES = [0, 5, 6, 14]


def random_heads(key_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn(1, heads, 14, 8, generator=generator, requires_grad=True) for heads in (4, key_heads, key_heads)
    )
    return query, key, value


HEADS = [(heads, window) for heads in (1, 2, 4) for window in (None, 1, 3, 8)]


@pytest.mark.parametrize(("key_heads", "window"), mostly_slow_cases(HEADS, (1, None), (2, 3)))
def test_flex_is_causal_attention_inside_each_sequence(key_heads: int, window: int | None) -> None:
    query, key, value = (tensor.detach() for tensor in random_heads(key_heads))
    options = {"layout": Layout(BOUNDARIES, query.device), "scaling": 8**-0.5, "sliding_window": window}
    with torch.no_grad():
        actual, _ = flex_packed_attention(torch.nn.Module(), query, key, value, None, **options)
    expected = expected_attention(query, key, value, BOUNDARIES, window=window)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_flex_says_where_it_cannot_train() -> None:
    query, key, value = random_heads(2)
    with pytest.raises(UsageError, match="no backward pass on"):
        flex_packed_attention(torch.nn.Module(), query, key, value, None, layout=Layout(BOUNDARIES, query.device))


@pytest.mark.parametrize("window", [None, 1, 3, 8])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_it_is_causal_attention_inside_each_sequence(key_heads: int, window: int | None) -> None:
    query, key, value = random_heads(key_heads)
    options = {"layout": Layout(BOUNDARIES, query.device), "scaling": 8**-0.5, "sliding_window": window}
    actual, _ = packed_attention(torch.nn.Module(), query, key, value, None, **options)
    expected = expected_attention(query, key, value, BOUNDARIES, window=window)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    weights = torch.randn(actual.shape, generator=torch.Generator().manual_seed(2))
    ours = torch.autograd.grad((actual * weights).sum(), (query, key, value))
    theirs = torch.autograd.grad((expected * weights).sum(), (query, key, value))
    for ours_H, theirs_H in zip(ours, theirs, strict=True):
        torch.testing.assert_close(ours_H, theirs_H, atol=1e-5, rtol=1e-4)


def test_flex_caps_scores() -> None:
    query, key, value = (tensor.detach() for tensor in random_heads(2))
    layout = Layout(BOUNDARIES, query.device)
    with torch.no_grad():
        actual, _ = flex_packed_attention(
            torch.nn.Module(), 9 * query, key, value, None, layout=layout, scaling=8**-0.5, softcap=2.0
        )
    expected = expected_attention(9 * query, key, value, BOUNDARIES, softcap=2.0)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(expected, expected_attention(9 * query, key, value, BOUNDARIES))


def slow_varlen(
    query_THD: Any, key_THD: Any, value_THD: Any, starts: Any, ends: Any, *sizes: int, **options: Any
) -> Any:
    """What torch documents of its kernel, which runs on a GPU only."""
    back, ahead = options["window_size"]
    assert ahead == 0
    assert starts.dtype == torch.int32
    assert torch.equal(starts, ends)
    assert sizes == (8, 8)
    assert options["enable_gqa"] is (query_THD.shape[1] != key_THD.shape[1])
    assert options["scale"] == query_THD.shape[-1] ** -0.5
    heads = (tensor.transpose(0, 1)[None] for tensor in (query_THD, key_THD, value_THD))
    return expected_attention(*heads, starts.tolist(), window=None if back < 0 else back + 1)[0]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("key_heads", [2, 4])
def test_flash_asks_its_kernel_for_the_same(
    monkeypatch: pytest.MonkeyPatch, key_heads: int, window: int | None
) -> None:
    monkeypatch.setattr("trainer.policy.attention.varlen_attn", slow_varlen)
    query, key, value = (tensor.detach().bfloat16() for tensor in random_heads(key_heads))
    options = {"layout": Layout(BOUNDARIES, query.device), "scaling": 8**-0.5, "sliding_window": window}
    actual, _ = flash_attention(torch.nn.Module(), query.float(), key, value, None, **options)
    assert actual.dtype == torch.float32
    expected = expected_attention(query, key, value, BOUNDARIES, window=window)
    torch.testing.assert_close(actual, expected.float(), atol=0, rtol=0)


@pytest.mark.parametrize("attention", [packed_attention, flex_packed_attention, flash_attention])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layout": None}, "no layout"),
        ({"dropout": 0.1}, "dropout"),
        ({"attention_mask": torch.ones(1, 4)}, "mask"),
        ({"s_aux": torch.ones(4)}, "uses attention sinks, which packed training does not$"),
    ],
)
def test_what_it_does_not_do_is_refused(attention: Any, options: dict[str, Any], words: str) -> None:
    tensor = torch.zeros(1, 4, 4, 8)
    arguments: dict[str, Any] = {"attention_mask": None, "layout": Layout([0, 4], tensor.device)} | options
    with pytest.raises(UsageError, match=words):
        attention(torch.nn.Module(), tensor, tensor, tensor, **arguments)


@pytest.mark.parametrize("attention", [packed_attention, flash_attention])
def test_soft_caps_are_left_to_flex(attention: Any) -> None:
    tensor = torch.zeros(1, 4, 4, 8)
    with pytest.raises(UsageError, match=r"soft-cap.*flex"):
        attention(torch.nn.Module(), tensor, tensor, tensor, None, layout=Layout([0, 4], tensor.device), softcap=30.0)


def test_attention_is_chosen_by_device_and_dtype() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert choose_attention("auto", cpu, torch.bfloat16) == "sdpa"
    assert choose_attention("auto", gpu, torch.float32) == "sdpa"
    assert choose_attention("auto", gpu, torch.bfloat16) == "flash"
    assert choose_attention("flex", cpu, torch.float32) == "flex"
    for device, dtype in ((cpu, torch.bfloat16), (gpu, torch.float32)):
        with pytest.raises(UsageError, match="flash attention needs"):
            choose_attention("flash", device, dtype)


def test_a_gpu_without_flash_attention_takes_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A T4 has compute capability 7.5, a V100 7.0."""
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, expected in (((7, 0), "sdpa"), ((7, 5), "sdpa"), ((8, 0), "flash"), ((9, 0), "flash")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, pair=capability: pair)
        assert choose_attention("auto", gpu, torch.float16) == expected
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(UsageError, match=r"compute capability 8\.0 .*sdpa"):
        choose_attention("flash", gpu, torch.float16)


KINDS = [(name, kind) for name in SERVED for kind in ("sdpa", "flex")]
USUAL = [(name, kind) for name, kind in KINDS if kind == "sdpa" or name in ("Llama", "Gemma3Text", "GPT2")]


@pytest.mark.parametrize(("name", "kind"), mostly_slow_cases(KINDS, *USUAL))
def test_an_architecture_scores_packed_sequences_as_single_ones(name: str, kind: Any) -> None:
    """Against the untouched model: one sequence at a time, transformers' own attention and full logits."""
    batch = random_batch([9, 3, 14])
    policy = PackedPolicy(model_of(name), attention=kind)
    with torch.no_grad():
        logprobs_N, _ = policy.logprobs(batch)
    untouched = model_of(name)
    expected = []
    for part in sequences_of(batch):
        with torch.no_grad():
            logits_TV = untouched(input_ids=part.input_ids_T[None], use_cache=False).logits[0].float()
        expected.append(logits_TV.log_softmax(-1)[part.predictor_N, part.target_N])
    torch.testing.assert_close(logprobs_N, torch.cat(expected), atol=1e-4, rtol=0)
    check_policy(policy)


def test_gemma_2_is_served_by_flex() -> None:
    """It soft-caps attention scores and logits."""
    check_policy(PackedPolicy(model_of("Gemma2"), attention="flex"))
    with pytest.raises(UsageError, match=r"Gemma2Attention soft-caps its attention.*flex"):
        check_policy(PackedPolicy(model_of("Gemma2"), attention="sdpa"))


@pytest.mark.parametrize(
    ("name", "words"),
    [("GptOss", "sinks"), ("Mamba", "scores packed sequences differently"), ("StableLm", "no layout")],
)
def test_an_architecture_that_is_not_served_is_refused(name: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_policy(PackedPolicy(model_of(name)))


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Mistral"])
def test_an_architecture_has_the_gradients_of_single_sequences(name: str) -> None:
    batch = random_batch([9, 3, 14])
    policy = PackedPolicy(model_of(name))
    policy.logprobs(batch)[0].sum().backward()  # type: ignore[no-untyped-call]
    untouched = model_of(name)
    for part in sequences_of(batch):
        logits_TV = untouched(input_ids=part.input_ids_T[None], use_cache=False).logits[0].float()
        logits_TV.log_softmax(-1)[part.predictor_N, part.target_N].sum().backward()
    frozen = dict(untouched.named_parameters())
    for parameter_name, parameter in policy.model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, frozen[parameter_name].grad, atol=1e-4, rtol=1e-3, msg=parameter_name
        )
