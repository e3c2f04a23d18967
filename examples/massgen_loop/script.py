"""A stand-in for a language model that knows some Esperanto: `python script.py PORT` serves chat completions.

It calls MassGen's tools as a model would. Each word of an answer is any of the twelve with probability 0.3; a vote is
for a right answer with probability 0.5, if there is one, and else for any of them.
"""

import json
import random
import re
import sys

from aiohttp import web
from questions import QUALITIES, THINGS

ERRS, KNOWS = 0.3, 0.5


def called(text: str, rng: random.Random) -> tuple[str, dict[str, str]]:
    """The tool that is called on a message of MassGen, and its arguments."""
    quality, thing = re.search(r"Say in Esperanto: (\w+) (\w+)", text).groups()
    right = [QUALITIES[quality], THINGS[thing]]
    seen = re.findall(r"<(agent\d+)\.\d+> (.*?) <end of", text)
    if seen:
        good = [agent for agent, answer in seen if answer == " ".join(right)]
        agents = good if good and rng.random() < KNOWS else [agent for agent, _ in seen]
        return "vote", {"agent_id": rng.choice(agents), "reason": "best"}
    words = [
        rng.choice(list(known.values())) if rng.random() < ERRS else word
        for word, known in zip(right, (QUALITIES, THINGS), strict=True)
    ]
    return "new_answer", {"content": " ".join(words)}


async def complete(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    text = body["messages"][-1]["content"]
    rng = random.Random(f"{body['seed']} {text}")
    name, arguments = called(text, rng)
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"index": 0, "id": f"call_{rng.getrandbits(32)}", "type": "function", "function": function}
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for delta, reason in (({"role": "assistant", "tool_calls": [call]}, None), ({}, "tool_calls")):
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        chunk = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "script", "choices": [choice]}
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response


async def models(request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "script", "object": "model"}]})


if __name__ == "__main__":
    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.post("/v1/chat/completions", complete)])
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]))
