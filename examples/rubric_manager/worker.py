"""The worker: an agent that writes the texts which are judged, with the manager's criteria as its brief.

Without a URL it is a stand-in, the same on every machine: it knows its subject a little, and does most of what it is
told. With one it is whatever model answers there.
"""

import random

import aiohttp
from judge import SIGNS

TOLD, KNOWN, OTHERWISE = 0.8, 0.5, 0.05
"""How often a text meets a criterion of the brief, one of its subject, and any other."""


def written_by_script(brief: list[str], of_subject: list[str], rng: random.Random) -> str:
    """A text of the stand-in: one sentence for each criterion that it thinks of."""

    def chance(criterion: str) -> float:
        if criterion in brief:
            return TOLD
        return KNOWN if criterion in of_subject else OTHERWISE

    return " ".join(sign for criterion, sign in SIGNS.items() if rng.random() < chance(criterion))


async def written_by_model(url: str, model: str, subject: str, brief: list[str], seed: int) -> str:
    """A text of a model behind an OpenAI-compatible URL."""
    asked = f"Write a short text about {subject}. It will be judged by these criteria: {', '.join(brief)}."
    body = {"model": model, "messages": [{"role": "user", "content": asked}], "seed": seed, "max_tokens": 256}
    async with (
        aiohttp.ClientSession(raise_for_status=True) as session,
        session.post(f"{url.rstrip('/')}/v1/chat/completions", json=body) as answer,
    ):
        found = await answer.json(content_type=None)
    return found["choices"][0]["message"]["content"]
