"""Programs that end in every way there is: what was finished is in the lake once, by the next recorder at the latest.

Each program records an episode `finished` and leaves another open; then it ends.
"""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import lake
from lake.cli import trajlake
from lake.errors import UsageError
from testkit.copies import empty_lake
from testkit.processes import environment

BEGIN = """
import asyncio, multiprocessing, os, signal, sys, threading, time
import lake

def agent(recorder, task):
    with recorder.episode(task) as episode, episode.step(messages=[{"role": "user", "content": "?"}]) as step:
        step.action("a")

def recording():
    return lake.recorder(sys.argv[1] + "/lake", run="r", spool=sys.argv[1] + "/spool")

def child():
    agent(recording(), "of the child")

if __name__ == "__main__":
    recorder = recording()
    agent(recorder, "finished")
    open_episode = recorder.episode("open")
    with open_episode.step(state="s") as step:
        step.action("a")
    time.sleep(0.3)  # what is open is on the disk soon, and is promised by nobody
"""

IN_BETWEEN = """
    def broken():
        with recorder.episode('broken', rollout_index=0) as episode:
            with episode.step(state="s") as step:
                step.action("a")
            raise ValueError('of a thread')
    thread = threading.Thread(target=broken)
    thread.start(); thread.join()

    async def stopped():
        async with recorder.episode('stopped') as episode:
            with episode.step(state="s") as step:
                step.action("a")
            await asyncio.sleep(60)
    async def run():
        task = asyncio.create_task(stopped()); await asyncio.sleep(0.1)
    asyncio.run(run())

    pid = os.fork()
    if not pid: agent(recorder, 'forked'); os._exit(0)
    os.waitpid(pid, 0)
    for name, target, args in (('fork', agent, (recorder, 'forked by multiprocessing')), ('spawn', child, ())):
        process = multiprocessing.get_context(name).Process(target=target, args=args)
        process.start(); process.join()

    def work():
        for n in range(3): time.sleep(0.1); agent(recorder, f'late {n}')
    threading.Thread(target=work).start()
"""
"""What happens in a program before its end: each of these finishes an episode, or leaves it."""
OTHERS = {
    "broken": "failed",
    "stopped": "aborted",
    "forked": "completed",
    "forked by multiprocessing": "completed",
    "of the child": "completed",
    "late 0": "completed",
    "late 1": "completed",
    "late 2": "completed",
}
ENDS = {
    "without closing": (IN_BETWEEN, 0, OTHERS),
    "os._exit": ("os._exit(3)", 3, {}),
    "an exception": ("raise ValueError('of the program')", 1, {}),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)", -15, {}),
    "sys.exit in an episode": ("with open_episode:\n        sys.exit(4)", 4, {}),
    "a daemon thread in an episode": (
        "def work():\n        with recorder.episode('daemon'): time.sleep(60)\n"
        "    threading.Thread(target=work, daemon=True).start(); time.sleep(0.1)",
        0,
        {},
    ),
}
"""How a program ends: its last lines, its exit status, and which episodes there are next to the two that all have."""
SLOW = ("an exception", "sys.exit in an episode", "a daemon thread in an episode")


@pytest.mark.parametrize("end", [pytest.param(end, marks=[pytest.mark.slow] * (end in SLOW)) for end in ENDS])
def test_what_was_finished_is_there_once_however_the_program_ends(end: str, tmp_path: Path) -> None:
    code, status, other_states = ENDS[end]
    empty_lake(tmp_path / "lake")
    program = tmp_path / "program.py"
    program.write_text(f"{BEGIN}    {code}\n")
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=120,
        check=False,
    )
    assert done.returncode == status, done.stderr
    raised = ["ValueError: of a thread"] * (code == IN_BETWEEN) + ["ValueError: of the program"] * (status == 1)
    assert [line for line in done.stderr.splitlines() if line.startswith("ValueError")] == raised
    assert done.stderr.count("Traceback") == len(raised)
    with lake.recorder(tmp_path / "lake", run="r", spool=tmp_path / "spool") as recorder:
        assert recorder.flush(60)
    rows = lake.open(tmp_path / "lake").sql("SELECT task_id, status FROM episodes").rows()
    assert sorted(rows) == sorted({"finished": "completed", "open": "aborted", **other_states}.items())
    assert [path.name for path in (tmp_path / "spool").iterdir()] == ["lock"]


KILLED = """
import os, signal, sys
import lake

recorder = lake.recorder(sys.argv[1], run="r", batch_seconds=600, batch_episodes=600)
for task in ("finished", "open"):
    episode = recorder.episode(task)
    with episode.step(state="s") as step:
        step.action("a")
    if task == "finished":
        episode.end()
recorder._sink.spool.sync(60)
os.kill(os.getpid(), signal.SIGKILL)
"""
"""A recorder that dies before its first delivery, with an episode that is finished and one that is not."""


class Recorders:
    """Recorders of lakes below a folder, on a machine that keeps their spools next to them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TRAJLAKE_SPOOL", str(folder / "spools"))
        self.folder = folder

    def killed(self, name: str) -> None:
        """One that was killed while it recorded."""
        program = [sys.executable, "-c", KILLED, str(self.folder / name)]
        variables = environment(TRAJLAKE_SPOOL=str(self.folder / "spools"))
        done = subprocess.run(program, capture_output=True, text=True, env=variables, timeout=120, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr

    def tasks(self, name: str, *options: str) -> list[str]:
        """The tasks in a lake after another recorder, which records `options`."""
        with lake.recorder(self.folder / name, run="r") as recorder:
            for task in options:
                with recorder.episode(task) as episode, episode.step(state="s") as step:
                    step.action("a")
            assert recorder.flush(60)
        return sorted(lake.open(self.folder / name).sql("SELECT task_id FROM episodes")["task_id"])

    def spools(self, name: str, *options: str) -> list[dict[str, Any]]:
        """What `trajlake spools` lists, or nothing if it has an option to act."""
        done = CliRunner().invoke(trajlake, ["spools", "--lake", str(self.folder / name), "--format", "json", *options])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout) if not options else []


@pytest.fixture
def recorders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorders:
    return Recorders(tmp_path, monkeypatch)


@pytest.mark.parametrize("is_made", [True, False], ids=["a lake", "a lake to be"])
def test_what_was_recorded_for_a_deleted_lake_is_kept_apart(
    is_made: bool, recorders: Recorders, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if that lake was never made: its folder is deleted, and with it the id that was reserved for it."""
    if is_made:
        empty_lake(recorders.folder / "lake")
    recorders.killed("lake")
    shutil.rmtree(recorders.folder / "lake")
    assert recorders.tasks("lake", "of the new lake") == ["of the new lake"]
    assert recorders.tasks("lake", "another") == ["another", "of the new lake"]
    (row,) = recorders.spools("lake")
    assert caplog.text.count(row["spool"]) == 1, "told once in a process"
    assert (row["state"], row["finished"], row["open"]) == ("orphaned", 1, 1)
    assert row["lake_id"] not in (None, lake.open(recorders.folder / "lake").identity)
    recorders.spools("lake", "--deliver", row["spool"])
    assert recorders.tasks("lake") == ["another", "finished", "of the new lake", "open"]
    assert recorders.spools("lake") == []


def test_what_was_recorded_before_there_was_a_lake_is_of_the_lake_that_is_made_then(recorders: Recorders) -> None:
    """Anyone who makes it: the id that the killed recorder reserved is the lake's."""
    recorders.killed("lake")
    lk = lake.open(recorders.folder / "lake", create=True)
    (row,) = recorders.spools("lake")
    assert (row["state"], row["lake_id"]) == ("left", lk.identity)
    assert recorders.tasks("lake", "of another recorder") == ["finished", "of another recorder", "open"]


def test_an_orphaned_spool_is_deleted_only_if_somebody_says_so(recorders: Recorders) -> None:
    empty_lake(recorders.folder / "lake")
    recorders.killed("lake")
    shutil.rmtree(recorders.folder / "lake")
    lake.open(recorders.folder / "lake", create=True)
    (row,) = recorders.spools("lake")
    assert row["state"] == "orphaned"
    command = CliRunner().invoke(
        trajlake, ["spools", "--lake", str(recorders.folder / "lake"), "--delete", row["spool"]]
    )
    assert isinstance(command.exception, UsageError)
    assert Path(row["spool"]).exists()
    recorders.spools("lake", "--delete", row["spool"], "--yes")
    assert recorders.spools("lake") == []
    assert not Path(row["spool"]).exists()
    assert recorders.tasks("lake") == []


def test_a_spool_follows_its_lake_to_another_place_and_stays_with_it_beside_a_copy(recorders: Recorders) -> None:
    empty_lake(recorders.folder / "lake")
    recorders.killed("lake")
    shutil.copytree(recorders.folder / "lake", recorders.folder / "copy")
    assert recorders.tasks("copy") == []
    assert recorders.spools("copy") == []
    (recorders.folder / "lake").rename(recorders.folder / "moved")
    assert [(row["state"], row["open"]) for row in recorders.spools("moved")] == [("left", 1)]
    assert recorders.tasks("moved") == ["finished", "open"]
    assert recorders.tasks("copy") == []


def test_a_lake_that_comes_back_gets_what_was_recorded_for_it(recorders: Recorders) -> None:
    empty_lake(recorders.folder / "lake")
    recorders.killed("lake")
    (recorders.folder / "lake").rename(recorders.folder / "away")
    assert recorders.tasks("lake", "meanwhile") == ["meanwhile"]
    shutil.rmtree(recorders.folder / "lake")
    (recorders.folder / "away").rename(recorders.folder / "lake")
    assert recorders.tasks("lake") == ["finished", "open"]


def test_recorders_of_several_lakes_share_a_folder_of_spools_and_mix_nothing(recorders: Recorders) -> None:
    spool = recorders.folder / "shared"
    for name in ("one", "two"):
        empty_lake(recorders.folder / name)
    program = KILLED.replace('run="r"', f'run="r", spool={str(spool)!r}')
    for name in ("one", "two"):
        subprocess.run([sys.executable, "-c", program, str(recorders.folder / name)], env=environment(), check=False)
    assert len(list(spool.glob("*/*.frames"))) == 2
    with lake.recorder(recorders.folder / "one", run="r", spool=spool) as recorder:
        assert recorder.flush(60)
    counts = [lake.open(recorders.folder / name).sql("SELECT count(*) FROM episodes").item() for name in ("one", "two")]
    assert counts == [2, 0]


def test_a_recorder_whose_lake_another_one_takes_the_place_of_delivers_nothing_to_it(
    recorders: Recorders, caplog: pytest.LogCaptureFixture
) -> None:
    folder = recorders.folder / "lake"
    recorder = lake.recorder(folder, run="r", batch_seconds=600)
    with recorder.episode("of the first lake") as episode, episode.step(state="s") as step:
        step.action("a")
    shutil.rmtree(folder)
    empty_lake(folder)
    assert not recorder.close(30)
    assert "trajlake spools" in caplog.text
    assert lake.open(folder).sql("SELECT count(*) FROM episodes").item() == 0
    (row,) = recorders.spools("lake")
    assert (row["state"], row["finished"]) == ("orphaned", 1)


@pytest.mark.slow
def test_numbers_of_pytorch_and_a_message_of_100_mb_are_recorded(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    with lake.recorder(tmp_path / "lake", run="r", spool=tmp_path / "spool") as recorder:
        with recorder.episode("t") as episode:
            with episode.step(messages=[{"role": "user", "content": "x" * 100_000_000}]) as step:
                ids = torch.tensor([1, 2])
                step.action("a", prompt_ids=ids, action_ids=ids, action_logprobs=torch.tensor([-0.5, -1.0]))
                step.reward(torch.tensor(0.5))
                with step.tool_call("look", {"mask": torch.tensor([True])}) as call:
                    call.result(torch.tensor([[1.5]]))
            episode.reward(torch.tensor([1.0]))
        assert recorder.flush(120)
        assert (recorder.stats().troubles, recorder.stats().delivered, recorder.stats().left_out) == (0, 1, 0)
    opened = lake.open(tmp_path / "lake")
    query = "SELECT env_return, reward, length(state) FROM steps JOIN episodes USING (episode_id)"
    assert opened.sql(query).rows() == [(1.0, 0.5, 100_000_000)]
    assert opened.sql("SELECT context_ids, action_logprobs FROM tokens").rows() == [([1, 2], [-0.5, -1.0])]
