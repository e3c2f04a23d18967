"""A command of the trainer that meets a missing or damaged data file says its table and its name, in one line."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import lake
from testkit.command_line import Cli, runner
from testkit.examples import mostly_slow_cases
from testkit.lakes import add_credit
from testkit.sampled_lake import play, recorded, save_model, save_near
from trainer.evaluation.rescore import rescore

DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda file: file.write_bytes(b""),
    "cut": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "garbage": lambda file: file.write_bytes(file.read_bytes()[:4] + b"\xff" * (file.stat().st_size - 4)),
}
TRAIN = ["train", "--out", "OUT", "--model", "MODEL", "--set", "tokens=engine"]
COMMANDS = {
    "train sft": ([*TRAIN, "--loss", "sft"], ("episodes", "steps", "tokens")),
    "train ppo": ([*TRAIN, "--loss", "ppo", "--set", "max_staleness=1"], ("episodes", "steps", "tokens", "advantages")),
    "train dpo": ([*TRAIN, "--loss", "dpo", "--set", "loss.pairs.kind=step"], ("episodes", "tokens", "advantages")),
    "train where": ([*TRAIN, "--loss", "sft", "--where", "env_return > -1"], ("episodes", "tokens")),
    "plan": ([*TRAIN, "--loss", "awr", "--plan"], ("episodes", "steps", "tokens", "advantages")),
    "rescore": (["rescore", "MODEL"], ("episodes", "steps", "tokens")),
    "ope": (["ope", "--target", "e", "--behaviour", "b"], ("episodes", "steps", "ratios", "tokens")),
    "eval": (["eval"], ("episodes",)),
}
CASES = [(name, table) for name, (_, tables) in COMMANDS.items() for table in tables]
USUAL = [
    ("train sft", "tokens"),
    ("train ppo", "advantages"),
    ("train dpo", "tokens"),
    ("plan", "steps"),
    ("rescore", "tokens"),
    ("ope", "ratios"),
    ("eval", "episodes"),
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lake of sampled episodes with credit, which two models have scored."""
    folder = tmp_path_factory.mktemp("world")
    save_near(folder / "e", save_model(folder / "b"), 0.004)
    save_near(folder / "far", folder / "b", 0.1)
    lk = recorded(folder / "lake", play(folder / "b", tasks=2, siblings=6))
    add_credit(lk)
    for name in ("b", "e"):
        rescore(lk, str(folder / name))
    return folder


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Cli:
    return runner(monkeypatch, capfd)


def arguments(command: Sequence[str], world: Path, folder: Path) -> list[str]:
    """The command on a copy of the world's lake."""
    places = {"MODEL": str(world / "far"), "OUT": str(folder / "out")}
    return [*(places.get(word, word) for word in command), "--lake", str(folder / "lake")]


@pytest.mark.parametrize(("name", "table"), mostly_slow_cases(CASES, *USUAL))
def test_a_damaged_file_is_named_with_its_table(world: Path, tmp_path: Path, cli: Cli, name: str, table: str) -> None:
    shutil.copytree(world / "lake", tmp_path / "lake")
    file = Path(lake.open(tmp_path / "lake").snapshot().files(table)[0].path)
    damage = list(DAMAGE)[CASES.index((name, table)) % len(DAMAGE)]
    DAMAGE[damage](file)
    done = cli(*arguments(COMMANDS[name][0], world, tmp_path))
    assert done.code == 1, (damage, done)
    lines = [line for line in done.err.splitlines() if line.startswith("trajlake: ")]
    assert len(lines) == 1, done.err
    assert "Traceback" not in done.err
    assert file.name in lines[0], (damage, lines)
    assert table in lines[0]
    assert "trajlake doctor" in lines[0]


@pytest.mark.slow("the commands that name a damaged file work on a lake without one")
@pytest.mark.parametrize("name", COMMANDS)
def test_on_the_whole_lake_the_command_does_what_it_is_for(world: Path, tmp_path: Path, cli: Cli, name: str) -> None:
    shutil.copytree(world / "lake", tmp_path / "lake")
    done = cli(*arguments(COMMANDS[name][0], world, tmp_path))
    assert done.code == 0, done.err
