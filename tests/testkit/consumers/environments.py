"""Plays an adapter's environment, and the package's own with the same actions, in an environment that has the package.

Arguments: the checkout, the kind of environment, what it is called, its settings as JSON, the number of episodes.
Prints, of each episode: what the adapter showed, and the (reward, is over) of both; whether as many episodes at once
are the same as one by one; and the reported faults.
"""

import asyncio
import json
import random
import sys
import threading
from pathlib import Path
from typing import Any

checkout, kind, target, settings, count = sys.argv[1:]
sys.path.insert(0, checkout)

from lake.errors import TrajlakeError  # noqa: E402
from pipelines.collect.environments import Environment, Task  # noqa: E402
from pipelines.collect.environments.loading import load_environment  # noqa: E402

SETTINGS = json.loads(settings)


def choice(rng: random.Random, outcome: Any, truth: Any) -> str:
    """What a random policy says; sometimes nothing that the environment understands."""
    if rng.random() < 0.1:
        return "gibberish"
    if kind == "reasoning-gym":
        return f"Well. <answer>{truth if rng.random() < 0.5 else 'gibberish'}</answer>"
    if kind == "openenv":
        return str(rng.randrange(10))
    return rng.choice(outcome.admissible)


async def episode(environment: Environment, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    outcome = await environment.reset(Task(seed=seed))
    truth = outcome.ground_truth
    lines, outcomes = [], [outcome]
    while not outcome.done:
        lines.append(choice(rng, outcome, truth))
        outcome = await environment.step({"role": "assistant", "content": lines[-1]})
        outcomes.append(outcome)
    await environment.close()
    return {
        "task_id": outcomes[0].task_id,
        "truth": truth,
        "shown": [[message["content"] for message in outcome.messages] for outcome in outcomes],
        "said": lines,
        "valid": [outcome.is_action_valid for outcome in outcomes[1:]],
        "rewards": [outcome.reward for outcome in outcomes[1:]],
        "terminated": outcome.terminated,
        "truncated": outcome.truncated,
    }


def textworld(seed: int, lines: list[str]) -> list[Any]:
    """(observation, reward, done) of the package's own class, in its own JVM."""
    from textworld_express import TextWorldExpressEnv

    bare = BARE.get("textworld") or BARE.setdefault("textworld", TextWorldExpressEnv(envStepLimit=10**6))
    own_settings = {k: v for k, v in SETTINGS.items() if k not in ("split", "max_steps", "show_state")}
    fold = SETTINGS.get("split", "train")
    bare.load(gameName=target, gameParams=",".join(f"{k}={int(v)}" for k, v in own_settings.items()))
    worlds = {"train": bare.getValidSeedsTrain, "dev": bare.getValidSeedsDev, "test": bare.getValidSeedsTest}[fold]()
    outcomes = [(bare.reset(seed=worlds[seed], gameFold=fold)[0], None, False)]
    for action in lines:
        observation, reward, done, _ = bare.step(action)
        outcomes.append((observation, reward, done))
    return outcomes


def reasoning(seed: int, lines: list[str]) -> list[Any]:
    """(question, score, True) of the package's own data set."""
    import reasoning_gym
    from reasoning_gym.utils import extract_answer

    items = reasoning_gym.create_dataset(target, seed=seed, size=1, **SETTINGS)
    (answer,) = (extract_answer(text) or text for text in lines)
    return [(items[0]["question"], None, False), (None, items.score_answer(answer, items[0]), True)]


async def openenv(seed: int, lines: list[str]) -> list[Any]:
    """(observation, reward, done) of the package's own client."""
    from openenv.core.generic_client import GenericEnvClient

    async with GenericEnvClient(base_url=NAME.partition(":")[2]) as bare:
        result = await bare.reset(seed=seed)
        outcomes = [(result.observation["text"], None, False)]
        for text in lines:
            if text != "gibberish":
                result = await bare.step({"number": text})
                outcomes.append((result.observation["text"], result.reward, result.done))
    return outcomes


def served() -> tuple[str, Any]:
    """A server of OpenEnv's on this machine, in a thread."""
    import socket

    import uvicorn

    sys.path.append(str(Path(__file__).parent))
    from openenv_guessing import app

    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="websockets-sansio"))
    threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True).start()
    while not server.started:
        threading.Event().wait(0.01)
    return f"http://127.0.0.1:{listening.getsockname()[1]}", server


async def directly(seed: int, lines: list[str]) -> list[Any]:
    if kind == "openenv":
        return await openenv(seed, lines)
    return {"textworld-express": textworld, "reasoning-gym": reasoning}[kind](seed, lines)


async def main() -> dict[str, Any]:
    make = load_environment(NAME, SETTINGS)
    seeds = range(int(count))
    alone = [await episode(make(), seed) for seed in seeds]
    together = await asyncio.gather(*(episode(make(), seed) for seed in seeds))
    return {
        "name": make().name,
        "episodes": alone,
        "direct": [await directly(seed, episode["said"]) for seed, episode in zip(seeds[:12], alone, strict=False)],
        "together": list(together) == alone,
        "told": await list_faults(),
    }


async def list_faults() -> list[str]:
    """What is said of names and settings that there are not, and of what else each kind refuses."""
    faults = []
    for name, arguments in ((f"{kind}:nothing-like-it", {}), (NAME, {"nothing_like_it": 3}), (NAME, {"prompt": 3})):
        try:
            await episode(load_environment(name, arguments)(), 0)
            faults.append("")
        except TrajlakeError as error:
            faults.append(str(error))
    environment = load_environment(NAME, SETTINGS)()
    try:
        await {"textworld-express": beyond, "reasoning-gym": attack, "openenv": lose}[kind](environment)
    except TrajlakeError as error:
        faults.append(str(error))
    return faults


async def beyond(environment: Any) -> None:
    """Ask for a world that there is not."""
    await environment.reset(Task(seed=10**6))


async def attack(environment: Any) -> None:
    """Answer with a program, to the adapter and then to the package's own scorer."""
    answer = "[str(__import__('pathlib').Path('{}').write_text('here'))]"
    await environment.reset(Task(seed=0))
    await environment.step({"role": "assistant", "content": answer.format(Path("by_adapter").resolve())})
    reasoning(0, [answer.format(Path("by_package").resolve())])
    names = [file.name for file in Path().glob("by_*")]
    raise TrajlakeError(", ".join(names))


async def lose(environment: Any) -> None:
    """Lose the connection between two steps."""
    await environment.reset(Task(seed=0))
    await environment._inner._client._ws.close()
    await environment.step({"role": "assistant", "content": "3"})


BARE: dict[str, Any] = {}
if kind == "openenv":
    target, _server = served()
NAME = f"{kind}:{target}"
print(json.dumps(asyncio.run(main())))
if bare := BARE.get("textworld"):
    bare.close()
