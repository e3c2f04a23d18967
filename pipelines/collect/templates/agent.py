"""An example agent: it asks for a sum, and asks again if the answer is wrong.

Try it with `trajlake collect --agent THIS_FILE.py:agent`, then replace it with your own: any code that calls a model
through a URL. It runs in the collecting process with all rights of your shell.
"""

import random
import re
from typing import Any

from pipelines.collect.agents import Client, Result
from pipelines.collect.environments import Task


async def agent(task: Task, client: Client) -> Result:
    """Play one task. Each call of `client` becomes a step of the episode; the return value ends it."""
    # A file of tasks (--prompts) gives `task.messages`, `task.ground_truth` and `task.data`; else there is a seed.
    first, second = random.Random(task.seed).choices(range(10, 100), k=2)
    messages: list[Any] = [{"role": "user", "content": f"What is {first} + {second}? Answer with the number alone."}]
    async with client.async_openai() as openai:  # or any library, given client.base_url and client.model
        for _ in range(2):
            answer = await openai.chat.completions.create(model=client.model, messages=messages, **client.sampling)
            text = answer.choices[0].message.content or ""
            if re.findall(r"\d+", text)[-1:] == [str(first + second)]:
                return Result(reward=1.0, ground_truth=first + second)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "No. Try again."}]
    return Result(reward=0.0, ground_truth=first + second)


# Without `async`, an agent may block: it then runs in a separate thread.
