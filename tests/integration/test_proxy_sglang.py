"""The proxy before an engine that speaks as SGLang says it does: its pull request 30917, and no running one.

Ids stand in the choice, and are absent unless asked for; a streamed chat that asks for them is refused; the version of
the weights is in the answer.
"""

import json
from pathlib import Path

from aiohttp import web

import lake
from testkit.engine_server import Engine, Sampled, engine_server, rendered
from testkit.proxy_process import proxy_here

PATH = "/ep/door-1/v1/chat/completions"


class Sglang(Engine):
    """As far as the proxy sees of it."""

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"detail": "Not Found"}, status=404)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "policy", "owned_by": "sglang"}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body.get("stream") and body.get("return_token_ids"):
            return web.json_response({"message": "return_token_ids is not supported with streaming"}, status=400)
        if body.get("stream"):
            return await super()._chat(request)
        sampled = await self._begin(request, rendered(body["messages"]), body)
        assert isinstance(sampled, Sampled)
        message = {"role": "assistant", "content": sampled.text}
        content = [{"token": "", "logprob": value} for value in sampled.logprobs]
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
        if body.get("logprobs"):
            choice["logprobs"] = {"content": content}
        if body.get("return_token_ids"):
            choice |= {"prompt_token_ids": sampled.prompt_ids, "token_ids": sampled.action_ids}
        about = {"id": "1", "object": "chat.completion", "model": "policy", "metadata": {"weight_version": "v3"}}
        return web.json_response(about | {"choices": [choice]})


def test_its_tokens_are_recorded_and_its_clients_get_what_they_asked_for(tmp_path: Path) -> None:
    body = {"model": "policy", "messages": [{"role": "user", "content": "find the key"}], "temperature": 1.0}
    with engine_server(Sglang()) as engine, proxy_here(engine, tmp_path) as at:
        choice = json.loads(at.post(PATH, body))["choices"][0]
        assert choice == {
            "index": 0,
            "message": {"role": "assistant", "content": engine.calls[0].text},
            "logprobs": None,
            "finish_reason": "stop",
        }
        assert "[DONE]" in at.post(PATH, body | {"stream": True})
        at.end()
    rows = lake.open(at.lake).sql(
        "SELECT action, engine, t.policy_version AS v, context_ids, action_ids, action_logprobs IS NOT NULL AS has "
        "FROM steps s LEFT JOIN tokens t USING (episode_id, step_index) ORDER BY step_index"
    )
    first, second = engine.calls
    assert rows.rows() == [
        (first.text, "sglang", 3, first.prompt_ids, first.action_ids, True),
        (second.text, None, None, None, None, False),
    ]
