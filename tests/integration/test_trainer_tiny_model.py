"""init-model: an ordinary folder that transformers and the trainer load, the same every time."""

from pathlib import Path

import pytest
from pydantic import ValidationError

import lake
from lake import EpisodeRecord, StepRecord
from lake.errors import DataRefusedError, UsageError
from testkit.lakes import build_lake
from trainer.policy.model import load_policy
from trainer.policy.model_files import load_tokenizer
from trainer.policy.tiny_model import TinyModelConfig, make_tiny_model, read_texts

SMALL = TinyModelConfig(vocabulary=300, hidden_size=32, layers=1)


def test_the_folder_is_an_ordinary_model(tmp_path: Path) -> None:
    tiny_model = make_tiny_model(build_lake(tmp_path / "lake").snapshot(), tmp_path / "model", SMALL)
    policy, tokenizer = load_policy(tiny_model.folder), load_tokenizer(tiny_model.folder)
    assert policy.num_parameters == tiny_model.parameters
    assert policy.vocabulary == len(tokenizer) == tiny_model.vocabulary <= 300
    shape = policy.model.config
    assert shape.hidden_size // shape.num_attention_heads == 32
    text = "You are at the gate. \N{SNOWMAN} go left"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_token == "<|im_end|>"


def test_the_same_lake_gives_the_same_folder(tmp_path: Path) -> None:
    for number in (0, 1):
        lk = build_lake(tmp_path / f"lake{number}")
        make_tiny_model(lk.snapshot(), tmp_path / f"model{number}", SMALL)
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (tmp_path / "model0" / name).read_bytes() == (tmp_path / "model1" / name).read_bytes(), name


def test_another_seed_gives_other_weights(tmp_path: Path) -> None:
    snapshot = build_lake(tmp_path / "lake").snapshot()
    for seed in (0, 1):
        make_tiny_model(snapshot, tmp_path / str(seed), SMALL.model_copy(update={"seed": seed}))
    assert (tmp_path / "0" / "model.safetensors").read_bytes() != (tmp_path / "1" / "model.safetensors").read_bytes()


def test_every_kind_of_text_is_learnt_from(tmp_path: Path) -> None:
    texts = set(read_texts(build_lake(tmp_path).snapshot()))
    assert {"You walk through a maze.", "You are at the gate.", "go left", "Plan 0 of rollout 1."} <= texts


def test_a_folder_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exists already"):
        make_tiny_model(build_lake(tmp_path / "lake").snapshot(), tmp_path, SMALL)


def test_a_lake_without_text_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataRefusedError, match="trajlake ingest"):
        make_tiny_model(lake.open(tmp_path / "lake", create=True).snapshot(), tmp_path / "model", SMALL)


def test_a_width_that_engines_cannot_serve_is_refused() -> None:
    with pytest.raises(ValidationError, match="multiple of 32"):
        TinyModelConfig(hidden_size=48)


def test_the_folder_loads_as_the_tokenizer_that_was_trained(tmp_path: Path) -> None:
    """Some model types make transformers ignore the saved tokenizer and split text its own way."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    lk = lake.open(tmp_path / "lake", create=True)
    with lk.job(kind="ingest", run_id="r") as job:
        job.record(
            [
                EpisodeRecord(task_id="t", steps=[StepRecord(state=f"flight HAT{i} {i}", action="book")])
                for i in range(99)
            ]
        )
    folder = make_tiny_model(lk.snapshot(), tmp_path / "model", TinyModelConfig()).folder
    text = "flight HAT136 is 2024-05-20<|im_end|>\n"
    as_saved = PreTrainedTokenizerFast.from_pretrained(folder)(text)["input_ids"]
    assert AutoTokenizer.from_pretrained(folder)(text)["input_ids"] == as_saved
