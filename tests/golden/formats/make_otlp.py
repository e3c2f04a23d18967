"""Writes tests/golden/formats/otlp/*: spans of real instrumentations, in the ways in which spans become JSON.

python3 -m venv /tmp/env-otlp && /tmp/env-otlp/bin/pip install opentelemetry-sdk==1.45.2 \
    opentelemetry-exporter-otlp-proto-common==1.45.2 'pydantic-ai-slim[openai]==2.68.0' langgraph==1.2.22 \
    langchain-openai==1.7.3 openinference-instrumentation-langchain==0.1.80 \
    langchain opentelemetry-instrumentation-langchain==0.62.4 langfuse==5.0.4
/tmp/env-otlp/bin/python tests/golden/formats/make_otlp.py

Two more, each in its own environment next to opentelemetry-sdk and opentelemetry-exporter-otlp-proto-common:
opentelemetry-instrumentation-openai==0.40.14 openai==1.109.1 (make_otlp.py traceloop_old), and
opentelemetry-instrumentation-openai-v2==2.2b0 openai==1.109.1 wrapt==1.17.3 (make_otlp.py official).
"""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from mock_openai import serve
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator

OUT = Path(__file__).parent / "otlp"
BEGIN = 1767225600 * 10**9
"""What the first span of a file is shifted to: 2026-01-01."""


class Counted(IdGenerator):
    """Ids that are the same whenever the script runs."""

    def __init__(self, first: int) -> None:
        self.trace, self.span = (first << 96) + 1, (first << 48) + 1

    def generate_trace_id(self) -> int:
        self.trace += 1
        return self.trace

    def generate_span_id(self) -> int:
        self.span += 1
        return self.span


class Kept:
    """A tracer provider whose spans stay in memory."""

    def __init__(self, first: int) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(
            resource=Resource({"service.name": "weather"}), id_generator=Counted(first), shutdown_on_exit=False
        )
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def otlp(self) -> Any:
        """The spans as protobuf's own JSON: ids in base64, kinds by name."""
        return shifted(MessageToDict(encode_spans(self.exporter.get_finished_spans())))


def shifted(value: Any) -> Any:
    """The same with its times moved."""
    times = [int(span[key]) for span in spans(value) for key in span if key.endswith("UnixNano")]
    less = min(times) - BEGIN
    for span in spans(value):
        for holder in (span, *span.get("events", ())):
            for key in holder:
                if key.endswith("UnixNano"):
                    holder[key] = str(int(holder[key]) - less)
            for pair in holder["attributes"] if "name" in holder and "attributes" in holder else ():
                if pair["key"] == "exception.stacktrace":
                    pair["value"] = {"stringValue": "Traceback ..."}
    return value


def spans(value: Any) -> list[Any]:
    """The spans of a document."""
    return [s for resource in value["resourceSpans"] for scope in resource["scopeSpans"] for s in scope["spans"]]


def hexed(value: Any) -> Any:
    """The same as OTLP's JSON wants it: ids in hex, kinds and codes as numbers."""
    from base64 import b64decode

    for span in spans(value):
        for holder in (span, *span.get("links", ())):
            for key in ("traceId", "spanId", "parentSpanId"):
                if key in holder:
                    holder[key] = b64decode(holder[key]).hex()
        span["kind"] = {"SPAN_KIND_INTERNAL": 1, "SPAN_KIND_CLIENT": 3}[span["kind"]]
        if "code" in span["status"]:
            span["status"]["code"] = {"STATUS_CODE_OK": 1, "STATUS_CODE_ERROR": 2}[span["status"]["code"]]
    return value


def write(name: str, *values: Any) -> None:
    """One value a line."""
    (OUT / name).write_text("".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values), "utf-8")


def pydantic_ai(url: str) -> None:
    """An agent whose tool asks another agent, and whose model fails once; JSON lines, one batch of spans each."""
    from pydantic_ai import Agent, ModelRetry
    from pydantic_ai.models.instrumented import InstrumentationSettings
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    kept = Kept(1)
    settings = InstrumentationSettings(tracer_provider=kept.provider)
    try:
        from pydantic_ai import capabilities

        extra: dict[str, Any] = {"capabilities": [capabilities.Instrumentation(settings=settings)]}
    except (ImportError, AttributeError):
        extra = {"instrument": settings}
    model = OpenAIChatModel("mock-1", provider=OpenAIProvider(base_url=url, api_key="none"))
    expert = Agent(model, name="expert", instructions="You know the weather.", **extra)
    agent = Agent(model, name="host", instructions="You ask the expert.", **extra)

    @agent.tool_plain
    async def ask_expert(question: str) -> str:
        """Ask someone who knows."""
        return (await expert.run(question)).output

    @expert.tool_plain(retries=2)
    def get_weather(city: str) -> str:
        """The weather of a city."""
        tried.append(city)
        if len(tried) == 1:
            raise ModelRetry("say the country too")
        return f"22C in {city}"

    tried: list[str] = []
    agent.run_sync("Weather in Paris?")
    document = hexed(kept.otlp())
    (resource,) = document["resourceSpans"]
    write(
        "pydantic_ai.jsonl",
        *(
            {"resourceSpans": [{**resource, "scopeSpans": [{**scope, "spans": [span]}]}]}
            for scope in resource["scopeSpans"]
            for span in scope["spans"]
        ),
    )


def langgraph(url: str, name: str, instrumentor: Any, first: int) -> Kept:
    """A ready-made agent with one tool, twice: once with a tool and once without."""
    from langchain.agents import create_agent
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    kept = Kept(first)
    instrumentor.instrument(tracer_provider=kept.provider, skip_dep_check=True)

    @tool
    def get_weather(city: str) -> str:
        """The weather of a city."""
        return f"22C in {city}"

    model = ChatOpenAI(model="mock-1", base_url=url, api_key="none", temperature=0)
    agent = create_agent(model, [get_weather], system_prompt="You are a weather agent.", name="weather")
    agent.invoke({"messages": [{"role": "user", "content": "Weather in Paris?"}]}, {"configurable": {"thread_id": "7"}})
    instrumentor.uninstrument()
    return kept


def chat(url: str, kept: Kept, instrumentor: Any) -> None:
    """A client that asks twice, around a tool."""
    from openai import OpenAI

    instrumentor.instrument(tracer_provider=kept.provider, skip_dep_check=True)
    client = OpenAI(base_url=url, api_key="none")
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": schema}}]
    messages: list[Any] = [
        {"role": "system", "content": "You are a weather agent."},
        {"role": "user", "content": "Weather in Paris?"},
    ]
    with kept.provider.get_tracer("app").start_as_current_span("run"):
        first = client.chat.completions.create(model="mock-1", messages=messages, tools=tools, temperature=0.5)
        messages.append(first.choices[0].message.model_dump(exclude_none=True))
        messages.append(
            {"role": "tool", "tool_call_id": first.choices[0].message.tool_calls[0].id, "content": "22C in Paris"}
        )
        client.chat.completions.create(model="mock-1", messages=messages, tools=tools)


def traceloop_old(url: str) -> None:
    """Numbered attributes."""
    from opentelemetry.instrumentation.openai import OpenAIInstrumentor

    kept = Kept(5)
    chat(url, kept, OpenAIInstrumentor())
    write("traceloop_0.40.json", hexed(kept.otlp()))


def official(url: str) -> None:
    """Messages as log records, in their own lines."""
    import os

    os.environ["OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"] = "true"
    from opentelemetry import _logs
    from opentelemetry.exporter.otlp.proto.common._log_encoder import encode_logs
    from opentelemetry.instrumentation.openai_v2 import OpenAIInstrumentor
    from opentelemetry.sdk._logs import LoggerProvider
    from opentelemetry.sdk._logs import export as logs

    in_memory = getattr(logs, "InMemoryLogRecordExporter", None) or logs.InMemoryLogExporter
    exporter = in_memory()
    provider = LoggerProvider(shutdown_on_exit=False)
    provider.add_log_record_processor(logs.SimpleLogRecordProcessor(exporter))
    _logs.set_logger_provider(provider)
    kept = Kept(6)
    chat(url, kept, OpenAIInstrumentor())
    logged = MessageToDict(encode_logs(exporter.get_finished_logs()))
    for scope in logged["resourceLogs"][0]["scopeLogs"]:
        for record in scope["logRecords"]:
            record["observedTimeUnixNano"] = str(BEGIN)
    write("openai_v2.jsonl", logged, kept.otlp())


def langfuse_sdk() -> None:
    """Spans of the langfuse SDK, written by hand as its users do, as the SDK of OpenTelemetry prints spans."""
    from langfuse import Langfuse

    kept = Kept(4)
    client = Langfuse(
        public_key="pk", secret_key="sk", host="http://127.0.0.1:1", tracer_provider=kept.provider, timeout=1
    )
    asked = [{"role": "system", "content": "You are a weather agent."}, {"role": "user", "content": "Weather?"}]
    with client.start_as_current_observation(name="weather", as_type="agent", input="Weather?") as agent:
        with client.start_as_current_observation(
            name="call", as_type="generation", model="mock-1", input=asked, model_parameters={"temperature": 0.5}
        ) as call:
            call.update(output={"role": "assistant", "content": "Sunny."}, usage_details={"input": 11, "output": 7})
        agent.update(output="Sunny.")
    less: int | None = None
    lines = []
    finished = sorted(kept.exporter.get_finished_spans(), key=lambda span: span.start_time or 0)
    for span in finished:
        less = less if less is not None else (span.start_time or 0) - BEGIN
        span._start_time, span._end_time = (span.start_time or 0) - less, (span.end_time or 0) - less
        lines.append(json.loads(span.to_json()))
    write("langfuse_sdk.jsonl", *lines)


def main() -> None:
    """Write all of them, or those that are named."""
    OUT.mkdir(exist_ok=True)
    url = serve()
    wanted = sys.argv[1:] or ["pydantic_ai", "openinference", "traceloop", "langfuse"]
    if "pydantic_ai" in wanted:
        pydantic_ai(url)
    if "openinference" in wanted:
        from openinference.instrumentation.langchain import LangChainInstrumentor

        kept = langgraph(url, "openinference", LangChainInstrumentor(), 2)
        write("openinference_langgraph.json", {"batches": kept.otlp()["resourceSpans"]})
    if "traceloop" in wanted:
        from opentelemetry.instrumentation.langchain import LangchainInstrumentor

        kept = langgraph(url, "traceloop", LangchainInstrumentor(), 3)
        document = json.dumps({"trace": hexed(kept.otlp())}, ensure_ascii=False)
        (OUT / "traceloop_langgraph.json.gz").write_bytes(gzip.compress(document.encode(), mtime=0))
    if "langfuse" in wanted:
        langfuse_sdk()
    if "traceloop_old" in wanted:
        traceloop_old(url)
    if "official" in wanted:
        official(url)


main()
