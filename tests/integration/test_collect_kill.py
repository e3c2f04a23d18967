"""Collecting processes that are killed or stopped: no rollout is lost, none is there twice, none is another.

The engine answers by prompt and seed alone, so a run that was killed has to end with the rows of one that was not.
"""

import contextlib
import os
import random
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest

import lake
from testkit.chat_models import tokenizer_of
from testkit.disks import disk
from testkit.processes import Forked
from testkit.token_engine import TokenEngine, token_engine

DEADLINE = 600
MOST_MEMORY = 1_500_000
"""kB of a process that plays 2,000 rollouts of the house at once; 0.6 GB was seen, most of it imports."""
OWN = ("write_id", "job_id", "series_id", "at")
"""Columns that say who wrote a row, and when."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer_of("chatml").save_pretrained(folder)
    return folder


@pytest.fixture
def engine() -> Iterator[TokenEngine]:
    with token_engine(TokenEngine(max_model_len=1 << 16)) as engine:
        yield engine


class Collecting(Forked):
    """A process that collects into `folder / "lake"`, on a machine that has its own spool."""

    def __init__(self, folder: Path, tokenizer: Path, engine: TokenEngine, *options: str, spool: str = "spool") -> None:
        arguments = ["--lake", str(folder / "lake"), "--env", "house", "--env-arg", "horizon=4"]
        arguments += ["--set", f"player.tokenizer={tokenizer}", "--engine", engine.url, "--api", "vllm"]
        arguments += ["--max-tokens", "4", *options]
        super().__init__("testkit.collect_worker", folder / spool, "collect", *arguments)

    def ended(self) -> tuple[int, str, str]:
        """Its exit status, and what it said; waits for its end."""
        said = []
        while (line := self.hear(DEADLINE)) is not None:
            said.append(line)
        return self.wait(), "\n".join(said), self.error


def after_calls(engine: TokenEngine, count: int, process: Collecting) -> None:
    """Wait until the engine was called so often more, or the process has ended."""
    goal, pause = len(engine.calls) + count, threading.Event()
    while len(engine.calls) < goal and process.running:
        pause.wait(0.002)


def spooled_bytes(folder: Path) -> int:
    """Return the size of all frame files in a machine's spool, in bytes."""
    return sum(path.stat().st_size for path in (folder / "spool").rglob("*.frames"))


def peak_of(process: Collecting) -> int:
    """The most memory that a process ever held, in kB; waits for its end."""
    peak, pause = 0, threading.Event()
    while process.running:
        with contextlib.suppress(OSError, StopIteration):
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            peak = max(peak, next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")))
        pause.wait(0.02)
    return peak


def content(folder: Path) -> dict[str, pl.DataFrame]:
    """All that a run's tables say, but who wrote it."""
    lk = lake.open(folder / "lake")
    tables = {}
    for name in ("episodes", "steps", "tokens"):
        frame = lk.scan(name).collect()
        keys = [key for key in ("episode_id", "step_index") if key in frame.columns]
        tables[name] = frame.drop(*OWN, strict=False).sort(keys)
    return tables


@pytest.mark.parametrize(
    ("kills", "groups", "parallel"), [(1, 6, 8), pytest.param(20, 250, 2000, marks=pytest.mark.slow)]
)
def test_killed_at_random_moments_a_run_ends_as_if_nothing_had_happened(
    kills: int, groups: int, parallel: int, tmp_path: Path, tokenizer: Path, engine: TokenEngine
) -> None:
    options = ("--groups", str(groups), "--parallel", str(parallel), "--set", f"player.parallel_calls={parallel}")
    undisturbed = Collecting(tmp_path / "undisturbed", tokenizer, engine, *options)
    assert peak_of(undisturbed) < MOST_MEMORY
    assert undisturbed.ended()[0] == 0
    expected = content(tmp_path / "undisturbed")
    calls = len(engine.calls)
    draw = random.Random(kills)
    for _ in range(kills):
        collecting = Collecting(tmp_path / "killed", tokenizer, engine, *options)
        after_calls(engine, draw.randrange(1, max(2, calls // (kills + 1))), collecting)
        collecting.kill()
    status, out, err = Collecting(tmp_path / "killed", tokenizer, engine, *options).ended()
    assert status == 0, err
    found = content(tmp_path / "killed")
    for name, frame in expected.items():
        assert found[name].equals(frame), name
    # What had been decided was not asked again, but for what was under way at each kill.
    again = len(engine.calls) - 2 * calls
    assert 0 <= again <= 4 * parallel * kills
    jobs = lake.open(tmp_path / "killed" / "lake").sql("SELECT status FROM job_runs WHERE kind = 'collect'")
    assert jobs["status"].to_list() == ["succeeded"]
    spools = [path.name for path in (tmp_path / "killed" / "spool").rglob("*") if path.is_dir() and "-" in path.name]
    assert [name for name in spools if name.split("-")[0].isdecimal()] == [], out


def test_rollouts_of_a_deleted_lake_are_not_those_of_the_new_one(
    tmp_path: Path, tokenizer: Path, engine: TokenEngine
) -> None:
    """Killed in the middle of rollouts, whose lake is then deleted: the same command plays all its episodes anew."""
    options = ("--groups", "2", "--group-size", "2", "--parallel", "4")
    assert Collecting(tmp_path / "undisturbed", tokenizer, engine, *options).ended()[0] == 0
    calls = len(engine.calls)
    collecting = Collecting(tmp_path, tokenizer, engine, *options)
    after_calls(engine, 10, collecting)
    # An answer that the engine has given is not yet one that the process has written: wait for open rollouts on disk.
    pause = threading.Event()
    while collecting.running and spooled_bytes(tmp_path) <= 1000:
        pause.wait(0.002)
    collecting.kill()
    assert spooled_bytes(tmp_path) > 1000, "the run ended before the kill, or has no open rollouts"
    frames = {path: path.read_bytes() for path in (tmp_path / "spool").rglob("*.frames")}
    shutil.rmtree(tmp_path / "lake")
    before = len(engine.calls)
    status, _, err = Collecting(tmp_path, tokenizer, engine, *options).ended()
    assert status == 0, err
    assert len(engine.calls) - before == calls
    for name, frame in content(tmp_path / "undisturbed").items():
        assert content(tmp_path)[name].equals(frame), name
    assert err.count("trajlake spools") == 1
    assert {path: path.read_bytes() for path in (tmp_path / "spool").rglob("*.frames")} == frames


def test_ctrl_c_delivers_what_has_ended_and_the_same_command_goes_on(
    tmp_path: Path, tokenizer: Path, engine: TokenEngine
) -> None:
    options = ("--groups", "4", "--group-size", "4", "--parallel", "4")
    collecting = Collecting(tmp_path, tokenizer, engine, *options)
    after_calls(engine, 12, collecting)
    os.kill(collecting.pid, signal.SIGINT)
    status, _, err = collecting.ended()
    assert status == 1
    assert "stopping: running rollouts" in err
    assert "rerun the same command" in err
    assert "Traceback" not in err
    part = content(tmp_path)["episodes"].height
    assert 0 < part < 16
    status, out, _ = Collecting(tmp_path, tokenizer, engine, *options).ended()
    assert status == 0
    assert f"{part} there before" in out
    assert content(tmp_path)["episodes"].height == 16


def test_a_run_is_collected_on_one_machine_at_a_time(tmp_path: Path, tokenizer: Path, engine: TokenEngine) -> None:
    """Another one that reaches the same lake sees who is at work; where that one was killed, it continues at once."""
    engine.seconds = DEADLINE
    options = ("--groups", "2", "--group-size", "2")
    collecting = Collecting(tmp_path, tokenizer, engine, *options)
    after_calls(engine, 4, collecting)
    status, _, err = Collecting(tmp_path, tokenizer, engine, *options, spool="elsewhere").ended()
    assert status == 2, err
    assert "run 'collect' is being" in err
    assert f"by process {collecting.pid} on" in err
    collecting.kill()
    engine.seconds = 0
    status, _, err = Collecting(tmp_path, tokenizer, engine, *options).ended()
    assert status == 0, err
    assert content(tmp_path)["episodes"].height == 4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_ray_tasks_that_share_a_round_play_the_same_episodes(
    tmp_path: Path, tokenizer: Path, engine: TokenEngine
) -> None:
    options = ("--groups", "4", "--group-size", "4", "--rounds", "2")
    assert Collecting(tmp_path / "local", tokenizer, engine, *options).ended()[0] == 0
    shared = Collecting(tmp_path / "shared", tokenizer, engine, *options, "--executor", "ray", "--workers", "2")
    status, out, err = shared.ended()
    assert status == 0, err
    assert "2 rounds, 32 episodes finished" in out
    expected, found = content(tmp_path / "local"), content(tmp_path / "shared")
    for name, frame in expected.items():
        assert found[name].equals(frame), name


def test_a_full_disk_holds_rollouts_up_and_loses_none(tmp_path: Path, tokenizer: Path, engine: TokenEngine) -> None:
    """What has no room waits in memory, and the progress line says why nothing continues."""
    engine.seconds = 0.2
    options = ("--groups", "4", "--group-size", "8")
    with disk(tmp_path / "disk", "300k") as small:
        (tmp_path / "spool").symlink_to(small)
        filler = small / "filler"
        collecting = Collecting(tmp_path, tokenizer, engine, *options)
        after_calls(engine, 8, collecting)
        filler.write_bytes(b"")
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        while "waiting: No space left on device" not in collecting.error:
            assert collecting.running, collecting.error
            threading.Event().wait(0.02)
        filler.unlink()
        status, out, err = collecting.ended()
    assert status == 0, err
    assert "32 episodes finished" in out
    assert content(tmp_path)["episodes"].height == 32
