"""A chat server that plays and reflects, by script: it stands in for the models of `trajlake prompts`.

The model `player` plays the house of the demo. It reads its system prompt: with each word of SKILLS in it, it plays
well in one more quarter of its rollouts, and in the others it only looks around. Which ones depends on the opening and
the seed alone. The model `reflector` proposes the present prompt with one more of these words. Both answer equal
requests alike.
"""

import json
from contextlib import AbstractContextManager
from typing import Any

from lake import ids
from pipelines.collect.environments.house import HouseScript
from pipelines.collect.policies import Turn
from testkit.judge_server import JudgeServer, serving

SKILLS = ("explore", "key", "chest", "treasure")


def answer(body: dict[str, Any]) -> str:
    """What the model that is asked for says."""
    return reflected(body) if body["model"] == "reflector" else action(body)


def action(body: dict[str, Any]) -> str:
    """The player's: a scripted walk, or a look around."""
    messages = body["messages"]
    prompt = messages[0]["content"] if messages[0]["role"] == "system" else ""
    said = [message["content"] for message in messages if message["role"] == "user"]
    skill = sum(word in prompt for word in SKILLS) / len(SKILLS)
    if ids.key_hash("skill", said[0], body["seed"] - len(said)) % 100 >= 100 * skill:
        return "look"
    session, turn = HouseScript().start([0]), "look"
    for index, text in enumerate(said):
        turn = session.act([Turn(0, [{"role": "user", "content": text}], is_first=not index)])[0].action
    return turn


def reflected(body: dict[str, Any]) -> str:
    """The reflector's: a critique, and the present prompt with a word that it lacks."""
    present = prompt_in(body)
    missing = [word for word in SKILLS if word not in present]
    word = missing[body["seed"] % len(missing)] if missing else "soon"
    return f"<critique>\nIt does not say {word}.\n</critique>\n<prompt>\n{present} {word}\n</prompt>"


def prompt_in(body: dict[str, Any]) -> str:
    """The present prompt, as a request to reflect tells it."""
    first = body["messages"][1]["content"].partition("\n")[0]
    return str(json.loads(first.removeprefix("The present prompt: "))) if first.endswith('"') else ""


def prompt_server() -> AbstractContextManager[JudgeServer]:
    """A server that runs; `requests` are those that it got, `script` what it answers instead."""
    return serving(answer)
