"""Anchor functions of the user's: run in the sandbox once per distinct state, versioned, and refused in words."""

import os
from pathlib import Path

import polars as pl
import pytest
from pydantic import ValidationError

from lake.errors import ContractError, SandboxUnavailableError, UsageError
from lake.ids import text_hash
from pipelines.credit import GiGPO
from pipelines.credit.anchors import Chain, LastStates, StateFunction
from pipelines.score.sandbox.launch import find_obstacle
from pipelines.score.sandbox.pool import Sandbox
from testkit.anchor_keys import keys_of, partition, steps_frame, texts

pytestmark = pytest.mark.skipif(
    find_obstacle("strong") is not None, reason=f"user functions are refused here: {find_obstacle('strong')}"
)

MODULE = '''
import os
from rooms import NAMES

def room(text):
    """The first word that names a room; unknown without one."""
    return next((word for word in text.split() if word in NAMES), None)

def counted(text):
    return 3

def fails(text):
    if "cellar" in text:
        raise ValueError("too dark")
    return text

def spies(text):
    return open("/etc/hostname").read()

def slow(text):
    while True:
        pass

def tells_its_process(text):
    return str(os.getpid())
'''


@pytest.fixture
def module(tmp_path: Path) -> Path:
    (tmp_path / "rooms.py").write_text('NAMES = {"hall", "cellar"}\n')
    path = tmp_path / "states.py"
    path.write_text(MODULE)
    return path


def test_texts_become_what_the_function_says(module: Path) -> None:
    definition = StateFunction(source=f"{module}:room")
    frame = steps_frame(texts("in the hall .", "hall again", "cellar", "nowhere", None))
    assert keys_of(definition, frame) == [text_hash("hall"), text_hash("hall"), text_hash("cellar"), None, None]


def test_it_runs_in_one_other_process_and_on_each_distinct_text_once(
    module: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed_over = []
    original = Sandbox.map

    def watched(self, batches):
        batches = [list(batch) for batch in batches]
        handed_over.extend(call["text"] for batch in batches for call in batch)
        return original(self, batches)

    monkeypatch.setattr(Sandbox, "map", watched)
    definition = StateFunction(source=f"{module}:tells_its_process")
    frame = steps_frame(texts(*["a", "b", "c"] * 50))
    assert partition(keys_of(definition, frame)) == [0] * 150
    assert sorted(handed_over) == ["a", "b", "c"]
    assert keys_of(definition, frame)[0] != text_hash(str(os.getpid()))


def test_more_texts_than_one_message_holds_keep_their_order(module: Path) -> None:
    module.write_text("def last(text):\n    return text[-1]\n")
    states = [f"{n} ends in {n % 7}" for n in range(300)]
    keys = keys_of(StateFunction(source=f"{module}:last", workers=2), steps_frame(texts(*states)))
    assert keys == [text_hash(str(n % 7)) for n in range(300)]


def test_it_stands_in_a_chain_and_in_an_estimator(module: Path) -> None:
    chain = Chain(steps=(StateFunction(source=f"{module}:room"), LastStates(k=2)))
    rows = [
        {"state": s, "episode_id": e, "step_index": n} for e in range(2) for n, s in enumerate(["hall", f"cellar {e}"])
    ]
    steps = steps_frame(rows).with_columns(reward=pl.lit(0.0), episode_score=pl.col("episode_id").cast(pl.Float64))
    frame = GiGPO(anchors=chain).advantages(steps.lazy()).collect()
    assert partition(frame["anchor_key"].to_list()) == [0, 1, 0, 1]
    assert frame["anchor_episodes"].to_list() == [2, 2, 2, 2]


def test_a_failing_function_names_the_state_or_leaves_it_unknown(module: Path) -> None:
    frame = steps_frame(texts("hall", "a cellar"))
    with pytest.raises(ContractError, match=r"states.py:fails on state 'a cellar': exception: .*too dark"):
        keys_of(StateFunction(source=f"{module}:fails"), frame)
    keys = keys_of(StateFunction(source=f"{module}:fails", on_error="unknown"), frame)
    assert keys == [text_hash("hall"), None]


@pytest.mark.parametrize("on_error", ["refuse", "unknown"])
def test_what_is_no_text_is_refused(module: Path, on_error: str) -> None:
    with pytest.raises(ContractError, match="it returned float; valid: text, or None"):
        keys_of(StateFunction(source=f"{module}:counted", on_error=on_error), steps_frame(texts("a")))


def test_the_sandbox_holds_it(module: Path) -> None:
    assert Path("/etc/hostname").exists(), "the control: here the file can be read"
    with pytest.raises(ContractError, match="exception"):
        keys_of(StateFunction(source=f"{module}:spies"), steps_frame(texts("a")))


def test_a_function_that_does_not_return_is_stopped(module: Path) -> None:
    with pytest.raises(ContractError, match="timeout"):
        keys_of(StateFunction(source=f"{module}:slow", seconds_per_text=0.3), steps_frame(texts("a")))


def test_without_isolation_nothing_runs(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(self, function, limits):
        msg = "no Landlock here"
        raise SandboxUnavailableError(msg)

    monkeypatch.setattr(Sandbox, "__init__", unavailable)
    with pytest.raises(SandboxUnavailableError, match="no Landlock"):
        keys_of(StateFunction(source=f"{module}:room"), steps_frame(texts("a")))


def test_pinning_writes_the_version_down_and_it_follows_the_folder(module: Path) -> None:
    definition = StateFunction(source=f"{module}:room")
    first = definition.pin_version()
    assert first.version is not None
    assert first.pin_version() == first
    assert StateFunction(source=f"{module}:fails").pin_version().version != first.version
    (module.parent / "rooms.py").write_text('NAMES = {"hall"}\n')
    assert definition.pin_version().version != first.version
    chained = Chain(steps=(definition, LastStates())).pin_version()
    assert chained.steps[0] == definition.pin_version()


def test_another_source_than_the_one_written_down_is_refused(module: Path) -> None:
    pinned = StateFunction(source=f"{module}:room").pin_version()
    assert keys_of(pinned, steps_frame(texts("hall"))) == [text_hash("hall")]
    module.write_text(MODULE + "\n# changed\n")
    with pytest.raises(UsageError, match="its code has changed"):
        keys_of(pinned, steps_frame(texts("hall")))


def test_a_function_that_is_not_there_is_refused(module: Path) -> None:
    with pytest.raises(UsageError, match="no function `none`"):
        StateFunction(source=f"{module}:none").pin_version()
    with pytest.raises(UsageError, match=r"missing\.py"):
        StateFunction(source=f"{module.parent}/missing.py:f").pin_version()


@pytest.mark.parametrize("source", ["room", "states.py", "states.py:", "states:room", "states.py:a b"])
def test_a_source_is_a_file_and_a_name(source: str) -> None:
    with pytest.raises(ValidationError, match=r"write module.py:name"):
        StateFunction(source=source)
