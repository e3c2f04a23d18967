"""Write tests/golden/formats/agent_lightning_spans/*.jsonl: spans in agent-lightning's store, of its client and proxy.

python -m venv /tmp/env-lightning && /tmp/env-lightning/bin/pip install agentlightning==0.3.0 litellm[proxy]
/tmp/env-lightning/bin/python tests/golden/formats/make_agent_lightning_spans.py

An agent calls a tool and answers, once traced by AgentOps in its own process, once through the proxy; the server it
calls answers by rules, with token ids as vLLM gives them.
"""

import asyncio
import json
import os
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY"] = "true"

import agentlightning
import openai
from agentlightning.llm_proxy import LLMProxy
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.store.threading import LightningStoreThreaded
from agentlightning.tracer.agentops import AgentOpsTracer
from agentlightning.utils.otel import make_link_attributes

FOLDER = Path(__file__).parent / "agent_lightning_spans"
START = 1_750_000_000.0
PORT = 8765
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]
OF_THE_HOST = re.compile(
    r"metadata\.|hidden_params|server\.|network\.|url\.|gen_ai\.cost\.|imported_libraries|service\."
)


class Server(BaseHTTPRequestHandler):
    """Asked by a user it calls add, then it answers. A prompt's ids are those of the call before, and one more."""

    count = 0
    ids = ()

    def log_message(self, *_):
        """Say nothing."""

    def do_POST(self):
        """Answer one request."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        Server.count += 1
        is_new = body["messages"][-1]["role"] == "user"
        call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
        message = {"content": None, "tool_calls": [call]} if is_new else {"content": "It is 3."}
        prompt = [1, 2, 3] if is_new else [*Server.ids, 9]
        action = [100 + Server.count, 200]
        Server.ids = [*prompt, *action]
        logprobs = [{"token": "t", "logprob": -0.25 * n, "bytes": None, "top_logprobs": []} for n in (1, 2)]
        choice = {"index": 0, "message": {"role": "assistant", **message}, "token_ids": action}
        choice |= {"finish_reason": "tool_calls" if is_new else "stop", "logprobs": {"content": logprobs}}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": 2, "total_tokens": len(prompt) + 2}
        answer = {"id": f"chatcmpl-{Server.count}", "object": "chat.completion", "created": 0, "model": body["model"]}
        data = json.dumps(answer | {"choices": [choice], "prompt_token_ids": prompt, "usage": usage}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def agent(url):
    """Two calls; the id of the last answer."""
    client = openai.OpenAI(base_url=url, api_key="none")
    settings = {"model": "tiny", "tools": TOOLS, "temperature": 0.75, "logprobs": True}
    messages = [{"role": "system", "content": "Use add."}, {"role": "user", "content": "1 + 2?"}]
    said = client.chat.completions.create(messages=messages, **settings).choices[0].message
    messages += [said.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": "call_1", "content": "3"}]
    return client.chat.completions.create(messages=messages, **settings).id


async def of_client(url):
    """The agent traced in its own process, with a reward for the last answer and two for the whole."""
    store = InMemoryLightningStore()
    rollout = await store.start_rollout(input={"question": "1 + 2?"})
    tracer = AgentOpsTracer()
    tracer.init()
    tracer.init_worker(0, store)
    async with tracer.trace_context("agent", rollout_id=rollout.rollout_id, attempt_id=rollout.attempt.attempt_id):
        last = agent(url)
        agentlightning.emit_reward(0.25, attributes=make_link_attributes({"gen_ai.response.id": last}))
        agentlightning.emit_reward({"correct": 1.0, "short": 0.5}, primary_key="correct")
    await asyncio.sleep(1)
    return await store.query_spans(rollout.rollout_id)


async def of_proxy(url):
    """The agent behind the proxy."""
    store = LightningStoreThreaded(InMemoryLightningStore())
    rollout = await store.start_rollout(input={"question": "1 + 2?"})
    served = {"model": "hosted_vllm/tiny", "api_base": url, "api_key": "none"}
    models = [{"model_name": "tiny", "litellm_params": served}]
    proxy = LLMProxy(port=PORT, launch_mode="thread", store=store, model_list=models)
    await proxy.start()
    place = f"rollout/{rollout.rollout_id}/attempt/{rollout.attempt.attempt_id}"
    await asyncio.to_thread(agent, f"http://127.0.0.1:{PORT}/{place}/v1")
    await asyncio.sleep(8)
    spans = await store.query_spans(rollout.rollout_id)
    await proxy.stop()
    return [
        span for span in spans if span.name in ("litellm_request", "raw_gen_ai_request", "POST /v1/chat/completions")
    ]


def write(name, spans):
    """Write spans, with ids and times that are the same whenever this runs, and without what is about the host."""
    first = min(span.start_time for span in spans)
    lines = []
    for span in spans:
        value = json.loads(span.model_dump_json())
        value |= {key: START + round(value[key] - first, 2) for key in ("start_time", "end_time")}
        value["attributes"] = {k: v for k, v in value["attributes"].items() if not OF_THE_HOST.match(k)}
        value["resource"]["attributes"] = {
            k: v for k, v in value["resource"]["attributes"].items() if not OF_THE_HOST.match(k)
        }
        lines.append(json.dumps(value))
    text = "\n".join(lines) + "\n"
    for number, found in enumerate(dict.fromkeys(re.findall(r"\b(?:[0-9a-f]{32}|[0-9a-f]{16}|[0-9a-f-]{36})\b", text))):
        text = text.replace(found, f"{number + 1:0{len(found)}x}")
    for kind in ("ro", "at"):
        for number, found in enumerate(dict.fromkeys(re.findall(rf"\b{kind}-[0-9a-f]+\b", text))):
            text = text.replace(found, f"{kind}-{name}-{number}")
    (FOLDER / f"{name}.jsonl").write_text(text)


def main():
    """Write both files anew."""
    FOLDER.mkdir(exist_ok=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    # One process cannot be both: they set the global tracer.
    if os.fork() == 0:
        write("proxy", asyncio.run(of_proxy(url)))
        os._exit(0)
    os.wait()
    write("client", asyncio.run(of_client(url)))


main()
