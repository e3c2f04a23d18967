"""Group-wise, with a model: a judge reads all siblings at once and says which served the customer best.

It needs the network, so it does not run in the sandbox: `--allow-network`. The server and its key come from
OPENAI_BASE_URL and OPENAI_API_KEY. Answers are kept in the lake; asking the same again costs nothing.
"""

import json

from pipelines.score import EvaluateResult, reward_function
from pipelines.score.judges import Judge

judge = Judge("gpt-4o-mini")

QUESTION = """Below are {count} conversations of an airline's agent with the same customer. Judge how well the agent
served the customer. Answer with a JSON list of {count} numbers from 0 to 10, in order, and nothing else.

{conversations}"""


@reward_function(mode="group", requires_network=True)
async def compare(rollouts_messages, **kwargs):
    texts = []
    for number, messages in enumerate(rollouts_messages, start=1):
        spoken = [f"{m.role}: {m.content}" for m in messages if m.role in ("user", "assistant") and m.content]
        texts.append(f"Conversation {number}\n" + "\n".join(spoken))
    question = QUESTION.format(count=len(texts), conversations="\n\n".join(texts))
    marks = json.loads(await judge.ask(question, temperature=0))
    return [EvaluateResult(score=mark / 10, reason=f"{mark} of 10") for mark in marks]
