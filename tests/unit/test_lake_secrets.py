"""Secrets in settings and texts: what can be recognised goes, no matter where it stands, and nothing else does."""

import json
import logging
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lake
import lake.live.spool
from lake.live.frames import (
    BeginFrame,
    EndFrame,
    EpisodeFrame,
    RejectFrame,
    ScoreFrame,
    SpanFrame,
    StepFrame,
    ToolFrame,
    TraceFrame,
    encode,
)
from lake.records import Reject
from lake.secrets import (
    REDACTED,
    TOKENS_SPELL_KEY,
    Secrets,
    is_secret_name,
    redact,
    remove_keys,
)
from lake.write.rows import remove_table_keys as remove_frame_keys
from testkit import planted_keys

SECRET = "aB3dE5fG7hJ9kL1mN3pQ"
SENTENCES = [
    "Authorization: Bearer {}",
    "authorization={}",
    "{{'Authorization': 'Bearer {}', 'Accept': '*/*'}}",
    '{{"api_key": "{}"}}',
    '{{"api-key":"{}", "n": 1}}',
    "Headers([('host', 'a'), ('authorization', 'Basic {}')])",
    "[(b'x-api-key', b'{}'), (b'accept', b'*/*')]",
    "Incorrect API key provided: sk-{}. You can find your API key in your account.",
    "Incorrect API key provided: sk-proj-{}",
    "curl -H 'x-api-key: {}' failed",
    "OPENAI_API_KEY={} is not valid",
    "AWS_SECRET_ACCESS_KEY={}",
    "password: {}",
    "token hf_aBcDeFgHiJkLmNoP and Bearer {}",
    "Cookie: a=b; session={}",
    "{{'set-cookie': 'session={}; Path=/'}}",
    "cannot connect to https://user:{}@example.org/v1",
    "cannot connect to postgres://{}@example.org",
    "404 for url 'https://example.org/v1/models?key={}&alt=json'",
    "https://example.org/o?a=1&X-Amz-Signature={}",
    "ghp_{}",
    "AKIA{} is no key",
    "eyJhbGciOiJI.{}.x-y_z",
]
HARMLESS = [
    "ValueError: the task-12345678 was not found at risk-assessment",
    "Basic understanding of authorization is missing",
    "Unexpected token: } at 12, max_tokens=4096, top_k: 5",
    "see https://example.org/a?page=2&q=user@example.org",
    "mail to user@example.org: the bearer of this letter",
    "a key: value pair, and the secret of success",
    "KeyError: 'api_key'",
    'File "/home/me/agent.py", line 3, in <module>',
]


@pytest.mark.parametrize("sentence", SENTENCES)
def test_a_secret_is_not_in_the_text(sentence: str) -> None:
    redacted = redact(sentence.format(SECRET))
    assert REDACTED in redacted
    assert SECRET not in redacted


@given(st.sampled_from(SENTENCES), st.text(max_size=20), st.text(max_size=20))
def test_a_secret_is_not_in_the_text_whatever_stands_around_it(sentence: str, before: str, after: str) -> None:
    """A word that is cut off from its neighbours: letters before `sk-` make it another word."""
    assert SECRET not in redact(f"{before} {sentence.format(SECRET)} {after}")


@pytest.mark.parametrize("sentence", HARMLESS)
def test_a_text_without_secrets_stays_as_it_is(sentence: str) -> None:
    assert redact(sentence) == sentence


@given(st.lists(st.sampled_from([*SENTENCES, *HARMLESS]), max_size=4))
def test_what_is_redacted_stays_as_it_is(sentences: list[str]) -> None:
    once = redact("\n".join(sentence.format(SECRET) if "{}" in sentence else sentence for sentence in sentences))
    assert redact(once) == once


def test_settings_lose_their_secrets_at_any_depth() -> None:
    settings = {"model": "gpt", "api_key": "a", "clients": [{"OPENAI_API_KEY": "b", "base": {"Authorization": "c"}}]}
    assert remove_keys(settings) == {"model": "gpt", "clients": [{"base": {}}]}
    spans = {"http.request.header.authorization": "d", "llm.api_key": "e", "http.request.header.accept": "text"}
    assert remove_keys(spans) == {"http.request.header.accept": "text"}


@pytest.mark.parametrize("piece", ["api_key", "Bearer ", "://", "sk-", "authorization: ", "eyJ", "?key=", "cookie="])
def test_long_texts_take_no_long_time(piece: str) -> None:
    """Of patterns that go back and forth so many characters would take half an hour, and the test would be killed."""
    redact(piece * (200_000 // len(piece)))


# ---------------------------------------------------------------- what comes in


def one_by_one() -> list[dict[str, str]]:
    """Settings with a single key each, so that no other one leads there."""
    looks = "q001w7Kd4rZq7Kd93Lm"
    headers = [f"http.request.header.{name.lower()}" for name in planted_keys.HEADERS]
    return [{name: looks} for name in (*planted_keys.BODY_FIELDS, *planted_keys.SETTING_FIELDS, *headers)]


def test_a_field_of_settings_is_told_by_its_name_alone_also_in_columns() -> None:
    settings = one_by_one()
    assert [fields for fields in settings if remove_keys(fields) != {}] == []
    # A row whose texts are short, and the same behind so many that the engine looks.
    for padding in (0, 3000):
        rows = [json.dumps(fields) for fields in settings] + ["x" * 100] * padding
        frame = pl.DataFrame({"attributes": rows})
        attributes = [
            remove_frame_keys("spans", frame[row : row + 1])["attributes"][0]
            for row in range(len(settings) * (not padding))
        ]
        attributes = attributes or remove_frame_keys("spans", frame)["attributes"][: len(settings)].to_list()
        assert set(attributes) == {"{}"}


def test_a_secret_is_told_from_the_word_of_a_game() -> None:
    assert remove_keys({"secret": "crane", "client": {"app.secret": "hunter2-hunter"}}) == {
        "secret": "crane",
        "client": {},
    }
    assert [
        name for name in ("secret", "api_key", "http.request.header.x-pat", "key", "seed") if is_secret_name(name)
    ] == [
        *("secret", "api_key", "http.request.header.x-pat"),
    ]


@pytest.mark.parametrize("field", [*planted_keys.BODY_FIELDS, *planted_keys.SETTING_FIELDS])
def test_a_field_of_a_request_is_looked_for_elsewhere(field: str) -> None:
    secrets = Secrets()
    key = "opaque-words-17-x"
    assert secrets.remove_key_fields({"model": "m", "vendor": {field: key}}) == {"model": "m", "vendor": {}}
    assert secrets.remove_keys({"messages": [{"role": "user", "content": f"say {key}."}]}) == {
        "messages": [{"role": "user", "content": f"say {REDACTED}."}]
    }


ISSUED = [
    *(
        "sk-proj-0123456789abcdefghij",
        "sk-ant-api03-abcdefghij0123456789",
        "ghp_abcdefghijklmnop0123",
        "xoxb-1234567890-ab",
    ),
    *("github_pat_11ABCDEFG0123456789", "glpat-abcdefghij012345", "hf_abcdefghijklmnopqr", "gsk_abcdefghijklmnop0123"),
    *(
        "AKIAABCDEFGH12345678",
        "ASIAABCDEFGH12345678",
        "AIzaSyA0123456789abcdefghijklmnopqrstuv",
        "r" + "k_live_0123456789abcdef",
    ),
    *("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc-_1", "nvapi-abcdefghij0123456789", "tvly-abcdefghij012345"),
    *(
        "ya29.a0AfH6SMBxxxxxxxxxxxxxxxx",
        "lsv2_pt_0123456789abcdef",
        "dapi0123456789abcdef0123456789abcdef",
        "npm_" + "a1" * 18,
    ),
    "-----BEGIN RSA PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0B\nAQEFAASC\n-----END RSA PRIVATE KEY-----",
]
AROUND = [
    *(
        "AccountName=a;AccountKey={};EndpointSuffix=core",
        "Server=a;User Id=c;Password={};",
        "host=a user=b password={} x",
    ),
    *("postgres://bob:{}@db.example/x", "Authorization: Basic {}", "curl -H 'Authorization: Bearer {}'"),
]
TALK = [
    *(
        "pip install sk-learn-extra; risk-assessment-of-2023-tasks",
        "http://user:password@host and amqp://guest:guest@host",
    ),
    *("f'postgres://{user}:{password}@{host}'", "BasicAuth(username=user, password=password)", "AKIAIOSFODNN7EXAMPLE"),
    *(
        "my password: hunter2, and api_key=os.environ['KEY']",
        "sk-ecdsa-sha2-nistp256@openssh.com",
        "the bearer of this",
    ),
    *(
        "eyJhbGciOiJI is where it begins",
        "-----BEGIN PRIVATE KEY----- stands before one",
        "see https://a.b:80/x?token=1",
    ),
]


@pytest.mark.parametrize("key", [*ISSUED, *(form.format("q1w7Kd4rZq7Kd93LmA==") for form in AROUND)])
@pytest.mark.parametrize("before", ["", "say ", "\n", json.dumps("\n")[1:-1]])
def test_a_key_that_is_spelled_as_one_goes_from_what_is_said(key: str, before: str) -> None:
    """In a text, in JSON inside a text, and in a column that the engine looks through."""
    secret = "q1w7Kd4rZq7Kd93LmA" if "q1w7" in key else key[:25]
    texts = [f"{before}{key} now", json.dumps({"cmd": f"{before}{key}"})]
    for text in texts:
        assert secret not in remove_keys(text, "content")
        steps = pl.DataFrame({"action": [text, *["x" * 100] * 3000]})
        assert secret not in remove_frame_keys("steps", steps)["action"][0]


@pytest.mark.parametrize("text", TALK)
def test_what_is_said_and_is_no_key_stays(text: str) -> None:
    messages = [{"role": "user", "content": text, "password": "p4ssw0rd-of-a-game"}]
    assert remove_keys(messages, "context") is messages
    frame = pl.DataFrame({"action": [text], "state": ["x" * 300_000]})
    assert remove_frame_keys("steps", frame)["action"].to_list() == [text]


def test_tokens_that_spell_a_key_go_with_those_that_extend_them(tmp_path: Path) -> None:
    def step(action: str, prefix: int | None) -> dict[str, Any]:
        tokens = {"context_ids": [1], "action_ids": [2, 3], "prefix_step_index": prefix}
        return {"state": "s", "action": action, "completion_tokens": 2, "tokens": tokens, "extra": {"id": 1}}

    steps_given = [("a", None), (ISSUED[0], 0), ("c", 1), ("d", 2), ("e", 0), ("f", None)]
    steps = [step(*fields) for fields in steps_given]
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps({"task_id": "t", "steps": steps}) + "\n")
    lk = lake.open(tmp_path / "lake", create=True)
    assert lk.ingest(path).new == 1
    with lake.recorder(tmp_path / "lake", run="live", spool=tmp_path / "spool") as recorder:
        recorder.record(msgspec.convert({"task_id": "t", "steps": steps}, lake.EpisodeRecord))
    rows = lk.sql("SELECT run_id, step_index, action, extra, completion_tokens FROM steps ORDER BY 1, 2").to_dicts()
    token_rows = lk.sql("SELECT run_id, step_index FROM tokens ORDER BY 1, 2").rows()
    for run in ("live", "records"):
        assert [step for of, step in token_rows if of == run] == [0, 4, 5]
        mine = [row for row in rows if row["run_id"] == run]
        assert [row["action"] for row in mine] == ["a", REDACTED, "c", "d", "e", "f"]
        assert [row["completion_tokens"] for row in mine] == [2] * 6
        assert [json.loads(row["extra"]).get("tokens_left_out") for row in mine] == [
            None,
            *[TOKENS_SPELL_KEY] * 3,
            None,
            None,
        ]


RECORD = lake.EpisodeRecord(task_id="t", steps=[], error=ISSUED[0])
SPAN = lake.SpanRecord(trace_id="t", span_id="s", kind="call", name=ISSUED[0], error=f"api_key={SECRET}")


@pytest.mark.parametrize(
    "frame",
    [
        BeginFrame(episode=RECORD),
        StepFrame(index=0, step=lake.StepRecord(state=ISSUED[0], action="a", extra={"api_key": SECRET})),
        ToolFrame(number=0, name="look", arguments={"q": ISSUED[0]}, error=f"api_key={SECRET}"),
        SpanFrame(span=SPAN),
        ScoreFrame(
            score=lake.ScoreRecord(scorer="s", value=1.0, reason=f"Bearer {SECRET}", metrics={"api_key": SECRET})
        ),
        EndFrame(error=f"api_key={SECRET}", ground_truth=[ISSUED[0]]),
        TraceFrame(
            document={"resourceSpans": [{"attributes": [{"key": "api_key", "value": {"stringValue": SECRET}}]}]}
        ),
        EpisodeFrame(episode=RECORD),
        RejectFrame(
            reject=Reject(position=0, reason="invalid", message=ISSUED[0], raw=json.dumps({"api_key": SECRET}))
        ),
    ],
    ids=lambda frame: type(frame).__name__,
)
def test_no_frame_is_put_into_the_spool_with_a_key(frame: Any) -> None:
    payload = encode(bytes(16), 0, frame)
    assert SECRET.encode() not in payload
    assert ISSUED[0].encode() not in payload


def test_the_log_holds_no_key(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("trajlake")
    log.warning("refused: %s", f"api_key={SECRET}", exc_info=ValueError(f"no access with {ISSUED[0]}"))
    assert SECRET not in caplog.text
    assert ISSUED[0] not in caplog.text
    assert REDACTED in caplog.text


def injected(value: Any, places: planted_keys.PlantedKeys, where: str) -> Any:
    """A document with a key in every text of several words, and one in every object, by its name."""
    if isinstance(value, dict):
        return {name: injected(item, places, f"{where}.{name}") for name, item in value.items()}
    if isinstance(value, list):
        return [injected(item, places, f"{where}[{number}]") for number, item in enumerate(value)]
    return f"{value} {places.issued(where)}" if isinstance(value, str) and " " in value else value


def test_no_format_brings_a_key_in(tmp_path: Path) -> None:
    """Each published example of a format, with a key in every text of several words."""
    places = planted_keys.PlantedKeys()
    golden = Path(__file__).parents[1] / "golden" / "formats"
    for path in [
        document_path
        for document_path in sorted(golden.rglob("*.json*"))
        if document_path.suffix in (".json", ".jsonl")
    ]:
        target = tmp_path / "in" / path.relative_to(golden)
        target.parent.mkdir(parents=True, exist_ok=True)
        texts = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        name = str(path.relative_to(golden))
        documents = [injected(json.loads(line), places, f"{name}:{number}") for number, line in enumerate(texts)]
        target.write_text("\n".join(json.dumps(document, ensure_ascii=False) for document in documents) + "\n")
    lk = lake.open(tmp_path / "lake", create=True)
    lk.ingest(tmp_path / "in")
    tables = ("episodes", "steps", "spans", "scores", "rejects")
    cells = {name: lk.sql(f"SELECT * FROM {name}").to_dicts() for name in tables}
    texts = {name: places.readable(json.dumps(rows, default=str)) for name, rows in cells.items()}
    assert {name: where for name, where in texts.items() if where} == {}
    assert len(cells["steps"]) > 50
    assert len(places.keys) > 600
