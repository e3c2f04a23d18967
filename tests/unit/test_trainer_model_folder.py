"""A model folder is data: what would run code, lead out of the folder, or fail in the middle is refused by name."""

import json
import pickle
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: TID253 - a script that does nothing without it
from click.testing import CliRunner

from lake.cli import trajlake
from lake.errors import TrajlakeError, UsageError
from lake.storage.atomic import FILES
from testkit.lakes import build_lake
from trainer.policy.model_files import build_empty_model, check_model_folder, load_model, load_tokenizer
from trainer.policy.tiny_model import TinyModelConfig, make_tiny_model

CODE = """
from pathlib import Path
Path({marker!r}).write_text("ran")
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class Config(LlamaConfig): pass
class Model(LlamaForCausalLM): pass
class Tokenizer(PreTrainedTokenizerFast): pass
"""
AUTO_MAP = {
    "config.json": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"},
    "tokenizer_config.json": {"AutoTokenizer": [None, "code.Tokenizer"]},
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lake of texts and a model."""
    folder = tmp_path_factory.mktemp("world")
    snapshot = build_lake(folder / "lake").snapshot()
    make_tiny_model(snapshot, folder / "model", TinyModelConfig(vocabulary=300, hidden_size=32))
    return folder


@pytest.fixture
def model(world: Path, tmp_path: Path) -> Path:
    """A copy of the model, to be spoilt."""
    return shutil.copytree(world / "model", tmp_path / "model")


def edit(path: Path, **fields: Any) -> None:
    """Set fields of a JSON file, which is made if needed."""
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(before | fields))


@pytest.mark.parametrize("name", AUTO_MAP)
@pytest.mark.parametrize("command", ["train", "rescore"])
def test_no_command_runs_the_code_of_a_model_folder(
    world: Path, model: Path, tmp_path: Path, command: str, name: str
) -> None:
    (model / "code.py").write_text(CODE.format(marker=str(tmp_path / "marker")))
    edit(model / name, auto_map=AUTO_MAP[name])
    arguments = {
        "train": ["train", "--model", str(model), "--loss", "sft", "--out", str(tmp_path / "out")],
        "rescore": ["rescore", str(model)],
    }[command]
    result = CliRunner().invoke(trajlake, [*arguments, "--lake", str(world / "lake")], input="y\ny\ny\n")
    assert isinstance(result.exception, TrajlakeError), result.output
    assert f"{name} has `auto_map`" in str(result.exception)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("load", [load_model, build_empty_model, load_tokenizer])
def test_every_way_to_load_a_model_refuses_its_code(model: Path, load: Callable[[Path], Any]) -> None:
    edit(model / "generation_config.json", auto_map={"AutoModelForCausalLM": "code.Model"})
    with pytest.raises(UsageError, match=r"generation_config.json has `auto_map`"):
        load(model)


def test_code_beside_a_gguf_file_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    edit(tmp_path / "tokenizer_config.json", auto_map=AUTO_MAP["tokenizer_config.json"])
    for load in (load_model, load_tokenizer):
        with pytest.raises(UsageError, match=r"tokenizer_config.json has `auto_map`"):
            load(tmp_path / "m.gguf")


class _Evil:
    """Its pickle runs a command when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.marker,))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "weights.pt"])
def test_pickled_weights_are_refused_unopened(model: Path, tmp_path: Path, name: str) -> None:
    (model / "model.safetensors").unlink()
    (model / name).write_bytes(pickle.dumps(_Evil(tmp_path / "marker")))
    with pytest.raises(UsageError, match=rf"{name}: weights in a pickle .* only safetensors"):
        load_model(model)
    assert not (tmp_path / "marker").exists()


def test_a_pickle_beside_safetensors_is_not_opened(model: Path, tmp_path: Path) -> None:
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(_Evil(tmp_path / "marker")))
    load_model(model)
    assert not (tmp_path / "marker").exists()


def sharded(model: Path, shard: str) -> Path:
    """Put an index into a model, that names one shard for all its weights."""
    (model / FILES).unlink()  # it is not as it was written any more
    weights = load_model(model).state_dict()
    (model / "model.safetensors").rename(model / "part.safetensors")
    (model / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(weights, shard)})
    )
    return model


@pytest.mark.parametrize(
    ("shard", "words"),
    [
        ("{outside}/part.safetensors", "without a path"),
        ("../outside/part.safetensors", "without a path"),
        ("inner/part.safetensors", "without a path"),
        ("link.safetensors", "is a link out of the folder"),
        ("gone.safetensors", "is missing"),
        ("code.py", "valid: names of safetensors files"),
    ],
)
def test_weights_are_read_from_the_folder_alone(model: Path, tmp_path: Path, shard: str, words: str) -> None:
    outside = tmp_path / "outside"
    shutil.copytree(model, outside)
    (outside / "model.safetensors").rename(outside / "part.safetensors")
    (model / "link.safetensors").symlink_to(outside / "part.safetensors")
    with pytest.raises(UsageError, match=words):
        load_model(sharded(model, shard.format(outside=outside)))


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer.json"])
def test_a_torn_copy_of_a_model_is_refused(model: Path, name: str) -> None:
    """Without its generation settings a model would be loaded, and sample otherwise."""
    (model / name).unlink()
    for load in (load_model, load_tokenizer):
        with pytest.raises(UsageError, match=name):
            load(model)


def test_a_model_is_read_where_a_killed_writer_set_it_aside(model: Path) -> None:
    before = load_model(model).state_dict()
    model.rename(model.with_name(f".{model.name}.replaced"))
    after = load_model(model).state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    load_tokenizer(model)


def test_an_index_of_files_in_the_folder_is_followed(model: Path) -> None:
    before = load_model(model).state_dict()
    after = load_model(sharded(model, "part.safetensors")).state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_download_whose_files_are_links_to_its_own_blobs_is_taken(model: Path, tmp_path: Path) -> None:
    """The layout of huggingface_hub's cache."""
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "1a2b", tmp_path / "hub" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(model.iterdir())):
        (snapshot / file.name).symlink_to(file.rename(blobs / str(number)))
    load_model(snapshot)
    load_tokenizer(snapshot)


@pytest.mark.parametrize(
    ("file", "fields", "words"),
    [
        ("config.json", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"are quantised \(gptq\)"),
        ("config.json", {"quantization_config": {"quant_method": "awq"}}, r"are quantised \(awq\)"),
        ("config.json", {"compression_config": {"format": "pack"}}, "`compression_config`: the weights are quantised"),
        ("config.json", {"text_config": {"quantization_config": {"bits": 4}}}, "`text_config.quantization_config`"),
        ("config.json", {"eos_token_id": "</s>"}, "`eos_token_id` is '</s>'; valid: a token id, or a list of them"),
        ("config.json", {"eos_token_id": [2, True]}, r"`eos_token_id` is \[2, True\]"),
        ("config.json", {"eos_token_id": -1}, "`eos_token_id` is -1"),
        ("generation_config.json", {"eos_token_id": 300}, "generation_config.json: .* is 300; valid: .* 0 to 299"),
        ("config.json", {"transformers_weights": "../other.safetensors"}, "`transformers_weights` names"),
        ("adapter_config.json", {"base_model_name_or_path": "/elsewhere"}, "is an adapter on another model"),
    ],
)
def test_what_could_not_be_trained_is_told_before_it_is_loaded(
    model: Path, file: str, fields: dict[str, Any], words: str
) -> None:
    edit(model / file, **fields)
    with pytest.raises(UsageError, match=words):
        load_model(model)


@pytest.mark.parametrize("text", ["{", "[]", "", "\ud800", "[" * 100_000])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_a_damaged_configuration_is_one_line(model: Path, file: str, text: str) -> None:
    (model / file).write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(UsageError, match=f"{file} is damaged"):
        check_model_folder(model)


@pytest.mark.parametrize(
    ("file", "fields"),
    [
        ("config.json", {"model_type": "unheard_of"}),
        ("config.json", {"model_type": 3}),
        ("config.json", {"hidden_size": "wide"}),
        ("config.json", {"num_hidden_layers": None}),
        ("config.json", {"num_attention_heads": 0}),
        ("config.json", {"hidden_act": "no such thing"}),
        ("config.json", {"rope_parameters": 5}),
        ("config.json", {"vocab_size": "many"}),
        ("generation_config.json", {"max_new_tokens": "some"}),
        ("generation_config.json", {"temperature": "hot"}),
    ],
)
def test_a_configuration_that_transformers_refuses_is_one_line(model: Path, file: str, fields: dict[str, Any]) -> None:
    edit(model / file, **fields)
    with suppress(UsageError):
        load_model(model)


@pytest.mark.parametrize(
    "fields", [{"eos_token": 5}, {"tokenizer_class": "Nothing"}, {"added_tokens_decoder": 3}, {"eos_token": {"a": 1}}]
)
def test_a_tokenizer_that_transformers_refuses_is_one_line(model: Path, fields: dict[str, Any]) -> None:
    edit(model / "tokenizer_config.json", **fields)
    with suppress(UsageError):
        load_tokenizer(model)
