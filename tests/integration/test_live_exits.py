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

ENDS = {
    "without closing": ("", 0, {"finished": "completed", "open": "aborted"}),
    "os._exit": ("os._exit(3)", 3, {"finished": "completed", "open": "aborted"}),
    "an exception": ("raise ValueError('theirs')", 1, {"finished": "completed", "open": "aborted"}),
    "SIGTERM": (
        "os.kill(os.getpid(), signal.SIGTERM)",
        -15,
        {"finished": "completed", "open": "aborted"},
    ),
    "sys.exit in an episode": (
        "with open_episode:\n        sys.exit(4)",
        4,
        {"finished": "completed", "open": "aborted"},
    ),
    "a thread that records until the last moment": (
        "def work():\n        for n in range(3): time.sleep(0.1); agent(recorder, f'late {n}')\n"
        "    threading.Thread(target=work).start()",
        0,
        {"finished": "completed", "open": "aborted", **{f"late {n}": "completed" for n in range(3)}},
    ),
    "a daemon thread in an episode": (
        "def work():\n        with recorder.episode('daemon'): time.sleep(60)\n"
        "    threading.Thread(target=work, daemon=True).start(); time.sleep(0.1)",
        0,
        {"finished": "completed", "open": "aborted"},
    ),
    "an exception in a thread": (
        "def work():\n        with open_episode: raise ValueError('theirs')\n"
        "    thread = threading.Thread(target=work); thread.start(); thread.join()",
        0,
        {"finished": "completed", "open": "failed"},
    ),
    "an event loop that is stopped in an episode": (
        "async def work():\n        async with open_episode: await asyncio.sleep(60)\n"
        "    async def run():\n        task = asyncio.create_task(work()); await asyncio.sleep(0.1)\n"
        "    asyncio.run(run())",
        0,
        {"finished": "completed", "open": "aborted"},
    ),
    "a fork that ends by os._exit": (
        "pid = os.fork()\n    if not pid: agent(recorder, 'of the child'); os._exit(0)\n    os.waitpid(pid, 0)",
        0,
        {"finished": "completed", "open": "aborted", "of the child": "completed"},
    ),
    "multiprocessing by fork": (
        "p = multiprocessing.get_context('fork').Process(target=agent, args=(recorder, 'of the child'))\n"
        "    p.start(); p.join()",
        0,
        {"finished": "completed", "open": "aborted", "of the child": "completed"},
    ),
    "multiprocessing by spawn": (
        "p = multiprocessing.get_context('spawn').Process(target=child); p.start(); p.join()",
        0,
        {"finished": "completed", "open": "aborted", "of the child": "completed"},
    ),
}


SLOW = ("an exception", "sys.exit in an episode", "a daemon thread in an episode", "a fork that ends by os._exit")


@pytest.mark.parametrize("end", [pytest.param(end, marks=[pytest.mark.slow] * (end in SLOW)) for end in ENDS])
def test_what_was_finished_is_there_once_however_the_program_ends(end: str, tmp_path: Path) -> None:
    code, status, expected = ENDS[end]
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
    if "theirs" not in code:
        assert "Traceback" not in done.stderr
    with lake.recorder(tmp_path / "lake", run="r", spool=tmp_path / "spool") as recorder:
        assert recorder.flush(60)
    rows = lake.open(tmp_path / "lake").sql("SELECT task_id, status FROM episodes").rows()
    assert sorted(rows) == sorted(expected.items())
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
