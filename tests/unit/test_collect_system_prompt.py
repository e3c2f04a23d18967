"""A system prompt before an environment's messages: first, once, and in one message."""

import asyncio
from pathlib import Path

import pytest

from lake.errors import UsageError
from pipelines.collect.environments import Outcome, Task
from pipelines.collect.environments.loading import Prompt, add_system_prompt, read_system_prompt, with_system_prompt
from pipelines.collect.factory import build_player
from pipelines.collect.settings import PlayerOptions

USER = {"role": "user", "content": "Room hall."}


def test_the_prompt_is_the_first_message() -> None:
    assert with_system_prompt([USER], "Be brief.") == [{"role": "system", "content": "Be brief."}, USER]
    assert with_system_prompt([], "Be brief.") == [{"role": "system", "content": "Be brief."}]


@pytest.mark.parametrize(
    ("own_message", "expected"),
    [
        ("Play well.", "Be brief.\n\nPlay well."),
        (None, "Be brief."),
        (
            [{"type": "text", "text": "Play well."}],
            [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Play well."}],
        ),
    ],
)
def test_the_environments_own_system_message_goes_on_after_it(own_message: object, expected: object) -> None:
    first = {"role": "system", "content": own_message, "name": "rules"}
    messages = with_system_prompt([first, USER], "Be brief.")
    assert messages == [{"role": "system", "content": expected, "name": "rules"}, USER]
    assert first["content"] == own_message, "the environment's message is not changed in its place"


def test_only_the_opening_is_prompted() -> None:
    async def played() -> tuple[Outcome, Outcome]:
        environment = add_system_prompt(Prompt, "Be brief.")()
        first = await environment.reset(Task(messages=[USER]))
        return first, await environment.step({"role": "assistant", "content": "no"})

    first, last = asyncio.run(played())
    assert [message["role"] for message in first.messages] == ["system", "user"]
    assert last == Outcome(messages=[], terminated=True)


def test_without_a_prompt_nothing_stands_between() -> None:
    assert add_system_prompt(Prompt, None) is Prompt


def test_a_file_that_says_nothing_is_refused(tmp_path: Path) -> None:
    for name, data in (("empty", b" \n"), ("binary", b"\xff\xfe")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UsageError, match=f"system prompt .*{name}"):
            read_system_prompt(tmp_path / name)


def test_an_agent_takes_no_system_prompt() -> None:
    options = PlayerOptions(agent="agent.py:play", system_prompt="Be brief.", engines=("http://127.0.0.1:1",))
    with pytest.raises(UsageError, match="--system-prompt is for environments"):
        build_player(options, "lake", "run")
