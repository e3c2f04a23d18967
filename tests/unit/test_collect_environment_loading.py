"""What `--env` names: forms, options, the kinds of environments that make() may give, and the messages of faults."""

import asyncio
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lake.errors import UsageError
from pipelines.collect.environments import Environment, Outcome, Task
from pipelines.collect.environments.house import House, HouseConfig
from pipelines.collect.environments.loading import EnvironmentFaultError, Prompt, load_environment

HEAD = """
from pipelines.collect.environments import Outcome
from pipelines.collect.environments.games import Answer, Info

def said(text, **more):
    return Outcome(messages=[{"role": "user", "content": text}], **more)
"""
ASYNC = """
class Env:
    name = "counting"
    split = "train"
    def __init__(self, start=0): self.at = start
    async def reset(self, task): return said(str(self.at + task.seed))
    async def step(self, action): return said(action["content"], reward=1, terminated=True)
    async def close(self): self.at = None
"""
SYNC = ASYNC.replace("async ", "")


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], str]:
    """Writes a file of the user; gives its path."""

    def write(text: str) -> str:
        (tmp_path / "mine.py").write_text(HEAD + text, "utf-8")
        return str(tmp_path / "mine.py")

    return write


def played(environment: Environment, *actions: str, seed: int = 0) -> list[Outcome]:
    """All outcomes of an episode with these answers."""

    async def play() -> list[Outcome]:
        try:
            outcomes = [await environment.reset(Task(seed=seed))]
            return outcomes + [await environment.step({"role": "assistant", "content": text}) for text in actions]
        finally:
            await environment.close()

    return asyncio.run(play())


def test_the_house_is_the_game_itself() -> None:
    environment = load_environment("house", {"rooms": 4, "split": "held_out"})()
    assert (environment.name, environment.split) == ("house-4", "held_out")
    house = House(HouseConfig(rooms=4, split="held_out"))
    answers = [house.reset(5), house.step("look"), house.step("fly")]
    outcomes = played(environment, "look", "fly", seed=5)
    assert [outcome.messages[0]["content"] for outcome in outcomes] == [answer.observation for answer in answers]
    assert [outcome.reward for outcome in outcomes] == [None, 0.0, 0.0]
    assert outcomes[2].is_action_valid is False


@pytest.mark.parametrize("text", [ASYNC, SYNC, SYNC + "    runs_inline = True\n"], ids=["async", "sync", "inline"])
def test_async_and_synchronous_environments_are_played_alike(text: str, written: Callable[[str], str]) -> None:
    make = load_environment(f"{written(text)}:Env", {"start": 7})
    for _ in range(2):
        environment = make()
        assert (environment.name, environment.split) == ("counting", "train")
        opening, last = played(environment, "hello", seed=3)
        assert (opening.messages[0]["content"], last.messages[0]["content"]) == ("10", "hello")
        assert (last.reward, last.terminated) == (1, True)


def test_a_text_game_of_the_user_is_played_by_its_seed(written: Callable[[str], str]) -> None:
    file = written(
        """
class Game:
    name, split = "echo", "test"
    def reset(self, seed): return Answer(f"seed {seed}", 0.0, False, Info(admissible=("go",)))
    def step(self, action): return Answer(action, 2.0, True, Info(admissible=(), terminated=True))
def make(): return Game()
"""
    )
    opening, last = played(load_environment(f"{file}:make", {})(), "go", seed=9)
    assert (opening.messages[0]["content"], opening.admissible, opening.reward) == ("seed 9", ("go",), None)
    assert (last.messages[0]["content"], last.reward, last.terminated) == ("go", 2.0, True)


def test_name_split_and_close_may_be_left_out(written: Callable[[str], str]) -> None:
    file = written(
        "class Env:\n    def reset(self, task): return said('?')\n    def step(self, action): return said('!')\n"
    )
    environment = load_environment(f"{file}:Env", {})()
    assert (environment.name, environment.split) == (f"{file}:Env", None)
    assert len(played(environment, "a")) == 2


def test_a_module_finds_its_neighbours_and_a_package_is_found_where_the_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "neighbour_of_mine.py").write_text(HEAD + ASYNC)
    (tmp_path / "env_of_mine.py").write_text("from neighbour_of_mine import Env")
    monkeypatch.chdir(tmp_path)
    for name in ("env_of_mine.py:Env", "env_of_mine:Env", "neighbour_of_mine:Env"):
        assert played(load_environment(name, {})())[0].messages[0]["content"] == "0"


def test_rollouts_get_instances_of_their_own(written: Callable[[str], str]) -> None:
    make = load_environment(f"{written(ASYNC)}:Env", {})
    first, second = make(), make()
    assert played(first)[0] == played(second)[0]


def test_the_one_that_was_made_to_be_looked_at_is_closed_or_played(written: Callable[[str], str]) -> None:
    """In a thread none is played that was made outside of it."""
    log = "made, closed = [], []\n"
    counted = SYNC.replace("self.at = start", "made.append(self); self.at = start")
    counted = counted.replace("self.at = None", "closed.append(self)")
    for flag, count in (("", 2), ("    runs_inline = True\n", 1)):
        file = written(log + counted + flag)
        played(load_environment(f"{file}:Env", {})())
        # Not by `getattr`, which has lazy modules import what they stand for.
        loaded = [vars(module) for module in sys.modules.values() if vars(module).get("__file__") == file]
        assert [len(loaded[-1]["made"]), len(loaded[-1]["closed"])] == [count, count]


@pytest.mark.parametrize("error", ["ValueError('c')", "SystemExit(4)"])
def test_one_that_cannot_be_closed_is_told_in_one_line(error: str, written: Callable[[str], str]) -> None:
    file = written(SYNC.replace("self.at = None", f"raise {error}"))
    with pytest.raises(UsageError, match=r"Env: close failed: \w+: [c4] \(.* line \d+, in close\)"):
        load_environment(f"{file}:Env", {})


@pytest.mark.parametrize(
    ("name", "arguments", "fragment"),
    [
        ("castle", {}, "valid: house, FILE.py:make, package.module:make, gymnasium:FrozenLake-v1"),
        ("house", {"rooms": 1}, "rooms"),
        ("house", {"size": 3}, "size"),
        ("gymnasium:", {}, "for example gymnasium:FrozenLake-v1"),
        ("nowhere.py:make", {}, "file not found: nowhere.py"),
        ("no.such.package:make", {}, "no module no is installed"),
        ("{file}:1", {}, "write FILE.py:NAME"),
        ("{file}:Env2", {}, "has no `Env2`; it has said, Env"),
        ("{file}:Env", {"begin": 3}, "unexpected keyword argument 'begin'; it takes: start=0"),
        ("{file}:HEAD_COUNT", {}, "valid: a function or class"),
    ],
)
def test_what_names_no_environment_is_told(
    name: str, arguments: dict[str, Any], fragment: str, written: Callable[[str], str]
) -> None:
    file = written("HEAD_COUNT = 3\n" + ASYNC)
    with pytest.raises(UsageError) as caught:
        load_environment(name.format(file=file), arguments)
    assert fragment in str(caught.value)


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        (
            "def make(): return None",
            "make gave None, which has no reset and no step; valid: an object with reset(task)",
        ),
        ("class make:\n  async def reset(self, task): ...", "which has no step"),
        ("class make:\n  async def reset(self): ...\n  async def step(self, a): ...", "whose reset takes 0 arguments"),
        ("class make:\n  async def reset(self, t): ...\n  def step(self, a): ...", "one is `async def`; valid: both"),
        ("class make:\n  async def reset(self, seed): ...\n  async def step(self, a): ...", "a text game with `async"),
        (SYNC.replace('"counting"', "5").replace("Env", "make"), "`name` is an object of type int"),
        ("async def make(): ...", "is a coroutine function; write `def`"),
        ("def make():\n  return 1 / 0", "ZeroDivisionError: division by zero"),
        ("import nothing_like_it", "No module named 'nothing_like_it'"),
        ("def make(:", "mine.py line 7: "),
    ],
)
def test_what_make_gives_is_looked_at_before_anything_is_played(
    text: str, fragment: str, written: Callable[[str], str]
) -> None:
    with pytest.raises(UsageError) as caught:
        load_environment(f"{written(text)}:make", {})
    assert fragment in str(caught.value)


@pytest.mark.parametrize(
    ("outcome", "fragment"),
    [
        ("None", "step gave None; valid: Outcome(messages=[...]"),
        ("('text', 1.0, False, {})", "step gave an object of type tuple; valid: Outcome("),
        ("Outcome(messages='text')", "messages that are an object of type str"),
        (
            "Outcome(messages=[{'content': 'x'}])",
            "`messages[0].role` is None; valid: system, user, assistant, tool; valid: a list of chat messages",
        ),
        ("said('x', reward=float('nan'))", "the reward nan; valid: a finite number, or None"),
        ("said('x', reward='1')", "the reward '1'"),
        ("said('x', terminated=1)", "terminated 1; valid: True or False"),
        ("said('x', terminated=True, truncated=True)", "both terminated and truncated"),
        ("said('x', is_action_valid='no')", "is_action_valid 'no'; valid: True, False, or None"),
        ("said('x', is_error=1)", "is_error 1; valid: True, False, or None"),
        ("said('x', tools={'look': {}})", "`tools` that are an object of type dict; valid: a list of schemas"),
        ("said('x', task_id=5)", "`task_id` that is an object of type int; valid: a text"),
        (r"said('a file \udcff')", r"`messages[0]` that is not JSON ('utf-8' codec can't encode character '\udcff'"),
        (r"said('x', extra={'y': '\ud800'})", "`extra` that is not JSON"),
        (r"said('x', task_id='\ud800')", "`task_id` that is not JSON"),
    ],
)
@pytest.mark.parametrize("kind", ["async ", ""])
def test_what_is_no_outcome_is_told(kind: str, outcome: str, fragment: str, written: Callable[[str], str]) -> None:
    reset = f"  {kind}def reset(self, task): return said('?')\n"
    text = f"class Env:\n{reset}  {kind}def step(self, action): return {outcome}\n"
    make = load_environment(f"{written(text)}:Env", {})
    with pytest.raises(EnvironmentFaultError) as caught:
        played(make(), "a")
    assert fragment in str(caught.value)
    assert "mine.py:Env" in str(caught.value)


def test_an_opening_without_messages_is_told(written: Callable[[str], str]) -> None:
    text = "class Env:\n  def reset(self, task): return Outcome(messages=[])\n  def step(self, action): ...\n"
    with pytest.raises(EnvironmentFaultError, match="valid: at least one"):
        played(load_environment(f"{written(text)}:Env", {})())


def test_a_reward_that_no_action_led_to_is_told_and_not_dropped(written: Callable[[str], str]) -> None:
    text = "class Env:\n  def reset(self, task): return said('?', reward=1.0)\n  def step(self, action): ...\n"
    with pytest.raises(EnvironmentFaultError, match="reset gave the reward 1"):
        played(load_environment(f"{written(text)}:Env", {})())


@pytest.mark.parametrize("kind", ["async ", ""])
def test_an_exception_names_the_line_of_the_users_file_and_the_traceback_is_logged_at_debug(
    kind: str, written: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    """Not the line of the library in which it was raised."""
    text = f"""
import json
class Env:
  {kind}def reset(self, task): return said("?")
  {kind}def step(self, action):
    return self.read(action["content"])
  def read(self, text):
    return said(json.loads(text))  # here
"""
    file = written(text)
    line = next(n for n, text_line in enumerate(Path(file).read_text().splitlines(), 1) if "# here" in text_line)
    with caplog.at_level(logging.DEBUG, "trajlake"), pytest.raises(EnvironmentFaultError) as caught:
        played(load_environment(f"{file}:Env", {})(), "no json")
    assert str(caught.value).endswith(f"({file} line {line}, in read)")
    assert "step failed: JSONDecodeError: Expecting value" in str(caught.value)
    (record,) = [record for record in caplog.records if record.levelno == logging.DEBUG and record.exc_info]
    assert "json/decoder.py" in caplog.text
    assert record.name == "trajlake"


def test_a_prompt_ends_with_its_answer_and_is_rewarded_by_nobody() -> None:
    async def play(task: Task) -> list[Outcome]:
        prompt = Prompt()
        return [await prompt.reset(task), await prompt.step({"role": "assistant", "content": "Rome"})]

    messages = [{"role": "user", "content": "Where to?"}]
    opening, last = asyncio.run(play(Task(messages=messages, name="trip", ground_truth="Rome")))
    assert (opening.messages, opening.task_id) == (messages, "trip")
    assert (last.messages, last.reward, last.terminated) == ([], None, True)
    with pytest.raises(UsageError, match="the task trip has"):
        asyncio.run(play(Task(name="trip")))
