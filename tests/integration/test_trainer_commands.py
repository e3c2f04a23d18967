"""`trajlake train` and `trajlake init-model` as a user meets them."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from lake.cli import trajlake
from lake.errors import TrajlakeError
from testkit.disks import disk, grow
from testkit.examples import mostly_slow
from testkit.lakes import add_credit, build_lake
from testkit.training import token_episodes, token_lake
from testkit.wording import Wording


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


@pytest.fixture(scope="module")
def done(world: Path) -> tuple[Path, str]:
    """The folder of a finished run that is called named, and its last line."""
    out = world / "done"
    arguments = ["--model", world / "model", "--loss", "sft", "--epochs", 1, "--run", "named"]
    return out, last_line(train(world, *arguments, "--out", out))


def test_the_last_line_is_the_hash_and_resuming_repeats_it(world: Path, done: tuple[Path, str]) -> None:
    out, line = done
    assert line.startswith("weights sha256 ")
    assert len(line.split()[-1]) == 64
    assert last_line(train(world, "--out", out, "--resume")) == line


def test_resume_starts_a_run_that_was_never_started(world: Path, tmp_path: Path) -> None:
    arguments = ["--model", world / "model", "--loss", "awr", "--out", tmp_path / "out", "--resume"]
    assert last_line(train(world, *arguments)).startswith("weights sha256")


def test_a_resumed_run_keeps_its_configuration_and_its_name(world: Path, done: tuple[Path, str]) -> None:
    arguments = ["--out", done[0], "--resume"]
    assert last_line(train(world, *arguments, "--epochs", 1, "--run", "named")) == done[1]
    other = train(world, *arguments, "--epochs", 3)
    assert "epochs 3 (the run has 1)" in str(other.exception)
    other = train(world, *arguments, "--run", "another")
    assert "--run another: the run in" in str(other.exception)
    assert "is called named" in str(other.exception)


def test_stages_that_were_refused_can_be_started_when_mended_and_resumed_with_their_file(
    world: Path, tmp_path: Path, wording: Wording
) -> None:
    config = tmp_path / "run.toml"
    text = '[trainer]\nmodel = "{}"\n[[trainer.stages]]\nname = "only"\nloss = "{}"\n'
    config.write_text(text.format(world / "model", "ppo"))
    refused = train(world, "--config", config, "--out", tmp_path / "out")
    assert "rendered" in str(refused.exception)
    config.write_text(text.format(world / "model", "awr"))
    line = last_line(train(world, "--config", config, "--out", tmp_path / "out"))
    assert line.startswith("weights sha256")
    without = train(world, "--out", tmp_path / "out", "--resume")
    assert isinstance(without.exception, TrajlakeError)
    assert "stages (only): give the --config" in wording(without.exception)
    assert last_line(train(world, "--config", config, "--out", tmp_path / "out", "--resume")) == line


@pytest.mark.parametrize(
    ("text", "arguments", "words"),
    [
        (
            "[trainr]\nepochs = 7\n",
            ["--model", "m", "--loss", "sft"],
            "there is no section trainr; valid: collect, credit,",
        ),
        ('[[stages]]\nname = "a"\n', ["--model", "m", "--loss", "sft"], "there is no section stages"),
        ('[trainer]\nmodle = "m"\n', [], "there is no option `modle`; valid: model"),
        ('[trainer]\nepochs = "two"\n', ["--model", "m"], "`epochs` is 'two'"),
    ],
)
def test_what_a_file_misspells_is_told(
    world: Path, tmp_path: Path, text: str, arguments: list[str], words: str
) -> None:
    (tmp_path / "run.toml").write_text(text)
    result = train(world, "--config", tmp_path / "run.toml", *arguments, "--out", tmp_path / "out")
    assert words in str(result.exception)


def test_what_is_too_long_or_empty_says_so(world: Path, tmp_path: Path) -> None:
    arguments = ["--model", world / "model", "--loss", "sft", "--out", tmp_path / "out"]
    assert "Raise max_length, now 3" in str(train(world, *arguments, "--set", "max_length=3").exception)
    assert "--where is empty" in str(train(world, *arguments, "--where", " ").exception)


def test_the_plan_says_what_would_be_trained_and_trains_nothing(world: Path, tmp_path: Path) -> None:
    arguments = ["--model", world / "model", "--loss", "awr", "--out", tmp_path / "out", "--format", "json"]
    result = train(world, *arguments, "--plan", "measured")
    assert result.exit_code == 0, result.exception
    items = {row["item"]: row for row in json.loads(result.stdout)}
    assert items["episodes selected"]["value"] == "24"
    assert items["groups"]["note"] == "2 of them dead"
    assert items["dropped: dead_group"]["value"] == "24 steps"
    assert items["token source"]["value"] == "rendered"
    assert float(items["estimated seconds"]["value"]) > 0
    assert "tokens/s" in items["estimated seconds"]["note"]
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("done")
def test_the_estimate_uses_an_earlier_run_of_this_kind(world: Path, tmp_path: Path) -> None:
    plan = train(world, "--model", world / "model", "--loss", "sft", "--out", tmp_path / "out", "--plan")
    assert "speed of job" in plan.stdout


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--loss", "sft"], "--model missing"),
        ([], "--model and --loss missing"),
        (["--model", "MODEL", "--loss", "sft", "--epochs", "0"], "`epochs` is 0; valid: 1 or more"),
        (["--model", "MODEL", "--loss", "sft", "--config", "no.toml"], "no.toml"),
        (["--model", "MODEL", "--loss", "sft", "--set", "max_length=5"], "over_length"),
    ],
)
def test_faults_say_what_to_do(world: Path, tmp_path: Path, arguments: list[str], words: str) -> None:
    full = [str(world / "model") if argument == "MODEL" else argument for argument in arguments]
    result = train(world, *full, "--out", tmp_path / "out")
    assert isinstance(result.exception, TrajlakeError)
    assert words in str(result.exception)


def test_help_needs_no_torch() -> None:
    import subprocess
    import sys

    code = (
        "import sys; import trainer.commands, trainer.commands; "
        "print([name for name in ('torch', 'transformers', 'polars') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_place_that_cannot_be_written_is_one_line(world: Path, tmp_path: Path) -> None:
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


def test_flags_and_settings_reach_the_run_and_may_be_given_again_to_resume(world: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        f'[trainer]\nmodel = "{world / "model"}"\nloss = "awr"\nlearning_rate = 1\n'
        '[[trainer.mixture]]\nweight = 3\nwhere = "env_return > 0"\n[[trainer.mixture]]\nweight = 1\n'
    )
    pairs = ["loss.beta=0.5", "validation.every=1", "unknown_staleness=keep", "schedule.shape=linear"]
    pairs += ["loss.unit=episode", "loss.aggregation=unit_mean_token_mean", "max_staleness=2"]
    pairs.append("validation.where=rollout_index = 0")
    spelled = [part for pair in pairs for part in ("--set", pair)]
    arguments = ["--config", file, "--out", tmp_path / "out", "--lr", "1e-3", *spelled]
    first = last_line(train(world, *arguments))
    config = json.loads((tmp_path / "out" / "run.json").read_text())["config"]
    assert (config["learning_rate"], config["loss"]["unit"], config["max_staleness"]) == (1e-3, "episode", 2)
    assert (config["loss"]["aggregation"], config["loss"]["beta"]) == ("unit_mean_token_mean", 0.5)
    assert (config["validation"]["where"], config["validation"]["every"]) == ("rollout_index = 0", 1)
    metrics = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert all("validation_nll" in line for line in metrics)
    assert last_line(train(world, *arguments, "--resume")) == first
    other = train(world, "--out", tmp_path / "out", "--resume", "--set", "loss.beta=0.6", "--set", "loss.unit=turn")
    differ = "these differ: loss.unit 'turn' (the run has 'episode'), loss.beta 0.6 (the run has 0.5);"
    assert differ in str(other.exception)
    other = train(world, "--out", tmp_path / "out", "--resume", "--loss", "gspo")
    assert "these differ: loss.name 'gspo' (the run has 'awr');" in str(other.exception)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "loss.clip_low=0.1"], "there is no option `loss.clip_low` of awr; valid: name, aggregation, unit"),
        (["--set", "loss.bta=1"], "there is no option `loss.bta` of awr; valid: beta"),
        (["--set", "loggers=wandb|log"], "`loggers.1` is 'log'; valid: 'tensorboard' or 'wandb'"),
        (["--set", "validation.where=colour = 1"], "validation.where 'colour = 1' is not a predicate over `episodes`"),
        (["--set", "validation.where=1 = 0"], "no episode satisfies validation.where '1 = 0'"),
        (["--set", "device=banana"], "device 'banana' cannot be used"),
    ],
)
@pytest.mark.parametrize("plan", mostly_slow([[], ["--plan"]], []))
def test_what_is_wrong_is_told_before_anything_is_made(
    world: Path, tmp_path: Path, arguments: list[str], words: str, plan: list[str]
) -> None:
    out = tmp_path / "out"
    result = train(world, "--model", world / "model", "--loss", "awr", "--out", out, *arguments, *plan)
    assert isinstance(result.exception, TrajlakeError), result.exception
    assert words in str(result.exception)
    assert not (out / "run.json").exists()
    assert result.stdout == ""


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_a_logger_that_is_not_installed_is_told_before_the_run_is_started(
    world: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    from lake.errors import MissingExtraError

    monkeypatch.setitem(sys.modules, {"tensorboard": "torch.utils.tensorboard"}.get(name, name), None)
    arguments = ["--model", world / "model", "--loss", "sft", "--out", tmp_path / "out", "--set", f"loggers={name}"]
    assert isinstance(train(world, *arguments).exception, MissingExtraError)
    assert not (tmp_path / "out" / "run.json").exists()


def test_a_run_from_python_says_which_options_have_no_effect(world: Path, tmp_path: Path) -> None:
    import lake
    from testkit.offline_runs import configured
    from trainer.runs.offline import train as train_run

    config = configured(world / "model", options={"aggregation_constant": 5.0}, epochs=1)
    result = train_run(lake.open(world / "lake"), config, tmp_path / "out", run_id="r")
    why = "loss.aggregation is token_mean; unit_mean_token_sum_norm divides by it"
    assert f"`loss.aggregation_constant` has no effect: {why}" in result.notes


@pytest.fixture(scope="module")
def undisturbed(world: Path) -> tuple[list[object], str]:
    """The options of a run, and its last line."""
    arguments = ["--model", world / "model", "--loss", "sft", "--epochs", 3, "--set", "checkpoint_every=3"]
    return arguments, last_line(train(world, *arguments, "--out", world / "undisturbed"))


@pytest.mark.parametrize("size", mostly_slow(["20k", "100k", "400k"], "100k"))
def test_a_full_disk_is_one_line_and_the_run_goes_on_when_there_is_room(
    world: Path, undisturbed: tuple[list[object], str], tmp_path: Path, size: str
) -> None:
    from lake.errors import LakeAccessError

    arguments, line = undisturbed
    with disk(tmp_path / "disk", size) as small:
        full = train(world, *arguments, "--out", small / "out")
        assert isinstance(full.exception, LakeAccessError), full.exception
        assert "No space left on device" in str(full.exception)
        assert "--resume" in str(full.exception)
        grow(small, "8m")
        again = [] if (small / "out" / "run.json").exists() else arguments
        assert last_line(train(world, *again, "--out", small / "out", "--resume")) == line


def test_ctrl_c_says_how_the_run_goes_on(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    from trainer.runs import report

    class Impatient(report.ProgressReporter):
        def on_step(self, *_: object) -> None:
            raise KeyboardInterrupt

    @contextmanager
    def impatient() -> Iterator[report.ProgressReporter]:
        yield Impatient(lambda _: None)

    arguments = ["--model", world / "model", "--loss", "sft", "--out", tmp_path / "out", "--set", "checkpoint_every=1"]
    with monkeypatch.context() as patch:
        patch.setattr(report, "progress_reporter", impatient)
        stopped = train(world, *arguments)
    assert stopped.exit_code == 1
    (last,) = (line for line in stopped.stderr.splitlines() if line.startswith("interrupted"))
    assert f"--out {tmp_path / 'out'} --resume" in wording(last)
    assert last_line(train(world, *arguments, "--resume")).startswith("weights sha256")


def test_a_run_kept_in_a_form_of_another_version_is_one_line(
    world: Path, done: tuple[Path, str], tmp_path: Path
) -> None:
    from lake.errors import UsageError

    out = shutil.copytree(done[0], tmp_path / "out")
    record = json.loads((out / "run.json").read_text())
    record["config"] |= {"beam_width": 3}
    (out / "run.json").write_text(json.dumps(record))
    resumed = train(world, "--out", out, "--resume")
    assert isinstance(resumed.exception, UsageError)
    assert "there is no option `beam_width`" in str(resumed.exception)
