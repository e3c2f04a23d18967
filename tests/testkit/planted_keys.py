"""Every place in which a key may come in: each has its own key, and all keys are alike, so one search finds any.

A place that authenticates, or whose name says that a key stands there, gets a key that looks like none that anybody
issues. All other places get one that is spelled as issuers spell theirs, or the call's own bearer.
"""

import json
import re
import types
from collections.abc import Iterator
from typing import Any, Union, get_args, get_origin

import msgspec

from lake.live.proxy.sessions import EndRequest
from lake.records import EpisodeRecord, ScoreRecord, SpanRecord, StepRecord

MARK = "Zq7Kd93Lm2Px"
BEARER = f"own0bearer17{MARK}"
"""The call's own, which is repeated in other places."""
_MARKED = re.compile(r"sk-\d{3,5}Ab4C|q\d{3,5}w7Kd4r|own0bearer|Zq7Kd93Lm")
_FIXED = frozenset(
    ("status", "relation", "parent_episode_id", "root_episode_id", "response_id", "source_format", "source_uri")
)
"""Fields whose values are of a closed set, or ids of the lake."""
HEADERS = [
    *("api-key", "x-api-key", "x-goog-api-key", "Ocp-Apim-Subscription-Key", "X-Functions-Key", "X-PAT", "X-JWT"),
    *("X-Access-Token", "X-Access", "X-Access-Id", "X-Session", "X-Session-Token", "X-Session-Key", "X-Auth-Token"),
    *("X-Acme-Auth", "X-CSRF-Token", "X-Amz-Security-Token", "CF-Access-Client-Id", "CF-Access-Client-Secret", "X-Foo"),
    *("X-Vault-Token", "Private-Token", "X-Gitlab-Token", "X-Hub-Signature", "X-Webhook-Secret", "X-Credential"),
    *("DD-API-KEY", "X-Honeycomb-Team", "Helicone-Auth", "X-Portkey-Api-Key", "Langfuse-Public-Key"),
]
QUERIES = ["key", "api-key", "api_key", "access_token", "token", "sig", "signature", "code", "auth", "X-Amz-Credential"]
BODY_FIELDS = [
    *("api_key", "api_keys", "apiKey", "private_key", "bearer", "connection_string", "connectionString", "password"),
    *(
        "client_secret",
        "access_token",
        "refresh_token",
        "session_token",
        "authorization",
        "azure_ad_token",
        "credentials",
    ),
    *("aws_secret_access_key", "aws_session_token", "secret_key", "passphrase", "cookie", "account_key", "auth_token"),
    *(
        "vertex_credentials",
        "personal_access_token",
        "signing_key",
        "subscription_key",
        "x-api-key",
        "ANTHROPIC_API_KEY",
    ),
]
SETTING_FIELDS = ["key", "token", "jwt", "pat", "dsn", "secret", "auth", "user_key"]
"""Fields that hold a key if their value looks like one."""
APIS = ("chat/completions", "completions", "responses", "messages")


class PlantedKeys:
    """Keys by the place that each was put into."""

    def __init__(self) -> None:
        self.keys: dict[str, str] = {}

    def opaque(self, location: str) -> str:
        """A key for a place that authenticates."""
        return self._new(location, "q{number:03d}w7Kd4r" + MARK)

    def issued(self, location: str) -> str:
        """A key that is spelled as issuers spell theirs."""
        return self._new(location, "sk-{number:03d}Ab4Cd6E" + MARK)

    def _new(self, location: str, form: str) -> str:
        assert location not in self.keys, location
        self.keys[location] = form.format(number=len(self.keys))
        return self.keys[location]

    def readable(self, data: str) -> list[str]:
        """The places whose keys can be read in some text; those of keys that are cut too."""
        marked = set(_MARKED.findall(data))
        return sorted({self._find_location(key) for key in marked})

    def _find_location(self, key: str) -> str:
        return next(
            (location for location, full_key in self.keys.items() if full_key.startswith(key)), f"elsewhere: {key}"
        )


# ---------------------------------------------------------------- requests


def headers(places: PlantedKeys) -> dict[str, str]:
    """Headers of a request: all that authenticate, and some that no one knows."""
    headers_sent = {name: places.opaque(f"header {name}") for name in HEADERS}
    headers_sent |= {"Cookie": f"session={places.opaque('cookie')}; theme=dark", "Authorization": f"Bearer {BEARER}"}
    return headers_sent | {"Proxy-Authorization": f"Bearer {places.opaque('header Proxy-Authorization')}"}


def query(places: PlantedKeys) -> str:
    """Parameters that authenticate."""
    return "?" + "&".join(f"{name}={places.opaque(f'query {name}')}" for name in QUERIES)


def _settings(places: PlantedKeys, where: str) -> dict[str, Any]:
    """Fields of a body that hold keys, in every form that clients of vendors give them."""

    def new(name: str) -> str:
        return places.opaque(f"{where} {name}")

    settings: dict[str, Any] = {name: new(name) for name in BODY_FIELDS}
    settings["api_keys"] = [settings["api_keys"], new("api_keys[1]")]
    settings |= {
        "vendor": {name: new(f"vendor.{name}") for name in ("private_key", "key", "bearer", "token")},
        "extra_headers": {"X-Whatever": new("extra_headers")},
        "http_headers": [["X-Whatever", new("http_headers, pairs")]],
        "default_headers": [{"name": "X-Whatever", "value": new("default_headers, objects")}],
        "headers": [f"X-Whatever: {new('headers, lines')}"],
        "metadata": {"access_token": new("metadata.access_token")},
        "callback_url": f"https://me:{new('password of a URL')}@a.example/?token={new('token of a URL')}",
    }
    return settings


def _mcp(places: PlantedKeys, where: str) -> dict[str, Any]:
    def new(name: str) -> str:
        return places.opaque(f"{where} MCP {name}")

    return {
        "type": "mcp",
        "server_label": "mcp",
        "server_url": f"https://user:{new('password')}@mcp.example/sse?api_key={new('query')}",
        "authorization": new("authorization"),
        "headers": {"X-Mcp": new("headers")},
        "env": {"MCP_TOKEN": new("env token"), "GITHUB_PAT": new("env pat"), "PLAIN": new("env of any name")},
    }


def _azure(places: PlantedKeys) -> list[dict[str, Any]]:
    def new(name: str) -> str:
        return places.opaque(f"Azure data source {name}")

    authentication = {"type": "api_key", "key": new("authentication.key")}
    embedding = {"authentication": {"type": "api_key", "api_key": new("embedding key")}}
    parameters = {
        "endpoint": "https://search.example",
        "authentication": authentication,
        "connection_string": new("connection_string"),
        "embedding_dependency": embedding,
    }
    return [{"type": "azure_search", "parameters": parameters}]


def _request_body(places: PlantedKeys, where: str) -> dict[str, Any]:
    """What each API is asked, with a key in each text."""

    def new(name: str) -> str:
        return f"use {places.issued(f'{where} {name}')} now, and {BEARER}"

    if where == "completions":
        return {"prompt": new("prompt"), "suffix": new("suffix"), "stop": new("stop")}
    schema = {"type": "object", "properties": {"q": {"type": "string", "description": new("tool parameter")}}}
    function = {"name": "look", "description": new("tool description"), "parameters": schema}
    if where == "chat/completions":
        call = {
            "id": "c1",
            "type": "function",
            "function": {"name": "look", "arguments": json.dumps({"q": new("argument")})},
        }
        messages = [
            {"role": "system", "content": new("system message")},
            {"role": "user", "content": [{"type": "text", "text": new("part of a message")}]},
            {"role": "assistant", "content": new("assistant message"), "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": json.dumps({"out": "\n" + new("tool message")})},
        ]
        fields = {
            "stop": [new("stop")],
            "user": new("user"),
            "guided_regex": new("grammar"),
            "data_sources": _azure(places),
        }
        return {"messages": messages, "tools": [{"type": "function", "function": function}], **fields}
    if where == "responses":
        items = [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": new("input text")}]},
            {"type": "function_call", "call_id": "f1", "name": "look", "arguments": json.dumps({"q": new("argument")})},
            {"type": "function_call_output", "call_id": "f1", "output": new("output")},
        ]
        tools = [_mcp(places, where), {"type": "function", **function}]
        return {"input": items, "instructions": new("instructions"), "tools": tools}
    blocks = [{"type": "text", "text": new("text block")}]
    use = {"type": "tool_use", "id": "u1", "name": "look", "input": {"q": new("tool input")}}
    result = {"type": "tool_result", "tool_use_id": "u1", "content": new("tool result")}
    messages = [
        {"role": "user", "content": blocks},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    tool = {"name": "look", "description": function["description"], "input_schema": schema}
    server = {
        "type": "url",
        "url": "https://mcp.example",
        "name": "m",
        "authorization_token": places.opaque("MCP server"),
    }
    fields = {
        "max_tokens": 9,
        "tools": [tool],
        "mcp_servers": [server],
        "system": [{"type": "text", "text": new("system")}],
    }
    return {"messages": messages, **fields}


def requests(places: PlantedKeys) -> dict[str, dict[str, Any]]:
    """The body of a request to each API."""
    return {api: _request_body(places, api) | _settings(places, api) for api in APIS}


# ---------------------------------------------------------------- ends, records


def _is_text(kind: Any) -> bool:
    return kind is str or (get_origin(kind) in (Union, types.UnionType) and str in get_args(kind))


def _free(record: type[msgspec.Struct]) -> list[str]:
    """Fields of a record that take any text."""
    return [f.name for f in msgspec.structs.fields(record) if _is_text(f.type) and f.name not in _FIXED]


def _json(places: PlantedKeys, where: str) -> dict[str, Any]:
    """An object of settings with keys by name and by spelling."""
    settings: dict[str, Any] = {name: places.opaque(f"{where}.{name}") for name in BODY_FIELDS + SETTING_FIELDS}
    nested = {
        "headers": {"X-Any": places.opaque(f"{where}.headers")},
        "env": {"A_TOKEN": places.opaque(f"{where}.env")},
    }
    text = json.dumps({"api_key": places.opaque(f"{where}, JSON in a text")})
    return (
        settings
        | {"nested": [nested], "url": f"https://a.example/?api_key={places.opaque(f'{where}, URL')}"}
        | {
            "any": places.issued(f"{where}, any text"),
            "invocation_parameters": text,
        }
    )


def _message(places: PlantedKeys, where: str) -> dict[str, Any]:
    return {"role": "user", "content": f"it is {places.issued(where)}."}


def ending(places: PlantedKeys) -> dict[str, Any]:
    """The end of a rollout, with a key in each field, and the call's own bearer."""
    fields: dict[str, Any] = {name: f"{places.issued(f'end {name}')} {BEARER}" for name in _free(EndRequest)}
    score = {name: f"{places.issued(f'end score {name}')} {BEARER}" for name in _free(ScoreRecord)}
    return fields | {
        "ground_truth": {"answer": [places.issued("end ground_truth"), BEARER]},
        "final_observation": [_message(places, "end final_observation")],
        "scores": [score | {"value": 1.0, "metrics": {"why": places.issued("end score metrics"), "b": BEARER}}],
    }


def record(places: PlantedKeys, tokens: dict[str, Any]) -> dict[str, Any]:
    """An episode of our own JSONL, which has every field that any format can fill, with a key in each."""

    def filled(kind: type[msgspec.Struct], where: str) -> dict[str, Any]:
        return {name: places.issued(f"{where} {name}") for name in _free(kind)}

    call = {"function": {"name": "look", "arguments": json.dumps({"q": places.issued("step tool_calls")})}}
    step = filled(StepRecord, "step") | {
        "context": [_message(places, "step context")],
        "tool_calls": [call],
        "extra": _json(places, "step extra"),
        "tokens": tokens,
    }
    span = filled(SpanRecord, "span") | {"attributes": _json(places, "span attributes")}
    score = filled(ScoreRecord, "score") | {"value": 0.5, "metrics": _json(places, "score metrics")}
    private = f"-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0B\n{MARK}\n-----END PRIVATE KEY-----"
    return filled(EpisodeRecord, "episode") | {
        "steps": [step, {"state": None, "action": private, "tokens": tokens}],
        "initial_messages": [_message(places, "episode initial_messages")],
        "final_observation": [_message(places, "episode final_observation")],
        "ground_truth": {"answer": places.issued("episode ground_truth")},
        "tools": [{"type": "function", "function": {"name": places.issued("episode tools")}}],
        "sampling": _json(places, "episode sampling"),
        "extra": _json(places, "episode extra"),
        "spans": [span],
        "scores": [score],
    }


# ---------------------------------------------------------------- spans


def _attribute(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, list):
        return {"key": name, "value": {"arrayValue": {"values": [{"stringValue": item} for item in value]}}}
    if isinstance(value, dict):
        return {"key": name, "value": {"kvlistValue": {"values": [_attribute(*item) for item in value.items()]}}}
    return {"key": name, "value": {"stringValue": value}}


def _attributes(places: PlantedKeys, where: str) -> Iterator[dict[str, Any]]:
    def new(name: str) -> str:
        return places.opaque(f"{where} {name}")

    for header in HEADERS:
        yield _attribute(f"http.request.header.{header.lower()}", [new(f"header {header}")])
    for name in BODY_FIELDS:
        yield _attribute(f"app.{name}", new(name))
    arguments = [
        "run",
        "--api-key",
        new("flag"),
        f"--token={new('flag with =')}",
        "-H",
        f"Authorization: Bearer {new('-H')}",
    ]
    yield _attribute("process.command_args", arguments)
    yield _attribute("process.command_line", f"run --password {new('command line')}")
    yield _attribute("url.full", f"https://me:{new('URL password')}@a.example/?api_key={new('URL query')}")
    yield _attribute("http.urls", [f"https://a.example/?access_token={new('URL in an array')}"])
    yield _attribute("error.message", f"401: api_key={new('error.message')}")
    yield _attribute("llm.invocation_parameters", json.dumps({"model": "m", "api_key": new("invocation parameters")}))
    yield _attribute("app.nested", {"inner": {"api_key": new("nested attribute")}})
    for name in ("server.address", "gen_ai.input.messages", "input.value", "any.other"):
        yield _attribute(name, f"{places.issued(f'{where} {name}')} {BEARER}")


def spans(places: PlantedKeys, where: str) -> dict[str, Any]:
    """An export of one trace in OTLP JSON, with a key in each field."""

    def new(name: str) -> str:
        return f"{places.issued(f'{where} {name}')} {BEARER}"

    messages = [{"role": "user", "parts": [{"type": "text", "content": new("text of a message")}]}]
    answer = [{"role": "assistant", "parts": [{"type": "text", "content": new("answer")}]}]
    call = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m", "gen_ai.output.messages": json.dumps(answer)}
    call |= {"gen_ai.input.messages": json.dumps(messages)}
    rest = [attribute for attribute in _attributes(places, where) if attribute["key"] not in call]
    span = {
        "traceId": f"{len(places.keys):032x}",
        "spanId": "00000000000000a1",
        "name": new("name of a span"),
        "traceState": f"vendor={places.issued(f'{where} traceState')}",
        "startTimeUnixNano": "1790000000000000000",
        "endTimeUnixNano": "1790000001000000000",
        "attributes": [_attribute(*item) for item in call.items()] + rest,
        "events": [{"name": new("name of an event"), "attributes": [_attribute("a", new("attribute of an event"))]}],
        "links": [{"traceId": "0" * 31 + "2", "spanId": "0" * 15 + "2", "attributes": [_attribute("a", new("link"))]}],
        "status": {"code": 2, "message": f"api_key={places.opaque(f'{where} status')}"},
    }
    scope = {"name": new("name of a scope"), "attributes": [_attribute("a", new("attribute of a scope"))]}
    resource = {"attributes": [_attribute("service.name", new("resource")), _attribute("api_key", new("resource key"))]}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [{"scope": scope, "spans": [span]}]}]}
