"""`trajlake train` and `trajlake init-model` as a user meets them."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from lake.cli import trajlake
from testkit.lakes import add_credit, build_lake
from testkit.training import token_episodes, token_lake


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a lake of texts with credit, and a model."""
    folder = tmp_path_factory.mktemp("world")
    add_credit(build_lake(folder / "lake"))
    made = run(
        "init-model", "--lake", folder / "lake", "--out", folder / "model", "--hidden-size", 32, "--vocabulary", 300
    )
    assert made.exit_code == 0, made.output
    assert "token ids from" in made.stdout
    return folder


def run(*arguments: object) -> Result:
    return CliRunner().invoke(trajlake, [str(argument) for argument in arguments])


def train(world: Path, *arguments: object) -> Result:
    return run("train", "--lake", world / "lake", *arguments)


def last_line(result: Result) -> str:
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout.splitlines()[-1]


def test_the_last_line_is_the_hash_and_resuming_repeats_it(world: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = last_line(train(world, "--model", world / "model", "--loss", "sft", "--out", out))
    assert first.startswith("weights sha256 ")
    assert len(first.split()[-1]) == 64
    assert last_line(train(world, "--out", out, "--resume")) == first


def test_resume_starts_a_run_that_was_never_started(world: Path, tmp_path: Path) -> None:
    arguments = ["--model", world / "model", "--loss", "awr", "--out", tmp_path / "out", "--resume"]
    assert last_line(train(world, *arguments)).startswith("weights sha256")


def test_a_resumed_run_keeps_its_configuration(world: Path, tmp_path: Path) -> None:
    train(world, "--model", world / "model", "--loss", "sft", "--out", tmp_path / "out", "--epochs", 2)
    same = train(world, "--out", tmp_path / "out", "--resume", "--epochs", 2)
    assert same.exit_code == 0
    other = train(world, "--out", tmp_path / "out", "--resume", "--epochs", 3)
    assert "epochs 3 (the run has 2)" in str(other.exception)


def test_the_plan_says_what_would_be_trained_and_trains_nothing(world: Path, tmp_path: Path) -> None:
    arguments = ["--model", world / "model", "--loss", "awr", "--out", tmp_path / "out", "--plan", "--format", "json"]
    result = train(world, *arguments)
    assert result.exit_code == 0, result.exception
    items = {row["item"]: row for row in json.loads(result.stdout)}
    assert items["episodes selected"]["value"] == "24"
    assert items["groups"]["note"] == "2 of them dead"
    assert items["dropped: dead_group"]["value"] == "24 steps"
    assert items["token source"]["value"] == "rendered"
    assert float(items["estimated seconds"]["value"]) > 0
    assert "tokens/s" in items["estimated seconds"]["note"]
    assert not (tmp_path / "out").exists()


def test_the_estimate_uses_an_earlier_run_of_this_kind(world: Path, tmp_path: Path) -> None:
    arguments = ["--model", world / "model", "--loss", "sft", "--out", tmp_path / "out", "--max-length", 200]
    assert train(world, *arguments).exit_code == 0
    assert "speed of job" in train(world, *arguments, "--plan").stdout


def test_the_plan_lists_refusals(world: Path, tmp_path: Path) -> None:
    episodes = token_episodes()
    for episode in episodes:
        for step in episode.steps:
            assert step.tokens is not None
            step.tokens.top_p = 0.9
    add_credit(token_lake(tmp_path / "lake", episodes))
    result = train(tmp_path, "--model", world / "model", "--loss", "ppo", "--out", tmp_path / "out", "--plan")
    assert result.exit_code == 0, result.exception
    assert "refused: truncated_sampling" in result.stdout
    refused = train(tmp_path, "--model", world / "model", "--loss", "ppo", "--out", tmp_path / "out")
    assert "support is not stored" in str(refused.exception)
    assert not (tmp_path / "out" / "run.json").exists()


def test_a_file_sets_what_flags_leave_open(world: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f'[trainer]\nmodel = "{world / "model"}"\nloss = "awr"\nepochs = 5\n[trainer.awr]\nbeta = 0.5\n')
    result = train(world, "--config", file, "--epochs", 1, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.exception
    config = json.loads((tmp_path / "out" / "run.json").read_text())["config"]
    assert (config["loss"], config["epochs"], config["awr"]) == ("awr", 1, {"beta": 0.5, "max_weight": 20.0})
    assert train(world, "--config", file, "--out", tmp_path / "out", "--resume", "--epochs", 1).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--loss", "sft"], "--model missing"),
        ([], "--model and --loss missing"),
        (["--model", "nowhere", "--loss", "sft"], "nowhere holds no model"),
        (["--model", "MODEL", "--loss", "sft", "--epochs", "0"], "epochs: Input should be greater"),
        (["--model", "MODEL", "--loss", "sft", "--config", "no.toml"], "no.toml"),
        (["--model", "MODEL", "--loss", "sft", "--where", "colour = 1"], "colour"),
        (["--model", "MODEL", "--loss", "awr", "--advantages", "x"], "not an id"),
        (["--model", "MODEL", "--loss", "ppo"], "ppo refused: 72 of 72 steps"),
        (["--model", "MODEL", "--loss", "sft", "--max-length", "5"], "over_length"),
    ],
)
def test_faults_say_what_to_do(world: Path, tmp_path: Path, arguments: list[str], words: str) -> None:
    from lake.errors import TrajlakeError

    full = [str(world / "model") if argument == "MODEL" else argument for argument in arguments]
    result = train(world, *full, "--out", tmp_path / "out")
    assert isinstance(result.exception, TrajlakeError)
    assert words in str(result.exception)


def test_help_needs_no_torch() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from trainer.commands_train import train, init_model; "
        "print([name for name in ('torch', 'transformers', 'polars') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_place_that_cannot_be_written_is_one_line(world: Path, tmp_path: Path) -> None:
    from lake.errors import TrajlakeError

    file = tmp_path / "file"
    file.write_text("in the way")
    arguments = ["--model", world / "model", "--loss", "sft"]
    result = train(world, *arguments, "--out", file / "run")
    assert isinstance(result.exception, TrajlakeError)
    assert "choose another --out" in str(result.exception)
    made = run("init-model", "--lake", world / "lake", "--out", file / "model", "--vocabulary", 300)
    assert isinstance(made.exception, TrajlakeError)
    assert file.read_text() == "in the way"


def test_a_lake_that_is_none_is_one_line(world: Path, tmp_path: Path) -> None:
    from lake.errors import NotALakeError

    for command in (["train", "--model", world / "model", "--loss", "sft"], ["init-model"]):
        result = run(*command, "--lake", tmp_path / "nothing", "--out", tmp_path / "out")
        assert isinstance(result.exception, NotALakeError)
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["train", "init-model"])
def test_help_explains_every_option(command: str) -> None:
    text = run(command, "--help").stdout
    options = [line.split()[0] for line in text.splitlines() if line.strip().startswith("--")]
    assert {"--lake", "--out", "--seed"} <= set(options)
    undocumented = [line for line in text.splitlines() if line.strip().startswith("--") and len(line.split()) < 3]
    following = text.splitlines()
    assert all(following[following.index(line) + 1].strip() for line in undocumented)
