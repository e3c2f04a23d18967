"""A manager that follows a script and errs half of the time, as trajectories: `python script.py > script.jsonl`.

They are what the model imitates before it is rewarded.
"""

import asyncio
import json
import random
import sys

from environment import QUESTIONS, make
from judge import SIGNS

from pipelines.collect.environments import Task

EPISODES = 600


def answers(rng: random.Random, wanted: list[str]) -> list[str]:
    """Some questions, then a rubric of criteria of which each is right or any."""
    asked = rng.sample(list(QUESTIONS), rng.randint(0, 2))
    criteria = [criterion if rng.random() < 0.5 else rng.choice(list(SIGNS)) for criterion in wanted]
    said = [*({"ask": question} for question in asked), {"criteria": criteria[: rng.randint(2, 4)]}]
    return [json.dumps(one, separators=(",", ":")) for one in said]


async def episode(number: int) -> dict:
    rng, environment = random.Random(number), make()
    now = await environment.reset(Task(seed=number))
    first, steps = now, []
    for action in answers(rng, now.ground_truth["criteria"]):
        steps.append({"context": now.messages, "state": now.messages[-1]["content"], "action": action})
        now = await environment.step({"role": "assistant", "content": action})
    found = {"task_id": f"script-{number}", "ground_truth": first.ground_truth, "steps": steps}
    return found | {"final_observation": now.messages}


if __name__ == "__main__":
    for number in range(EPISODES):
        sys.stdout.write(json.dumps(asyncio.run(episode(number))) + "\n")
