"""Writes tests/golden/formats/openai_agents/*.jsonl: traces of the OpenAI Agents SDK against a mock server.

python3 -m venv /tmp/env-agents && /tmp/env-agents/bin/pip install openai-agents==0.24.0
/tmp/env-agents/bin/python tests/golden/formats/make_openai_agents.py
"""

import asyncio
import contextlib
import itertools
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agents import (
    Agent,
    GuardrailFunctionOutput,
    InputGuardrail,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
    set_trace_processors,
)
from agents.exceptions import MaxTurnsExceeded
from agents.tracing import TracingProcessor, util
from mock_openai import serve
from openai import AsyncOpenAI

OUT = Path(__file__).parent / "openai_agents"
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


class Exported(TracingProcessor):
    """Everything as it is exported, in the order in which it ends; with what responses said if that is asked for."""

    def __init__(self, *, with_responses: bool = False) -> None:
        self.lines: list[Any] = []
        self.with_responses = with_responses

    def on_trace_start(self, trace: Any) -> None:
        pass

    def on_trace_end(self, trace: Any) -> None:
        self.lines.append(trace.export())

    def on_span_start(self, span: Any) -> None:
        pass

    def on_span_end(self, span: Any) -> None:
        line = span.export()
        data = span.span_data
        if self.with_responses and data.type == "response" and data.response is not None:
            line["span_data"] |= {"input": data.input, "response": data.response.model_dump(mode="json")}
        self.lines.append(line)

    def shutdown(self) -> None:
        pass

    def force_flush(self) -> None:
        pass

    def write(self, name: str) -> None:
        """The lines, shifted to the first of January 2026."""
        first = min(datetime.fromisoformat(line["started_at"]) for line in self.lines if "started_at" in line)
        for line in self.lines:
            for key in ("started_at", "ended_at"):
                if key in line:
                    line[key] = (BEGIN + (datetime.fromisoformat(line[key]) - first)).isoformat()
            settings = line.get("span_data", {}).get("model_config")
            if settings:
                line["span_data"]["model_config"] = {k: v for k, v in settings.items() if k != "base_url"}
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in self.lines)
        (OUT / name).write_text(text, "utf-8")


@function_tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"22C in {city}"


async def main() -> None:
    """Write all of them."""
    OUT.mkdir(exist_ok=True)
    numbers = itertools.count(1)
    # Ids that are the same whenever the script runs.
    util.gen_trace_id = lambda: f"trace_{next(numbers):032x}"
    from agents.tracing import provider

    provider.DefaultTraceProvider.gen_trace_id = lambda _: f"trace_{next(numbers):032x}"  # type: ignore[method-assign]
    provider.DefaultTraceProvider.gen_span_id = lambda _: f"span_{next(numbers):024x}"  # type: ignore[method-assign]
    client = AsyncOpenAI(base_url=serve(), api_key="none", max_retries=1)
    chat = OpenAIChatCompletionsModel("mock-1", client)
    responses = OpenAIResponsesModel("mock-1", client)

    exported = Exported()
    set_trace_processors([exported])
    expert = Agent(name="expert", instructions="You know the weather.", model=chat)
    host = Agent(
        name="host",
        instructions="You ask the expert.",
        model=chat,
        tools=[expert.as_tool("ask_expert", "Ask somebody who knows.")],
    )
    await Runner.run(host, "Weather in Paris?", run_config=RunConfig(workflow_name="ask", group_id="conversation-1"))
    front = Agent(name="front", instructions="You hand over.", model=chat, handoffs=[expert])
    await Runner.run(front, "Weather in Rome?", run_config=RunConfig(workflow_name="hand over"))
    exported.write("agents.jsonl")

    exported = Exported()
    set_trace_processors([exported])
    checker = Agent(name="checker", instructions="You check.", model=chat)

    async def check(context: Any, agent: Any, given: Any) -> GuardrailFunctionOutput:
        found = await Runner.run(checker, given, context=context.context)
        return GuardrailFunctionOutput(output_info=found.final_output, tripwire_triggered=False)

    guarded = Agent(
        name="guarded",
        instructions="You are guarded.",
        model=chat,
        tools=[get_weather],
        input_guardrails=[InputGuardrail(guardrail_function=check)],
    )
    await Runner.run(guarded, "Weather in Paris?", run_config=RunConfig(workflow_name="guarded"))
    with contextlib.suppress(MaxTurnsExceeded):
        await Runner.run(guarded, "Weather?", max_turns=1, run_config=RunConfig(workflow_name="too long"))
    exported.write("guardrail.jsonl")

    for name, with_responses in (("responses.jsonl", False), ("responses_with_content.jsonl", True)):
        exported = Exported(with_responses=with_responses)
        set_trace_processors([exported])
        agent = Agent(name="weather", instructions="You are a weather agent.", model=responses, tools=[get_weather])
        await Runner.run(agent, "Weather in Paris?", run_config=RunConfig(workflow_name="responses"))
        exported.write(name)


asyncio.run(main())
