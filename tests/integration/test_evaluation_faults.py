"""What goes wrong with rescore, ope and eval in a user's hands is one line, and leaves nothing behind."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import lake
from lake import Lake
from testkit import rank_tasks
from testkit.command_line import Cli, runner
from testkit.commands import Command
from testkit.sampled_lake import play, recorded, save_model, save_near
from trainer.backends.ranks import ALONE
from trainer.evaluation.rescore import rescore
from trainer.online.demo import TinyPolicyConfig, save_policy


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lake that two models have scored, the models, and a checkpoint of a run."""
    folder = tmp_path_factory.mktemp("world")
    save_near(folder / "e", save_model(folder / "b"), 0.004)
    lk = recorded(folder / "lake", play(folder / "b", tasks=4, siblings=15))
    for name in ("b", "e"):
        rescore(lk, str(folder / name))
    fields = {"model": str(folder / "b"), "loss": "sft", "episodes_per_step": 60, "threads": 1}
    rank_tasks.whole_run(ALONE, lk.uri, str(folder / "run"), fields)
    (saved,) = (folder / "run" / "checkpoints").iterdir()
    shutil.copytree(saved, folder / "saved")
    return folder


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Cli:
    return runner(monkeypatch, capfd)


def jobs(lk: Lake) -> list[tuple[Any, ...]]:
    return lk.sql("SELECT job_id, event FROM jobs ORDER BY ALL").rows()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def edited(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def without(path: Path, name: str) -> None:
    weights = load_file(path)
    del weights[name]
    save_file(weights, path, metadata={"format": "pt"})


def small_vocabulary(folder: Path) -> None:
    shutil.rmtree(folder)
    save_policy(folder, ["w0", "w1"], TinyPolicyConfig(), 0)


DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "no model": ("b", shutil.rmtree, "there is no checkpoint"),
    "a text": ("b", lambda folder: (shutil.rmtree(folder), folder.write_text("hello")), "holds no model"),
    "torn weights": (
        "b",
        lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:2000]),
        "cannot be loaded as a causal language model",
    ),
    "no weights": (
        "b",
        lambda folder: (folder / "model.safetensors").unlink(),
        "holds no weights (no model.safetensors",
    ),
    "a weight is missing": (
        "b",
        lambda folder: without(folder / "model.safetensors", "model.layers.0.self_attn.q_proj.weight"),
        "lacks 1 of the model's weights, for example model.layers.0.self_attn.q_proj.weight; copy the whole model",
    ),
    "torn configuration": (
        "b",
        lambda folder: (folder / "config.json").write_text('{"a'),
        "config.json is damaged",
    ),
    "no tokenizer": ("b", lambda folder: (folder / "tokenizer.json").write_text("{"), "holds no tokenizer"),
    "another vocabulary": ("b", small_vocabulary, "and the model knows ids below"),
    "flipped bit": ("saved", lambda folder: flip(folder / "weights.safetensors"), "weights.safetensors is damaged"),
    "lost weights": (
        "saved",
        lambda folder: (folder / "weights.safetensors").unlink(),
        "weights.safetensors is damaged",
    ),
    "torn state": ("saved", lambda folder: (folder / "state.json").write_text('{"x'), "state.json is damaged"),
    "unknown loss": (
        "saved",
        lambda folder: edited(folder / "state.json", lambda state: state["config"].update(loss={"name": "nonsense"})),
        "its configuration is damaged, or of another version of trajlake: `loss` has the name 'nonsense'; valid: 'sft'",
    ),
    "lost base model": (
        "saved",
        lambda folder: edited(folder / "state.json", lambda state: state["config"].update(model="/nowhere/model")),
        "/nowhere/model holds no model",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_one_line(world: Path, tmp_path: Path, cli: Cli, name: str) -> None:
    source, damage, fragment = DAMAGES[name]
    folder, lk = tmp_path / "place", lake.open(world / "lake")
    shutil.copytree(world / source, folder)
    damage(folder)
    before = jobs(lk)
    done = cli("rescore", folder, "--lake", lk.uri)
    assert done.code != 0
    assert done.out == ""
    assert "Traceback" not in done.err
    line = done.err.splitlines()[-1]
    assert line.startswith("trajlake: ")
    assert fragment in line
    assert jobs(lk) == before


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["rescore", "{b}", "--device", "nonsense"], "device 'nonsense' cannot be used"),
        (["rescore", "{b}", "--name", "stored"], "'stored' means the recorded log-probabilities"),
        (["rescore", "{b}", "--token-budget", "-3"], "token_budget"),
        (["rescore", "{b}", "--selection", "none"], "names no select job"),
        (["evaluate", "--target", "e", "--behaviour", "b"], "`trajlake evaluate` is now `trajlake ope`"),
        (["ope", "--target", "e", "--behaviour", "b", "--gamma", "nan"], "0 < gamma <= 1"),
        (["ope", "--target", "e", "--behaviour", "b", "--clip", "nan"], "clip >= 1"),
        (["ope", "--target", "e", "--behaviour", "b", "--ridge", "inf"], "finite ridge > 0"),
        (["ope", "--target", "e", "--behaviour", "b", "--where", "false"], "no episode satisfies"),
        (["ope", "--target", "nobody", "--behaviour", "b"], "'nobody' has scored nothing; name one of: e, b"),
        (["eval", "--threshold", "nan"], "--threshold nan: valid is a finite number"),
        (["eval", "--k", ","], "give whole numbers from 1 on"),
    ],
)
def test_wrong_options_are_one_line(world: Path, cli: Cli, arguments: list[str], fragment: str) -> None:
    words = [word.format(b=world / "b") for word in arguments]
    assert fragment in cli(*words, "--lake", world / "lake").fault


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["rescore", "{b}"], "the lake holds no episodes"),
        (["ope", "--target", "b", "--behaviour", "b"], "'b' has scored nothing; no checkpoint is in `ratios`"),
        (["eval"], "the lake holds no episodes"),
    ],
)
def test_an_empty_lake_is_one_line(world: Path, tmp_path: Path, cli: Cli, arguments: list[str], fragment: str) -> None:
    lake.open(tmp_path / "empty", create=True)
    words = [word.format(b=world / "b") for word in arguments]
    assert fragment in cli(*words, "--lake", tmp_path / "empty").fault


def test_log_probabilities_that_were_not_recorded(world: Path, tmp_path: Path, cli: Cli) -> None:
    """The recorded ones cannot be used; the behaviour checkpoint's can, and the note says that nothing proves it."""
    lk = recorded(tmp_path / "lake", play(world / "b", tasks=4, siblings=15, action_logprobs=None))
    rescore(lk, str(world / "b"))
    stored = cli("ope", "--target", "b", "--behaviour", "stored", "--lake", lk.uri).fault
    assert "106 of 106 actions have no recorded log-probabilities" in stored
    done = cli("ope", "--target", "b", "--behaviour", "b", "--lake", lk.uri)
    assert done.code == 0
    assert "that 'b' is the policy" in done.err


@pytest.mark.slow("two processes that rescore at once leave each action once, and each is told what the other took")
def test_two_processes_at_once_leave_each_action_once(world: Path, tmp_path: Path) -> None:
    lk = recorded(tmp_path / "lake", play(world / "b", tasks=4, siblings=15))
    command = ["rescore", str(world / "e"), "--lake", lk.uri]
    commands = [Command(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [process.communicate()[1] for process in commands]
    assert [process.returncode for process in commands] == [0, 0], errors
    rows = lk.scan("ratios").collect()
    assert rows.select("episode_id", "step_index", "encoding_id").is_unique().all()
    assert rows.height == lk.scan("tokens").collect().height
    counts = [
        [int(number) for number in re.findall(r"(\d+) (?:actions scored|already there)", text)] for text in errors
    ]
    lost = [int(number) for text in errors for number in re.findall(r"removed from the lake: (\d+)", text)]
    assert sum(scored for scored, _ in counts) == rows.height
    assert sum(present for _, present in counts) + sum(lost) == rows.height, "the other one is told where they went"
