"""A chat server that plays and reflects, by script: it stands in for the models of `trajlake prompts`.

The model `player` plays the house of the demo. It reads its system prompt: with each word of SKILLS in it, it plays
well in one more quarter of its rollouts, and in the others it only looks around. Which ones depends on the opening and
the seed alone. The model `walker` walks at random in TextWorldExpress' coin game, and takes the coin where it sees it;
it opens doors, and does not walk back, if its prompt says so.

The models `reflector` and `coach` propose the present prompt with one more of SKILLS, or of ADVICE. All of them answer
equal requests alike.
"""

import json
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from lake import ids
from pipelines.collect.environments.house import HouseScript
from pipelines.collect.policies import Turn
from testkit.judge_server import JudgeServer, serving

SKILLS = ("explore", "key", "chest", "treasure")
ADVICE = ("Open doors that are closed.", "Never walk back the way you came.", "Be polite to everyone.")
OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}
_EXIT = re.compile(r"[Tt]o the (North|South|East|West) you see (a closed)?")


def answer(body: dict[str, Any]) -> str:
    """What the model that is asked for says."""
    answers = {"player": action, "walker": walk}.get(body["model"])
    return (
        answers(body) if answers is not None else reflected(body, {"reflector": SKILLS, "coach": ADVICE}[body["model"]])
    )


def action(body: dict[str, Any]) -> str:
    """The player's: a scripted walk, or a look around."""
    messages = body["messages"]
    prompt = messages[0]["content"] if messages[0]["role"] == "system" else ""
    prompts = [message["content"] for message in messages if message["role"] == "user"]
    skill = sum(word in prompt for word in SKILLS) / len(SKILLS)
    if ids.key_hash("skill", prompts[0], body["seed"] - len(prompts)) % 100 >= 100 * skill:
        return "look"
    session, turn = HouseScript().start([0]), "look"
    for index, text in enumerate(prompts):
        turn = session.act([Turn(0, [{"role": "user", "content": text}], is_first=not index)])[0].action
    return turn


def walk(body: dict[str, Any]) -> str:
    """The walker's: through an exit of the room that it saw last."""
    prompt, *messages = body["messages"]
    opens, turns = (advice in prompt["content"] for advice in ADVICE[:2])
    observation = [message["content"] for message in messages if "You are in" in message["content"]][-1]
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    if "coin" in observation.partition("You are in")[2]:
        return "take coin"
    if answers and answers[-1].startswith("open door to "):
        return f"move {answers[-1].removeprefix('open door to ')}"
    exits = {match[1].lower(): match[2] is not None for match in _EXIT.finditer(observation)}
    came = OPPOSITE[answers[-1].removeprefix("move ")] if answers and answers[-1].startswith("move ") else ""
    ways = [way for way in exits if not (turns and way == came)] or list(exits)
    if not ways:
        return "look around"
    way = ways[ids.key_hash("walk", body["seed"]) % len(ways)]
    return f"open door to {way}" if opens and exits[way] else f"move {way}"


def reflected(body: dict[str, Any], words: Sequence[str]) -> str:
    """A critique, and the present prompt with one of the words that it lacks."""
    present = prompt_in(body)
    missing = [word for word in words if word not in present]
    word = missing[body["seed"] % len(missing)] if missing else "soon"
    return f"<critique>\nIt does not say {word}\n</critique>\n<prompt>\n{present} {word}\n</prompt>"


def prompt_in(body: dict[str, Any]) -> str:
    """The present prompt, as a request to reflect tells it."""
    first = body["messages"][1]["content"].partition("\n")[0]
    return str(json.loads(first.removeprefix("The present prompt: "))) if first.endswith('"') else ""


def prompt_server() -> AbstractContextManager[JudgeServer]:
    """A server that runs; `requests` are those that it got, `script` what it answers instead."""
    return serving(answer)
