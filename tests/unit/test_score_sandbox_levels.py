"""Levels: the strongest that can be had is chosen, and below what was asked for nothing runs, with the reason said."""

import sys
from pathlib import Path
from typing import Any

import pytest

from lake.errors import SandboxUnavailableError
from lake.locked import isolation
from pipelines.score.sandbox import launch
from pipelines.score.sandbox.contract import FunctionSource, SandboxLimits
from pipelines.score.sandbox.launch import prepare_launch
from pipelines.score.sandbox.pool import Sandbox, inspect_function

LANDLOCK = {"landlock": "it is off or the kernel is older than 5.13 (ABI 0, 3 needed)"}
SECCOMP = {"seccomp": "the filter is written for x86_64 and aarch64, this is riscv64"}


@pytest.fixture(autouse=True)
def forget() -> Any:
    """What a machine can do is found out once; here the machine changes."""
    launch.find_obstacle.cache_clear()
    yield
    launch.find_obstacle.cache_clear()


@pytest.fixture
def function(tmp_path: Path) -> FunctionSource:
    path = tmp_path / "f.py"
    path.write_text("def f(**_):\n    return 1.0")
    return FunctionSource(str(path), "f")


def on_a_machine(monkeypatch: pytest.MonkeyPatch, missing: dict[str, str], *, wrapper: str | None = None) -> None:
    monkeypatch.setattr(isolation, "find_missing_layers", lambda: missing)
    monkeypatch.setattr(launch.shutil, "which", lambda _: wrapper)


def without_trials(monkeypatch: pytest.MonkeyPatch, failing: dict[str, str]) -> None:
    """A machine on which levels fail when they are tried."""
    failures = {level: failing.get(level) for level in launch.ORDER}
    monkeypatch.setattr(launch, "find_obstacle", failures.__getitem__)


@pytest.mark.parametrize(
    ("failing", "level"),
    [
        ((), "strong"),
        (("strong",), "bwrap"),
        (("strong", "bwrap"), "basic"),
        (("strong", "bwrap", "basic"), "none"),
        (("bwrap",), "strong"),
        (("basic",), "strong"),
    ],
)
def test_the_strongest_level_is_chosen(monkeypatch: pytest.MonkeyPatch, failing: tuple[str, ...], level: str) -> None:
    without_trials(monkeypatch, dict.fromkeys(failing, "because"))
    assert launch.choose_level(SandboxLimits(min_level="none")) == level


@pytest.mark.parametrize("most", launch.ORDER)
@pytest.mark.parametrize("least", launch.ORDER)
@pytest.mark.parametrize("best", launch.ORDER)
def test_what_is_chosen_lies_between_what_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, best: Any, least: Any, most: Any
) -> None:
    rank = launch.ORDER.index
    without_trials(monkeypatch, {level: "because" for level in launch.ORDER if rank(level) > rank(best)})
    limits = SandboxLimits(min_level=least, max_level=most)
    if rank(least) > min(rank(most), rank(best)):
        with pytest.raises(SandboxUnavailableError, match="min_level"):
            launch.choose_level(limits)
    else:
        assert launch.choose_level(limits) == launch.ORDER[min(rank(most), rank(best))]


def test_below_the_level_asked_for_nothing_runs_and_the_reason_is_said(
    monkeypatch: pytest.MonkeyPatch, function: FunctionSource
) -> None:
    on_a_machine(monkeypatch, LANDLOCK)
    with pytest.raises(SandboxUnavailableError) as caught:
        Sandbox(function)
    text = str(caught.value)
    assert "level strong (min_level)" in text
    assert "only level basic is available: " in text
    assert "strong: no landlock: " in text
    assert "bwrap: no bubblewrap: " in text
    assert "min_level = 'basic'" in text
    with pytest.raises(SandboxUnavailableError, match="no landlock"):
        inspect_function(function.path, "f")


def test_a_lower_level_is_accepted_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, function: FunctionSource
) -> None:
    on_a_machine(monkeypatch, LANDLOCK)
    with Sandbox(function, SandboxLimits(min_level="basic")) as sandbox:
        assert sandbox.level == "basic"
        assert sandbox.call([{}])[0].value == 1.0


def test_where_not_even_limits_can_be_set_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    without_trials(monkeypatch, dict.fromkeys(launch.ORDER, "because"))
    with pytest.raises(SandboxUnavailableError, match=r"no level is available: .*none: because"):
        launch.choose_level(SandboxLimits(min_level="none"))


def test_without_seccomp_only_limits_are_left(monkeypatch: pytest.MonkeyPatch, function: FunctionSource) -> None:
    on_a_machine(monkeypatch, SECCOMP, wrapper="/usr/bin/bwrap")
    with pytest.raises(SandboxUnavailableError, match=r"level none.*basic: no seccomp: .*riscv64.*min_level = 'none'"):
        Sandbox(function, SandboxLimits(min_level="basic"))
    assert prepare_launch(function, SandboxLimits(min_level="none")).level == "none"


def test_elsewhere_than_on_linux_only_limits_are_left(
    monkeypatch: pytest.MonkeyPatch, function: FunctionSource
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxUnavailableError, match=r"a feature of Linux.*min_level = 'none'"):
        Sandbox(function)


def test_a_level_is_tried_before_it_is_believed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All layers seem to be there, but a process cannot be locked in."""
    on_a_machine(monkeypatch, {})
    monkeypatch.setattr(isolation, "list_runtime_folders", lambda: (str(tmp_path / "absent"),))
    assert "a trial failed: " in str(launch.find_obstacle("strong"))
    assert "landlock" in str(launch.find_obstacle("strong"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert "could not be started" in str(launch.find_obstacle("basic"))


def test_a_wrapper_that_does_not_work_is_no_level(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_machine(monkeypatch, LANDLOCK, wrapper="/bin/false")
    assert launch.find_obstacle("bwrap") == "a trial failed: exit status 1"


def test_limits_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(SandboxUnavailableError, match="max_level='basic' is weaker than min_level='strong'"):
        launch.choose_level(SandboxLimits(max_level="basic"))


@pytest.mark.parametrize("level", launch.ORDER)
def test_a_process_asks_for_the_layers_of_its_level(level: Any) -> None:
    expected = {"strong": "strong", "bwrap": "basic", "basic": "basic", "none": "none"}
    assert isolation.name_level(launch.LAYERS[level]) == expected[level]


def test_a_namespace_holds_what_may_be_read_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "given"
    folder.mkdir()
    read = (str(folder), "/proc/stat", "/sys/fs/cgroup")
    command = launch.wrap_command(["python", "file.py"], isolation.LockPolicy(read=read))
    assert command[1:3] == ["--unshare-all", "--die-with-parent"]
    assert command[-3:] == ["--", "python", "file.py"]
    bound = [command[index + 1] for index, word in enumerate(command) if word == "--ro-bind"]
    assert str(folder) in bound
    assert not [path for path in bound if path.startswith(("/proc", "/sys", "/dev", str(tmp_path) + "/."))]
    assert "/" not in bound
    assert "--bind" not in command
    assert command[command.index("--remount-ro") + 1] == "/"
