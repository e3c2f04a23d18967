"""LoRA: what is trained, what a checkpoint holds, and that the merged model computes the same."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: TID253 - a script that does nothing without it
from safetensors.torch import load_file

from lake.errors import CheckpointError, UsageError
from testkit.architectures import model_of
from testkit.training import config, random_batch, random_model
from trainer.backends.base import SingleDevice
from trainer.config import LoRAConfig, OptimizerConfig
from trainer.losses import LOSSES
from trainer.online.demo import build_tokenizer
from trainer.policy.model import PackedPolicy, add_adapters, build_policy, load_policy, merge_adapters
from trainer.runs.checkpoint import WEIGHTS, State, load_checkpoint, save_checkpoint
from trainer.runs.training_run import export_model

peft = pytest.importorskip("peft", reason="needs trajlake[lora]")
POSITION = State(optimizer_step=1, epoch=0, plan_hash="0123456789abc", snapshot={}, config={})
SETTINGS = LoRAConfig(rank=4, alpha=8.0)


def adapted(seed: int = 0, lora: LoRAConfig = SETTINGS) -> SingleDevice:
    model = random_model(seed)
    policy = PackedPolicy(model)
    add_adapters(model, lora, seed=3)
    return SingleDevice(policy, OptimizerConfig())


def train(backend: SingleDevice, steps: int = 3) -> None:
    for seed in range(steps):
        backend.forward_backward(random_batch([9, 14], seed), LOSSES["sft"]())
        backend.optim_step(1e-2)


def test_fresh_adapters_change_nothing() -> None:
    batch = random_batch([9, 5])
    plain_N, _ = PackedPolicy(random_model()).logprobs(batch)
    assert torch.equal(adapted().logprobs(batch), plain_N)


def test_the_seed_decides_the_adapters_and_nothing_else_of_the_random_state() -> None:
    torch.manual_seed(1)
    drawn = torch.rand(2)
    torch.manual_seed(1)
    assert adapted().digest() == adapted().digest()
    assert torch.equal(torch.rand(2), drawn)


def test_adapters_alone_are_trained_and_saved(tmp_path: Path) -> None:
    backend = adapted()
    before = {name: tensor.clone() for name, tensor in backend.get_all_weights().items()}
    train(backend)
    changed = {n for n, tensor in backend.get_all_weights().items() if not torch.equal(tensor, before[n])}
    assert changed == set(backend.get_weights())
    assert all(".lora_" in name for name in changed)
    # Seven projections in each of two layers, with two matrices each.
    assert len(changed) == 2 * 7 * 2
    state = save_checkpoint(tmp_path / "c", backend, POSITION)
    assert set(load_file(tmp_path / "c" / WEIGHTS)) == changed
    assert state.base_sha256


def test_a_resumed_run_goes_on_exactly(tmp_path: Path) -> None:
    first, second = adapted(), adapted()
    train(first)
    save_checkpoint(tmp_path / "c", first, POSITION)
    load_checkpoint(tmp_path / "c", second)
    for backend in (first, second):
        train(backend)
    assert first.digest() == second.digest()


def test_adapters_of_another_base_model_are_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", adapted(), POSITION)
    with pytest.raises(CheckpointError, match=r"checkpoint .*c: .* another base model"):
        load_checkpoint(tmp_path / "c", adapted(seed=1))


@pytest.mark.parametrize("name", ["Qwen2", "GPT2", "Phi"])
def test_merged_weights_compute_the_same(name: str) -> None:
    """Also where matrices are kept transposed (GPT-2) or have biases (Phi)."""
    adapted_model, plain, untouched = (model_of(name) for _ in range(3))
    policy = PackedPolicy(adapted_model)
    add_adapters(adapted_model, SETTINGS, seed=3)
    backend = SingleDevice(policy, OptimizerConfig())
    train(backend)
    batch = random_batch([9, 14])
    everything = {n: backend.get_all_weights()[first] for n, first in policy.map_tied_names().items()}
    plain.load_state_dict(merge_adapters(everything, adapted_model))
    found_N, _ = PackedPolicy(plain).logprobs(batch)
    torch.testing.assert_close(found_N.detach(), backend.logprobs(batch), atol=1e-4, rtol=0)
    assert not torch.allclose(found_N, PackedPolicy(untouched).logprobs(batch)[0], atol=1e-2)


def test_the_export_holds_the_merged_model_and_the_adapters(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "model"
    random_model().save_pretrained(folder)
    build_tokenizer(["word"]).save_pretrained(folder)
    settings = config(model=str(folder), lora=SETTINGS)
    backend = SingleDevice(build_policy(settings), OptimizerConfig())
    train(backend)
    export_model(backend, settings, tmp_path / "final")
    batch = random_batch([9, 14])
    expected_N = backend.logprobs(batch)
    merged_N, _ = load_policy(tmp_path / "final").logprobs(batch)
    torch.testing.assert_close(merged_N.detach(), expected_N, atol=1e-5, rtol=0)
    base: Any = AutoModelForCausalLM.from_pretrained(folder)
    beside = peft.PeftModel.from_pretrained(base, tmp_path / "final" / "adapter")
    assert json.loads((tmp_path / "final" / "adapter" / "adapter_config.json").read_text())["r"] == 4
    names = {name for name, _ in beside.named_parameters() if ".lora_" in name}
    assert len(names) == len(backend.get_weights())
    for name, tensor in backend.get_weights().items():
        assert torch.equal(dict(beside.named_parameters())[f"base_model.model.{name}"], tensor)


def test_layers_can_be_named() -> None:
    names = set(adapted(lora=LoRAConfig(targets=("q_proj",))).get_weights())
    assert len(names) == 4
    assert all(".q_proj.lora_" in name for name in names)
    with pytest.raises(UsageError, match=r"named \('nothing',\).*down_proj, gate_proj"):
        adapted(lora=LoRAConfig(targets=("nothing",)))
    with pytest.raises(UsageError, match=r"lm_head cannot have adapters"):
        adapted(lora=LoRAConfig(targets=("lm_head",)))


def test_without_peft_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UsageError, match=r'pip install "trajlake\[lora\]"'):
        adapted()
