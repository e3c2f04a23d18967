"""Programs that end in every way there is: what was finished is in the lake once, by the next recorder at the latest.

Each program records an episode `finished` and leaves another open; then it ends.
"""

import subprocess
import sys
from pathlib import Path

import pytest

import lake
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
"""How a program ends: its last lines, its exit status, and which episodes there are beside the two that all have."""
SLOW = ("an exception", "sys.exit in an episode", "a daemon thread in an episode")


@pytest.mark.parametrize("end", [pytest.param(end, marks=[pytest.mark.slow] * (end in SLOW)) for end in ENDS])
def test_what_was_finished_is_there_once_however_the_program_ends(end: str, tmp_path: Path) -> None:
    code, status, others = ENDS[end]
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
    assert sorted(rows) == sorted({"finished": "completed", "open": "aborted", **others}.items())
    assert [path.name for path in (tmp_path / "spool").iterdir()] == ["lock"]


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
