"""What a reward function gets, may return and may use in the sandbox, and what the caller gets back."""

import json
import os
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import lake
from lake.errors import UsageError
from pipelines.score.sandbox import launch, worker_process
from pipelines.score.sandbox.contract import FunctionSource, SandboxLimits
from pipelines.score.sandbox.launch import find_obstacle
from pipelines.score.sandbox.pool import Sandbox, inspect_function
from testkit.examples import mostly_slow

pytestmark = pytest.mark.skipif(
    find_obstacle("strong") is not None, reason=f"no strong isolation here: {find_obstacle('strong')}"
)

REWARDS = '''
"""Reward functions as users write them."""
import asyncio, dataclasses, os, sys, threading, time
import helpers
from package.inner import WORTH

calls = 0

def length(messages, ground_truth=None, **kwargs):
    return len(messages[-1]["content"]) * helpers.SCALE

def echo(**arguments):
    return arguments

def counted(**_):
    global calls
    calls += 1
    return calls

def spoil(messages, **_):
    messages.append("more")
    return len(messages)

async def waited(messages, **_):
    first, second = await asyncio.gather(asyncio.sleep(0.001, 0.25), asyncio.to_thread(lambda: WORTH))
    return {"score": first + second}

def sync_over_async(**_):
    return asyncio.run(waited([]))["score"]

def returns_awaitable(**_):
    return waited([])

class Callable:
    async def __call__(self, messages, *, strict=False):
        return 1.0

instance = Callable()

def batch(rollouts_messages, **_):
    return [len(messages) for messages in rollouts_messages]

batch.__trajlake_reward__ = {"mode": "batch", "requires_network": True, "requires": ["numpy"], "odd": object}

def no_list(rollouts_messages, **_):
    return 1.0

def slow(seconds, **_):
    time.sleep(seconds)
    return seconds

def where(**_):
    return {"environment": dict(os.environ), "folder": os.getcwd(), "stdin": sys.stdin.read(), "argv": sys.argv[1:],
            "threads": threading.active_count(), "helpers": helpers.__file__, "pid": os.getpid()}

def packages(**_):
    import numpy, polars, pyarrow
    from lake.errors import TrajlakeError
    return {"score": float(numpy.arange(4).sum() + polars.Series([1]).sum() + pyarrow.scalar(1).as_py())}

def data(**_):
    here = os.path.dirname(__file__)
    return {"names": sorted(os.listdir(here)), "text": open(here + "/data.txt").read()}
'''


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    """A folder as a user has it."""
    folder = tmp_path / "rewards"
    (folder / "package").mkdir(parents=True)
    (folder / "helpers.py").write_text("SCALE = 0.5")
    (folder / "package" / "__init__.py").touch()
    (folder / "package" / "inner.py").write_text("WORTH = 0.5")
    (folder / "data.txt").write_text("known")
    (folder / ".env").write_text("KEY=secret")
    path = folder / "mine.py"
    path.write_text(REWARDS)
    return path


def make_sandbox(path: Path, name: str, mode: Any = "pointwise", **limits: Any) -> Sandbox:
    return Sandbox(FunctionSource(str(path), name, mode), SandboxLimits(**limits))


def values(path: Path, name: str, *calls: Any, mode: Any = "pointwise", **limits: Any) -> list[Any]:
    with make_sandbox(path, name, mode, **limits) as sandbox:
        outcomes = sandbox.call(calls)
    assert [outcome.error for outcome in outcomes] == [None] * len(calls)
    return [outcome.value for outcome in outcomes]


MESSAGES = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "two"}]


def test_a_function_is_called_with_what_it_was_given(rewards: Path) -> None:
    raw = msgspec.Raw(json.dumps(MESSAGES).encode())
    text = json.dumps({"messages": MESSAGES}).encode()
    calls = [{"messages": MESSAGES, "ground_truth": 2}, {"messages": raw}, text, msgspec.Raw(text)]
    assert values(rewards, "length", *calls) == [1.5] * 4


def test_arguments_arrive_as_they_are(rewards: Path) -> None:
    orders = {
        "messages": MESSAGES,
        "n": 2**63,
        "x": 0.1,
        "none": None,
        "yes": True,
        "text": "\u20ac\x00\n",
        "deep": [[{}]],
    }
    assert values(rewards, "echo", orders, {**orders, "more": msgspec.Raw(b'{"a": [1, 2.5]}')}) == [
        orders,
        {**orders, "more": {"a": [1, 2.5]}},
    ]


def test_a_call_may_spoil_its_arguments_and_no_others(rewards: Path) -> None:
    call = {"messages": MESSAGES}
    assert values(rewards, "spoil", call, call, call) == [3.0, 3.0, 3.0]
    assert len(MESSAGES) == 2


def test_arguments_that_are_no_json_object_are_the_calls_fault(rewards: Path) -> None:
    with make_sandbox(rewards, "echo") as sandbox:
        outcomes = sandbox.call([b"{", b"[1]", b"", msgspec.Raw(b'{"a": 1}'), {"a": msgspec.Raw(b"nonsense")}])
    assert [outcome.kind for outcome in outcomes] == ["invalid", "invalid", "invalid", "ok", "invalid"]
    assert all("not a JSON object" in str(outcome.error) for outcome in outcomes if outcome.kind == "invalid")
    with make_sandbox(rewards, "echo") as sandbox, pytest.raises(UsageError, match="must be JSON data"):
        sandbox.call([{"a": object()}])


def test_wrong_parameters_are_an_exception_that_names_the_line(rewards: Path) -> None:
    with make_sandbox(rewards, "length") as sandbox:
        first, second = sandbox.call([{}, {"messages": []}])
    assert first.error == "TypeError: length() missing 1 required positional argument: 'messages'"
    assert second.error == "IndexError: list index out of range (mine.py, line 10)"


@pytest.mark.parametrize("name", mostly_slow(["waited", "sync_over_async", "returns_awaitable"], "waited"))
def test_async_functions_are_awaited(rewards: Path, name: str) -> None:
    """Without sockets, which asyncio's event loop makes for itself."""
    outcomes = values(rewards, name, {"messages": []}, {"messages": []})
    assert outcomes in ([0.75, 0.75], [{"score": 0.75}] * 2)


def test_a_batch_function_returns_one_result_per_rollout(rewards: Path) -> None:
    assert values(rewards, "batch", {"rollouts_messages": [[1], [1, 2]]}, mode="batch") == [[1, 2]]
    with make_sandbox(rewards, "no_list", "group") as sandbox:
        (outcome,) = sandbox.call([{"rollouts_messages": []}])
    assert outcome.kind == "invalid"
    assert "returns a list" in str(outcome.error)


def test_a_function_is_inspected_without_being_imported_here(rewards: Path) -> None:
    assert inspect_function(str(rewards), "length") == {
        "mode": "pointwise",
        "is_async": False,
        "parameters": ["messages", "ground_truth"],
        "accepts_any": True,
        "requires_network": False,
        "declared": {},
    }
    function_info = inspect_function(str(rewards), "batch")
    assert function_info["mode"] == "batch"
    assert function_info["requires_network"] is True
    assert function_info["declared"]["requires"] == ["numpy"]
    assert inspect_function(str(rewards), "waited")["is_async"] is True
    assert inspect_function(str(rewards), "instance")["is_async"] is True
    assert inspect_function(str(rewards), "instance")["parameters"] == ["messages", "strict"]
    assert not {"mine", "helpers", "package"} & set(sys.modules)


def test_an_adapter_of_ours_makes_what_is_called(tmp_path: Path) -> None:
    """Here that of reward functions: it checks what they return, and leaves out what they do not take."""
    path = tmp_path / "f.py"
    path.write_text("def f(messages):\n    return messages[0].content == 'yes'\n\ndef g(messages):\n    return 'no'")
    adapter = "pipelines.score.reward_function:as_reward_function"
    call = {"messages": [{"role": "user", "content": "yes"}], "ground_truth": 1}
    with Sandbox(FunctionSource(str(path), "f", adapter=adapter)) as sandbox:
        (outcome,) = sandbox.call([call])
    assert outcome.value["score"] == 1.0
    with Sandbox(FunctionSource(str(path), "g", adapter=adapter)) as sandbox:
        (refused,) = sandbox.call([call])
    assert refused.kind == "exception"
    facts = inspect_function(str(path), "f", adapter=adapter)
    assert facts["mode"] == "pointwise"
    assert facts["parameters"] == ["messages"]
    assert facts["declared"]["name"] == "f"
    with pytest.raises(UsageError, match="cannot be loaded: AttributeError"):
        inspect_function(str(path), "f", adapter="pipelines.score.reward_function:nothing")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("absent", "`absent` does not exist in .*; functions there: batch, counted, data"),
        ("calls", "is not a function"),
    ],
)
def test_a_function_that_is_not_there_is_named(rewards: Path, name: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        inspect_function(str(rewards), name)
    with make_sandbox(rewards, name) as sandbox:
        outcomes = sandbox.call([{}, {}])
    assert [outcome.kind for outcome in outcomes] == ["exception"] * 2
    assert words.split(" in ", maxsplit=1)[0] in str(outcomes[0].error)


def test_a_function_sees_a_bare_environment(rewards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "secret")
    (outcome,) = values(rewards, "where", {}, environment={"GIVEN": "yes"})
    assert outcome["environment"]["GIVEN"] == "yes"
    assert outcome["environment"]["PYTHONHASHSEED"] == "0"
    assert "API_KEY" not in outcome["environment"]
    assert "PATH" not in outcome["environment"]
    assert (outcome["folder"], outcome["stdin"], outcome["argv"], outcome["threads"]) == ("/", "", [], 1)
    assert outcome["helpers"] == str(rewards.parent / "helpers.py")
    assert outcome["pid"] != os.getpid()


def test_installed_packages_and_files_beside_the_module_can_be_used(rewards: Path) -> None:
    """Packages that start threads on import too: they are imported behind the lock."""
    assert values(rewards, "packages", {}) == [{"score": 8.0}]
    (outcome,) = values(rewards, "data", {})
    assert outcome["text"] == "known"
    assert "data.txt" in outcome["names"]


def test_a_function_that_lies_where_it_would_see_too_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home" / "somebody"
    home.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    for folder in (home, home.parent):
        (folder / "f.py").write_text("def f(**_): return 1.0")
        with pytest.raises(UsageError, match="a separate folder"):
            make_sandbox(folder / "f.py", "f")
    (home / "rewards").mkdir()
    (home / "rewards" / "f.py").write_text("def f(**_): return 1.0")
    assert values(home / "rewards" / "f.py", "f", {}) == [1.0]


def test_a_file_that_is_no_module_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    for name in ("absent.py", "notes.txt", "."):
        with pytest.raises(UsageError, match="Python file"):
            make_sandbox(tmp_path / name, "f")


def test_a_module_may_be_called_like_one_of_the_standard_library(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("def f(**_):\n    import json\n    return json.loads('\"json\"')")
    assert values(tmp_path / "json.py", "f", {}) == ["json"]


def test_workers_are_replaced_after_so_many_calls(rewards: Path) -> None:
    limits: dict[str, Any] = {"rows_per_batch": 2, "recycle_rows": 4}
    assert values(rewards, "counted", *[{}] * 10, **limits) == [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
    assert values(rewards, "counted", *[{}] * 10, rows_per_batch=2) == list(range(1, 11))


def test_calls_keep_their_order_among_several_workers(rewards: Path) -> None:
    with make_sandbox(rewards, "echo", workers=3, rows_per_batch=4) as sandbox:
        outcomes = sandbox.call([{"n": n} for n in range(50)])
        assert [outcome.value for outcome in outcomes] == [{"n": n} for n in range(50)]
        batches = [[{"n": (size, n)} for n in range(size)] for size in (0, 1, 9, 4, 0, 30, 2)]
        mapped = list(sandbox.map(iter(batches)))
    assert [[outcome.value["n"] for outcome in batch] for batch in mapped] == [
        [list(call["n"]) for call in batch] for batch in batches
    ]


def test_several_workers_work_at_the_same_time(rewards: Path) -> None:
    with make_sandbox(rewards, "where", workers=2, rows_per_batch=1) as sandbox:
        pids = {batch[0].value["pid"] for batch in sandbox.map([[{}]] * 40)}
    assert len(pids) == 2


def test_map_reads_ahead_but_not_everything(rewards: Path) -> None:
    numbers = []

    def batches() -> Iterator[list[dict[str, Any]]]:
        for number in range(1000):
            numbers.append(number)
            yield [{"n": number}]

    with make_sandbox(rewards, "echo") as sandbox:
        for number, outcomes in enumerate(sandbox.map(batches())):
            assert outcomes[0].value == {"n": number}
            assert number < len(numbers) <= number + 5
    assert len(numbers) == 1000


def test_a_slow_batch_is_not_late_if_each_call_is_in_time(rewards: Path) -> None:
    """The clock is the call's, not the batch's: twelve calls of 0.3 s, each with 2 s."""
    assert values(rewards, "slow", *[{"seconds": 0.3}] * 12, seconds_per_row=2.0) == [0.3] * 12


def test_seconds_of_each_call_are_told(rewards: Path) -> None:
    with make_sandbox(rewards, "slow") as sandbox:
        quick, slow = sandbox.call([{"seconds": 0.0}, {"seconds": 0.2}])
    assert quick.seconds >= 0
    assert slow.seconds >= 0.2


def test_nothing_starts_before_the_first_call_and_nothing_stays(rewards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workers: list[worker_process.Worker] = []

    class Counted(worker_process.Worker):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            workers.append(self)

    monkeypatch.setattr(worker_process, "Worker", Counted)
    with make_sandbox(rewards, "echo", workers=3) as sandbox:
        assert sandbox.call([]) == []
        assert list(sandbox.map([])) == []
        assert workers == []
        sandbox.call([{}])
        assert len(workers) == 1
    sandbox.close()
    assert all(worker._process.returncode is not None for worker in workers)


def test_a_worker_that_is_killed_from_outside_is_replaced(rewards: Path) -> None:
    """By a person, or by a system that wants memory: no call is blamed for it."""
    with make_sandbox(rewards, "where") as sandbox:
        (first,) = sandbox.call([{}])
        os.kill(first.value["pid"], signal.SIGKILL)
        outcomes = sandbox.call([{}] * 5)
    assert [outcome.kind for outcome in outcomes] == ["ok"] * 5
    assert first.value["pid"] not in {outcome.value["pid"] for outcome in outcomes}


def test_a_folder_with_very_many_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_MAX_READABLE", 3)
    for name in "abcd":
        (tmp_path / f"{name}.py").touch()
    with pytest.raises(UsageError, match=r"holds 4 files .*a separate folder"):
        make_sandbox(tmp_path / "a.py", "f")


def test_closing_ends_calls_that_are_under_way(rewards: Path) -> None:
    sandbox = make_sandbox(rewards, "slow", seconds_per_row=60.0)
    caught: list[BaseException] = []

    def ask() -> None:
        try:
            sandbox.call([{"seconds": 50.0}] * 3)
        except RuntimeError as error:
            caught.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    while sandbox._slots[0]._worker is None:
        time.sleep(0.01)
    sandbox.close()
    asking.join(20)
    assert not asking.is_alive()
    assert [str(error) for error in caught] == ["this sandbox is closed"]


def test_the_trusted_level_lets_the_network_through(tmp_path: Path) -> None:
    """What a judge that calls a model needs, and gets only where the limits say so."""
    path = tmp_path / "judge.py"
    path.write_text(
        textwrap.dedent(
            """
            import asyncio, socket
            def f(**_):
                with socket.create_server(("127.0.0.1", 0)) as server:
                    with socket.create_connection(server.getsockname(), 5):
                        return 1.0
            async def g(**_):
                server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
                address = server.sockets[0].getsockname()
                await asyncio.open_connection(*address)
                return 1.0
            """
        )
    )
    for name in "fg":
        assert values(path, name, {}, max_level="none", min_level="none") == [1.0]
        with make_sandbox(path, name) as sandbox:
            assert sandbox.call([{}])[0].kind == "exception"


def test_a_lake_beside_the_function_or_one_folder_deeper_cannot_be_read(tmp_path: Path) -> None:
    """It holds the answers, and the outcome of the siblings."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "words.txt").write_text("known")
    lakes = [tmp_path / "L", tmp_path / "data" / "L"]
    for folder in lakes:
        lake.open(folder, create=True)
    path = tmp_path / "spy.py"
    path.write_text("def spy(places, **_):\n    return [open(place).read(5) for place in places]\n")
    logs = [str(folder / "episodes" / "_delta_log" / f"{0:020d}.json") for folder in lakes]
    assert [len(Path(log).read_text()) > 5 for log in logs] == [True, True], "it can be read in the open"
    with Sandbox(FunctionSource(str(path), "spy", "pointwise"), SandboxLimits()) as sandbox:
        words, *spied = sandbox.call(
            [{"places": [str(tmp_path / "data" / "words.txt")]}, *({"places": [x]} for x in logs)]
        )
    assert words.value == ["known"]
    assert [outcome.kind for outcome in spied] == ["exception", "exception"]
    assert all("PermissionError" in str(outcome.error) for outcome in spied)
