"""An agent of your own: it asks for a sum, and asks again if the answer is wrong.

Try it with `trajlake collect --agent THIS_FILE.py:agent`; then put your own in its place: any code that talks to
a model through a URL. It runs in the collecting process, with all that your shell may do.
"""

import random
import re
from typing import Any

from pipelines.collect.agents import Client, Result
from pipelines.collect.environments import Task


async def agent(task: Task, client: Client) -> Result:
    """Play one task. Each call of `client` becomes a step of the episode; what is returned is how it went."""
    # A file of tasks (--prompts) gives `task.messages`, `task.ground_truth` and `task.data`; else there is a seed.
    first, second = random.Random(task.seed).choices(range(10, 100), k=2)
    messages: list[Any] = [{"role": "user", "content": f"What is {first} + {second}? Answer with the number alone."}]
    async with client.async_openai() as openai:  # or any library, given client.base_url and client.model
        for _ in range(2):
            answer = await openai.chat.completions.create(model=client.model, messages=messages, **client.sampling)
            said = answer.choices[0].message.content or ""
            if re.findall(r"\d+", said)[-1:] == [str(first + second)]:
                return Result(reward=1.0, ground_truth=first + second)
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "No. Try again."}]
    return Result(reward=0.0, ground_truth=first + second)


# Without `async`, an agent may block: it is then played in a thread of its own.
