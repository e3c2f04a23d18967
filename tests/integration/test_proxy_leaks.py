"""No key is stored: agents send one in every place, engines repeat them, and every byte that is kept is searched.

Files are searched as they are, and every cell of every table too, as files of tables are compressed. What people and
models say is recorded, so a canary in a message shows that the search finds things.
"""

import base64
import json
from collections.abc import Callable, Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

import polars as pl
from google.protobuf.json_format import ParseDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

import lake
from lake import Lake
from lake.read import episode_text
from lake.tables import TABLES
from testkit import planted_keys
from testkit.engine_server import Engine, engine_server
from testkit.planted_keys import PlantedKeys
from testkit.proxy_process import Proxy, proxy, proxy_here

CANARY = "canary-a-user-typed-this-4711"
TOKEN = "proxy-token-aa11bb22cc33"
PASSWORD = "upstream-password-dd44ee55"
BASIC_PASSWORD = "basic-password-ff66"
HEADERS = {
    "Authorization": "Bearer sk-authorization-0123456789",
    "Proxy-Authorization": "Bearer proxy-authorization-0123",
    "x-api-key": "anthropic-api-key-0123",
    "api-key": "azure/api+key==0123",
    "x-goog-api-key": "google-api-key-0123",
    "Cookie": "session=cookie-value-0123; theme=dark",
    "X-Acme-Auth": "custom-auth-0123",
    "X-Amz-Security-Token": "amazon-security-token-0123",
    "Ocp-Apim-Subscription-Key": "subscription-key-0123",
}
QUERY = "?key=query-key-01234567&api-key=query-api-key-0123&sig=signature-01234567"
ISSUED = "sk-of-another-client-0123"
BODY = {
    "api_key": "body-api-key-0123",
    "extra_headers": {"X-Whatever": "extra-header-0123"},
    "metadata": {"access_token": "metadata-token-0123"},
    "mcp_servers": [{"type": "url", "url": "https://mcp.example/sse", "authorization_token": "mcp-servers-token-0123"}],
}
MCP = {
    "type": "mcp",
    "server_label": "mcp",
    "server_url": "https://user:mcp-url-password-0123@mcp.example/sse?api_key=mcp-url-key-0123",
    "authorization": "mcp-authorization-0123",
    "headers": {"X-Mcp": "mcp-header-0123"},
}
SECRETS = [
    TOKEN,
    ISSUED,
    PASSWORD,
    BASIC_PASSWORD,
    "sk-authorization-0123456789",
    "cookie-value-0123",
    *(value for name, value in HEADERS.items() if name not in ("Authorization", "Proxy-Authorization", "Cookie")),
    "proxy-authorization-0123",
    *(pair.partition("=")[2] for pair in QUERY[1:].split("&")),
    "body-api-key-0123",
    "extra-header-0123",
    "metadata-token-0123",
    "mcp-servers-token-0123",
    "mcp-url-password-0123",
    "mcp-url-key-0123",
    "mcp-authorization-0123",
    "mcp-header-0123",
]
APIS: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "user", "content": CANARY}]},
    "completions": {"prompt": CANARY},
    "responses": {"input": CANARY, "tools": [MCP]},
    "messages": {"messages": [{"role": "user", "content": CANARY}], "max_tokens": 9},
}


def spellings(secret: str) -> list[bytes]:
    """A key as it is, in JSON, in base64 and cut short."""
    plain = secret.encode()
    return [plain[:-2], secret.replace("/", r"\/").encode()[:-2], base64.b64encode(plain)]


def searched(data: bytes) -> list[str]:
    return [secret for secret in SECRETS if any(spelling in data for spelling in spellings(secret))]


def kept(folder: Path) -> Iterator[tuple[Path, bytes]]:
    for file in folder.rglob("*"):
        if file.is_file():
            yield file, file.read_bytes()


def call_in_every_way(at: Proxy, headers: dict[str, str]) -> None:
    """All APIs; engines that answer, repeat what they saw, refuse, and break off with an error event."""
    broken = []
    for api, prompt in APIS.items():
        for model in ("policy", "echo", "echo-401", "echo-event", "cut-2"):
            for stream in (False, True):
                if not stream and model in ("echo-event", "cut-2"):
                    continue
                path = f"/ep/{model}-{len(headers)}/v1/{api}{QUERY}"
                data = json.dumps({"model": model, "stream": stream, **prompt, **BODY}).encode()
                try:
                    status, _, answer = at.ask("POST", path, data, **headers)
                except HTTPException:
                    broken.append(model)
                    continue
                assert status == (401 if model == "echo-401" else 200), (api, model, answer)
                if model in ("echo", "echo-401") and "Authorization" in headers:
                    assert headers["Authorization"].partition(" ")[2].encode() in answer, (
                        "the client sees what was said"
                    )
    assert broken == ["cut-2"] * len(APIS)


def test_no_key_that_an_agent_or_its_upstream_sends_is_kept(tmp_path: Path) -> None:
    engine = Engine()
    with engine_server(engine):
        upstream = engine.url.replace("://", f"://user:{PASSWORD}@")
        options = ("--upstream", upstream, "--set", "ask=always")
        with proxy(engine, tmp_path, *options, TRAJLAKE_RECORD_TOKEN=TOKEN) as at:
            ours = {"X-Trajlake-Token": TOKEN}
            call_in_every_way(at, HEADERS | ours)
            basic = base64.b64encode(f"me:{BASIC_PASSWORD}".encode()).decode()
            call_in_every_way(at, {"Authorization": f"Basic {basic}"} | ours)
            call_in_every_way(at, ours)  # with the upstream's own password
            headers_sent = [dict(call.headers) for call in engine.calls]
            for path in (f"/ep/{HEADERS['api-key'].replace('/', '%2F')}/v1/chat/completions", "/v1/chat/completions"):
                name = {"X-Session-ID": HEADERS["x-api-key"]} | HEADERS | ours
                status, _, payload = at.ask("POST", path, b"{}", **name)
                assert (status, b"is a key" in payload) == (400, True)
            end = {"error": f"failed with {HEADERS['api-key']}", "stop_reason": f"no access: {ISSUED}"}
            end["scores"] = [{"scorer": "judge", "value": None, "reason": ISSUED, "error": HEADERS["x-api-key"]}]
            assert at.ask("POST", "/ep/policy-1/v1/end", json.dumps(end).encode(), **HEADERS | ours)[0] == 200
            at.ask("POST", "/v1/traces", b'{"no": "otlp"', **HEADERS | ours | {"Content-Type": "application/json"})
            with at.connect() as raw:
                raw.sendall(b"GET /v1/models HTTP/1.1\r\nAuthorization: Bearer sk-authorization-0123456789\x00\r\n\r\n")
                assert b" 400 " in raw.recv(100)
            in_spool = {file: data for file, data in kept(tmp_path / "spool") if CANARY.encode() in data}
            assert in_spool
            assert {str(file): readable for file, data in kept(tmp_path) if (readable := searched(data))} == {}
            printed = at.end()
    assert len(headers_sent) > 20
    assert not [name for headers in headers_sent for name in headers if name.lower().startswith("x-trajlake")]
    sent = [headers.get("Authorization", "") for headers in headers_sent]
    assert {value.partition(" ")[0] for value in sent} == {"Bearer", "Basic"}
    assert base64.b64encode(f"user:{PASSWORD}".encode()).decode() in sent[-1]
    assert {str(file): readable for file, data in kept(tmp_path) if (readable := searched(data))} == {}
    assert searched(printed.encode()) == []
    stored = lake.open(at.lake)
    cells = {
        name: json.dumps(stored.sql(f"SELECT * FROM {name}").to_dicts(), default=str).encode()
        for name in ("episodes", "steps", "spans", "tokens", "rejects", "scores", "jobs")
    }
    assert CANARY.encode() in cells["steps"]
    assert {name: readable for name, data in cells.items() if (readable := searched(data))} == {}
    assert b"[redacted]" in cells["steps"]
    assert b"[redacted]" in cells["spans"]
    # Tokens spell what was said: those of an answer that repeats a key are not kept.
    rows = stored.sql("SELECT context_ids, action_ids FROM tokens").to_dicts()
    spelled = [bytes(token - 3 for ids in row.values() for token in ids if token > 2) for row in rows]
    assert [text for text in spelled if CANARY.encode() in text]
    assert [readable for text in spelled if (readable := searched(text))] == []


def test_without_its_token_a_proxy_answers_nobody(tmp_path: Path) -> None:
    with engine_server() as engine, proxy_here(engine, tmp_path, token=TOKEN) as at:
        for token_headers in ({}, {"X-Trajlake-Token": "wrong"}, {"X-Trajlake-Token": "pröxy"}):
            for method, path in (("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("POST", "/ep/x/v1/end")):
                status, _, payload = at.ask(method, path, b"{}", **token_headers)
                assert (status, b"X-Trajlake-Token" in payload) == (401, True), (token_headers, path)
        assert engine.asked == []
        assert at.ask("GET", "/v1/models", **{"X-Trajlake-Token": TOKEN, "Host": "agents.example"})[0] == 200


def test_a_key_in_any_place_is_readable_nowhere(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    places = PlantedKeys()
    bodies, sent, query = planted_keys.requests(places), planted_keys.headers(places), planted_keys.query(places)
    engine = Engine()
    (tmp_path / "out").mkdir()
    with engine_server(engine), proxy(engine, tmp_path, "--set", "ask=always") as at:
        for api, body in bodies.items():
            for model in ("policy", "echo", "echo-401"):
                for stream in (False, True):
                    data = json.dumps(body | {"model": model, "stream": stream}).encode()
                    at.ask("POST", f"/ep/{model}/v1/{api}{query}", data, **sent)
        at.ask("POST", f"/ep/{places.issued('name of a rollout')}/v1/chat/completions", b"{}", **sent)
        assert at.ask("POST", "/ep/policy/v1/end", json.dumps(planted_keys.ending(places)).encode(), **sent)[0] == 200
        plain = planted_keys.spans(places, "OTLP JSON")
        packed = ParseDict(_packed_ids(planted_keys.spans(places, "OTLP protobuf")), ExportTraceServiceRequest())
        exports = (("json", json.dumps(plain).encode()), ("x-protobuf", packed.SerializeToString()))
        for kind, data in exports:
            status, _, payload = at.ask("POST", "/v1/traces", data, **sent | {"Content-Type": f"application/{kind}"})
            assert status == 200, payload
        in_spool = {
            str(file): found for file, data in kept(tmp_path / "spool") if (found := places.readable(text(data)))
        }
        assert [file for file, data in kept(tmp_path / "spool") if b"[redacted]" in data]
        printed = at.end()
    stored = lake.open(at.lake)
    tokens = {"context_ids": [5, 6], "action_ids": [7]}
    long = [{"role": "user", "content": f"{'x' * 70_000} {places.issued('long text, which is moved out')}"}]
    blob = {"task_id": "long", "steps": [{"state": None, "action": "a"}], "initial_messages": long}
    lines = [json.dumps(planted_keys.record(places, tokens)), json.dumps(blob)]
    lines.append(json.dumps({"task_id": 1, "steps": [], "api_key": places.opaque("reject, by its name")}))
    lines.append(f"{{ no JSON, api_key={places.opaque('reject that is no JSON')} {places.issued('reject, any text')}")
    file = tmp_path / "out" / "episodes.jsonl"
    file.write_text("\n".join(lines) + "\n")
    report = stored.ingest(file)
    assert (report.new, report.rejected) == (2, 2)
    again = stored.ingest(file)
    assert (again.new, again.present) == (0, 2)
    stored.ingest_frame(pl.DataFrame({"task_id": ["f"], "action": [places.issued("frame")], "state": ["s"]}))
    with (
        lake.recorder(at.lake, run="here", spool=tmp_path / "spool") as recorder,
        recorder.episode("t", environment=places.issued("recorder environment")) as episode,
    ):
        with episode.step(state=places.issued("recorder state")) as step:
            step.action(places.issued("recorder action"), prompt_ids=[1], action_ids=[2])
        episode.score("s", 1.0, reason=places.issued("recorder score"))
    file.unlink()
    cells = {name: stored.sql(f"SELECT * FROM {name}") for name in TABLES}
    readable = {name: places.readable(json.dumps(rows.to_dicts(), default=str)) for name, rows in cells.items()}
    files = {str(file): found for file, data in kept(tmp_path) if (found := places.readable(text(data)))}
    shown = [
        places.readable("\n".join(line for _, line in lines_of(stored, key))) for key in cells["episodes"]["episode_id"]
    ]
    record_property("places", len(places.keys))
    found = {
        "spool": in_spool,
        "files": files,
        "printed": places.readable(printed),
        "report": places.readable(str(report)),
    }
    assert {name: where for name, where in (readable | found).items() if where} == {}
    assert [where for where in shown if where] == []
    assert len(places.keys) == 667
    assert {"episodes", "steps", "spans", "scores", "rejects", "jobs", "blobs"} <= {
        name for name, rows in cells.items() if rows.height
    }
    assert "[redacted]" in json.dumps(cells["steps"].to_dicts(), default=str)
    assert cells["tokens"].filter(pl.col("run_id") != "live").is_empty()
    ids = [[token - 3 for token in row] for name in ("context_ids", "action_ids") for row in cells["tokens"][name]]
    spelled = [bytes(token for token in row if 0 <= token < 256).decode(errors="replace") for row in ids]
    assert [places.readable(words) for words in spelled if places.readable(words)] == []


def text(data: bytes) -> str:
    return data.decode("latin-1")


def lines_of(stored: Lake, episode_id: int) -> list[tuple[Any, str]]:
    return list(episode_text.format_episode(episode_text.read_episode(stored.snapshot(), episode_id)))


def _packed_ids(document: dict[str, Any]) -> dict[str, Any]:
    """Ids as the JSON of protobuf has them: OTLP JSON alone spells them in hexadecimal."""
    for resource in document["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                for holder in (span, *span["links"]):
                    for name in ("traceId", "spanId"):
                        holder[name] = base64.b64encode(bytes.fromhex(holder[name])).decode()
    return document
